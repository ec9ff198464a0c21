"""Train variants of a small language model under one recipe and compare them: same data, same batches, same budget.

The recipe sees a model only through `loss(tokens) -> mean nats a token` and `named_parameters()`. For a seed, every
variant gets the same batches in the same order. Results are written after every run, with the whole curve.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Recipe", "Text", "compare", "summary", "train"]


@dataclass(frozen=True)
class Recipe:
    """One training run, alike for all variants.

    Attributes:
        tokens: training tokens in all.
        batch, length: sequences a step, and tokens of each.
        lr, warmup, final: peak learning rate, share of the steps to reach it, share of it left at the end (cosine).
        decay: weight decay of matrices; vectors, embeddings and reads have none.
        clip: largest norm of the gradient.
        evaluations: how often the held-out loss is taken, the last time at the end.
        held_out: sequences of the held-out text in one evaluation.
    """

    tokens: int = 13_107_200
    batch: int = 64
    length: int = 512
    lr: float = 2e-3
    warmup: float = 0.05
    final: float = 0.1
    decay: float = 0.1
    clip: float = 1.0
    evaluations: int = 8
    held_out: int = 256

    @property
    def steps(self) -> int:
        """Optimiser steps that use up the tokens."""
        return max(1, self.tokens // (self.batch * self.length))

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        rising = max(1, round(self.warmup * self.steps))
        if step < rising:
            return self.lr * (step + 1) / rising
        progress = (step - rising) / max(1, self.steps - rising)
        return self.lr * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress)))


class Text:
    """Token files made by prepare_text.py.

    Args:
        folder: with train.bin, valid.bin and meta.json.

    Raises:
        FileNotFoundError: the files are not there.
    """

    def __init__(self, folder: Path) -> None:
        self.meta = json.loads((folder / "meta.json").read_text())
        self.train, self.valid = (
            torch.from_numpy(np.fromfile(folder / f"{split}.bin", np.uint16).astype(np.int32))
            for split in ("train", "valid")
        )
        self.vocab = self.meta["vocab"]

    @property
    def bytes_per_token(self) -> float:
        """Of the held-out text: turns nats a token into bits a byte, which do not depend on the tokenizer."""
        return self.meta["valid"]["bytes"] / self.meta["valid"]["tokens"]

    def batches(self, recipe: Recipe, seed: int) -> Iterable[Tensor]:
        """Crops `[batch, length + 1]` of the training text at places that depend on the seed alone."""
        generator = torch.Generator().manual_seed(seed)
        offsets = torch.arange(recipe.length + 1)
        for _ in range(recipe.steps):
            starts = torch.randint(len(self.train) - recipe.length, (recipe.batch, 1), generator=generator)
            yield self.train[starts + offsets].long()

    def held_out(self, recipe: Recipe) -> Iterable[Tensor]:
        """The held-out sequences, evenly spaced, in batches; the same for every run."""
        room = len(self.valid) - recipe.length - 1
        count = min(recipe.held_out, room // recipe.length + 1)
        starts = torch.linspace(0, room, count).long()[:, None] + torch.arange(recipe.length + 1)
        return (self.valid[part].long() for part in starts.split(recipe.batch))


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    reads = {id(p) for name, p in model.named_parameters() if name.split(".")[-1] in ("query", "key_weight")}
    groups = {True: [], False: []}
    for p in model.parameters():
        groups[p.ndim >= 2 and id(p) not in embeddings | reads].append(p)
    settings = [{"params": params, "weight_decay": recipe.decay * decayed} for decayed, params in groups.items()]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(settings, lr=recipe.lr, betas=(0.9, 0.95), fused=fused)


@torch.no_grad()
def _evaluate(loss: Callable[[Tensor], Tensor], text: Text, recipe: Recipe, device: torch.device) -> float:
    total = count = 0.0
    for tokens in text.held_out(recipe):
        total += loss(tokens.to(device)).item() * len(tokens)
        count += len(tokens)
    return total / count


def train(build: Callable[[], nn.Module], text: Text, recipe: Recipe, seed: int, *, compiled: bool = False) -> dict:
    """One run.

    Args:
        build: makes the model, on its device; called after seeding.
        text: the data.
        recipe: the budget.
        seed: of the initial weights and of the batches.
        compiled: run `model.loss` through torch.compile.

    Returns:
        Held-out curve `[tokens, nats a token]`, training losses, seconds, tokens a second (without the first step and
        evaluations), peak bytes on the GPU, parameters.
    """
    torch.manual_seed(seed)
    model = build()
    device = next(model.parameters()).device
    loss = torch.compile(model.loss) if compiled else model.loss
    optimizer = _optimizer(model, recipe)
    every = max(1, recipe.steps // recipe.evaluations)
    curve, losses, busy, counted, began = [], [], 0.0, 0, time.perf_counter()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    mark = None
    for step, tokens in enumerate(text.batches(recipe, seed)):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        value = loss(tokens.to(device, non_blocking=True))
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        losses.append(value.detach())
        last = step == recipe.steps - 1
        if step == 0 or last or (step + 1) % every == 0:
            if not math.isfinite(losses[-1].item()):
                raise FloatingPointError(f"loss: found {losses[-1].item()} at step {step}, expected a finite number")
            if mark is not None:
                busy, counted = busy + time.perf_counter() - mark[0], counted + step - mark[1]
            if last or (step and (recipe.steps - step) > every // 2):
                curve.append(((step + 1) * recipe.batch * recipe.length, _evaluate(model.loss, text, recipe, device)))
            mark = time.perf_counter(), step
    return {
        "seed": seed,
        "valid": curve,
        "train": [round(x, 5) for x in torch.stack(losses).tolist()],
        "seconds": time.perf_counter() - began,
        "tokens_per_second": counted * recipe.batch * recipe.length / busy if busy else None,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def compare(
    variants: dict[str, Callable[[], nn.Module]],
    text: Text,
    recipe: Recipe,
    seeds: Iterable[int],
    out: Path,
    *,
    seconds: float = math.inf,
    compiled: bool = False,
    notes: dict | None = None,
) -> dict:
    """All variants for all seeds, seed by seed, so that a run cut short compares every variant on the same seeds.

    Args:
        variants: name → builder.
        text, recipe, seeds, compiled: as in :func:`train`.
        out: JSON, written again after every run; runs that it already holds for the same recipe are kept.
        seconds: start no run that would probably end later than this.
        notes: further fields of the record (sizes of the model).

    Returns:
        The record.
    """
    settings = {"recipe": asdict(recipe), "data": text.meta, "bytes_per_token": text.bytes_per_token, **(notes or {})}
    settings = json.loads(json.dumps(settings))
    record = {"environment": _environment(), **settings, "runs": {name: [] for name in variants}}
    if out.exists():
        old = json.loads(out.read_text())
        if any(old.get(key) != value for key, value in settings.items()):
            raise ValueError(f"out: found {out} with another recipe, model or data, expected the same or a new file")
        record["runs"] = {name: old["runs"].get(name, []) for name in {**old["runs"], **variants}}
    out.parent.mkdir(parents=True, exist_ok=True)
    began, longest = time.perf_counter(), 0.0
    for seed in seeds:
        for name, build in variants.items():
            if any(run["seed"] == seed for run in record["runs"][name]):
                continue
            if time.perf_counter() - began + longest > seconds:
                print(f"no time for {name}, seed {seed}", flush=True)
                continue
            run = train(build, text, recipe, seed, compiled=compiled)
            longest = max(longest, run["seconds"])
            record["runs"][name].append(run)
            out.write_text(json.dumps(record) + "\n")
            print(f"{name:10s} seed {seed}: {run['valid'][-1][1]:.4f} nats, {run['seconds']:.0f} s", flush=True)
    return record


def summary(record: dict) -> str:
    """A table: final held-out loss by variant, its spread over seeds, and the paired difference from the first."""
    header = f"{'variant':10s} {'seeds':>5s} {'nats':>8s} {'± sd':>7s} {'bits/byte':>9s} {'Δ paired':>9s} {'± sd':>7s}"
    lines = [f"{header} {'tokens/s':>9s} {'peak GiB':>8s}"]
    finals = {name: {r["seed"]: r["valid"][-1][1] for r in runs} for name, runs in record["runs"].items()}
    base = next(iter(finals.values()), {})
    for name, by_seed in finals.items():
        if not by_seed:
            continue
        values, runs = list(by_seed.values()), record["runs"][name]
        paired = [value - base[seed] for seed, value in by_seed.items() if seed in base]
        speed = [r["tokens_per_second"] for r in runs if r["tokens_per_second"]]
        peak = [r["peak_bytes"] for r in runs if r["peak_bytes"]]
        bits = statistics.mean(values) / math.log(2) / record["bytes_per_token"]
        lines.append(
            f"{name:10s} {len(values):5d} {statistics.mean(values):8.4f} {_deviation(values)} {bits:9.4f} "
            f"{statistics.mean(paired) if paired else math.nan:+9.4f} {_deviation(paired)} "
            f"{statistics.median(speed) if speed else math.nan:9.0f} {max(peak) / 2**30 if peak else math.nan:8.2f}"
        )
    return "\n".join(lines)


def _deviation(values: list[float]) -> str:
    return f"{statistics.stdev(values):7.4f}" if len(values) > 1 else f"{'-':>7s}"


def _environment() -> dict:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {torch.get_num_threads()} threads"
    return {"torch": torch.__version__, "python": platform.python_version(), "device": device}
