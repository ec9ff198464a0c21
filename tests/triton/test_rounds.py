"""The relative benchmarks from command line to record, without a GPU: no kernel runs, and a fake clock goes on."""

import json
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import processes
import relative_ahead
import relative_biases
import relative_cases
import relative_kernels
import relative_linear
import relative_scalars
import relative_specialised
import relative_tiles
import relative_wide
import rounds

from tilewise import triton
from tilewise.bench import timing
from tilewise.triton.launch import launcher

ROW = {"case", "n", "pass", "ms", "ratio", "tflops", "peak_mib", "dtype", "heads", "head_dim", "tokens", "samples"}
SCRIPTS = {
    "biases": (relative_biases, []),
    "scalars": (relative_scalars, []),
    "linear": (relative_linear, ["--only", ",".join(relative_linear.GROUPS)]),
    "specialised": (relative_specialised, []),
    "wide": (relative_wide, []),
    "kernels": (relative_kernels, ["check", "time", "extra", "profile", "tune", "--lengths", "512,8192"]),
}
TIMINGS = {
    "biases": 4 * 7, "scalars": 3 * 4, "kernels": 2 * 2 * 6 + 2 * 14,
    "specialised": sum(2 + len(relative_specialised.names_of(*cell[1::2])) for cell in relative_specialised.CELLS),
}  # fmt: skip
CHECKS = {
    "biases": 13, "scalars": sum(case in relative_scalars.SCALAR for case, *_ in relative_cases.CHECKS),
    "specialised": sum(map(len, relative_specialised.plan_checks())), "wide": len(relative_wide.CHECKS),
    "kernels": len(relative_cases.CHECKS),
}  # fmt: skip


class Machine:
    """Stands for the GPU: its clock goes on by a second with every timed run, checks cost one, compiling ten."""

    def __init__(self):
        self.now, self.compiled, self.broken, self.begun = 0.0, [], (), []
        self.run = {"forward": triton.forward, "backward": triton.backward}

    def time(self):
        return self.now

    def __call__(self, device):
        """A clock in place of the one that measures."""

        def measured(run, replays):
            self.now += 1.0
            run()
            return [2.0 if run.__name__ == "cudnn" else 4.0] * replays

        return measured

    def precompile(self, jobs, seconds):
        self.now += 10.0
        self.compiled += jobs
        return 0

    def captured(self, make):
        make()()
        return (lambda: None), None

    def forward(self, call, o, lse, kept=None):
        self.run["forward"](call, o, lse, kept)
        lse.written = True

    def backward(self, call, do, dlse, o, lse, *rest):
        """Timed on an lse that nothing wrote, it would multiply zeros, infinities and NaN."""
        assert getattr(lse, "written", False), "a backward runs before its forward"
        self.run["backward"](call, do, dlse, o, lse, *rest)

    def cudnn(self, *arguments, **options):
        self.begun.append(self.now)

        def cudnn():
            pass

        return cudnn, cudnn

    def peak_mib(self, run, device):
        run()
        return 1.5

    def isolated(self, function, jobs, until, most):
        for job in jobs:
            if self.now >= until:
                yield job, None, "not run: out of time"
                continue
            self.now += 1.0
            try:
                yield job, function(*job), None
            except ValueError:
                yield job, None, traceback.format_exc()

    def check(self, *job):
        if job == self.broken:
            raise ValueError("no such check")
        return [SimpleNamespace(name="o", error=1e-4, allowed=2e-4, relative=1e-4, ok=True)]

    def kernel_times(self, run):
        self.begun.append(self.now)
        self.now += 1.0
        run()
        return {"grad_key": 5.0, "grad_query": 7.0}


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    clock = SimpleNamespace(time=machine.time, strftime=time.strftime)
    for name in ("captured", "cudnn", "isolated", "peak_mib", "precompile"):
        monkeypatch.setattr(rounds, name, getattr(machine, name))
    for name in machine.run:
        monkeypatch.setattr(triton, name, getattr(machine, name))
    monkeypatch.setattr(rounds, "DEVICE", "meta")
    monkeypatch.setattr(rounds, "time", clock)
    monkeypatch.setattr(timing, "_Clock", machine)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: SimpleNamespace(name="no GPU"))
    for module in [relative_tiles, *(module for module, _ in SCRIPTS.values())]:
        for name in ("check", "check_one", "kernel_times"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, machine.check if "check" in name else machine.kernel_times)
    monkeypatch.setattr(relative_specialised, "time", clock)
    monkeypatch.setattr(relative_specialised, "isolated", machine.isolated)
    monkeypatch.setattr(relative_specialised, "ends_itself", lambda seconds: None)
    launcher.append(lambda *args, **meta: None)
    yield machine
    launcher.pop()


@pytest.fixture
def result_of(machine, monkeypatch, tmp_path, capsys):
    """Run a script with further words: (its exit status, its record, what it printed)."""

    def run(name, *words):
        module, usual = SCRIPTS[name]
        out = tmp_path / f"{name}.json"
        monkeypatch.setattr(sys, "argv", [f"relative_{name}.py", *usual, "--out", str(out), *words])
        with pytest.raises(SystemExit) as ended:
            module.main()
        return ended.value.code, json.loads(out.read_text()), capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_to_its_end(name, machine, result_of):
    status, record, said = result_of(name, "--seconds", "1e5")
    assert (status, record["gpu"]) == (0, "no GPU")
    assert " failed" not in said
    assert "not timed" not in said
    assert {"torch", "triton", "cuda", "time", "commit", "checks"} <= set(record)
    assert all(check["ok"] and check["budgets"] for check in record["checks"])
    assert len(record["checks"]) == CHECKS.get(name, len(record["checks"]))
    timings = record.get("timings", [])
    assert len(timings) == TIMINGS.get(name, len(timings))
    for row in timings:
        assert set(row) >= ROW
        assert row["ratio"] == (0.5 if row["ms"] == 4.0 else 1.0)
        assert row["samples"] == [row["ms"]] * len(row["samples"])
    # What was not compiled beforehand would be compiled among the times.
    assert {job[0] for job in machine.compiled} <= {name, "linear", "check", "time", "extra", "tune"}


def test_variants_of_a_script_are_beside_cudnn(result_of):
    _, record, said = result_of("linear", "--seconds", "1e5")
    rows = [row for row in record["timings"] if (row["n"], row["pass"], row["head_dim"]) == (8192, "backward", 64)]
    titles = [relative_linear.label_of(*one, 64) for one in relative_linear.plan(8192, 64)]
    assert [row["case"] for row in rows] == ["cudnn", *titles]
    assert {row["case"] for row in record["timings"] if row["head_dim"] == 128} >= {"cudnn d128", "shaw registers d128"}
    assert len(record["profile"]) == 2 * len(relative_linear.PROFILED)
    line = next(line for line in said.splitlines() if line.startswith("  shaw registers  "))
    assert "  8192: 0.50 (4.000, 2)  4096: 0.50 (4.000, 2)  " in line


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_goes_on_beyond_its_seconds(name, machine, result_of):
    status, record, said = result_of(name, "--seconds", "60")
    assert status == 1
    assert "out of time" in said or "not timed" in said
    # Those of the script that counts from the end of compiling, or profiles the few variants of a cell one by one.
    more = {"specialised": 10, "scalars": 3}
    assert 10 <= max(machine.begun) <= 60 + more.get(name, 0)
    assert all(check["ok"] or "out of time" in check["error"] for check in record["checks"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_time_at_all(name, machine, result_of):
    status, record, _ = result_of(name, "--seconds", "0")
    assert status == 1
    assert record.get("timings", []) == record.get("times", []) == []
    # A shape whose first check did not come gets no others.
    expected = CHECKS.get(name, len(record["checks"]))
    if name == "specialised":
        expected = len(relative_specialised.plan_checks()[0])
    assert [check["ok"] for check in record["checks"]] == [False] * expected


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_variant_that_fails_costs_itself(name, monkeypatch, result_of):
    module, _ = SCRIPTS[name]
    timed_call, calls = module.timed_call, []

    def breaks(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise ValueError("no such luck")
        return timed_call(*args, **options)

    _, whole, _ = result_of(name, "--seconds", "1e5")
    monkeypatch.setattr(module, "timed_call", breaks)
    status, record, said = result_of(name, "--seconds", "1e5")
    assert status == 1
    assert "no such luck" in said
    assert " 1 failures" in said
    kind = "times" if name == "wide" else "timings"
    # A process of relative_specialised.py times a whole cell.
    lost = {"wide": 1, "scalars": 1, "biases": 1, "specialised": 7}
    assert len(whole[kind]) - len(record[kind]) == lost.get(name, 2)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_check_that_fails_is_named(name, machine, monkeypatch, result_of):
    jobs = []
    monkeypatch.setattr(machine, "broken", None)
    whole = machine.isolated

    def noting(function, given, until, most):
        jobs.extend(given)
        return whole(function, given, until, most)

    monkeypatch.setattr(rounds, "isolated", noting)
    result_of(name, "--seconds", "1e5")
    machine.broken = jobs[1][1:]
    status, record, said = result_of(name, "--seconds", "1e5")
    assert status == 1
    (bad,) = [check for check in record["checks"] if not check["ok"]]
    assert "no such check" in bad["error"]
    assert "BAD" in said


def test_a_shape_that_fails_its_first_check_has_no_times(machine, result_of):
    machine.broken = (64, "2x128", 0, "meta")
    status, record, _ = result_of("specialised", "--seconds", "1e5")
    assert status == 1
    shapes = {(row["head_dim"], row["system"]) for row in record["timings"]}
    assert (64, "2x128") not in shapes
    assert {(128, "2x128"), (64, "3x128")} <= shapes
    assert [c["ok"] for c in record["checks"] if (c["width"], c["shape"]) == (64, "2x128")] == [False]


def test_kernels_that_should_not_run_are_a_failure(machine, monkeypatch, result_of):
    # A call that is too wide for the kernels in registers runs the portable ones.
    timed_call = relative_biases.timed_call
    monkeypatch.setattr(relative_biases, "timed_call", lambda *args: timed_call(*args, d=256))
    status, record, said = result_of("biases", "--seconds", "1e5")
    assert status == 1
    assert "AssertionError other kernels ran: ['attend'" in said
    assert {row["case"] for row in record["timings"]} == {"cudnn"}


def test_graphs_that_cannot_be_captured_are_a_failure(machine, monkeypatch, result_of):
    monkeypatch.setattr(rounds, "captured", lambda make: (make(), "RuntimeError: a synchronisation"))
    status, record, said = result_of("scalars", "--seconds", "1e5")
    assert (status, {row["case"] for row in record["timings"]}) == (1, {"cudnn"})
    assert "it cannot be captured: RuntimeError: a synchronisation" in said


def test_compiling_alone(machine, monkeypatch, result_of, tmp_path):
    monkeypatch.setattr(rounds, "precompile", lambda jobs, seconds: 2)
    monkeypatch.setattr(sys, "argv", ["relative_wide.py", "--only-compile", "--out", str(tmp_path / "none.json")])
    with pytest.raises(SystemExit) as ended:
        relative_wide.main()
    assert ended.value.code == 1
    assert not (tmp_path / "none.json").exists()


def test_the_record_is_written_when_the_script_breaks(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(rounds, "cudnn", lambda *a, **k: [][0])
    monkeypatch.setattr(sys, "argv", ["relative_scalars.py", "--seconds", "1e5", "--out", str(tmp_path / "all.json")])
    with pytest.raises(IndexError):
        relative_scalars.main()
    assert len(json.loads((tmp_path / "all.json").read_text())["checks"]) == CHECKS["scalars"]


@pytest.mark.parametrize("kind", ["scalars", "biases"])
def test_jobs_of_scripts_can_be_compiled_ahead(machine, kind):
    names = {"scalars": "tall", "biases": "sums"}
    with rounds.recorded() as kernels:
        relative_ahead.perform((kind, names[kind], 512))
    assert len(kernels) >= 2


def test_processes_wait_without_a_limit():
    found = list(processes.isolated(time.sleep, [(0.0,)], float("inf"), 1))
    assert found == [((0.0,), None, None)]
