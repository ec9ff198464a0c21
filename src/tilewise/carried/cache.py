"""Keys and values between the steps of inference."""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import check_integer
from .checks import check_ranks
from .config import DTYPES

__all__ = ["KeyValueCache"]


class KeyValueCache:
    """Keys and values of all layers for up to `capacity` tokens; nothing else is kept between steps.

    Attributes:
        length: tokens in the cache.

    Raises:
        TypeError: a capacity that is no integer.
        ValueError: a capacity below 1.
    """

    FEW = 8
    """Up to this many new tokens a step carries dense rows of scores; above, packed tiles."""

    def __init__(self, capacity: int) -> None:
        capacity = check_integer("capacity", capacity)
        self.capacity, self.length, self._new = capacity, 0, 0
        self._entries: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys and values of a layer; returns all of its keys and values.

        Raises:
            TypeError: no tensors, or another dtype than before (outside autocast).
            ValueError: more tokens than fit, other sizes or another device than before, or a layer that was not there
                when the cache got its first tokens.
        """
        check_integer("layer", layer, 0)
        check_ranks(k=k, v=v)
        if k.shape[:3] != v.shape[:3]:
            raise ValueError(f"v has shape {tuple(v.shape)}; expected {(*k.shape[:3], v.shape[3])} to fit k")
        end = self.length + k.shape[2]
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.length} tokens, {k.shape[2]} are new; capacity is {self.capacity}")
        if layer not in self._entries:
            if self.length:
                raise ValueError(
                    f"layer is {layer}; expected one of {sorted(self._entries)}, of which the cache holds "
                    f"{self.length} tokens: it was filled by another model"
                )
            self._entries[layer] = tuple(t.new_zeros(*t.shape[:2], self.capacity, t.shape[3]) for t in (k, v))
        for name, buffer, part in zip("kv", self._entries[layer], (k, v), strict=True):
            _check(name, buffer, part)
        for buffer, part in zip(self._entries[layer], (k, v), strict=True):
            buffer[:, :, self.length : end] = part
        self._new = k.shape[2]
        return self.entry(layer)

    def entry(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, those of this step included.

        Raises:
            ValueError: a layer that the cache has no keys of.
        """
        if layer not in self._entries:
            raise ValueError(f"layer is {layer!r}; expected one of {sorted(self._entries)}, which the cache holds")
        k, v = self._entries[layer]
        end = self.length + self._new
        return k[:, :, :end], v[:, :, :end]

    def advance(self) -> None:
        """Close a step: its tokens now belong to the past."""
        self.length, self._new = self.length + self._new, 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(t.nbytes for pair in self._entries.values() for t in pair)


def _check(name: str, buffer: Tensor, part: Tensor) -> None:
    B, heads, _, d = buffer.shape
    expected = (B, heads, part.shape[2], d)
    if part.shape != expected:
        raise ValueError(f"{name} has shape {tuple(part.shape)}; expected {expected}, as in the cache")
    if part.device != buffer.device:
        raise ValueError(f"{name} is on {part.device}; expected {buffer.device}, where the cache is")
    # Autocast's products are of another dtype than those outside it, and attention takes both.
    if part.dtype != buffer.dtype and not (part.dtype in DTYPES and torch.is_autocast_enabled(part.device.type)):
        raise TypeError(f"{name} is {part.dtype}; expected {buffer.dtype}, as in the cache")
