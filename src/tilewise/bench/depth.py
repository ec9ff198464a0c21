"""The depth set: the residual machinery of whole passes over a stack of sublayers, against the plain residual."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from .cells import Cell, Truth, Workload
from .depth_peers import AUTOTUNED, PEERS, compile_only
from .depth_systems import SYSTEMS, plain
from .depth_work import Work, gate, inputs, overhead, sample, truth
from .sets import VLLM_SOURCE

__all__ = ["DEPTH", "Depth"]

_CUDA = {
    "prefill": {"tokens": 8192, "d": 7168, "sublayers": 128, "block": 16},
    "decode": {"tokens": 128, "d": 7168, "sublayers": 128, "block": 16},
    "training": {"tokens": 8192, "d": 2048, "sublayers": 64, "block": 8},
    "training-eager": {"tokens": 8192, "d": 2048, "sublayers": 64, "block": 8},
    "full": {"tokens": 32768, "d": 7168, "sublayers": 128, "block": 0},
}
_CPU = {
    "prefill": {"tokens": 256, "d": 256, "sublayers": 8, "block": 3},
    "decode": {"tokens": 4, "d": 256, "sublayers": 8, "block": 3},
    "training": {"tokens": 128, "d": 128, "sublayers": 6, "block": 2},
    "training-eager": {"tokens": 128, "d": 128, "sublayers": 6, "block": 2},
    "full": {"tokens": 64, "d": 128, "sublayers": 7, "block": 0},
}
_INFERENCE = ("prefill", "decode")
_TRAINING = ("training", "training-eager")
_EVERYWHERE = {
    "tilewise": tuple(_CUDA),
    "tilewise-one-pass": ("decode",),
    "tilewise-overlap": ("decode",),
    "tilewise-serving": _INFERENCE,
    "plain": tuple(_CUDA),
    "eager": (*_INFERENCE, *_TRAINING),
}
_GPU_ONLY = {
    "compile": (*_INFERENCE, *_TRAINING),
    "plain-liger": (*_INFERENCE, *_TRAINING),
    "liger-kernel": (*_INFERENCE, *_TRAINING),
    "fla-core": (*_INFERENCE, *_TRAINING),
    "flash-attn-res": (*_INFERENCE, *_TRAINING),
    "fast-attnres": (*_INFERENCE, *_TRAINING),
    "vllm": _INFERENCE,
}
"""Full at its length is left out for one-pass operators: they compile a kernel for each of up to 129 sources."""


class Depth:
    """See :class:`tilewise.bench.cells.BenchSet`.

    Sizes: ``block`` counts sublayers (attention and MLP are two); 0 is Full. Training is one step, in a CUDA graph
    where the system can be captured; ``training-eager`` is the same step as autograd launches it.
    """

    name = "depth"
    cases = tuple(_CUDA)
    systems = (*_EVERYWHERE, *_GPU_ONLY)

    def baseline(self, device: str) -> str:
        return "plain"

    def sizes(self, case: str, device: str) -> dict[str, tuple[int, ...]]:
        return {name: (value,) for name, value in (_CUDA if device == "cuda" else _CPU)[case].items()}

    def passes(self, case: str) -> tuple[str, ...]:
        return ("step",) if case in _TRAINING else ("fwd",)

    def check_size(self, size: dict[str, int]) -> None:
        for name in ("tokens", "sublayers"):
            if size[name] < 1:
                raise ValueError(f"{name} is {size[name]}; expected at least 1")
        if size["d"] < 8 or size["d"] % 8:
            raise ValueError(f"d is {size['d']}; expected a multiple of 8")

    def dtype(self, device: str) -> str:
        return "bfloat16" if device == "cuda" else "float32"

    def default_systems(self, device: str) -> tuple[str, ...]:
        if device != "cuda":
            return tuple(_EVERYWHERE)
        return tuple(s for s in self.systems if s != "vllm" or VLLM_SOURCE in os.environ)

    def supports(self, case: str, system: str, device: str) -> bool:
        return case in (_EVERYWHERE | (_GPU_ONLY if device == "cuda" else {})).get(system, ())

    def ceiling(self, case: str, system: str) -> bool:
        return system.startswith("plain")

    def compiles(self, system: str) -> bool:
        return system != "eager"

    def kernels(self, cell: Cell) -> str:
        return cell.case.removesuffix("-eager")

    def warm(self, cell: Cell) -> tuple[Cell, ...]:
        """Fewer tokens where they choose no kernel: just above decode's 1,024, for Full because its bank is 60 GB."""
        if cell.system.startswith(("tilewise", "plain", "liger", "vllm")) and cell.size["tokens"] > 1040:
            return (replace(cell, size={**cell.size, "tokens": 1040}),)
        return (cell,)

    def compiling(self, system: str) -> AbstractContextManager:
        return compile_only() if system in AUTOTUNED else nullcontext()

    def build(self, cell: Cell) -> Workload:
        work, data = Work.of(cell), inputs(cell)
        built, base = (SYSTEMS | PEERS)[cell.system](work, data), plain(work, data)
        prefix = "plain." if self.ceiling(cell.case, cell.system) else ""

        def results(pass_: str) -> dict[str, Tensor]:
            if pass_ == "fwd":
                with torch.no_grad():
                    return {f"{prefix}y": sample(built.forward())}
            y = built.forward()
            grads = torch.autograd.grad(y, list(built.leaves.values()), data.dy)
            found = {"y": sample(y)} | {f"d{name}": g for name, g in zip(built.leaves, grads, strict=True)}
            found["dx"] = sample(found["dx"])
            return {f"{prefix}{name}": value for name, value in found.items()}

        return Workload(
            built.forward, built.leaves, data.dy, base.forward, list(base.leaves.values()), gate=gate, results=results,
            strict=cell.system.startswith(("tilewise", "plain")), overhead=overhead(data.x, work),
            capture=cell.case != "training-eager", held=built.held,
        )  # fmt: skip

    def truth(self, cell: Cell) -> Truth:
        return truth(cell)

    def truth_bytes(self, cell: Cell) -> int:
        return 8 * cell.size["d"] * (2 * cell.size["sublayers"] + 1024)

    def flops(self, cell: Cell, pass_: str) -> float | None:
        return None

    def packages(self) -> Iterable[str]:
        return ("torch", "triton", "fla-core", "liger-kernel", "fast-attnres", "flash-attn-res")


DEPTH = Depth()
