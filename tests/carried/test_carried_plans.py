"""Layouts of live tiles, the policy and its reasons, operator contracts, and what bad calls say."""

import ast
import dataclasses
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from carried_cases import CarriedConfig, inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewise.carried
from tilewise.carried import Carry, TileLayout, carried_attention, choose_plan, policy
from tilewise.carried.triton import launch
from tilewise.mask import Mask
from tilewise.triton.config import Limits

GIB = 2**30
OPTIONS = (0.3, 2, 0.0, 0.0, 16, True, -1, [True], torch.float16, False, 0, "blocked")


def live_tiles(config, T, Tk, mask, offset, tile):
    """Which tiles hold an element that some layer sees, from the dense masks."""
    seen = torch.zeros(T, Tk, dtype=torch.bool)
    for i in range(config.layers):
        seen |= config.mask(i, mask).allowed(T, Tk, offset).any(0).any(0)
    rows, columns = -(-T // tile), -(-Tk // tile)
    padded = torch.nn.functional.pad(seen, (0, columns * tile - Tk, 0, rows * tile - T))
    return padded.view(rows, tile, columns, tile).any(3).any(1)


@settings(max_examples=40, deadline=None)
@given(
    T=st.integers(1, 100), more=st.integers(0, 60), causal=st.booleans(),
    windows=st.one_of(st.none(), st.integers(1, 130), st.tuples(*[st.one_of(st.none(), st.integers(1, 60))] * 4)),
    cut=st.one_of(st.none(), st.integers(0, 100)),
)  # fmt: skip
def test_layout_holds_every_live_tile_once(T, more, causal, windows, cut):
    Tk, tile = T + more, 16
    config = CarriedConfig(causal=causal, windows=windows, tile=tile)
    mask = None if cut is None else Mask.lengths([min(cut, Tk)])
    layout = TileLayout(config, T, Tk, mask)
    live = live_tiles(config, T, Tk, mask, more, tile)
    assert int(live.sum()) <= layout.total
    if more == 0:
        assert layout.total <= int(live.sum()) + (0 if not isinstance(windows, tuple) else live.numel())
    taken = set()
    T_pad = -(-T // tile) * tile
    for i, layer in enumerate(layout.layers):
        own = live_tiles(dataclasses.replace(config, windows=config.window(i)), T, Tk, mask, more, tile)
        for m, (base, first, end, *_) in enumerate(layer.rows.t().tolist()):
            assert own[m].nonzero().flatten().tolist() == list(range(first, end))
            taken |= {(m, n, base + n) for n in range(first, end)}
        seen = config.mask(i, mask).allowed(T, Tk, more)[0, 0]
        seen = torch.nn.functional.pad(seen, (0, 0, 0, T_pad - T), value=False)
        seen = torch.nn.functional.pad(seen, (0, -Tk % tile), value=False)
        whole = seen.view(-1, tile, seen.shape[1] // tile, tile).all(3).all(1)
        for m, (first, end) in enumerate(layer.rows[7:].t().tolist()):
            assert whole[m].nonzero().flatten().tolist() == list(range(first, end))
        for n, (first, end, whole_first, whole_end) in enumerate(layer.columns.t().tolist()):
            assert set(own[:, n].nonzero().flatten().tolist()) <= set(range(first, end))
            assert whole[whole_first:whole_end, n].all()
            assert whole_end > whole_first or not whole[:, n].any()
    if layout.back >= 0:
        rows = torch.arange(-(-T // tile))
        ramp, steady = (
            rows * (rows + 1) // 2,
            (layout.back + 1) * (rows - layout.back) + layout.back * (layout.back + 1) // 2,
        )
        base = torch.where(rows <= layout.back, ramp, steady - (rows - layout.back))
        assert torch.equal(layout.layers[0].rows[0].long(), base)
    places = [place for *_, place in taken]
    assert len(set(places)) == len(places)
    assert not places or (min(places) >= 0 and max(places) < layout.total)


def decide(free, layers=4, T=256, **options):
    config = CarriedConfig(tile=16, layers=layers, **options)
    layout = TileLayout(config, T, T)
    return choose_plan(
        config, layout, 1, 4, dtype=torch.bfloat16, device=torch.device("cpu"), free=free
    ), layout.nbytes(1, 4)


def test_policy_takes_what_fits_in_half_of_the_free_memory():
    _, one = decide(GIB)
    assert decide(8 * one)[0].plan == "stored"  # three buffers and E
    assert decide(8 * one - 2)[0].plan == "mixed"
    assert decide(4 * one)[0].plan == "mixed"  # one buffer and E
    assert decide(4 * one - 2)[0].plan == "recompute"
    assert decide(8 * one, blocks=2)[0].plan == "mixed"  # both blocks' buffers are alive
    assert decide(8 * one, T=512)[0].plan == "recompute"
    assert decide(8 * one, T=512, windows=32)[0].plan == "stored"
    assert decide(GIB, layers=1)[0].plan == "recompute"


def test_policy_says_why():
    _, one = decide(GIB)
    decision, _ = decide(5 * one)
    assert "stored needs" in decision.reason
    assert "half of the" in decision.reason
    assert decision.saved_bytes == decision.transient_bytes == one
    assert str(decision).startswith("mixed on blocked: ")
    assert decide(5 * one, plan="stored")[0].reason == "asked for"


def test_policy_stores_longer_blocks_than_the_kernels_sum_whatever_is_free():
    config = CarriedConfig(tile=16, layers=5)
    layout, sizes = TileLayout(config, 64, 64), {"dtype": torch.bfloat16, "device": torch.device("cpu"), "free": 0}
    found = choose_plan(config, layout, 1, 4, impl="triton", **sizes)
    assert found[:2] == ("stored", "triton")
    assert found.reason == "the only plan that the kernels run: layers is 5; the kernels sum up to 4"
    assert (found.saved_bytes, found.transient_bytes) == (4 * layout.nbytes(1, 4), layout.nbytes(1, 4))
    assert choose_plan(config, layout, 1, 4, impl="blocked", **sizes).plan == "recompute"


def test_policy_counts_what_the_kernels_use_for_e():
    """Recompute saves nothing, and its kernels form E, of some heads at a time, where no layer asks for it."""
    config = CarriedConfig(plan="recompute")
    for T, expected in ((4096, None), (16384, 512 << 20)):
        layout = TileLayout(config, T, T, device="meta")
        sizes = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
        decision = choose_plan(config, layout, 1, 20, impl="triton", **sizes)
        assert (decision.saved_bytes, decision.transient_bytes) == (0, expected or layout.nbytes(1, 20))
        assert choose_plan(config, layout, 1, 20, impl="blocked", **sizes).transient_bytes == 0


def test_the_driver_is_asked_for_free_memory_once_a_change_of_the_allocator(monkeypatch):
    """mem_get_info may hold up what is being enqueued, so blocks of a running model do without it."""
    asked, numbers = [], {"reserved": 0, "allocated": 0}
    stats = lambda device: {f"{name}_bytes": {"all": {"current": n}} for name, n in numbers.items()}  # noqa: E731
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)

    def mem_get_info(device):
        asked.append(device)
        return 100 - numbers["reserved"], 100

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    device = torch.device("cuda", 7)
    monkeypatch.delitem(policy._beyond, device, raising=False)
    # In the last two the allocator does not say what it holds, as CUDA's own pools do not.
    for reserved, allocated, calls in (
        (0, 0, 1),
        (40, 10, 2),
        (40, 30, 2),
        (40, 0, 2),
        (60, 55, 3),
        (0, 50, 4),
        (0, 50, 5),
    ):
        numbers.update(reserved=reserved, allocated=allocated)
        assert policy.free_memory(device) == 100 - allocated
        assert len(asked) == calls


def test_policy_is_what_runs():
    q, k, v = inputs()
    first = Carry(CarriedConfig(impl="blocked", tile=16))
    assert first.decision is None
    _, carry = carried_attention(q[0], k[0], v[0], first)
    assert carry.decision.plan == first.decision.plan in ("stored", "mixed", "recompute")
    assert carry.decision.impl == "blocked"


def on_a_gpu(monkeypatch, config, dtype=torch.bfloat16, d=128, layers=1, limits=(9, 232448)):
    """Decisions of calls on a GPU that is not there: tensors that hold nothing but shapes, and so many bytes free."""
    monkeypatch.setattr(launch, "limits_of", lambda device: Limits.of((limits[0], 0), limits[1]))
    monkeypatch.setattr(policy, "free_memory", lambda device: 64 * GIB)
    layout = TileLayout(config, 256, 256)
    with FakeTensorMode(allow_non_fake_inputs=True):
        # Without CUDA PyTorch computes nothing on fake CUDA tensors either, so that no layout can be made there.
        layout.bounds = torch.empty(layout.bounds.shape, dtype=torch.int32, device="cuda")
        carry, decisions = Carry(config, layout=layout), []
        for _ in range(layers):
            q, k, v = (torch.empty(1, h, 256, d, dtype=dtype, device="cuda") for h in (4, 2, 2))
            o, carry = carried_attention(q, k, v, carry)
            assert (o.shape, o.device.type) == (q.shape, "cuda")
            decisions.append(carry.decision)
    assert len(set(decisions)) == 1
    return decisions[0]


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("training", [True, False])
def test_blocks_of_more_layers_than_a_kernel_sums_are_stored_on_a_gpu(monkeypatch, impl, training):
    """They were left to the any-device path, and refused with impl='triton'."""
    with torch.set_grad_enabled(training):
        found = on_a_gpu(monkeypatch, CarriedConfig(layers=8, impl=impl), layers=8)
        assert (found.plan, found.impl) == ("stored", "triton")
        assert "layers is 8; the kernels sum up to 4, any number with plan='stored'" in found.reason
        four = on_a_gpu(monkeypatch, CarriedConfig(layers=4, impl=impl), layers=4)
        assert (four.plan, four.impl) == ("stored" if training else "mixed", "triton")
        assert "layers" not in four.reason


def test_where_only_one_layer_fits_shared_memory_auto_is_stored_on_a_gpu(monkeypatch):
    small = {"dtype": torch.float32, "d": 256, "limits": (8, 101376)}
    found = on_a_gpu(monkeypatch, CarriedConfig(), **small)
    assert (found.plan, found.impl) == ("stored", "triton")
    assert "too few to sum the scores of 4 layer(s)" in found.reason
    named = on_a_gpu(monkeypatch, CarriedConfig(plan="recompute"), **small)
    assert (named.plan, named.impl) == ("recompute", "blocked")
    assert named.reason.startswith("asked for; the kernels cannot run it: a program has 101376 bytes")


@pytest.mark.parametrize(
    ("options", "sizes", "why"),
    [
        ({"layers": 8, "plan": "mixed"}, {}, "layers is 8; the kernels sum up to 4, any number with plan='stored'"),
        ({}, {"d": 512}, "head widths are 512 and 512; the kernels take up to 256"),
        ({"layers": 8}, {"dtype": torch.float64}, "q is torch.float64; the kernels take fp16, bf16 and fp32"),
        ({"carry_dtype": torch.float64}, {}, "carry_dtype is torch.float64"),
        ({"layers": 1}, {"d": 257}, "head widths are 257"),
    ],
)
def test_a_decision_says_why_the_kernels_do_not_run(monkeypatch, options, sizes, why):
    found = on_a_gpu(monkeypatch, CarriedConfig(**options), **sizes)
    assert found.impl == "blocked"
    assert f"; the kernels cannot run it: {why}" in found.reason


def test_a_decision_on_the_cpu_says_why_the_kernels_do_not_run():
    q, k, v = inputs(layers=1)
    for impl in ("auto", "blocked"):
        _, carry = carried_attention(q[0], k[0], v[0], Carry(CarriedConfig(tile=16, impl=impl)))
        assert ("; the kernels cannot run it: q is on cpu" in carry.decision.reason) == (impl == "auto")


def operands(n, stored):
    config = CarriedConfig(tile=16, layers=2)
    q, k, v = ([x.detach() for x in group] for group in inputs(layers=n, T=20, d=8, dtype=torch.float32))
    layout = TileLayout(config, 20, 20)
    layer = layout.layers[0]
    z = torch.zeros(1, 4, layout.slots, 16, 16, dtype=torch.float16) if stored else None
    gain, centre = [torch.rand(4)] * n, [x.mean(2) for x in k]
    lists = (q, k, v[0], gain, centre, layer.bounds, layer.rows)
    options = (*OPTIONS[:7], [stored] * n, *OPTIONS[8:])
    return lists, layer, z, options


@pytest.mark.parametrize(("n", "stored"), [(1, True), (3, False)])
def test_operator_contracts(n, stored):
    (q, k, v, gain, centre, bounds, rows), layer, z, options = operands(n, stored)
    sink = torch.rand(4)
    forward, backward = torch.ops.tilewise.carried_forward.default, torch.ops.tilewise.carried_backward.default
    args = (q, k, v, gain, centre, bounds, rows, None, z, stored, sink, None, *options)
    torch.library.opcheck(forward, args)
    O, lse = forward(*args)
    e = None if z is None else torch.zeros(z.shape, dtype=torch.bfloat16)
    flags = (False, e, stored, stored, not stored)
    args = (O, q, k, v, O, lse, gain, centre, bounds, rows, layer.columns, z, *flags, sink, None, *options)
    torch.library.opcheck(backward, args)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "layers is 0; expected at least 1"),
        ({"blocks": 0}, "blocks is 0"),
        ({"scaling": "max"}, "scaling is 'max'; expected one of sum, mean, gain"),
        ({"plan": "fast"}, "plan is 'fast'"),
        ({"impl": "cuda"}, "impl is 'cuda'"),
        ({"windows": 0}, "windows holds 0"),
        ({"windows": (1, 2)}, "windows has 2 entries; expected layers = 4"),
        ({"tile": 48}, "tile is 48; expected a power of two"),
        ({"dropout_p": 1.0}, "dropout_p is 1.0"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"impl": "reference", "plan": "stored"}, "nearest legal call: plan='recompute'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        CarriedConfig(**options)


def call(config=None, gain=None, sink=None, mask=None, **change):
    q, k, v = (group[0].detach() for group in inputs(layers=1, dtype=torch.float32))
    tensors = {"q": q, "k": k, "v": v}
    for name, f in change.items():
        tensors[name] = f(tensors[name])
    return carried_attention(
        *tensors.values(), Carry(config or CarriedConfig(tile=16), mask=mask), gain=gain, sink=sink
    )


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"q": lambda x: x[0]}, ValueError, "q has shape"),
        ({"k": lambda x: x.half()}, TypeError, "k is torch.float16; expected"),
        ({"q": lambda x: x.long(), "k": lambda x: x.long(), "v": lambda x: x.long()}, TypeError, "q is torch.int64"),
        ({"k": lambda x: x[..., :4]}, ValueError, "to fit q"),
        ({"k": lambda x: x.repeat(1, 2, 1, 1)[:, :3]}, ValueError, "expected a divisor of q's 4"),
        ({"v": lambda x: x[:, :, :5]}, ValueError, "v has shape"),
        ({"q": lambda x: x[:, :, :0]}, ValueError, "no empty dimension"),
        ({"gain": torch.ones(4)}, ValueError, "nearest legal call: scaling='gain'"),
        ({"sink": torch.ones(4)}, ValueError, r"CarriedConfig\(sink=True\)"),
        (
            {"sink": torch.ones(3), "config": CarriedConfig(sink=True)},
            ValueError,
            r"sink has shape \(3,\); expected \[4\]",
        ),
        ({"mask": Mask.lengths([1, 2, 3])}, ValueError, "mask.bounds has shape"),
        ({"mask": Mask.padding(torch.ones(1, 37))}, ValueError, "Nearest legal calls: Mask.lengths"),
        ({"mask": Mask.full(torch.ones(37, 37) > 0)}, ValueError, "mask has dense"),
    ],
)
def test_calls_are_checked(kwargs, error, message):
    with pytest.raises(error, match=message):
        call(**kwargs)


def test_layers_of_a_block_have_to_match():
    q, k, v = inputs()
    _, carry = carried_attention(q[0], k[0], v[0], Carry(CarriedConfig(tile=16, scaling="gain")))
    with pytest.raises(ValueError, match=r"gain is None; expected a tensor \[4\] for layer 1"):
        carried_attention(q[1], k[1], v[1], carry)
    with pytest.raises(ValueError, match="all layers of a block have the same tokens"):
        carried_attention(q[1][:, :, :9], k[1], v[1], carry, gain=torch.ones(4))
    with pytest.raises(ValueError, match="as in the layers before"):
        carried_attention(q[1][:, :2], k[1], v[1], carry, gain=torch.ones(2))


MODULES = ["", ".config", ".inference", ".layout", ".llama", ".nn", ".policy", ".reference", ".shared_keys", ".state"]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    module = importlib.import_module("tilewise.carried" + name)
    public = {x: getattr(tilewise.carried, x) for x in tilewise.carried.__all__}
    result = doctest.testmod(module, extraglobs=public | {"torch": torch})
    assert result.attempted > 0
    assert result.failed == 0


def test_importing_it_does_not_import_triton():
    code = "import sys, tilewise.carried; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


FORBIDDEN = {
    "reference.py": ("blocked", "triton"),
    "blocked.py": ("reference", "triton"),
    "triton": ("blocked", "reference"),
}


@pytest.mark.parametrize("place", FORBIDDEN)
def test_implementations_do_not_import_one_another(place):
    path = Path(tilewise.carried.__file__).with_name(place)
    for file in path.glob("*.py") if path.is_dir() else [path]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == (2 if path.is_dir() else 1):
                assert (node.module or "").split(".")[0] not in FORBIDDEN[place]
                assert not {x.name for x in node.names} & set(FORBIDDEN[place])
