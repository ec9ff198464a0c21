"""Carried attention on a GPU: tests, how much traffic of packed tiles hides, tiles, and blocks of four layers.

    python benchmarks/carried_kernels.py --out DIR tests overlap sweep blocks

Each stage writes DIR/carried_<stage>.json with all samples. 20 query heads on 4 key heads, d = 128, bf16, one sequence.
Times are CUDA events around work that was enqueued behind a sleeping kernel, so that they hold no host time; the L2
cache is overwritten before every run; variants take turns in every round.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import triton
from carried_blocks import (
    CARRIED,
    HK,
    Compiler,
    D,
    H,
    Job,
    carried_block,
    config_of,
    plain_block,
    tensors,
    tiles_of,
    with_cudnn,
)

from tilewise.carried import TileLayout
from tilewise.carried.config import Options
from tilewise.carried.triton import launch as kernels
from tilewise.carried.triton import settings
from tilewise.carried.triton.settings import Shape
from tilewise.triton.launch import launcher

ROOT = Path(__file__).resolve().parent.parent
START = time.time()
SHAPES = {"4096": (4096, None), "8192": (8192, None), "8192, window 1024": (8192, 1024)}
FORWARD = (Shape(128, 64, 8, 3), Shape(128, 128, 8, 2), Shape(64, 64, 4, 2), Shape(64, 128, 4, 2))
BACKWARD = (Shape(128, 64, 8, 2), Shape(64, 64, 8, 2), Shape(128, 64, 8, 1), Shape(64, 64, 4, 2))
SUMMED = (Shape(64, 64, 8, 2), Shape(128, 64, 8, 1), Shape(64, 64, 8, 1), Shape(64, 64, 4, 2))
PRODUCT = (Shape(128, 64, 8, 3), Shape(128, 128, 8, 3), Shape(64, 128, 4, 3), Shape(128, 64, 4, 3))
AGAIN = (Shape(64, 64, 4, 2), Shape(128, 64, 8, 2), Shape(64, 128, 4, 1), Shape(128, 128, 8, 1))
SWEEP = [
    tuple(zip(("forward", "backward", "backward, summed", "product", "again"), shapes, strict=True))
    for shapes in zip(FORWARD, BACKWARD, SUMMED, PRODUCT, AGAIN, strict=True)
]


def say(*words) -> None:
    print(f"[{time.time() - START:.0f}s]", *words, flush=True)


class Clock:
    """Milliseconds between marks of work that the host enqueues while the GPU sleeps."""

    def __init__(self) -> None:
        self.buffer = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
        self.host_ms = 0.0

    def __call__(self, *parts: Callable[[], object], sleep_ms: float = 12.0) -> list[float]:
        """Time of every part, run in order."""
        self.buffer.zero_()
        torch.cuda._sleep(int(sleep_ms * 1.98e6))
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
        start = time.perf_counter()
        marks[0].record()
        for part, mark in zip(parts, marks[1:], strict=True):
            part()
            mark.record()
        self.host_ms = (time.perf_counter() - start) * 1e3
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(marks)]


def release() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def both_ways(run: Callable[[], list], leaves: list, G: list) -> Callable[[], object]:
    return lambda: torch.autograd.grad(run(), leaves, G)


def environment() -> dict:
    name = torch.cuda.get_device_name()
    return {"gpu": name, "torch": torch.__version__, "triton": triton.__version__, "heads": [H, HK], "d": D,
            "cudnn": torch.backends.cudnn.version(), "cuda": torch.version.cuda}  # fmt: skip


def overlap(args) -> list[dict]:
    """One layer's forward with and without packed tiles read and written, and a copy of as many bytes."""
    records, clock = [], Clock()
    for T in (4096, 8192):
        q, k, v, _ = tensors(T, "cuda")
        config = config_of("mixed")
        layout = TileLayout(config, T, T, device="cuda")
        tiles = layout.layers[0]
        z = [layout.buffer(1, H, torch.float16, torch.device("cuda")).normal_() for _ in range(2)]
        options = Options(D**-0.5, 1, 0.0, 0.0, config.tile, True, layout.back, [True], torch.float16)
        plain = options._replace(rounded=[False])

        def layer(read, write, options=options, accumulate=False, q=q, k=k, v=v, tiles=tiles):
            x = [t.detach() for t in (q[0], k[0], v[0])]
            return lambda: kernels.forward(x[:1], x[1:2], x[2], [], [], [tiles.lo], [tiles.hi], tiles.rows,
                                           read, write, accumulate, None, None, options)  # fmt: skip

        runs = {
            "plain": layer(None, None, plain),
            "read": layer(z[0], None, plain),
            "write": layer(None, z[1]),
            "read + write": layer(z[0], z[1]),
            "read + write in place": layer(None, z[1], accumulate=True),
            "copy": lambda z=z: z[1].copy_(z[0]),
        }
        for run in runs.values():
            run()
        samples = {name: [] for name in runs}
        for r in range(args.rounds):
            for name in list(runs)[:: 1 if r % 2 == 0 else -1]:
                samples[name] += clock(runs[name], sleep_ms=1.0)
        ms = {name: median(x) for name, x in samples.items()}
        for name in ("read + write", "read + write in place"):
            # t = max(C, M) + (1 − ω) min(C, M): C the layer without tiles, M a copy of the same bytes.
            C, M = ms["plain"], ms["copy"]
            ms[f"hidden share, {name}"] = 1 - (ms[name] - max(C, M)) / min(C, M)
        say(f"overlap {T}:", {n: round(x, 3) for n, x in ms.items()})
        records.append({"tokens": T, "mib_each_way": z[0].nbytes / 2**20, "ms": ms, "samples": samples})
        del q, k, v, z, runs
        release()
    return records


def sweep(args) -> list[dict]:
    """Every kernel of a block with each column of the tables above, timed one by one within forward and backward."""
    records, clock = [], Clock()
    for T in (8192,):
        q, k, v, G = tensors(T, "cuda")
        for plan in ("none", "mixed"):
            layout = TileLayout(config_of(plan), T, T, device="cuda")
            for n, tiles in enumerate(SWEEP[: args.columns]):
                job = Job(plan, tiles=tiles)
                found: list[list] = []
                failed: dict[str, str] = {}

                def timed(kernel, grid, *a, found=found, failed=failed, **meta):
                    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                    marks[0].record()
                    try:
                        kernel[grid](*a, **meta)
                    except triton.runtime.errors.OutOfResources as error:
                        failed[f"{kernel.fn.__name__} {len(found)}"] = str(error)[:200]
                    marks[1].record()
                    shape = [meta.get(x) for x in ("BM", "BN", "num_warps", "STAGES")]
                    found.append([kernel.fn.__name__, meta.get("COUNT"), shape, marks])

                launcher.append(timed)
                try:
                    with tiles_of(job):
                        step = both_ways(carried_block(config_of(plan), q, k, v, layout), [*q, *k, *v], G)
                        passes = []
                        for _ in range(args.rounds + 1):
                            found.clear()
                            clock(step, sleep_ms=args.sleep)
                            passes.append([a.elapsed_time(b) for *_, (a, b) in found])
                finally:
                    launcher.pop()
                times = [list(x) for x in zip(*passes[1:], strict=True)]
                rows = [
                    {"launch": i, "kernel": name, "layers": layers, "shape": shape, "ms": median(t), "samples": t}
                    for i, ((name, layers, shape, _), t) in enumerate(zip(found, times, strict=True))
                ]
                records.append({"tokens": T, "plan": plan, "column": n, "failed": failed, "kernels": rows})
                say(f"sweep {T} {plan} {n}:", failed or "", " ".join(
                    f"{r['kernel'].split('_')[0]}{r['shape'][:3]}={r['ms']:.3f}"
                    for r in rows if not r["kernel"].startswith("row")
                ))  # fmt: skip
                if time.time() - START > args.until:
                    say("time is up")
                    return records
        release()
    return records


def blocks(args) -> list[dict]:
    """Forward and backward of four layers: every plan, layers without a carry, and PyTorch's kernels."""
    records, clock = [], Clock()
    for label in args.shapes:
        T, window = SHAPES[label]
        q, k, v, G = tensors(T, "cuda")
        leaves = [*q, *k, *v]
        layout = TileLayout(config_of("mixed", window), T, T, device="cuda")
        runs = {plan: carried_block(config_of(plan, window), q, k, v, layout) for plan in ("none", *CARRIED)}
        if window is None:
            runs["mixed, cuDNN first"] = with_cudnn(runs["mixed"])
        runs |= {name: plain_block(name, q, k, v, window) for name in (("flash",) if window else ("cudnn", "flash"))}
        if args.without:
            runs = {name: run for name, run in runs.items() if name not in args.without}
        samples = {name: {"forward": [], "backward": [], "host_ms": []} for name in runs}
        peak, failed = {}, {}

        def once(name, runs=runs, leaves=leaves, G=G):
            kept = []
            forward = lambda: kept.append(runs[name]())  # noqa: E731
            return clock(forward, lambda: torch.autograd.grad(kept.pop(), leaves, G), sleep_ms=args.sleep)

        for name in list(runs):
            try:
                once(name)
                release()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                outputs = runs[name]()
                saved = torch.cuda.memory_allocated() - before
                torch.autograd.grad(outputs, leaves, G)
                torch.cuda.synchronize()
                peak[name] = {"saved_mib": saved / 2**20,
                              "peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}  # fmt: skip
                del outputs
            except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
                failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
                del runs[name], samples[name]
        for name in runs:  # the allocator takes its blocks
            once(name)
        for r in range(args.rounds):
            for name in list(runs)[:: 1 if r % 2 == 0 else -1]:
                forward, backward = once(name)
                for key, value in (("forward", forward), ("backward", backward), ("host_ms", clock.host_ms)):
                    samples[name][key].append(value)
            if time.time() - START > args.until:
                break
        say(f"blocks {label}: forward, backward, host ms; saved, peak MiB", failed or "")
        for name, x in samples.items():
            ms = [f"{median(x[key]):.3f}" for key in ("forward", "backward", "host_ms")]
            say(f"   {name:18s}", *ms, *(f"{m:.0f}" for m in peak[name].values()))
        records.append({"shape": label, "tokens": T, "window": window, "samples": samples, "memory": peak,
                        "failed": failed})  # fmt: skip
        del q, k, v, G, leaves, runs, once
        release()
        if time.time() - START > args.until:
            say("time is up")
            break
    return records


def tests(args) -> list[dict]:
    """The tests on the GPU, chosen by `--select`."""
    import pytest

    class Outcomes:
        def __init__(self):
            self.rows = []

        def pytest_runtest_logreport(self, report):
            if report.when == "call" or report.outcome != "passed":
                why = str(report.longrepr)[-600:] if report.failed else ""
                self.rows.append({"test": report.nodeid.split("::")[-1], "when": report.when,
                                  "outcome": report.outcome, "seconds": report.duration, "why": why})  # fmt: skip

    outcomes = Outcomes()
    chosen = ["-k", args.select] if args.select else []
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "--no-header", f"--maxfail={args.maxfail}"]
    pytest.main([str(ROOT / "tests/carried/test_kernels_gpu.py"), *options, *chosen], plugins=[outcomes])
    say("tests:", sum(r["outcome"] == "passed" for r in outcomes.rows), "of", len(outcomes.rows), "passed")
    release()
    return outcomes.rows


STAGES = {"tests": tests, "overlap": overlap, "sweep": sweep, "blocks": blocks}


def jobs_of(args) -> list[Job]:
    plans = [p for p in ("none", *CARRIED) if p not in args.without]
    jobs = [Job(plan) for plan in plans] if {"blocks", "tests"} & set(args.stages) else []
    if "sweep" in args.stages:
        jobs += [Job(plan, tiles=tiles) for tiles in SWEEP[: args.columns] for plan in ("mixed", "none")]
    return jobs


def best(records: list[dict]) -> dict[str, Shape]:
    """For each kernel the tiles whose launches took least in sum."""
    kinds = {"attend": "forward", "keys_gradient": "backward", "queries_from_e": "product", "queries_again": "again"}
    sums: dict[str, dict[int, float]] = {kind: {} for kind in settings.WIDE}
    for record in records:
        if record["failed"]:
            continue
        for row in record["kernels"]:
            kind = kinds.get(row["kernel"])
            if kind == "backward" and row["layers"] > 1:
                kind = "backward, summed"
            if kind:
                column = sums[kind]
                column[record["column"]] = column.get(record["column"], 0.0) + row["ms"]
    return {kind: dict(SWEEP[min(column, key=column.get)])[kind] for kind, column in sums.items() if column}


def shape_of(text: str) -> tuple[str, Shape]:
    """``backward=128,64,8,2`` as an entry of the tile table."""
    kind, numbers = text.split("=")
    return kind, Shape(*map(int, numbers.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=[*STAGES])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sleep", type=float, default=20.0, help="ms that the GPU sleeps while the host enqueues")
    parser.add_argument("--until", type=float, default=1e9, help="seconds after which no further measurement begins")
    parser.add_argument("--without", nargs="*", default=[], help="variants to leave out")
    parser.add_argument("--tiles", nargs="*", default=[], type=shape_of, help="such as backward=128,64,8,2")
    parser.add_argument("--columns", type=int, default=len(SWEEP), help="of the tables of tiles, for sweep")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES, help="of blocks")
    parser.add_argument("--select", default="", help="tests to run, as pytest's -k")
    parser.add_argument("--maxfail", type=int, default=8)
    parser.add_argument("--processes", type=int)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    settings.WIDE.update(args.tiles)
    compiler = Compiler(args.processes)
    prepare(compiler, jobs_of(args))
    for stage in args.stages:
        if time.time() - START > args.until:
            say(f"time is up before {stage}")
            break
        records = []
        try:
            records = STAGES[stage](args)
        except Exception:
            say(f"{stage} failed:", traceback.format_exc()[-1500:])
        (args.out / f"carried_{stage}.json").write_text(
            json.dumps({"environment": environment(), "records": records}, indent=1)
        )
        if stage == "sweep" and records:
            picked = best(records)
            say("tiles:", " ".join(f"'{kind}={','.join(map(str, shape))}'" for kind, shape in picked.items()))
            settings.WIDE.update(picked)
            if "blocks" in args.stages:
                plans = [p for p in ("none", *CARRIED) if p not in args.without]
                prepare(compiler, [Job(plan, tiles=tuple(picked.items())) for plan in plans])


def prepare(compiler: Compiler, jobs: list[Job]) -> None:
    compiled = compiler(jobs)
    say(f"{len(compiled)} kernels, {sum(s for _, s, _ in compiled):.0f} s of compiling")
    for name, _, why in compiled:
        if why:
            say("  not compiled:", name, why)


if __name__ == "__main__":
    main()
