"""Processes that die, hang or are wrong, resuming, limits, and the records that come of it."""

import time
from pathlib import Path

import pytest

from tilewise.bench import records, runner
from tilewise.bench.sets import SETS
from tilewise.bench.timing import Plan

PLAN = Plan(rounds=2, replays=2, round_ms=10_000.0)


@pytest.fixture(scope="module")
def fake():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SETS, "fake", "fake:FAKE")
        patch.syspath_prepend(str(Path(__file__).parent))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
        yield


def run(system, path, **limits):
    cells = runner.select("fake", "cpu", systems=[system])
    lines = []
    outcome = runner.run(cells, path, plan=PLAN, limits=runner.Limits(**limits), say=lines.append)
    return outcome, cells_of(path), lines


def cells_of(path):
    return {(r["case"], r["n"], r["pass"]): r for r in records.load(path) if r["record"] == "cell"}


@pytest.fixture(scope="module")
def mixed(fake, tmp_path_factory):
    path = tmp_path_factory.mktemp("mixed") / "deep" / "results.json"
    outcome, found, lines = run("mixed", path)
    assert not outcome.missing
    assert len(found) == 8
    return records.load(path)[0], found, lines


def test_every_pass_of_a_cell_has_a_record_with_its_samples(mixed):
    environment, found, lines = mixed
    assert environment["record"] == "environment"
    assert environment["gpu"] == "cpu"
    assert environment["versions"]["torch"]
    assert environment["versions"]["no-such-package"] is None
    for pass_, checked in (("fwd", {"o"}), ("bwd", {"o", "dx"})):
        r = found["b", 4, pass_]
        assert r["ok"], r["error"]
        assert r["run"] == environment["run"]
        assert r["tflops"] == pytest.approx(4e6 / r["ms"] / 1e9, abs=0.01)
        assert r["ratio_to_cudnn"] is None
        assert r["ratio_to_baseline"] > 0
        assert [len(s) for s in r["samples"]["system"]] == [2, 2]
        assert [len(s) for s in r["samples"]["baseline"]] == [2, 2]
        assert set(r["numerics"]) == checked
        assert any(f"4 {pass_}  mixed" in line and " of sdpa" in line for line in lines)


def test_a_wrong_result_has_no_speed(mixed):
    _, found, lines = mixed
    for pass_ in ("fwd", "bwd"):
        r = found["b", 2, pass_]
        assert r["ok"] is False
        assert r["ms"] is r["tflops"] is r["samples"] is r["ratio_to_baseline"] is None
        assert "outside the error bounds: o" in r["error"]
        assert r["numerics"]["o"]["published"] is False
    assert sum("no result" in line for line in lines) == 6


def test_an_exception_costs_its_own_cell(mixed):
    _, found, _ = mixed
    assert found["a", 4, "bwd"]["ok"] is False
    assert found["a", 4, "bwd"]["error"] == "RuntimeError: no such luck"


def test_a_process_that_dies_costs_its_own_cell(mixed):
    _, found, _ = mixed
    assert found["a", 2, "fwd"]["ok"] is False
    assert "exit status -9" in found["a", 2, "fwd"]["error"]
    assert "exit status -9" in found["a", 2, "bwd"]["error"]


@pytest.mark.usefixtures("fake")
def test_limits_end_a_run_or_a_hanging_process_and_the_same_call_goes_on(tmp_path):
    path = tmp_path / "r.json"
    began = time.monotonic()
    outcome, found, lines = run("hangs", path, total=20.0)
    assert time.monotonic() - began < 60
    assert outcome.missing
    assert len(found) + len(outcome.missing) == 8
    assert "time limit of 20 s reached" in lines

    _, found, _ = run("hangs", path, measure=15.0)
    assert {key for key, r in found.items() if not r["ok"]} == {("a", 4, "bwd")}
    assert found["a", 4, "bwd"]["error"] == "stopped after 15 s (measure)"
    assert len(found) == 8

    _, again, lines = run("hangs", path)
    assert lines == [f"4 of 4 cells are in {path} already"]
    assert again == found


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("order", [("slow", "fine"), ("fine", "slow")])
def test_what_compiles_for_too_long_comes_last(tmp_path, monkeypatch, order):
    quick = tmp_path / "from here on it compiles at once"
    monkeypatch.setenv("SLOW_COMPILER", str(quick))
    cells = runner.select("fake", "cpu", systems=order, cases=["a"], sizes={"n": [2]})
    lines = []

    def say(line):
        lines.append(line)
        if "postponed: a slow" in line:
            quick.touch()

    limits = runner.Limits(measure=500.0, compile=500.0, start=500.0, patience=1.0)
    runner.run(cells, tmp_path / "r.json", plan=PLAN, limits=limits, say=say, jobs=2)
    assert [r["system"] for r in records.load(tmp_path / "r.json")[1:]] == ["fine", "fine", "slow", "slow"]
    assert [r["error"] for r in records.load(tmp_path / "r.json")[1:]] == [None] * 4
    assert quick.exists()


def test_select_names_what_is_wrong():
    with pytest.raises(ValueError, match="case is 'bert'; expected one of none, t5"):
        runner.select("relative", "cpu", cases=["bert"])
    with pytest.raises(ValueError, match="system is 'magic'"):
        runner.select("relative", "cpu", systems=["magic"])
    with pytest.raises(ValueError, match="pass is 'both'"):
        runner.select("relative", "cpu", passes=["both"])
    with pytest.raises(ValueError, match="length is 4096; expected 2 to tokens = 1024"):
        runner.select("relative", "cpu", sizes={"n": [4096]})
    with pytest.raises(ValueError, match="set is 'depths'; expected 'relative'"):
        runner.select("depths", "cpu")
    with pytest.raises(ValueError, match="size is 'width'; expected one of n, heads, head_dim, tokens"):
        runner.select("relative", "cpu", sizes={"width": [64]})
    with pytest.raises(ValueError, match="no system of the set runs these cases on cpu"):
        runner.select("relative", "cpu", cases=["t5"], systems=["flashdeberta"])


def test_select_on_a_gpu_is_the_published_table():
    cells = runner.select("relative", "cuda")
    assert {c.size["n"] for c in cells} == {128, 256, 512, 1024, 2048, 4096, 8192}
    assert {(c.dtype, *list(c.size.values())[1:]) for c in cells} == {("float16", 12, 64, 16384)}
    systems = {case: {c.system for c in cells if c.case == case} for case in ("none", "t5", "deberta_v3")}
    assert systems["none"] == {"tilewise", "cudnn", "sdpa-flash", "flex"}
    assert systems["t5"] == {"tilewise", "eager", "compile", "sdpa-bias", "flex", "flex-dense"}
    assert systems["deberta_v3"] - systems["t5"] == {"flashdeberta", "disentangled-flash"}


def test_a_compiling_system_gets_a_process_for_each_case_or_more_while_cores_are_idle():
    cells = runner.select("relative", "cuda", systems=["compile", "eager"])
    whole = runner._groups(cells, cores=4)
    assert [(g[0].system, {c.case for c in g}) for g in whole[:4]] == [
        ("compile", {case}) for case in ("t5", "shaw", "deberta_v3", "transformer_xl")
    ]
    assert len(whole) == 5
    assert len(whole[4]) == 28
    halves = runner._groups(cells, cores=8)
    assert [len(g) for g in halves] == [4, 3] * 4 + [28]
    assert sorted(map(str, (c for g in halves for c in g))) == sorted(map(str, cells))


def test_merge_keeps_the_last_of_equal_cells_and_their_runs_only():
    def cell(run, case, ms):
        key = {"set": "s", "case": case, "n": 8, "pass": "fwd", "system": "x", "dtype": "d"}
        return {"record": "cell", "run": run, "ms": ms, "heads": 1, "head_dim": 1, "tokens": 8, **key}

    def run(name):
        return {"record": "environment", "run": name}

    old = [run("1"), cell("1", "a", 1.0), run("2"), cell("2", "b", 2.0)]
    new = [run("3"), cell("3", "b", 3.0)]
    assert records.merge(old, new) == [run("1"), run("3"), cell("1", "a", 1.0), cell("3", "b", 3.0)]


def test_results_survive_a_round_trip_and_are_one_record_a_line(tmp_path):
    path = tmp_path / "r.json"
    made = [{"record": "environment", "run": "1"}, {"record": "cell", "x": [1.5, None]}]
    records.save(path, made)
    assert records.load(path) == made
    assert len(path.read_text().splitlines()) == 4
    path.write_text("{}")
    with pytest.raises(ValueError, match="expected a list of records"):
        records.load(path)
