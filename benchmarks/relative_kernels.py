"""The Triton attention kernels on a GPU: numerics of every case, and times beside attention without a term.

    python benchmarks/relative_kernels.py check time --out results.json

`check` compares O, lse and all gradients with the fp64 oracle; `time` measures both passes of T5, Shaw, DeBERTa-v3 and
Transformer-XL (12 heads × 64, 16,384 tokens a batch, fp16, CUDA graphs, L2 flushed) in rounds interleaved with cuDNN's
attention without any term. Kernels are compiled beforehand by many processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "triton"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from tilewise.testing import Sizes

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
MECHANISMS = ("none", "t5", "shaw", "deberta", "txl")


def sizes(
    N: int = 1100,
    Tk: int | None = None,
    B: int = 2,
    H: int = 4,
    Hk: int | None = None,
    d: int = 64,
    d_v=None,
    offset=None,
):
    return Sizes(B, H, Hk or H, N, Tk or N, d, d_v or d, offset, published=True)


CHECKS = [
    *((case, "none", dtype, sizes(N), 0.0) for dtype in (HALF, BRAIN)
      for case, N in (("t5", 1024), ("shaw", 1024), ("deberta", 2304), ("txl", 1024))),
    *((case, "none", HALF, sizes(), 0.0) for case in ("none", "t5", "t5_causal", "alibi", "shaw", "wav2vec2_bert",
      "vits", "txl", "deberta", "wavlm", "inkling", "explicit")),
    ("everything", "none", HALF, sizes(600), 0.0),
    *((case, "none", SINGLE, sizes(N), 0.0)
      for case, N in (("t5", 1024), ("shaw", 1100), ("deberta", 2176), ("txl", 600))),
    *(("wav2vec2_bert", mask, HALF, sizes(), 0.0) for mask in ("causal", "window", "lengths", "holes", "packed",
      "intervals", "dense", "causal_padding")),
    *(("deberta", mask, HALF, sizes(2304), 0.0) for mask in ("causal", "lengths", "packed")),
    ("t5", "causal", BRAIN, sizes(1024), 0.0),
    ("txl", "lengths", BRAIN, sizes(), 0.0),
    ("txl", "causal", BRAIN, sizes(), 0.0),
    ("txl", "packed", HALF, sizes(), 0.0),
    ("txl", "holes", HALF, sizes(Hk=2), 0.0),
    ("txl", "none", HALF, sizes(1024, d=128), 0.0),
    ("txl", "none", HALF, sizes(), 0.1),
    ("wav2vec2_bert", "none", HALF, sizes(Hk=2), 0.0),
    ("deberta", "causal", HALF, sizes(1500, Hk=1), 0.0),
    ("wav2vec2_bert", "none", HALF, sizes(700, 1500), 0.0),
    ("txl", "none", HALF, sizes(1500, 700, offset=100), 0.0),
    ("txl", "none", HALF, sizes(d=64, d_v=192), 0.0),
    *(("wav2vec2_bert", "none", HALF, sizes(d=d), 0.0) for d in (16, 80, 128, 256)),
    ("deberta", "none", HALF, sizes(2304, d=96), 0.0),
    ("deberta", "none", HALF, sizes(2304), 0.1),
    ("shaw", "causal", BRAIN, sizes(), 0.2),
]  # fmt: skip


def label(case, mask, dtype, s, dropout):
    return f"{case} {mask} {str(dtype)[6:]} {s.Tq}x{s.Tk} H{s.H}/{s.Hk} d{s.d}/{s.d_v} p{dropout}"


def check_one(job, device):
    from relative_checks import call_of, run, verdicts

    case, mask, dtype, s, dropout = job
    call = call_of(case, s, mask, dtype, device, dropout)
    if device == "meta":
        do = torch.empty(s.B, s.H, s.Tq, s.d_v, dtype=dtype, device=device)
        run(call, do, torch.empty(s.B, s.H, s.Tq, device=device))
        return None
    budgets = verdicts(call)
    do = torch.randn(s.B, s.H, s.Tq, s.d_v, device=device).to(dtype)
    first, second = run(call, do, None), run(call, do, None)
    for one, two in zip((*first[:2], *first[2]), (*second[:2], *second[2]), strict=True):
        assert torch.equal(one, two), "two runs differ"
    return budgets


def timed_call(case: str, N: int, device, dtype=HALF, tokens: int = 16384, H: int = 12, d: int = 64, mask=None):
    """(call, do) of a timed case, drawn on the device."""
    from tilewise import Mask
    from tilewise.call import Call
    from tilewise.terms import flatten, lower
    from tilewise.testing import CASES

    s = Sizes(max(1, tokens // N), H, H, N, N, d, d, None, published=True)
    made = CASES[case]
    shapes = {"q": (s.B, H, N, d), "k": (s.B, H, N, d), "v": (s.B, H, N, d), **made.shapes(s)}
    if case == "shaw":
        del shapes["values"]
    x = {
        n: torch.randn(shape, device=device, dtype=dtype) * (1.0 if n in "qkv" else 0.5) for n, shape in shapes.items()
    }
    if case == "t5":
        x["q"] *= 0.125
    if case == "shaw":
        from tilewise.terms import Shaw

        terms, scale = Shaw(x["keys"], left=64, right=64), d**-0.5
    else:
        arguments = made.arguments(x, s)
        terms, scale = arguments["terms"], arguments["scale"]
    content, ports = lower(x["q"], flatten(terms))
    return Call(content, x["k"], x["v"], tuple(ports), mask or Mask(), scale, 0), torch.randn_like(x["q"])


def passes_of(call, do):
    """(forward, backward) closures over fixed buffers."""
    from tilewise import triton

    B, H, Tq, _ = call.q.shape
    o = torch.empty(B, Tq, H, call.v.shape[3], dtype=call.q.dtype, device=call.q.device).transpose(1, 2)
    lse = torch.empty(B, H, Tq, device=call.q.device)
    leaves = [call.q, call.k, call.v, *call.tensors]
    grads = [torch.empty_like(x) for x in leaves]
    return (lambda: triton.forward(call, o, lse)), (
        lambda: triton.backward(call, do, None, o, lse, [True] * len(leaves), grads)
    )


VARIANTS = {
    "forward": {
        "none": [(128, 64, 8, 3, 2), (64, 128, 4, 3, 2), (64, 64, 4, 3, 2)],
        "t5": [(64, 128, 4, 3, 2), (64, 64, 4, 3, 2), (64, 128, 4, 3, 3)],
        "shaw": [(64, 128, 4, 3, 2), (64, 64, 4, 3, 2), (128, 64, 8, 3, 2)],
        "deberta": [(128, 64, 4, 3, 2), (128, 64, 8, 3, 2), (64, 64, 4, 3, 2)],
        "txl": [(64, 64, 4, 3, 3), (64, 64, 4, 3, 2), (128, 64, 8, 3, 3)],
    },
    "keys": {c: [(64, 64, 4, 3, 2), (64, 64, 4, 4, 2), (64, 64, 4, 3, 3), (64, 64, 4, 2, 2)] for c in MECHANISMS},
    "queries": {c: [(64, 64, 4, 3, 2), (64, 64, 4, 4, 2), (64, 64, 4, 3, 3), (64, 64, 4, 2, 2)] for c in MECHANISMS},
    "projection": {c: [(64, 128, 4, 3), (64, 128, 4, 2), (64, 64, 4, 3), (64, 128, 8, 3), (64, 256, 8, 3)]
                   for c in ("shaw", "deberta", "txl")},
    "fold": {c: [(64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2), (32, 64, 4, 4)]
             for c in ("t5", "shaw", "deberta", "txl")},
}  # fmt: skip


def variants(only):
    """(what, case, shape) of every tile shape worth trying."""
    return [
        (what, case, shape)
        for what, cases in VARIANTS.items()
        for case in cases
        if case in only
        for shape in cases[case]
    ]


class replaced:
    """Inside, the kernels of `what` use this tile shape."""

    def __init__(self, what: str, shape: tuple[int, ...]):
        from tilewise.triton import gradients, passes
        from tilewise.triton.config import Tiles

        self.saved = []
        original = gradients.backward_tiles
        if what == "forward":
            new = [(passes, "forward_tiles", lambda *a: Tiles(*shape))]
        elif what in ("keys", "queries"):
            keyed = what == "keys"
            new = [(gradients, "backward_tiles", lambda *a: Tiles(*shape) if a[3] == keyed else original(*a))]
        else:
            new = [(module, f"{what}_tiles", lambda *a: shape) for module in (passes, gradients)]
        for module, name, function in new:
            self.saved.append((module, name, getattr(module, name)))
            setattr(module, name, function)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for module, name, function in self.saved:
            setattr(module, name, function)


def run_variant(what: str, case: str, N: int, device):
    """The pass in which a variant shows, as a closure."""
    forward, backward = passes_of(*timed_call(case, N, device))
    return forward if what in ("forward", "projection") else backward


KERNELS = {"forward": ["attend"], "keys": ["grad_key"], "queries": ["grad_query"], "projection": ["project"],
           "fold": ["fold", "collect"]}  # fmt: skip


def kernel_times(run, repeats: int = 3):
    """{kernel: µs} of one run, by the profiler."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    run()
    torch.cuda.synchronize()
    with profiler(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    return {e.key: e.self_device_time_total / repeats for e in p.key_averages() if e.self_device_time_total > 0}


def tune(lengths, only):
    rows = []
    for N in lengths:
        for what, case, shape in variants(only):
            try:
                with replaced(what, shape):
                    times = kernel_times(run_variant(what, case, N, "cuda"))
            except Exception as error:
                print(f"tune {what} {case} {shape} N={N}: {type(error).__name__} {str(error)[-150:]}", flush=True)
                continue
            us = {k: times[k] for k in KERNELS[what] if k in times}
            rows.append(dict(n=N, what=what, case=case, shape=shape, us=us))
        for what, cases in VARIANTS.items():
            for case in cases:
                mine = [r for r in rows if (r["n"], r["what"], r["case"]) == (N, what, case)]
                if mine:
                    shown = (f"{r['shape']}: {'+'.join(f'{t:.0f}' for t in r['us'].values())}" for r in mine)
                    text = "; ".join(shown)
                    print(f"tune {what} {case} N={N}: {text}", flush=True)
    return rows


def compile_one(job):
    """Run a job on meta tensors with compilation only; job is ("check", index) or ("time", case, N)."""
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
    launcher.append(lambda kernel, grid, *args, **meta: kernel.warmup(*args, grid=grid, **meta))
    torch.set_num_threads(1)
    start = time.time()
    try:
        if job[0] == "check":
            check_one(CHECKS[job[1]], "meta")
        elif job[0] == "extra":
            for run in passes_of(*extra_call(*EXTRA[job[1]], "meta")):
                run()
        elif job[0] == "tune":
            with replaced(job[1], job[3]):
                run_variant(job[1], job[2], job[4], "meta")()
        else:
            for run in passes_of(*timed_call(job[1], job[2], "meta")):
                run()
    except Exception as error:
        return job, time.time() - start, f"{type(error).__name__}: {str(error)[-400:]}"
    return job, time.time() - start, None


def precompile(jobs, seconds: float):
    start = time.time()
    context = multiprocessing.get_context("spawn")
    done = 0
    with context.Pool(min(16, os.cpu_count())) as pool:
        results = pool.imap_unordered(compile_one, jobs)
        try:
            for _ in jobs:
                job, took, error = results.next(timeout=max(0.1, seconds - (time.time() - start)))
                done += 1
                if error:
                    print("compile failed", job, f"{took:.0f} s", error, flush=True)
        except multiprocessing.TimeoutError:
            print("compilation stopped at its limit", flush=True)
    print(f"compiled {done} of {len(jobs)} jobs in {time.time() - start:.0f} s", flush=True)


def graphed(run):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(keep=run):
        # The captured kernels read what `run` holds: it must live as long as the graph.
        graph.replay()

    return replay


def steady(items, rounds: int, rep: int):
    """{name: median ms} over interleaved rounds; one untimed round warms the card, which throttles when it is warm."""
    from triton.testing import do_bench

    for _, run in items:
        do_bench(run, warmup=10, rep=100)
    samples = {name: [] for name, _ in items}
    for _ in range(rounds):
        for name, run in items:
            samples[name].append(do_bench(run, warmup=4, rep=rep, return_mode="median"))
    return {name: statistics.median(x) for name, x in samples.items()}, samples


def cudnn(N: int, tokens: int = 16384, H: int = 12, d: int = 64, dtype=HALF, causal: bool = False):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    B = max(1, tokens // N)
    q, k, v = (torch.randn(B, H, N, d, device="cuda", dtype=dtype).requires_grad_() for _ in range(3))
    g = torch.randn_like(q)

    def forward():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    o = forward()
    no_grad = torch.no_grad()(forward)
    return no_grad, lambda: torch.autograd.grad(o, (q, k, v), g, retain_graph=True)


def time_all(lengths, record, rounds: int = 4, rep: int = 30, only=MECHANISMS):
    for N in lengths:
        H, d, B = 12, 64, max(1, 16384 // N)
        unit = B * H * N * N * d / 1e9
        items = {"forward": [], "backward": []}
        memory = {}
        base = cudnn(N)
        items["forward"].append(("cudnn", base[0]))
        items["backward"].append(("cudnn", base[1]))
        for case in only:
            try:
                runs = passes_of(*timed_call(case, N, "cuda"))
                for name, run in zip(("forward", "backward"), runs, strict=True):
                    run()
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    run()
                    torch.cuda.synchronize()
                    memory[case, name] = (torch.cuda.max_memory_allocated() - before) / 2**20
                    items[name].append((case, graphed(run)))
            except Exception as error:
                print(f"{case} N={N} failed: {type(error).__name__} {str(error)[-300:]}", flush=True)
        for name, factor in (("forward", 4), ("backward", 10)):
            medians, samples = steady(items[name], rounds, rep)
            for case, ms in medians.items():
                ratio = medians["cudnn"] / ms
                peak = memory.get((case, name))
                record.append(dict(
                    case=case, n=N, **{"pass": name}, system="cudnn" if case == "cudnn" else "tilewise", ms=ms,
                    tflops=factor * unit / ms, ratio=ratio, peak_mib=peak, dtype="float16", heads=H, head_dim=d,
                    tokens=B * N, samples=samples[case],
                ))  # fmt: skip
            shown = (
                f"{c} {t:.3f} ms {factor * unit / t:.0f} TF {medians['cudnn'] / t:.2f}" for c, t in medians.items()
            )
            print(f"{name:8s} N={N}: {'; '.join(shown)}", flush=True)
        items = None
        torch.cuda.empty_cache()


EXTRA = [("t5", 8192, BRAIN, 64, False), ("deberta", 8192, BRAIN, 64, False), ("t5", 8192, HALF, 64, True),
         ("txl", 8192, HALF, 64, True), ("t5", 8192, HALF, 128, False), ("txl", 8192, HALF, 128, False)]  # fmt: skip


def extra_call(case, N, dtype, d, causal, device):
    from tilewise import Mask

    return timed_call(case, N, device, dtype=dtype, d=d, mask=Mask.causal() if causal else None)


def time_extra(record):
    """Other dtypes, widths and causal masks beside cuDNN under the same."""
    for case, N, dtype, d, causal in EXTRA:
        base = cudnn(N, d=d, dtype=dtype, causal=causal)
        runs = passes_of(*extra_call(case, N, dtype, d, causal, "cuda"))
        for name, ours, theirs in zip(("forward", "backward"), runs, base, strict=True):
            medians, samples = steady([("cudnn", theirs), ("tilewise", graphed(ours))], 3, 25)
            ratio = medians["cudnn"] / medians["tilewise"]
            record.append(dict(case=case, n=N, **{"pass": name}, system="tilewise", ms=medians["tilewise"], ratio=ratio,
                               dtype=str(dtype)[6:], head_dim=d, causal=causal, heads=12, tokens=16384,
                               samples=samples["tilewise"], cudnn_samples=samples["cudnn"]))  # fmt: skip
            print(f"extra {case} N={N} {str(dtype)[6:]} d={d} causal={causal} {name}: {medians['tilewise']:.3f} ms, "
                  f"ratio {ratio:.2f}", flush=True)  # fmt: skip


def profile(lengths, only=MECHANISMS):
    """Microseconds of every kernel of both passes."""
    rows = []
    for N in lengths:
        for case in only:
            for name, run in zip(("forward", "backward"), passes_of(*timed_call(case, N, "cuda")), strict=True):
                times = kernel_times(run)
                rows.append(dict(n=N, case=case, **{"pass": name}, us=times))
                text = ", ".join(f"{k[:24]} {t:.0f}" for k, t in sorted(times.items(), key=lambda a: -a[1]) if t > 1)
                print(f"us {name} {case} N={N}: {text}", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", choices=("check", "time", "extra", "profile", "tune"))
    parser.add_argument("--out", default="relative_kernels.json")
    parser.add_argument("--compile-seconds", type=float, default=200)
    parser.add_argument("--lengths", default="512,2048,8192")
    parser.add_argument("--only", default=",".join(MECHANISMS))
    parser.add_argument("--checks", default="", help="only checks whose label contains this")
    arguments = parser.parse_args()
    lengths, only = [int(n) for n in arguments.lengths.split(",")], arguments.only.split(",")
    chosen = [n for n, job in enumerate(CHECKS) if arguments.checks in label(*job)]
    jobs = [
        ("time", case, N)
        for N in sorted(lengths, reverse=True)
        for case in only
        if "time" in arguments.what or "profile" in arguments.what
    ]
    if "extra" in arguments.what:
        jobs += [("extra", n) for n in range(len(EXTRA))]
    if "tune" in arguments.what:
        jobs += [("tune", *variant, N) for variant in variants(only) for N in (max(lengths), min(lengths))]
    jobs += [("check", n) for n in chosen if "check" in arguments.what]
    precompile(jobs, arguments.compile_seconds)
    import triton

    properties = torch.cuda.get_device_properties(0)
    result = dict(gpu=properties.name, torch=torch.__version__, triton=triton.__version__, cuda=torch.version.cuda,
                  time=time.strftime("%Y-%m-%d"), checks=[], timings=[], profile=[], tuned=[])  # fmt: skip
    try:
        if "time" in arguments.what:
            time_all(lengths, result["timings"], only=only)
        if "extra" in arguments.what:
            time_extra(result["timings"])
        if "profile" in arguments.what:
            result["profile"] = profile([n for n in lengths if n in (512, 2048, 8192)], only)
        if "tune" in arguments.what:
            result["tuned"] = tune((max(lengths), min(lengths)), only)
        if "check" in arguments.what:
            wrong = 0
            for n in chosen:
                name = label(*CHECKS[n])
                try:
                    budgets = check_one(CHECKS[n], "cuda")
                    bad = [b for b in budgets if not b.ok]
                    result["checks"].append(dict(case=name, ok=not bad, budgets=[vars(b) for b in budgets]))
                    wrong += bool(bad)
                    text = "; ".join(f"{b.name} {b.error:.1e}/{b.allowed:.1e} rel {b.relative:.0e}" for b in bad)
                    print("ok " if not bad else "BAD", name, text, flush=True)
                except Exception as error:
                    wrong += 1
                    result["checks"].append(dict(case=name, ok=False, error=repr(error)[-500:]))
                    print("EXC", name, repr(error)[-400:], flush=True)
            print(f"{len(chosen) - wrong} of {len(chosen)} checks within budget", flush=True)
            if wrong:
                sys.exit(1)
    finally:
        Path(arguments.out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
