"""The depth and carried sets on the CPU: every system of every case is right, and both run from command to report."""

import gc
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from tilewise.bench import records, runner, worker
from tilewise.bench.carried import CARRIED
from tilewise.bench.cli import app
from tilewise.bench.depth import DEPTH
from tilewise.bench.depth_work import Work, drive, inputs
from tilewise.bench.sets import bench_set
from tilewise.bench.timing import Plan

TINY = {
    "depth": {"tokens": [7], "d": [48]},
    "carried": {"tokens": [40], "head_dim": [8], "window": [0]},
}
PLAN = Plan(rounds=1, replays=1)


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """A worker collects garbage after every record; what other tests left need not be looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def cells(name, **more):
    return runner.select(name, "cpu", sizes=TINY[name] if name == "depth" else {k: TINY[name][k] for k in
                         ("tokens", "head_dim")}, **more)  # fmt: skip


@pytest.mark.parametrize(("name", "case"), [(s, c) for s in TINY for c in bench_set(s).cases])
def test_every_system_of_a_case_has_a_valid_result(name, case):
    bench, measured, truth = bench_set(name), [], None
    for cell in cells(name, cases=[case]):
        truth = truth or bench.truth(cell)
        for record in worker.measure(bench, cell, truth, PLAN):
            assert record["ok"], (record["system"], record["error"], record["numerics"])
            assert record["tflops"] is None
            assert records.key(record) in cell.keys()
            assert set(record["numerics"]) <= set(truth.exact)
            if name == "depth":
                assert record["net_ms"] == pytest.approx(record["ms"] - record["overhead_ms"], abs=1e-4)
            measured.append((record["system"], record["ceiling"]))
    assert len(measured) >= 2
    assert [s for s, ceiling in measured if ceiling] == [s for s, _ in measured if s in ("plain", "no-carry")]


def test_depth_gates_a_wrong_result():
    cell = cells("depth", cases=["training"], systems=["eager"])[0]
    truth, work = DEPTH.truth(cell), DEPTH.build(cell)
    right = work.results("step")
    assert set(right) == {"y", "dx", "dquery", "dnorm"} <= set(truth.exact)
    for name, value in right.items():
        assert work.gate(value, truth.exact[name], truth.low_error[name], True)["ok"]
        off = value * (1 + 1e-4)
        assert not work.gate(off, truth.exact[name], truth.low_error[name], True)["ok"]


def test_depth_measures_the_schedule_that_it_names():
    """Sources of each read, from a stand-in for the operator: blocks of 3 of 8 sublayers, and Full."""
    for case, expected in (("decode", [1, 2, 2, 2, 3, 3, 3, 4, 4]), ("full", list(range(1, 9)))):
        cell = cells("depth", cases=[case], systems=["plain"])[0]
        seen = []
        drive(inputs(cell).x, Work.of(cell), lambda l, v, seen=seen: seen.append(len(v)) or v[-1])
        assert seen == expected


def test_carried_steps_of_all_plans_are_one_function_and_not_the_plain_one():
    losses = {}
    for cell in cells("carried", cases=["step"]):
        work = CARRIED.build(replace(cell, size={**cell.size, "tokens": 24}))
        with torch.no_grad():  # at the start all scores are nearly 0
            for name, weight in work.leaves.items():
                weight.mul_(20 if "query" in name or "key" in name else 1)
        losses[cell.system] = work.run().item()
    carried = [losses[s] for s in losses if s not in ("plain", "no-carry")]
    assert max(carried) - min(carried) < 1e-5
    assert abs(losses["plain"] - losses["no-carry"]) < 1e-5
    assert abs(losses["plain"] - losses["eager"]) > 1e-5


def test_cells_that_run_the_same_kernels_share_a_process():
    groups = runner._groups(runner.select("depth", "cuda", systems=["fla-core"]), cores=1)
    assert [[c.case for c in g] for g in groups] == [["prefill"], ["decode"], ["training", "training-eager"]]
    groups = runner._groups(runner.select("carried", "cuda", systems=["tilewise"]), cores=1)
    assert sorted(len(g) for g in groups) == [2, 5]


def test_carried_kernels_are_compiled_for_the_length_of_the_check_and_of_the_cell():
    """Whether heads are summed in registers follows from the length."""
    for cell in runner.select("carried", "cuda", systems=["tilewise"]):
        warm, check = CARRIED.warm(cell), 2048 if cell.size["window"] else 1024
        assert [w.size["tokens"] for w in warm] == [check, cell.size["tokens"]]
        assert {(w.case, w.size["layers"], w.size["window"]) for w in warm} == {
            ("block-window" if cell.size["window"] else "block", 4, cell.size["window"])
        }


@pytest.mark.parametrize("system", ["tilewise", "no-carry"])
@pytest.mark.parametrize("case", ["step", "step-graph", "block"])
def test_carried_runs_make_no_layout(monkeypatch, case, system):
    """It is the same for all of them; blocks are captured in a CUDA graph, whole steps only where the case says so."""
    (cell,) = cells("carried", cases=[case], systems=[system])
    work = CARRIED.build(cell)
    monkeypatch.setattr("tilewise.carried.state.TileLayout", None)
    torch.autograd.grad(work.run(), list(work.leaves.values()), work.upstream)
    assert work.capture == (case != "step")


def test_an_automatic_plan_is_in_the_record():
    (cell,) = cells("carried", cases=["block"], systems=["tilewise"])
    assert " on blocked: " in CARRIED.build(cell).notes["plan"]


@pytest.mark.parametrize(("name", "case", "system"), [("depth", "training", "tilewise"), ("carried", "step", "eager")])
def test_a_set_runs_from_the_command_line_to_the_report(tmp_path, name, case, system):
    path = tmp_path / f"{name}.json"
    sizes = [x for field, (value,) in TINY[name].items() for x in ("--size", f"{field}={value}")]
    arguments = ["run", "--set", name, "--device", "cpu", "--cases", case, "--systems", system, *sizes]
    shown = CliRunner().invoke(app, [*arguments, "--json", str(path)])
    assert shown.exit_code == 0, shown.output
    environment, record = records.load(path)
    assert environment["set"] == name
    assert (record["ok"], record["pass"], record["tokens"]) == (True, "step", TINY[name]["tokens"][0])
    assert record["size"][0] == "tokens"
    shown = CliRunner().invoke(app, ["report", str(path), "--no-plots"])
    assert f"{case}, forward and backward: float32" in shown.output
    assert "ratio to plain" in shown.output


def test_sizes_that_cannot_be_are_named():
    shown = CliRunner().invoke(
        app, ["run", "--set", "depth", "--device", "cpu", "--size", "d=12"], env={"COLUMNS": "200"}
    )
    assert shown.exit_code == 2
    assert "d is 12; expected a multiple of 8" in shown.output
    with pytest.raises(ValueError, match="kv_heads is 3; expected a divisor of heads = 4"):
        runner.select("carried", "cpu", sizes={"kv_heads": [3]})
    with pytest.raises(ValueError, match="pass is 'bwd'; expected one of fwd, step"):
        runner.select("depth", "cpu", passes=["bwd"])


def test_vllm_needs_a_path_and_runs_from_its_file_alone(tmp_path, monkeypatch):
    """A file with the imports and the contract of vLLM's, ours inside; on a CPU only the loading can be tried."""
    cell = replace(cells("depth", cases=["decode"], systems=["eager"])[0], system="vllm")
    with pytest.raises(ValueError, match="expected --vllm-source"):
        DEPTH.build(cell)
    source = tmp_path / "attn_res.py"
    imports = "from vllm import _custom_ops as ops\nfrom vllm.platforms import current_platform\n"
    imports += "from vllm.triton_utils import tl, triton\n"
    body = "from tilewise.depth import fused_attn_res\n\n\ndef attn_res(*args):\n"
    body += "    assert not current_platform.is_device_capability_family(100) and not hasattr(ops, 'attn_res')\n"
    source.write_text(imports + body + "    return fused_attn_res(*args)\n")
    monkeypatch.setenv("TILEWISE_VLLM_ATTN_RES", str(source))
    assert "vllm" in DEPTH.default_systems("cuda")
    truth = DEPTH.truth(cell)
    (record,) = worker.measure(DEPTH, cell, truth, PLAN)
    assert record["ok"], record["error"]
    with pytest.raises(ModuleNotFoundError):
        __import__("vllm.triton_utils")
    source.write_text("from vllm.model_executor import layers\n")
    with pytest.raises(ValueError, match="imports 'layers' from vllm"):
        DEPTH.build(cell)


def test_a_graph_break_in_the_dense_read_would_show():
    """The system that torch.compile gets is one graph."""
    from tilewise.bench.depth_work import dense_read

    read = torch.compile(lambda q, w, *v: dense_read(q, w, v), backend="eager", fullgraph=True, dynamic=False)
    v = [torch.randn(3, 16) for _ in range(2)]
    q, w = torch.randn(16), torch.ones(16)
    torch.testing.assert_close(read(q, w, *v), dense_read(q, w, v))
