"""Errors of every mechanism, dtype, pass and length against an fp64 oracle, with other systems' errors beside ours.

    python benchmarks/relative_numerics.py --out numerics.json [--seconds 240] [--lengths 1024,4096,8192,16384]

Each system has a process of its own for each mechanism, so that a crash costs its rows alone; several run side by side,
ours first. One sequence, two heads × 64. A row has the relative L2 error of a tensor, its largest error, and what is
allowed: twice what dense PyTorch errs in the same dtype plus rounding. `float32-tf32` sets PyTorch's own switch, for
all systems and for what is allowed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from tilewise.bench.oracle import truth, verdict
from tilewise.bench.peers import PEERS
from tilewise.bench.relative import CASES as PUBLISHED
from tilewise.bench.systems import SYSTEMS
from tilewise.testing import CASES, Sizes

DTYPES = ("float16", "bfloat16", "float32", "float32-tf32")
COMMON = ("t5", "shaw", "deberta_v3", "transformer_xl")
MECHANISMS = {
    **{name: PUBLISHED[name] for name in COMMON}, **{n: CASES[n] for n in ("alibi", "wavlm", "inkling", "vits")},
    "shaw_values": CASES["shaw"],
}  # fmt: skip
RUNS = {
    "tilewise": tuple(MECHANISMS),
    "eager": COMMON,
    "sdpa-bias": ("t5", "shaw", "deberta_v3"),
    "nemo-sdpa": ("transformer_xl",),
    "flex": COMMON,
    "flashdeberta": ("deberta_v3",),
    "disentangled-flash": ("deberta_v3",),
}
"""System ↦ the mechanisms that it can express."""

DRAWS = {**{("alibi", label): 8 for label in DTYPES}, ("t5", "float32-tf32"): 8}
"""How many draws of the inputs a mechanism is judged by: the largest errors of all, ours and dense PyTorch's.

Few numbers decide here, and they are sums that nearly cancel. ALiBi's gradient is one number a head: in fp32 at 1,024
tokens dense PyTorch's error of a head was 5e-6 … 2.9e-4 in 24 draws, 9e-5 as a rule (root mean square). Of T5's table
the two outermost buckets hold nearly all scores: with TF32 at 4,096 tokens dense PyTorch's largest error was 1.3e-3 …
5.2e-3 in four draws.
"""


def inputs(case, sizes, dtype, device, seed=0):
    """(tensors by name, dO), as :mod:`tilewise.testing` scales them, drawn on the device."""
    torch.manual_seed(seed)
    shape = (sizes.B, sizes.H, sizes.Tq, sizes.d)
    deviation = {"q": sizes.d**-0.5 / case.scale(sizes.d), "k": 1.0, "v": 1.0}
    x = {
        name: (torch.randn(s, device=device) * deviation.get(name, 0.5)).to(dtype)
        for name, s in {"q": shape, "k": shape, "v": shape, **case.shapes(sizes)}.items()
    }
    return x, torch.randn(shape, device=device).to(dtype)


def rows_of(system, name, label, N, device, builders):
    """One row a tensor of both passes."""
    case, sizes = MECHANISMS[name], Sizes(1, 2, 2, N, N, 64, 64, None, published=True)
    dtype = getattr(torch, label.partition("-")[0])
    if device == "cuda":
        # Sets matmul.fp32_precision too; FlexAttention's compiler refuses to run where that alone was set.
        torch.set_float32_matmul_precision("high" if label.endswith("tf32") else "highest")
    exact, got = [], []
    for seed in range(DRAWS.get((name, label), 1)):
        x, upstream = inputs(case, sizes, dtype, device, seed)
        exact.append(truth(case, sizes, x, upstream))
        leaves = {key: value.requires_grad_() for key, value in x.items()}
        o = builders[system](case, sizes, leaves)()
        grads = torch.autograd.grad(o, list(leaves.values()), upstream)
        got.append({"o": o.detach(), **{f"d{key}": g for key, g in zip(leaves, grads, strict=True)}})
    for tensor in got[0]:
        low = max(draw.low_error[tensor] for draw in exact)
        found = [verdict(mine[tensor], draw.exact[tensor], low) for mine, draw in zip(got, exact, strict=True)]
        worst = max(found, key=lambda v: math.inf if math.isnan(v["error"]) else v["error"] / v["allowed"])
        worst |= {rule: all(v[rule] for v in found) for rule in ("published", "budget")}
        yield dict(system=system, case=name, dtype=label, n=N, tensor=tensor, draws=len(found),
                   **{"pass": "forward" if tensor == "o" else "backward"}, **worst)  # fmt: skip


def compile_ours(name, label, N):
    """Both passes of ours on tensors without memory, for :func:`relative_ahead.perform`."""
    from relative_cases import passes_of

    from tilewise import Mask, Options
    from tilewise.call import Call
    from tilewise.terms import flatten, lower

    case, sizes = MECHANISMS[name], Sizes(1, 2, 2, N, N, 64, 64, None, published=True)
    x, do = inputs(case, sizes, getattr(torch, label.partition("-")[0]), "meta")
    content, ports = lower(x["q"], flatten(case.build(x, sizes)), biases=True)
    options = Options(fp32="tf32" if label.endswith("tf32") else "ieee")
    call = Call(content, x["k"], x["v"], tuple(ports), Mask(), case.scale(64), 0, options=options)
    for run in passes_of(call, do):
        run()


def child(system, lengths, dtypes, device, cases):
    """Print one JSON line a row, shortest sequences first."""
    builders = {**SYSTEMS, **PEERS}
    if device == "cpu":
        builders["tilewise"] = SYSTEMS["tilewise-blocked"]
    for N in lengths:
        for name in (each for each in RUNS[system] if each in cases):
            for label in dtypes:
                try:
                    for row in rows_of(system, name, label, N, device, builders):
                        print(json.dumps(row), flush=True)
                except Exception as error:
                    text = f"{type(error).__name__}: {error}"[:300]
                    print(json.dumps(dict(system=system, case=name, dtype=label, n=N, error_text=text)), flush=True)
                    if isinstance(error, torch.AcceleratorError):
                        raise
                if device == "cuda":
                    torch.cuda.empty_cache()


def table(rows) -> list[str]:
    """The worst relative error by mechanism, dtype, pass and system, and the share of ours within what is allowed."""
    lines = []
    keys = sorted({(r["case"], r["dtype"], r["pass"], r["n"]) for r in rows if "pass" in r})
    for case, dtype, pass_, n in keys:
        mine = [r for r in rows if (r["case"], r["dtype"], r.get("pass"), r["n"]) == (case, dtype, pass_, n)]
        worst = {}
        for r in mine:
            worst[r["system"]] = max(worst.get(r["system"], 0.0), r["relative"])
        missed = sum(not (r["budget"] and r["published"]) for r in mine if r["system"] == "tilewise")
        shown = ", ".join(f"{system} {error:.1e}" for system, error in worst.items())
        lines.append(f"{case:<15}{dtype:<13}{pass_:<9}{n:>6}  {shown}{f'  MISSED {missed}' if missed else ''}")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="relative_numerics.json")
    parser.add_argument("--lengths", default="1024,4096,8192,16384")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--systems", default=",".join(RUNS))
    parser.add_argument("--cases", default=",".join(MECHANISMS))
    parser.add_argument("--seconds", type=float, default=360, help="of everything, compiling included")
    parser.add_argument("--compile-seconds", type=float, default=120)
    parser.add_argument("--processes", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)), help="at a time")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    end = time.time() + arguments.seconds
    lengths, dtypes = [int(n) for n in arguments.lengths.split(",")], arguments.dtypes.split(",")
    cases = arguments.cases.split(",")
    if unknown := [name for name in cases if name not in MECHANISMS]:
        parser.error(f"--cases has {unknown[0]!r}; expected some of {', '.join(MECHANISMS)}")
    if arguments.child:
        return child(arguments.child, lengths, dtypes, arguments.device, cases)
    if arguments.device == "cuda":
        from relative_ahead import precompile

        jobs = [("numerics", name, label, N) for N in lengths for name in cases for label in dtypes]
        precompile(jobs, arguments.compile_seconds)
    chosen = [(system, case) for system in arguments.systems.split(",") for case in RUNS[system] if case in cases]
    own = [arguments.lengths, "--dtypes", arguments.dtypes, "--device", arguments.device]

    def finished(job):
        """(lines, how it ended) of one process."""
        words = [sys.executable, __file__, "--child", job[0], "--cases", job[1], "--lengths", *own]
        limit = end - time.time()
        if limit < 5.0:
            return [], "no time left"
        try:
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=limit)
            out, how = done.stdout, f"exit status {done.returncode}"
        except subprocess.TimeoutExpired as error:
            out, how = (error.stdout or b"").decode(), f"stopped after {limit:.0f} s"
        return [line for line in out.splitlines() if line.startswith("{") and line.endswith("}")], how

    rows, cut = [], False
    with ThreadPoolExecutor(arguments.processes) as pool:
        for (system, case), (lines, how) in zip(chosen, pool.map(finished, chosen), strict=True):
            rows += [json.loads(line) for line in lines]
            cut |= system == "tilewise" and how != "exit status 0"
            print(f"{system}, {case}: {len(lines)} rows, {how}, {end - time.time():.0f} s left", flush=True)
    for system, text in sorted({(row["system"], row["error_text"]) for row in rows if "error_text" in row}):
        print(f"  {system}: {text}", flush=True)
    print("\n".join(table(rows)), flush=True)
    from rounds import environment

    Path(arguments.out).write_text(json.dumps({**environment(arguments.device), "rows": rows}))
    if cut or not rows or any(r["system"] == "tilewise" and not (r.get("budget") and r.get("published")) for r in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
