"""fp32 kernels with the products of a dot added as a GPU adds them; run by `test_depth_kernels.py` in its own process.

Triton gives an fp32 dot to fused multiply-adds, each product added to the sum so far, sum of the tile before included.
The interpreter's matrix product is more exact, so it is replaced here.
"""

import depth_dense as dense
import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from quick_interpreter import quicken
from tilewise import depth
from tilewise.depth import reference as R
from tilewise.depth.triton import config, launch
from tilewise.testing import assert_within_budget

quicken()


def chain(self, a, b, c, precision, imprecise):
    assert precision.name == "IEEE"
    total = c.data
    for k in range(a.data.shape[1]):
        # A product of two fp32 numbers is exact in fp64.
        product = a.data[:, k : k + 1].astype(np.float64) * b.data[k]
        total = (total + product).astype(np.float32)
    return interpreter.TensorHandle(total, c.dtype.scalar)


@pytest.fixture(autouse=True)
def gpu_dot(monkeypatch):
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", chain)


@pytest.fixture(params=["few", "many"])
def tokens(request, monkeypatch):
    monkeypatch.setattr(config, "few", lambda T: request.param == "few")


@pytest.mark.usefixtures("tokens")
@pytest.mark.parametrize("completed", [False, True])
def test_scores_of_sharp_queries(completed):
    """Scores of up to 100 and more, where their rounding decides between sources."""
    T, S, d = 32, 16, 4096
    q, u, p = 0.5 * torch.randn(S, d), torch.randn(T, d), torch.randn(T, d)
    v = u + p if completed else u
    found = launch.complete(u, p, q, 1e-6)[1] if completed else launch.scores([v], q, 1e-6)[0][:, 0]
    low = torch.einsum("td,sd->st", torch.nn.functional.rms_norm(v, (d,), None, 1e-6), q)
    exact = torch.einsum("td,sd->st", torch.nn.functional.rms_norm(v.double(), (d,), None, 1e-6), q.double())
    # The budget's rounding term, two units of the largest score, is as large as the error of a chain over few columns.
    assert (found - exact).norm() <= 2 * (low - exact).norm()
    assert_within_budget("scores", found, low, exact)


def test_gradients_of_phase1():
    T, S, n, d = 8, 3, 3, 4096
    base = torch.randn(T, d)
    leaves = [torch.randn(S, d) / d**0.5, *(base + 0.1 * torch.randn(T, d) for _ in range(n))]
    seed = torch.randn(S, T, d)

    def run(f, dtype, **how):
        xs = [x.to(dtype).requires_grad_() for x in leaves]
        return torch.autograd.grad(f(xs[1:], xs[0], **how)[0], xs, seed.to(dtype))

    found = run(depth.phase1, torch.float32, impl="triton")
    for name, *values in zip(
        "qabc", found, run(dense.phase1, torch.float32), run(R.phase1, torch.float64), strict=True
    ):
        assert_within_budget(f"d{name}", *values)
