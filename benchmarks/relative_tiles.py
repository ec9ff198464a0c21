"""Tile shapes worth trying for the Triton attention kernels, and the time of each kernel with them."""

from __future__ import annotations

import rounds
import torch
from relative_cases import MECHANISMS, passes_of, ready, timed_call

VARIANTS = {
    "forward": {
        # Two stages: three programs of 64 × 128 share an SM, four of 64 × 64.
        "none": [(128, 64, 8, 3, 2), (64, 128, 4, 3, 2), (64, 64, 4, 3, 2), (64, 128, 4, 2, 1), (64, 64, 4, 2, 2)],
        "t5": [(64, 128, 4, 3, 2), (64, 64, 4, 3, 2), (64, 128, 4, 2, 1), (64, 64, 4, 2, 2)],
        "shaw": [(64, 128, 4, 3, 2), (64, 64, 4, 3, 2), (128, 64, 8, 3, 2)],
        "deberta": [(128, 64, 4, 3, 2), (128, 64, 8, 3, 2), (64, 64, 4, 3, 2)],
        "txl": [(64, 64, 4, 3, 3), (64, 64, 4, 3, 2), (128, 64, 8, 3, 3)],
    },
    "keys": {c: [(64, 64, 4, 3, 2), (64, 64, 4, 4, 2), (64, 64, 4, 3, 3), (64, 64, 4, 2, 2)] for c in MECHANISMS},
    "queries": {c: [(64, 64, 4, 3, 2), (64, 64, 4, 4, 2), (64, 64, 4, 3, 3), (64, 64, 4, 2, 2),
                    *([(128, 64, 4, 3, 2)] if c in ("none", "t5") else [])] for c in MECHANISMS},
    "projection": {c: [(64, 128, 4, 3), (64, 128, 4, 2), (64, 64, 4, 3), (64, 128, 8, 3), (64, 256, 8, 3)]
                   for c in ("shaw", "deberta", "txl")},
    "fold": {c: [(64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2), (32, 64, 4, 4)]
             for c in ("shaw", "deberta", "txl")},
}  # fmt: skip


def variants(only):
    """(what, case, shape) of every tile shape worth trying."""
    return [
        (what, case, shape)
        for what, cases in VARIANTS.items()
        for case in cases
        if case in only
        for shape in cases[case]
    ]


def replaced(what: str, shape: tuple[int, ...]):
    """Inside, the kernels of `what` use this tile shape, whatever the call."""
    from tilewise.triton.config import MEASURED, using

    return using({key: ((0, shape),) for key in MEASURED if key[0] == what})


def run_variant(what: str, case: str, N: int, device):
    """The pass in which a variant shows, as a closure."""
    forward, backward = ready(passes_of(*timed_call(case, N, device, skew="memory", projections="recompute")))
    return forward if what in ("forward", "projection") else backward


KERNELS = {"forward": ["attend"], "keys": ["grad_key"], "queries": ["grad_query"], "projection": ["project"],
           "fold": ["fold", "collect"]}  # fmt: skip


def kernel_times(run, repeats: int = 3):
    """{kernel: µs} of one run, by the profiler."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    run()
    torch.cuda.synchronize()
    with profiler(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    return {e.key: e.self_device_time_total / repeats for e in p.key_averages() if e.self_device_time_total > 0}


def tune(record: rounds.Record, lengths: list[int], only: list[str]) -> None:
    """Microseconds of each kernel with each shape."""
    rows = record.result["tuned"]
    for N in lengths:
        for what, case, shape in record.in_time(variants(only), 0.0):
            with record.attempt(f"tune {what} {case} {shape} N={N}"):
                with replaced(what, shape):
                    times = kernel_times(run_variant(what, case, N, rounds.DEVICE))
                us = {k: times[k] for k in KERNELS[what] if k in times}
                rows.append(dict(n=N, what=what, case=case, shape=shape, us=us))
        for what, cases in VARIANTS.items():
            for case in cases:
                mine = [r for r in rows if (r["n"], r["what"], r["case"]) == (N, what, case)]
                if mine:
                    shown = (f"{r['shape']}: {'+'.join(f'{t:.0f}' for t in r['us'].values())}" for r in mine)
                    text = "; ".join(shown)
                    print(f"tune {what} {case} N={N}: {text}", flush=True)
