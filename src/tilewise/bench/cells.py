"""What a benchmark set offers: its cells, the systems in it, and how one cell is built, run and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["PASSES", "BenchSet", "Cell", "Truth", "Workload", "key"]

PASSES = {"fwd": "forward", "bwd": "backward", "step": "forward and backward"}
"""``fwd``: a forward without gradients. ``bwd``: the backward alone, of a forward kept from before. ``step``: both."""


def key(set: str, case: str, pass_: str, system: str, dtype: str, size: Mapping[str, int]) -> tuple:
    """What a record measures; a later record with the same key replaces an earlier one."""
    return (set, case, pass_, system, dtype, tuple(sorted(size.items())))


@dataclass(frozen=True)
class Cell:
    """One system on one case at one size; its passes are measured together and give one record each.

    Attributes:
        set, case, system: what is measured.
        size: the set's own size fields by name, the one that its tables run over first.
        dtype: a torch dtype's name.
        passes: some of :data:`PASSES`.
        device: ``cuda`` or ``cpu``.
        seed: of the inputs and of the upstream gradient.
    """

    set: str
    case: str
    system: str
    size: dict[str, int]
    dtype: str = "float16"
    passes: tuple[str, ...] = ("fwd", "bwd")
    device: str = "cuda"
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def order(self) -> tuple[int, ...]:
        """Cells of a process are taken in this order: by size."""
        return tuple(self.size.values())

    def keys(self) -> list[tuple]:
        """The keys of the records that this cell gives."""
        return [key(self.set, self.case, p, self.system, self.dtype, self.size) for p in self.passes]

    def truth_name(self) -> str:
        """A file name shared by all cells with the same inputs, whatever the system."""
        return "-".join(map(str, (self.case, *self.size.values(), self.dtype, self.seed))) + ".pt"

    def __str__(self) -> str:
        return f"{self.case} {next(iter(self.size.values()))} {self.system}"

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict) -> Cell:
        return cls(**{**values, "passes": tuple(values["passes"])})


@dataclass(frozen=True)
class Truth:
    """The oracle's answer for a cell's inputs.

    Attributes:
        exact: name ↦ tensor, fp64 or, for half-precision cells, rounded to fp32; by default ``o`` and one gradient
            for each input.
        low_error: name ↦ error of dense PyTorch in the cell's dtype, in the measure of the workload's gate.
    """

    exact: dict[str, Tensor]
    low_error: dict[str, float]


@dataclass(frozen=True)
class Workload:
    """A cell, built.

    Attributes:
        run: () ↦ output, everything that the system needs included.
        leaves: name ↦ tensor that requires a gradient.
        upstream: the gradient of the output.
        baseline: () ↦ output of what the cell is compared with, in the same rounds.
        baseline_leaves: the tensors that the baseline is differentiated in.
        strict: hold this system to our own error budget too, not to the published rule alone.
        gate: (got, exact, low error, strict) ↦ verdict; None for :func:`tilewise.bench.oracle.gate`.
        results: pass ↦ tensors to compare with the truth, by name; None for the output and, unless the pass is
            ``fwd``, the gradients of `leaves`.
        overhead: the harness's own share of `run` and `baseline`, timed in the same rounds and taken off both.
        capture: whether to replay CUDA graphs where the runs can be captured.
        held: bytes that the system holds between runs, which count in its peak.
        notes: what else the record should say.
    """

    run: Callable[[], Tensor]
    leaves: dict[str, Tensor]
    upstream: Tensor
    baseline: Callable[[], Tensor]
    baseline_leaves: list[Tensor]
    strict: bool = False
    gate: Callable[[Tensor, Tensor, float, bool], dict] | None = None
    results: Callable[[str], dict[str, Tensor]] | None = None
    overhead: Callable[[], object] | None = None
    capture: bool = True
    held: int = 0
    notes: dict = field(default_factory=dict)


class BenchSet(Protocol):
    """A set of benchmarks that the runner can run (``--set NAME``)."""

    name: str
    cases: tuple[str, ...]
    systems: tuple[str, ...]

    def baseline(self, device: str) -> str:
        """The name of the system that every cell is compared with."""

    def sizes(self, case: str, device: str) -> dict[str, tuple[int, ...]]:
        """The values of each size field where the user names none; cells are their product."""

    def passes(self, case: str) -> tuple[str, ...]:
        """The passes of a case."""

    def check_size(self, size: dict[str, int]) -> None:
        """Raise ValueError if a size cannot be measured, naming what is wrong."""

    def dtype(self, device: str) -> str:
        """The dtype where the user names none."""

    def default_systems(self, device: str) -> tuple[str, ...]:
        """The systems measured where the user names none."""

    def supports(self, case: str, system: str, device: str) -> bool:
        """Whether the system can express the case on the device."""

    def ceiling(self, case: str, system: str) -> bool:
        """Whether the system does less than the case asks for, so that it is no competitor."""

    def compiles(self, system: str) -> bool:
        """Whether the system's kernels are compiled at first use, so that its cases deserve processes of their own."""

    def kernels(self, cell: Cell) -> str:
        """Cells of a system that compiles share a process where this name is the same: they run the same kernels."""

    def warm(self, cell: Cell) -> tuple[Cell, ...]:
        """The cells whose runs compile what `cell` needs, while other processes do the same beside it."""

    def compiling(self, system: str) -> AbstractContextManager:
        """Held while a system compiles."""

    def build(self, cell: Cell) -> Workload:
        """Inputs, system and baseline of a cell, on its device."""

    def truth(self, cell: Cell) -> Truth:
        """The oracle for the cell's inputs."""

    def truth_bytes(self, cell: Cell) -> int:
        """About how much memory the truth takes."""

    def flops(self, cell: Cell, pass_: str) -> float | None:
        """Useful operations of one pass; None where they are not the measure."""

    def packages(self) -> Iterable[str]:
        """Distributions whose versions belong in the environment record."""
