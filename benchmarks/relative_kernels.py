"""The Triton attention kernels on a GPU: numerics of every case, and times beside attention without a term.

    python benchmarks/relative_kernels.py check time --out results.json

`check` compares O, lse and all gradients with the fp64 oracle; `time` measures both passes of T5, Shaw, DeBERTa-v3 and
Transformer-XL (12 heads × 64, 16,384 tokens a batch, fp16, CUDA graphs, L2 flushed) in rounds interleaved with cuDNN's
attention without any term. Kernels are compiled beforehand by many processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from relative_ahead import precompile
from relative_cases import CHECKS, EXTRA, HALF, MECHANISMS, extra_call, label, passes_of, timed_call
from relative_check import run_checks
from relative_tiles import kernel_times, tune, variants


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
    """cuDNN's forward and backward without a term, as CUDA graphs like ours."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from tilewise.bench.timing import backward_of, captured

    B = max(1, tokens // N)
    q, k, v = (torch.randn(B, H, N, d, device="cuda", dtype=dtype).requires_grad_() for _ in range(3))
    g = torch.randn_like(q)

    def forward():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    passes = captured(lambda: torch.no_grad()(forward)), captured(lambda: backward_of(forward, (q, k, v), g))
    for _, reason in passes:
        if reason is not None:
            raise RuntimeError(f"cuDNN's attention cannot be captured: {reason}")
    return tuple(run for run, _ in passes)


def time_all(lengths, record, rounds: int = 4, rep: int = 30, only=MECHANISMS, until: float = float("inf")) -> int:
    """How many cases failed or had no time left; the others' times are added to `record`."""
    wrong = 0
    for N in lengths:
        if time.time() > until:
            print(f"N={N}: no time left", flush=True)
            wrong += len(only)
            continue
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
                wrong += 1
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
    return wrong


def time_extra(record, until: float = float("inf")) -> int:
    """Other dtypes, widths and causal masks beside cuDNN under the same; how many failed or had no time left."""
    wrong = 0
    for case, N, dtype, d, causal in EXTRA:
        name = f"extra {case} N={N} {str(dtype)[6:]} d={d} causal={causal}"
        if time.time() > until:
            wrong += 1
            print(f"{name}: no time left", flush=True)
            continue
        try:
            base = cudnn(N, d=d, dtype=dtype, causal=causal)
            runs = passes_of(*extra_call(case, N, dtype, d, causal, "cuda"))
            for pass_, ours, theirs in zip(("forward", "backward"), runs, base, strict=True):
                medians, samples = steady([("cudnn", theirs), ("tilewise", graphed(ours))], 3, 20)
                ratio = medians["cudnn"] / medians["tilewise"]
                record.append(dict(case=case, n=N, **{"pass": pass_}, system="tilewise", ms=medians["tilewise"],
                                   ratio=ratio, dtype=str(dtype)[6:], head_dim=d, causal=causal, heads=12,
                                   tokens=16384, samples=samples["tilewise"],
                                   cudnn_samples=samples["cudnn"]))  # fmt: skip
                print(f"{name} {pass_}: {medians['tilewise']:.3f} ms, ratio {ratio:.2f}", flush=True)
        except Exception as error:
            wrong += 1
            print(f"{name} failed: {type(error).__name__} {str(error)[-300:]}", flush=True)
        torch.cuda.empty_cache()
    return wrong


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
    parser.add_argument("--seconds", type=float, default=float("inf"), help="nothing begins later than this")
    arguments = parser.parse_args()
    until = time.time() + arguments.seconds
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
    wrong = 0
    try:
        if "time" in arguments.what:
            wrong += time_all(lengths, result["timings"], only=only, until=until)
        if "extra" in arguments.what:
            wrong += time_extra(result["timings"], until)
        if "profile" in arguments.what:
            result["profile"] = profile([n for n in lengths if n in (512, 2048, 8192)], only)
        if "tune" in arguments.what:
            result["tuned"] = tune((max(lengths), min(lengths)), only)
        if "check" in arguments.what:
            result["checks"] = run_checks(chosen, until)
            failed = sum(not check["ok"] for check in result["checks"])
            print(f"{len(chosen) - failed} of {len(chosen)} checks within budget", flush=True)
            wrong += failed
    finally:
        Path(arguments.out).write_text(json.dumps(result))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
