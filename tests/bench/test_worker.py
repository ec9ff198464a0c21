"""Which errors cost a pass and which cost the process; the order of records; unusable numbers."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tilewise.bench import worker
from tilewise.bench.cells import Cell, Truth, Workload
from tilewise.bench.timing import Plan

CELL = Cell("fake", "a", "x", {"n": 4, "width": 4}, dtype="float32", device="cpu")
PLAN = Plan(rounds=1, replays=1)


class Bench:
    """sin(x), with an error of one's choice in the forward with gradients."""

    def __init__(self, error=None, value=1.0):
        self.error, self.value = error, value

    def baseline(self, device):
        return "sdpa"

    def ceiling(self, case, system):
        return False

    def warm(self, cell):
        return (cell,)

    def compiling(self, system):
        return nullcontext()

    def flops(self, cell, pass_):
        return 1e9

    def build(self, cell):
        x = torch.ones(4, 4, requires_grad=True)

        def run():
            if self.error is not None and torch.is_grad_enabled():
                raise self.error
            return x.sin() * self.value

        return Workload(run, {"x": x}, torch.ones(4, 4), lambda: x.cos(), [x], strict=True)


def truth():
    x = torch.ones(4, 4, dtype=torch.float64)
    return Truth({"o": x.sin(), "dx": x.cos()}, {"o": 1e-7, "dx": 1e-7})


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: an illegal memory access was encountered"), torch.AcceleratorError("gone")]
)
def test_an_asynchronous_error_ends_the_process_but_keeps_earlier_records(error):
    records = worker.measure(Bench(error), CELL, truth(), PLAN)
    first = next(records)
    assert (first["pass"], first["ok"]) == ("fwd", True)
    with pytest.raises(worker.BrokenDevice):
        next(records)
    with pytest.raises(worker.BrokenDevice):
        worker._compile(Bench(error), CELL)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA error: out of memory"), ValueError("N is odd")])
def test_other_errors_cost_their_pass(error, capfd):
    forward, backward = worker.measure(Bench(error), CELL, truth(), PLAN)
    assert forward["ok"]
    assert not backward["ok"]
    assert backward["error"] == f"{type(error).__name__}: {error}"
    worker._compile(Bench(error), CELL)
    assert str(error) in capfd.readouterr().err


def test_a_system_held_to_our_budget_fails_where_the_published_rule_would_pass():
    forward, _ = worker.measure(Bench(value=1.0 + 1e-4), CELL, truth(), PLAN)
    assert forward["numerics"]["o"]["published"]
    assert not forward["ok"]
    bench = Bench(value=1.0 + 1e-4)
    lenient = bench.build
    bench.build = lambda cell: replace(lenient(cell), strict=False)
    forward, _ = worker.measure(bench, CELL, truth(), PLAN)
    assert forward["ok"]


def test_results_that_are_not_finite_fail_and_can_be_written():
    for record in worker.measure(Bench(value=float("nan")), CELL, truth(), PLAN):
        assert not record["ok"]
        assert record["ms"] is None
        assert record["numerics"]["o"]["error"] is None
        json.dumps(record, allow_nan=False)


def test_all_cells_that_warm_a_cell_are_run(monkeypatch):
    seen, bench = [], Bench()
    small = replace(CELL, size={**CELL.size, "n": 2})
    monkeypatch.setattr(bench, "warm", lambda cell: (small, cell), raising=False)
    monkeypatch.setattr(worker, "_once", lambda _, cell: seen.append(cell))
    worker._compile(bench, CELL)
    assert seen == [small, CELL]
