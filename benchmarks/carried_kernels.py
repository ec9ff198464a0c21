"""Carried attention on a GPU: tests, how much traffic of packed tiles hides, blocks of four layers, and decoding.

    python benchmarks/carried_kernels.py --out DIR tests --select smoke
    python benchmarks/carried_kernels.py --out DIR overlap blocks decoding --table DIR/tiles.json

Each stage writes DIR/carried_<stage>.json with all samples. 20 query heads on 4 key heads, d = 128, bf16, one sequence.
Times are CUDA events around work that was enqueued behind a sleeping kernel, so that they hold no host time; the L2
cache is overwritten before every run; variants take turns in every round.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import carried_tests
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
    made_with,
    plain_block,
    tensors,
    with_cudnn,
)
from torch.nn.functional import scaled_dot_product_attention

from tilewise.carried import CarriedConfig, TileLayout, carried_decode
from tilewise.carried.config import Options
from tilewise.carried.shared_keys import fold_queries
from tilewise.carried.triton import launch as kernels
from tilewise.carried.triton import settings
from tilewise.carried.triton.settings import Shape

START = time.time()
POINTS = ((1, 8192), (1, 32768), (16, 8192))
"""Sequences and tokens of decoding."""

SHAPES = {"4096": (4096, None), "8192": (8192, None), "8192, window 1024": (8192, 1024)}


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
    return made_with("carried_kernels") | {"heads": [H, HK], "d": D}


def overlap(args) -> list[dict]:
    """One layer's forward with and without packed tiles read and written, and a copy of as many bytes."""
    records, clock = [], Clock()
    for T in (4096, 8192):
        q, k, v, _ = tensors(T, "cuda")
        config = config_of("mixed")
        layout = TileLayout(config, T, T, device="cuda")
        tiles = layout.layers[0]
        z = [layout.buffer(1, H, torch.float16, torch.device("cuda")).normal_() for _ in range(2)]
        options = Options(D**-0.5, 1, 0.0, 0.0, config.tile, True, layout.back, (True,), torch.float16)
        plain = options._replace(rounded=(False,))

        def layer(read, write, options=options, accumulate=False, q=q, k=k, v=v, tiles=tiles):
            x = [t.detach() for t in (q[0], k[0], v[0])]
            return lambda: kernels.forward(x[:1], x[1:2], x[2], [], [], tiles.bounds, tiles.rows,
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


def folded_queries(layers: list[tuple]) -> list[torch.Tensor]:
    """Q̃_i = Q_i + Q̃_{i−1} of every layer in the dtype of the queries, as layers that share their keys take them."""
    folded, made = None, []
    for q, *_ in layers:
        folded = fold_queries(q, folded)
        made.append(folded.to(q.dtype) if len(made) else q)
    return made


def shared_keys(layers: list[tuple], config: CarriedConfig) -> list[torch.Tensor]:
    """A step of layers that share the first one's keys and values, as CarriedLlama(keys="shared") decodes."""
    _, k, v = layers[0]
    folded = folded_queries(layers)
    return [carried_decode(q, k, v, None, 0, config.plain(i, D))[0] for i, q in enumerate(folded)]


def decoding(args) -> list[dict]:
    """A step of four layers, microseconds a layer: with a carried row of scores, without, and PyTorch's attention; with
    shared keys (of which later layers may find a short sequence's in the L2 cache), and their queries' fold alone."""
    records, clock = [], Clock()
    for B, T in POINTS:
        new = lambda heads, n, B=B: torch.randn(B, heads, n, D, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        layers = [(new(H, 1), new(HK, T), new(HK, T)) for _ in range(4)]
        config, alone = CarriedConfig(impl="triton"), CarriedConfig(layers=1, impl="triton")

        def carried(row_dtype, layers=layers, config=config):
            row = None
            for i, x in enumerate(layers):
                _, row = carried_decode(*x, row, i, config, row_dtype=row_dtype)

        def plain(layers=layers, alone=alone):
            return [carried_decode(*x, None, 0, alone) for x in layers]

        def pytorch(layers=layers):
            return [scaled_dot_product_attention(*x, enable_gqa=True) for x in layers]

        runs = {"fp32 row": lambda: carried(None), "fp16 row": lambda: carried(torch.float16), "no carry": plain,
                "PyTorch": pytorch, "shared keys": lambda layers=layers, config=config: shared_keys(layers, config),
                "fold alone": lambda layers=layers: folded_queries(layers)}  # fmt: skip
        samples = {name: [] for name in runs}
        with torch.no_grad():
            for r in range(args.rounds + 1):
                for name in list(runs)[:: 1 if r % 2 == 0 else -1]:
                    ms = clock(runs[name], sleep_ms=4.0)
                    samples[name] += [x * 1e3 / 4 for x in ms] if r else []
        us = {name: median(x) for name, x in samples.items()}
        # K and V read once; the floor of a layer.
        us["floor"] = 2 * B * HK * T * D * 2 / 4.3e12 * 1e6
        say(f"decoding {B} x {T}, us a layer:", {name: round(x, 1) for name, x in us.items()})
        records.append({"sequences": B, "tokens": T, "us": us, "samples": samples})
        release()
        if time.time() - START > args.until:
            break
    return records


def tests(args) -> list[dict]:
    """The tests on the GPU, chosen by `--select`; their kernels have been compiled."""
    return carried_tests.run(args.context, args.found, lambda: args.until - (time.time() - START), say)


STAGES = {"tests": tests, "overlap": overlap, "blocks": blocks, "decoding": decoding}


def jobs_of(args) -> list[Job]:
    """All blocks, with heads summed in registers and without: which of them run follows from length and table."""
    if "blocks" not in args.stages:
        return []
    plans = [plan for plan in ("none", *CARRIED) if plan not in args.without]
    windows = dict.fromkeys(SHAPES[label][1] for label in args.shapes)
    return [Job(plan, window=window, fill=fill) for window in windows for fill in (1e9, 0.0) for plan in plans]


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
    parser.add_argument("--table", type=Path, help="tiles.json as carried_tiles.py writes it")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES, help="of blocks")
    parser.add_argument("--select", default="", help="tests to run, as pytest's -k")
    parser.add_argument("--processes", type=int, help="that compile")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.table:
        settings.use(json.loads(args.table.read_text()))
    settings.WIDE.update(args.tiles)
    compiler = Compiler(args.processes)
    args.found = []
    if "tests" in args.stages:
        args.context = carried_tests.get_ready()
        args.found = compiler.pool.apply(carried_tests.collect, (args.select,))
    prepare(compiler, [*args.found, *jobs_of(args)], min(3600.0, 0.7 * args.until))
    compiler.close()
    wrong = 0
    for n, stage in enumerate(args.stages):
        if time.time() - START > args.until:
            say(f"time is up before {stage}")
            wrong += len(args.stages) - n
            break
        try:
            records = STAGES[stage](args)
        except Exception:
            wrong += 1
            say(f"{stage} failed:", traceback.format_exc()[-1500:])
            continue
        wrong += any(r.get("outcome", "passed") != "passed" for r in records)
        (args.out / f"carried_{stage}.json").write_text(
            json.dumps({"environment": environment(), "records": records}, indent=1)
        )
    sys.exit(bool(wrong))


def prepare(compiler: Compiler, jobs: list[Job], limit: float = 3600.0) -> None:
    """Compile what the jobs launch, and say what failed."""
    compiled = compiler(jobs, limit)
    took = [s for _, s, _ in compiled]
    say(f"{len(compiled)} kernels, {sum(took):.0f} s of compiling, {max(took, default=0):.0f} s the longest")
    for name, _, why in compiled:
        if why:
            say("  not compiled:", name, why)


if __name__ == "__main__":
    main()
