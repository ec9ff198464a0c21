"""Peak memory and launches of the published mechanisms at 12 heads × 64 and 16,384 tokens, as the host plans them."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planned import Allocations, counted, passes

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from relative_cases import timed_call

from tilewise import Mask, Unsupported, triton
from tilewise.triton import config
from tilewise.triton.launch import launcher


def planned(case, N, skew="memory", **options):
    """The portable kernels, unless another skew is asked for."""
    call, _ = timed_call(case, N, "meta", skew=skew, **options)
    return passes(call)


def test_what_is_counted():
    with Allocations() as memory:
        x = torch.empty(2**20, device="meta")
        y = x[:100]
        del x
        assert memory.peak == 4 * 2**20
        z = torch.empty(2**20, device="meta")
        assert memory.peak == 8 * 2**20
        del y, z
        torch.empty(2**20, device="meta")
    assert memory.peak == 8 * 2**20


@pytest.mark.parametrize(("case", "forward", "backward"), [("t5", 2, 160), ("shaw", 75, 200), ("deberta", 950, 850)])
def test_peak_memory_at_8192(case, forward, backward):
    found = planned(case, 8192)
    assert found["forward"][0] <= forward
    assert found["backward"][0] <= backward


MASKED = {
    "causal": lambda B, N: Mask.causal(),
    "window": lambda B, N: Mask.window(1024, 0),
    "lengths": lambda B, N: Mask.lengths([N - 100 * b for b in range(B)]),
    "packed": lambda B, N: Mask.packed([0, N // 3, N], N),
    "padding": lambda B, N: Mask.padding(torch.arange(N) >= torch.arange(B)[:, None] + 3),
}


@pytest.mark.parametrize("skew", ["auto", "memory"])
@pytest.mark.parametrize("case", ["t5", "shaw", "deberta", "txl"])
def test_masks_take_no_memory_of_the_squared_length(case, skew):
    N = 8192
    plain = {B: planned(case, N, skew, tokens=B * N) for B in (1, 2)}
    for name, make in MASKED.items():
        B = 1 if name == "packed" else 2
        found = planned(case, N, skew, tokens=B * N, mask=make(B, N).to(torch.device("meta")))
        for pass_, (peak, _) in found.items():
            # Bits of all pairs are 8 MiB. Every block has four integers, every query of a packed row two.
            assert peak <= plain[B][pass_][0] + 0.2, (name, pass_)


def test_short_sequences_prepare_nothing_for_saturated_tiles():
    def names(N, **options):
        return {name: [k for k, _, _ in started] for name, (_, started) in planned("deberta", N, **options).items()}

    assert names(128)["forward"] == ["expand", "project", "expand", "project", "attend"]
    # Kept projections are not made again, and no end row has a launch of its own.
    assert [k for k in names(128)["backward"] if k != "expand"] == [
        "prepare", "grad_key", "grad_query", "fold", "fold", "collect", "reduce", "collect", "reduce",
    ]  # fmt: skip
    assert names(128, projections="recompute")["backward"].count("project") == 2
    assert names(2048)["forward"].count("prepare") == 1


def test_short_sequences_share_the_tiles_of_residue_rows():
    for N, pack in ((128, 4), (256, 2), (512, 1), (2048, 1)):
        for _, started in planned("shaw", N, projections="recompute").values():
            for kernel, grid, meta in started:
                if kernel in ("project", "fold", "collect"):
                    assert (meta["TM"], meta["PACK"]) == (64, pack)
                if kernel in ("project", "fold"):
                    # 8 residues of 64 rows a tile.
                    assert grid == (12 * 16384 // 64,)


@pytest.mark.parametrize("registers", [False, True])
def test_no_descriptor_has_the_stride_of_expanded_heads(monkeypatch, registers):
    monkeypatch.setattr(config, "SKEW_IN_REGISTERS", registers)
    call, _ = timed_call("txl", 512, "meta", H=2)
    port = call.ports[0]
    call = replace(call, ports=(replace(port, table=port.table[:1].expand(2, -1, -1)),))
    seen = []
    launcher.append(lambda kernel, grid, *args, **meta: seen.extend(x for x in args if hasattr(x, "block_shape")))
    o, lse = torch.empty_like(call.q), torch.empty(call.q.shape[:3], device="meta")
    leaves = [call.q, call.k, call.v, *call.tensors]
    triton.forward(call, o, lse)
    triton.backward(call, o, None, o, lse, [True] * len(leaves), [torch.empty_like(x) for x in leaves])
    launcher.pop()
    assert seen
    assert all(s > 0 for x in seen for s in x.strides)


@pytest.mark.parametrize("skew", ["auto", "shared"])
def test_biases_form_no_sum_with_the_query(monkeypatch, skew):
    found = planned("txl", 512, skew=skew)
    assert [kernel for kernel, _, _ in found["forward"][1]] == ["attend_band"]
    assert found["forward"][0] < 0.1
    monkeypatch.setattr(config, "SKEW_IN_REGISTERS", False)
    if skew == "shared":
        with pytest.raises(Unsupported, match=r"config\.SKEW_IN_REGISTERS is False"):
            planned("txl", 512, skew=skew)
        return
    # u·k and v·p in fp32: a number a key and a number a table row.
    kernels = [kernel for kernel, _, _ in planned("txl", 512)["forward"][1]]
    assert kernels == ["dots", "dots", "project", "attend"]


def test_both_ways_of_biases_are_compiled_ahead():
    import relative_biases

    for variant in relative_biases.VARIANTS:
        with counted(started := []):
            relative_biases.perform(variant, 512)
        names = [kernel for kernel, _, _ in started]
        assert names.count("add_parts") == (0 if variant == "sums" else 2)
        assert {"attend_band", "key_pass", "query_pass", "collect_tiles"} <= set(names)
