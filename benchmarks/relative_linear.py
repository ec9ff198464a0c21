"""The Hopper kernels that skew in registers: checks against the fp64 oracle, then times beside the others and cuDNN.

    python benchmarks/relative_linear.py --out results.json

Checks (config.SKEW_IN_REGISTERS on; the kernels that ran are looked at, so a silent fallback is a failure): O and lse
of DeBERTa and single OnQuery terms, O, lse and all gradients of Transformer-XL, at lengths of at least four times the
band and lengths that no tile divides, causal, window, lengths, packed, holes, grouped heads, Tq ≠ Tk, bf16, a backward
in several shares; each twice, compared bit for bit. Times: CUDA graphs, L2 flushed, rounds interleaved with the other
kernels and with cuDNN's attention without any term. The whole run stops itself after --seconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from relative_cases import BRAIN, HALF, label, passes_of, sizes, timed_call

LENGTHS = (8192, 2048, 512)
FORWARD = [
    ("deberta", "none", HALF, sizes(2304)),
    ("deberta", "none", BRAIN, sizes(2304)),
    ("deberta", "none", HALF, sizes(2100, Hk=2)),
    ("deberta", "none", HALF, sizes(512)),
    ("deberta", "none", HALF, sizes(700, 2300)),
    ("deberta", "none", HALF, sizes(2300, 700, offset=100)),
    *(("deberta", mask, HALF, sizes(2304)) for mask in ("causal", "window", "lengths", "packed")),
    ("deberta", "none", HALF, sizes(2304, d=128)),
    ("wav2vec2_bert", "none", HALF, sizes(1100)),
    ("wav2vec2_bert", "causal", BRAIN, sizes(1100)),
    ("wav2vec2_bert", "holes", HALF, sizes(700, 1500)),
]
BOTH = [
    ("txl", "none", HALF, sizes(1024)),
    ("txl", "none", HALF, sizes(2100)),
    ("txl", "none", BRAIN, sizes(1100)),
    ("txl", "lengths", BRAIN, sizes(1100)),
    ("txl", "causal", HALF, sizes(1100)),
    ("txl", "window", HALF, sizes(1100)),
    ("txl", "packed", HALF, sizes(1100)),
    ("txl", "holes", HALF, sizes(1100, Hk=2)),
    ("txl", "none", HALF, sizes(1500, 700, offset=100)),
    ("txl", "none", HALF, sizes(700, 1500)),
]
"""The second is made again with dG in shares of 40 query blocks."""
VARIANTS = {
    "as committed": {},
    "registers free": {"REGISTERS": None},
    "3 stages": {"STAGES": 3},
    "3 stages, registers free": {"REGISTERS": None, "STAGES": 3},
    "1 GiB of dG": {"BUDGET": 1 << 30},
}
TRIED = [
    ("deberta", "registers free"),
    ("deberta", "3 stages, registers free"),
    ("txl", "3 stages"),
    ("txl", "1 GiB of dG"),
]
"""Variants beside the committed one."""
BACKWARD = {"attend_band", "key_pass", "query_pass", "collect_tiles", "spread"}


@contextmanager
def registers(on: bool, **variant):
    """Inside, calls take the kernels of this script (or never do), with a variant of their constants."""
    from tilewise.triton import band, config, linear_backward

    changes = {(config, "SKEW_IN_REGISTERS"): on}
    changes |= {(linear_backward if name == "BUDGET" else band, name): value for name, value in variant.items()}
    before = {(module, name): getattr(module, name) for module, name in changes}
    for (module, name), value in changes.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


@contextmanager
def recorded():
    """The names of the kernels that are launched inside."""
    from tilewise.triton.launch import launcher

    names, below = set(), launcher[-1]

    def note(kernel, grid, *args, **meta):
        names.add(kernel.__name__)
        below(kernel, grid, *args, **meta)

    launcher.append(note)
    try:
        yield names
    finally:
        launcher.pop()


def check(job, device, backward: bool, shares: bool = False):
    """Error budgets of a check; on the meta device, only its launches."""
    from relative_checks import call_of, dense, run, verdicts

    from tilewise import triton
    from tilewise.testing import error_budget
    from tilewise.triton import linear_backward

    case, mask, dtype, s = job
    call = call_of(case, s, mask, dtype, device)
    shape = (s.B, s.H, s.Tq)
    new = lambda: (torch.full_like(call.q, float("nan")), torch.full(shape, float("nan"), device=device))  # noqa: E731
    do = torch.randn(*shape, s.d_v, device=device).to(dtype)
    budget = linear_backward.BUDGET
    if shares:
        linear_backward.BUDGET = 40 * 64 * 64 * (-(-s.Tk // 64) + 1) * 2
    try:
        with registers(True), recorded() as names:
            if device == "meta":
                o, lse = new()
                run(call, do, torch.empty(shape, device=device)) if backward else triton.forward(call, o, lse)
                return []
            if backward:
                budgets = verdicts(call)
                results = [run(call, do, None) for _ in range(2)]
                results = [(o, lse, *grads) for o, lse, grads in results]
            else:
                results = [new(), new()]
                for o, lse in results:
                    triton.forward(call, o, lse)
    finally:
        linear_backward.BUDGET = budget
    expected = BACKWARD if backward else {"attend_band"}
    assert expected <= names, f"other kernels ran: {sorted(names)}"
    for one, two in zip(*results, strict=True):
        assert torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0)), "two runs differ"
    if not backward:
        zeros = torch.zeros(shape, device=device)
        exact_o, exact_lse, _ = dense(call, do, zeros, torch.float64)
        low_o, low_lse, _ = dense(call, do, zeros, dtype)
        (o, lse), seen = results[0], torch.isfinite(exact_lse)
        assert torch.equal(torch.isfinite(lse), seen), "lse is infinite in the wrong places"
        flat = lambda x: x.masked_fill(~seen, 0.0)  # noqa: E731
        budgets = [
            error_budget("o", o, low_o, exact_o),
            error_budget("lse", flat(lse).to(dtype), flat(low_lse).to(dtype), flat(exact_lse)),
        ]
    return budgets


def checks():
    """(job, backward, shares) of every check."""
    return [(job, False, False) for job in FORWARD] + [(job, True, False) for job in BOTH] + [(BOTH[1], True, True)]


def shown(case: str, variant: str, direction: str) -> bool:
    """Whether a variant of a case differs in this direction from the committed one, and has it."""
    if direction == "backward":
        return case == "txl" and variant in ("as committed", "1 GiB of dG")
    return variant != "1 GiB of dG"


def timed(case: str, N: int, device: str, new: bool):
    """(forward, backward) closures; nothing is kept between them, so that the forward is what inference runs."""
    options = {} if new or case == "txl" else {"projections": "recompute"}
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
            check(*(checks()[job[1]][:1]), "meta", *checks()[job[1]][1:])
        else:
            _, case, N, new, variant = job
            forward, backward = timed(case, N, "meta", new)
            with registers(new, **VARIANTS[variant]):
                forward()
                if case == "txl" and variant == "as committed":
                    backward()
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


def run_checks(record, until: float) -> int:
    wrong = 0
    for job, backward, shares in checks():
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
        jobs = [(case, new, "as committed") for case in ("deberta", "shaw", "txl") for new in (False, True)]
        jobs += [(case, True, variant) for case, variant in TRIED]
        for case, new, variant in jobs:
            title = f"{case} {'registers' if new else 'others'}" + ("" if variant == "as committed" else f" {variant}")
            try:
                runs = timed(case, N, "cuda", new)
                with registers(new, **VARIANTS[variant]):
                    for name, run in zip(items, runs, strict=True):
                        if not shown(case, variant, name):
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
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--compile-seconds", type=float, default=70.0)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--only-compile", action="store_true", help="compile everything for sm_90 and stop (no GPU)")
    arguments = parser.parse_args()
    start = time.time()
    lengths = [int(n) for n in arguments.lengths.split(",")]
    jobs = [("check", n) for n in range(len(checks()))]
    for N in sorted(lengths, reverse=True):
        jobs += [("time", c, N, new, "as committed") for c in ("deberta", "shaw", "txl") for new in (True, False)]
        jobs += [("time", case, N, True, variant) for case, variant in TRIED]
    failed = precompile(jobs, arguments.compile_seconds)
    if arguments.only_compile:
        sys.exit(1 if failed else 0)
    import triton

    result = dict(gpu=torch.cuda.get_device_properties(0).name, torch=torch.__version__, triton=triton.__version__,
                  cuda=torch.version.cuda, time=time.strftime("%Y-%m-%d"), checks=[], timings=[])  # fmt: skip
    wrong = 1
    try:
        wrong = run_checks(result["checks"], start + 0.7 * arguments.seconds)
        run_times(result["timings"], lengths, start + arguments.seconds - 15.0)
        print(
            f"{len(checks()) - wrong} of {len(checks())} checks within budget, {time.time() - start:.0f} s", flush=True
        )
    finally:
        Path(arguments.out).write_text(json.dumps(result))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
