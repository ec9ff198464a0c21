"""The any-device path against the fp64 oracle: every mechanism, mask and dtype, all gradients, dropout, memory."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest
import torch

import tilewise
from tilewise import Mask
from tilewise.blocked import backward, forward
from tilewise.call import Call
from tilewise.terms import lower
from tilewise.testing import CASES, MASKS, Sizes, assert_within_budget
from tilewise.tiles import Plan

SHAPES = {
    "63": Sizes(Tq=63, Tk=63),
    "1": Sizes(Tq=1, Tk=1),
    "2": Sizes(Tq=2, Tk=2, d=5, d_v=3),
    "129 grouped": Sizes(B=2, H=4, Hk=2, Tq=129, Tk=129),
    "decode": Sizes(H=4, Hk=2, Tq=7, Tk=200, d_v=24),
    "one key head": Sizes(H=3, Hk=1, Tq=70, Tk=33, offset=5, d=8, d_v=4),
    "ahead": Sizes(Tq=20, Tk=31, offset=-40, d=7, d_v=9),
    "far": Sizes(H=1, Hk=1, Tq=9, Tk=12, offset=400, d=4, d_v=4),
}
LOW = {"63": Sizes(B=3, H=3, Hk=3, Tq=63, Tk=63), "129 grouped": Sizes(B=2, H=4, Hk=2, Tq=129, Tk=129, d_v=24)}


def run(case, sizes, mask, dtype, compute, impl, dropout_p=0.0, seed=0):
    """O, lse and the gradients of a loss that weighs both, by name; inputs are drawn in `dtype`, then promoted."""
    x = {n: t.to(compute).requires_grad_() for n, t in case.inputs(sizes, dtype, seed=seed).items()}
    torch.manual_seed(5)
    o, lse = tilewise.attention(
        x["q"], x["k"], x["v"], mask=mask, impl=impl, return_lse=True, dropout_p=dropout_p, **case.arguments(x, sizes)
    )
    generator = torch.Generator().manual_seed(3)
    do = torch.randn(o.shape, generator=generator, dtype=torch.float64).to(dtype).to(compute)
    dlse = torch.randn(lse.shape, generator=generator, dtype=torch.float64).float()
    visible = lse.isfinite()
    loss = (o * do).sum() + (torch.where(visible, lse, 0.0) * dlse).sum()
    grads = torch.autograd.grad(loss, list(x.values()))
    return {"o": o.detach(), "lse": lse.detach()} | {f"d{n}": g for n, g in zip(x, grads, strict=True)}


def finite(got, exact):
    """Both with the infinite entries, which must be the same ones, replaced by 0."""
    assert torch.equal(got.isfinite(), exact.isfinite())
    return torch.where(got.isfinite(), got, 0.0), torch.where(exact.isfinite(), exact, 0.0)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", CASES)
def test_fp64_equals_the_oracle(name, mask):
    for label, sizes in SHAPES.items():
        shown = MASKS[mask](sizes, "cpu")
        got = run(CASES[name], sizes, shown, torch.float64, torch.float64, "blocked")
        exact = run(CASES[name], sizes, shown, torch.float64, torch.float64, "reference")
        for part, value in exact.items():
            a, b = finite(got[part], value)
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12, msg=lambda m, p=part, l=label: f"{l}: {p}: {m}")


PAIRS = [
    (name, mask, shape, dtype)
    for index, (name, mask) in enumerate(product(CASES, MASKS))
    for shape, dtype in (
        (list(LOW)[index % 2], torch.float32),
        (list(LOW)[(index // 2) % 2], torch.bfloat16),
        (list(LOW)[(index // 2 + 1) % 2], torch.float16),
    )
]


FEW = 16
"""Up to so many numbers of a gradient are judged by four draws: dense PyTorch's largest error of six is chance."""


@pytest.mark.parametrize(("name", "mask", "shape", "dtype"), PAIRS)
def test_lower_dtypes_within_the_error_budget(name, mask, shape, dtype):
    sizes = LOW[shape]
    shown = MASKS[mask](sizes, "cpu")
    few = any(x.numel() <= FEW for x in CASES[name].inputs(sizes, dtype).values())
    kinds = {"got": (dtype, "blocked"), "low": (dtype, "reference"), "exact": (torch.float64, "reference")}
    draws = [
        {kind: run(CASES[name], sizes, shown, dtype, *how, seed=seed) for kind, how in kinds.items()}
        for seed in range(4 if few else 1)
    ]
    for part, value in draws[0]["exact"].items():
        of = [{kind: x[part] for kind, x in d.items()} for d in draws[: 4 if value.numel() <= FEW else 1]]
        pairs = [finite(x["got"], x["exact"]) for x in of]
        low = [torch.where(x["exact"].isfinite(), x["low"], 0.0) for x in of]
        assert_within_budget(part, *(torch.stack(x) for x in ([a for a, _ in pairs], low, [b for _, b in pairs])))


@pytest.mark.parametrize(
    ("name", "mask"),
    [("t5", "none"), ("t5_causal", "causal_padding"), ("deberta", "none"), ("txl", "packed"), ("shaw", "window")],
)
def test_a_thousand_tokens(name, mask):
    sizes = Sizes(B=1, H=2, Hk=2, Tq=1000, Tk=1000, d=24, d_v=24, published=True)
    shown = MASKS[mask](sizes, "cpu")
    got, low = (run(CASES[name], sizes, shown, torch.float32, torch.float32, i) for i in ("blocked", "reference"))
    exact = run(CASES[name], sizes, shown, torch.float32, torch.float64, "reference")
    for part, value in exact.items():
        a, b = finite(got[part], value)
        assert_within_budget(part, a, torch.where(value.isfinite(), low[part], 0.0), b)


@pytest.mark.parametrize("name", ["shaw", "txl", "deberta", "wavlm", "inkling", "explicit", "everything"])
def test_gradcheck(name):
    sizes = Sizes(B=1, H=2, Hk=1, Tq=5, Tk=7, d=3, d_v=2)
    x = CASES[name].inputs(sizes, torch.float64)
    mask = Mask.causal() & Mask.padding(torch.tensor([[0, 1, 1, 1, 0, 1, 1]]))

    def call(*tensors):
        named = dict(zip(x, tensors, strict=True))
        return tilewise.attention(
            named["q"], named["k"], named["v"], mask=mask, impl="blocked", return_lse=True,
            **CASES[name].arguments(named, sizes),
        )  # fmt: skip

    assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in x.values()])


@pytest.mark.parametrize("name", ["t5", "shaw", "explicit", "everything"])
@pytest.mark.parametrize("mask", ["none", "causal_padding"])
def test_dropout_drops_what_the_oracle_drops(name, mask):
    for sizes in (Sizes(Tq=41, Tk=41), Sizes(H=4, Hk=2, Tq=5, Tk=130)):
        shown = MASKS[mask](sizes, "cpu")
        got, exact, kept = (
            run(CASES[name], sizes, shown, torch.float64, torch.float64, impl, dropout_p=p)
            for impl, p in (("blocked", 0.3), ("reference", 0.3), ("reference", 0.0))
        )
        for part, value in exact.items():
            torch.testing.assert_close(*finite(got[part], value), rtol=1e-11, atol=1e-12)
        assert (kept["o"] - exact["o"]).abs().max() > 0.1


def test_rows_without_keys_give_zero_and_no_gradient():
    sizes = Sizes(B=1, H=2, Hk=2, Tq=6, Tk=6, d=4, d_v=4)
    seen = torch.ones(6, 6, dtype=torch.bool)
    seen[2] = False
    for mask in (Mask.full(seen), Mask.causal() & Mask.padding(torch.tensor([[0, 0, 0, 1, 1, 1]])), Mask.lengths([0])):
        empty = ~mask.allowed(6, 6).expand(1, 1, 6, 6)[0, 0].any(-1)
        assert empty.any()
        for name in ("t5", "everything"):
            x = {n: t.requires_grad_() for n, t in CASES[name].inputs(sizes, torch.float32).items()}
            o, lse = tilewise.attention(
                x["q"], x["k"], x["v"], mask=mask, impl="blocked", return_lse=True, **CASES[name].arguments(x, sizes)
            )
            o.sum().backward()
            assert not o[:, :, empty].any()
            assert (lse[:, :, empty] == -torch.inf).all()
            assert lse[:, :, ~empty].isfinite().all()
            assert not x["q"].grad[:, :, empty].any()
            assert all(t.grad.isfinite().all() for t in x.values())


@pytest.mark.parametrize("name", ["t5", "explicit", "everything"])
def test_bitwise_equal_from_run_to_run(name):
    sizes = Sizes(B=2, H=4, Hk=2, Tq=150, Tk=150)
    mask = MASKS["causal_padding"](sizes, "cpu")
    runs = [run(CASES[name], sizes, mask, torch.float32, torch.float32, "blocked", dropout_p=0.1) for _ in range(3)]
    for other in runs[1:]:
        for part, value in runs[0].items():
            assert torch.equal(value, other[part]), part


@pytest.mark.parametrize("name", ["none", "t5", "everything"])
def test_no_keys_no_queries_no_batch(name):
    for sizes in (Sizes(Tq=3, Tk=0, offset=0), Sizes(Tq=0, Tk=3), Sizes(B=0, Tq=3, Tk=3)):
        x = {n: t.requires_grad_() for n, t in CASES[name].inputs(sizes, torch.float32).items()}
        o, lse = tilewise.attention(
            x["q"], x["k"], x["v"], impl="blocked", return_lse=True, **CASES[name].arguments(x, sizes)
        )
        assert not o.any()
        assert (lse == -torch.inf).all()
        o.sum().backward()
        assert not any(t.grad.any() for t in x.values())


def lowered(name, sizes, dtype=torch.float32, mask=None):
    x = CASES[name].inputs(sizes, dtype)
    arguments = CASES[name].arguments(x, sizes)
    content, ports = lower(x["q"], arguments["terms"])
    offset = sizes.Tk - sizes.Tq if sizes.offset is None else sizes.offset
    return Call(content, x["k"], x["v"], tuple(ports), mask or Mask(), arguments["scale"], offset)


def buffers(call):
    nan = torch.nan
    o = torch.full((*call.q.shape[:3], call.v.shape[3]), nan, dtype=call.q.dtype)
    lse = torch.full(call.q.shape[:3], nan)
    return o, lse, [torch.full_like(t, nan) for t in (call.q, call.k, call.v, *call.tensors)]


@pytest.mark.parametrize("name", ["t5", "explicit", "everything"])
def test_only_the_gradients_asked_for_are_written(name):
    call = lowered(name, Sizes(Tq=40, Tk=40), mask=Mask.causal())
    o, lse, full = buffers(call)
    forward(call, o, lse)
    do = torch.randn_like(o)
    backward(call, do, None, o, lse, [True] * len(full), full)
    assert all(g.isfinite().all() for g in full)
    for wanted in range(len(full)):
        need = [index == wanted for index in range(len(full))]
        grads = [torch.full_like(g, torch.nan) if n else g.new_empty(0) for g, n in zip(full, need, strict=True)]
        backward(call, do, None, o, lse, need, grads)
        torch.testing.assert_close(grads[wanted], full[wanted])


LAYOUTS = {
    "columns": lambda x: x.mT.contiguous().mT,
    "steps": lambda x: torch.stack((x, x, x), -1)[..., 1],
    "heads last": lambda x: x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1),
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "one head's": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("mask", ["none", "window", "lengths", "holes"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout, mask):
    for name in ("none", "t5", "everything"):
        sizes = Sizes(B=2, H=2, Hk=2, Tq=70, Tk=70, d=8, d_v=8)
        shown = MASKS[mask](sizes, "cpu")
        results = []
        for how, dtype in ((layout, torch.float32), (layout, torch.bfloat16), ("tokens first", torch.float64)):
            x = CASES[name].inputs(sizes, torch.bfloat16)
            x = {n: (LAYOUTS[layout](t).clone() if t.dim() == 4 else t).to(dtype) for n, t in x.items()}
            x = {n: (LAYOUTS[how](t) if t.dim() == 4 else t).detach().requires_grad_() for n, t in x.items()}
            assert layout == "one head's" or x["q"].stride() != x["q"].contiguous().stride()
            o, lse = tilewise.attention(
                x["q"], x["k"], x["v"], mask=shown, impl="blocked", return_lse=True, **CASES[name].arguments(x, sizes)
            )
            grads = torch.autograd.grad((o * o).sum() + lse[lse.isfinite()].sum(), list(x.values()))
            results.append({"o": o, "lse": lse, **dict(zip(x, grads, strict=True))})
        single, half, exact = results
        for part, value in exact.items():
            a, b = finite(single[part].double(), value)
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda m, p=part, n=name: f"{n}: {p}: {m}")
            a, b = finite(half[part].double(), value)
            assert (a - b).norm() <= 0.02 * b.norm() + 1e-3, (name, part)


def test_causal_and_window_skip_tiles():
    def scores(mask, Tq=2048):
        plan = Plan(lowered("t5", Sizes(B=1, H=1, Hk=1, Tq=Tq, Tk=Tq, d=4, d_v=4), mask=mask))
        blocks = [block for planes in plan.planes() for block in plan.blocks(*planes)]
        return sum((b.i1 - b.i0) * (t.j1 - t.j0) for b in blocks for t in plan.tiles(b)) / Tq**2

    assert scores(Mask()) == 1.0
    assert scores(Mask.causal()) < 0.57
    assert scores(Mask.window(64, 64)) < 0.19
    assert scores(Mask.lengths([512])) <= 0.25
    assert scores(Mask.packed([0, 1024, 2048])) <= 0.5
    keys = torch.zeros(1, 2048, dtype=torch.bool)
    keys[:, 100:200] = True
    assert scores(Mask.padding(keys)) < 0.05


MEMORY = """
import sys, torch, tilewise
from tilewise.demo import memory
from tilewise.testing import CASES, MASKS, Sizes
torch.set_num_threads(1)
name, mask = sys.argv[1:]
def step(N):
    sizes = Sizes(B=1, H=2, Hk=2, Tq=N, Tk=N)
    x = {n: t.requires_grad_() for n, t in CASES[name].inputs(sizes, torch.float32).items()}
    o = tilewise.attention(x["q"], x["k"], x["v"], mask=MASKS[mask](sizes, "cpu"), impl="blocked",
                           **CASES[name].arguments(x, sizes))
    o.sum().backward()
step(64)
for N in (4096, 8192):
    memory.release()
    # Not getrusage's high-water mark, which a process inherits from the one that starts it.
    memory.reset_peak()
    before = memory.peak()
    step(N)
    print((memory.peak() - before) // 1024)
"""


@pytest.mark.parametrize(("name", "mask"), [("t5", "none"), ("shaw", "none"), ("txl", "none"), ("deberta", "none")])
def test_memory_is_linear_in_the_length(name, mask):
    """Peak resident memory of forward and backward: an N × N tensor of one head at the longer length is 256 MiB."""
    done = subprocess.run([sys.executable, "-c", MEMORY, name, mask], check=True, capture_output=True, text=True)
    kib = [int(line) for line in done.stdout.splitlines()]
    assert kib[1] < 2.2 * kib[0] + 8 * 1024
    assert kib[1] < 96 * 1024
