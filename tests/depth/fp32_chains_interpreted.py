"""fp32 kernels with the products of a dot added as a GPU adds them; run by `test_depth_kernels.py`, by itself."""

import depth_dense as dense
import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from chained_dots import chained_dots
from quick_interpreter import quicken
from tilewise import depth
from tilewise.depth import reference as R
from tilewise.depth.triton import config, launch
from tilewise.depth.triton.phase1_bwd import weights_kernel
from tilewise.testing import assert_within_budget

quicken()


@pytest.fixture(autouse=True)
def gpu_dot(monkeypatch):
    chained_dots(monkeypatch)


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


@pytest.mark.usefixtures("tokens")
def test_a_source_that_is_alone_has_no_gradient_of_scores():
    """Its weight is 1 whatever its score; of 1e-7 for a query Adam would make whole steps."""
    T, S, d = 40, 3, 64
    v, w = torch.randn(T, d), torch.randn(S, d, requires_grad=True)
    o1, lse = depth.phase1([v], w, impl="triton")
    assert not torch.autograd.grad(o1, w, torch.randn(S, T, d), retain_graph=True)[0].any()
    assert torch.autograd.grad(lse, w, torch.randn(S, T))[0].any()
    assert not torch.autograd.grad(depth.mix([v], w[0], impl="triton"), w, torch.randn(T, d))[0].any()


def test_a_source_that_is_alone_has_weight_one_whatever_its_lse_rounds_to(monkeypatch):
    """A GPU forms lse from scores that it has not rounded, so that exp(s - lse) is 1 but for a unit or two, and divides
    by a product with the reciprocal."""

    def by_reciprocal(self, x, y):
        return interpreter.TensorHandle(x.data * (np.float32(1) / y.data), x.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fdiv", by_reciprocal)
    S, T = 4, 32
    s, g, r = torch.randn(S, 1, T), 80 * torch.randn(S, 1, T), torch.rand(1, T)
    lse, a, c = (s[:, 0] * (1 + 1.2e-7 * torch.randn(S, T))).contiguous(), torch.empty(S, 1, T), torch.empty(1, T)
    weights_kernel[(1,)](s, lse, lse, r, g, a, c, T, 1, S, DLSE=False, BS=S, BT=T, D=64)
    torch.testing.assert_close(a, torch.ones_like(a))
    assert not g.any()
    assert not c.any()


def test_the_gradient_of_lse_is_not_rounded_to_that_of_outputs():
    """Of a source that is alone <dO, v - o> is 0, whatever <dO, v> is."""
    S, T = 4, 32
    s, g, dlse = torch.randn(S, 1, T), 80 * torch.randn(S, 1, T), 0.1 * torch.randn(S, T)
    a, c, r, found = torch.empty(S, 1, T), torch.empty(1, T), torch.ones(1, T), g.clone()
    weights_kernel[(1,)](s, s[:, 0].contiguous(), dlse, r, found, a, c, T, 1, S, DLSE=True, BS=S, BT=T, D=64)
    assert torch.equal(found[:, 0], dlse)


def test_all_of_a_gradient_goes_to_a_source_that_is_alone(monkeypatch):
    """A GPU takes the product in a score into its difference from the largest one, which then is not 0."""
    exp = interpreter.InterpreterBuilder.create_exp

    def of_a_residue(self, x):
        return exp(self, interpreter.TensorHandle(x.data + np.float32(1e-6) * (x.data == 0), x.dtype.scalar))

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_exp", of_a_residue)
    T, d = 4, 64
    v, w, seed = torch.randn(T, d, requires_grad=True), torch.randn(d, requires_grad=True), torch.randn(T, d)
    dv, dw = torch.autograd.grad(depth.mix([v], w, impl="triton"), (v, w), seed)
    assert torch.equal(dv, seed)
    assert not dw.any()


@pytest.mark.usefixtures("tokens")
def test_a_large_source_of_little_weight_takes_no_digits_of_the_others():
    """Its <dO, v> is large and its weight nothing, so what is subtracted from the others' must not pass through it."""
    T, S, n, d = 8, 2, 4, 64
    v = [torch.randn(T, d) for _ in range(n)]
    w = torch.randn(S, d) / d**0.5
    # A thousand times as large, and a score of about -25 with every query.
    v[0] = 1000 * (0.3 * v[0] - 9 * (w / w.norm(dim=1, keepdim=True)).sum(0))
    seed = torch.randn(S, T, d)

    def run(f, dtype, **how):
        xs = [x.to(dtype).requires_grad_() for x in (w, *v)]
        return torch.autograd.grad(f(xs[1:], xs[0], **how)[0], xs, seed.to(dtype))

    values = (
        run(depth.phase1, torch.float32, impl="triton"),
        run(dense.phase1, torch.float32),
        run(R.phase1, torch.float64),
    )
    for name, *each in zip("qabcd", *values, strict=True):
        assert_within_budget(f"d{name}", *each)


@pytest.mark.usefixtures("tokens")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_score_that_is_infinite_is_no_weight(n):
    v = [torch.arange(1.0, 9.0).repeat(2, 1) for _ in range(n)]
    with np.errstate(all="ignore"):
        assert depth.mix(v, torch.full((8,), torch.inf), impl="triton").isnan().all()


@pytest.mark.usefixtures("tokens")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_normalised_away(bad):
    T, d = 3, 24
    u, p, o1 = (torch.randn(T, d) for _ in range(3))
    o1[1, 3], w = bad, torch.ones(d, requires_grad=True)
    given = u, p, o1, torch.randn(T), torch.randn(d), None, w
    with np.errstate(all="ignore"):
        found, exact = (depth.phase2(*given, impl=impl)[1] for impl in ("triton", "reference"))
        assert torch.equal(found.isfinite(), exact.isfinite())
        assert not torch.autograd.grad(found, w, torch.ones_like(found))[0].isfinite().any()
