"""The Hopper kernels that skew in registers: checks against the fp64 oracle, then times beside the others and cuDNN.

    python benchmarks/relative_linear.py --out results.json --seconds 100
    python benchmarks/relative_linear.py --only times,profile --out results.json

Checks (:mod:`relative_linear_checks`; the kernels that ran are looked at, so a silent fallback is a failure): all
gradients of banded terms and of Transformer-XL, O and lse of DeBERTa and single OnQuery terms, at lengths of at least
four times the band and lengths that no tile divides, causal, window, lengths, packed, holes, grouped heads, Tq ≠ Tk,
bf16, a backward in several shares; each twice, compared bit for bit.
Times: CUDA graphs, L2 flushed, rounds interleaved with the other kernels and with cuDNN's attention without any term.
The whole run stops itself after --seconds.
"""

from __future__ import annotations

import sys

import rounds
import torch
from relative_cases import label, passes_of, ready, timed_call
from relative_linear_checks import OTHERS, check, checks, registers
from relative_tiles import kernel_times

LENGTHS = (8192, 4096, 2048, 512, 128)
DEFAULT = ("banded", "txl", "times")
GROUPS = (*DEFAULT, "profile", "forward", "wide")
"""Checks of the backward look at the forward's results, too, at nearly all of the lengths and masks of `forward`."""
CASES = ("shaw", "deberta", "txl")
VARIANTS = {
    "as committed": {},
    "3 queries' stages": {"QUERIES_ALONE": (3, None)},
    "1 GiB of dG": {"BUDGET": 1 << 30},
    "1 diagonal at once": {"AT_ONCE": {True: 1, False: 1}},
    "2 diagonals at once": {"AT_ONCE": {True: 2, False: 2}},
    "2 programs an SM": {"STAGES": 4, "SLOTS": {True: 264, False: 2112}},
    "wide": {"WIDTHS": (64, 128)},
}
TRIED = [
    ("shaw", "3 queries' stages", (4096, 2048)),
    ("deberta", "1 diagonal at once", (8192, 2048)),
    ("txl", "2 diagonals at once", (8192, 2048)),
    *((case, "2 programs an SM", (8192, 2048)) for case in ("deberta", "txl")),
    ("txl", "1 GiB of dG", (8192, 2048)),
]
"""Variants of the backward beside the committed one, and the lengths at which they are another one."""


def plan(N: int, d: int) -> list:
    """(case, new kernels, variant) of what is timed beside cuDNN."""
    whole = "as committed" if d == 64 else "wide"
    jobs = [(case, new, whole) for case in CASES for new in (False, True)]
    return jobs + [(case, True, variant) for case, variant, lengths in TRIED if N in lengths and d == 64]


PROFILED = [(case, new, "as committed") for case in CASES for new in (False, True)]


def label_of(case: str, new: bool, variant: str, d: int) -> str:
    words = [case, "registers" if new else "others", "" if d == 64 else f"d{d}"]
    return " ".join([w for w in words if w] + ([variant] if variant not in ("as committed", "wide") else []))


def timed(case: str, N: int, device: str, new: bool, d: int = 64):
    """(forward, backward) closures of the new kernels or the others; these may keep projections at 128 tokens.

    Otherwise nothing is kept, so that the forward is what inference runs.
    """
    options = {} if new or case == "txl" or N <= 128 else {"projections": "recompute"}
    with registers(new):
        return passes_of(*timed_call(case, N, device, d=d, **options), keep=not new)


def perform(kind: str, *rest) -> None:
    """Everything that a check or a time will launch, on meta tensors, for :func:`relative_ahead.perform`."""
    if kind == "check":
        return check(rest[0], "meta", *rest[1:])
    N, d, case, new, variant = rest
    with registers(new, **VARIANTS[variant]):
        for run in timed(case, N, "meta", new, d):
            run()


def check_fields(job, device: str, backward: bool, forced: str) -> dict:
    return dict(case=label(*job, 0.0) + ("" if backward else " forward") + (f" {forced}" if forced else ""))


def run_checks(record: rounds.Record, wanted: list) -> None:
    jobs = [(job, rounds.DEVICE, *rest) for job, *rest in wanted]
    record.check(check, jobs, record.until(0.7), check_fields)


def run_times(record: rounds.Record, cells: list[tuple[int, int]]) -> None:
    """Times of every (length, width)."""
    for N, d in record.in_time(cells, 12.0):
        cell = rounds.Cell(N, d, base="cudnn" if d == 64 else f"cudnn d{d}")
        for case, new, variant in plan(N, d):
            title = label_of(case, new, variant, d)
            with record.attempt(f"{title} N={N}"):
                runs = timed(case, N, rounds.DEVICE, new, d)
                with registers(new, **VARIANTS[variant]):
                    for pass_, run in zip(cell.runs, ready(runs), strict=True):
                        if pass_ == "backward" or variant in ("as committed", "wide"):
                            cell.add(pass_, title, run, without=OTHERS if new else ())
        record.result["timings"] += cell.rows(3, 20)
    print(rounds.table(record.result["timings"]), flush=True)


def run_profile(record: rounds.Record) -> None:
    """Microseconds of each kernel of the backward."""
    jobs = [(N, *one) for N in (8192, 2048) for one in PROFILED]
    for N, case, new, variant in record.in_time(jobs, 3.0):
        title = label_of(case, new, variant, 64)
        with record.attempt(f"{title} N={N}"):
            with registers(new, **VARIANTS[variant]):
                _, backward = ready(timed(case, N, rounds.DEVICE, new))
                times = kernel_times(backward)
            record.result["profile"].append(dict(case=title, n=N, **{"pass": "backward"}, us=times))
            text = ", ".join(f"{k[:24]} {t:.0f}" for k, t in sorted(times.items(), key=lambda a: -a[1]) if t > 1)
            print(f"us {title} N={N}: {text}", flush=True)
        torch.cuda.empty_cache()


def main():
    parser = rounds.parser_of(__doc__, "relative_linear.json", 110.0, 55.0)
    parser.add_argument("--only", default=",".join(DEFAULT), help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    if unknown := set(only) - set(GROUPS):
        parser.error(f"--only has {sorted(unknown)}; expected some of {', '.join(GROUPS)}")
    record = rounds.Record(arguments, timings=[], profile=[])
    wanted = checks(only)
    cells = [(N, 64) for N in rounds.whole_numbers(arguments.lengths)] if "times" in only else []
    cells += [(8192, 128), (2048, 128)] if "wide" in only else []
    jobs = [("linear", "time", N, d, *one) for N, d in sorted(cells, reverse=True) for one in plan(N, d)]
    jobs += [("linear", "check", *one) for one in wanted]
    if "profile" in only:
        jobs += [("linear", "time", N, 64, *one) for N in (8192, 2048) for one in PROFILED]
    rounds.compile_jobs(arguments, jobs)
    with record:
        run_checks(record, wanted)
        run_times(record, cells)
        if "profile" in only:
            run_profile(record)
    sys.exit(record.status)


if __name__ == "__main__":
    main()
