"""Compiling ahead what the relative benchmarks launch: by many processes without a GPU context, each kernel once."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from tilewise.bench.ahead import compile_for, make_ready

_claims: list[Path] = []


def warm(kernel, grid, *args, **meta) -> None:
    """Make a launch ready, unless another process of the pool has taken it."""
    binder = kernel.device_caches[0][-1]
    key = f"{kernel.__module__}.{kernel.__name__} {binder(*args, debug=False, **meta)[1:]}"
    if _claims:
        try:
            (_claims[-1] / hashlib.sha256(key.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return
    make_ready(kernel, grid, *args, **meta)


def _prepare(claims: Path | None) -> None:
    """Make this process one that compiles for Hopper and starts nothing."""
    from tilewise.triton.launch import launcher

    compile_for(90)
    launcher.append(warm)
    torch.set_num_threads(1)
    if claims is not None:
        _claims.append(claims)


def perform(job) -> None:
    """Everything that a job will launch, on meta tensors: ("check", index), ("time", case, N), ("ablation", …), …"""
    from relative_cases import CHECKS, EXTRA, check_one, extra_call, passes_of, timed_call

    kind, *rest = job
    runs = ()
    if kind == "check":
        check_one(CHECKS[rest[0]], "meta")
    elif kind == "extra":
        runs = passes_of(*extra_call(*EXTRA[rest[0]], "meta"))
    elif kind == "ablation":
        from relative_ablations import ablated

        name, case, N = rest
        with ablated(name) as options:
            for run in passes_of(*timed_call(case, N, "meta", **options)):
                run()
    elif kind == "scaling":
        runs = passes_of(*timed_call(*rest, "meta", tokens=rest[1]))
    elif kind == "traffic":
        case, N, d = rest
        runs = passes_of(*timed_call(case, N, "meta", d=d))
    elif kind == "memcheck":
        from relative_memcheck import run_one

        run_one(*rest, "meta")
    elif kind == "biases":
        from relative_biases import perform as of_biases

        of_biases(*rest)
    elif kind == "scalars":
        from relative_scalars import backward_of

        backward_of(*rest, "meta")()
    elif kind == "specialised":
        from relative_specialised import perform as of_specialised

        of_specialised(*rest)
    elif kind == "wide":
        from relative_wide import perform as of_width

        of_width(*rest)
    elif kind == "linear":
        from relative_linear import perform as of_linear

        of_linear(*rest)
    elif kind == "numerics":
        from relative_numerics import compile_ours

        compile_ours(*rest)
    elif kind == "tune":
        from relative_tiles import replaced, run_variant

        what, case, shape, N = rest
        with replaced(what, shape):
            run_variant(what, case, N, "meta")()
    else:
        runs = passes_of(*timed_call(*rest, "meta"))
    for run in runs:
        run()


def compile_one(job) -> tuple:
    """(job, seconds, what went wrong)."""
    start = time.time()
    try:
        perform(job)
    except Exception as error:
        return job, time.time() - start, f"{type(error).__name__}: {str(error)[-400:]}"
    return job, time.time() - start, None


def precompile(jobs, seconds: float) -> int:
    """Compile what the jobs launch, as far as `seconds` go; how many jobs failed or had no time."""
    start, done, failed = time.time(), 0, 0
    with tempfile.TemporaryDirectory() as claims:
        context = multiprocessing.get_context("spawn")
        with context.Pool(max(1, min(16, os.cpu_count() or 1, len(jobs))), _prepare, (Path(claims),)) as pool:
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
        kernels = len(os.listdir(claims))
    took = time.time() - start
    print(f"compiled {kernels} kernels of {done} of {len(jobs)} jobs in {took:.0f} s", flush=True)
    return failed + len(jobs) - done
