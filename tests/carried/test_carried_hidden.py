"""What the mask hides does not reach what is seen: the mean that centres stored scores, and tiles that are dead."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from carried_cases import CarriedConfig, inputs, run
from hidden_cases import CASES, PLANS, spoilt
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.carried import TileLayout
from tilewise.mask import Mask
from tilewise.testing import assert_within_budget


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e4])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", CASES)
def test_hidden_keys_change_nothing(name, plan, value):
    """In dead tiles not even gradients; in live ones outputs, where E · K meets what is not finite."""
    (outputs, grads), (zeros, zero_grads), (exact, exact_grads) = spoilt(name, plan, value, "blocked", torch.float64)
    for a, b, c in zip(outputs, zeros, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(a, c, rtol=1e-9, atol=1e-9)
    if CASES[name][4]:
        for a, b, c in zip(grads, zero_grads, exact_grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
            torch.testing.assert_close(a, c, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("plan", ["stored", "mixed"])
def test_large_padding_costs_no_digits(plan):
    """37 keys of which 30 are real, padding of 1,000: the mean over all made the error in bf16 28 times as large."""
    q, k, v = ([x.detach() for x in g] for g in inputs(B=2, T=37, dtype=torch.bfloat16))
    mask, results = Mask.lengths([30, 30]), []
    for value in (0.0, 1e3):
        for x in k:
            x[:, :, 30:] = value
        results.append(run(CarriedConfig(plan=plan, tile=16, causal=False, impl="blocked"), q, k, v, mask=mask))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    T=st.integers(1, 50), more=st.integers(0, 40), causal=st.booleans(), window=st.none() | st.integers(1, 60),
    cut=st.none() | st.lists(st.integers(0, 50), min_size=3, max_size=3),
)  # fmt: skip
def test_the_mean_is_over_the_keys_that_some_query_sees(T, more, causal, window, cut):
    Tk = T + more
    config = CarriedConfig(causal=causal, windows=window, tile=16)
    mask = None if cut is None else Mask.lengths([min(n, Tk) for n in cut])
    layout, k = TileLayout(config, T, Tk, mask), torch.randn(3, 2, Tk, 4, dtype=torch.float64)
    seen = config.mask(0, mask).allowed(T, Tk, more).any(2)[:, 0].expand(3, Tk)
    expected = torch.stack([x[:, s].mean(1) if s.any() else x.new_zeros(2, 4) for x, s in zip(k, seen, strict=True)])
    torch.testing.assert_close(layout.mean(k), expected, rtol=1e-6, atol=1e-6)
    assert layout.shown is not None or bool(seen.all())


def test_where_no_key_is_hidden_nothing_is_looked_up():
    """On a GPU that is a launch or two a layer."""
    config = CarriedConfig(tile=16)
    assert TileLayout(config, 40, 40).shown is None
    assert TileLayout(config, 7, 40).shown is None
    assert TileLayout(config, 40, 40, Mask.packed([0, 5, 40])).shown is None
    assert TileLayout(config, 40, 40, Mask.lengths([39])).shown is not None


def test_hidden_keys_change_nothing_in_the_kernels():
    """The same under Triton's interpreter, where tiles that are dead are poisoned too."""
    script = Path(__file__).with_name("interpreted_hidden.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["stored", "mixed", "recompute"]


@pytest.mark.parametrize("name", ["lengths", "later keys"])
def test_padding_of_bf16_stays_within_the_budget(name):
    (outputs, _), (_, _), (exact, _) = spoilt(name, "stored", 3e4, "blocked", torch.bfloat16)
    (low, _), *_ = spoilt(name, "recompute", 3e4, "blocked", torch.bfloat16)
    if name == "lengths":
        for i, tensors in enumerate(zip(outputs, low, exact, strict=True)):
            assert_within_budget(f"O{i}", *tensors)
    assert all(o.isfinite().all() for o in outputs)
