"""Depth kernels on a GPU: correctness of every operator, tile sweeps, and whole passes.

    python benchmarks/depth_kernels.py --out DIR check sweep passes

Each stage writes DIR/<stage>.json. Work is split over processes first, so that kernels compile in parallel.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path

import torch
from depth_passes import (
    EPS,
    Inference,
    naive,
    plain,
    train,
    train_forward,
    update_only,
    update_only_train,
)
from depth_sweeps import sweeps
from triton.testing import do_bench

import triton
from tilewise.depth import reference as R
from tilewise.depth.triton import config, launch, launch_phase1
from tilewise.testing import error_budget

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/depth"))
import depth_dense as dense

from tilewise import depth

START = time.time()
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def say(*words):
    print(f"[{time.time() - START:.0f}s]", *words, flush=True)


def normal(*shape, dtype=BF16):
    return torch.randn(*shape, device="cuda").to(dtype)


def compare(name, call, leaves, dtype, rows):
    """Outputs and gradients of call(f, leaves, kw) against the fp64 oracle, one row a tensor."""

    def run(f, xs, **kw):
        xs = [None if x is None else x.detach().clone().requires_grad_() for x in xs]
        outs = call(f, xs, kw)
        outs = outs if isinstance(outs, tuple) else (outs,)
        torch.manual_seed(1)
        seeds = [torch.randn(x.shape, device="cuda").to(dtype).to(x.dtype) for x in outs]
        live = [x for x in xs if x is not None]
        grads = torch.autograd.grad(outs, live, seeds, allow_unused=True)
        return [*outs, *(torch.zeros_like(x) if g is None else g for x, g in zip(live, grads, strict=True))]

    got = run(depth, leaves, impl="triton")
    low = run(dense, leaves)
    exact = run(R, [None if x is None else x.double() for x in leaves])
    for k, xs in enumerate(zip(got, low, exact, strict=True)):
        b = error_budget(name, *xs)
        rows.append({"case": name, "tensor": k, "ok": b.ok, "error": b.error, "allowed": b.allowed, "rel": b.relative})


def check(dtype_name, d, n, S, T, correlation):
    dtype = getattr(torch, dtype_name)
    torch.manual_seed(d + n)
    torch.backends.cuda.matmul.allow_tf32 = False
    base, c = torch.randn(T, d, device="cuda"), correlation
    v = [(c * base + (1 - c * c) ** 0.5 * torch.randn(T, d, device="cuda")).to(dtype) for _ in range(n)]
    w, g = 2 * normal(S, d, dtype=F32) / d**0.5, 1 + 0.2 * normal(S, d, dtype=F32)
    o, u, p = 1 + 0.2 * normal(d, dtype=F32), normal(T, d, dtype=dtype), normal(T, d, dtype=dtype)
    tag, rows = f"{dtype_name} d={d} n={n} S={S} T={T} corr={c}", []
    kw = {"output_eps": 1e-5}
    calls = {
        "mix_update": (lambda f, x, k: f.mix_update(x[0], x[1], x[5:], *x[2:5], **kw, **k), [u, p, w[0], g[0], o, *v]),
        "mix": (lambda f, x, k: f.mix(x[2:], x[0], x[1], **k), [w[0], g[0], *v]),
        "phase1": (lambda f, x, k: f.phase1(x[2:], x[0], x[1], **k), [w, g, *v]),
    }
    o1, lse = R.phase1(v, w, g)
    calls["phase2"] = (lambda f, x, k: f.phase2(*x, **kw, **k), [u, p, o1[0], lse[0], w[0], g[0], o])
    calls["phase2 second"] = (lambda f, x, k: f.phase2(*x, **kw, **k), [u, None, o1[0], lse[0], w[0], g[0], o])
    calls["phase2_first"] = (lambda f, x, k: f.phase2_first(*x, **k), [o1[0], o])
    for name, (call, leaves) in calls.items():
        compare(f"{name} {tag}", call, leaves, dtype, rows)
    with torch.no_grad():
        bank = torch.stack(v)
        same = torch.equal(depth.phase1(bank, w, g)[0], depth.phase1(v, w, g)[0])
        again = torch.equal(depth.phase1(bank, w, g)[0], depth.phase1(bank, w, g)[0])
        rows.append({"case": f"bank equals list {tag}", "ok": same, "error": 0, "allowed": 0, "rel": 0})
        rows.append({"case": f"repeatable {tag}", "ok": again, "error": 0, "allowed": 0, "rel": 0})
        b, s = depth.complete(u, p, w, g)
        every = torch.cat([depth.scores(v, w, g), s[:, None]], 1)
        got = depth.phase1_from_scores([*v, b], every)
        low, exact = dense.phase1([*v, b], w, g), R.phase1([x.double() for x in (*v, b)], w.double(), g.double())
        serve = torch.stack(v, 1)
        args = g[0], w[0], o, n, 0, 1e-5, 1e-6
        p1, p2, s2 = p.clone(), p.double(), serve.double()
        y = depth.fused_attn_res(p1, u, serve, *args)
        ref = R.fused_attn_res(p2, u.double(), s2, *(x.double() for x in args[:3]), *args[3:])
        lowp = R.fused_attn_res(p.clone(), u, torch.stack(v, 1), *args)
        for name, *xs in (("ahead o1", got[0], low[0], exact[0]), ("ahead lse", got[1], low[1], exact[1]),
                          ("serve", y, lowp, ref)):  # fmt: skip
            e = error_budget(name, *xs)
            rows.append(
                {"case": f"{name} {tag}", "ok": e.ok, "error": e.error, "allowed": e.allowed, "rel": e.relative}
            )
    return rows


SHAPES = ((64, 2, 3, 1000, 0.0), (2304, 8, 16, 1000, 0.0), (5120, 3, 6, 1000, 0.99), (7168, 8, 16, 1000, 0.0))
MANY = (
    ("bfloat16", 2048, 8, 8, 2500, 0.99),
    ("bfloat16", 2048, 29, 8, 300, 0.0),
    ("bfloat16", 64, 129, 16, 200, 0.99),
    ("float16", 64, 1, 18, 1000, 0.0),
)
CHECKS = [(t, *shape) for t in ("bfloat16", "float16", "float32") for shape in SHAPES] + list(MANY)


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
        return job, True, globals()[job[0]](*job[1:])
    except Exception:
        return job, False, traceback.format_exc()[-700:]


def pool(jobs):
    """Jobs (function name, *arguments) in processes of their own: kernels compile in parallel."""
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() - 1)) as p:
        return p.map(_job, jobs, chunksize=1)


def prepared(kind, shape):
    """(config function to override, callable) of one kernel at one shape."""
    T, d = shape[:2]
    u, p = normal(T, d), normal(T, d)
    q, w, lse = torch.randn(d, device="cuda") * 0.02, normal(d), torch.randn(T, device="cuda")
    if kind == "merge":
        return "merge_warps", lambda: launch.phase2_fwd(u, p, u, lse, q, w, EPS, EPS)
    if kind == "merge_bwd":
        part = torch.empty(2, 132 * 4, d, device="cuda")
        do, dl = torch.empty_like(u), torch.empty_like(lse)
        return "merge_bwd", lambda: launch.phase2_bwd(u, p, p, u, lse, q, w, EPS, EPS, do=do, dlse=dl, part=part)
    if kind == "mix_bwd":
        v = normal(shape[2], T, d)
        into = list(torch.empty(v.shape, device="cuda"))
        return "mix_bwd", lambda: launch.mix_bwd(u, None, v.unbind(0), None, q, w, EPS, EPS, into=into, fresh=True)
    if kind == "complete":
        Q, b = torch.randn(shape[2], d, device="cuda") * 0.02, torch.empty_like(u)
        s = torch.empty(shape[2], T, device="cuda")
        return "score_tiles", lambda: launch.complete(u, p, Q, EPS, block=b, out=s)
    n, S = shape[2:]
    v, Q = normal(n, T, d), torch.randn(S, d, device="cuda") * 0.02
    s, r = launch.scores(v.unbind(0), Q, EPS)
    o1, lse = torch.empty(S, T, d, device="cuda", dtype=BF16), torch.empty(S, T, device="cuda")
    if kind == "combine":
        return "combine_tiles", lambda: launch.combine(v.unbind(0), s, o1, lse)
    launch.combine(v.unbind(0), s, o1, lse)
    acc = list(torch.zeros(n, T, d, device="cuda").unbind(0))
    name = {"dv": "dv_tiles", "inner": "inner_tiles"}[kind]
    return name, lambda: launch.phase1_bwd(o1.unbind(0), lse, v.unbind(0), Q, s, lse, r, into=acc)


def override(name, change):
    """Replace a function of the tile table by itself with some entries changed; returns the original."""
    change = dict(change)
    original, tma, factor = getattr(config, name), change.pop("tma", None), change.pop("factor", None)

    def changed(*shape):
        if name == "merge_warps":
            return change["num_warps"]
        tiles = {**original(*shape), **change}
        if factor:
            T, d, n = shape[:3]
            columns = triton.cdiv(d, tiles["BD"]) * triton.cdiv(n, tiles["BN"])
            tiles["programs"] = max(1, min(triton.cdiv(T, tiles["BT"]), triton.cdiv(factor * 132, columns)))
        return tiles

    setattr(config, name, changed)
    keep = original, launch_phase1._tma
    if tma == 0:
        launch_phase1._tma = lambda *_: False
    return keep


def restore(name, keep):
    setattr(config, name, keep[0])
    launch_phase1._tma = keep[1]


def warm(kind, shape, changes):
    name, call = prepared(kind, shape)
    for change in changes:
        keep = override(name, change)
        try:
            call()
        except Exception as e:
            say("warm", kind, change, type(e).__name__, str(e)[:100])
        restore(name, keep)
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
        for hybrid in (1, 2, 3) if kind == "prefill" else (1, 2, 3, 4):
            Inference(x, Q, W, 128, 16, hybrid)()
    torch.cuda.synchronize()


def sweep_all(limit):
    kinds, rows = sweeps(), []
    for label, (kind, shape, changes, size) in kinds.items():
        if time.time() - START > limit:
            say("sweep: out of time at", label)
            break
        name, call = prepared(kind, shape)
        found = []
        for change in changes:
            keep = override(name, change)
            try:
                call()
                run = call if shape[0] > 1024 else graph(lambda call=call: [call() for _ in range(8)])
                ms = do_bench(run, warmup=4, rep=16, return_mode="median") / (1 if shape[0] > 1024 else 8)
                found.append((ms, change))
            except Exception as e:
                say("sweep", label, change, type(e).__name__, str(e)[:120])
            restore(name, keep)
        found.sort(key=lambda x: x[0])
        for ms, change in found[:3] + found[-1:]:
            say(f"{label}: {ms * 1e3:.1f} us", f"{size / ms / 1e6:.0f} GB/s" if size else "", change)
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


def passes():
    rows = []

    def row(work, items, base, **more):
        m, samples = medians(items)
        net = {k: round(v - m[base], 4) for k, v in m.items() if k != base}
        say(work, "net ms", net, base, round(m[base], 4), more)
        rows.append({"work": work, "base": base, "median_ms": m, "samples_ms": samples, **more})

    d, L, S = 7168, 128, 16
    Q, W = torch.randn(L + 1, d, device="cuda") * 0.02, (1 + 0.1 * torch.randn(L + 1, d, device="cuda")).bfloat16()
    with torch.no_grad():
        x = normal(200, d)
        exact = naive(x, torch.cat([Q[:64], Q[-1:]]), torch.cat([W[:64], W[-1:]]), 64, S)
        e = ((Inference(x, Q, W, 64, S, 2)().double() - exact).norm() / exact.norm()).item()
        say(f"64-sublayer pass against fp64: {e:.2e}")
        rows.append({"work": "pass against fp64", "relative": e})
        x = normal(8192, d)
        items = [("update", update_only(x, L)), ("plain", plain(x, W, L))]
        items += [(f"hybrid {h}", Inference(x, Q, W, L, S, h)) for h in (1, 2, 3)]
        row("prefill 8192 x 7168, 128 sublayers, S 16", items, "update")
        x = normal(128, d)
        items = [("update", update_only(x, L)), ("plain", plain(x, W, L))]
        items += [(f"hybrid {h}", Inference(x, Q, W, L, S, h)) for h in (1, 2, 3, 4)]
        row("decode 128 x 7168, graph", [(k, graph(f)) for k, f in items], "update")
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
    parser.add_argument("--limit", type=float, default=200, help="seconds after which no new sweep starts")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    jobs = []
    if "passes" in args.stages:
        jobs += [("warm_pass", kind) for kind in ("prefill", "decode", "train")]
    if "check" in args.stages:
        jobs += [("check", *c) for c in sorted(CHECKS, key=lambda c: -c[1])]
    if "sweep" in args.stages:
        jobs += [("warm", k, s, c[i::2]) for k, s, c, _ in sweeps().values() for i in range(2)]
    done = pool(jobs)
    say("compiled", len(jobs), "jobs")
    for job, ok, result in done:
        if not ok and job[0] != "check":
            say("FAILED", job[:2], result)
    stages = {"check": lambda: check_all(done), "sweep": lambda: sweep_all(args.limit), "passes": passes}
    for stage in args.stages:
        try:
            rows = stages[stage]()
        except Exception:
            say(stage, "FAILED", traceback.format_exc()[-1500:])
            continue
        (out / f"depth_{stage}.json").write_text(json.dumps({**where, "rows": rows}, indent=1))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
