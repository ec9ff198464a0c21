"""What the Triton implementation declines, and how it says so."""

import re
from dataclasses import replace

import pytest
import torch
from relative_checks import call_of

import tilewise
from tilewise import triton
from tilewise.testing import Sizes
from tilewise.triton.plan import Layout

SMALL = Sizes(1, 2, 2, 20, 20, 16, 16)


def call(case="shaw", dtype=torch.float16, **changes):
    return replace(call_of(case, SMALL, "none", dtype, "cpu"), **changes)


def test_nothing_against_any_case_in_half_precision():
    for case in ("none", "t5", "shaw", "txl", "deberta", "everything"):
        assert triton.why_not(call(case)) == []


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: call(dtype=torch.float64), "q is torch.float64; the kernels take"),
        (lambda: call(ports=call("t5").ports * 9), "9 terms add to the score; the kernels take at most 8"),
        (lambda: call("vits", ports=call("vits").ports[1:] * 3), "3 terms add to the output"),
        (lambda: call("none", q=torch.zeros(1, 2, 20, 300).half()), "q has width 300; the kernels take at most 256"),
    ],
)
def test_reasons(made, said):
    (reason,) = triton.why_not(made())
    assert re.search(said, reason)


def test_linear_memory_is_never_replaced_silently():
    shared = call("txl", options=tilewise.Options(skew="shared"))
    assert triton.why_not(shared)[0].startswith("options.skew is 'shared', but the GPU is not a Hopper")
    assert triton.why_not(call("txl", options=tilewise.Options(skew="memory", projections="keep"))) == []
    o, lse = torch.empty(1, 2, 20, 16).half(), torch.empty(1, 2, 20)
    with pytest.raises(tilewise.Unsupported, match=r"options.skew='shared' cannot run this call: .*; 'memory' runs it"):
        triton.forward(shared, o, lse)


def test_the_forward_in_shared_memory_has_nothing_to_keep():
    both = call("txl", options=tilewise.Options(skew="shared", projections="keep"))
    (reason,) = triton.why_not(both)
    assert "no projection is made that options.projections could 'keep'" in reason


def test_what_is_kept():
    def kept(case, N, projections="auto", skew="auto", H=2):
        sizes = Sizes(2, H, H, N, N, 64, 64, None, published=True)
        made = call_of(case, sizes, "none", torch.float16, "meta", options=tilewise.Options(skew, projections))
        return triton.kept(made)[0]

    # Automatically where it is no more than q, k, v and O: 4 · 64 columns a row.
    rows = 2 * 2 * 128
    assert 128 * rows <= kept("wav2vec2_bert", 128, skew="memory") <= 256 * rows
    assert kept("wav2vec2_bert", 1024) == 0
    assert kept("wav2vec2_bert", 1024, "keep") > 0
    assert kept("wav2vec2_bert", 128, "recompute") == 0
    assert kept("t5", 128, "keep") == 0
    # Linear memory comes first.
    assert kept("txl", 128) == kept("txl", 128, skew="shared") == 0
    assert kept("wav2vec2_bert", 128) == kept("deberta", 128) == 0
    # Other terms beside them are not skewed in registers.
    assert kept("vits", 128) > 0
    assert kept("txl", 1024, "keep") >= 2 * 2 * 1024 * 1024


@pytest.fixture
def torch_products():
    """PyTorch's own switch, put back afterwards."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    yield matmul
    matmul.fp32_precision = before


def test_fp32_products_follow_pytorch_unless_the_call_says_otherwise(torch_products):
    def precision(dtype=torch.float32, **options):
        return Layout(call(dtype=dtype, options=tilewise.Options(**options))).precision

    assert precision() == "ieee"
    assert precision(fp32="tf32") == "tf32"
    torch_products.fp32_precision = "tf32"
    assert precision() == "tf32"
    assert precision(fp32="ieee") == "ieee"
    # Half precision has one product: no second kernel for the same work.
    assert precision(torch.float16) == precision(torch.float16, fp32="tf32") == "ieee"
