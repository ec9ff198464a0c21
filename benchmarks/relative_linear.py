"""The Hopper kernels that skew in registers: checks against the fp64 oracle, then times beside the others and cuDNN.

    python benchmarks/relative_linear.py --out results.json
    python benchmarks/relative_linear.py --only banded,times --out results.json

Checks (:mod:`relative_linear_checks`; the kernels that ran are looked at, so a silent fallback is a failure): all
gradients of banded terms and of Transformer-XL, O and lse of DeBERTa and single OnQuery terms, at lengths of at least
four times the band and lengths that no tile divides, causal, window, lengths, packed, holes, grouped heads, Tq ≠ Tk,
bf16, a backward in several shares; each twice, compared bit for bit. Times: CUDA graphs, L2 flushed, rounds interleaved
with the other kernels and with cuDNN's attention without any term. The whole run stops itself after --seconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch
from relative_cases import label, passes_of, timed_call
from relative_linear_checks import check, checks, registers

LENGTHS = (8192, 2048, 512, 128)
GROUPS = ("banded", "txl", "forward", "times")
CASES = ("shaw", "deberta", "txl")
VARIANTS = {
    "as committed": {},
    "2 stages": {"STAGES_ALONE": 2},
    "320 MiB of dG": {"BUDGET": 320 << 20},
    "1 GiB of dG": {"BUDGET": 1 << 30},
}
TRIED = [
    ("shaw", "2 stages"),
    ("deberta", "320 MiB of dG"),
    ("txl", "320 MiB of dG"),
    ("txl", "1 GiB of dG"),
]
"""Variants of the backward beside the committed one."""


def timed(case: str, N: int, device: str, new: bool):
    """(forward, backward) closures of the new kernels or the others; these may keep projections at 128 tokens.

    Otherwise nothing is kept, so that the forward is what inference runs.
    """
    options = {} if new or case == "txl" or N <= 128 else {"projections": "recompute"}
    with registers(new):
        call, do = timed_call(case, N, device, **options)
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


def compile_one(job):
    """Compile what a job will launch, in a process without a GPU context."""
    import triton
    from triton.backends.compiler import GPUTarget

    from tilewise.triton.launch import launcher

    class Hopper:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device=None: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
        is_active = staticmethod(lambda: True)

    triton.runtime.driver.set_active(Hopper())
    if len(launcher) == 1:
        launcher.append(lambda kernel, grid, *args, **meta: kernel.warmup(*args, grid=grid, **meta))
    torch.set_num_threads(1)
    start = time.time()
    try:
        if job[0] == "check":
            one, backward, shares = job[1]
            check(one, "meta", backward, shares)
        else:
            _, case, N, new, variant = job
            with registers(new, **VARIANTS[variant]):
                for run in timed(case, N, "meta", new):
                    run()
    except Exception as error:
        return job, time.time() - start, f"{type(error).__name__}: {str(error)[-600:]}"
    return job, time.time() - start, None


def precompile(jobs, seconds: float) -> int:
    start, done, failed = time.time(), 0, 0
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count(), len(jobs))) as pool:
        results = pool.imap_unordered(compile_one, jobs)
        try:
            for _ in jobs:
                job, took, error = results.next(timeout=max(0.1, seconds - (time.time() - start)))
                done += 1
                if error:
                    failed += 1
                    print("compile failed", job, f"{took:.0f} s", error, flush=True)
        except multiprocessing.TimeoutError:
            print("compilation stopped at its limit", flush=True)
    print(f"compiled {done} of {len(jobs)} jobs in {time.time() - start:.0f} s", flush=True)
    return failed


def run_checks(record, wanted, until: float) -> int:
    wrong = 0
    for job, backward, shares in wanted:
        name = label(*job, 0.0) + (" shares" if shares else "")
        if time.time() > until:
            wrong += 1
            record.append(dict(case=name, ok=False, error="not run: out of time"))
            print("not run", name, flush=True)
            continue
        try:
            budgets = check(job, "cuda", backward, shares)
            bad = [b for b in budgets if not b.ok]
            record.append(dict(case=name, ok=not bad, budgets=[vars(b) for b in budgets]))
            shown = bad or [max(budgets, key=lambda b: b.error / max(b.allowed, 1e-30))]
            text = "; ".join(f"{b.name} {b.error:.1e}/{b.allowed:.1e} rel {b.relative:.0e}" for b in shown)
        except Exception as error:
            bad, text = True, repr(error)[-400:]
            record.append(dict(case=name, ok=False, error=repr(error)[-500:]))
        wrong += bool(bad)
        print("BAD" if bad else "ok ", name, text, flush=True)
    return wrong


def run_times(record, lengths, until: float):
    from relative_kernels import cudnn, graphed, steady

    table = []
    for N in lengths:
        if time.time() > until:
            print(f"not timed: {N}", flush=True)
            continue
        unit = max(1, 16384 // N) * 12 * N * N * 64 / 1e9
        items = {"forward": [], "backward": []}
        memory = {}
        base = cudnn(N)
        for name, run in zip(items, base, strict=True):
            items[name].append(("cudnn", run))
        jobs = [(case, new, "as committed") for case in CASES for new in (False, True)]
        jobs += [(case, True, variant) for case, variant in TRIED if N >= 2048]
        for case, new, variant in jobs:
            title = f"{case} {'registers' if new else 'others'}" + ("" if variant == "as committed" else f" {variant}")
            try:
                runs = timed(case, N, "cuda", new)
                with registers(new, **VARIANTS[variant]):
                    for name, run in zip(items, runs, strict=True):
                        if variant != "as committed" and name == "forward":
                            continue
                        run()
                        torch.cuda.synchronize()
                        torch.cuda.reset_peak_memory_stats()
                        before = torch.cuda.memory_allocated()
                        run()
                        torch.cuda.synchronize()
                        memory[title, name] = (torch.cuda.max_memory_allocated() - before) / 2**20
                        items[name].append((title, graphed(run)))
            except Exception as error:
                print(f"{title} N={N} failed: {type(error).__name__} {str(error)[-300:]}", flush=True)
        for name, factor in (("forward", 4), ("backward", 10)):
            medians, samples = steady(items[name], 3, 20)
            for title, ms in medians.items():
                row = dict(case=title, n=N, **{"pass": name}, ms=ms, tflops=factor * unit / ms,
                           ratio=medians["cudnn"] / ms, peak_mib=memory.get((title, name)), dtype="float16", heads=12,
                           head_dim=64, tokens=max(N, 16384), samples=samples[title])  # fmt: skip
                record.append(row)
                table.append(row)
        items = None
        torch.cuda.empty_cache()
    for name in ("forward", "backward"):
        print(f"\n{name}: ratio to cuDNN without a term (ms, peak MiB)", flush=True)
        for title in dict.fromkeys(r["case"] for r in table if r["pass"] == name):
            cells = [r for r in table if r["pass"] == name and r["case"] == title]
            text = "  ".join(f"{r['n']}: {r['ratio']:.2f} ({r['ms']:.3f}, {r['peak_mib'] or 0:.0f})" for r in cells)
            print(f"  {title:32s} {text}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="relative_linear.json")
    parser.add_argument("--only", default=",".join(GROUPS), help="of banded, txl, forward (checks) and times")
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--compile-seconds", type=float, default=60.0)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--only-compile", action="store_true", help="compile everything for sm_90 and stop (no GPU)")
    arguments = parser.parse_args()
    start = time.time()
    only = arguments.only.split(",")
    if unknown := set(only) - set(GROUPS):
        parser.error(f"--only has {sorted(unknown)}; expected some of {', '.join(GROUPS)}")
    lengths = [int(n) for n in arguments.lengths.split(",")] if "times" in only else []
    wanted = checks(only)
    jobs = [("check", one) for one in wanted]
    for N in sorted(lengths, reverse=True):
        jobs += [("time", c, N, new, "as committed") for c in CASES for new in (True, False)]
        jobs += [("time", case, N, True, variant) for case, variant in TRIED if N >= 2048]
    failed = precompile(jobs, arguments.compile_seconds)
    if arguments.only_compile:
        sys.exit(1 if failed else 0)
    import triton

    result = dict(gpu=torch.cuda.get_device_properties(0).name, torch=torch.__version__, triton=triton.__version__,
                  cuda=torch.version.cuda, time=time.strftime("%Y-%m-%d"), checks=[], timings=[])  # fmt: skip
    wrong = 1
    try:
        wrong = run_checks(result["checks"], wanted, start + 0.75 * arguments.seconds)
        run_times(result["timings"], lengths, start + arguments.seconds - 15.0)
        print(f"{len(wanted) - wrong} of {len(wanted)} checks within budget, {time.time() - start:.0f} s", flush=True)
    finally:
        Path(arguments.out).write_text(json.dumps(result))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
