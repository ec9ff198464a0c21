"""Backward passes that cannot be differentiated again, and which of autograd's passes is running."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["current_pass", "once"]

current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that is running; every call of `backward` or `grad` has another."""


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError(
            "gradients of shared reads cannot be differentiated again; those of tilewise.depth.reference can"
        )


def once(backward: Callable) -> Callable:
    """For a Function's backward: with create_graph=True its gradients refuse to be differentiated again.

    PyTorch's `once_differentiable` costs the host 4 us a call without create_graph too, and lets gradients pass as
    constants where no gradient that enters requires one: always, where they arrive beside autograd.
    """

    @functools.wraps(backward)
    def run(ctx, *grads):
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            made = backward(ctx, *grads)
        return tuple(x if x is None else _Refused.apply(x.detach().requires_grad_()) for x in made)

    return run
