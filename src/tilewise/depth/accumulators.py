"""What the readers of a source share in a backward pass: one wide accumulator, added to in place beside autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from tilewise.once import current_pass, graph_wanted, once

__all__ = ["Kept", "Passes", "Share", "Sum", "accumulators", "flattened", "shaped"]

_queue_callback: Callable[[Callable], None] = torch.autograd.Variable._execution_engine.queue_callback


def flattened(x: Tensor | None) -> Tensor | None:
    """`[..., d]` as `[T, d]`; a view is made only where the shapes differ."""
    return x if x is None or x.ndim == 2 else x.reshape(-1, x.shape[-1])


def shaped(x: Tensor | None, shape: torch.Size) -> Tensor | None:
    return x if x is None or len(shape) == 2 else x.reshape(shape)


class Kept:
    """What one backward pass keeps in one place, and tensors that this depends on beside autograd."""

    __slots__ = ("__weakref__", "touched", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.touched: list[Tensor] = []

    def take(self) -> Any:
        """The value, which is let go of here: a pass keeps its `Kept` until it ends."""
        value, self.value = self.value, None
        return value

    def touch(self, *tensors: Tensor | None) -> None:
        """Note what the value depends on, in a pass with create_graph: autograd sees nothing of it."""
        self.touched += [x for x in tensors if x is not None]


class Passes:
    """A :class:`Kept` for each backward pass that is running: a pass may begin within another one, and share nodes."""

    def __init__(self) -> None:
        self._kept: WeakValueDictionary[int, Kept] = WeakValueDictionary()
        self._pass, self._last = -1, None

    def __len__(self) -> int:
        return len(self._kept)

    def here(self) -> Kept:
        """That of the pass which runs now."""
        now = current_pass()
        # A read asks each time: the dictionary costs three times this.
        if now == self._pass and (kept := self._last()) is not None:
            return kept
        kept = self._kept.get(now)
        if kept is None:
            kept = self._kept[now] = Kept()
            # Its owner: the engine lets go of what was queued when the pass has ended, also by an error.
            _queue_callback(lambda: kept)
        self._pass, self._last = now, ref(kept)
        return kept


class Sum:
    """The flat data of a source and, during a backward pass, its accumulator."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.passes = Passes()


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
        kept = ctx.shared.passes.here()
        if graph_wanted(ctx):
            ctx.others, kept.touched = tuple(kept.touched), []
        acc = kept.take()
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
    kept = [x.passes.here() for x in sums]
    missing = [k for k in kept if k.value is None]
    fresh = len(missing) == len(sums)
    if missing:
        flat, make = sums[0].flat, torch.empty if fresh else torch.zeros
        dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
        # Rows of one tensor reach the kernels without a table of addresses. The newest source is the first to be done:
        # its accumulator is released alone, before the backward's memory is at its peak.
        rows = make((len(missing) - 1, *flat.shape), dtype=dtype, device=flat.device).unbind(0)
        for k, row in zip(missing, (*rows, make(flat.shape, dtype=dtype, device=flat.device)), strict=True):
            k.value = row
    return [k.value for k in kept], fresh
