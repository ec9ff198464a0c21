"""Tuning of the depth passes on a GPU: tests of their kernels, then whole passes by kernel and with other tiles.

    python benchmarks/depth_steps.py --out DIR [--until SECONDS] [PART ...]

Parts: tests kernels full prefill decode training eager; all by default. The tests (`depth_tests.py`) and the compilers
of everything that is measured run first and side by side. `kernels`: Full's kernels alone, with several tiles, at
32,768 tokens. The others are the cells of the depth set: their time without the update's, the time of every kernel in
them, and variants of the tile table that take turns. `eager` also says where the host's time goes. Writes
DIR/depth_steps.json after every part; fails if a test failed or a part had no time left.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import io
import json
import multiprocessing
import pstats
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
from depth_record import where

from tilewise.bench.cells import Cell
from tilewise.bench.depth import DEPTH
from tilewise.bench.depth_systems import SYSTEMS, Built, streams
from tilewise.bench.depth_work import Inputs, Work, inputs, overhead
from tilewise.bench.timing import Plan, captured, compare

START = time.time()
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SELECT = "full_gpu or (streams_gpu and (dtype0 or graph or gradients))"
PARTS = ("kernels", "full", "prefill", "decode", "training", "eager")

# Tiles that take the place of the table's: function of tilewise.depth.triton.config ↦ what changes.
VARIANTS: dict[str, dict[str, dict[str, object]]] = {
    "prefill": {
        "first rows first": {"merge_order": {"DOWN": False}},
        "last rows first, streaming": {"merge_order": {"STREAM": True}},
    },
    "decode": {"narrow_queries": {"narrow_queries": False}},
    "training": {"merge backward, one program an SM": {"merge_bwd": {"programs": 132}}},
}
MANY = {
    "table": {},
    "narrow, 4 stages": {"BD": 64, "STAGES": 4},
    "4 stages": {"STAGES": 4},
    "8 warps": {"num_warps": 8},
    "wide, 8 warps": {"BD": 256, "num_warps": 8, "STAGES": 2},
}
READ = {f"{u} rows, {w} warps": {"UNROLL": u, "num_warps": w} for u, w in ((4, 8), (2, 4), (4, 4), (2, 8))}
MIX = {
    f"{a} ahead, {w} warps{f', {m} registers' if m else ''}": {"AHEAD": a, "num_warps": w, "maxnreg": m}
    for a, w, m in ((1, 8, 128), (2, 8, 128), (4, 8, None), (2, 8, None), (2, 16, 64))
}
SCORES = {
    "table": {},
    "8 warps": {"num_warps": 8},
    "one part": {"splits": 1},
    "two parts": {"splits": 2},
    "wide, 8 warps": {"BK": 64, "STAGES": 3, "num_warps": 8},
}


def say(*words) -> None:
    print(f"[{time.time() - START:.0f}s]", *words, flush=True)


@contextlib.contextmanager
def tiles(changes: dict[str, object]) -> Iterator[None]:
    """The tile table with these changes."""
    from tilewise.depth.triton import config, launch

    plans = (launch._merge_plan, launch._merge_bwd_plan, launch._merge_bwd_tile)
    kept = {name: getattr(config, name) for name in changes}
    for name, new in changes.items():
        own = kept[name]
        if isinstance(new, dict):
            changed = lambda *shape, own=own, new=new: (tile := own(*shape)) and {**tile, **new}  # noqa: E731
        else:
            changed = (lambda *shape, new=new: new) if callable(own) else new
        setattr(config, name, changed)
    for plan in plans:
        plan.cache_clear()
    try:
        yield
    finally:
        for name, own in kept.items():
            setattr(config, name, own)
        for plan in plans:
            plan.cache_clear()


def clock(run: Callable[[], object], repeats: int = 5) -> float:
    """Median milliseconds of a run."""
    samples = []
    for _ in range(repeats):
        if CUDA:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            run()
            samples.append((time.perf_counter() - began) * 1e3)
    return median(samples)


def by_kernel(run: Callable[[], object]) -> dict[str, dict]:
    """Milliseconds and launches of every kernel in a run."""
    if not CUDA:
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    rows = {e.key: {"ms": e.self_device_time_total / 1e3, "count": e.count} for e in profile.key_averages()}
    return dict(sorted(rows.items(), key=lambda row: -row[1]["ms"])[:14])


def cell_of(case: str, tokens: int | None = None) -> Cell:
    size = {name: values[0] for name, values in DEPTH.sizes(case, DEVICE).items()}
    size |= {} if tokens is None else {"tokens": tokens}
    return Cell("depth", case, "tilewise", size, dtype=DEPTH.dtype(DEVICE), passes=DEPTH.passes(case), device=DEVICE)


def pass_of(case: str, tokens: int | None = None, serving: bool = False, **plan) -> tuple[Work, Inputs, Built]:
    cell = cell_of(case, tokens)
    work, data = Work.of(cell), inputs(cell)
    return work, data, SYSTEMS["tilewise-serving"](work, data) if serving else streams(work, data, **plan)


def step_of(built: Built, data: Inputs) -> Callable[[], object]:
    return lambda: torch.autograd.grad(built.forward(), list(built.leaves.values()), data.dy)


def graph(run: Callable[[], object]) -> Callable[[], object]:
    if not CUDA:
        return run
    replay, why = captured(lambda: run)
    if why:
        raise RuntimeError(f"not captured: {why}")
    return replay


def as_the_set(runs: dict[str, Callable[[], object]], data: Inputs, work: Work) -> tuple[dict, float, dict]:
    """Milliseconds of runs and of the updates, captured, timed as the depth set does, and the samples by round.

    An event on an idle GPU would start the clock before a graph of hundreds of launches is enqueued.
    """
    updates = graph(overhead(data.x, work))
    found = {name: compare(run, updates, DEVICE, Plan()) for name, run in runs.items()}
    samples = {name: x.system for name, x in found.items()}
    return {name: x.ms for name, x in found.items()}, median(x.baseline_ms for x in found.values()), samples


def report(part: str, ms: dict[str, float], updates: float, kernels: dict, **more) -> dict:
    net = {name: value - updates for name, value in ms.items()}
    for name, value in net.items():
        say(f"{part:9s} {name:36s} {value:9.3f} ms net of {updates:.3f}")
    for name, row in kernels.items():
        say(f"{'':9s} {row['count']:5d} x {1e3 * row['ms'] / row['count']:8.1f} us = {row['ms']:8.3f} ms  {name[:70]}")
    return {"net_ms": net, "updates_ms": updates, "kernels": kernels, **more}


@torch.no_grad()
def full() -> dict:
    work, data, built = pass_of("full")
    built.forward()
    updates = clock(overhead(data.x, work), 3)
    peak = torch.cuda.max_memory_allocated() / 2**20 if CUDA else 0.0
    return report("full", {"table": clock(built.forward, 3)}, updates, by_kernel(built.forward), peak_mib=peak)


@torch.no_grad()
def prefill() -> dict:
    work, data, built = pass_of("prefill")
    serve = pass_of("prefill", serving=True)[2].forward
    runs, others = {"table": graph(built.forward)}, {}
    for name, changes in VARIANTS["prefill"].items():
        with tiles(changes):
            runs[name], others[name] = graph(built.forward), by_kernel(built.forward)
    runs |= {"serving contract": graph(serve), "table, again": graph(built.forward)}
    ms, updates, samples = as_the_set(runs, data, work)
    for name, rows in others.items():
        say(f"{name}: " + ", ".join(f"{k[:30]} {row['ms']:.2f} ms" for k, row in [*rows.items()][:3]))
    kernels = by_kernel(built.forward)
    return report("prefill", ms, updates, kernels, samples=samples, kernels_of_variants=others)


@torch.no_grad()
def decode() -> dict:
    runs, kernels = {}, {}
    plans = {
        "table": {},
        "phase 1 on a stream of its own": {"overlap": True},
        "one pass up to 4": {"one_pass": 4},
        "serving contract": {"serving": True},
    }
    for name, plan in plans.items():
        work, data, built = pass_of("decode", **plan)
        runs[name] = graph(built.forward)
        kernels = kernels or by_kernel(built.forward)
    for name, changes in VARIANTS["decode"].items():
        with tiles(changes):
            runs[name] = graph(pass_of("decode")[2].forward)
    runs["table, again"] = graph(pass_of("decode")[2].forward)
    ms, updates, samples = as_the_set(runs, data, work)
    return report("decode", ms, updates, kernels, samples=samples)


def training() -> dict:
    ms, peak = {}, 0.0
    work, data, built = pass_of("training")
    for name, changes in {"table": {}, **VARIANTS["training"]}.items():
        with tiles(changes):
            run = graph(step_of(built, data))
            ms[name] = clock(run, 7)
            del run
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step_of(built, data)()
        peak = torch.cuda.max_memory_allocated() / 2**20
    say(f"training  peak {peak:.0f} MiB, inputs included")
    kernels = by_kernel(step_of(built, data))
    return report("training", ms, clock(graph(overhead(data.x, work)), 7), kernels, peak_mib=peak)


def eager() -> dict:
    work, data, built = pass_of("training-eager")
    step = step_of(built, data)
    for _ in range(3):
        step()
    ms = {"step": clock(step, 9), "forward": clock(built.forward, 9)}
    profile = cProfile.Profile()
    for _ in range(3):
        profile.enable()
        step()
        profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(22)
    say("eager: host\n" + "\n".join(text.getvalue().splitlines()[-26:]))
    return report("eager", ms, clock(overhead(data.x, work), 5), {})


@torch.no_grad()
def kernels(tokens: int | None = None, only: str = "") -> dict:
    """Full's kernels with several tiles; GB/s of what they have to move. `only` those whose name begins so."""
    from tilewise.depth.triton import launch

    measure, T = tokens is None, tokens or 32768
    d, found = 7168, {}
    bank = torch.empty((123, T, d), device=DEVICE, dtype=torch.bfloat16).normal_()
    o1 = torch.empty((11, T, d), device=DEVICE, dtype=torch.bfloat16)
    s, lse = torch.randn(11, 129, T, device=DEVICE), torch.randn(11, T, device=DEVICE)
    q, w = torch.randn(128, d, device=DEVICE) * d**-0.5, torch.ones(d, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty(128, 1, T, device=DEVICE)
    vectors = [*bank.unbind(0)]
    update, slot = vectors[50], vectors[51]
    rows = [*bank[:9, :8192].unbind(0)]

    def go(name: str, moved: int, changes: dict, run: Callable[[], object], tokens: int = T) -> None:
        if not name.startswith(only):
            return
        with tiles(changes):
            try:
                run()
                if measure:
                    ms = clock(run, 3)
                    found[name] = {"ms": ms, "gb_s": moved * min(tokens, T) * d * 2 / ms / 1e6}
                    say(f"kernels   {name:44s} {ms:8.3f} ms {found[name]['gb_s']:7.0f} GB/s")
            except Exception as error:
                # Tiles that do not fit the machine are an answer.
                say(f"kernels   {name}: {type(error).__name__}: {str(error)[:120]}")

    for n in (23, 122):
        for name, new in MANY.items():
            go(f"weighted sums, n = {n}, {name}", n + 11, {"combine_many": new},
               lambda n=n: launch.combine(vectors[:n], s[:, :n], out=o1, lse=lse))  # fmt: skip
    for n in (5, 9):
        for name, new in READ.items():
            go(f"read, {n} sources, {name}", n + 4, {"read": new},
               lambda n=n: launch.read(o1[0], lse[0], vectors[:n], update, s[0], w, 1e-6, slot=slot))  # fmt: skip
    for name, new in READ.items():
        go(f"output read, {name}", 123, {"read": new},
           lambda: launch.read(None, None, vectors[:121], vectors[121], s[0], w, 1e-6))  # fmt: skip
    for n in (8,):
        for name, new in MIX.items():
            go(f"one pass, {n} sources, 8192 tokens, {name}", n + 4, {"mix": new},
               lambda n=n: launch.mix_fwd(rows[:n], rows[7], rows[8], q[0], w, 1e-6, 1e-6), 8192)  # fmt: skip
    for S in (128, 64, 16):
        for name, new in SCORES.items():
            go(f"scores, {S} queries, {name}", 1, {"score_tiles": new},
               lambda S=S: launch.scores(vectors[:1], q[:S], 1e-6, out=out[:S]))  # fmt: skip
    return found


def compile_one(part: str, variant: str) -> None:
    """A run at a length that has the measurement's tiles."""
    try:
        changes = VARIANTS.get(part, {}).get(variant, {})
        with tiles(changes):
            if part == "kernels":
                kernels(1040, variant)
            elif part in ("training", "eager"):
                _, data, built = pass_of("training", 1040)
                step_of(built, data)()
            else:
                plan = {"one pass": {"one_pass": 4}, "serving": {"serving": True}}.get(variant, {})
                with torch.no_grad():
                    pass_of(part, 128 if part == "decode" else 1040, **plan)[2].forward()
        torch.cuda.synchronize()
    except Exception:
        traceback.print_exc()
        raise


def compile_all(parts: list[str], until: float) -> None:
    spawn = multiprocessing.get_context("spawn")
    jobs = [(part, variant) for part in parts if part != "eager" for variant in ("", *VARIANTS.get(part, {}))]
    jobs += [("decode", "one pass"), ("decode", "serving")] if "decode" in parts else []
    jobs += [("prefill", "serving")] if "prefill" in parts else []
    if "kernels" in parts:
        jobs.remove(("kernels", ""))
        jobs += [("kernels", f"weighted sums, n = {n}") for n in (23, 122)]
        jobs += [
            ("kernels", name) for name in ("read", "output", "one pass", "scores, 128", "scores, 64", "scores, 16")
        ]
    processes = [spawn.Process(target=compile_one, args=job) for job in jobs]
    for process in processes:
        process.start()
    for job, process in zip(jobs, processes, strict=True):
        process.join(max(1.0, until - (time.time() - START)))
        if process.is_alive():
            say("not compiled in time:", *job)
            process.kill()
            process.join()
        elif process.exitcode:
            say("compiling failed:", *job)
    say(f"compiled, {len(jobs)} processes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], help=", ".join(("tests", *PARTS)))
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--until", type=float, default=110.0, help="seconds after which no further part begins")
    parser.add_argument("--select", default=SELECT, help="of the tests, as pytest's -k")
    args = parser.parse_args()
    parts = args.parts or ["tests", *PARTS]
    for name in parts:
        if name not in ("tests", *PARTS):
            parser.error(f"part: found {name!r}, expected one of tests, {', '.join(PARTS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    tests, failed = None, False
    if "tests" in parts:
        command = [sys.executable, str(Path(__file__).parent / "depth_tests.py"), "--out", str(args.out)]
        command += ["--processes", "8", "--select", args.select, "--until", str(0.7 * args.until)]
        tests = subprocess.Popen(command)
    measured = [part for part in PARTS if part in parts]
    if CUDA:
        compile_all(measured, 0.7 * args.until)
    if tests is not None:
        # Times are taken with the GPU alone.
        failed = tests.wait() != 0
        say("tests failed" if failed else "tests passed")
    made = where("cuda" if CUDA else "cpu", "steps", parts=parts)
    result: dict = {**made, "tests": not failed, "parts": {}}
    run = {"kernels": kernels, "full": full, "prefill": prefill, "decode": decode, "training": training, "eager": eager}
    for part in measured:
        if time.time() - START > args.until or (part == "kernels" and not CUDA):
            say("no time left for" if CUDA else "without a GPU there is no", part)
            failed = True
            continue
        try:
            result["parts"][part] = run[part]()
        except Exception:
            failed = True
            say(part, traceback.format_exc()[-1500:])
        (args.out / "depth_steps.json").write_text(json.dumps(result, indent=1) + "\n")
        if CUDA:
            torch.cuda.empty_cache()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
