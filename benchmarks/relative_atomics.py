"""For an ablation: gradients of tables by atomic additions, not by one writer an entry and sums in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewise.triton.launch import cdiv, launch
from tilewise.triton.masks import BLOCK
from tilewise.triton.plan import Source, fitted, padded
from tilewise.triton.project import rows_of_tile, stored
from tilewise.triton.terms import column_rows


@triton.jit(do_not_specialize=["tiles", "count"])
def add_rows(dz, x, grad, phi, ranges, sx, sg, scale, head, stride, H, G, h0, heads, B, rows, others, offset, ahead,
             behind, shift, cmin, count, batch, tiles, D: tl.constexpr, BD: tl.constexpr, WM: tl.constexpr,
             WN: tl.constexpr, TM: tl.constexpr, PACK: tl.constexpr, CB: tl.constexpr, SIZE: tl.constexpr,
             RANGED: tl.constexpr, SCALAR: tl.constexpr):  # fmt: skip
    """grad[h, φ(column)] += scale · dz[r, column] · x_r, from the program of a tile of rows and CB columns."""
    TALL: tl.constexpr = 8 * (TM // PACK)
    block = tl.program_id(0)
    rho = tl.program_id(1) % 8
    local = tl.program_id(1) // 8
    h = h0 + local
    first = tl.program_id(2) % tiles * TALL
    d = tl.arange(0, BD)
    cc = tl.arange(0, CB)
    column = cmin // 16 * 16 + block * CB
    b, r, down = rows_of_tile(tl.program_id(2) // tiles, first, rho, rows, B, TM, PACK)
    lo, hi = stored(r, ranges, batch, b, rows, others, offset, ahead, behind, shift, WM, WN, SIZE, RANGED)
    place = (first + down + column)[:, None] + cc[None, :]
    inside = (place >= lo[:, None]) & (place < hi[:, None])
    zrow = dz + tl.cast(b * heads + local, tl.int64) * head + r.to(tl.int64) * stride
    ds = tl.load(zrow[:, None] + place, mask=inside, other=0.0)
    at = block * CB + cc - rho
    row = tl.load(phi + at, mask=(at >= 0) & (at < count), other=-1)
    to = grad + h * sg[0] + row * sg[1]
    if SCALAR:
        tl.atomic_add(to, tl.sum(ds.to(tl.float32), 0) * scale, mask=row >= 0, sem="relaxed")
    else:
        xrow = x + tl.cast(b, tl.int64) * sx[0] + tl.cast(h // G, tl.int64) * sx[1] + r.to(tl.int64) * sx[2]
        right = tl.load(xrow[:, None] + d[None, :], mask=(r[:, None] < rows) & (d[None, :] < D), other=0.0)
        total = tl.dot(tl.trans(ds), right) * scale
        tl.atomic_add(to[:, None] + d[None, :], total, mask=(row[:, None] >= 0) & (d[None, :] < D), sem="relaxed")


def table_by_atomics(self, n, dz, h0, heads):
    """In place of ``_Backward._table``, for scalars without a gate."""
    L, g, port = self.L, dz.geometry, self.L.ports[n]
    # A table that the heads share is summed over them afterwards.
    out, scalar = self.by_head.get(n, self.table[n]), port.kind == "scalar"
    if scalar and port.left is not None:
        raise ValueError("the term has a gate; expected none")
    width = 1 if scalar else out.shape[2]
    total = torch.zeros(L.H, out.shape[1], width, dtype=torch.float32, device=L.device)
    x = L.k if port.kind == "key" else L.lefts[n]
    if port.bias is not None:
        x = Source(x.x + port.bias.to(L.dtype)[:, None])
    TM, CB, warps, _, pack = fitted(self.fold_shape, g.rows, L.B)
    offset, ahead, behind = L.band_args(g)
    tiles, scale = cdiv(g.rows, 8 * TM // pack), 1.0 if scalar else L.call.scale
    launch(
        add_rows, (cdiv(g.last - g.first + 8, CB), heads * 8, tiles * cdiv(L.B, pack)), dz.memory,
        L.anchor if x is None else x.x, total, column_rows(port.rows, g, g.first, g.last, L.device), L.ranges(g.keyed),
        (0, 0, 0) if x is None else x.strides, total.stride()[:2], scale, g.head, g.stride, L.H,
        L.G if port.kind == "key" else 1, h0, heads, L.B, g.rows, g.others, offset, ahead, behind, g.shift, g.first,
        g.last - g.first, L.mask.batch, tiles, D=width, BD=padded(width), WM=g.tile[0], WN=g.tile[1], TM=TM, PACK=pack,
        CB=CB, SIZE=BLOCK, RANGED=L.mask.ranged, SCALAR=scalar, num_warps=warps,
    )  # fmt: skip
    if L.sides:
        _add_ends(self, n, total, scale)
    total = total.squeeze(-1) if scalar else total
    out[h0 : h0 + heads].copy_(total[h0 : h0 + heads])


def _add_ends(self, n, total, scale):
    """What the saturated sides add to the rows of the two ends."""
    L = self.L
    if L.ports[n].kind == "scalar":
        sides = self.sum_buffer.sum((1, 3))[..., None]
    else:
        parts, _, crossed = self._end_parts(n)
        cumulated = parts.sum((0, 2))
        sides = torch.stack((cumulated[:, 0], cumulated[:, 1] - cumulated[:, 0]))
        for table in crossed:
            for side, row in enumerate((table.left, table.right)):
                if row >= 0:
                    rows = table.table[:, row].float()
                    sides[side] -= self.sum_buffer[side].sum((0, 2))[:, None] * rows
    for side, row in enumerate(L.ends[n]):
        if row >= 0:
            total[:, row] += sides[side] * scale
