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

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from processes import isolated
from relative_ahead import precompile
from relative_cases import label, passes_of, timed_call
from relative_linear_checks import OTHERS, check, checks, recorded, registers

LENGTHS = (8192, 4096, 2048, 512, 128)
DEFAULT = ("banded", "txl", "times")
GROUPS = (*DEFAULT, "profile", "forward", "wide")
"""Checks of the backward look at the forward's results, too, at nearly all of the lengths and masks of `forward`."""
CASES = ("shaw", "deberta", "txl")
VARIANTS = {
    "as committed": {},
    "3 queries' stages": {"QUERIES_ALONE": (3, None)},
    "320 MiB of dG": {"BUDGET": 320 << 20},
    "1 GiB of dG": {"BUDGET": 1 << 30},
    "1 diagonal at once": {"AT_ONCE": 1, "SLOTS": 1056},
    "4 diagonals at once": {"AT_ONCE": 4},
    "528 programs": {"SLOTS": 528},
    "wide": {"WIDTHS": (64, 128)},
}
TRIED = [
    ("shaw", "3 queries' stages", (4096, 2048)),
    *((case, f"{n} at once", (8192, 2048)) for case in ("deberta", "txl") for n in ("1 diagonal", "4 diagonals")),
    ("deberta", "528 programs", (8192, 2048)),
    ("txl", "1 GiB of dG", (8192,)),
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
        call, do = timed_call(case, N, device, d=d, **options)
        forward, backward = passes_of(call, do)
    if new:
        from tilewise import triton

        o = torch.empty_like(call.q)
        lse = torch.empty(call.q.shape[:3], device=device)
        leaves = [call.q, call.k, call.v, *call.tensors]
        grads = [torch.empty_like(x) for x in leaves]
        forward = lambda: triton.forward(call, o, lse)  # noqa: E731
        backward = lambda: triton.backward(call, do, None, o, lse, [True] * len(leaves), grads)  # noqa: E731
    return forward, backward


def perform(kind: str, *rest) -> None:
    """Everything that a check or a time will launch, on meta tensors, for :func:`relative_ahead.perform`."""
    if kind == "check":
        return check(rest[0], "meta", *rest[1:])
    N, d, case, new, variant = rest
    with registers(new, **VARIANTS[variant]):
        for run in timed(case, N, "meta", new, d):
            run()


def run_checks(record, wanted, until: float) -> int:
    """Eight processes: after an illegal instruction all later checks of its process would fail, so it takes none."""
    wrong = 0
    jobs = [(job, "cuda", *rest) for job, *rest in wanted]
    for (job, _, backward, variant), budgets, error in isolated(check, jobs, until, 8):
        name = label(*job, 0.0) + ("" if backward else " forward") + (f" {variant}" if variant else "")
        if error is None:
            bad = [b for b in budgets if not b.ok]
            record.append(dict(case=name, ok=not bad, budgets=[vars(b) for b in budgets]))
            shown = bad or [max(budgets, key=lambda b: b.error / max(b.allowed, 1e-30))]
            text = "; ".join(f"{b.name} {b.error:.1e}/{b.allowed:.1e} rel {b.relative:.0e}" for b in shown)
        else:
            bad, text = True, error[-400:]
            record.append(dict(case=name, ok=False, error=error))
        wrong += bool(bad)
        print("BAD" if bad else "ok ", name, text, flush=True)
    return wrong


def started(run, new: bool):
    """(a CUDA graph of the pass, its peak MiB beside inputs and results); raises where a new pass ran other kernels."""
    from relative_kernels import graphed

    with recorded() as names:
        run()
    if new and (others := names & OTHERS):
        raise AssertionError(f"other kernels ran: {sorted(others)}")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return graphed(run), (torch.cuda.max_memory_allocated() - before) / 2**20


def run_times(record, cells, until: float) -> int:
    """Times of every (length, width); how many of them failed or had no time left."""
    from relative_kernels import cudnn, steady

    wrong = 0
    for N, d in cells:
        if time.time() > until:
            wrong += 1
            print(f"not timed: {N} at width {d}", flush=True)
            continue
        items, memory = {"forward": [], "backward": []}, {}
        for name, run in zip(items, cudnn(N, d=d), strict=True):
            items[name].append(("cudnn" if d == 64 else f"cudnn d{d}", run))
        for case, new, variant in plan(N, d):
            title = label_of(case, new, variant, d)
            try:
                runs = timed(case, N, "cuda", new, d)
                with registers(new, **VARIANTS[variant]):
                    for name, run in zip(items, runs, strict=True):
                        if name == "backward" or variant in ("as committed", "wide"):
                            graph, memory[title, name] = started(run, new)
                            items[name].append((title, graph))
            except Exception as error:
                wrong += 1
                print(f"{title} N={N} failed: {type(error).__name__} {str(error)[-300:]}", flush=True)
        for name, factor in (("forward", 4), ("backward", 10)):
            medians, samples = steady(items[name], 3, 20)
            base = next(iter(medians.values()))
            for title, ms in medians.items():
                flops = factor * max(1, 16384 // N) * 12 * N * N * d / 1e9
                record.append(dict(case=title, n=N, **{"pass": name}, ms=ms, tflops=flops / ms, ratio=base / ms,
                                   peak_mib=memory.get((title, name)), dtype="float16", heads=12, head_dim=d,
                                   tokens=max(N, 16384), samples=samples[title]))  # fmt: skip
        items = None
        torch.cuda.empty_cache()
    for name in ("forward", "backward"):
        print(f"\n{name}: ratio to cuDNN without a term (ms, peak MiB)", flush=True)
        for title in dict.fromkeys(r["case"] for r in record if r["pass"] == name):
            rows = [r for r in record if r["pass"] == name and r["case"] == title]
            text = "  ".join(f"{r['n']}: {r['ratio']:.2f} ({r['ms']:.3f}, {r['peak_mib'] or 0:.0f})" for r in rows)
            print(f"  {title:32s} {text}", flush=True)
    return wrong


def run_profile(record, N: int) -> None:
    """Microseconds of each kernel of the backward."""
    from relative_tiles import kernel_times

    for case, new, variant in PROFILED:
        with registers(new, **VARIANTS[variant]):
            forward, backward = timed(case, N, "cuda", new)
            forward()
            times = kernel_times(backward)
        title = label_of(case, new, variant, 64)
        record.append(dict(case=title, n=N, **{"pass": "backward"}, us=times))
        text = ", ".join(f"{k[:24]} {t:.0f}" for k, t in sorted(times.items(), key=lambda a: -a[1]) if t > 1)
        print(f"us {title} N={N}: {text}", flush=True)
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="relative_linear.json")
    parser.add_argument("--only", default=",".join(DEFAULT), help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--seconds", type=float, default=110.0, help="of everything; no length is begun near its end")
    parser.add_argument("--compile-seconds", type=float, default=55.0)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--only-compile", action="store_true", help="compile everything for sm_90 and stop (no GPU)")
    arguments = parser.parse_args()
    start = time.time()
    only = arguments.only.split(",")
    if unknown := set(only) - set(GROUPS):
        parser.error(f"--only has {sorted(unknown)}; expected some of {', '.join(GROUPS)}")
    lengths = [int(n) for n in arguments.lengths.split(",")] if "times" in only else []
    wanted = checks(only)
    cells = [(n, 64) for n in lengths] + ([(8192, 128), (2048, 128)] if "wide" in only else [])
    jobs = [("linear", "time", N, d, *one) for N, d in sorted(cells, reverse=True) for one in plan(N, d)]
    jobs += [("linear", "check", *one) for one in wanted]
    if "profile" in only:
        jobs += [("linear", "time", N, 64, *one) for N in (8192, 2048) for one in PROFILED]
    failed = precompile(jobs, arguments.compile_seconds)
    if arguments.only_compile:
        sys.exit(1 if failed else 0)
    import triton

    result = dict(torch=torch.__version__, triton=triton.__version__, cuda=torch.version.cuda,
                  time=time.strftime("%Y-%m-%d"), checks=[], timings=[], profile=[])  # fmt: skip
    wrong = 1
    try:
        wrong = run_checks(result["checks"], wanted, start + 0.7 * arguments.seconds)
        result["gpu"] = torch.cuda.get_device_properties(0).name
        wrong += run_times(result["timings"], cells, start + arguments.seconds - 12.0)
        if "profile" in only:
            for N in (8192, 2048):
                run_profile(result["profile"], N)
        print(f"{sum(c['ok'] for c in result['checks'])} of {len(wanted)} checks within budget, "
              f"{time.time() - start:.0f} s", flush=True)  # fmt: skip
    finally:
        Path(arguments.out).write_text(json.dumps(result))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
