"""Backward with scalar terms (T5): checks, then each kernel's time and the whole beside cuDNN, by queries a tile.

    python benchmarks/relative_scalars.py --out relative_scalars.json --seconds 55

Checks are those of `relative_kernels.py check` whose terms are scalar. `tall` has 128 queries a tile in the pass over
queries at every length, `low` 64. CUDA graphs, L2 flushed, rounds interleaved with cuDNN's attention without any term.
"""

from __future__ import annotations

import sys

import rounds
from relative_cases import CHECKS, check_fields, check_one, passes_of, ready, timed_call
from relative_tiles import kernel_times

LENGTHS = (8192, 2048, 512)
SHAPES = {"tall": (128, 64, 4, 3, 2), "low": (64, 64, 4, 3, 2)}
SCALAR = ("t5", "t5_causal", "alibi", "wavlm")


def backward_of(name: str, N: int, device: str):
    """The backward of T5 ("tall", "low") or of no term ("none"), as a closure."""
    from tilewise.triton.config import using

    _, run = ready(passes_of(*timed_call("none" if name == "none" else "t5", N, device)))

    def backward():
        with using({("queries", "scalar"): ((0, SHAPES[name]),)} if name in SHAPES else {}):
            run()

    return backward


def run_times(record: rounds.Record, lengths) -> None:
    for N in record.in_time(lengths, 5.0):
        cell = rounds.Cell(N, passes=("backward",))
        for name in (*SHAPES, "none"):
            with record.attempt(f"{name} N={N}"):
                run = backward_of(name, N, rounds.DEVICE)
                us = kernel_times(run)
                record.result["profile"].append(dict(case=name, n=N, us=us))
                print(f"{name} N={N}: {', '.join(f'{k[:24]} {t:.1f}' for k, t in us.items())}", flush=True)
                cell.add("backward", name, run)
        record.result["timings"] += cell.rows(5, 20)
    print(rounds.table(record.result["timings"]), flush=True)


def main():
    arguments = rounds.parser_of(__doc__, "relative_scalars.json", 55.0, 30.0).parse_args()
    record = rounds.Record(arguments, profile=[], timings=[])
    wanted = [n for n, check in enumerate(CHECKS) if check[0] in SCALAR]
    jobs = [("scalars", name, N) for N in LENGTHS for name in (*SHAPES, "none")]
    rounds.compile_jobs(arguments, jobs + [("check", n) for n in wanted])
    with record:
        checks = [(CHECKS[n], rounds.DEVICE) for n in wanted]
        record.check(check_one, checks, record.until(0.75), check_fields)
        run_times(record, LENGTHS)
    sys.exit(record.status)


if __name__ == "__main__":
    main()
