"""The carried set: a training step of a 3B model, and the attention of one block, with and without carried scores."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ..carried import CarriedConfig, TileLayout, carried_attention
from .carried_systems import (
    CEILINGS,
    PER_BLOCK,
    SYSTEMS,
    Attend,
    Shape,
    attend_of,
    attention,
    block,
    config_of,
    decision,
    model_of,
    substituted,
    without_carry,
)
from .cells import Cell, Truth, Workload
from .oracle import gate

__all__ = ["CARRIED", "CARRIED_OVER", "Carried", "CarriedOver"]

_MODEL = {"layers": 32, "heads": 20, "kv_heads": 4, "head_dim": 128, "hidden": 6912, "vocabulary": 152064}
_TINY = {"layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 16, "hidden": 96, "vocabulary": 128}
_BLOCK = {"layers": PER_BLOCK, "hidden": 0, "vocabulary": 0}
CHECKED = 1024
"""Attention is compared with fp64 at so many tokens, or at two windows: dense scores of long sequences do not fit."""


class Carried:
    """See :class:`tilewise.bench.cells.BenchSet`.

    ``step``: forward and backward of the whole model in bf16, one sequence, no activation checkpointing, PyTorch eager
    around attention; ``step-graph``: the same as one CUDA graph, for those who train so. ``block``: the attention of
    four layers alone, in a CUDA graph. The layout of live tiles is made beforehand, for all blocks and runs. A window
    of 0 is none. Every system is gated by the attention of four layers against fp64, outputs and gradients, since 32
    layers of dense scores do not fit. Records of steps say how often each run asked the driver for memory.
    """

    name = "carried"
    cases = ("step", "step-graph", "step-window", "block", "block-window")
    systems = SYSTEMS

    def baseline(self, device: str) -> str:
        return "plain"

    def sizes(self, case: str, device: str) -> dict[str, tuple[int, ...]]:
        windowed = case.endswith("-window")
        rest = (_MODEL if device == "cuda" else _TINY) | (_BLOCK if case.startswith("block") else {})
        if device == "cuda":
            tokens = (8192,) if windowed else (4096,) if case == "step-graph" else (4096, 8192)
            point = {"tokens": tokens, "window": (1024 if windowed else 0,)}
        else:
            point = {"tokens": (128,), "window": (32 if windowed else 0,)}
        return point | {name: (value,) for name, value in rest.items()}

    def passes(self, case: str) -> tuple[str, ...]:
        return ("step",)

    def check_size(self, size: dict[str, int]) -> None:
        for name in ("tokens", "layers", "heads", "kv_heads", "head_dim"):
            if size[name] < 1:
                raise ValueError(f"{name} is {size[name]}; expected at least 1")
        if size["heads"] % size["kv_heads"]:
            raise ValueError(f"kv_heads is {size['kv_heads']}; expected a divisor of heads = {size['heads']}")

    def dtype(self, device: str) -> str:
        return "bfloat16" if device == "cuda" else "float32"

    def default_systems(self, device: str) -> tuple[str, ...]:
        return tuple(s for s in SYSTEMS if device == "cuda" or s not in ("plain-flash", "plain-flex"))

    def supports(self, case: str, system: str, device: str) -> bool:
        if system in ("plain-flash", "plain-flex"):
            # With a window `plain` is flash attention; without, FlexAttention has nothing that it does better.
            return device == "cuda" and case.endswith("-window") == (system == "plain-flex")
        return system in SYSTEMS

    def ceiling(self, case: str, system: str) -> bool:
        return system in CEILINGS

    def compiles(self, system: str) -> bool:
        return system.startswith("tilewise") or system in ("no-carry", "plain-flex")

    def kernels(self, cell: Cell) -> str:
        return "window" if cell.size["window"] else "causal"

    def warm(self, cell: Cell) -> tuple[Cell, ...]:
        """One block's attention, at the check's tokens and at the cell's: the length decides which kernels run, and
        whole models beside each other would not fit."""
        block = {"layers": min(cell.size["layers"], PER_BLOCK), "hidden": 0, "vocabulary": 0}
        lengths = dict.fromkeys((self._short(cell).size["tokens"], cell.size["tokens"]))
        case = "block-window" if cell.case.endswith("-window") else "block"
        return tuple(replace(cell, case=case, size={**cell.size, **block, "tokens": n}) for n in lengths)

    def compiling(self, system: str) -> AbstractContextManager:
        return nullcontext()

    def draw(self, cell: Cell, tokens: int, layers: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        """q, k, v of every layer as projections leave them ([B, T, heads, d] in memory), and upstream gradients."""
        shape = Shape.of(cell)
        g = torch.Generator(cell.device).manual_seed(cell.seed)

        def made(heads: int) -> Tensor:
            x = torch.randn(1, tokens, heads, shape.head_dim, device=cell.device, generator=g)
            return x.to(cell.torch_dtype).transpose(1, 2)

        heads = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
        x = {f"{name}{i}": made(count).requires_grad_() for i in range(layers) for name, count in heads.items()}
        return x, [made(shape.heads) for _ in range(layers)]

    def build(self, cell: Cell) -> Workload:
        shape = Shape.of(cell)
        config = config_of(cell.system, shape)
        device = torch.device(cell.device)
        notes = {"plan": decision(config, shape, cell.torch_dtype, device)} if config.plan == "auto" else {}
        common = {
            "strict": cell.system.startswith("tilewise"), "gate": gate, "notes": notes,
            "results": lambda pass_: self._checked(cell),
        }  # fmt: skip
        if cell.case.startswith("block"):
            x, upstream = self.draw(cell, shape.tokens, shape.layers)
            runs = [block(system, shape, x) for system in (cell.system, self.baseline(cell.device))]
            # A block's launches take the host longer than short ones take the GPU.
            return Workload(runs[0], x, upstream, runs[1], list(x.values()), capture=True, **common)
        model = model_of(cell.system, shape, cell.torch_dtype, cell.device, cell.seed)
        g = torch.Generator(cell.device).manual_seed(cell.seed)
        tokens = torch.randint(shape.vocabulary, (1, shape.tokens + 1), device=cell.device, generator=g)
        layout = TileLayout(config, shape.tokens, shape.tokens, device=device)
        asked = notes["device_allocations"] = {}
        count = _Allocations(asked, device)

        def run_of(system: str, name: str):
            attend = attend_of(system, shape, cell.torch_dtype, cell.device)
            if system == "no-carry" != cell.system:
                attend = without_carry(shape, layout)

            def run() -> Tensor:
                count.begin(name)
                with substituted(attend):
                    return model.loss(tokens, layout=layout)

            return run

        leaves = dict(model.named_parameters())
        one = torch.ones((), device=cell.device)
        baseline = self.baseline(cell.device)
        # A system beside itself has counts of its own.
        label = f"{baseline}, baseline" if baseline == cell.system else baseline
        runs = [run_of(cell.system, cell.system), run_of(baseline, label)]
        return Workload(runs[0], leaves, one, runs[1], list(leaves.values()), **common,
                        capture=cell.case == "step-graph")  # fmt: skip

    def _short(self, cell: Cell) -> Cell:
        tokens = min(cell.size["tokens"], max(CHECKED, 2 * cell.size["window"]))
        return replace(cell, size={**cell.size, "tokens": tokens})

    def _checked(self, cell: Cell) -> dict[str, Tensor]:
        """Outputs and gradients of one block's attention, named for the function that the system computes."""
        cell = self._short(cell)
        shape = Shape.of(cell)
        x, upstream = self.draw(cell, shape.tokens, PER_BLOCK)
        attend = attend_of(cell.system, shape, cell.torch_dtype, cell.device)
        prefix = "plain." if self.ceiling(cell.case, cell.system) else ""
        return _differentiated(attend, config_of(cell.system, shape), x, upstream, prefix)

    def truth(self, cell: Cell) -> Truth:
        """``o``, ``dq``, ``dk``, ``dv`` over the layers; of layers without a carry with ``plain.``."""
        cell = self._short(cell)
        shape = Shape.of(cell)
        x, upstream = self.draw(cell, shape.tokens, PER_BLOCK)
        wide = {name: t.detach().double().requires_grad_() for name, t in x.items()}
        wide_upstream = [g.double() for g in upstream]
        exact, low = {}, {}
        for prefix, system, dense in (("", "eager", "eager"), ("plain.", "no-carry", "plain")):
            config = config_of(system, shape, impl="reference")
            rough = attend_of(dense, shape, cell.torch_dtype, cell.device)
            found = _differentiated(carried_attention, config, wide, wide_upstream, prefix)
            close = _differentiated(rough, config, x, upstream, prefix)
            kept = torch.float32 if cell.torch_dtype.itemsize == 2 else torch.float64
            exact |= {name: value.to(kept) for name, value in found.items()}
            low |= {name: (close[name].double() - value).abs().max().item() for name, value in found.items()}
        return Truth(exact, low)

    def truth_bytes(self, cell: Cell) -> int:
        s = Shape.of(self._short(cell))
        return 16 * PER_BLOCK * s.tokens * s.head_dim * (2 * s.heads + 2 * s.kv_heads)

    def flops(self, cell: Cell, pass_: str) -> float | None:
        return None

    def packages(self) -> Iterable[str]:
        return ("torch", "triton")


class _Allocations:
    """How often PyTorch asked the driver for memory in each run of a system: while it does, the GPU may wait.

    Args:
        found: system ↦ counts, filled as runs end, which is when the next one begins.
        device: nothing is counted but on a GPU.
    """

    def __init__(self, found: dict[str, list[int]], device: torch.device) -> None:
        self.found, self.cuda = found, device.type == "cuda"
        self.running, self.count = None, 0

    def begin(self, system: str) -> None:
        if not self.cuda:
            return
        count = torch.cuda.memory_stats_as_nested_dict()["num_device_alloc"]
        if self.running is not None:
            self.found.setdefault(self.running, []).append(count - self.count)
        self.running, self.count = system, count


def _differentiated(
    attend: Attend, config: CarriedConfig, x: dict[str, Tensor], upstream: list[Tensor], prefix: str
) -> dict[str, Tensor]:
    """Outputs and gradients of every layer, stacked."""
    outputs = attention(attend, config, x)
    grads = dict(zip(x, torch.autograd.grad(outputs, list(x.values()), upstream), strict=True))
    found = {"o": torch.stack([o.detach() for o in outputs])}
    found |= {f"d{n}": torch.stack([g for name, g in grads.items() if name[0] == n]) for n in "qkv"}
    return {f"{prefix}{name}": value for name, value in found.items()}


class CarriedOver(Carried):
    """Steps in rounds with the same kernels without a carry, in one process and one model: ratios within rounds say
    what the carry costs. ``no-carry`` beside itself says how far such ratios are apart."""

    name = "carried-over"
    cases = ("step", "step-graph", "step-window")

    def baseline(self, device: str) -> str:
        return "no-carry"

    def default_systems(self, device: str) -> tuple[str, ...]:
        return ("no-carry", "tilewise", "tilewise-mixed", "tilewise-stored")


CARRIED = Carried()
CARRIED_OVER = CarriedOver()
