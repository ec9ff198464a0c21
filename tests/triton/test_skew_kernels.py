"""The kernels that skew in registers: run from their own source against the fp64 oracle, and compiled for sm_90."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import missed_by
from planned import passes

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from relative_cases import timed_call

from tilewise import Mask, rows
from tilewise.call import Call
from tilewise.terms import Port
from tilewise.triton import plan

linear_backward = pytest.importorskip("tilewise.triton.linear_backward")

HERE = Path(__file__).parent

FORWARD = ["both", "both-backwards", "query", "key", "narrow", "causal", "window", "lengths", "cross", "long-queries",
           "bf16", "identity", "identity-ascending", "wide", "biases", "biases-wide"]  # fmt: skip
BACKWARD = {
    "gradients": ["", "-own", "-heads", "-causal", "-window", "-lengths", "-cross", "-long-queries", "-shares", "-bf16",
                  "-parameters", "-wide"],
    "biased-gradients": ["", "-heads", "-causal", "-lengths", "-cross", "-long-queries", "-shares", "-bf16",
                         "-parameters", "-content", "-position", "-wide"],
    "query-gradients": ["", "-long", "-shared", "-causal", "-window", "-lengths", "-heads", "-cross", "-long-queries",
                        "-bf16", "-short", "-reached", "-none"],
    "both-gradients": ["", "-long", "-backwards", "-causal", "-window", "-lengths", "-heads", "-cross", "-bf16",
                       "-short", "-shares", "-wide"],
}  # fmt: skip
BROKEN = ["phase", "rows", "slot", "edge", "order", "early", "staged", "heads", "turned", "end", "plane", "sums",
          "place", "stretch", "before", "shifted", "carried", "missing", "slots", "groups", "open",
          "closed", "content", "position", "columns", "group", "parts"]  # fmt: skip


def lines(script: str, *jobs: str):
    done = subprocess.run(
        [sys.executable, str(HERE / script), *jobs], cwd=HERE, capture_output=True, text=True, timeout=500,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def missed(request):
    return missed_by("modelled.py", request, "test_within_the_error_budget", "jobs")


@pytest.mark.parametrize(
    "jobs",
    [FORWARD, *([kind + name for name in names] for kind, names in BACKWARD.items())],
    ids=["forward", *BACKWARD],
)
def test_within_the_error_budget(missed, jobs):
    found, errors = missed
    assert [job for job in jobs if job not in found] == [], errors[-3000:]
    assert {job: found[job] for job in jobs if found[job]} == {}


def test_a_mistake_shows():
    found = lines("modelled.py", *(f"broken:{name}" for name in BROKEN))
    assert len(found) == len(BROKEN)
    assert [line["name"] for line in found if not line["found"]] == []


def test_compiled_for_hopper():
    found = {(line["case"], line["kernel"]): line for line in lines("compiled_skew.py")}
    kernels = {"attend_band", "query_pass", "key_pass", "collect_tiles"}
    ends = ("sum_ends", "sum_rows")
    assert set(found) == {(case, kernel) for case, last in (
        ("deberta", ends), ("txl", ("spread",)), ("wav2vec2_bert", ends)) for kernel in (*kernels, *last)
    } | {("wav2vec2_bert", "attend")}  # fmt: skip
    portable = found.pop(("wav2vec2_bert", "attend"))
    # A loop for the band and one for each side. One for both sides has, with Triton 3.6, a wait for every instruction.
    assert portable["instructions"] == 24
    assert portable["waits"] < portable["instructions"] / 2
    for line in found.values():
        if line["kernel"] in ("spread", *ends):
            continue
        assert line["products"] > 0
        assert line["narrow"] == 0
        if line["kernel"] == "collect_tiles":
            continue
        assert line["invariant"] == line["unordered"] == []
        # A few bytes of spills cost nothing; an accumulator in local memory would be kilobytes.
        assert line["stack"] <= 32
        if line["kernel"] == "key_pass":
            # With too few registers ptxas waits after each of a product's instructions. That of Triton 3.8 (not of 3.6)
            # does so in the passes over queries, too.
            assert line["waits"] < line["instructions"] / 2
        # Three programs of the forward to an SM, two of the backward passes.
        programs = 3 if line["kernel"] == "attend_band" else 2
        assert programs * (line["shared"] + 1024) <= 233472
        # Threads get registers by eights.
        assert programs * 128 * -(-line["registers"] // 8) * 8 <= 65536
        assert programs * 128 * line["registers"] <= 65536


@pytest.mark.parametrize(("case", "most"), [("shaw", 125), ("deberta", 540), ("txl", 640)])
def test_the_backward_is_linear_in_memory(case, most):
    found = {}
    for N in (8192, 16384):
        found[N], started = passes(timed_call(case, N, "meta", tokens=16384, skew="shared")[0])["backward"]
        assert {"query_pass", "key_pass"} <= {kernel for kernel, _, _ in started}
    assert found[8192] <= most
    # As many tokens in longer sequences: what a wave of row blocks needs grows, the rest stays.
    assert found[16384] <= 1.1 * max(most, found[8192])


def test_long_rows_fill_the_device():
    for N, most in ((32768, 1300), (65536, 2600), (262144, 6000)):
        peak, started = passes(timed_call("txl", N, "meta", tokens=N)[0])["backward"]
        programs = {grid[0] for kernel, grid, _ in started if kernel == "query_pass"}
        assert max(programs) >= (264 if N < 2**17 else 64)
        assert peak <= most


def test_banded_terms_can_be_left_to_the_portable_kernels(monkeypatch):
    monkeypatch.setattr(linear_backward, "BANDED", False)
    for case, kernel in (("shaw", "grad_key"), ("deberta", "grad_key"), ("txl", "key_pass")):
        call = timed_call(case, 128, "meta", tokens=256, H=2)[0]
        assert bool(linear_backward.unplanned(plan.Facts(call))) == (case != "txl")
        assert kernel in [name for name, _, _ in passes(call)["backward"][1]]


@pytest.mark.parametrize(("reach", "kernel"), [(32767, "query_pass"), (32768, "grad_query")])
def test_tables_of_more_rows_than_a_grid_has_on_its_second_axis(reach, kernel):
    q, table = (
        torch.empty(*shape, 64, dtype=torch.float16, device="meta") for shape in ((1, 2, 128), (2, 2 * reach + 1))
    )
    call = Call(q, q, q, (Port("query", rows.clipped(-reach, reach), table, None),), Mask(), 0.125, 0)
    started = passes(call)["backward"][1]
    assert kernel in {name for name, _, _ in started}
    assert max(n for _, grid, _ in started for n in grid[1:]) <= 65535


def test_the_number_of_saturated_tiles_chooses_the_kernels(monkeypatch):
    def backward(N, case="shaw", tokens=8192, **options):
        call = timed_call(case, N, "meta", tokens=tokens, H=2, **options)[0]
        return {name for name, _, _ in passes(call)["backward"][1]}

    # Of 32 tiles in a row, 29 hold saturated offsets alone.
    assert linear_backward.saturated_tiles(plan.Facts(timed_call("shaw", 2048, "meta", H=2)[0])) == 29
    assert "grad_query" in backward(8192)
    assert "query_pass" in backward(4096) & backward(8192, skew="shared") & backward(8192, "deberta")
    # A causal call may still see as many keys; a window leaves few of them.
    assert "grad_query" in backward(8192, mask=Mask.causal())
    assert "query_pass" in backward(8192, mask=Mask.window(300, 300))
    monkeypatch.setattr(linear_backward, "PORTABLE_FROM", 20)
    assert "grad_query" in backward(2048)
    assert "query_pass" in backward(1024) & backward(2048, skew="shared") & backward(8192, "deberta")
    assert "grad_query" in backward(1024, skew="memory")
    monkeypatch.setattr(linear_backward, "PORTABLE_FROM", None)
    assert "query_pass" in backward(8192)


def test_the_order_that_the_test_above_looks_for():
    import compiled_skew

    copy_in = "cp.async.bulk.tensor.4d.shared::cluster.global [x];"
    copy_out = "cp.async.bulk.tensor.4d.global.shared::cta [x];"
    assert compiled_skew.unordered(f"wgmma.mma_async\nbar.sync 0;\n{copy_in}") == []
    assert compiled_skew.unordered(f"bar.sync 0;\nwgmma.mma_async\n{copy_in}") == [copy_in]
    assert compiled_skew.unordered(f"stmatrix\nfence.proxy.async\nbar.sync 0;\n{copy_out}") == []
    assert compiled_skew.unordered(f"stmatrix\nbar.sync 0;\n{copy_out}") == [copy_out]
    assert compiled_skew.unordered(f"fence.proxy.async\nstmatrix\nbar.sync 0;\n{copy_out}") == [copy_out]
