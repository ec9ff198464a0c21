"""How scattered sources reach a kernel: as named pointers, as a bank with one stride, or by a table of addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.depth.sources import Fixed
from tilewise.depth.triton.common import table_kernel
from tilewise.triton.launch import launch as start

__all__ = ["Bank", "bank", "named", "rows", "table"]

TABLE_CHUNK = 32


class Bank(NamedTuple):
    """Sources for kernels that index them: base pointer, table of addresses or None, strides in units of 8 elements.

    `keep` holds what the table points to: a copy made for alignment must live until the kernel is launched.
    """

    base: Tensor
    table: Tensor | None
    stride8: int
    row8: int
    keep: Sequence[Tensor]


def rows(x: Tensor) -> Tensor:
    """`x` `[T, d]` with contiguous, 16-byte aligned rows; copied only if it is not so already."""
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    d = x.shape[1]
    fits = d == 1 or x.stride(1) == 1
    fits = fits and (x.shape[0] == 1 or x.stride(0) % 8 == 0) and x.data_ptr() % 16 == 0
    return x if fits else x.contiguous() if not x.is_contiguous() else x.clone()


def row_stride(x: Tensor) -> int:
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def named(sources: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    """(sources with one row stride, that stride / 8)."""
    sources = [rows(v) for v in sources]
    if all(v.is_contiguous() for v in sources):
        return sources, sources[0].shape[1] // 8
    stride = row_stride(sources[0])
    if any(row_stride(v) != stride for v in sources):
        sources = [v.contiguous() for v in sources]
        stride = sources[0].shape[1]
    return sources, stride // 8


def table(tensors: Sequence[Tensor]) -> Tensor:
    """Device table of the tensors' addresses, written by a kernel that receives them as arguments."""
    out = torch.empty(len(tensors), dtype=torch.int64, device=tensors[0].device)
    for i in range(0, len(tensors), TABLE_CHUNK):
        part = tuple(tensors[i : i + TABLE_CHUNK])
        start(table_kernel, (1,), part, out[i:], COUNT=len(part), num_warps=1)
    return out


def even_step(sources: Sequence[Tensor]) -> int | None:
    """Bytes from each source to the next if they are evenly spaced in one storage, else None.

    Tensors of their own may be evenly spaced by chance: taking that path would compile a second variant now and then.
    """
    first, storage = sources[0].data_ptr(), sources[0].untyped_storage().data_ptr()
    if any(v.untyped_storage().data_ptr() != storage for v in sources[1:]):
        return None
    step = sources[1].data_ptr() - first if len(sources) > 1 else 0
    even = step >= 0 and step % (8 * sources[0].element_size()) == 0
    return step if even and all(v.data_ptr() == first + j * step for j, v in enumerate(sources)) else None


def bank(sources: Sequence[Tensor]) -> Bank:
    """A bank if the sources are evenly spaced in memory, else a table; of `Fixed` sources it is made once."""
    if isinstance(sources, Fixed):
        if sources.bank is None:
            sources.bank = bank(list(sources))
        return sources.bank
    sources, row8 = named(sources)
    step = even_step(sources)
    if step is None:
        return Bank(sources[0], table(sources), 0, row8, sources)
    return Bank(sources[0], None, step // (8 * sources[0].element_size()), row8, sources)
