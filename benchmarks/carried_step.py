"""A training step (forward and backward, no optimizer) of a 3B model with and without carried scores.

    python benchmarks/carried_step.py --out DIR

Width 2,560, 32 layers in blocks of 4, 20 query heads on 4 key heads of 128, SwiGLU 6,912, vocabulary 152,064, bf16, one
sequence, no activation checkpointing, PyTorch eager around attention. Variants share the weights and take turns in
every round. Writes DIR/carried_step.json: all samples, and peak memory above the weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from carried_blocks import CARRIED, Compiler, Job, config_of, flash_window
from carried_kernels import SHAPES, environment, prepare, shape_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tilewise.carried import TileLayout
from tilewise.carried import nn as modules
from tilewise.carried.llama import CarriedLlama, LlamaOptions
from tilewise.carried.triton import settings

START = time.time()
MODEL = {"vocabulary": 152064, "width": 2560, "layers": 32, "heads": 20, "kv_heads": 4, "hidden": 6912}


def say(*words) -> None:
    print(f"[{time.time() - START:.0f}s]", *words, flush=True)


def fused(backend: SDPBackend, window: int | None):
    """PyTorch's attention in place of ours; the carry is passed through untouched."""

    def attend(q, k, v, carry, **_):
        if window is not None:
            return flash_window(q, k, v, window), carry
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), carry

    return attend


class DenseCarry:
    """The accumulated scores of the layer before, dense."""

    def __init__(self, z):
        self.z = z


def eager(T: int, window: int | None):
    """The carry as one writes it in PyTorch: dense scores in bf16, added to the next layer's."""
    seen = torch.ones(T, T, dtype=torch.bool, device="cuda").tril()
    seen = seen if window is None else seen.triu(1 - window)
    bias = torch.zeros(T, T, dtype=torch.bfloat16, device="cuda").masked_fill(~seen, float("-inf"))

    def attend(q, k, v, carry, **_):
        groups = q.shape[1] // k.shape[1]
        z = q @ k.repeat_interleave(groups, 1).mT * q.shape[-1] ** -0.5
        if isinstance(carry, DenseCarry):  # a block starts with a carry of its own
            z = z + carry.z
        return (z + bias).softmax(-1) @ v.repeat_interleave(groups, 1), DenseCarry(z)

    return attend


@contextmanager
def variant(model: CarriedLlama, name: str, T: int, window: int | None):
    """The model with one variant's attention."""
    own = modules.carried_attention
    if name in ("cudnn", "flash"):
        backend = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[name]
        modules.carried_attention = fused(backend, window)
    elif name == "eager carry":
        modules.carried_attention = eager(T, window)
    else:
        for block in model.blocks:
            block.config = config_of(name, window)
    try:
        yield
    finally:
        modules.carried_attention = own


def build() -> CarriedLlama:
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return CarriedLlama(LlamaOptions(**MODEL))
    finally:
        torch.set_default_dtype(kept)


def release(model: CarriedLlama) -> None:
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def measure(model: CarriedLlama, label: str, args) -> dict:
    T, window = SHAPES[label]
    tokens = torch.randint(MODEL["vocabulary"], (1, T + 1), device="cuda")
    layout = TileLayout(config_of("mixed", window), T, T, device="cuda")
    names = ["none", *CARRIED, "flash" if window else "cudnn", "eager carry"]
    names = [n for n in names if n not in args.without]
    samples, memory, failed, losses = {n: [] for n in names}, {}, {}, {}

    def step() -> float:
        model.zero_grad(set_to_none=True)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        loss = model.loss(tokens, layout=layout)
        loss.backward()
        marks[1].record()
        torch.cuda.synchronize()
        losses[name] = loss.item()
        return marks[0].elapsed_time(marks[1])

    for name in names:
        release(model)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            with variant(model, name, T, window):
                first = [step(), step()] if name == "eager carry" else [step()]
            memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
            if name == "eager carry":
                # Its dense matrices leave the others no memory to keep: timed by itself.
                samples[name] = [first[1]]
        except RuntimeError as error:
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            del samples[name]
    release(model)
    rest = [n for n in names if n in samples and n != "eager carry"]
    for r in range(args.rounds + 1):
        for name in rest[:: 1 if r % 2 == 0 else -1]:
            with variant(model, name, T, window):
                ms = step()
            if r:  # in the first round the allocator takes its blocks
                samples[name].append(ms)
        if time.time() - START > args.until:
            break
    say(f"{label}: step ms, peak MiB above the weights, loss", failed or "")
    for name, x in samples.items():
        say(f"   {name:12s} {median(x):8.2f} {memory[name]:9.0f} {losses[name]:.4f}")
    return {"shape": label, "tokens": T, "window": window, "samples": samples, "peak_mib": memory, "losses": losses,
            "failed": failed}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--until", type=float, default=1e9, help="seconds after which no further measurement begins")
    parser.add_argument("--without", nargs="*", default=[], help="variants to leave out")
    parser.add_argument("--tiles", nargs="*", default=[], type=shape_of, help="such as backward=128,64,8,2")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    plans = [p for p in ("none", *CARRIED) if p not in args.without]
    settings.WIDE.update(args.tiles)
    prepare(Compiler(), [Job(p, tiles=tuple(args.tiles)) for p in plans])
    torch.manual_seed(0)
    model = build()
    result = {"environment": environment(), "model": MODEL, "parameters": sum(p.numel() for p in model.parameters())}
    result["records"] = []
    for label in SHAPES:
        if time.time() - START > args.until:
            say(f"time is up before {label}")
            break
        result["records"].append(measure(model, label, args))
        (args.out / "carried_step.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
