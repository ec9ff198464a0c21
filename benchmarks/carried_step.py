"""Where the time of a 3B model's training step goes: host, GPU and what lies between, with and without carried scores.

    python benchmarks/carried_step.py --out DIR/carried_step.json --seconds 60

The model and the systems are those of ``tilewise bench run --set carried``. For each system: ms of a step at 4,096
tokens; ms of the same step at 128 tokens, where the GPU has next to nothing to do, so that this is what the host takes;
and from one traced step the GPU's busy time (the union of its kernels), the gaps between kernels, and the kernels that
take most. Steps are traced once all systems have been timed, so that nothing of the profiler is left while one is.
Before a system is timed its loss and the norm of its gradient are taken, and compared at the end: without a carry with
PyTorch's attention, and plans with one another.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median

import torch
from carried_blocks import Compiler, Job, made_with
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tilewise.bench.carried_systems import SYSTEMS, Shape, attend_of, config_of, model_of, substituted
from tilewise.carried import TileLayout

START = time.time()
MODEL = {"heads": 20, "kv_heads": 4, "head_dim": 128, "hidden": 6912, "vocabulary": 152064}
TINY = {"heads": 4, "kv_heads": 2, "head_dim": 16, "hidden": 96, "vocabulary": 128}
GROUPS = (("attend", "_keys", "_from_e", "row_", "sum_heads", "cudnn", "flash", "fmha", "sdpa"),
          ("gemm", "cutlass", "nvjet", "xmma", "matmul"))  # fmt: skip


def say(*words) -> None:
    print(f"[{time.time() - START:.0f}s]", *words, flush=True)


class Step:
    """() ↦ loss and gradients of one system's training step on `tokens` tokens."""

    def __init__(self, system: str, layers: int, tokens: int, device: str) -> None:
        sizes = MODEL if device == "cuda" else TINY
        self.shape = shape = Shape(tokens=tokens, window=None, layers=layers, **sizes)
        self.system, self.device = system, device
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model = model_of(system, shape, dtype, device, 0)
        self.parameters = list(self.model.parameters())
        self.attend, self.config = attend_of(system, shape, dtype, device), config_of(system, shape)
        self.one = torch.ones((), device=device)
        self.inputs: dict[int, tuple] = {}

    def __call__(self, tokens: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        if tokens not in self.inputs:
            g = torch.Generator(self.device).manual_seed(0)
            ids = torch.randint(self.shape.vocabulary, (1, tokens + 1), device=self.device, generator=g)
            self.inputs[tokens] = ids, TileLayout(self.config, tokens, tokens, device=self.device)
        ids, layout = self.inputs[tokens]
        with substituted(self.attend):
            loss = self.model.loss(ids, layout=layout)
        return loss, torch.autograd.grad(loss, self.parameters, self.one)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(step: Step, tokens: int, rounds: int) -> list[float]:
    samples = []
    for _ in range(rounds):
        synchronize(step.device)
        start = time.perf_counter()
        step(tokens)
        synchronize(step.device)
        samples.append((time.perf_counter() - start) * 1e3)
    return samples


def traced(step: Step, tokens: int) -> dict:
    """One step's kernels: busy and idle ms, and ms by kernel. Only the GPU is traced, which costs the host little."""
    synchronize(step.device)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step(tokens)
        synchronize(step.device)
    found = [e for e in trace.events() if e.device_type == DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end) for e in found)
    if not spans:
        return {}
    busy, gaps, end = 0.0, [], spans[0][0]
    for a, b in spans:
        if a > end:
            gaps.append(a - end)
        busy += max(0.0, b - max(a, end))
        end = max(end, b)
    by_name, count = Counter(), Counter()
    for e in found:
        by_name[e.name[:60]] += e.time_range.end - e.time_range.start
        count[e.name[:60]] += 1
    groups = Counter()
    for name, us in by_name.items():
        low = name.lower()
        kind = next((n for n, words in zip(("attention", "products"), GROUPS, strict=True)
                     if any(w in low for w in words)), "the rest")  # fmt: skip
        groups[kind] += us
    wide = [g for g in gaps if g > 5.0]
    return {
        "span_ms": (end - spans[0][0]) / 1e3, "busy_ms": busy / 1e3, "gaps_ms": sum(gaps) / 1e3,
        "gaps_over_5us": len(wide), "ms_in_gaps_over_5us": sum(wide) / 1e3, "widest_gap_us": max(gaps, default=0.0),
        "kernels": len(found), "groups_ms": {n: us / 1e3 for n, us in groups.most_common()},
        "kernels_ms": {n: [us / 1e3, count[n]] for n, us in by_name.most_common(25)},
    }  # fmt: skip


def allocations(device: str) -> int:
    return torch.cuda.memory_stats()["num_device_alloc"] if device == "cuda" else 0


def measure(step: Step, args) -> dict:
    """One system's record, without a trace."""
    loss, grads = step(args.tokens)
    norm = torch.stack([g.float().norm() for g in grads]).norm()
    record = {"system": step.system, "loss": loss.item(), "norm": norm.item()}
    del loss, grads
    step(args.tokens)
    step(args.short)
    before = allocations(args.device)
    record["samples"] = timed(step, args.tokens, args.rounds)
    record["device_allocations"] = allocations(args.device) - before
    record["host_samples"] = timed(step, args.short, args.rounds)
    record["ms"], record["host_ms"] = median(record["samples"]), median(record["host_samples"])
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return record


def disagreements(records: list[dict]) -> list[str]:
    """Systems that compute one function have one loss, and one gradient as far as bf16 keeps it."""
    wrong = []
    for group in (
        ("plain", "plain-flash", "plain-flex", "no-carry"),
        tuple(s for s in SYSTEMS if s.startswith("tilewise")),
    ):
        members = [r for r in records if r["system"] in group]
        for r in members[1:]:
            for name, bound in (("loss", 5e-3), ("norm", 3e-2)):
                a, b = r[name], members[0][name]
                if not abs(a - b) <= bound * abs(b):
                    wrong.append(f"{name} of {r['system']} is {a:.5g}, of {members[0]['system']} {b:.5g}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/carried_step.json"))
    parser.add_argument("--systems", nargs="*", default=["plain", "no-carry", "tilewise"], choices=SYSTEMS)
    parser.add_argument("--seconds", type=float, default=1e9, help="no further system begins after so many")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--short", type=int, default=128, help="tokens of the step that the host takes longer for")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try the program")
    args = parser.parse_args()
    if args.device == "cuda":
        plans = dict.fromkeys({"no-carry": "none", "tilewise": "stored"}.get(s, s.removeprefix("tilewise-"))
                              for s in args.systems if s.startswith("tilewise") or s == "no-carry")  # fmt: skip
        compiled = Compiler()([Job(plan, fill=fill) for plan in plans for fill in (1e9, 0.0)])
        say(f"{len(compiled)} kernels compiled", [why for _, _, why in compiled if why] or "")
    records, steps = [], []
    for system in args.systems:
        if time.time() - START > args.seconds:
            say("time is up before", system)
            break
        steps.append(Step(system, args.layers, args.tokens, args.device))
        # Later collections need not look at what lives until the end.
        gc.collect()
        gc.freeze()
        records.append(measure(steps[-1], args))
        say(system, f"{records[-1]['ms']:.1f} ms, host {records[-1]['host_ms']:.1f} ms")
    for step, record in zip(steps, records, strict=True):
        record["trace"] = traced(step, args.tokens) if args.device == "cuda" else {}
    wrong = disagreements(records)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"environment": made_with("carried_step", args.device), "tokens": args.tokens, "layers": args.layers}
    args.out.write_text(json.dumps(result | {"records": records, "wrong": wrong}, indent=1))
    for r in records:
        if r["trace"]:
            say(f"{r['system']}: kernels that take most, ms and times")
            for name, (ms, count) in list(r["trace"]["kernels_ms"].items())[:12]:
                print(f"   {ms:8.2f} {count:5d}  {name}")
    print(f"\n{'':20s}      ms  host ms  busy ms  gaps ms  (> 5 us)  widest us  kernels  cudaMalloc  by kind")
    for r in records:
        t = r["trace"]
        row = [f"{r['system']:20s}{r['ms']:8.1f} {r['host_ms']:8.1f}"]
        if t:
            kinds = ", ".join(f"{n} {ms:.1f}" for n, ms in t["groups_ms"].items())
            row.append(f" {t['busy_ms']:8.1f} {t['gaps_ms']:8.1f} {t['gaps_over_5us']:9d} {t['widest_gap_us']:10.0f}"
                       f" {t['kernels']:8d} {r['device_allocations']:11d}  {kinds}")  # fmt: skip
        print("".join(row))
    for text in wrong:
        print("WRONG:", text)
    sys.exit(bool(wrong) or len(records) < len(args.systems))


if __name__ == "__main__":
    main()
