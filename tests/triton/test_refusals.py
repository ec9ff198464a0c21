"""What the Triton implementation declines, and how it says so."""

import re
from dataclasses import replace

import pytest
import torch
from relative_checks import call_of

from tilewise import triton
from tilewise.testing import Sizes

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
        (lambda: call(scale=-0.5), r"scale is -0\.5; the kernels take scales ≥ 0"),
        (lambda: call(ports=call("t5").ports * 9), "9 terms add to the score; the kernels take at most 8"),
        (lambda: call("vits", ports=call("vits").ports[1:] * 3), "3 terms add to the output"),
        (lambda: call("none", q=torch.zeros(1, 2, 20, 300).half()), "q has width 300; the kernels take at most 256"),
    ],
)
def test_reasons(made, said):
    (reason,) = triton.why_not(made())
    assert re.search(said, reason)


def test_linear_memory_is_never_replaced_silently():
    o, lse = torch.empty(1, 2, 20, 16).half(), torch.empty(1, 2, 20)
    with pytest.raises(ValueError, match=r"skew='shared' cannot run this call: .*; skew='memory' runs it"):
        triton.forward(call("txl"), o, lse, skew="shared")
