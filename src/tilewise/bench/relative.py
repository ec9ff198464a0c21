"""The relative set: four mechanisms of the published models, every system that can compute them, and the ceilings."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from .. import mechanisms
from ..testing import CASES as MECHANISMS
from ..testing import Case, Sizes
from .cells import Cell, Truth, Workload
from .oracle import truth
from .peers import PEERS
from .systems import SYSTEMS, plain

__all__ = ["CASES", "RELATIVE", "Relative"]

CASES: dict[str, Case] = {
    "none": MECHANISMS["none"],
    "t5": MECHANISMS["t5"],
    "shaw": Case(
        "shaw", lambda s: {"keys": (129, s.d)}, lambda x, s: mechanisms.Shaw(x["keys"], left=64, right=64)
    ),
    "deberta_v3": MECHANISMS["deberta"],
    "transformer_xl": MECHANISMS["txl"],
}  # fmt: skip
"""T5: 32 buckets, distance 128. Shaw: clipped at ±64, one table for all heads. DeBERTa-v3: 256 buckets, distance 512,
c2p and p2c. Transformer-XL: a table of 2N − 1 rows per head, both biases. ``none``: no term, the ceilings."""

_TERMS = ("t5", "shaw", "deberta_v3", "transformer_xl")
_CUDA = {
    "tilewise": ("none", *_TERMS),
    "eager": _TERMS,
    "compile": _TERMS,
    "sdpa-bias": ("t5", "shaw", "deberta_v3"),
    "nemo-sdpa": ("transformer_xl",),
    "flex": ("none", *_TERMS),
    "flex-dense": _TERMS,
    "flashdeberta": ("deberta_v3",),
    "disentangled-flash": ("deberta_v3",),
    "cudnn": ("none",),
    "sdpa-flash": ("none",),
    "tilewise-blocked": ("none", *_TERMS),
}
_CPU = {
    "tilewise-blocked": ("none", *_TERMS),
    "eager": _TERMS,
    "sdpa-bias": ("t5", "shaw", "deberta_v3"),
    "nemo-sdpa": ("transformer_xl",),
    "sdpa": ("none",),
}


class Relative:
    """See :class:`tilewise.bench.cells.BenchSet`."""

    name = "relative"
    cases = tuple(CASES)
    systems = tuple(dict.fromkeys((*_CUDA, *_CPU)))

    def baseline(self, device: str) -> str:
        return "cudnn" if device == "cuda" else "sdpa"

    def sizes(self, case: str, device: str) -> dict[str, tuple[int, ...]]:
        if device == "cuda":
            lengths = (128, 256, 512, 1024, 2048, 4096, 8192)
            return {"n": lengths, "heads": (12,), "head_dim": (64,), "tokens": (16384,)}
        return {"n": (128, 512, 1024), "heads": (4,), "head_dim": (64,), "tokens": (1024,)}

    def passes(self, case: str) -> tuple[str, ...]:
        return ("fwd", "bwd")

    def check_size(self, size: dict[str, int]) -> None:
        if not 2 <= size["n"] <= size["tokens"]:
            raise ValueError(f"length is {size['n']}; expected 2 to tokens = {size['tokens']}")

    def dtype(self, device: str) -> str:
        return "float16" if device == "cuda" else "float32"

    def default_systems(self, device: str) -> tuple[str, ...]:
        """Everything but the any-device path on a GPU, where nobody would choose it."""
        return tuple(s for s in (_CUDA if device == "cuda" else _CPU) if device == "cpu" or s != "tilewise-blocked")

    def supports(self, case: str, system: str, device: str) -> bool:
        return case in (_CUDA if device == "cuda" else _CPU).get(system, ())

    def compiles(self, system: str) -> bool:
        return system in ("tilewise", "compile", "flex", "flex-dense", "flashdeberta", "disentangled-flash")

    def ceiling(self, case: str, system: str) -> bool:
        return case == "none"

    def kernels(self, cell: Cell) -> str:
        return cell.case

    def warm(self, cell: Cell) -> tuple[Cell, ...]:
        return (cell,)

    def compiling(self, system: str) -> AbstractContextManager:
        return nullcontext()

    def call(self, cell: Cell) -> Sizes:
        """The sizes of the attention call: tokens // n sequences of n tokens."""
        n, tokens, d, heads = (cell.size[name] for name in ("n", "tokens", "head_dim", "heads"))
        self.check_size(cell.size)
        return Sizes(B=tokens // n, H=heads, Hk=heads, Tq=n, Tk=n, d=d, d_v=d, published=True)

    def inputs(self, cell: Cell) -> tuple[dict[str, Tensor], Tensor]:
        """(tensors by name, dO), drawn on the cell's device: the same in every process on the same machine.

        q is drawn so that τ·q·k has unit variance, tables with half a unit, as in :mod:`tilewise.testing`.
        """
        sizes, case = self.call(cell), CASES[cell.case]
        generator = torch.Generator(cell.device).manual_seed(cell.seed)

        def draw(shape: tuple[int, ...], deviation: float) -> Tensor:
            normal = torch.randn(shape, generator=generator, device=cell.device, dtype=torch.float32)
            return normal.mul_(deviation).to(cell.torch_dtype)

        attention = (sizes.B, sizes.H, sizes.Tq, sizes.d)
        deviations = {"q": sizes.d**-0.5 / case.scale(sizes.d), "k": 1.0, "v": 1.0}
        shapes = {"q": attention, "k": attention, "v": attention} | case.shapes(sizes)
        tensors = {name: draw(shape, deviations.get(name, 0.5)) for name, shape in shapes.items()}
        return tensors, draw(attention, 1.0)

    def build(self, cell: Cell) -> Workload:
        tensors, upstream = self.inputs(cell)
        leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
        case, sizes = CASES[cell.case], self.call(cell)
        run = (SYSTEMS | PEERS)[cell.system](case, sizes, leaves)
        copies = {name: leaves[name].detach().clone().requires_grad_() for name in ("q", "k", "v")}
        backend = SDPBackend.CUDNN_ATTENTION if self.baseline(cell.device) == "cudnn" else None
        baseline = plain(backend)(case, sizes, copies)
        strict = cell.system.startswith("tilewise")
        return Workload(run, leaves, upstream, baseline, list(copies.values()), strict)

    def truth(self, cell: Cell) -> Truth:
        tensors, upstream = self.inputs(cell)
        return truth(CASES[cell.case], self.call(cell), tensors, upstream)

    def flops(self, cell: Cell, pass_: str) -> float:
        """4·B·H·N²·d forward, 10·B·H·N²·d backward; the terms' own work counts for nothing."""
        s = self.call(cell)
        return {"fwd": 4, "bwd": 10}[pass_] * s.B * s.H * s.Tq**2 * s.d

    def truth_bytes(self, cell: Cell) -> int:
        s = self.call(cell)
        return 24 * s.B * s.H * s.Tq * s.d

    def packages(self) -> Iterable[str]:
        return ("torch", "triton", "transformers", "flashdeberta", "disentangled-flash")


RELATIVE = Relative()
