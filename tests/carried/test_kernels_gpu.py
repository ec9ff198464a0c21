"""The Triton kernels on a CUDA device: precision study, budgets against fp64, repeatability, offsets beyond 32 bits.

The sizes are a 3B model's: 20 query heads on 4 key heads, d = 128. Uninitialised memory is NaN (conftest.py), so packed
tiles that nothing wrote would show. LAUNCHED says what each test launches, so that it can be compiled beforehand.
"""

import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import compiled_block
import pytest
import torch
from carried_cases import CarriedConfig, dense, grads_of, inputs, promoted, run
from precision_study import LIMIT, STUDY, measure

from tilewise.carried import Carry, carried_attention, carried_decode
from tilewise.carried.triton import settings
from tilewise.mask import Mask
from tilewise.testing import assert_within_budget

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PLANS = ("recompute", "stored", "mixed")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
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


def extras(config, device="cuda"):
    """Gains, sinks and seeds of four layers, as far as the options ask for them."""
    heads = lambda: [torch.rand(20, device=device).add(0.3).requires_grad_() for _ in range(4)]  # noqa: E731
    gain, sink = heads() if config.scaling == "gain" else None, heads() if config.sink else None
    seed = [torch.tensor([7 + i], device=device) for i in range(4)] if config.dropout_p else None
    return {"gain": gain, "sink": sink, "seed": seed}


def outputs_and_gradients(block, config, groups, G, mask, extra):
    out = block(config, *groups, mask=mask, **extra)
    leaves = [x for group in groups for x in group]
    leaves += [*(extra["gain"] or [])[1:], *(extra["sink"] or [])]
    return [*out, *grads_of(out, leaves, G)]


@contextmanager
def changed(values):
    """Constants of the settings with other values."""
    kept = {name: getattr(settings, name) for name in values}
    for name, value in values.items():
        setattr(settings, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(settings, name, value)


class Block(NamedTuple):
    """Layers forward and backward: options, input, and settings other than the table's; Tk and dv as T and d if 0."""

    config: CarriedConfig
    dtype: torch.dtype = BF16
    T: int = 1000
    mask: Callable[[], Mask] | None = None
    B: int = 1
    settings: dict | None = None
    layers: int = 4
    d: int = 128
    Tk: int = 0
    dv: int = 0

    def draw(self, device="cuda"):
        sizes = MODEL | {"device": device, "d": self.d, "Tk": self.Tk, "dv": self.dv}
        groups = inputs(layers=self.layers, T=self.T, B=self.B, dtype=self.dtype, **sizes)
        G = [torch.randn(*x.shape[:3], self.dv or self.d, dtype=x.dtype, device=device) for x in groups[0]]
        return groups, G, extras(self.config, device)

    def results(self, groups, G, extra):
        with changed(self.settings or {}):
            return outputs_and_gradients(run, self.config, groups, G, self.mask and self.mask(), extra)

    def launch(self):
        """Everything the block launches, on tensors that hold nothing."""
        groups, G, _ = self.draw("meta")
        # Operators launch nothing on meta tensors; what is not written takes no memory.
        groups = [[torch.empty_like(x, device="cpu").requires_grad_() for x in group] for group in groups]
        G = [torch.empty_like(x, device="cpu") for x in G]
        self.results(groups, G, extras(self.config, "cpu"))


class Step(NamedTuple):
    """One step of decoding: options, queries and keys a sequence, sequences, dtype of the row."""

    config: CarriedConfig
    T: int
    Tk: int
    B: int
    row_dtype: torch.dtype | None

    def draw(self, device="cuda"):
        drawn = inputs(T=self.T, Tk=self.Tk, B=self.B, dtype=BF16, **MODEL | {"device": device})
        extra = {n: x and [t.detach() for t in x] for n, x in extras(self.config, device).items() if n != "seed"}
        return [[x.detach() for x in group] for group in drawn], extra

    def results(self, groups, extra):
        """Output and row of every layer."""
        row = None
        for i, (q, k, v) in enumerate(zip(*groups, strict=True)):
            each = {n: x and x[i] for n, x in extra.items()}
            o, row = carried_decode(q, k, v, row, i, self.config, row_dtype=self.row_dtype, **each)
            yield o, row

    def launch(self):
        for _ in self.results(*self.draw("meta")):
            pass


def check(block):
    """Every output and gradient of a block within its budget."""
    config, mask = block.config, block.mask and block.mask()
    groups, G, extra = block.draw()
    wide = {name: promoted([x])[0] if x and name != "seed" else x for name, x in extra.items()}
    got = block.results(groups, G, extra)
    low = outputs_and_gradients(dense, config, groups, G, mask, extra)
    exact = outputs_and_gradients(dense, config, promoted(groups), G, mask, wide)
    count = 4 * block.layers
    names = [f"{kind}{i}" for kind in ("O", "dQ", "dK", "dV") for i in range(block.layers)]
    for name, *tensors in zip(names, got, low, exact, strict=False):
        assert_within_budget(name, *tensors)
    for a, c in zip(got[count:], exact[count:], strict=True):
        # Sums over all tokens and keys: the error of an entry is that of a random walk over 16-bit operands.
        assert (a.double() - c).norm() <= 2e-2 * c.norm()


def case(name, dtype, plan, settings=None):
    """A block of CASES in one plan."""
    options, mask, B = CASES[name]
    return Block(CarriedConfig(impl="triton", plan=plan, **options), dtype, mask=mask, B=B, settings=settings)


def causal(plan, **sizes):
    return Block(CarriedConfig(impl="triton", plan=plan), **sizes)


# Every kernel and every way through it once, at sizes that compile and run in seconds: -k smoke.
SMOKE = {
    "stored": ("causal", BF16, "stored"),
    "mixed": ("causal", BF16, "mixed"),
    "recompute": ("causal", BF16, "recompute"),
    "window": ("window", BF16, "mixed"),
    "documents": ("documents", BF16, "recompute"),
    "windows differ": ("windows differ", F16, "recompute"),
    "gain": ("gain", BF16, "recompute"),
    "softcap": ("mean, softcap", F16, "stored"),
    "dropout": ("dropout", BF16, "stored"),
    "registers": ("causal", BF16, "mixed", {"FILL": 0.0}),
    "parts": ("window", BF16, "recompute", {"TRANSIENT": 4 << 20}),
    "rows": ("documents", BF16, "recompute", {"TRANSIENT": 1 << 20, "FILL": 0.0}),
}

# Options, queries and keys of a step, and how many sequences.
STEPS = {
    "one query": ({}, 1, 5000, 1),
    "eight queries": ({}, 8, 5000, 1),
    "window": ({"windows": (1024, 1024, 1024, None)}, 1, 5000, 1),
    "batch": ({}, 1, 700, 16),
    "softcap, sink": ({"softcap": 3.0, "sink": True}, 2, 700, 2),
    "gain": ({"scaling": "gain"}, 2, 700, 2),
}


# Heads of 64, which have tiles of their own; the window is that of the trained models.
NARROW = {
    "causal": {},
    "window": {"windows": 128},
    "mean": {"scaling": "mean"},
    "dropout": {"dropout_p": 0.2},
    "no carry": {"layers": 1},
}


def narrow(name, plan):
    config = CarriedConfig(impl="triton", **NARROW[name], **({} if plan is None else {"plan": plan}))
    return Block(config, T=512, B=2, layers=config.layers, d=64)


# Options and sizes beside the 3B model's: chunks of queries, fp32, and widths with tiles, or padding, of their own.
SHAPES = {
    "chunk": ({}, {"T": 300, "Tk": 1000}),
    "chunk, window": ({"windows": 300}, {"T": 300, "Tk": 1000}),
    "fp32": ({}, {"T": 300, "dtype": F32}),
    "fp32, window": ({"windows": 100}, {"T": 300, "dtype": F32}),
    "width 16": ({}, {"T": 300, "d": 16}),
    "width 32": ({}, {"T": 300, "d": 32}),
    "width 80": ({}, {"T": 300, "d": 80}),
    "width 256": ({}, {"T": 300, "d": 256}),
    "values of 64": ({}, {"T": 300, "d": 128, "dv": 64}),
}
REPEATED = ("causal", "documents", "gain", "dropout")


def shaped(name, plan):
    options, sizes = SHAPES[name]
    return Block(CarriedConfig(impl="triton", plan=plan, **options), **sizes)


def eight_layers(impl="triton"):
    return Block(CarriedConfig(layers=8, impl=impl), T=300, layers=8)


def layers_without_a_carry(tokens):
    return Block(CarriedConfig(layers=1, impl="triton"), T=tokens, layers=1)


def step(name, row_dtype):
    options, *sizes = STEPS[name]
    return Step(CarriedConfig(impl="triton", **options), *sizes, row_dtype)


def long(plan, window):
    return Block(CarriedConfig(impl="triton", plan=plan, windows=window), T=4096)


def very_long(plan):
    return causal(plan, T=17000)


class Compiled(NamedTuple):
    """The eager blocks of compiled_block.py, whose kernels are the compiled ones'."""

    def launch(self):
        for plan in compiled_block.GPU_PLANS:
            layers = compiled_block.layers_of(plan)
            config = CarriedConfig(layers=layers, plan=plan, **compiled_block.GPU_OPTIONS)
            for T in compiled_block.GPU_LENGTHS:
                Block(config, T=T, layers=layers, d=compiled_block.GPU_WIDTH).launch()


LAUNCHED = {
    "test_smoke": lambda name: case(*SMOKE[name]),
    "test_smoke_layers_without_a_carry": layers_without_a_carry,
    "test_narrow_heads_within_budget": narrow,
    "test_decoding_within_budget": step,
    "test_within_a_multiple_of_plain_attention": lambda std, offset, plan: causal(plan),
    "test_within_budget": case,
    "test_4096_tokens_within_budget": long,
    "test_other_shapes_within_budget": shaped,
    "test_eight_layers_are_stored": eight_layers,
    "test_bitwise_repeatable": lambda name, plan: case(name, BF16, plan),
    "test_packed_elements_beyond_32_bits": very_long,
    "test_compiled_blocks": Compiled,
}
"""Test ↦ what it launches, from its parameters."""


@pytest.mark.parametrize("name", SMOKE)
def test_smoke(name):
    check(case(*SMOKE[name]))


@pytest.mark.parametrize("tokens", [1024, 1000])
def test_smoke_layers_without_a_carry(tokens):
    """The pass over keys without loaded bounds, and with them."""
    check(layers_without_a_carry(tokens))


@pytest.mark.parametrize(
    ("name", "plan"), [(name, plan) for name in NARROW for plan in PLANS if name != "no carry"] + [("no carry", None)]
)
def test_narrow_heads_within_budget(name, plan):
    check(narrow(name, plan))


@pytest.mark.parametrize("row_dtype", [None, F16])
@pytest.mark.parametrize("name", STEPS)
def test_decoding_within_budget(name, row_dtype):
    """Every layer's output of a step against the dense oracle."""
    one = step(name, row_dtype)
    groups, extra = one.draw()
    wide = {n: x and [t.double() for t in x] for n, x in extra.items()}
    low = dense(one.config, *groups, **extra)
    exact = dense(one.config, *([x.double() for x in g] for g in groups), **wide)
    for i, (o, row) in enumerate(one.results(groups, extra)):
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
    check(case(name, dtype, plan))


@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize("plan", PLANS)
def test_4096_tokens_within_budget(plan, window):
    """One key head and its five query heads, whose dense scores in fp64 fit in memory."""
    block = long(plan, window)
    groups, G, none = block.draw()
    got, config = block.results(groups, G, none), block.config
    for g in range(2, 4):
        part = [[x.detach()[:, g * n : (g + 1) * n].requires_grad_() for x in xs] for xs, n in zip(groups, (5, 1, 1))]  # noqa: B905
        upstream = [x[:, 5 * g : 5 * g + 5] for x in G]
        low = outputs_and_gradients(dense, config, part, upstream, None, none)
        exact = outputs_and_gradients(dense, config, promoted(part), upstream, None, none)
        for name, a, b, c in zip(NAMES, got, low, exact, strict=True):
            n = 5 if name.startswith(("O", "dQ")) else 1
            assert_within_budget(f"{name}, key head {g}", a[:, g * n : (g + 1) * n], b, c)


def test_compiled_blocks():
    """In a process of its own: Dynamo cannot trace the poisoned torch.empty of this one."""
    script = Path(__file__).with_name("compiled_block.py")
    done = subprocess.run([sys.executable, script, "cuda"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["recompute", "mixed", "stored"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", SHAPES)
def test_other_shapes_within_budget(name, plan):
    check(shaped(name, plan))


def test_eight_layers_are_stored():
    """More than a kernel sums, with nothing named: on the kernels all the same."""
    block = eight_layers("auto")
    (q, k, v), _, _ = block.draw()
    _, carry = carried_attention(q[0], k[0], v[0], Carry(block.config))
    assert carry.decision[:2] == ("stored", "triton")
    check(block)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", REPEATED)
def test_bitwise_repeatable(name, plan):
    block = case(name, BF16, plan)
    drawn = block.draw()
    first, *others = (block.results(*drawn) for _ in range(4))
    assert len(first) == 16 + 3 * (name == "gain")
    for other in others:
        for n, (a, b) in enumerate(zip(first, other, strict=True)):
            assert torch.equal(a, b), (NAMES + ["gain"] * 3)[n]


@pytest.mark.parametrize("plan", ["stored", "mixed"])
def test_packed_elements_beyond_32_bits(plan):
    """17,000 tokens, 2.9e9 packed elements: only the last rows get a gradient, so their dense oracle is small."""
    block, rows = very_long(plan), 50
    config = block.config
    (q, k, v), G, none = block.draw()
    for g in G:
        g[:, :, :-rows].zero_()
    got = block.results((q, k, v), G, none)
    tail = [[x.detach()[:, :, -rows:].requires_grad_() for x in q], k, v]
    upstream = [g[:, :, -rows:] for g in G]
    low = outputs_and_gradients(dense, config, tail, upstream, None, none)
    exact = outputs_and_gradients(dense, config, promoted(tail), upstream, None, none)
    for name, a, b, c in zip(NAMES, got, low, exact, strict=True):
        if name.startswith("dQ"):
            assert not a[:, :, :-rows].any()
        assert_within_budget(name, a[:, :, -rows:] if name.startswith(("O", "dQ")) else a, b, c)
