"""Which tiles each kernel of carried attention should use, timed on a GPU.

    python benchmarks/carried_tiles.py --out DIR --until 110

Runs blocks of four layers (20 query heads on 4 key heads, d = 128, bf16) with every column of the candidates below,
times each launch, and takes for each kernel the tiles whose launches took least in sum. Then it compares dK and dV
summed over query heads in registers and afterwards. Writes DIR/tiles.json, in the form of
src/tilewise/carried/triton/tiles.json, and all samples as DIR/carried_tiles.json. Kernels are compiled by processes
side by side; columns that have not run when time is up take no part.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
import triton
from carried_blocks import CARRIED, Compiler, Job, carried_block, config_of, tensors, tiles_of
from carried_kernels import Clock, both_ways, environment, prepare, release, say
from triton.compiler.errors import CompilationError
from triton.runtime import errors

from tilewise.carried import TileLayout
from tilewise.carried.triton import settings
from tilewise.carried.triton.settings import Shape
from tilewise.triton.launch import launcher

START = time.time()
CANDIDATES = {
    "forward": [(128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 8, 4), (64, 128, 4, 2), (128, 32, 8, 4)],
    "forward, carried": [(128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (128, 64, 8, 2), (64, 128, 4, 1)],
    "forward, summed": [(128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 4, 2), (64, 64, 4, 1)],
    "backward": [(64, 128, 8, 2), (64, 64, 4, 2), (32, 128, 8, 3), (128, 64, 8, 2), (64, 128, 8, 1), (32, 64, 4, 3)],
    "backward, carried": [(64, 128, 8, 2), (64, 64, 4, 2), (32, 128, 8, 3), (128, 64, 8, 2), (64, 128, 8, 1)],
    "backward, summed": [(32, 128, 8, 2), (64, 64, 8, 2), (32, 64, 4, 2), (64, 64, 4, 1), (32, 64, 8, 2)],
    "product": [(128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 4), (128, 64, 4, 3), (64, 128, 4, 3), (128, 64, 8, 4)],
    "product of keys": [(64, 128, 8, 3), (32, 128, 8, 4), (64, 64, 4, 4), (64, 128, 4, 3), (32, 128, 4, 4)],
}
"""Chosen by what the compiler reports for sm_90 (docs/carried.md); the first column is the default."""

COLUMNS = max(map(len, CANDIDATES.values()))
PLANS = ("none", "mixed", "recompute")
NEVER, ALWAYS = 1e9, 0.0
NAMES = {"queries_from_e": "product", "keys_from_e": "product of keys"}


def column(n: int) -> dict[str, Shape]:
    """The n-th candidate of every kernel, the first where there are fewer."""
    return {kind: Shape(*(shapes[n] if n < len(shapes) else shapes[0])) for kind, shapes in CANDIDATES.items()}


def kind_of(name: str, meta: dict) -> str | None:
    """The kernel's name in the tables, from its launch."""
    if name == "attend":
        return settings.kind_of("forward", meta["COUNT"], meta["ENTERS"] or meta["WRITES"])
    if name == "keys_gradient":
        count = 1 if meta["OWN"] else meta["COUNT"]
        return settings.kind_of("backward", count, meta["OWN"] or meta["ENTERS"] or meta["READS_E"])
    return NAMES.get(name)


def job_of(plan: str, table: dict[str, Shape], fill: float, window: int | None = None) -> Job:
    return Job(plan, tiles=tuple(table.items()), fill=fill, window=window)


class Timer:
    """Milliseconds of every launch of a step, by kernel."""

    def __init__(self, window: int | None = None) -> None:
        self.clock, self.window = Clock(), window

    def __call__(self, plan: str, T: int, table: dict[str, Shape], fill: float, rounds: int, sleep: float) -> dict:
        found: list[tuple] = []
        failed: dict[str, str] = {}

        def timed(kernel, grid, *args, **meta):
            name = kernel.fn.__name__
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            try:
                kernel[grid](*args, **meta)
            except (errors.OutOfResources, errors.PTXASError, CompilationError) as error:
                failed[str(kind_of(name, meta))] = str(error)[:200]
            marks[1].record()
            found.append((kind_of(name, meta) or name, marks))

        q, k, v, G = tensors(T, "cuda")
        launcher.append(timed)
        try:
            with tiles_of(job_of(plan, table, fill)):
                config = config_of(plan, self.window)
                layout = TileLayout(config, T, T, device="cuda")
                step = both_ways(carried_block(config, q, k, v, layout), [*q, *k, *v], G)
                samples: dict[str, list[float]] = {}
                for n in range(rounds + 1):
                    found.clear()
                    self.clock(step, sleep_ms=sleep)
                    sums: dict[str, float] = {}
                    for kind, (a, b) in found:
                        sums[kind] = sums.get(kind, 0.0) + a.elapsed_time(b)
                    if n:
                        for kind, ms in sums.items():
                            samples.setdefault(kind, []).append(ms)
        finally:
            launcher.pop()
        return {"plan": plan, "tokens": T, "fill": fill, "failed": failed, "samples": samples,
                "ms": {kind: median(x) for kind, x in samples.items()}}  # fmt: skip


def best(records: list[dict]) -> dict[str, Shape]:
    """For each kernel the tiles whose launches took least in sum over all plans and lengths that every column ran."""
    sums: dict[str, dict[tuple, list[float]]] = {}
    cases = [{(r["plan"], r["tokens"]) for r in records if r["column"] == n} for n in {r["column"] for r in records}]
    common = set.intersection(*cases)
    for r in records:
        for kind, ms in r["ms"].items():
            if (r["plan"], r["tokens"]) in common and kind in CANDIDATES and kind not in r["failed"]:
                shape = tuple(r["tiles"][kind])
                entry = sums.setdefault(kind, {}).setdefault(shape, [])
                entry.append(ms)
    # A tile that stands in more columns than one, as the default does, counts by its mean.
    return {kind: Shape(*min(x, key=lambda shape: sum(x[shape]) / len(x[shape]))) for kind, x in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sleep", type=float, default=20.0, help="ms that the GPU sleeps while the host enqueues")
    parser.add_argument("--until", type=float, default=110.0, help="seconds after which no further column begins")
    parser.add_argument("--columns", type=int, default=COLUMNS, help="of the candidates")
    parser.add_argument("--plans", nargs="*", default=PLANS, choices=("none", *CARRIED))
    parser.add_argument("--window", type=int, help="of all layers; default none, which is what tiles.json is made with")
    parser.add_argument("--processes", type=int)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    compiler = Compiler(args.processes)
    jobs = [job_of(plan, column(n), NEVER, args.window) for n in range(args.columns) for plan in args.plans]
    prepare(compiler, jobs, 0.6 * args.until)
    records, timer = [], Timer(args.window)
    for n in range(args.columns):
        if time.time() - START > 0.85 * args.until:
            say(f"time is up before column {n}")
            break
        for plan in args.plans:
            record = timer(plan, 8192, column(n), NEVER, args.rounds, args.sleep)
            records.append(record | {"column": n, "tiles": {k: list(s) for k, s in column(n).items()}})
            say(n, plan, record["failed"] or "", {k: round(ms, 3) for k, ms in record["ms"].items() if k in CANDIDATES})
    picked = column(0) | best(records)
    say("tiles:", {kind: tuple(shape) for kind, shape in picked.items()})
    release()
    left = max(5.0, args.until - (time.time() - START))
    prepare(compiler, [job_of("none", picked, fill, args.window) for fill in (NEVER, ALWAYS)], left)
    # All heads in one launch, as where E is stored: then programs are what FILL counts.
    settings.TRANSIENT = 4 << 30
    groups = [timer("none", T, picked, fill, args.rounds, args.sleep) for T in (4096, 8192) for fill in (NEVER, ALWAYS)]
    total = [sum(ms for kind, ms in r["ms"].items() if kind in ("backward", "sum_heads")) for r in groups]
    say("dK and dV summed afterwards, in registers:", [round(x, 3) for x in total])
    # Programs a multiprocessor at 4,096 and 8,192 tokens: the smallest at which registers won.
    count = torch.cuda.get_device_properties(0).multi_processor_count
    per = [4 * (T // picked["backward"].keys) / count for T in (4096, 8192)]
    won = [p for p, after, inside in zip(per, total[::2], total[1::2], strict=True) if inside < after]
    table = json.loads(Path(settings.__file__).with_name("tiles.json").read_text())
    table |= {
        "source": f"{environment()['gpu']}, torch {torch.__version__}, Triton {triton.__version__}",
        "wide": {kind: list(picked[kind]) for kind in table["wide"]},
        "fill": round(min(won) - 0.01, 2) if won else NEVER,
    }
    settings.use(table)
    (args.out / "tiles.json").write_text(json.dumps(table, indent=1) + "\n")
    record = {"environment": environment(), "window": args.window, "records": records, "grouped": groups}
    (args.out / "carried_tiles.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
