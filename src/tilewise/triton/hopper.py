"""What the Hopper kernels (Gluon) share on the host: descriptors of 64 rows, and tables with one row an offset."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .cached import cached
from .launch import cdiv, launch
from .plan import Facts, Layout, Source, padded
from .project import expand
from .skew import TILE
from .terms import rows_of

__all__ = ["dtype_of", "expanded", "misfits", "rows_layout", "tiles_of", "unfitting"]


def dtype_of(x: torch.dtype):
    """Gluon's name of a 16-bit dtype."""
    return gl.float16 if x == torch.float16 else gl.bfloat16


def rows_layout(width: int, dtype: torch.dtype, rows: int = TILE):
    """The shared layout of so many rows: what both the copies and the products read."""
    return gl.NVMMASharedLayout.get_default_for([rows, width], dtype_of(dtype))


def tiles_of(x: Source | Tensor, rows: int = TILE) -> TensorDescriptor:
    """Tiles of so many rows of a [B, H, T, d] tensor, or of a table [H, R, d]."""
    if isinstance(x, Source):
        tensor, strides = x.x, x.strides
    else:
        tensor, strides = x, tuple(x.stride()[:-1])
    box = [1] * (tensor.dim() - 2) + [rows, tensor.shape[-1]]
    layout = gl.NVMMASharedLayout.get_default_for(box, dtype_of(tensor.dtype))
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], box, layout)


def expanded(L: Layout, n: int, descending: bool) -> tuple[Tensor, int]:
    """Port n's table with one row an offset, [heads, rows, d], and the row of offset 0: that of δ is it − δ or it + δ.

    It covers every offset of a tile with an unsaturated one. An identity map's own table is taken where it will do.
    """
    rows, table = L.ports[n].rows, L.tables[n]
    # Expanded heads have the stride 0, which no descriptor takes.
    aligned = all(s > 0 and s * 2 % 16 == 0 for s in table.stride()[:2]) and table.data_ptr() % 16 == 0
    if rows.kind == "identity" and bool(rows.params[1]) == descending and aligned:
        return table, rows.params[0]
    low, high = max(L.lo, L.call.offset + 1 - L.Tk), min(L.hi, L.Tq - 1 + L.call.offset)
    # A tile reaches 127 offsets beyond an unsaturated one.
    low, high = min(low, high) - 2 * TILE, max(low, high) + 2 * TILE
    count = high - low + 1
    out = torch.empty(table.shape[0], count, table.shape[2], dtype=table.dtype, device=L.device)
    launch(
        expand, (cdiv(count, 64), table.shape[0]), table, _rows_between(rows, low, high, descending, L.device), out,
        L.head_stride(n), table.stride(1), count, D=table.shape[2], BD=padded(table.shape[2]), N=64, num_warps=4,
    )  # fmt: skip
    return out, high if descending else -low


@cached(64)
def _rows_between(rows, low: int, high: int, descending: bool, device: torch.device) -> Tensor:
    delta = torch.arange(low, high + 1, device=device)
    return rows_of(rows, delta.flip(0) if descending else delta).contiguous()


def unfitting(F: Facts) -> list[str]:
    """Why no Hopper kernel of this package can run a call, whatever its terms, as far as its sizes tell."""
    reasons = []
    if not F.limits.hopper:
        reasons.append("the GPU is not a Hopper (sm_90)")
    if F.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"q is {F.dtype}")
    widths = {F.d, F.dv, *(int(p.table.shape[-1]) for p in F.ports if p.kind != "scalar")}
    if len(widths) > 1 or F.d not in (64, 128):
        reasons.append(f"the widths are {sorted(widths)}; it takes 64 or 128 alike")
    if not F.call.scale >= 0.0:
        reasons.append(f"scale is {F.call.scale}; it takes scales ≥ 0")
    if F.call.dropout_p > 0.0 or F.call.mask.dense is not None:
        reasons.append("it has neither dropout nor dense masks")
    return reasons


def misfits(L: Layout) -> list[str]:
    """:func:`unfitting`, and what only the tensors tell."""
    described = all(s.describable for s in (L.q, L.k, L.v, *(x for x in L.lefts if x is not None)))
    return unfitting(L) + ([] if described else ["a tensor is not laid out in multiples of 16 bytes"])
