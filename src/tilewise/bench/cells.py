"""What a benchmark set offers: its cells, the systems in it, and how one cell is built, run and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["BenchSet", "Cell", "Truth", "Workload"]


@dataclass(frozen=True)
class Cell:
    """One system on one case at one length; its passes are measured together and give one record each.

    Attributes:
        set, case, n, system: what is measured; n is the sequence length.
        dtype: a torch dtype's name.
        heads, head_dim, tokens: tokens of a batch, so that the batch is tokens // n.
        passes: ``fwd``, ``bwd`` or both.
        device: ``cuda`` or ``cpu``.
        seed: of the inputs and of the upstream gradient.
    """

    set: str
    case: str
    n: int
    system: str
    dtype: str = "float16"
    heads: int = 12
    head_dim: int = 64
    tokens: int = 16384
    passes: tuple[str, ...] = ("fwd", "bwd")
    device: str = "cuda"
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def keys(self) -> list[tuple]:
        """The keys of the records that this cell gives (see :func:`tilewise.bench.records.key`)."""
        return [
            (self.set, self.case, self.n, p, self.system, self.dtype, self.heads, self.head_dim, self.tokens)
            for p in self.passes
        ]

    def truth_name(self) -> str:
        """A file name shared by all cells with the same inputs, whatever the system."""
        return f"{self.case}-{self.n}-{self.dtype}-{self.heads}-{self.head_dim}-{self.tokens}-{self.seed}.pt"

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict) -> Cell:
        return cls(**{**values, "passes": tuple(values["passes"])})


@dataclass(frozen=True)
class Truth:
    """The oracle's answer for a cell's inputs.

    Attributes:
        exact: name ↦ tensor, fp64 or, for half-precision cells, rounded to fp32; ``o`` and one gradient for each input.
        low_error: name ↦ maximum absolute error of dense PyTorch in the cell's dtype.
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
        baseline: () ↦ output of the plain attention that the cell is compared with, in the same rounds.
        baseline_leaves: the tensors that the baseline is differentiated in.
        strict: hold this system to our own error budget too, not to the published rule alone.
    """

    run: Callable[[], Tensor]
    leaves: dict[str, Tensor]
    upstream: Tensor
    baseline: Callable[[], Tensor]
    baseline_leaves: list[Tensor]
    strict: bool = False
    notes: dict = field(default_factory=dict)


class BenchSet(Protocol):
    """A set of benchmarks that the runner can run (``--set NAME``)."""

    name: str
    cases: tuple[str, ...]
    systems: tuple[str, ...]

    def baseline(self, device: str) -> str:
        """The name of the system that every cell is compared with."""

    def defaults(self, device: str) -> dict:
        """dtype, heads, head_dim, tokens and lengths where the user names none."""

    def default_systems(self, device: str) -> tuple[str, ...]:
        """The systems measured where the user names none."""

    def supports(self, case: str, system: str, device: str) -> bool:
        """Whether the system can express the case on the device."""

    def compiles(self, system: str) -> bool:
        """Whether the system's kernels are compiled at first use, so that its cases deserve processes of their own."""

    def build(self, cell: Cell) -> Workload:
        """Inputs, system and baseline of a cell, on its device."""

    def truth(self, cell: Cell) -> Truth:
        """The oracle for the cell's inputs."""

    def flops(self, cell: Cell, pass_: str) -> float:
        """Useful operations of one pass."""

    def packages(self) -> Iterable[str]:
        """Distributions whose versions belong in the environment record."""
