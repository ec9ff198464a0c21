"""What Attention Residuals cost end to end: whole steps of a layer stack with real attention and MLP, random weights.

    python benchmarks/depth_overhead.py [decode] [prefill] [training] [wide] --out DIR [--limit SECONDS]

Kimi K3's residual (d = 7,168, 93 decoder layers, blocks of 12, 9 sources) on layers scaled to fit one GPU: 64 query
heads on 8 key heads of 128 and a SwiGLU of 18,432, the weights and key-value caches of 4 layers used in turn, so that
every layer still reads its weights from memory. Decode: 128 sequences at a context of 2,048, one token each, in a CUDA
graph. Prefill: one sequence of 32,768 tokens through a third of the layers, 31 in blocks of 4, because all 93 take 8 s:
as many sources, whose reading is shared by 8 sublayers instead of 24, so that the overhead is an upper bound of the 93
layers'. Training: 27 layers of d = 2,304 (the paper's 48B model's widths, blocks
of 6 sublayers), and wide, as autograd launches it: 20 layers of Kimi K3's widths with weights of their own, 8 blocks of
5 sublayers; 2 sequences of 4,096, forward and backward without optimizer, embedding or head, which would only hide the
residual's share.

The residuals take turns in every round: standard is the fused add + RMSNorm of the depth set, block Attention
Residuals, and in training block-saved the same with `save_o1`. The kernels of all parts are compiled beforehand in a
process each. After the rounds of a training part one step of each is traced: milliseconds and launches by kernel.
Writes DIR/depth_overhead.json after each part.

Memory of wide: a layer is 0.53 G parameters, as many gradients, and 2.0 GB of activations at 8,192 tokens: 4.1 GB, 82
for 20 layers; Block adds 0.9 GB of finished blocks, 2.1 GB of their fp32 gradients and 0.6 GB of a block's o1 (its
prefixes take the place of the standard's h), and block-saved 4.1 GB of o1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from depth_record import where
from torch import Tensor, nn

from tilewise.bench.timing import captured
from tilewise.depth import InferenceState, Schedule
from tilewise.nn import AttnRes

START = time.time()
EPS = 1e-5


class Shape(NamedTuple):
    """Width, layers, query and key heads, head width, SwiGLU, layers with weights of their own, sublayers a block."""

    d: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    hidden: int
    own: int
    block: int


K3 = Shape(7168, 93, 64, 8, 128, 18432, 4, 24)
THIRD = K3._replace(layers=31, block=8)
PAPER = Shape(2304, 27, 18, 6, 128, 6144, 27, 6)
WIDE = K3._replace(layers=20, own=20, block=5)
TRAINED = {"training": PAPER, "wide": WIDE}
TINY = Shape(64, 5, 4, 2, 16, 96, 2, 4)
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}


def say(*words) -> None:
    print(f"[{time.time() - START:.0f}s]", *words, flush=True)


class Layer(nn.Module):
    """Attention and MLP, from a normalised input to an update."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        inner, kv = shape.heads * shape.width, shape.kv_heads * shape.width
        self.qkv = nn.Linear(shape.d, inner + 2 * kv, bias=False)
        self.o = nn.Linear(inner, shape.d, bias=False)
        self.up = nn.Linear(shape.d, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.d, bias=False)

    def attend(self, x: Tensor, cache: Tensor | None) -> Tensor:
        """x `[B, T, d]`; `cache` `[2, B, kv_heads, context, width]` holds earlier keys and values."""
        s = self.shape
        parts = (s.heads, s.kv_heads, s.kv_heads)
        q, k, v = self.qkv(x).unflatten(-1, (-1, s.width)).transpose(1, 2).split(parts, 1)
        if cache is None:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            cache[0, :, :, -1:], cache[1, :, :, -1:] = k, v
            o = F.scaled_dot_product_attention(q, cache[0], cache[1], enable_gqa=True)
        return self.o(o.transpose(1, 2).flatten(2))

    def mlp(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, -1)
        return self.down(F.silu(a) * b)


class PlainStream:
    """The standard residual behind a stream's face, its add and norm fused."""

    def __init__(self, x: Tensor, norms: list[Tensor]) -> None:
        self.h, self.update, self.norms = x, None, norms

    def read(self, sublayer: int) -> Tensor:
        return self._normed(self.norms[sublayer])

    def write(self, sublayer: int, update: Tensor) -> None:
        self.update = update

    def output(self, weight: Tensor) -> Tensor:
        return self._normed(weight)

    def _normed(self, weight: Tensor) -> Tensor:
        if self.update is None:
            return F.rms_norm(self.h, self.h.shape[-1:], weight, EPS)
        d = self.h.shape[-1]
        if not self.h.is_cuda:
            self.h = self.h + self.update
            return F.rms_norm(self.h, (d,), weight, EPS)
        from tilewise.bench.plain_residual import add_rms_norm, add_rms_norm_

        if torch.is_grad_enabled():
            h, y = add_rms_norm(self.update.view(-1, d), self.h.view(-1, d), weight, EPS)
            self.h = h.view(self.h.shape)
            return y.view(self.h.shape)
        y = torch.empty_like(self.h)
        add_rms_norm_(self.update.view(-1, d), self.h.view(-1, d), weight, y.view(-1, d), EPS)
        return y


def stack(layers: nn.ModuleList, caches: list[Tensor] | None, norms: list[Tensor], count: int):
    """(make a stream, x) ↦ the stack's output."""

    def run(make: Callable, x: Tensor) -> Tensor:
        stream = make(x, norms=norms[:-1])
        for i in range(count):
            layer = layers[i % len(layers)]
            cache = None if caches is None else caches[i % len(caches)]
            stream.write(2 * i, layer.attend(stream.read(2 * i), cache))
            stream.write(2 * i + 1, layer.mlp(stream.read(2 * i + 1)))
        return stream.output(norms[-1])

    return run


def build(shape: Shape, device: str) -> tuple[nn.ModuleList, AttnRes, list[Tensor]]:
    """Layers, the residual over depth with queries that weigh its sources unevenly, and the input norms' weights."""
    dtype, kept = DTYPES[device], torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            layers = nn.ModuleList(Layer(shape) for _ in range(shape.own))
    finally:
        torch.set_default_dtype(kept)
    sublayers = 2 * shape.layers
    # One pass over few sources saves a read of them in both regimes; two phases from there on.
    residual = AttnRes(shape.d, Schedule.block(sublayers, shape.block, one_pass_sources=0), eps=EPS, device=device,
                       dtype=dtype)  # fmt: skip
    with torch.no_grad():
        residual.query.normal_(std=shape.d**-0.5)
    return layers, residual, list(torch.ones(sublayers + 1, shape.d, device=device, dtype=dtype).unbind(0))


def clock(run: Callable[[], object], device: str) -> float:
    """Milliseconds of one run."""
    if device == "cpu":
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def rounds(runs: dict[str, Callable[[], object]], count: int, until: float, device: str) -> dict[str, list[float]]:
    """Every run in turn, in alternating order, after one run each that is not counted."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    took = 0.0
    for r in range(count + 1):
        began = time.time()
        if r > 1 and began + took - START > until:
            break
        for name in list(runs)[:: 1 if r % 2 == 0 else -1]:
            ms = clock(runs[name], device)
            if r:
                samples[name].append(ms)
        took = time.time() - began
    return samples


def report(part: str, shape: Shape, samples: dict[str, list[float]], goal: float, **more) -> dict:
    ms = {name: median(x) for name, x in samples.items()}
    overheads = {
        name: median(b / a - 1 for a, b in zip(samples["standard"], found, strict=True))
        for name, found in samples.items()
        if name != "standard"
    }
    record = {"part": part, "shape": shape._asdict(), "ms": ms, "overhead": overheads["block"], "overheads": overheads,
              "goal": goal, "samples": samples, **more}  # fmt: skip
    said = ", ".join(f"{name} {ms[name]:.3f} ms ({100 * x:+.2f} %)" for name, x in overheads.items())
    say(f"{part}: standard {ms['standard']:.3f} ms, {said}, goal {100 * goal:.0f} %", more)
    return record


def traced(run: Callable[[], object]) -> dict[str, tuple[float, int]]:
    """Kernel ↦ (milliseconds, launches) of one run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    found = [(e.key[:100], round(e.self_device_time_total / 1e3, 3), e.count) for e in trace.key_averages()]
    return {name: (ms, count) for name, ms, count in sorted(found, key=lambda x: -x[1]) if ms}


@torch.no_grad()
def inference(part: str, shape: Shape, batch: int, tokens: int, context: int, args) -> dict:
    """A decode step or a prefill."""
    layers, residual, norms = build(shape, args.device)
    x = torch.randn(batch, tokens, shape.d, device=args.device).to(DTYPES[args.device])
    caches = None
    if context and not args.compile:
        size = (2, batch, shape.kv_heads, context, shape.width)
        caches = [torch.randn(size, device=args.device).to(x.dtype) for _ in range(shape.own)]
    forward = stack(layers, caches, norms, shape.layers)
    state = InferenceState(residual.schedule, residual.reads(), batch * tokens)
    made = {"standard": lambda x, norms: PlainStream(x.clone(), norms), "block": state}
    runs, notes = {}, {"state_mib": state.nbytes / 2**20}
    for name, make in made.items():
        run = lambda make=make: forward(make, x)  # noqa: E731
        if part == "decode" and args.device == "cuda" and not args.compile:
            run, why = captured(lambda run=run: run)
            if why:
                notes[f"{name} not captured"] = why
        runs[name] = run
    goal = {"decode": 0.02, "prefill": 0.01}[part]
    if args.compile:
        for run in runs.values():
            run()
        return {}
    return report(part, shape, rounds(runs, args.rounds, args.limit, args.device), goal, **notes)


def training(part: str, shape: Shape, batch: int, tokens: int, args, graphs: bool = True) -> dict:
    """Forward and backward, as autograd launches them and, if `graphs`, in a CUDA graph."""
    layers, residual, norms = build(shape, args.device)
    x = torch.randn(batch, tokens, shape.d, device=args.device).to(DTYPES[args.device]).requires_grad_()
    dy = torch.randn_like(x)
    weights = [w.clone().requires_grad_() for w in norms]
    forward = stack(layers, None, weights, shape.layers)
    leaves = [x, *weights, *layers.parameters()]
    parameters = list(residual.parameters())

    def step(name: str) -> object:
        if name == "standard":
            return torch.autograd.grad(forward(lambda x, norms: PlainStream(x, norms), x), leaves, dy)
        residual.save_o1 = name == "block-saved"
        return torch.autograd.grad(forward(residual, x), [*leaves, *parameters], dy)

    runs = {name: lambda name=name: step(name) for name in ("standard", "block", "block-saved")}
    if args.compile:
        for run in runs.values():
            run()
        return {}
    notes = {}
    if args.device == "cuda":
        notes["peak_mib"] = {name: peak(run) for name, run in runs.items()}
    samples = rounds(runs, args.rounds, args.limit, args.device)
    eager = report(f"{part}, eager", shape, samples, 0.04, **notes)
    if args.device == "cpu":
        return eager
    eager["kernels"] = {name: traced(run) for name, run in runs.items()}
    if not graphs:
        return eager
    captures, notes = {}, {}
    for name, run in runs.items():
        captures[name], why = captured(lambda run=run: run)
        if why:
            notes[f"{name} not captured"] = why
    return {
        **report(part, shape, rounds(captures, args.rounds, args.limit, args.device), 0.04, **notes),
        "eager": eager,
    }


def peak(run: Callable[[], object]) -> float:
    """MiB at the peak of a run, weights and inputs included."""
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**20


def compile_part(part: str, args) -> None:
    """One run of both residuals on layers of one narrow head: the kernels over depth are those of the measurement."""
    args.compile = True
    torch.manual_seed(0)
    narrow = {"heads": 1, "kv_heads": 1, "hidden": 16, "own": 1}
    # Above 1,024 tokens the tiles are those of any length.
    if part in TRAINED:
        training(part, TRAINED[part]._replace(**narrow), 2, 520, args)
    else:
        shape = (THIRD if part == "prefill" else K3)._replace(
            layers=args.layers or (THIRD if part == "prefill" else K3).layers
        )
        inference(part, shape._replace(**narrow), *((128, 1) if part == "decode" else (1, 1040)), 0, args)
    torch.cuda.synchronize()


def compile_all(parts: list[str], args) -> None:
    """Kernels of all parts, side by side."""
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=compile_part, args=(part, args)) for part in parts]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    say("compiled", {part: process.exitcode for part, process in zip(parts, processes, strict=True)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], help="decode, prefill, training, wide; default all")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--limit", type=float, default=110.0, help="seconds after which no further round begins")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, help="of the inference stacks, in place of 93 and 31")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    args = parser.parse_args()
    parts = args.parts or ["decode", "training", "wide", "prefill"]
    for name in parts:
        if name not in ("decode", "prefill", *TRAINED):
            parser.error(f"part: found {name!r}, expected decode, prefill, training or wide")
    args.out.mkdir(parents=True, exist_ok=True)
    args.compile = False
    tiny = args.device == "cpu"
    whole, third = (TINY if tiny else shape._replace(layers=args.layers or shape.layers) for shape in (K3, THIRD))
    work = {
        "decode": lambda: inference("decode", whole, *((3, 1, 8) if tiny else (128, 1, 2048)), args),
        "prefill": lambda: inference("prefill", third, 1, 24 if tiny else 32768, 0, args),
    }
    for name, shape in TRAINED.items():
        # Of wide, two steps' activations do not fit; its host is far ahead of the GPU.
        size = (TINY, 2, 8) if tiny else (shape, 2, 4096)
        work[name] = lambda name=name, size=size: training(name, *size, args, graphs=name == "training")
    if not tiny:
        compile_all(parts, args)
    torch.manual_seed(0)
    result = {**where(args.device, "overhead", parts=list(parts), layers=args.layers), "records": []}
    for part in parts:
        if time.time() - START > args.limit:
            say(f"time is up before {part}")
            break
        result["records"].append(work[part]())
        (args.out / "depth_overhead.json").write_text(json.dumps(result, indent=1) + "\n")
        if args.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
