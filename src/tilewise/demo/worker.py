"""One system in a process of its own, so that its peak memory is its own: ``python -m tilewise.demo.worker SYSTEM``.

Requests and replies are lines of JSON on standard input and output. A request names a file of token ids, how many of
them to use, and where to save the encoder's output; the reply has seconds, peak memory and the tokens generated.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, TextIO

import numpy as np
import torch

from . import memory
from .model import load_model

__all__ = ["SYSTEMS", "serve"]

SYSTEMS = ("transformers", "tilewise")
"""The model as transformers runs it by default, and patched."""

_WARM_UP = 64


def serve(system: str, impl: str, requests: TextIO, replies: TextIO) -> None:
    """Load the model, say so, and answer requests until they end."""
    start = time.perf_counter()
    model = load_model()
    if system == "tilewise":
        from .. import patch

        patch(model, impl=impl)
    ids = torch.arange(2, 2 + _WARM_UP)[None]
    _run(model, ids, new_tokens=2)
    memory.release()
    loaded = memory.resident()

    def reply(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=replies, flush=True)

    reply({"ready": time.perf_counter() - start, "attention": model.encoder.config._attn_implementation,
           "threads": torch.get_num_threads(), "memory_method": memory.METHOD})  # fmt: skip
    for line in requests:
        request = json.loads(line)
        ids = torch.from_numpy(np.load(request["ids"]))[None]
        ids = torch.cat((ids[:, : request["n"] - 1], ids[:, -1:]), dim=1)
        memory.release()
        memory.reset_peak()
        try:
            hidden, tokens, encode, generate = _run(model, ids, request["new_tokens"])
        except (MemoryError, RuntimeError) as error:
            # torch raises RuntimeError where the allocator gets no memory.
            reply({"error": f"{type(error).__name__}: {error}"})
            continue
        peak = memory.peak() - loaded
        np.save(request["hidden"], hidden.numpy())
        reply({"encode_seconds": encode, "generate_seconds": generate, "peak_mib": peak / 2**20, "tokens": tokens})


@torch.inference_mode()
def _run(model, ids: torch.Tensor, new_tokens: int) -> tuple[torch.Tensor, list[int], float, float]:
    """The encoder's output, the tokens generated greedily, and the seconds of either."""
    attention_mask = torch.ones_like(ids)
    start = time.perf_counter()
    encoded = model.encoder(input_ids=ids, attention_mask=attention_mask)
    middle = time.perf_counter()
    tokens = model.generate(
        encoder_outputs=encoded, attention_mask=attention_mask, max_new_tokens=new_tokens, do_sample=False
    )
    end = time.perf_counter()
    return encoded.last_hidden_state[0], tokens[0].tolist(), middle - start, end - middle


if __name__ == "__main__":
    # Whatever a library prints must not end up among the replies.
    out, sys.stdout = sys.stdout, sys.stderr
    serve(sys.argv[1], sys.argv[2], sys.stdin, out)
