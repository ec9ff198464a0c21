"""Backward passes that cannot be differentiated again, and which of autograd's passes is running."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["current_pass", "graph_wanted", "once"]

current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that is running; every call of `backward` or `grad` has another."""


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient: Tensor, *inputs: Tensor) -> Tensor:
        # The inputs are there so that a gradient by one of them arrives here: else it "appears to not have been used".
        # No view: what accumulates beside autograd is added to in place later.
        return torch.ops.aten._unsafe_view(gradient, gradient.shape)

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError(
            "these gradients cannot be differentiated again: their backward has no gradient of its own; those of "
            "tilewise.depth.mix and carried_attention with impl='reference' can"
        )


class _Context:
    """A Function's ctx in a pass with create_graph.

    Its saved tensors are fetched once: inside a checkpoint a second time is an error. `others` are further tensors that
    its gradients depend on, beside autograd.
    """

    def __init__(self, ctx) -> None:
        self._ctx, self.saved_tensors, self.others = ctx, ctx.saved_tensors, ()

    def __getattr__(self, name: str):
        return getattr(self._ctx, name)


def graph_wanted(ctx) -> bool:
    """Whether a backward that :func:`once` wraps runs in a pass with create_graph."""
    return isinstance(ctx, _Context)


def once(backward: Callable) -> Callable:
    """For a Function's backward: with create_graph=True its gradients refuse to be differentiated again.

    PyTorch's `once_differentiable` costs the host 4 us a call without create_graph too, and lets gradients pass as
    constants where no gradient that enters requires one: those of a plain sum, and those that arrive beside autograd.
    """
    traced = once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx, *grads):
        if torch.compiler.is_compiling():
            return traced(ctx, *grads)
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        ctx = _Context(ctx)
        with torch.no_grad():
            made = backward(ctx, *grads)
        made = made if isinstance(made, tuple) else (made,)
        inputs = [x for x in (*ctx.saved_tensors, *grads, *ctx.others) if x is not None and x.requires_grad]
        return tuple(x if x is None else _Refused.apply(x.detach().requires_grad_(), *inputs) for x in made)

    return run
