"""The warp-specialised forward in several shapes: checks, then times beside cuDNN and the forward it may replace.

    python benchmarks/relative_specialised.py --out relative_specialised.json --seconds 60
    python benchmarks/relative_specialised.py --only-compile          # no GPU

A barrier in the wrong place makes a kernel wait for ever, so checks and times run in processes of their own that end
themselves after some seconds; a shape whose first check fails or does not end gets no others and no times. CUDA graphs,
L2 flushed, rounds interleaved with cuDNN's attention without a term under the same mask; 12 heads, 16,384 tokens, fp16.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

import torch
from processes import isolated
from relative_ahead import precompile
from relative_cases import BRAIN, HALF, sizes, timed_call

SHAPES = {
    128: {"2x128": (2, 128, 3, 240), "2x128 ordered": (2, 128, 3, 240, True), "3x64": (3, 64, 4, 160),
          "2x128 resident": (2, 128, 3, 240, False, True), "3x64 ordered": (3, 64, 4, 160, True),
          "2x128 two stages": (2, 128, 2, 240)},
    64: {"3x128": (3, 128, 4, 160), "3x128 ordered": (3, 128, 4, 160, True), "2x128": (2, 128, 4, 240),
         "2x128 ordered": (2, 128, 4, 240, True), "3x128 resident": (3, 128, 4, 160, False, True)},
}  # fmt: skip
"""Width ↦ name ↦ fields of :class:`tilewise.triton.specialised.Shape`; names are groups × keys of a tile."""

CHECKS = [
    ("t5", "none", HALF, dict(N=1100, Tk=1152)), ("none", "none", HALF, dict(N=1100, Tk=1152)),
    ("t5", "none", BRAIN, dict(N=1152, Tk=1280, Hk=2)),
    *(("t5", mask, HALF, dict(N=1100))
      for mask in ("causal", "window", "lengths", "packed", "holes", "causal_padding")),
    ("none", "causal", HALF, dict(N=1100)), ("t5", "none", HALF, dict(N=1500, Tk=1100, offset=100)),
    ("t5", "none", HALF, dict(N=8192, B=1, H=1)),
]  # fmt: skip
PLAIN, MASKED = (0, 1, 2), ("2x128", "2x128 ordered")
"""The checks of every shape, and the shapes that have all of them and are timed under a mask."""

CELLS = [("t5", 128, 8192, False), ("t5", 64, 8192, False), ("none", 128, 8192, False), ("none", 64, 8192, False),
         ("t5", 128, 2048, False), ("t5", 64, 2048, False), ("none", 128, 2048, False), ("none", 64, 2048, False),
         ("t5", 128, 8192, True), ("t5", 64, 8192, True)]  # fmt: skip
"""(case, width, tokens, causal), the most important first."""

CHECK_SECONDS, CELL_SECONDS = 15, 30


def forward_of(call, o, lse, shape=None):
    """The forward with a shape, or that of :mod:`tilewise.triton.overlapped`, as a closure."""
    from tilewise.triton import overlapped, plan, specialised

    def forward():
        layout = plan.Layout(call)
        if reasons := overlapped.unsuited(layout):
            raise ValueError("; ".join(reasons))
        if shape is None:
            overlapped.forward(layout, o, lse)
        else:
            specialised.forward(layout, o, lse, specialised.Shape(*shape))

    return forward


def outputs_of(call, fill: float = float("nan")):
    B, H, Tq, d = call.q.shape
    o = torch.full((B, Tq, H, d), fill, dtype=call.q.dtype, device=call.q.device).transpose(1, 2)
    return o, torch.full((B, H, Tq), fill, device=call.q.device)


def ends_itself(seconds: int) -> None:
    """Let the system end this process after so many seconds, also while it waits for the GPU; 0: no longer."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)


def checked_call(width: int, n: int, device: str):
    from relative_checks import call_of

    case, mask, dtype, fields = CHECKS[n]
    return call_of(case, sizes(d=width, **fields), mask, dtype, device)


def check(width: int, name: str, n: int, device: str = "cuda") -> list[dict]:
    """The budgets of O and lse, in a process that ends itself; raises where something is wrong."""
    from tilewise.reference import attention_reference
    from tilewise.terms import Port
    from tilewise.testing import error_budget

    ends_itself(CHECK_SECONDS)
    call = checked_call(width, n, device)
    results = [outputs_of(call) for _ in range(2)]
    for o, lse in results:
        forward_of(call, o, lse, SHAPES[width][name])()
    (o, lse), again = results
    for one, two in zip((o, lse), again, strict=True):
        assert torch.equal(one, two), "two runs differ"

    def dense(dtype):
        to = lambda x: x.to(dtype)  # noqa: E731
        ports = [Port(p.kind, p.rows, to(p.table), None) for p in call.ports]
        return attention_reference(to(call.q), to(call.k), to(call.v), ports, call.mask, call.scale, call.offset)

    exact_o, exact_lse = dense(torch.float64)
    low_o, low_lse = dense(call.q.dtype)
    seen = torch.isfinite(exact_lse)
    assert torch.equal(torch.isfinite(lse), seen), "lse is infinite in the wrong places"
    flat = lambda x: x.masked_fill(~seen, 0.0).to(call.q.dtype)  # noqa: E731
    budgets = [error_budget("o", o, low_o, exact_o),
               error_budget("lse", flat(lse), flat(low_lse), exact_lse.masked_fill(~seen, 0.0))]  # fmt: skip
    torch.cuda.empty_cache()
    ends_itself(0)
    return [vars(b) | {"ok": b.ok} for b in budgets]


def timed(case: str, width: int, N: int, causal: bool, names: list[str]) -> tuple[dict, dict]:
    """Medians and samples of cuDNN, of the forward that may be replaced ("overlapped") and of the shapes, ms."""
    from relative_kernels import cudnn, graphed, steady

    ends_itself(CELL_SECONDS)
    items = [("cudnn", cudnn(N, d=width, causal=causal)[0])]
    call = timed_cell(case, width, N, causal, "cuda")
    for name in ("overlapped", *names):
        print(f"{case} d={width} N={N} causal={causal}: {name}", flush=True)
        items.append((name, graphed(forward_of(call, *outputs_of(call), SHAPES[width].get(name)))))
        torch.cuda.synchronize()
    found = steady(items, 4, 12)
    ends_itself(0)
    return found


def timed_cell(case: str, width: int, N: int, causal: bool, device: str):
    from tilewise import Mask

    return timed_call(case, N, device, d=width, mask=Mask.causal() if causal else None)[0]


def names_of(width: int, causal: bool) -> list[str]:
    return [name for name in SHAPES[width] if not causal or name in MASKED]


def perform(what: str, *rest) -> None:
    """Launch on meta tensors what ("check", width, name, n) or ("time", case, width, N, causal, name) launches."""
    if what == "check":
        width, name, n = rest
        call = checked_call(width, n, "meta")
    else:
        *cell, name = rest
        width, call = cell[1], timed_cell(*cell, "meta")
    forward_of(call, *outputs_of(call), SHAPES[width].get(name))()


def plan_checks() -> tuple[list[tuple], list[tuple]]:
    """(width, name, check): the first check of every shape, and all others."""
    every = [(width, name) for width, shapes in SHAPES.items() for name in shapes]
    others = [(width, name, n) for width, name in every for n in range(1, len(CHECKS)) if n in PLAIN or name in MASKED]
    return [(width, name, 0) for width, name in every], others


def run_checks(until: float) -> list[dict]:
    """Records of all checks; shapes whose first check fails are left out of the others."""
    records = []

    def run(jobs, until):
        for (width, name, n), budgets, why in isolated(check, jobs, until, 8):
            ok = why is None and all(b["ok"] for b in budgets)
            case, mask, dtype, fields = CHECKS[n]
            label = f"{case} {mask} {str(dtype)[6:]} {fields}"
            records.append(dict(width=width, shape=name, case=label, ok=ok, budgets=budgets, error=why))
            print(f"{'ok ' if ok else 'BAD'} d={width} {name}: {label} {'' if ok else why or budgets}", flush=True)

    first, others = plan_checks()
    run(first, min(until, time.time() + CHECK_SECONDS + 10))
    good = {(r["width"], r["shape"]) for r in records if r["ok"]}
    run([job for job in others if job[:2] in good], until)
    return records


def run_times(result: dict, good: set, until: float) -> int:
    """Adds the times of every cell to the result; how many cells failed or had no time left."""
    jobs = [(*cell, [n for n in names_of(cell[1], cell[3]) if (cell[1], n) in good]) for cell in CELLS]
    wrong = 0
    for (case, width, N, causal, _), found, why in isolated(timed, jobs, until, 1):
        cell = f"{case} d={width} N={N}{' causal' if causal else ''}"
        if why is not None:
            wrong += 1
            print(f"{cell}: {why}", flush=True)
            continue
        medians, samples = found
        for name, ms in medians.items():
            ratio = medians["cudnn"] / ms
            row = dict(case=case, head_dim=width, n=N, causal=causal, system=name, ms=ms, ratio=ratio)
            result["timings"].append({**row, "samples": samples[name], "heads": 12, "tokens": 16384})
        shown = (f"{name} {ms:.3f} ms {medians['cudnn'] / ms:.3f}" for name, ms in medians.items())
        print(f"{cell}: {'; '.join(shown)}", flush=True)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="relative_specialised.json")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--compile-seconds", type=float, default=40.0)
    parser.add_argument("--only-compile", action="store_true", help="compile everything for sm_90 and stop (no GPU)")
    arguments = parser.parse_args()
    first, others = plan_checks()
    jobs = [("specialised", "check", *job) for job in first + others]
    jobs += [("specialised", "time", *cell, name) for cell in CELLS
             for name in ("overlapped", *names_of(cell[1], cell[3]))]  # fmt: skip
    failed = precompile(jobs, arguments.compile_seconds)
    if arguments.only_compile:
        sys.exit(1 if failed else 0)
    import triton

    start = time.time()
    result = dict(torch=torch.__version__, triton=triton.__version__, cuda=torch.version.cuda,
                  shapes={str(width): shapes for width, shapes in SHAPES.items()},
                  time=time.strftime("%Y-%m-%d"), checks=[], timings=[])  # fmt: skip
    wrong = 1
    try:
        result["checks"] = run_checks(start + 0.5 * arguments.seconds)
        bad = {(r["width"], r["shape"]) for r in result["checks"] if not r["ok"]}
        good = {(r["width"], r["shape"]) for r in result["checks"]} - bad
        missing = len(first) + len(others) - len(result["checks"])
        wrong = len(bad) + missing + run_times(result, good, start + arguments.seconds)
        result["gpu"] = torch.cuda.get_device_properties(0).name
        right = sum(r["ok"] for r in result["checks"])
        print(f"{right} of {len(first) + len(others)} checks within budget, {time.time() - start:.0f} s", flush=True)
    finally:
        Path(arguments.out).write_text(json.dumps(result))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
