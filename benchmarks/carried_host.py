"""What the host takes for a block of four layers of carried attention, forward and backward, by plan.

    python benchmarks/carried_host.py --out DIR [--rounds 200] [--device cuda] [--tokens 4096]

On a GPU the host enqueues while it sleeps, so nothing waits for kernels; beside the blocks it times what a carry adds
by itself: the mean of keys, and what `auto` reads of the allocator. Without a GPU Triton's front end meets a launcher
that starts nothing: Python, autograd and PyTorch's operators alone; kernels are compiled for sm_90 first. Plans take
turns in every round. Writes DIR/carried_host.json with all samples in ms; prints medians and the fastest twentieths.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from carried_blocks import CARRIED, Compiler, Job, carried_block, config_of, made_with, tensors

from tilewise.carried import CarriedConfig, TileLayout
from tilewise.carried.policy import free_memory
from tilewise.carried.triton import launch as kernels

TESTS = Path(__file__).resolve().parent.parent / "tests/carried"
PLANS = ("none", "stored", "mixed", "auto")


def start_nothing() -> None:
    """A driver for Triton that compiles for sm_90 and whose launches return at once; kernels run on any device."""
    sys.path.insert(0, str(TESTS))
    import triton
    from direct_launches import Driver

    class Launcher:
        def __init__(self, src, metadata) -> None: ...

        def __call__(self, *args) -> None: ...

    Driver.launcher_cls = Launcher
    triton.runtime.driver.set_active(Driver())
    kernels.refusal = lambda *_: None


def config_for(plan: str) -> CarriedConfig:
    return CarriedConfig(impl="triton") if plan == "auto" else config_of(plan)


def blocks(T: int, device: str, rounds: int, idle: Callable[[], None]) -> dict[str, dict[str, list[float]]]:
    """Of every plan the host's ms forward and backward; `idle` comes before each block."""
    q, k, v, G = tensors(T, device)
    leaves = [*q, *k, *v]
    runs = {p: carried_block(config_for(p), q, k, v, TileLayout(config_for(p), T, T, device=device)) for p in PLANS}
    samples = {plan: {"forward": [], "backward": []} for plan in runs}
    for n in range(rounds + 3):
        for plan, run in runs.items():
            idle()
            began = time.perf_counter()
            outputs = run()
            middle = time.perf_counter()
            torch.autograd.grad(outputs, leaves, G)
            ended = time.perf_counter()
            del outputs
            if n >= 3:
                samples[plan]["forward"].append((middle - began) * 1e3)
                samples[plan]["backward"].append((ended - middle) * 1e3)
    return samples


def parts(T: int, device: str, rounds: int, idle: Callable[[], None]) -> dict[str, list[float]]:
    """Host's ms of what a carry adds beside launches."""
    k = tensors(T, device)[1][0]
    layout = TileLayout(config_for("stored"), T, T, device=device)
    todo = {"mean of keys": lambda: layout.mean(k.detach()), "free memory": lambda: free_memory(k.device)}
    samples: dict[str, list[float]] = {name: [] for name in todo}
    for _ in range(rounds):
        idle()
        for name, run in todo.items():
            began = time.perf_counter()
            run()
            samples[name].append((time.perf_counter() - began) * 1e3)
    return samples


def fastest(samples: list[float]) -> float:
    """The fastest twentieth: what others on the processor do only adds."""
    return sorted(samples)[len(samples) // 20]


def asleep() -> None:
    torch.cuda.synchronize()
    torch.cuda._sleep(30_000_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, help="4096 on a GPU, else 128: what is computed all the same is small")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    on_gpu = args.device == "cuda"
    tokens = args.tokens or (4096 if on_gpu else 128)
    if on_gpu:
        compiler = Compiler()
        compiler([Job(plan) for plan in ("none", *CARRIED)])
        compiler.close()
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
        start_nothing()
    idle = asleep if on_gpu else lambda: None
    gc.disable()
    found = {"blocks": blocks(tokens, args.device, args.rounds, idle)}
    found["parts"] = parts(tokens, args.device, args.rounds, idle)
    for plan, each in found["blocks"].items():
        ms = [f"{name} {median(x):.3f} ({fastest(x):.3f})" for name, x in each.items()]
        print(f"{plan:14s} ms, median (fastest twentieth):", *ms, flush=True)
    for name, x in found["parts"].items():
        print(f"{name:14s} us: {1e3 * median(x):.1f} ({1e3 * fastest(x):.1f})", flush=True)
    record = {"environment": made_with("carried_host", args.device), "tokens": tokens, **found}
    (args.out / "carried_host.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
