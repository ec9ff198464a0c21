"""Tiles of the portable backward at width 128: error-budget checks, then each kernel's time by tile.

    python benchmarks/relative_wide.py --out relative_wide.json --seconds 75

Tiles of 128 rows are checked under masks and bands that cut them; one kernel's tile changes at a time.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager

import rounds
from relative_cases import BRAIN, HALF, check_fields, check_one, passes_of, ready, sizes, timed_call
from relative_tiles import kernel_times

D = 128
LENGTHS = (8192, 2048)
TALL = {"queries": (128, 64, 8, 2, 2), "keys": (64, 128, 8, 2, 2)}
FEW, MANY = ("none", "t5"), ("shaw", "deberta", "txl")
TRIED = [
    ("keys", FEW, [(32, 64, 4, 2, 2), (64, 128, 8, 2, 2), (64, 128, 8, 3, 2), (64, 64, 8, 2, 2), (32, 64, 4, 3, 3)]),
    ("keys", MANY, [(32, 64, 4, 2, 2), (64, 64, 8, 2, 2), (32, 64, 4, 3, 2)]),
    ("queries", FEW, [(64, 32, 4, 3, 3), (128, 64, 8, 2, 2), (128, 64, 8, 3, 2), (64, 64, 4, 2, 2), (64, 64, 8, 2, 2)]),
    ("queries", MANY, [(64, 32, 4, 3, 3), (64, 64, 4, 2, 2), (64, 64, 8, 2, 2)]),
]
"""(pass, cases, tiles): what scores of a number an offset allow, and all others."""

KERNELS = {"keys": "grad_key", "queries": "grad_query"}

CHECKS = [
    ("none", "none", HALF, sizes(1100, d=D), 0.0), ("t5", "none", HALF, sizes(1088, d=D), 0.0),
    *(("t5", mask, HALF, sizes(N, d=D), 0.0) for mask, N in (("lengths", 1030), ("causal", 1100), ("packed", 1100))),
    ("t5", "window", HALF, sizes(1100, Hk=2, d=D), 0.0), ("t5", "none", HALF, sizes(700, 1500, d=D), 0.0),
    ("wavlm", "none", BRAIN, sizes(1100, d=D), 0.0),
]  # fmt: skip


@contextmanager
def tiles(**shapes):
    """Inside, these passes take these tiles, whatever the terms."""
    from tilewise.triton import config

    before = dict(config.WIDE)
    config.WIDE.update({(what, kind): shapes[what] for what, kind in before if what in shapes})
    try:
        yield
    finally:
        config.WIDE.update(before)


def check(n: int, device: str):
    """Error budgets of a check with the tall tiles; on the meta device, only its launches."""
    with tiles(**TALL):
        return check_one(CHECKS[n], device)


def timed():
    """(pass, case, tile, N) of every time."""
    return [(what, case, shape, N) for N in LENGTHS for what, cases, tried in TRIED for case in cases
            for shape in tried]  # fmt: skip


def backward_of(what: str, case: str, shape: tuple[int, ...], N: int, device: str):
    _, run = ready(passes_of(*timed_call(case, N, device, d=D)))

    def backward():
        with tiles(**{what: shape}):
            run()

    return backward


def perform(kind: str, *rest) -> None:
    """Everything that a check or a time will launch, on meta tensors, for :func:`relative_ahead.perform`."""
    if kind == "check":
        check(*rest, "meta")
    else:
        backward_of(*rest, "meta")()


def run_times(record: rounds.Record) -> None:
    for what, case, shape, N in record.in_time(timed(), 3.0):
        with record.attempt(f"{what} {case} {shape} N={N}"):
            us = kernel_times(backward_of(what, case, shape, N, rounds.DEVICE))
            # Transformer-XL has kernels of its own at some widths: then the tile does not show.
            own = us.get(KERNELS[what])
            record.result["times"].append(dict(what=what, case=case, n=N, shape=shape, us=us))
            print(f"{what} {case} N={N} {shape}: {'-' if own is None else f'{own:.0f} us'}", flush=True)


def main():
    arguments = rounds.parser_of(__doc__, "relative_wide.json", 75.0, 35.0).parse_args()
    record = rounds.Record(arguments, times=[])
    jobs = [("wide", "time", *job) for job in timed()] + [("wide", "check", n) for n in range(len(CHECKS))]
    rounds.compile_jobs(arguments, jobs)
    with record:
        checks = [(n, rounds.DEVICE) for n in range(len(CHECKS))]
        record.check(check, checks, record.until(0.7), lambda n, device: check_fields(CHECKS[n], device))
        run_times(record)
    sys.exit(record.status)


if __name__ == "__main__":
    main()
