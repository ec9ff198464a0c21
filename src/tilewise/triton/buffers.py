"""What the kernels read and write, as the host hands it over: rows of tensors, skewed buffers, tables and slabs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .terms import Geometry

__all__ = ["Buffer", "Lookup", "Slab", "Source", "is_long", "spaced", "spaced_like"]


def is_long(*tensors: Tensor) -> bool:
    """Whether the last element of one lies further from its first than an int32 counts."""
    return any(sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) >= 2**31 for x in tensors)


def spaced_like(x: Tensor) -> Tensor:
    """Room for x [B, H, T] in rows that begin at multiples of 16 entries: x's own strides may depend on T."""
    B, H, T = x.shape
    return x.new_empty(B, H, -(-T // 16) * 16)[..., :T]


def spaced(x: Tensor) -> Tensor:
    """x [B, H, T] with such rows: kernels are compiled anew where a stride stops being a multiple of 16."""
    whole = x.stride(2) == 1 and all(s % 16 == 0 for s in x.stride()[:2])
    return x if whole else spaced_like(x).copy_(x)


class Source:
    """A [B, H, T, d] tensor that kernels read by rows, through a descriptor or through pointers."""

    def __init__(self, x: Tensor):
        if x.stride(-1) != 1 or any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True)):
            x = x.contiguous()
        self.x = x
        # A dimension of one entry may have any stride: one that a descriptor accepts.
        self.strides = tuple(s if n > 1 else 128 for s, n in zip(x.stride()[:3], x.shape[:3], strict=True))

    @property
    def describable(self) -> bool:
        """Whether a tensor descriptor may describe it: 16-byte aligned, strides too."""
        size = self.x.element_size()
        return self.x.data_ptr() % 16 == 0 and all(s * size % 16 == 0 for s in self.strides)

    def __call__(self, rows: int, width: int, tma: bool):
        if not tma:
            return self.x
        return TensorDescriptor(self.x, list(self.x.shape), [*self.strides, 1], [1, 1, rows, width])


@dataclass
class Buffer:
    """A skewed buffer of n heads: its memory, its geometry, and what kernels need to address it."""

    memory: Tensor
    geometry: Geometry
    n: int

    def descriptor(self, rows: int, others: int, tma: bool):
        if not tma:
            return None
        g = self.geometry
        return TensorDescriptor(self.memory, [self.n, g.rows, g.width], [g.head, g.stride, 1], [1, rows, others])


@dataclass
class Lookup:
    """A table and which of its rows a column reads: origin + step · (column − first), cut to [0, size)."""

    table: Tensor
    head: int
    row: int
    origin: int
    step: int
    size: int

    @property
    def args(self) -> tuple[int, ...]:
        return self.head, self.row, self.origin, self.step, self.size


@dataclass
class Slab:
    """A Toeplitz slab [heads, rows, width]: entry (a, w) belongs to offset a − w + shift."""

    memory: Tensor
    width: int
    shift: int
