"""Every formulation in PyTorch gives the oracle's output and gradients; timing and memory are what they say."""

import time

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from tilewise.bench import systems, timing
from tilewise.bench.oracle import verdict
from tilewise.bench.relative import CASES, RELATIVE
from tilewise.bench.runner import select


def cell_of(case, system, n=40, **rest):
    sizes = {"n": n, "heads": 2, "head_dim": 16, "tokens": 2 * n, **rest}
    sizes = {name: [value] for name, value in sizes.items()}
    return select("relative", "cpu", cases=[case], systems=[system], sizes=sizes)[0]


PAIRS = [
    (case, system)
    for case in CASES
    for system in ("tilewise-blocked", "eager", "sdpa-bias", "nemo-sdpa", "sdpa")
    if RELATIVE.supports(case, system, "cpu")
]


@pytest.mark.parametrize(("case", "system"), PAIRS)
def test_systems_agree_with_the_oracle(case, system):
    cell = cell_of(case, system)
    work, truth = RELATIVE.build(cell), RELATIVE.truth(cell)
    o = work.run()
    grads = torch.autograd.grad(o, list(work.leaves.values()), work.upstream)
    results = {"o": o} | {f"d{n}": g for n, g in zip(work.leaves, grads, strict=True)}
    assert set(results) == set(truth.exact)
    for name, got in results.items():
        assert verdict(got, truth.exact[name], truth.low_error[name])["published"], name


@pytest.mark.parametrize("system", ["flex", "flex-dense"])
@pytest.mark.parametrize("case", [c for c in CASES if c != "none"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_formulations_agree_with_the_oracle(case, system, monkeypatch):
    monkeypatch.setattr(systems, "_flex", lambda: flex_attention)
    cell = cell_of(case, "eager")
    x, _ = RELATIVE.inputs(cell)
    o = systems.SYSTEMS[system](CASES[case], RELATIVE.call(cell), x)()
    assert verdict(o, RELATIVE.truth(cell).exact["o"], 1e-6)["published"]


def test_inputs_have_the_published_scale():
    cell = cell_of("t5", "eager", n=128, head_dim=64)
    x, upstream = RELATIVE.inputs(cell)
    assert x["weight"].shape == (32, 2)
    scores = x["q"] @ x["k"].mT * CASES["t5"].scale(64)
    assert scores.std().item() == pytest.approx(1.0, rel=0.05)
    assert upstream.std().item() == pytest.approx(1.0, rel=0.05)
    assert RELATIVE.flops(cell, "fwd") == 4 * 2 * 2 * 128**2 * 64
    assert RELATIVE.flops(cell, "bwd") == 2.5 * RELATIVE.flops(cell, "fwd")


def test_rounds_alternate_and_ratios_are_made_within_a_round(monkeypatch):
    class Clock:
        def __init__(self, device):
            pass

        def __call__(self, run, replays):
            return [run() for _ in range(replays)]

    calls = []

    def run(name, ms):
        return lambda: calls.append(name) or ms

    monkeypatch.setattr(timing, "_Clock", Clock)
    plan = timing.Plan(rounds=3, replays=4, round_ms=30.0)
    samples = timing.compare(run("s", 20.0), run("b", 5.0), "cpu", plan)
    assert samples.system == [[20.0]] * 3
    assert samples.baseline == [[5.0] * 4] * 3
    assert "".join(calls) == "ssbb" + "sbbbb" + "bbbbs" + "sbbbb"
    assert samples.ratio == 0.25
    drifting = timing.Samples(system=[[2.0], [4.0], [8.0]], baseline=[[1.0], [2.0], [4.0]])
    assert (drifting.ratio, drifting.ms, drifting.baseline_ms) == (0.5, 4.0, 2.0)


def test_slow_runs_get_fewer_rounds():
    plan = timing.Plan(rounds=5, replays=10, round_ms=50.0)
    assert (plan.replays_for(0.02), plan.replays_for(10.0), plan.replays_for(900.0)) == (10, 5, 1)
    assert (plan.rounds_for(20.0), plan.rounds_for(900.0)) == (5, 2)


def test_the_clock_counts_milliseconds():
    (sample,) = timing._Clock("cpu")(lambda: time.sleep(0.02), 1)
    assert 20.0 <= sample < 2000.0


def test_backward_repeats():
    x = torch.randn(3, requires_grad=True)
    again = timing.backward_of(lambda: x.sin(), [x], torch.ones(3))
    assert torch.equal(again()[0], again()[0])


def test_peak_memory_counts_what_a_run_holds():
    def work():
        return [torch.ones(16 * 2**20, dtype=torch.int8) for _ in range(4)]

    work()
    for _ in range(2):
        peak = timing.peak_mib(work, "cpu")
        assert peak is None or 48 <= peak <= 96


def test_peak_memory_sees_small_blocks_that_were_freed_before():
    def work():
        return [torch.ones(2**16, dtype=torch.int8) for _ in range(512)]

    del (kept := [work()])[0]
    peak = timing.peak_mib(work, "cpu")
    assert not kept
    assert peak is None or 24 <= peak <= 64
