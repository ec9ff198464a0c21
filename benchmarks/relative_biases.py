"""Transformer-XL's biases in the kernels: checks, then times beside sums with the query formed before them, and cuDNN.

    python benchmarks/relative_biases.py --out biases.json --seconds 55

Checks are those of `relative_linear.py --only txl`. Times have everything that the biases cost: `kernels` leaves them
to the kernels, `sums` forms q + u and q + v in memory, and dQ and the biases' gradients from two gradients of its size
afterwards. CUDA graphs, L2 flushed, rounds interleaved with cuDNN's attention without any term.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from relative_ahead import precompile
from relative_cases import timed_call
from relative_linear import run_checks, started
from relative_linear_checks import checks, registers

LENGTHS = (8192, 2048, 512, 128)
STAGES = {"QUERIES_ALONE": (3, None), "KEYS_ALONE": (3, None)}
VARIANTS = {"kernels": {}, "kernels, 3 stages": STAGES, "sums": {}}


def passes(variant: str, N: int, device: str):
    """(forward, backward) closures of a variant."""
    from tilewise import triton

    call, do = timed_call("txl", N, device)
    (port,) = call.ports
    o = torch.empty_like(call.q)
    lse = torch.empty(call.q.shape[:3], device=device)
    leaves = [call.q, call.k, call.v, *call.tensors]
    if variant != "sums":
        grads = [torch.empty_like(x) for x in leaves]
        return (lambda: triton.forward(call, o, lse)), (
            lambda: triton.backward(call, do, None, o, lse, [True] * len(leaves), grads)
        )

    def formed():
        bare = replace(port, left=call.q + port.bias[:, None], content=None, bias=None)
        return replace(call, q=call.q + port.content[:, None], ports=(bare,))

    before = formed()
    parts = [torch.empty_like(x) for x in (before.q, call.k, call.v, *before.tensors)]

    def backward():
        triton.backward(before, do, None, o, lse, [True] * len(parts), parts)
        return parts[0] + parts[-1], parts[0].sum((0, 2)), parts[-1].sum((0, 2))

    return (lambda: triton.forward(formed(), o, lse)), backward


def perform(variant: str, N: int) -> None:
    """What a time will launch, on meta tensors, for :func:`relative_ahead.perform`."""
    with registers(True, **VARIANTS[variant]):
        for run in passes(variant, N, "meta"):
            run()


def run_times(record, lengths, until: float) -> int:
    """Adds the times of every length to the record; how many of them failed or had no time left."""
    from relative_kernels import cudnn, steady

    wrong = 0
    for N in lengths:
        if time.time() > until:
            wrong += 1
            print(f"not timed: {N}", flush=True)
            continue
        items, memory = {"forward": [], "backward": []}, {}
        for name, run in zip(items, cudnn(N), strict=True):
            items[name].append(("cudnn", run))
        for variant, changes in VARIANTS.items():
            try:
                with registers(True, **changes):
                    for name, run in zip(items, passes(variant, N, "cuda"), strict=True):
                        if name == "backward" or variant != "kernels, 3 stages":
                            graph, memory[variant, name] = started(run, True)
                            items[name].append((variant, graph))
            except Exception as error:
                wrong += 1
                print(f"{variant} N={N} failed: {type(error).__name__} {str(error)[-300:]}", flush=True)
        for name, factor in (("forward", 4), ("backward", 10)):
            medians, samples = steady(items[name], 3, 20)
            for title, ms in medians.items():
                flops = factor * max(1, 16384 // N) * 12 * N * N * 64 / 1e9
                record.append(dict(case=title, n=N, **{"pass": name}, ms=ms, tflops=flops / ms,
                                   ratio=medians["cudnn"] / ms, peak_mib=memory.get((title, name)), dtype="float16",
                                   heads=12, head_dim=64, tokens=max(N, 16384), samples=samples[title]))  # fmt: skip
            shown = (f"{title} {ms:.3f} ms {medians['cudnn'] / ms:.2f}" for title, ms in medians.items())
            print(f"{name:8s} N={N}: {'; '.join(shown)}", flush=True)
        items = None
        torch.cuda.empty_cache()
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="relative_biases.json")
    parser.add_argument("--seconds", type=float, default=55.0)
    parser.add_argument("--compile-seconds", type=float, default=25.0)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--only-compile", action="store_true", help="compile everything for sm_90 and stop (no GPU)")
    arguments = parser.parse_args()
    start = time.time()
    lengths, wanted = [int(n) for n in arguments.lengths.split(",")], checks(("txl",))
    jobs = [("biases", variant, N) for N in lengths for variant in VARIANTS]
    jobs += [("linear", "check", *one) for one in wanted]
    failed = precompile(jobs, arguments.compile_seconds)
    if arguments.only_compile:
        sys.exit(1 if failed else 0)
    import triton

    result = dict(torch=torch.__version__, triton=triton.__version__, cuda=torch.version.cuda,
                  time=time.strftime("%Y-%m-%d"), checks=[], timings=[])  # fmt: skip
    wrong = 1
    try:
        wrong = run_checks(result["checks"], wanted, start + 0.7 * arguments.seconds)
        result["gpu"] = torch.cuda.get_device_properties(0).name
        wrong += run_times(result["timings"], lengths, start + arguments.seconds - 6.0)
        print(f"{sum(c['ok'] for c in result['checks'])} of {len(wanted)} checks within budget, "
              f"{time.time() - start:.0f} s", flush=True)  # fmt: skip
    finally:
        Path(arguments.out).write_text(json.dumps(result))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
