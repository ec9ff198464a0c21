"""Depth kernels on a GPU: correctness of every operator, tile sweeps, and whole passes.

    python benchmarks/depth_kernels.py --out DIR check sweep passes

Each stage writes DIR/<stage>.json. Work is split over processes first, so that kernels compile in parallel.
"""

import argparse
import json
import multiprocessing
import os
import re
import shlex
import sys
import time
import traceback
from pathlib import Path

import torch
from depth_checks import CHECKS, check, normal
from depth_passes import (
    DECODE_PLANS,
    EPS,
    Inference,
    naive,
    plain,
    train,
    train_forward,
    update_only,
    update_only_train,
)
from depth_record import where
from depth_sweeps import sweeps
from triton.testing import do_bench

from tilewise.depth.triton import config, launch

START = time.time()
BF16 = torch.bfloat16


def say(*words):
    print(f"[{time.time() - START:.0f}s]", *words, flush=True)


def check_all(done):
    rows = []
    for job, ok, result in (x for x in done if x[0][0] == "check"):
        rows += result if ok else [{"case": str(job), "ok": False, "error": 0, "allowed": 0, "rel": 0, "why": result}]
    bad = [r for r in rows if not r["ok"]]
    say(f"check: {len(rows) - len(bad)} of {len(rows)} ok")
    for r in bad[:40]:
        say("  MISS", {k: (f"{x:.2e}" if isinstance(x, float) else x) for k, x in r.items()})
    return rows


def _job(job):
    try:
        return job, True, {"check": check, "warm": warm, "warm_pass": warm_pass}[job[0]](*job[1:])
    except Exception:
        return job, False, traceback.format_exc()[-700:]


def pool(jobs):
    """Jobs (function name, *arguments) in processes of their own: kernels compile in parallel."""
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() - 1)) as p:
        return p.map(_job, jobs, chunksize=1)


def prepared(kind, shape):
    """A callable that runs one kernel (phase 1 backward: all of its kernels) at one shape."""
    T, d = shape[:2]
    u, p = normal(T, d), normal(T, d)
    q, w, lse = torch.randn(d, device="cuda") * 0.02, normal(d), torch.randn(T, device="cuda")
    if kind == "merge":
        return lambda: launch.phase2_fwd(u, p, u, lse, q, w, EPS, EPS)
    if kind == "merge_bwd":
        part = torch.empty(2, 132 * 4, d, device="cuda")
        do, dl = torch.empty_like(u), torch.empty_like(lse)
        return lambda: launch.phase2_bwd(u, p, p, u, lse, q, w, EPS, EPS, do=do, dlse=dl, part=part)
    if kind == "mix_bwd":
        v = normal(shape[2], T, d)
        into = list(torch.empty(v.shape, device="cuda"))
        return lambda: launch.mix_bwd(u, None, v.unbind(0), None, q, w, EPS, EPS, into=into, fresh=True)
    if kind == "mix":
        bank = normal(shape[2], T, d).unbind(0)
        return lambda: launch.mix_fwd(bank, u, p, q, w, EPS, EPS)
    if kind == "complete":
        Q, b = torch.randn(shape[2], d, device="cuda") * 0.02, torch.empty_like(u)
        s = torch.empty(shape[2], T, device="cuda")
        return lambda: launch.complete(u, p, Q, EPS, block=b, out=s)
    n, S = shape[2:]
    v, Q = normal(n, T, d), torch.randn(S, d, device="cuda") * 0.02
    s, r = launch.scores(v.unbind(0), Q, EPS)
    o1, lse = torch.empty(S, T, d, device="cuda", dtype=BF16), torch.empty(S, T, device="cuda")
    if kind == "scores":
        return lambda: launch.scores(v.unbind(0), Q, EPS)
    if kind == "combine":
        return lambda: launch.combine(v.unbind(0), s, o1, lse)
    launch.combine(v.unbind(0), s, o1, lse)
    acc = list(torch.zeros(n, T, d, device="cuda").unbind(0))
    return lambda: launch.phase1_bwd(o1.unbind(0), lse, v.unbind(0), Q, s, lse, r, into=acc)


def override(name, change, where=lambda *_: True):
    """Change entries that a function of the tile table returns for shapes where `where` holds; returns an undo."""
    change = dict(change)
    one, factor = change.pop("one", None), change.pop("factor", None)
    original, original_one = getattr(config, name), config.one_reduction

    def changed(*shape):
        tiles = original(*shape)
        if tiles is None or not where(*shape):
            return tiles
        if isinstance(tiles, int):
            return change["num_warps"]
        tiles = {**tiles, **change}
        if factor:
            T, d, n = shape[:3]
            columns = config.cdiv(d, tiles["BD"]) * config.cdiv(n, tiles["BN"])
            tiles["programs"] = max(1, min(config.cdiv(T, tiles["BT"]), config.cdiv(factor * 132, columns)))
        return tiles

    def undo():
        setattr(config, name, original)
        config.one_reduction = original_one

    setattr(config, name, changed)
    if one is not None:
        config.one_reduction = lambda T, size: bool(one) and size == 2 if config.few(T) else original_one(T, size)
    return undo


def warm(label, part):
    """Compile every other override of a sweep, from `part` on."""
    sweep = sweeps()[label]
    call = prepared(sweep.kind, sweep.shape)
    for change in sweep.changes[part::2]:
        undo = override(sweep.table, change)
        try:
            call()
        except Exception as e:
            say("warm", label, change, type(e).__name__, str(e)[:100])
        undo()
    torch.cuda.synchronize()


def warm_pass(kind):
    """Compile what a whole pass needs."""
    if kind == "train":
        x, Q = normal(1032, 2048), torch.randn(65, 2048, device="cuda") * 0.02
        train(x, Q, (1 + Q).bfloat16(), 64, 8, x)()
    else:
        x, Q = normal(1032 if kind == "prefill" else 128, 7168), torch.randn(129, 7168, device="cuda") * 0.02
        W = (1 + Q).bfloat16()
        plain(x, W, 1)()
        for plan in ((0, 0), (1, 0), (2, 0)) if kind == "prefill" else ((0, 0), (6, 0), (8, 0), *DECODE_PLANS):
            Inference(x, Q, W, 128, 16, *plan)()
    torch.cuda.synchronize()


def sweep_all(limit, labels=None):
    rows = []
    for label, sweep in sweeps().items():
        if labels is not None and label not in labels:
            continue
        if time.time() - START > limit:
            say("sweep: out of time at", label)
            break
        call, found, size = prepared(sweep.kind, sweep.shape), [], sweep.bytes
        for change in sweep.changes:
            undo = override(sweep.table, change)
            try:
                call()
                repeat = 8 if sweep.shape[0] <= 1024 else 2
                run = graph(lambda call=call, repeat=repeat: [call() for _ in range(repeat)])
                found.append((do_bench(run, warmup=4, rep=16, return_mode="median") / repeat, change))
            except Exception as e:
                say("sweep", label, change, type(e).__name__, str(e)[:120])
            undo()
        found.sort(key=lambda x: x[0])
        for ms, change in found[:2] + found[-1:]:
            say(f"{label}: {ms * 1e3:.1f} us {size / ms / 1e6:.0f} GB/s", change)
        rows.append({"label": label, "bytes": size, "results": found})
        torch.cuda.empty_cache()
    return rows


def graph(f):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            f()
    torch.cuda.current_stream().wait_stream(side)
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        f()

    def replay():
        g.replay()

    replay.keep = f
    return replay


def medians(items, rounds=3, rep=60):
    """Interleaved rounds; the median of each item, and every sample."""
    samples = {name: [] for name, _ in items}
    for _, f in items:
        f()
    for _ in range(rounds):
        for name, f in items:
            samples[name].append(do_bench(f, warmup=8, rep=rep, return_mode="median"))
    return {k: sorted(v)[len(v) // 2] for k, v in samples.items()}, samples


def profile(name, f):
    """Device time of each kernel over one run, the largest first."""
    f()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        f()
        torch.cuda.synchronize()
    events = sorted(prof.key_averages(), key=lambda e: -e.device_time_total)
    found = [(e.key[:60], e.count, round(e.device_time_total / 1e3, 4)) for e in events if e.device_time_total]
    say("profile", name, "total ms", round(sum(x[2] for x in found), 3))
    for key, count, ms in found[:9]:
        say(f"    {ms:8.3f} ms {count:4d} x {ms / count * 1e3:7.1f} us  {key}")
    return {"work": f"profile {name}", "kernels": found}


def passes_twice(swept):
    """With the tile table as it is, then with the best override of every sweep."""
    rows = passes("table")
    if swept:
        best = {row["label"]: row["results"][0][1] for row in swept if row["results"]}
        for label, change in best.items():
            override(sweeps()[label].table, change, sweeps()[label].where)
        rows += [{"work": "overrides", "best": best}, *passes("best")]
    return rows


def passes(tiles):
    rows = []

    def row(work, items, base, **more):
        m, samples = medians(items)
        net = {k: round(v - m[base], 4) for k, v in m.items() if k != base}
        say(tiles, work, "net ms", net, base, round(m[base], 4), more)
        rows.append({"work": work, "tiles": tiles, "base": base, "median_ms": m, "samples_ms": samples, **more})

    d, L, S = 7168, 128, 16
    Q, W = torch.randn(L + 1, d, device="cuda") * 0.02, (1 + 0.1 * torch.randn(L + 1, d, device="cuda")).bfloat16()
    with torch.no_grad():
        weights = [torch.cat([t[:64], t[-1:]]) for t in (Q, W)]
        for T, h in ((200, 0), (200, 2), (200, 8), (1100, 0), (1100, 2)):
            x = normal(T, d)
            exact = naive(x, *weights, 64, S)
            e = ((Inference(x, Q, W, 64, S, h)().double() - exact).norm() / exact.norm()).item()
            say(f"64-sublayer pass, {T} tokens, hybrid {h}, against fp64: {e:.2e}")
            rows.append({"work": "pass against fp64", "tokens": T, "hybrid": h, "relative": e})
        x = normal(8192, d)
        items = [("update", update_only(x, L)), ("plain", plain(x, W, L))]
        items += [(f"hybrid {h}", Inference(x, Q, W, L, S, h)) for h in (0, 1, 2)]
        row("prefill 8192 x 7168, 128 sublayers, S 16", items, "update")
        rows.append(profile("prefill, hybrid 0", Inference(x, Q, W, L, S, 0)))
        x = normal(128, d)
        items = [("update", update_only(x, L)), ("plain", plain(x, W, L))]
        items += [(f"hybrid {h}", Inference(x, Q, W, L, S, h)) for h in (0, 1, 2, 4, 6, 8)]
        row("decode 128 x 7168, graph", [(k, graph(f)) for k, f in items], "update")
        for h in (2, 8):
            rows.append(profile(f"decode, hybrid {h}", graph(Inference(x, Q, W, L, S, h))))
        rows.append(profile("decode, plain", graph(plain(x, W, L))))
    del items
    torch.cuda.empty_cache()
    d, L, S = 2048, 64, 8
    Q, W = torch.randn(L + 1, d, device="cuda") * 0.02, (1 + 0.1 * torch.randn(L + 1, d, device="cuda")).bfloat16()
    x, dy = normal(8192, d), normal(8192, d)
    steps = {}
    for name, keep in (("ours", False), ("ours, o1 saved", True)):
        steps[name] = train(x, Q, W, L, S, dy, keep)
        steps[name]()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        steps[name]()
        mib = (torch.cuda.max_memory_allocated() - before) / 2**20
        say("training memory", name, f"{mib:.0f} MiB")
        rows.append({"work": "training memory", "system": name, "MiB": mib})
    rows.append(profile("training", steps["ours"]))
    items = [("update", update_only_train(x, L)), *steps.items()]
    items.append(("forward", lambda: train_forward(x, Q, W, L, S)))
    try:
        items.append(("ours, graph", graph(steps["ours"])))
    except Exception as e:
        say("training graph", type(e).__name__, str(e)[:200])
    row("training step 8192 x 2048, 64 sublayers, S 8", items, "update")
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("stages", nargs="+", choices=["check", "sweep", "passes"])
    parser.add_argument("--out", default="out")
    parser.add_argument("--cases", default="", help="run only the checks whose arguments match")
    parser.add_argument("--limit", type=float, default=200, help="seconds after which no new sweep starts")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    made = where("cuda", "kernels", command=shlex.join("OUT" if x == args.out else x for x in sys.argv[1:]))
    jobs = []
    if "passes" in args.stages:
        jobs += [("warm_pass", kind) for kind in ("prefill", "decode", "train")]
    if "check" in args.stages:
        jobs += [
            ("check", *c) for c in sorted(CHECKS, key=lambda c: -c[1] * c[2] * c[4]) if re.search(args.cases, str(c))
        ]
    if "sweep" in args.stages:
        jobs += [("warm", label, part) for label in sweeps() for part in range(2)]
    done = pool(jobs)
    say("compiled", len(jobs), "jobs")
    wrong = 0
    for job, ok, result in done:
        wrong += not ok
        if not ok and job[0] != "check":
            say("FAILED", job[:2], result)
    swept = []
    stages = {
        "check": lambda: check_all(done),
        "sweep": lambda: swept.extend(sweep_all(args.limit)) or swept,
        "passes": lambda: passes_twice(swept),
    }
    for stage in args.stages:
        try:
            rows = stages[stage]()
        except Exception:
            wrong += 1
            say(stage, "FAILED", traceback.format_exc()[-1500:])
            continue
        if stage == "check":
            wrong += sum(not r["ok"] for r in rows)
        (out / f"depth_{stage}.json").write_text(json.dumps({**made, "rows": rows}, indent=1))
        torch.cuda.empty_cache()
    # A missed budget or a stage that failed makes a failing exit; what was measured is written all the same.
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
