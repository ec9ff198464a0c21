"""Triton implementation of :func:`tilewise.attention`: what it can run, its forward and its backward.

One tiled core (:mod:`.core`) serves every relative term; :mod:`.plan` lays a call out for it. Exact, deterministic (no
atomics: two calls agree bit for bit), 64-bit offsets; lengths, offsets and windows are run-time values.

Tile shapes change at a few lengths (:mod:`.config`). Between those, a mechanism's kernels are compiled at the first
length and, of the tile loops alone, once more at the first length whose keys fill their last block (of 64 or 128) where
those before did not, or the other way round: such calls need no mask of elements. Nothing is compiled at any further
length or offset. Strides of 2^31 elements and more, or that are no multiple of 16, are other types of argument, and
tables with rows 2^31 elements apart have kernels of their own.
"""

from __future__ import annotations

import torch

from ..call import Call
from .plan import MOST, Facts, Layout

__all__ = ["backward", "forward", "kept", "why_not"]

WIDEST = 256
"""The widest head: a tile holds whole rows."""


def why_not(call: Call) -> list[str]:
    """The reasons for which these kernels cannot run the call; empty if they can."""
    reasons = []
    q, v = call.q, call.v
    if q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) < (8, 0):
        reasons.append(
            f"the GPU is sm_{''.join(map(str, torch.cuda.get_device_capability(q.device)))}; expected sm_80 on"
        )
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(f"q is {q.dtype}; the kernels take float16, bfloat16 and float32")
    widths = {"q": q.shape[3], "v": v.shape[3]}
    widths.update(
        {f"the left factor of term {n}": p.table.shape[-1] for n, p in enumerate(call.ports) if p.kind == "query"}
    )
    for name, width in widths.items():
        if width > WIDEST:
            reasons.append(f"{name} has width {width}; the kernels take at most {WIDEST}")
    score = sum(p.kind != "value" for p in call.ports)
    if score > MOST:
        reasons.append(f"{score} terms add to the score; the kernels take at most {MOST}")
    if len(call.ports) - score > 2:
        reasons.append(f"{len(call.ports) - score} terms add to the output; the kernels take at most 2")
    if max(q.shape[2], call.k.shape[2]) + abs(call.offset) >= 2**29:
        reasons.append(f"the lengths {q.shape[2]} and {call.k.shape[2]} reach 2**29 positions")
    if call.options.skew == "shared":
        reasons += _unshared(call)
    return reasons


def _unshared(call: Call) -> list[str]:
    """Why the skew cannot be in shared memory."""
    from .passes import in_shared_memory

    if call.options.projections == "keep":
        return ["options.skew is 'shared', where no projection is made that options.projections could 'keep'"]
    if torch.compiler.is_compiling():
        # Where the tensors lie is known when the call runs, and checked there.
        return []
    return [f"options.skew is 'shared', but {reason}" for reason in in_shared_memory(Layout(call))]


def kept(call: Call) -> tuple[int, torch.dtype]:
    """(elements, dtype) of the projections that the forward keeps for the backward, as the call's options say."""
    facts, options = Facts(call), call.options
    linear = options.skew == "shared" or (
        options.skew == "auto" and options.projections == "auto" and facts.kind == "identity" and facts.limits.hopper
    )
    # The forward in linear memory makes no projection.
    return (0 if linear or call.k.shape[2] == 0 else facts.kept()), facts.zdtype


def forward(call: Call, o: torch.Tensor, lse: torch.Tensor, kept: torch.Tensor | None = None) -> None:
    """Write O and lse of the call; buffers may hold anything.

    Args:
        call, o, lse: the checked call and what to write.
        kept: room for the projections, of :func:`kept`'s size, for :func:`backward`; None where it makes its own.

    Raises:
        Unsupported: the call's options force what cannot run it.
    """
    from .passes import forward as run

    if call.k.shape[2] == 0:
        o.zero_()
        lse.fill_(float("-inf"))
        return
    with _device(call.q):
        run(call, o, lse, kept)


def backward(
    call: Call, do: torch.Tensor, dlse: torch.Tensor | None, o: torch.Tensor, lse: torch.Tensor, need: list[bool],
    grads: list[torch.Tensor], kept: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradients that `need` asks for (of q, k, v, then each port's tensors); other buffers stay untouched.

    `kept` is what the forward filled; it stays as it is.
    """
    from .gradients import backward as run

    if call.k.shape[2] == 0:
        for wanted, grad in zip(need, grads, strict=True):
            if wanted:
                grad.zero_()
        return
    with _device(call.q):
        run(call, do, dlse, o, lse, need, grads, kept)


def _device(q: torch.Tensor):
    return torch.cuda.device(q.device) if q.device.type == "cuda" else torch.no_grad()
