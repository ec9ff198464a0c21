"""The Triton attention kernels on a GPU: numerics of every case, and times beside attention without a term.

    python benchmarks/relative_kernels.py check time --out results.json

`check` compares O, lse and all gradients with the fp64 oracle; `time` measures both passes of T5, Shaw, DeBERTa-v3 and
Transformer-XL (12 heads × 64, 16,384 tokens a batch, fp16, CUDA graphs, L2 flushed) in rounds interleaved with cuDNN's
attention without any term. Kernels are compiled beforehand by many processes.
"""

from __future__ import annotations

import sys

import rounds
import torch
from relative_cases import (
    CHECKS,
    EXTRA,
    MECHANISMS,
    check_fields,
    check_one,
    extra_call,
    label,
    passes_of,
    timed_call,
)  # fmt: skip
from relative_tiles import kernel_times, tune, variants


def time_all(record: rounds.Record, lengths: list[int], only: list[str]) -> None:
    for N in record.in_time(lengths, 0.0):
        cell = rounds.Cell(N)
        for case in only:
            with record.attempt(f"{case} N={N}"):
                for pass_, run in zip(cell.runs, passes_of(*timed_call(case, N, rounds.DEVICE)), strict=True):
                    cell.add(pass_, case, run)
        record.result["timings"] += [
            row | dict(system="cudnn" if row["case"] == "cudnn" else "tilewise") for row in cell.rows(4, 30)
        ]


def time_extra(record: rounds.Record) -> None:
    """Other dtypes, widths and causal masks beside cuDNN under the same."""
    for case, N, dtype, d, causal in record.in_time(EXTRA, 0.0):
        with record.attempt(f"{case} N={N} {dtype} d={d} causal={causal}"):
            cell = rounds.Cell(N, d, dtype, causal)
            runs = passes_of(*extra_call(case, N, dtype, d, causal, rounds.DEVICE))
            for pass_, run in zip(cell.runs, runs, strict=True):
                cell.add(pass_, case, run)
            rows = cell.rows(3, 20)
            for base, row in zip(rows[::2], rows[1::2], strict=True):
                extra = dict(system="tilewise", causal=causal, cudnn_samples=base["samples"])
                record.result["timings"].append(row | extra)
        torch.cuda.empty_cache()


def title_of(row: dict) -> str:
    if "causal" not in row:
        return row["case"]
    return f"{row['case']} {row['dtype']} d{row['head_dim']}{' causal' if row['causal'] else ''}"


def profile(record: rounds.Record, lengths: list[int], only: list[str]) -> None:
    """Microseconds of every kernel of both passes."""
    for N, case in record.in_time([(N, case) for N in lengths for case in only], 0.0):
        with record.attempt(f"{case} N={N}"):
            for pass_, run in zip(rounds.PASSES, passes_of(*timed_call(case, N, rounds.DEVICE)), strict=True):
                times = kernel_times(run)
                record.result["profile"].append(dict(n=N, case=case, **{"pass": pass_}, us=times))
                text = ", ".join(f"{k[:24]} {t:.0f}" for k, t in sorted(times.items(), key=lambda a: -a[1]) if t > 1)
                print(f"us {pass_} {case} N={N}: {text}", flush=True)


def main():
    parser = rounds.parser_of(__doc__, "relative_kernels.json", 600.0, 200.0)
    parser.add_argument("what", nargs="+", choices=("check", "time", "extra", "profile", "tune"))
    parser.add_argument("--lengths", default="512,2048,8192")
    parser.add_argument("--only", default=",".join(MECHANISMS))
    parser.add_argument("--checks", default="", help="only checks whose label contains this")
    arguments = parser.parse_args()
    record = rounds.Record(arguments, timings=[], profile=[], tuned=[])
    what, lengths, only = arguments.what, rounds.whole_numbers(arguments.lengths), arguments.only.split(",")
    chosen = [n for n, job in enumerate(CHECKS) if arguments.checks in label(*job)]
    jobs = [("time", case, N) for N in sorted(lengths, reverse=True) for case in only if {"time", "profile"} & {*what}]
    if "extra" in what:
        jobs += [("extra", n) for n in range(len(EXTRA))]
    if "tune" in what:
        jobs += [("tune", *variant, N) for variant in variants(only) for N in (max(lengths), min(lengths))]
    jobs += [("check", n) for n in chosen if "check" in what]
    rounds.compile_jobs(arguments, jobs)
    with record:
        if "time" in what:
            time_all(record, lengths, only)
        if "extra" in what:
            time_extra(record)
        if "profile" in what:
            profile(record, [n for n in lengths if n in (512, 2048, 8192)], only)
        if "tune" in what:
            tune(record, (max(lengths), min(lengths)), only)
        if "check" in what:
            # The long sequences of DeBERTa first, so that the processes end together.
            longest = sorted(chosen, key=lambda n: -CHECKS[n][3].Tq * CHECKS[n][3].Tk)
            record.check(check_one, [(CHECKS[n], rounds.DEVICE) for n in longest], record.until(1.0), check_fields)
        print(rounds.table(record.result["timings"], title_of), flush=True)
    sys.exit(record.status)


if __name__ == "__main__":
    main()
