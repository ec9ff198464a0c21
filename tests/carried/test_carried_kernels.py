"""The Triton kernels: under the interpreter against the oracle, and compiled for sm_90 with no GPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from carried_cases import CarriedConfig, dense, inputs, run
from hypothesis import given
from hypothesis import strategies as st
from meta_launches import on_meta

from tilewise.carried import carried_decode
from tilewise.carried.triton import decode, launch, settings
from tilewise.carried.triton.transient import parts_of
from tilewise.mask import Mask
from tilewise.triton import launch as starting
from tilewise.triton.config import Limits

HERE = Path(__file__).parent


def script(name, *arguments, **environment):
    """Run a script of this folder in its own process: the interpreter has to be chosen before Triton is imported."""
    command = [sys.executable, "-W", "ignore", HERE / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_kernels_under_the_interpreter():
    """All cases of interpreted_kernels.py, each with a check that two runs are bitwise equal where it says so."""
    lines = script("interpreted_kernels.py", TRITON_INTERPRET="1").splitlines()
    assert len(lines) == 30


def test_decode_kernel_under_the_interpreter():
    """One and several queries, split keys, windows that differ, lengths, offsets, gain, sink, softcap, saturation."""
    assert len(script("interpreted_decode.py", TRITON_INTERPRET="1").splitlines()) == 12


def test_fp32_sums_of_layers_are_added_as_a_gpu_adds_them_within_the_budget():
    lines = script("interpreted_chains.py", TRITON_INTERPRET="1").splitlines()
    assert [x.split()[0] for x in lines] == ["recompute", "stored", "mixed"]


def test_more_planes_than_a_grid_takes_are_refused(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", True)
    monkeypatch.setattr(decode.triton.knobs.runtime, "interpret", True)
    for B, why in ((32767, None), (32768, "65536; the kernels? takes? up to 65535")):
        x = torch.empty(1, dtype=torch.float16).expand(B, 2, 1, 16)
        for found in (launch.refusal(x, x, x, CarriedConfig(tile=16)), decode.refusal(x, x, x, None, None)):
            assert found is None if why is None else re.search(why, found)


def test_precision_study_of_the_kernels():
    """Shifted rows with scores of spread 2, all plans in bf16: errors as multiples of plain attention's."""
    lines = script("interpreted_study.py", "4", TRITON_INTERPRET="1").splitlines()
    assert [x.split()[0] for x in lines] == ["recompute", "stored", "mixed"]


def test_launches_without_triton_s_binder_start_what_triton_would():
    """Dtypes, alignments, divisibility, constants, options, devices, settings and hooks: see direct_launches.py."""
    lines = script("direct_launches.py").splitlines()
    assert lines == ["variations 14", "other tensors", "devices", "tensors elsewhere", "empty grid", "settings"]


# Of the products of an iteration, those with P or E on the left; these are new every time. Q and K are not, and ptxas
# before 13.3 overwrites such an operand if it lies in registers. Spilled bytes: of 64 × 64 tiles on four warps, which
# an H200 runs faster for several summed layers than 32 × 128 on eight, although they spill more than twice as much.
COMPILED = {
    "third layer, mixed": ({"attend": (1, 2), "keys_gradient": (2, 3), "queries_from_e": (0, 1)}, 200),
    "second layer, stored": ({"attend": (1, 2), "keys_gradient": (2, 3), "queries_from_e": (0, 1)}, 200),
    "last layer": ({"attend": (1, 2), "keys_gradient": (2, 4), "queries_from_e": (0, 1)}, 200),
    "recompute of four": (
        {"attend": (1, 5), "keys_gradient": (2, 7), "queries_from_e": (0, 1), "keys_from_e": (0, 1)},
        1700,
    ),
    "recompute of two with gains": (
        {"keys_gradient": (2, 5), "queries_from_e": (0, 1), "keys_from_e": (0, 1)},
        1700,
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver's own target is used where there is a GPU")
@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile_for_hopper_within_its_shared_memory(name):
    products_of, spills = COMPILED[name]
    lines = [x for x in script("compiled_kernels.py", name).splitlines() if "registers" in x]
    number = re.compile(r"(spills|shared|wgmma|exps|dots|left) (\d+)")
    kernels = {x.split(":")[0].strip(): {key: int(n) for key, n in number.findall(x)} for x in lines}
    assert set(kernels) - {"row_statistics", "sum_heads"} == set(products_of)
    # Of these the one whose scores are rounded is centred, by its own kernel.
    assert [x.split(":")[0].strip() for x in lines if x.endswith("centred")] == (
        ["attend"] if name in ("third layer, mixed", "second layer, stored") else []
    )
    for kernel, (fresh, products) in products_of.items():
        found = kernels[kernel]
        assert found["shared"] <= settings.SHARED
        assert found["spills"] <= spills
        assert found["wgmma"] > 0
        assert found["left"] * products <= found["dots"] * fresh
        # P once in each loop over a tile's products, not once for dV and once for dS, which Triton gives two layouts.
        assert kernel not in ("attend", "keys_gradient") or found["exps"] * products == found["dots"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver's own target is used where there is a GPU")
def test_decoding_keeps_its_scores_in_one_layout():
    """An fp16 row takes fewer registers than an fp32 one unless its sums move to a layout of their own."""
    lines = [x for x in script("compiled_kernels.py", "decode").splitlines() if "decode_keys" in x]
    fp32, _, fp16 = (int(re.search(r"registers (\d+)", x).group(1)) for x in lines)
    assert fp16 <= fp32


# Three layers summed with dropout needed 237,600 bytes, one layer of width 256 with dropout 234,496, four layers of
# width 256 in fp32 294,912, and decoding with 64 query rows of width 256 278,528: more than sm_90 has.
WITHIN = {
    90: (232448, ["recompute dropout", "none wide dropout", "recompute wide fp32", "decode wide rows"]),
    86: (101376, ["none dropout", "decode wide rows"]),
}


@pytest.mark.parametrize("capability", WITHIN)
def test_kernels_stay_within_shared_memory(capability):
    """Every kernel of the cases that need most, as Triton lays out its shared memory."""
    limit, cases = WITHIN[capability]
    lines = script("shared_memory.py", *cases, "--capability", str(capability), "--limit", str(limit)).splitlines()
    found = [int(x.rsplit(" ", 1)[1]) for x in lines if " shared " in x]
    assert len(found) == (25 if capability == 90 else 4)
    assert max(found) <= limit, lines


def test_widths_for_which_no_tile_is_small_enough_are_refused(monkeypatch):
    """fp32 of width 256 where a program has 99 KiB: four layers cannot be summed, one can."""
    small = Limits.of((8, 6), 101376)
    monkeypatch.setattr(launch, "INTERPRETED", True)
    monkeypatch.setattr(decode.triton.knobs.runtime, "interpret", True)
    for module in (launch, decode):
        monkeypatch.setattr(module, "limits_of", lambda device: small)
    x = torch.empty(1, 8, 16, 256)
    assert "101376 bytes of shared memory, too few to sum the scores of 4" in launch.refusal(x, x, x, CarriedConfig())
    assert launch.refusal(x, x, x, CarriedConfig(plan="stored")) is None
    assert "too few for 128 query rows" in decode.refusal(x, x[:, :1], x[:, :1], None, None)


@pytest.mark.parametrize("width", [16, 64, 128, 256])
@pytest.mark.parametrize("bytes_", [2, 4])
@pytest.mark.parametrize("tile", [16, 64, 128])
def test_tiles_divide_a_packed_tile(width, bytes_, tile):
    shapes = [
        f(width, bytes_, tile, n, 2) for n in (1, 2, 4) for f in (settings.forward_tiles, settings.backward_tiles)
    ]
    shapes += [settings.product_tiles(width, bytes_, tile, keyed) for keyed in (False, True)]
    for shape in shapes:
        assert tile % shape.queries == tile % shape.keys == 0
        assert min(shape.queries, shape.keys) >= 16


@pytest.mark.parametrize(
    ("plan", "layers", "expected"),
    [("stored", 4, (8, 17)), ("mixed", 4, (9, 20)), ("recompute", 4, (14, 38)), ("recompute", 1, (2, 5))],
)
def test_matrix_products_of_a_plan(monkeypatch, plan, layers, expected):
    """Read from the launches of a block, forward and backward: what docs/carried-measured.md counts."""
    passes: dict[str, int] = {"attend": 0, "backward": 0}

    def count(kernel, grid, *args, **meta):
        name = kernel.fn.__name__
        if name == "attend":
            passes["attend"] += meta["COUNT"] + 1
        elif name == "keys_gradient":
            passes["backward"] += 3 + (0 if meta["OWN"] else meta["COUNT"])
        elif name in ("queries_from_e", "keys_from_e"):
            passes["backward"] += 1

    monkeypatch.setattr(launch, "refusal", lambda *_: None)
    monkeypatch.setattr(starting, "launcher", [count])
    q, k, v = inputs(layers=layers, T=256, d=16, dtype=torch.bfloat16)
    outputs = run(CarriedConfig(layers=layers, impl="triton", plan=plan), q, k, v)
    torch.autograd.grad(outputs, [*q, *k, *v], [torch.ones_like(o) for o in outputs])
    assert tuple(passes.values()) == expected


@pytest.mark.parametrize(("layers", "plan"), [(1, "recompute"), (4, "recompute"), (4, "mixed")])
@pytest.mark.parametrize("T", [1024, 4096, 8192])
def test_a_pass_over_keys_fills_the_gpu(monkeypatch, layers, plan, T):
    """Heads are summed in registers only where each launch, of a part of the heads, still has programs enough."""
    monkeypatch.setattr(settings, "FILL", 1.9)
    for kind in ("backward", "backward, carried", "backward, summed"):
        monkeypatch.setitem(settings.WIDE, kind, settings.Shape(32, 128, 8, 2))
    launches = on_meta(monkeypatch)
    q, k, v = inputs(layers=layers, T=T, H=20, Hk=4, d=128, dtype=torch.bfloat16, device="meta")
    outputs = run(CarriedConfig(layers=layers, impl="triton", plan=plan), q, k, v)
    torch.autograd.grad(outputs, [*q, *k, *v], [torch.ones_like(o) for o in outputs])
    found = [(grid, meta) for name, grid, meta in launches if name == "keys_gradient"]
    assert {meta["GROUPED"] for _, meta in found} == {plan == "mixed" and T == 8192}
    for (blocks, planes), meta in found:
        assert blocks * planes >= (settings.FILL * 132 if meta["GROUPED"] else min(20 * blocks, 264))


@pytest.mark.parametrize("plan", ["stored", "mixed", "recompute"])
@pytest.mark.parametrize(
    "options", [{}, {"scaling": "gain"}, {"sink": True, "softcap": 3.0}, {"dropout_p": 0.1}], ids=str
)
def test_host_code_makes_nothing_on_another_device(monkeypatch, plan, options):
    """On meta tensors, which PyTorch refuses to mix with the CPU's; and so is the oracle with a mask on the CPU."""
    launches = on_meta(monkeypatch)
    q, k, v = inputs(T=256, d=16, dtype=torch.bfloat16, device="meta")
    heads = lambda: [torch.ones(4, device="meta", requires_grad=True) for _ in q]  # noqa: E731
    gain, sink = heads() if "scaling" in options else None, heads() if "sink" in options else None
    seed = [torch.ones(1, dtype=torch.int64, device="meta") for _ in q]
    config = CarriedConfig(impl="triton", plan=plan, **options)
    extra = {"gain": gain, "sink": sink, "seed": seed}
    outputs = run(config, q, k, v, **extra)
    outputs += dense(config, q, k, v, mask=Mask.packed([0, 1, 256]), **extra)
    assert all(o.device.type == "meta" for o in outputs)
    grads = torch.autograd.grad(outputs, [*q, *k, *v], [torch.ones_like(o) for o in outputs])
    assert all(g.device.type == "meta" for g in grads)
    step = {"gain": gain and gain[1], "sink": sink and sink[1], "mask": Mask.lengths([200])}
    row = torch.empty(1, 4, 256, 256, device="meta")
    assert all(x.device.type == "meta" for x in carried_decode(q[0], k[0], v[0], row, 1, config, **step))
    assert {"attend", "keys_gradient", "queries_from_e", "sum_heads", "decode_keys"} <= {x[0] for x in launches}


@given(
    planes=st.integers(1, 8), together=st.sampled_from([1, 2, 4]), rows=st.integers(1, 40), more=st.integers(0, 9),
    back=st.integers(-1, 40), limit=st.integers(1, 4000),
)  # fmt: skip
def test_parts_of_e_cover_everything_once_within_the_limit(planes, together, rows, more, back, limit):
    planes, columns = planes * together, rows + more
    parts = parts_of(planes, together, rows, columns, back, 1, limit)
    held = [min(m, back) + 1 if back >= 0 else columns for m in range(rows)]
    assert [n for span in parts.heads for n in range(*span)] == list(range(planes))
    assert [m for span in parts.rows for m in range(*span)] == list(range(rows))
    assert all((b - a) % together == 0 and b - a <= parts.planes for a, b in parts.heads)
    assert all(sum(held[a:b]) < parts.slots for a, b in parts.rows)
    smallest = together * (max(held) + 1)
    assert parts.planes * parts.slots <= max(limit, smallest)


def test_tables_of_tiles_are_checked():
    table = json.loads(Path(settings.__file__).with_name("tiles.json").read_text())
    settings.use(table)
    del table["wide"]["product"]
    with pytest.raises(ValueError, match=r"wide has the kernels .*; expected"):
        settings.use(table)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernels run")
def test_an_explicit_implementation_does_not_fall_back():
    q, k, v = inputs(layers=1, dtype=torch.float32)
    with pytest.raises(ValueError, match="the kernels run on cuda; nearest legal call: impl='blocked'"):
        run(CarriedConfig(layers=1, impl="triton"), q, k, v)
    with pytest.raises(ValueError, match="cannot run this step: q is on cpu"):
        carried_decode(q[0], k[0], v[0], None, 0, CarriedConfig(impl="triton"))
