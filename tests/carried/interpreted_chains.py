"""Blocks in fp32 under Triton's interpreter with products added as a GPU adds them. Prints plan, and the worst error of
its outputs as a multiple of what is allowed."""

import pytest
import torch
from carried_cases import CarriedConfig, dense, inputs, promoted, run
from interpreted_bf16 import quicken

from chained_dots import chained_dots
from tilewise.testing import error_budget

if __name__ == "__main__":
    quicken()
    chained_dots(pytest.MonkeyPatch())
    for plan in ("recompute", "stored", "mixed"):
        torch.manual_seed(0)
        config = CarriedConfig(impl="triton", plan=plan)
        groups = inputs(T=96, H=4, Hk=2, d=128, dtype=torch.float32)
        with torch.no_grad():
            found = run(config, *groups), dense(config, *groups), dense(config, *promoted(groups))
        budgets = [error_budget(f"O{i}", *tensors) for i, tensors in enumerate(zip(*found, strict=True))]
        print(f"{plan} {max(b.error / b.allowed for b in budgets):.2f}", flush=True)
        assert all(b.ok for b in budgets), budgets
