"""The evidence scripts without a GPU: what a step may take, and that one failure costs one step."""

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import processes
import relative_ablations as ablations
import relative_ahead
import relative_all
import relative_first_call
import relative_linear
import relative_linear_checks
import relative_memcheck
import relative_scaling
import rounds
from relative_cases import CHECKS, passes_of, timed_call
from relative_checks import dense
from relative_memcheck import JOBS
from relative_tiles import VARIANTS, replaced, variants

from tilewise.triton import plan
from tilewise.triton.config import forward_tiles
from tilewise.triton.launch import launcher
from tilewise.triton.tuned import shape_error


def test_time_goes_to_the_steps_that_are_left(monkeypatch, tmp_path, capsys):
    now, given = [7.0], {}
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def step(name, limit):
        given[name] = limit
        now[0] += {"one": 10.0, "two": 85.0}.get(name, 1.0)
        return {"step": name, "status": 0, "seconds": 1.0, "tail": [name.upper()]}

    # The second takes longer than it may, and leaves the last nothing.
    status = processes.in_turn({"one": 40, "two": 40, "three": 20}, 100.0, step, tmp_path / "all.json", least=5.0)
    assert given == {"one": 40.0, "two": 60.0, "three": 5.0}
    assert status == 0
    status = processes.in_turn({"one": 10, "two": 80, "three": 1}, 91.0, step, tmp_path / "all.json", least=5.0)
    assert (status, given["two"]) == (1, 80.0)
    recorded = [each["status"] for each in json.loads((tmp_path / "all.json").read_text())]
    assert recorded == [0, 0, "no time left"]
    assert "   TWO\n" in (said := capsys.readouterr().out)
    assert said.splitlines()[-1].split() == ["three", "0", "no", "time", "left"]


class Parsed(Exception):
    """A script has understood its command line."""


def test_every_command_is_understood(monkeypatch, tmp_path):
    parse = argparse.ArgumentParser.parse_args

    def parsed(self):
        parse(self)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    for name in relative_all.STEPS:
        _, script, *words = relative_all.command(name, tmp_path, 60.0)
        monkeypatch.setattr(sys, "argv", [script, *words])
        with pytest.raises(Parsed):
            importlib.import_module(Path(script).stem).main()


def test_a_step_that_fails_or_hangs_costs_itself(tmp_path):
    failed = relative_all.run("check", tmp_path, 60.0, [sys.executable, "-c", "print('last words'); exit(4)"])
    assert (failed["status"], failed["tail"]) == (4, ["last words"])
    hung = relative_all.run("time", tmp_path, 0.2, [sys.executable, "-c", "import time; time.sleep(600)"])
    assert hung["status"] == "stopped after 0 s"
    missing = relative_all.run("traffic", tmp_path, 5.0, ["/nowhere/ncu"])
    assert missing["status"] == "no /nowhere/ncu here"


@pytest.fixture
def noted():
    started = []
    launcher.append(lambda kernel, grid, *args, **meta: started.append((kernel.__name__, args, meta)))
    yield started
    launcher.pop()


def peak_of(name, case, noted):
    """Elements of all skewed buffers written in a call of an ablation, and the kernels that it starts."""
    noted.clear()
    with ablations.ablated(name) as options:
        for run in passes_of(*timed_call(case, 1024, "meta", H=2, **options)):
            run()
    return [kernel for kernel, _, _ in noted], max(a[2].numel() for k, a, _ in noted if k == "project")


def test_ablations_take_away_what_they_say(noted):
    memory, narrow = peak_of("in device memory", "shaw", noted)
    rows, wide = peak_of("all rows", "shaw", noted)
    assert rows == memory
    assert wide > 4 * narrow
    plain, everything = peak_of("no saturated tiles", "shaw", noted)
    assert everything == wide
    assert plain.count("reduce") == memory.count("reduce") - 1
    atomic, _ = peak_of("atomics", "shaw", noted)
    assert "add_rows" in atomic
    assert "collect" not in atomic
    kept, _ = peak_of("kept", "shaw", noted)
    assert (memory.count("project"), kept.count("project")) == (2, 1)
    # Afterwards everything is as before.
    assert peak_of("in device memory", "shaw", noted) == (memory, narrow)


@pytest.mark.parametrize("case", ablations.ABLATIONS["in device memory"])
def test_the_whole_makes_projections_in_the_loops(noted, case):
    for run in passes_of(*timed_call(case, 1024, "meta", H=2)):
        run()
    kernels = {kernel for kernel, _, _ in noted}
    assert ("attend_overlapped" if case == "t5" else "attend_band") in kernels
    assert not kernels & {"project", "attend"}


def test_shapes_that_are_tried_are_legal():
    kinds = {"none": "plain", "t5": "scalar", "shaw": "query", "deberta": "key", "txl": "identity"}
    for what, case, shape in variants(tuple(kinds)):
        assert shape_error(what, "" if what == "fold" else kinds[case], shape) is None, (what, case, shape)
    with replaced("forward", (64, 128, 4, 3, 3)):
        assert forward_tiles(64, 2, 512, "key", plan.limits_of(torch.device("cpu"))).keys == 128
    assert set(VARIANTS) == {"forward", "keys", "queries", "projection", "fold"}


def test_memory_checks_meet_ragged_edges_and_shared_tiles():
    assert all(s.Tq % 64 for _, _, _, s, _ in JOBS)
    assert any(s.B >= 4 and s.Tq <= 256 for _, _, _, s, _ in JOBS)


@pytest.mark.parametrize(("value", "seconds", "status"), [(0.0, "60", 0), (float("nan"), "60", 1), (0.0, "-1", 1)])
def test_memory_checks_fail_where_a_result_is_not_finite_or_missing(monkeypatch, value, seconds, status):
    monkeypatch.setattr(relative_memcheck, "run_one", lambda n, projections, device: [torch.tensor([value])])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sys, "argv", ["relative_memcheck.py", "--seconds", seconds])
    with pytest.raises(SystemExit) as ended:
        relative_memcheck.main()
    assert ended.value.code == status


def test_shares_of_the_memory_checks_are_all_calls():
    calls = [call for n in range(5) for call in relative_memcheck.share(n, 5)]
    assert sorted(calls) == sorted(relative_memcheck.CALLS)
    assert relative_memcheck.share(0, 1)[0][0] == max(range(len(JOBS)), key=lambda n: JOBS[n][3].B * JOBS[n][3].Tq ** 2)


WATCHED = {
    "clean": ("done one\n========= ERROR SUMMARY: 0 errors", 0, 0, True),
    "no race": ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, 0, True),
    "finding": ("========= ERROR SUMMARY: 3 errors", 9, 3, False),
    "race": ("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", 0, 1, False),
    "unwatched": (
        "========= Error: No attachable process found. compute-sanitizer timed-out.\ndone one",
        0,
        None,
        False,
    ),
    "stopped": ("done one", "stopped after 3 s", None, False),
    "failed": ("========= ERROR SUMMARY: 0 errors", 1, 0, False),
}


@pytest.mark.parametrize("name", WATCHED)
def test_a_process_counts_where_it_was_watched_to_its_end(name):
    text, status, findings, ok = WATCHED[name]
    found = relative_memcheck.outcome(status, text)
    assert (found["findings"], found["ok"], found["calls"]) == (findings, ok, text.count("done"))


def test_shares_are_watched_by_every_tool(monkeypatch, tmp_path):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho "done $*"\necho "========= ERROR SUMMARY: 0 errors"\n[ "$2" = memcheck ]\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = relative_memcheck.watch(["memcheck", "racecheck"], 2, time.time() + 60, tmp_path / "all.json")
    assert [(each["tool"], each["shard"], each["ok"]) for each in found] == [
        ("memcheck", 0, True), ("memcheck", 1, True), ("memcheck", "hand-over", True), ("racecheck", 0, False),
        ("racecheck", 1, False), ("racecheck", "hand-over", False)
    ]  # fmt: skip
    assert "--shard 1/2" in (tmp_path / "all_racecheck_1.log").read_text()


def test_memory_checks_can_be_compiled_beforehand(noted):
    for call in relative_memcheck.CALLS:
        relative_memcheck.run_one(*call, "meta")
    expected = {"attend", "attend_band", "attend_overlapped", "grad_key", "grad_query", "key_pass", "query_pass",
                "probabilities", "fold", "reduce"}  # fmt: skip
    assert expected <= {kernel for kernel, _, _ in noted}


@pytest.mark.parametrize(
    "job",
    [
        ("check", 21), ("time", "none", 256), ("scaling", "t5", 256), ("ablation", "kept", "shaw", 512),
        ("memcheck", 2, "keep"), ("numerics", "alibi", "float32-tf32", 128),
        ("numerics", "shaw_values", "float16", 300), ("tune", "forward", "t5", (64, 64, 4, 3, 2), 512), ("extra", 0),
        ("linear", "time", 512, 64, "shaw", True, "3 queries' stages"),
        ("linear", "time", 512, 64, "txl", False, "as committed"),
        ("linear", "check", *relative_linear_checks.checks(("banded",))[0]),
        ("specialised", "time", "t5", 64, 2048, True, "2x128"),
        ("wide", "time", "keys", "t5", (64, 128, 8, 2, 2), 2048), ("wide", "check", 2),
        ("traffic", "t5", 2048, 128), *(("check", n) for n, job in enumerate(CHECKS) if job[3].d in (192, 256)),
    ],
)  # fmt: skip
def test_every_job_can_be_compiled_ahead(noted, job):
    relative_ahead.perform(job)
    assert len(noted) >= 2 or job[0] == "tune"


def test_variants_of_the_backward_are_other_ones(noted):
    kernels = {}
    assert set(relative_linear.PROFILED) <= set(relative_linear.plan(8192, 64))
    for case, new, variant in relative_linear.plan(2048, 64):
        noted.clear()
        relative_ahead.perform(("linear", "time", 2048, 64, case, new, variant))
        kernels[case, new, variant] = [(kernel, grid, sorted(meta.items(), key=str)) for kernel, grid, meta in noted]
    for case, new, variant in kernels:
        if variant != "as committed":
            assert str(kernels[case, new, variant]) != str(kernels[case, new, "as committed"]), (case, variant)


def test_processes_share_the_kernels_out(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(relative_ahead, "make_ready", lambda kernel, *a, **meta: made.append(meta["D"]))
    monkeypatch.setattr(relative_ahead, "_claims", [tmp_path])

    class Kernel:
        device_caches = ((lambda *args, debug, **meta: (None, args, meta),),)

    for width in (64, 64, 128):
        relative_ahead.warm(Kernel, (1,), 3, D=width)
    assert made == [64, 128]


@pytest.mark.parametrize(("status", "ended"), [(0, 0), (4, 1), ("stopped after 3 s", 1)])
def test_a_step_that_fails_makes_the_whole_fail(monkeypatch, tmp_path, status, ended):
    outcome = {"step": "check", "status": status, "seconds": 1.0, "tail": []}
    monkeypatch.setattr(relative_all, "run", lambda *a: outcome)
    monkeypatch.setattr(sys, "argv", ["relative_all.py", str(tmp_path), "--only", "check"])
    with pytest.raises(SystemExit) as found:
        relative_all.main()
    assert found.value.code == ended


def _job(what):
    if what == "who":
        return os.getpid()
    if what == "raise":
        raise ValueError("no such row")
    if what == "crash":
        os._exit(7)
    if what == "hang":
        time.sleep(600)
    return what


def test_a_job_that_ends_its_process_costs_only_itself():
    found = list(processes.isolated(_job, [("one",), ("raise",), ("crash",), ("two",)], time.time() + 300, 2))
    outcomes = {job[0]: (value, why) for job, value, why in found}
    assert len(found) == 4
    assert [outcomes[name] for name in ("one", "two")] == [("one", None), ("two", None)]
    assert "no such row" in outcomes["raise"][1]
    assert outcomes["crash"] == (None, "its process ended with status 7")


def test_a_process_takes_one_job_after_the_other():
    found = list(processes.isolated(_job, [("who",)] * 4, time.time() + 300, 2))
    assert [why for _, _, why in found] == [None] * 4
    assert len({value for _, value, _ in found}) == 2


def test_jobs_without_time_are_named():
    found = list(processes.isolated(_job, [("hang",), ("one",)], time.time() + 0.3, 1))
    assert [(job[0], why) for job, _, why in found] == [
        ("hang", "not run: out of time"),
        ("one", "not run: out of time"),
    ]


@pytest.mark.parametrize("case", ["none", "t5", "deberta", "txl"])
def test_single_rows_are_those_of_the_whole(case):
    call, do = timed_call(case, 40, "cpu", dtype=torch.float64, tokens=40, H=2, d=16)
    o, _, _ = dense(call, do, torch.zeros(1, 2, 40, dtype=torch.float64), torch.float64)
    for h, i in ((0, 0), (1, 21), (1, 39)):
        assert torch.allclose(relative_scaling.row_of(call, h, i, torch.float64), o[:1, h : h + 1, i : i + 1])
    call, _ = timed_call(case, 40, "cpu", dtype=torch.float16, tokens=40, H=2, d=16)
    o, _, _ = dense(call, do.half(), torch.zeros(1, 2, 40), torch.float16)
    assert relative_scaling.checked(call, o)["ok"]
    o[0, 1, 21] += 0.1
    assert not relative_scaling.checked(call, o)["ok"]


def test_a_first_call_is_timed_in_processes_that_share_a_cache(monkeypatch, tmp_path):
    taken = relative_first_call.first_call("txl", 16, "cpu", impl="blocked")
    assert tuple(taken) == relative_first_call.PARTS
    assert min(taken.values()) >= 0.0
    child = ("import json, os, pathlib; p = pathlib.Path(os.environ['TRITON_CACHE_DIR']); n = len(list(p.iterdir())); "
             "(p / f'{n}.cubin').touch(); print('noise'); print(json.dumps({'forward': n}))")  # fmt: skip
    found = relative_first_call.measured("t5", [sys.executable, "-c", child], time.time() + 60)
    assert [(r["cache"], r["seconds"]["forward"], r["kernels"]) for r in found] == [("empty", 0, 1), ("filled", 1, 2)]
    failed = relative_first_call.measured("t5", [sys.executable, "-c", "raise ValueError('lost')"], time.time() + 60)
    assert ["lost" in record["error_text"] for record in failed] == [True, True]
    late = relative_first_call.measured("t5", [sys.executable, "-c", "pass"], time.time() - 1)
    assert [record["error_text"] for record in late] == ["no time left"] * 2


def test_records_say_from_which_commit_they_are():
    found = rounds.environment("cpu")
    assert set(found) == {"gpu", "torch", "triton", "cuda", "python", "tilewise", "commit", "time"}
    assert (found["gpu"], found["torch"]) == ("no GPU", torch.__version__)
