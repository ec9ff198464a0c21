"""Bytes that Full Attention Residuals move, against the two-phase formula: by launches, by the GPU, and by time.

    python benchmarks/depth_traffic.py --out DIR [--tokens 32768] [--limit SECONDS]

128 sublayers, d = 7,168, the update u = 0.7 y taken off. The formula is the paper's (arXiv:2603.15031, Table 1):
with groups of S sublayers that share a phase 1, N of them, (S + N) d elements a sublayer and token, keys and values
counted each; beside it stands what the operators are defined to move, where a source is read once for both.

Three answers. The launches' own: every operator of a pass says by its arguments what it reads and writes (this needs no
GPU). `ncu` runs a pass and sums dram__bytes_read and dram__bytes_write over its kernels (a child process, because every
kernel is slowed down; the caches are left as they are, as without a profiler). And the time of a pass at
`--tokens` bounds what it can have moved: memory gives no more than its peak bandwidth. Writes DIR/depth_traffic.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
from depth_record import where

from tilewise.bench.cells import Cell
from tilewise.bench.depth_bytes import count
from tilewise.bench.depth_systems import streams
from tilewise.bench.depth_work import Work, inputs, overhead
from tilewise.depth import InferenceState, Schedule
from tilewise.nn import AttnRes

START = time.time()
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}
PEAK = {"H200": 4.8e12, "H100": 3.35e12}
"""Bytes a second of the memory by its data sheet."""


def say(*words) -> None:
    print(f"[{time.time() - START:.0f}s]", *words, flush=True)


def cell_of(tokens: int, args) -> Cell:
    size = {"tokens": tokens, "d": args.d, "sublayers": args.sublayers, "block": 0}
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    return Cell("depth", "full", "tilewise", size, dtype=dtype, passes=("fwd",), device=args.device)


def formula(cell: Cell) -> dict[str, float]:
    """Bytes of one pass without the update: the paper's count, and the operators' own."""
    L, d, T = (cell.size[name] for name in ("sublayers", "d", "tokens"))
    schedule = Schedule.full_attention(L)
    vector = T * d * cell.torch_dtype.itemsize
    groups = len(schedule.starts)
    return {"paper": (L / groups + groups) * L * vector, "operators": sum(schedule.vectors_moved()) * vector}


def update_bytes(cell: Cell) -> int:
    """The update reads and writes a vector a sublayer."""
    return 2 * cell.size["sublayers"] * cell.size["tokens"] * cell.size["d"] * cell.torch_dtype.itemsize


def passes(cell: Cell):
    """(a pass, its updates alone)."""
    work, data = Work.of(cell), inputs(cell)
    return streams(work, data).forward, overhead(data.x, work)


@torch.no_grad()
def child(args) -> None:
    """What ncu watches: one pass between two marks, after one that compiles."""
    run, _ = passes(cell_of(args.ncu_tokens, args))
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def counted(text: str) -> tuple[dict[str, float], int]:
    """(bytes by metric, kernels) of ncu's table: one line a kernel and metric."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    total, kernels = dict.fromkeys(METRICS, 0.0), set()
    for row in csv.DictReader(lines):
        total[row["Metric Name"]] += float(row["Metric Value"].replace(",", "")) * UNITS[row["Metric Unit"]]
        kernels.add(row["ID"])
    return total, len(kernels)


def by_counters(args, seconds: float) -> dict:
    """ncu's bytes of one pass, without the updates' own."""
    if shutil.which("ncu") is None:
        return {"error": "ncu is not installed"}
    command = ["ncu", "--csv", "--metrics", ",".join(METRICS), "--profile-from-start", "off", "--clock-control", "none"]
    command += ["--cache-control", "none"]
    command += [sys.executable, __file__, "--child", "--ncu-tokens", str(args.ncu_tokens), "--d", str(args.d)]
    command += ["--sublayers", str(args.sublayers)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"ncu took more than {seconds:.0f} s"}
    if done.returncode:
        return {"error": f"exit status {done.returncode}: {(done.stdout + done.stderr)[-600:]}"}
    total, kernels = counted(done.stdout)
    if not kernels:
        return {"error": f"ncu saw no kernel: {done.stdout[-600:]}"}
    cell = cell_of(args.ncu_tokens, args)
    net = sum(total.values()) - update_bytes(cell)
    return {"tokens": args.ncu_tokens, "kernels": kernels, "bytes": total, "net": net,
            "ratio": {name: net / value for name, value in formula(cell).items()}}  # fmt: skip


def by_launches(args) -> dict:
    """What the operators of a pass are given to read and to write, at this length and width."""
    cell, width, tokens = cell_of(args.tokens, args), 16, min(args.tokens, 1032)
    schedule = Schedule.full_attention(args.sublayers)
    # Vectors do not depend on their width; the kernels' tiles are those of any length above 1,024.
    state = InferenceState(schedule, AttnRes(width, schedule).reads(), tokens)
    found = count(state, tokens, torch.ones(args.sublayers + 1, width))
    moved = found.total(args.tokens, args.d, cell.torch_dtype.itemsize)
    return {"tokens": args.tokens, "read": found.read, "written": found.written, "net": moved,
            "ratio": {name: moved / value for name, value in formula(cell).items()}}  # fmt: skip


@torch.no_grad()
def by_time(args) -> dict:
    """The most that a pass can have moved in its time, its updates' time taken off."""
    cell = cell_of(args.tokens, args)
    run, updates = passes(cell)
    samples = {"pass": [], "updates": []}
    for r in range(args.rounds + 1):
        for name, f in (("pass", run), ("updates", updates)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            f()
            end.record()
            torch.cuda.synchronize()
            if r:
                samples[name].append(start.elapsed_time(end))
    net = median(samples["pass"]) - median(samples["updates"])
    gpu = torch.cuda.get_device_name()
    peak = next((value for name, value in PEAK.items() if name in gpu), None)
    found = {"tokens": args.tokens, "net_ms": net, "samples": samples, "peak": peak}
    if peak is not None:
        found["at_most"] = net * 1e-3 * peak
        found["ratio"] = {name: found["at_most"] / value for name, value in formula(cell).items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--ncu-tokens", type=int, default=32768)
    parser.add_argument("--d", type=int, default=7168)
    parser.add_argument("--sublayers", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds in all")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.child:
        return child(args)
    args.out.mkdir(parents=True, exist_ok=True)
    cell = cell_of(args.tokens, args)
    record = {**where(args.device, "traffic", rounds=args.rounds), "sizes": cell.size, "formula": formula(cell)}
    say({name: f"{value / 1e9:.1f} GB" for name, value in record["formula"].items()})
    record["launches"] = by_launches(args)
    say("launches", record["launches"])
    if args.device == "cpu":
        (args.out / "depth_traffic.json").write_text(json.dumps(record, indent=1) + "\n")
        return None
    for name, measure in (("counters", lambda a: by_counters(a, a.limit - (time.time() - START))), ("time", by_time)):
        if time.time() - START > args.limit - 25:
            say(f"no time left for the {name}")
            continue
        record[name] = measure(args)
        torch.cuda.empty_cache()
        say(name, {k: v for k, v in record[name].items() if k != "samples"})
        (args.out / "depth_traffic.json").write_text(json.dumps(record, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
