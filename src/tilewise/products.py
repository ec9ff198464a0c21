"""Products of two tensors that autocast does not lower, for the oracles."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["product"]


def product(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """``torch.einsum(equation, a, b)`` in the dtype of `a` and `b`, and so its gradients, also inside autocast.

    Args:
        equation: ``"…,…->…"``; every index of an operand is in the other one or in the result, so that the gradient of
            an operand is such a product too.
        a, b: of one dtype.

    Autocast would take products of fp32 in bf16, an error of 1 % of a score, and those of a backward pass that is
    called inside it as well, where turning it off in the forward pass alone does not help.
    """
    device, compiling = a.device.type, torch.compiler.is_compiling()
    # Dynamo of PyTorch 2.11 breaks the graph at the question what is available, and at a Function that has a jvp.
    known = device != "meta" if compiling else torch.amp.is_autocast_available(device)
    if not known or not torch.is_autocast_enabled(device):
        return torch.einsum(equation, a, b)
    return (_Product if compiling else _DualProduct).apply(equation, a, b)


class _Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(equation, a, b):
        with torch.autocast(a.device.type, enabled=False):
            return torch.einsum(equation, a, b)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.equation, a, b = inputs
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        of_a, of_b, of_result = ctx.equation.replace("->", ",").split(",")
        da = product(f"{of_result},{of_b}->{of_a}", grad, b) if ctx.needs_input_grad[1] else None
        db = product(f"{of_result},{of_a}->{of_b}", grad, a) if ctx.needs_input_grad[2] else None
        return None, da, db


class _DualProduct(_Product):
    """With a rule for forward mode."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        _Product.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def jvp(ctx, _, da, db):
        a, b = ctx.saved_tensors
        of_a = None if da is None else product(ctx.equation, da, b)
        of_b = None if db is None else product(ctx.equation, a, db)
        return of_a if of_b is None else of_b if of_a is None else of_a + of_b
