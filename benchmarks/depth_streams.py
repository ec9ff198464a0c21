"""Whole passes of the residual streams that a user calls: prefill, decode in a CUDA graph, training.

python benchmarks/depth_streams.py [--out FILE]

Net of the update; to be compared with the passes of the bare kernels in depth_kernels.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tilewise.depth import InferenceState, Schedule
from tilewise.nn import AttnRes


def measure(functions: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of each function, the functions taking turns; the L2 cache is flushed before each call on CUDA."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    if device.type != "cuda":
        for _ in range(rounds):
            for name, function in functions.items():
                began = time.perf_counter()
                function()
                samples[name].append((time.perf_counter() - began) * 1e3)
        return samples
    cache = torch.empty(256 * 2**20, dtype=torch.int8, device=device)
    for _ in range(rounds):
        for name, function in functions.items():
            cache.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(start.elapsed_time(end))
    return samples


def graphed(function: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The function as a CUDA graph; as it is on a CPU."""
    if device.type != "cuda":
        return function
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def drive(make: Callable[..., object], x: torch.Tensor, norms: torch.Tensor, layers: int) -> torch.Tensor:
    """One pass with the update u = 0.7 y."""
    rows = norms.unbind(0)
    stream = make(x, norms=rows[:layers])
    for l in range(layers):
        stream.write(l, stream.read(l) * 0.7)
    return stream.output(rows[layers])


def updates(x: torch.Tensor, layers: int) -> Callable[[], object]:
    """The updates alone, to be subtracted."""

    @torch.no_grad()
    def run():
        y = x
        for _ in range(layers):
            y = y * 0.7

    return run


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--scale", type=int, default=1, help="divide tokens and width, to try the program on a CPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, k, results = torch.bfloat16, options.scale, {}

    def module(d: int, layers: int, S: int) -> tuple[AttnRes, torch.Tensor]:
        residual = AttnRes(d, Schedule.block(layers, S), device=device, dtype=dtype)
        torch.nn.init.normal_(residual.query, std=d**-0.5)
        return residual, torch.ones(layers + 1, d, device=device, dtype=dtype)

    residual, norms = module(7168 // k, 128, 16)
    for name, tokens, graph in (("prefill", 8192 // k, False), ("decode", max(128 // k, 1), True)):
        x = torch.randn(tokens, 7168 // k, device=device, dtype=dtype)
        cases = {}
        for overlap in (0, tokens):
            state = InferenceState(residual.schedule, residual.reads(), tokens, overlap_tokens=overlap)
            cases["overlapped" if overlap else "stream"] = lambda state=state, x=x: drive(state, x, norms, 128)
        cases["updates"] = updates(x, 128)
        with torch.no_grad():
            cases = {case: graphed(run, device) if graph else run for case, run in cases.items()}
            results[name] = measure(cases, options.rounds, device)

    residual, norms = module(2048 // k, 64, 8)
    x = torch.randn(8192 // k, 2048 // k, device=device, dtype=dtype, requires_grad=True)
    seed = torch.randn_like(x)

    def step():
        residual.zero_grad()
        x.grad = None
        drive(residual, x, norms, 64).backward(seed)

    results["training"] = measure({"stream": step, "updates": updates(x, 128)}, options.rounds, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        results["training_peak_bytes"] = torch.cuda.max_memory_allocated() - before

    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}, {dtype}; medians in ms, net of the updates")
    for work, samples in results.items():
        if isinstance(samples, dict):
            median = {case: statistics.median(values) for case, values in samples.items()}
            net = {case: value - median["updates"] for case, value in median.items() if case != "updates"}
            print(work, ", ".join(f"{case} {value:.3f}" for case, value in net.items()))
        else:
            print(work, samples)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        record = {"device": name, "torch": torch.__version__, "samples_ms": results}
        options.out.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
