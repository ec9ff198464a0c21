"""Small tensors that many calls read, kept as long as a CUDA graph may read them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from threading import Lock

import torch

__all__ = ["cached"]


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def cached(most: int) -> Callable:
    """Keeps the `most` results that were used last, of a function whose last argument is the device of its tensors.

    A graph reads the addresses that it was captured with: what a capture takes from here is never dropped. What is made
    during a capture is the graph's own and filled by its replays, so no other call gets it.
    """

    def around(make: Callable) -> Callable:
        entries: OrderedDict[Hashable, object] = OrderedDict()
        captured: dict[Hashable, object] = {}
        # Backward passes come from autograd's own threads.
        lock = Lock()

        @wraps(make)
        def get(*key):
            capturing = _capturing(key[-1])
            with lock:
                if key in captured:
                    return captured[key]
                if key in entries:
                    entries.move_to_end(key)
                    if capturing:
                        captured[key] = entries[key]
                    return entries[key]
            value = make(*key)
            if not capturing:
                with lock:
                    entries[key] = value
                    if len(entries) > most:
                        entries.popitem(last=False)
            return value

        return get

    return around
