"""Backward with scalar terms (T5): checks, then each kernel's time and the whole beside cuDNN, by queries a tile.

    python benchmarks/relative_scalars.py --out relative_scalars.json --seconds 55

Checks are those of `relative_kernels.py check` whose terms are scalar. `tall` has 128 queries a tile in the pass over
queries at every length, `low` 64. CUDA graphs, L2 flushed, rounds interleaved with cuDNN's attention without any term.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from relative_ahead import precompile
from relative_cases import CHECKS, passes_of, timed_call

LENGTHS = (8192, 2048, 512)
SHAPES = {"tall": (128, 64, 4, 3, 2), "low": (64, 64, 4, 3, 2)}
SCALAR = ("t5", "t5_causal", "alibi", "wavlm")


def backward_of(name: str, N: int, device: str):
    """The backward of T5 ("tall", "low") or of no term ("none"), as a closure."""
    from tilewise.triton.config import using

    _, run = passes_of(*timed_call("none" if name == "none" else "t5", N, device))

    def backward():
        with using({("queries", "scalar"): ((0, SHAPES[name]),)} if name in SHAPES else {}):
            run()

    return backward


def run_times(result, lengths, until: float) -> int:
    """Adds the times of every length to the result; how many lengths had no time left."""
    from relative_kernels import cudnn, graphed, steady
    from relative_tiles import kernel_times

    wrong = 0
    for N in lengths:
        if time.time() > until:
            wrong += 1
            print(f"not timed: {N}", flush=True)
            continue
        items = [("cudnn", cudnn(N)[1])]
        for name in (*SHAPES, "none"):
            run = backward_of(name, N, "cuda")
            us = kernel_times(run)
            result["profile"].append(dict(case=name, n=N, us=us))
            print(f"{name} N={N}: {', '.join(f'{k[:24]} {t:.1f}' for k, t in us.items())}", flush=True)
            items.append((name, graphed(run)))
        medians, samples = steady(items, 5, 20)
        for name, ms in medians.items():
            row = dict(case=name, n=N, ms=ms, ratio=medians["cudnn"] / ms, samples=samples[name], dtype="float16",
                       heads=12, head_dim=64, tokens=max(N, 16384))  # fmt: skip
            result["timings"].append({**row, "pass": "backward"})
        shown = (f"{name} {ms:.3f} ms {medians['cudnn'] / ms:.3f}" for name, ms in medians.items())
        print(f"backward N={N}: {'; '.join(shown)}", flush=True)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="relative_scalars.json")
    parser.add_argument("--seconds", type=float, default=55.0)
    parser.add_argument("--compile-seconds", type=float, default=30.0)
    parser.add_argument("--only-compile", action="store_true", help="compile everything for sm_90 and stop (no GPU)")
    arguments = parser.parse_args()
    start = time.time()
    wanted = [n for n, check in enumerate(CHECKS) if check[0] in SCALAR]
    jobs = [("scalars", name, N) for N in LENGTHS for name in (*SHAPES, "none")]
    failed = precompile(jobs + [("check", n) for n in wanted], arguments.compile_seconds)
    if arguments.only_compile:
        sys.exit(1 if failed else 0)
    import triton
    from relative_check import run_checks

    result = dict(torch=torch.__version__, triton=triton.__version__, cuda=torch.version.cuda,
                  time=time.strftime("%Y-%m-%d"), checks=[], profile=[], timings=[])  # fmt: skip
    wrong = 1
    try:
        result["checks"] = run_checks(wanted, start + 0.75 * arguments.seconds)
        wrong = sum(not c["ok"] for c in result["checks"])
        result["gpu"] = torch.cuda.get_device_properties(0).name
        wrong += run_times(result, LENGTHS, start + arguments.seconds - 5.0)
        print(f"{sum(c['ok'] for c in result['checks'])} of {len(wanted)} checks within budget, "
              f"{time.time() - start:.0f} s", flush=True)  # fmt: skip
    finally:
        Path(arguments.out).write_text(json.dumps(result))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
