"""Error budgets: how far a result may be from the truth, judged against PyTorch's own error in the same dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Budget", "assert_within_budget", "error_budget"]


@dataclass(frozen=True)
class Budget:
    """The verdict on one tensor. `error` and `allowed` are maximum absolute errors against the fp64 oracle.

    `relative` is ‖got − exact‖₂ / ‖exact‖₂. `ok` needs `error <= allowed` and the published rule: every element
    within 5 % or 0.03 of the oracle, or `relative` within 8 rounding units of the dtype.
    """

    name: str
    error: float
    allowed: float
    relative: float
    published: bool

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed and self.published


def error_budget(name: str, got: Tensor, low: Tensor, exact: Tensor, *, factor: float = 2.0) -> Budget:
    """Compare `got` with the fp64 oracle `exact`, allowing `factor` times the error of `low`, plus rounding.

    `low` is what dense PyTorch computes in the dtype under test, from the same inputs: inputs are made in that dtype
    and then promoted for the oracle, so their own quantisation counts for neither side. The rounding term is two
    rounding units at the tensor's largest magnitude: what a correct result may lose when it is stored.

    Raises:
        AssertionError: the shapes differ.
    """
    assert got.shape == exact.shape == low.shape, f"{name}: shapes {got.shape}, {low.shape}, {exact.shape} differ"
    if got.numel() == 0:
        return Budget(name, 0.0, 0.0, 0.0, True)
    unit = torch.finfo(got.dtype).eps
    got, low, exact = got.detach().double().cpu(), low.detach().double().cpu(), exact.detach().double().cpu()
    difference = (got - exact).abs()
    # A NaN must never pass: NaN comparisons are False, so `error <= allowed` fails by itself.
    error = difference.max().item()
    allowed = factor * (low - exact).abs().max().item() + 2 * unit * exact.abs().max().item()
    relative = ((got - exact).norm() / exact.norm().clamp_min(torch.finfo(torch.float64).tiny)).item()
    elementwise = bool((difference <= torch.clamp(0.05 * exact.abs(), min=0.03)).all())
    return Budget(name, error, allowed, relative, elementwise or relative <= 8 * unit)


def assert_within_budget(name: str, got: Tensor, low: Tensor, exact: Tensor, *, factor: float = 2.0) -> None:
    """Raise AssertionError with both errors when `got` misses its budget (see :func:`error_budget`)."""
    budget = error_budget(name, got, low, exact, factor=factor)
    assert budget.ok, (
        f"{budget.name}: max error {budget.error:.3e}, allowed {budget.allowed:.3e}; relative {budget.relative:.3e}, "
        f"published rule {'met' if budget.published else 'missed'}"
    )
