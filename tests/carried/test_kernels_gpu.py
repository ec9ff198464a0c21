"""The Triton kernels on a CUDA device: precision study, budgets against fp64, repeatability, offsets beyond 32 bits.

The sizes are a 3B model's: 20 query heads on 4 key heads, d = 128. Uninitialised memory is NaN (conftest.py), so packed
tiles that nothing wrote would show.
"""

import pytest
import torch
from carried_cases import CarriedConfig, dense, grads_of, inputs, promoted, run
from precision_study import LIMIT, STUDY, measure

from tilewise.carried import carried_decode
from tilewise.carried.triton import settings
from tilewise.mask import Mask
from tilewise.testing import assert_within_budget

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PLANS = ("recompute", "stored", "mixed")
BF16, F16 = torch.bfloat16, torch.float16
MODEL = {"H": 20, "Hk": 4, "d": 128, "device": "cuda"}
NAMES = [f"{kind}{i}" for kind in ("O", "dQ", "dK", "dV") for i in range(4)]
# Options, mask and batch of a block; the masks are for 1,000 tokens.
CASES = {
    "causal": ({}, None, 1),
    "window": ({"windows": 300}, None, 1),
    "full": ({"causal": False}, None, 1),
    "documents": ({}, lambda: Mask.packed([0, 1, 2, 400, 1000]), 1),
    "lengths": ({}, lambda: Mask.lengths([1000, 0, 333]), 3),
    "windows differ": ({"windows": (100, 500, 100, None)}, None, 1),
    "mean, softcap": ({"scaling": "mean", "softcap": 3.0}, None, 1),
    "gain": ({"scaling": "gain"}, None, 1),
    "sink": ({"sink": True}, None, 1),
    "dropout": ({"dropout_p": 0.2}, None, 1),
    "detached": ({"detach": True}, None, 1),
}


def extras(config):
    """Gains, sinks and seeds of four layers, as far as the options ask for them."""
    heads = lambda: [torch.rand(20, device="cuda").add(0.3).requires_grad_() for _ in range(4)]  # noqa: E731
    gain, sink = heads() if config.scaling == "gain" else None, heads() if config.sink else None
    seed = [torch.tensor([7 + i], device="cuda") for i in range(4)] if config.dropout_p else None
    return {"gain": gain, "sink": sink, "seed": seed}


def outputs_and_gradients(block, config, groups, G, mask, extra):
    out = block(config, *groups, mask=mask, **extra)
    leaves = [x for group in groups for x in group]
    leaves += [*(extra["gain"] or [])[1:], *(extra["sink"] or [])]
    return [*out, *grads_of(out, leaves, G)]


def check(config, dtype, T, mask=None, B=1):
    """Every output and gradient of a block within its budget."""
    groups = inputs(T=T, B=B, dtype=dtype, **MODEL)
    G = [torch.randn_like(x) for x in groups[0]]
    extra = extras(config)
    wide = {name: promoted([x])[0] if x and name != "seed" else x for name, x in extra.items()}
    got = outputs_and_gradients(run, config, groups, G, mask, extra)
    low = outputs_and_gradients(dense, config, groups, G, mask, extra)
    exact = outputs_and_gradients(dense, config, promoted(groups), G, mask, wide)
    for name, *tensors in zip(NAMES, got, low, exact, strict=False):
        assert_within_budget(name, *tensors)
    for a, c in zip(got[16:], exact[16:], strict=True):
        # Sums over all tokens and keys: the error of an entry is that of a random walk over 16-bit operands.
        assert (a.double() - c).norm() <= 2e-2 * c.norm()


# Every kernel and every way through it once, at sizes that compile and run in seconds: -k smoke.
SMOKE = {
    "stored": ("causal", BF16, "stored", {}),
    "mixed": ("causal", BF16, "mixed", {}),
    "recompute": ("causal", BF16, "recompute", {}),
    "window": ("window", BF16, "mixed", {}),
    "documents": ("documents", BF16, "recompute", {}),
    "windows differ": ("windows differ", F16, "recompute", {}),
    "gain": ("gain", BF16, "recompute", {}),
    "softcap": ("mean, softcap", F16, "stored", {}),
    "dropout": ("dropout", BF16, "stored", {}),
    "registers": ("causal", BF16, "mixed", {"FILL": 0.0}),
    "parts": ("window", BF16, "recompute", {"TRANSIENT": 4 << 20}),
    "rows": ("documents", BF16, "recompute", {"TRANSIENT": 1 << 20, "FILL": 0.0}),
}


@pytest.mark.parametrize("name", SMOKE)
def test_smoke(name, monkeypatch):
    case, dtype, plan, changed = SMOKE[name]
    options, mask, B = CASES[case]
    for key, value in changed.items():
        monkeypatch.setattr(settings, key, value)
    check(CarriedConfig(impl="triton", plan=plan, **options), dtype, 1000, mask and mask(), B)


@pytest.mark.parametrize("tokens", [1024, 1000])
def test_smoke_layers_without_a_carry(tokens):
    """The pass over keys without loaded bounds, and with them."""
    groups = [x[:1] for x in inputs(T=tokens, dtype=BF16, **MODEL)]
    G = [torch.randn_like(x) for x in groups[0]]
    none = {"gain": None, "sink": None, "seed": None}
    config = CarriedConfig(layers=1, impl="triton")
    got = outputs_and_gradients(run, config, groups, G, None, none)
    low = outputs_and_gradients(dense, config, groups, G, None, none)
    exact = outputs_and_gradients(dense, config, promoted(groups), G, None, none)
    for name, *tensors in zip(NAMES[::4], got, low, exact, strict=True):
        assert_within_budget(name, *tensors)


# Options, queries and keys of a step, and how many sequences.
STEPS = {
    "one query": ({}, 1, 5000, 1),
    "eight queries": ({}, 8, 5000, 1),
    "window": ({"windows": (1024, 1024, 1024, None)}, 1, 5000, 1),
    "batch": ({}, 1, 700, 16),
    "softcap, sink": ({"softcap": 3.0, "sink": True}, 2, 700, 2),
    "gain": ({"scaling": "gain"}, 2, 700, 2),
}


@pytest.mark.parametrize("row_dtype", [None, F16])
@pytest.mark.parametrize("name", STEPS)
def test_decoding_within_budget(name, row_dtype):
    """Every layer's output of a step against the dense oracle."""
    options, T, Tk, B = STEPS[name]
    config = CarriedConfig(impl="triton", **options)
    groups = [[x.detach() for x in g] for g in inputs(T=T, Tk=Tk, B=B, dtype=BF16, **MODEL)]
    extra = {n: x and [t.detach() for t in x] for n, x in extras(config).items() if n != "seed"}
    wide = {n: x and [t.double() for t in x] for n, x in extra.items()}
    low = dense(config, *groups, **extra)
    exact = dense(config, *([x.double() for x in g] for g in groups), **wide)
    row = None
    for i, (q, k, v) in enumerate(zip(*groups, strict=True)):
        each = {n: x and x[i] for n, x in extra.items()}
        o, row = carried_decode(q, k, v, row, i, config, row_dtype=row_dtype, **each)
        assert_within_budget(f"O{i}", o, low[i], exact[i])
        assert row is None or row.dtype == (row_dtype or torch.float32)


def test_uninitialised_memory_is_nan():
    assert torch.empty(1000, device="cuda").isnan().all()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("std", "offset"), STUDY)
def test_within_a_multiple_of_plain_attention(std, offset, plan):
    ratios = measure(CarriedConfig(impl="triton", plan=plan), std, offset, T=1000, **MODEL)
    assert max(ratios) <= LIMIT[plan], f"{plan}: {max(ratios):.2f} times plain attention's error"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("name", CASES)
def test_within_budget(name, dtype, plan):
    options, mask, B = CASES[name]
    check(CarriedConfig(impl="triton", plan=plan, **options), dtype, 1000, mask and mask(), B)


@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize("plan", PLANS)
def test_4096_tokens_within_budget(plan, window):
    """One key head and its five query heads, whose dense scores in fp64 fit in memory."""
    config = CarriedConfig(impl="triton", plan=plan, windows=window)
    groups = inputs(T=4096, dtype=BF16, **MODEL)
    G = [torch.randn_like(x) for x in groups[0]]
    none = {"gain": None, "sink": None, "seed": None}
    got = outputs_and_gradients(run, config, groups, G, None, none)
    for g in range(2, 4):
        part = [[x.detach()[:, g * n : (g + 1) * n].requires_grad_() for x in xs] for xs, n in zip(groups, (5, 1, 1))]  # noqa: B905
        upstream = [x[:, 5 * g : 5 * g + 5] for x in G]
        low = outputs_and_gradients(dense, config, part, upstream, None, none)
        exact = outputs_and_gradients(dense, config, promoted(part), upstream, None, none)
        for name, a, b, c in zip(NAMES, got, low, exact, strict=True):
            n = 5 if name.startswith(("O", "dQ")) else 1
            assert_within_budget(f"{name}, key head {g}", a[:, g * n : (g + 1) * n], b, c)


@pytest.mark.parametrize("plan", PLANS)
def test_bitwise_repeatable(plan):
    groups = inputs(T=1000, dtype=BF16, **MODEL)
    G = [torch.randn_like(x) for x in groups[0]]
    none = {"gain": None, "sink": None, "seed": None}
    config = CarriedConfig(impl="triton", plan=plan)
    first, *others = (outputs_and_gradients(run, config, groups, G, None, none) for _ in range(4))
    for other in others:
        for name, a, b in zip(NAMES, first, other, strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("plan", ["stored", "mixed"])
def test_packed_elements_beyond_32_bits(plan):
    """17,000 tokens, 2.9e9 packed elements: only the last rows get a gradient, so their dense oracle is small."""
    T, rows = 17000, 50
    config = CarriedConfig(impl="triton", plan=plan)
    q, k, v = inputs(T=T, dtype=BF16, **MODEL)
    G = [torch.zeros_like(x) for x in q]
    for g in G:
        g[:, :, -rows:].normal_()
    none = {"gain": None, "sink": None, "seed": None}
    got = outputs_and_gradients(run, config, (q, k, v), G, None, none)
    tail = [[x.detach()[:, :, -rows:].requires_grad_() for x in q], k, v]
    upstream = [g[:, :, -rows:] for g in G]
    low = outputs_and_gradients(dense, config, tail, upstream, None, none)
    exact = outputs_and_gradients(dense, config, promoted(tail), upstream, None, none)
    for name, a, b, c in zip(NAMES, got, low, exact, strict=True):
        if name.startswith("dQ"):
            assert not a[:, :, :-rows].any()
        assert_within_budget(name, a[:, :, -rows:] if name.startswith(("O", "dQ")) else a, b, c)
