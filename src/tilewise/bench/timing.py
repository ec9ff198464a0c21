"""Interleaved timing of a system and its baseline, and peak memory, on CUDA or the CPU.

A round times every variant in turn, and rounds alternate the order, so that a clock that falls with temperature falls
for all: ratios are made within a round. Before each timed run the L2 cache is overwritten. The CPU enqueues the
overwrite, the first event, the run and the last event in one go; the overwrite outlasts the enqueueing of a graph.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

__all__ = [
    "Plan", "Samples", "backward_of", "captured", "compare", "interleaved", "peak_mib", "step_of", "synchronize",
]  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """How many samples: `rounds` of at most `replays` runs, fewer for runs that would exceed `round_ms` a round."""

    rounds: int = 5
    replays: int = 10
    round_ms: float = 50.0

    def replays_for(self, ms: float) -> int:
        return max(1, min(self.replays, int(self.round_ms / max(ms, 1e-3))))

    def rounds_for(self, ms: float) -> int:
        """Slow runs repeat themselves well: two rounds are enough above half a second."""
        return self.rounds if ms < 500.0 else min(2, self.rounds)


@dataclass(frozen=True)
class Samples:
    """Milliseconds by round, of the system, of the baseline and of the overhead that both contain, if any."""

    system: list[list[float]]
    baseline: list[list[float]]
    overhead: list[list[float]] | None = None

    @property
    def ms(self) -> float:
        return _middle(self.system)

    @property
    def baseline_ms(self) -> float:
        return _middle(self.baseline)

    @property
    def overhead_ms(self) -> float:
        return 0.0 if self.overhead is None else _middle(self.overhead)

    @property
    def ratio(self) -> float | None:
        """Median over the rounds of baseline time over system time, overhead taken off: 1 is as fast as the baseline.

        None where a round's overhead took as long as the system or the baseline: then nothing is left to compare.
        """
        rounds = [[median(x) for x in r] for r in (self.system, self.baseline)]
        overhead = [0.0] * len(self.system) if self.overhead is None else [median(x) for x in self.overhead]
        net = [(s - o, b - o) for s, b, o in zip(*rounds, overhead, strict=True)]
        return median(b / s for s, b in net) if all(s > 0 and b > 0 for s, b in net) else None


def _middle(rounds: list[list[float]]) -> float:
    return median(x for r in rounds for x in r)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def backward_of(run: Callable[[], Tensor], leaves: Sequence[Tensor], upstream: Tensor) -> Callable[[], object]:
    """() ↦ gradients of one forward that has been run here; repeatable."""
    o = run()
    return lambda: torch.autograd.grad(o, list(leaves), upstream, retain_graph=True)


def step_of(run: Callable[[], Tensor], leaves: Sequence[Tensor], upstream: Tensor) -> Callable[[], object]:
    """() ↦ gradients of a forward of its own."""
    return lambda: torch.autograd.grad(run(), list(leaves), upstream)


def captured(make: Callable[[], Callable[[], object]]) -> tuple[Callable[[], object], str | None]:
    """A CUDA graph's replay of what `make` returns, or that itself and the reason why it cannot be captured.

    `make` is called on the capturing stream: autograd runs each backward on the stream of its forward.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run = make()
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            kept = run()
    except (RuntimeError, torch.AcceleratorError) as error:
        torch.cuda.synchronize()
        return run, f"{type(error).__name__}: {str(error)[:200]}"

    def replay() -> None:
        graph.replay()

    replay.kept = (kept, run)
    return replay, None


class _Clock:
    """Times single runs; the cache is overwritten before each."""

    def __init__(self, device: str):
        self.cuda = device == "cuda"
        # 256 MB take longer to overwrite than a graph takes to enqueue, and are several times any L2.
        self.buffer = torch.zeros((256 if self.cuda else 32) * 2**20 // 4, dtype=torch.int32, device=device)

    def __call__(self, run: Callable[[], object], replays: int) -> list[float]:
        if not self.cuda:
            samples = []
            for _ in range(replays):
                self.buffer.zero_()
                start = time.perf_counter()
                run()
                samples.append((time.perf_counter() - start) * 1e3)
            return samples
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
        for start, end in events:
            self.buffer.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]


def interleaved(runs: dict[str, Callable[[], object]], device: str, plan: Plan) -> dict[str, list[list[float]]]:
    """Milliseconds of every run by round; there are as many rounds as the plan has for the first run."""
    clock = _Clock(device)
    estimate = {name: median(clock(run, 2)) for name, run in runs.items()}
    samples: dict[str, list[list[float]]] = {name: [] for name in runs}
    for r in range(plan.rounds_for(next(iter(estimate.values())))):
        for name in list(runs) if r % 2 == 0 else list(runs)[::-1]:
            samples[name].append(clock(runs[name], plan.replays_for(estimate[name])))
    return samples


def compare(
    system: Callable[[], object], baseline: Callable[[], object], device: str, plan: Plan,
    overhead: Callable[[], object] | None = None,
) -> Samples:  # fmt: skip
    """Time all in interleaved rounds."""
    runs = {"system": system, "baseline": baseline} | ({} if overhead is None else {"overhead": overhead})
    return Samples(**interleaved(runs, device, plan))


def peak_mib(work: Callable[[], object], device: str) -> float | None:
    """Peak memory of one run above what was allocated before it, in MiB.

    CUDA: of the caching allocator, so graphs and caches of earlier runs do not count. CPU (Linux with
    glibc): of the process's resident memory; None elsewhere.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = work()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        del kept
        return round(peak, 1)
    reset = Path("/proc/self/clear_refs")
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if reset.exists() else None
    if trim is None:
        return None
    # Freed memory that the C library keeps would hide the next run's use of it.
    trim(0)
    reset.write_text("5")
    before = _resident_kib("VmRSS")
    kept = work()
    peak = (_resident_kib("VmHWM") - before) / 1024
    del kept
    return round(max(peak, 0.0), 1)


def _resident_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")
