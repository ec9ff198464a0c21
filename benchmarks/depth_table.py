"""Attention Residuals over depth: every system on the same work, each in a process of its own, gated by its numerics.

    python benchmarks/depth_table.py --out DIR [--limit SECONDS]

First all processes start and all kernels compile in parallel; then tiles of the kernels are tried (`--sweep`); then one
process after the other measures while the rest wait. Writes DIR/depth.json: rows of system, work, ms, net ms, memory.
Net is without the update, timed in the same process in turns with the system. A row whose result is further from the
fp64 oracle than twice dense PyTorch in bf16 has no time. Peers' autotuners run alone, with shortened timings.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

import torch
import triton
import triton.testing
from depth_kernels import graph, override, pool, profile, sweep_all
from depth_passes import update_only, update_only_train
from depth_sweeps import sweeps
from depth_systems import PEERS, SYSTEMS, WORKS, dense, inputs, peer, steps

START = time.time()
ROWS = 64
SWEPT = ("complete 96", "complete 32", "scores 8", "complete 112, decode", "output read", "output read, decode")


def say(*words):
    print(f"[{time.time() - START:.0f}s]", *words, flush=True)


def sample(y):
    """The first and the last rows of a result that has a row a token."""
    return torch.cat([y[:ROWS], y[-ROWS:]])


def truths(path: Path) -> None:
    """Oracle in fp64 and the error of dense PyTorch in bf16, for rows of every work's result."""
    found = {}
    for name, work in WORKS.items():
        data = inputs(work)
        for standard in (False, True):
            results = []
            for dtype in (torch.float64, torch.bfloat16):
                if work.train:
                    if standard:
                        continue
                    results.append(gradients(data, work, dtype))
                else:
                    x = sample(data.x).to(dtype)
                    results.append((dense(x, data.Q.to(dtype), data.W.to(dtype), work, standard),))
            if results:
                low = [relative(b, a) for a, b in zip(*results, strict=True)]
                found[name, standard] = [t.detach().cpu() for t in results[0]], low
        torch.cuda.empty_cache()
    torch.save(found, path)


def gradients(data, work, dtype):
    """(rows of dx, dQ) of the dense stack, in parts of the tokens: dQ is a sum over tokens."""
    Q, W = data.Q.to(dtype).requires_grad_(), data.W.to(dtype)
    dx, dQ = [], 0
    for x, dy in zip(data.x.split(2048), data.dy.split(2048), strict=True):
        x = x.to(dtype).requires_grad_()
        found = torch.autograd.grad(dense(x, Q, W, work, compact=True), (x, Q), dy.to(dtype))
        dx, dQ = [*dx, found[0]], dQ + found[1].double()
    return sample(torch.cat(dx)), dQ


def relative(got, exact):
    exact = exact.double()
    return ((got.double().to(exact.device) - exact).norm() / exact.norm()).item()


def numerics(results, truth):
    """Errors of a step's results; the gate is twice the error of dense bf16."""
    exact, low = truth
    names = ("y",) if len(exact) == 1 else ("dx", "dQ")
    found = {}
    for k, name in enumerate(names):
        got = results[k]
        error = relative(got if name == "dQ" else sample(got), exact[k].cuda())
        found[name] = {"error": error, "dense_bf16": low[k], "ok": error <= 2 * low[k]}
    return found


def samples(f, rep):
    """Raw samples in ms, L2 flushed before each."""
    return triton.testing.do_bench(f, warmup=5, rep=rep, return_mode="all")


def measure(system, name, truth):
    """Rows of one system on one work."""
    work, rows = WORKS[name], []
    data = inputs(work)
    base = (update_only_train if work.train else update_only)(data.x, work.layers)
    standard = system.startswith("plain")
    with torch.set_grad_enabled(work.train):
        found = steps(system, work, data)
        for step in found:
            row = {"system": system, "work": name, "variant": step.variant}
            rows.append(row)
            try:
                results = step.run()
                torch.cuda.synchronize()
                if (name, standard) in truth:
                    results = results if work.train else (results,)
                    row["numerics"] = numerics(results, truth[name, standard])
                del results
                if not all(v["ok"] for v in row.get("numerics", {}).values()):
                    row["error"] = "outside the error bounds"
                    continue
                torch.cuda.empty_cache()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                step.run()
                torch.cuda.synchronize()
                row["memory_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
                ways = [("eager", step.run, base)]
                if name == "decode":
                    ways = [("graph", graph(step.run), graph(base))]
                elif work.train and system.startswith("tilewise"):
                    ways.append(("graph", graph(step.run), graph(base)))
                for way, run, floor in ways:
                    if way != ways[0][0]:
                        row = dict(row)
                        rows.append(row)
                    timed = {"system": [], "update": []}
                    for _ in range(3):
                        timed["update"].append(samples(floor, 12 if name == "decode" else 40))
                        timed["system"].append(samples(run, 25 if name == "decode" else 110))
                    ms, floor_ms = (statistics.median(chain(*timed[k])) for k in ("system", "update"))
                    row.update(way=way, ms=ms, update_ms=floor_ms, net_ms=ms - floor_ms, samples_ms=timed)
            except Exception as e:
                row["error"] = f"{type(e).__name__}: {str(e)[:200]}"
    del found, data
    torch.cuda.empty_cache()
    return rows


def show(row):
    if "net_ms" in row:
        errors = {k: f"{v['error']:.1e}/{v['dense_bf16']:.1e}" for k, v in row.get("numerics", {}).items()}
        figures = f"{row['net_ms']:8.3f} ms net {row['ms']:8.3f} ms {row['memory_mib']:6d} MiB {errors}"
    else:
        figures = row["error"]
    return f"{row['work']:9s} {row['system']:18s} {row['variant']:22s} {row.get('way', ''):6s} {figures}"


def child(system: str, out: Path) -> None:
    """Wait for a line on the standard input, then measure."""
    # The benchmarker that autotuners take: the same choice from shorter timings.
    triton.testing.do_bench = functools.partial(triton.testing.do_bench, warmup=2, rep=10)
    triton.testing.do_bench_cudagraph = functools.partial(triton.testing.do_bench_cudagraph, rep=5)
    torch.zeros(1, device="cuda")
    sys.stdin.readline()
    tiles = out / "tiles.json"
    if system.startswith("tilewise") and tiles.exists():
        for label, change in json.loads(tiles.read_text()).items():
            override(sweeps()[label].table, change, sweeps()[label].where)
    truth, rows = torch.load(out / "truths.pt", weights_only=False), []
    for name in WORKS:
        if system == "plain" and WORKS[name].train:
            continue
        try:
            rows += measure(system, name, truth)
        except Exception:
            why = traceback.format_exc().strip().splitlines()[-1][:300]
            rows.append({"system": system, "work": name, "variant": "", "error": why})
        (out / f"{system.replace(' ', '-')}.json").write_text(json.dumps(rows))
        for row in rows:
            if row["work"] == name:
                print(show(row), flush=True)
        torch.cuda.empty_cache()
    if system == "tilewise":
        with torch.no_grad():
            for name in ("prefill", "decode"):
                step = steps(system, WORKS[name], inputs(WORKS[name]))[0]
                rows.append({"system": system, **profile(name, step.run)})
        step = steps(system, WORKS["training"], inputs(WORKS["training"]))[0]
        rows.append({"system": system, **profile("training", step.run)})
        (out / "tilewise.json").write_text(json.dumps(rows))


def compile_only(system: str, d: int, counts: list[int]) -> None:
    """Compile what a peer's autotuners will try, without running it: results are left unwritten."""
    os.nice(10)
    from triton.runtime.autotuner import Autotuner

    def run(self, *args, grid, warmup=False, **kwargs):
        self.warmup(*args, grid=grid, **kwargs)

    Autotuner.run = run
    for work in WORKS.values():
        if work.d != d:
            continue
        data = inputs(work)
        if system == "flash-attn-res":
            step = steps(system, work, data)[0]
            step.run()
            continue
        _, _, read = peer(system, work, data)
        with torch.set_grad_enabled(work.train):
            for n in counts:
                y = read(0, [data.x.clone().requires_grad_(work.train) for _ in range(n)])
                if work.train:
                    y.backward(data.dy)


COMPILE = [("fla-core", d, [n]) for n in (9, 5, 3, 2, 1) for d in (2048, 7168)]
COMPILE += [("fast-attnres", d, part) for d in (2048, 7168) for part in ([1, 2, 3], [4, 5, 6], [7, 8, 9])]
COMPILE += [("flash-attn-res", d, []) for d in (2048, 7168)]


def spawn(*args, **more):
    return subprocess.Popen([sys.executable, __file__, *map(str, args)], **more)


def versions():
    found = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    for name in PEERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--limit", type=float, default=600, help="seconds after which no further system is measured")
    parser.add_argument("--sweep", action="store_true", help="try tiles first and measure with the best")
    parser.add_argument("--child")
    parser.add_argument("--compile")
    parser.add_argument("--width", type=int)
    parser.add_argument("--counts", type=int, nargs="*")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.child:
        return child(options.child, options.out)
    if options.compile:
        return compile_only(options.compile, options.width, options.counts)
    out, quiet = options.out, subprocess.DEVNULL
    log = open(out / "compile.log", "w")
    waiting = {
        name: spawn("--child", name, "--out", out, stdin=subprocess.PIPE, text=True, stderr=log)
        for name in options.systems
    }
    background = [
        ((name, d), spawn("--compile", name, "--width", d, "--counts", *counts, stdout=quiet, stderr=log))
        for name, d, counts in COMPILE
        if name in options.systems
    ]
    jobs = [("warm_pass", kind) for kind in ("prefill", "decode", "train")]
    if options.sweep:
        jobs += [("warm", label, part) for label in SWEPT for part in range(2)]
    for job, ok, result in pool(jobs):
        if not ok:
            say("FAILED", job, result)
    say("compiled", len(jobs), "jobs")
    truths(out / "truths.pt")
    say("oracles")
    tiles = {}
    if options.sweep:
        swept = sweep_all(options.limit, SWEPT)
        tiles = {row["label"]: row["results"][0][1] for row in swept if row["results"]}
        (out / "sweep.json").write_text(json.dumps(swept))
        (out / "tiles.json").write_text(json.dumps(tiles))
    torch.cuda.empty_cache()
    rows = []
    for name, process in waiting.items():
        own = [p for (of, *_), p in background if of == name]
        while time.time() - START < options.limit and any(p.poll() is None for p in own):
            time.sleep(0.2)
        if time.time() - START > options.limit:
            say("no time for", name)
            process.kill()
            continue
        try:
            process.communicate("go\n", timeout=max(1.0, options.limit + 12 - (time.time() - START)))
        except subprocess.TimeoutExpired:
            process.kill()
            say("out of time in", name)
        part = out / f"{name.replace(' ', '-')}.json"
        rows += json.loads(part.read_text()) if part.exists() else []
        record = {"gpu": torch.cuda.get_device_name(), "versions": versions(), "tiles": tiles, "rows": rows}
        (out / "depth.json").write_text(json.dumps(record) + "\n")
        say(name, "done")
    for _, process in background:
        process.kill()


if __name__ == "__main__":
    main()
