"""Tiles of the portable backward at width 128: error-budget checks, then each kernel's time by tile.

    python benchmarks/relative_wide.py --out relative_wide.json --seconds 75

Tiles of 128 rows are checked under masks and bands that cut them; one kernel's tile changes at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from relative_ahead import precompile
from relative_cases import HALF, check_one, label, passes_of, timed_call

D = 128
LENGTHS = (8192, 2048)
TALL = {"queries": (128, 64, 8, 2, 2), "keys": (64, 128, 8, 2, 2)}
FEW, MANY = ("none", "t5"), ("shaw", "deberta", "txl")
TRIED = [
    ("keys", FEW, [(64, 128, 8, 2, 2), (64, 128, 8, 3, 2), (64, 64, 8, 2, 2), (32, 64, 4, 3, 3)]),
    ("keys", MANY, [(64, 64, 8, 2, 2), (32, 64, 4, 3, 2)]),
    ("queries", FEW, [(128, 64, 8, 2, 2), (128, 64, 8, 3, 2), (64, 64, 4, 2, 2), (64, 64, 8, 2, 2)]),
    ("queries", MANY, [(64, 64, 4, 2, 2), (64, 64, 8, 2, 2)]),
]
"""(pass, cases, tiles beside the one in use): what scores of a number an offset allow, and all others."""

KERNELS = {"keys": "grad_key", "queries": "grad_query"}


def checks():
    from tilewise.testing import Sizes

    s = lambda Tq, Tk=None, Hk=4: Sizes(2, 4, Hk, Tq, Tk or Tq, D, D, None, published=True)  # noqa: E731
    jobs = [("none", "none", HALF, s(1100)), ("t5", "none", HALF, s(1088)), ("t5", "lengths", HALF, s(1030)),
            ("t5", "causal", HALF, s(1100)), ("t5", "packed", HALF, s(1100)), ("t5", "window", HALF, s(1100, Hk=2)),
            ("t5", "none", HALF, s(700, 1500)), ("wavlm", "none", torch.bfloat16, s(1100))]  # fmt: skip
    return [(*job, 0.0) for job in jobs]


@contextmanager
def tiles(**shapes):
    """Inside, these passes take these tiles."""
    from tilewise.triton import config

    before = dict(config.WIDE)
    config.WIDE.update(shapes)
    try:
        yield
    finally:
        config.WIDE.update(before)


def timed():
    """(pass, case, tile, N) of every time; the tile in use first."""
    from tilewise.triton.config import WIDE

    return [(what, case, shape, N) for N in LENGTHS for what, cases, tried in TRIED for case in cases
            for shape in (WIDE[what], *tried)]  # fmt: skip


def backward_of(what: str, case: str, shape: tuple[int, ...], N: int, device: str):
    _, run = passes_of(*timed_call(case, N, device, d=D))

    def backward():
        with tiles(**{what: shape}):
            run()

    return backward


def perform(kind: str, *rest) -> None:
    """Everything that a check or a time will launch, on meta tensors, for :func:`relative_ahead.perform`."""
    if kind == "check":
        with tiles(**TALL):
            check_one(checks()[rest[0]], "meta")
    else:
        backward_of(*rest, "meta")()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="relative_wide.json")
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--compile-seconds", type=float, default=35.0)
    arguments = parser.parse_args()
    until = time.time() + arguments.seconds - 3.0
    jobs = [("wide", "time", *job) for job in timed()] + [("wide", "check", n) for n in range(len(checks()))]
    precompile(jobs, arguments.compile_seconds)
    import triton
    from relative_tiles import kernel_times

    result = dict(gpu=torch.cuda.get_device_properties(0).name, torch=torch.__version__, triton=triton.__version__,
                  time=time.strftime("%Y-%m-%d"), checks=[], times=[])  # fmt: skip
    wrong = 0
    try:
        for check in checks():
            with tiles(**TALL):
                budgets = check_one(check, "cuda")
            bad = [b for b in budgets if not b.ok]
            wrong += bool(bad)
            result["checks"].append(dict(case=label(*check), ok=not bad, budgets=[vars(b) for b in budgets]))
            print("BAD" if bad else "ok ", label(*check), *(f"{b.name} {b.error:.1e}" for b in bad), flush=True)
        for what, case, shape, N in timed():
            if time.time() > until:
                wrong += 1
                print(f"not timed: {what} {case} {shape} {N}", flush=True)
                continue
            us = kernel_times(backward_of(what, case, shape, N, "cuda"))
            # Transformer-XL has kernels of its own at some widths: then the tile does not show.
            own = us.get(KERNELS[what])
            result["times"].append(dict(what=what, case=case, n=N, shape=shape, us=us))
            print(f"{what} {case} N={N} {shape}: {'-' if own is None else f'{own:.0f} us'}", flush=True)
    finally:
        Path(arguments.out).write_text(json.dumps(result))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
