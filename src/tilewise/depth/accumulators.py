"""What the readers of a source share in a backward pass: one wide accumulator, added to in place beside autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.once import current_pass, graph_wanted, once

__all__ = ["Share", "Sum", "accumulators", "flattened", "shaped"]


def flattened(x: Tensor | None) -> Tensor | None:
    """`[..., d]` as `[T, d]`; a view is made only where the shapes differ."""
    return x if x is None or x.ndim == 2 else x.reshape(-1, x.shape[-1])


def shaped(x: Tensor | None, shape: torch.Size) -> Tensor | None:
    return x if x is None or len(shape) == 2 else x.reshape(shape)


class Sum:
    """The flat data of a source and, during a backward pass, its accumulator.

    A pass that asks for other gradients than the source's may leave one behind, which no later pass may add to.
    """

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.accumulator: Tensor | None = None
        self.owner = -1
        self.touched: list[Tensor] = []

    def renew(self) -> None:
        """Drop what another pass has left."""
        if self.owner != (now := current_pass()):
            self.accumulator, self.owner, self.touched = None, now, []

    def touch(self, *tensors: Tensor | None) -> None:
        """Note what the accumulator depends on, in a pass with create_graph: autograd sees nothing of it."""
        self.touched += [x for x in tensors if x is not None]


class Share(torch.autograd.Function):
    """Identity whose backward runs after all readers and delivers what they accumulated."""

    @staticmethod
    def forward(ctx, shared, value):
        ctx.set_materialize_grads(False)
        # Saved so that a change in place is noticed, and a second derivative refused.
        ctx.save_for_backward(value)
        ctx.shared = shared
        return value.view_as(value)

    @staticmethod
    @once
    def backward(ctx, grad):
        (value,) = ctx.saved_tensors
        ctx.shared.renew()
        if graph_wanted(ctx):
            ctx.others, ctx.shared.touched = tuple(ctx.shared.touched), []
        acc, ctx.shared.accumulator = ctx.shared.accumulator, None
        if acc is None:
            return None, grad
        if grad is not None:
            acc = acc.add_(grad.reshape(acc.shape))
        grad = acc.to(value.dtype)
        if grad is acc and acc.untyped_storage().nbytes() > acc.nbytes:
            # A row of the accumulators' tensor would keep all of them.
            grad = acc.clone()
        return None, shaped(grad, value.shape)


def accumulators(sums: Sequence[Sum]) -> tuple[list[Tensor], bool]:
    """(accumulators, fresh): fresh ones are unwritten and must be stored to, not added to."""
    for x in sums:
        x.renew()
    missing = [x for x in sums if x.accumulator is None]
    fresh = len(missing) == len(sums)
    if missing:
        flat, make = missing[0].flat, torch.empty if fresh else torch.zeros
        dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
        # Rows of one tensor reach the kernels without a table of addresses. The newest source is the first to be done:
        # its accumulator is released alone, before the backward's memory is at its peak.
        rows = make((len(missing) - 1, *flat.shape), dtype=dtype, device=flat.device).unbind(0)
        for x, row in zip(missing, (*rows, make(flat.shape, dtype=dtype, device=flat.device)), strict=True):
            x.accumulator = row
    return [x.accumulator for x in sums], fresh
