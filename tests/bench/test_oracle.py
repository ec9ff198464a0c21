"""The benchmark's oracle and verdict: judged against the package's own reference and error budget."""

import pytest
import torch

from tilewise import Mask
from tilewise.bench.oracle import dense_attention, truth, verdict
from tilewise.bench.relative import CASES, RELATIVE
from tilewise.bench.runner import select
from tilewise.reference import attention_reference
from tilewise.terms import lower
from tilewise.testing import CASES as ALL
from tilewise.testing import Sizes, error_budget

ORACLE = {**CASES, "vits": ALL["vits"], "shaw, values": ALL["shaw"]}


@pytest.mark.parametrize("block", [2**20, 3 * 40, 23 * 23, 23 * 5], ids=["whole", "one row", "one head", "some rows"])
@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("name", ORACLE)
def test_oracle_is_the_reference(name, published, block):
    case, sizes = ORACLE[name], Sizes(B=2, H=3, Hk=3, Tq=23, Tk=23, d=8, d_v=8, published=published)
    x = case.inputs(sizes, torch.float64)
    upstream = torch.randn(2, 3, 23, 8, dtype=torch.float64)
    got = dense_attention(case, sizes, x, upstream, block)

    leaves = {n: t.requires_grad_() for n, t in x.items()}
    content, ports = lower(leaves["q"], case.build(leaves, sizes))
    o, _ = attention_reference(content, leaves["k"], leaves["v"], ports, Mask(), case.scale(sizes.d))
    grads = torch.autograd.grad(o, list(leaves.values()), upstream)
    torch.testing.assert_close(got["o"], o, rtol=1e-11, atol=1e-11)
    for n, g in zip(leaves, grads, strict=True):
        torch.testing.assert_close(got[f"d{n}"], g, rtol=1e-11, atol=1e-11)


def test_verdict_is_the_error_budget():
    exact = torch.randn(40, 7, dtype=torch.float64)
    for noise in (1e-4, 1e-3, 5e-3, 1e-1):
        low = (exact + 1e-3 * torch.randn_like(exact)).half()
        got = (exact + noise * torch.randn_like(exact)).half()
        budget = error_budget("x", got, low, exact)
        found = verdict(got, exact, (low.double() - exact).abs().max().item())
        assert found["error"] == budget.error
        assert found["allowed"] == pytest.approx(budget.allowed)
        assert found["relative"] == pytest.approx(budget.relative)
        assert (found["published"], found["budget"]) == (budget.published, budget.error <= budget.allowed)


def test_verdict_refuses_nan():
    exact = torch.ones(4, dtype=torch.float64)
    found = verdict(torch.tensor([1.0, 1.0, float("nan"), 1.0]), exact, 1.0)
    assert not found["published"]
    assert not found["budget"]


def test_truth_measures_the_low_error_in_the_dtype_of_the_inputs():
    (cell,) = select(
        "relative", "cpu", cases=["t5"], systems=["eager"], dtype="bfloat16", sizes={"n": [16], "tokens": [32]}
    )
    made = RELATIVE.truth(cell)
    assert set(made.exact) == set(made.low_error) == {"o", "dq", "dk", "dv", "dweight"}
    assert made.exact["o"].dtype == torch.float32
    assert 1e-4 < made.low_error["o"] < 1e-1
    x, upstream = RELATIVE.inputs(cell)
    assert x["q"].dtype == torch.bfloat16
    wide = {n: t.float() for n, t in x.items()}
    assert truth(CASES["t5"], RELATIVE.call(cell), wide, upstream.float()).low_error["o"] < 1e-5
