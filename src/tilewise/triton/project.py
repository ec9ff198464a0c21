"""Around the tile loops: projections on the tables' rows, Toeplitz slabs, shifted tiles, and Δ with lse.

Rows of a projection are taken by residue: a tile has rows r ≡ ρ (mod 8), and its columns start at −ρ. Entry (r, column)
then lies at a multiple of 8 plus the column's place in its chunk, so every access is 16 bytes wide although the buffer
is skewed. A column's table row is an affine function of the column, cut to the table; maps of another form are first
expanded to such a table.
"""

import triton
import triton.language as tl

from .operands import operand
from .tiles import load_rows

_RUNTIME = [
    "scale", "H", "G", "h0", "heads", "B", "rows", "others", "offset", "ahead", "behind", "shift", "cmin", "columns",
    "batch", "Tq", "Tk", "span", "origin", "step", "size",
]  # fmt: skip


@triton.jit
def stored(r, ranges, batch, b, rows, others, offset, ahead, behind, shift, WM: tl.constexpr, WN: tl.constexpr,
           SIZE: tl.constexpr, RANGED: tl.constexpr):  # fmt: skip
    """[from, to) of the skewed positions other + shift that the buffer holds for rows r: the band's tiles, if visible.

    Both ends are multiples of 16, which the compiler cannot see for itself.
    """
    lo = r * 0
    hi = lo + others
    first = r // WM * WM
    if RANGED:
        low = lo + 2**30
        high = lo
        for block in tl.static_range((WM + SIZE - 1) // SIZE):
            at = ranges + b * batch + (first // SIZE + block) * 4
            e = tl.load(at + 1, mask=r < rows, other=0)
            low = tl.minimum(low, tl.where(e > 0, tl.load(at, mask=r < rows, other=0), 2**30))
            high = tl.maximum(high, e)
        lo = tl.minimum(low, high)
        hi = high
    lo = lo // WN * WN
    hi = (hi + WN - 1) // WN * WN
    a = tl.maximum(first + offset - ahead + 1, 0) // WN * WN
    e = (tl.maximum(first + WM - 1 + offset + behind, 0) + WN - 1) // WN * WN
    a = tl.minimum(tl.maximum(a, lo), hi)
    e = tl.minimum(tl.maximum(e, a), hi)
    e = tl.where(r < rows, e, a)
    return (a + shift) // 16 * 16, (e + shift) // 16 * 16


@triton.jit
def rows_of_tile(group, first, rho, rows, B, TM: tl.constexpr, PACK: tl.constexpr):
    """(sequences, rows from `first` on ≡ rho mod 8, their distances) of the entries of a tile of PACK sequences.

    Entries beyond the batch have the row `rows`, where nothing is. One sequence is a number, several are a vector.
    """
    t = tl.arange(0, TM)
    if PACK == 1:
        b = group
        ahead = 8 * t
        r = first + rho + ahead
    else:
        PER: tl.constexpr = TM // PACK
        b = group * PACK + t // PER
        ahead = 8 * (t % PER)
        r = tl.where(b < B, first + rho + ahead, rows)
        b = tl.minimum(b, B - 1)
    return b, r, ahead


@triton.jit
def row_of(column, origin, step, size, LONG: tl.constexpr):
    """The table row of a column (counted from cmin): affine, cut to the table. LONG: as int64, to be scaled by strides.

    That takes 6 to 10 registers more in the loops over columns: calls whose tables need it have kernels of their own.
    """
    row = tl.minimum(tl.maximum(origin + step * column, 0), size - 1)
    if LONG:
        row = row.to(tl.int64)
    return row


@triton.jit(do_not_specialize=["R", "columns"])
def expand(table, rows_of, out, th, tr, columns, D: tl.constexpr, BD: tl.constexpr, N: tl.constexpr):
    """out[h, column] = table[h, rows_of[column]], 0 where there is no row; out is contiguous."""
    column = tl.program_id(0) * N + tl.arange(0, N)
    h = tl.program_id(1)
    d = tl.arange(0, BD)
    row = tl.load(rows_of + column, mask=column < columns, other=-1)
    at = table + tl.cast(h, tl.int64) * th + row.to(tl.int64)[:, None] * tr + d[None, :]
    value = tl.load(at, mask=(row[:, None] >= 0) & (d[None, :] < D), other=0.0)
    to = out + (tl.cast(h, tl.int64) * columns + column[:, None]) * D + d[None, :]
    tl.store(to, value, mask=(column[:, None] < columns) & (d[None, :] < D))


@triton.jit(do_not_specialize=_RUNTIME)
def project(x, table, z, bias, ranges, sx, th, tr, bh, origin, step, size, scale, head, stride, H, G, h0, heads, B,
            rows, others, offset, ahead, behind, shift, cmin, span, batch, D: tl.constexpr, BD: tl.constexpr,
            WM: tl.constexpr, WN: tl.constexpr, TM: tl.constexpr, PACK: tl.constexpr, CB: tl.constexpr,
            SIZE: tl.constexpr, RANGED: tl.constexpr, BIASED: tl.constexpr, LONG: tl.constexpr, PREC: tl.constexpr,
            STAGES: tl.constexpr):  # fmt: skip
    """z[r, column] = scale · (x_r · table[row_of(column)] + bias[row_of(column)]), skewed.

    Program (tile, residue), sequences·heads. BIASED: `bias` has a number for each table row, heads `bh` apart.
    """
    TALL: tl.constexpr = 8 * (TM // PACK)
    tiles = (rows + TALL - 1) // TALL * 8
    pid = tl.program_id(0) % tiles
    n = tl.program_id(0) // tiles
    h = h0 + n % heads
    rho = pid % 8
    cmin = cmin // 16 * 16
    first = pid // 8 * TALL
    b, r, down = rows_of_tile(n // heads, first, rho, rows, B, TM, PACK)
    d = tl.arange(0, BD)
    cc = tl.arange(0, CB)
    at = x + tl.cast(b, tl.int64) * sx[0] + tl.cast(h // G, tl.int64) * sx[1] + r.to(tl.int64) * sx[2]
    left = tl.load(at[:, None] + d[None, :], mask=(r[:, None] < rows) & (d[None, :] < D), other=0.0)
    lo, hi = stored(r, ranges, batch, b, rows, others, offset, ahead, behind, shift, WM, WN, SIZE, RANGED)
    some = hi > lo
    cfrom = tl.min(tl.where(some, lo - r, 2**30), 0)
    cto = tl.max(tl.where(some, hi - r, -(2**30)), 0)
    # Columns start at base − ρ, base a multiple of CB from cmin on.
    bfrom = tl.maximum(cfrom - cmin + rho, 0) // CB
    bto = tl.minimum((tl.maximum(cto - cmin + rho, 0) + CB - 1) // CB, span // CB)
    zrow = z + tl.cast(b * heads + h - h0, tl.int64) * head + r.to(tl.int64) * stride
    table = table + tl.cast(h, tl.int64) * th
    for block in tl.range(bfrom, bto, num_stages=STAGES):
        row = row_of(block * CB + cc - rho, origin, step, size, LONG)
        right = tl.load(table + row[None, :] * tr + d[:, None], mask=d[:, None] < D, other=0.0)
        value = tl.dot(left, right, input_precision=PREC)
        if BIASED:
            value += tl.load(bias + tl.cast(h, tl.int64) * bh + row)[None, :]
        value *= scale
        if z.dtype.element_ty == tl.float16:
            value = tl.clamp(value, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        place = (first + down + (cmin + block * CB))[:, None] + cc[None, :]
        # `first`, `down` and cmin are multiples of 8; lo and hi of 16: whole chunks are stored or not.
        inside = (place >= lo[:, None]) & (place < hi[:, None])
        tl.store(zrow[:, None] + place, value.to(z.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["width", "shift", "low", "high", "H"])
def toeplitz(table, rows_of, slab, th, tr, width, shift, low, high, N: tl.constexpr, CB: tl.constexpr,
             LONG: tl.constexpr):  # fmt: skip
    """slab[h, a, w] = table[h, φ(a − w + shift)], width a multiple of CB; rows_of holds φ of the offsets low … high."""
    w = tl.program_id(0) * CB + tl.arange(0, CB)
    h = tl.program_id(1)
    a = tl.arange(0, N)
    delta = tl.minimum(tl.maximum(a[:, None] - w[None, :] + shift, low), high)
    row = tl.load(rows_of + delta - low)
    if LONG:
        row = row.to(tl.int64)
        a = a.to(tl.int64)
    at = table + tl.cast(h, tl.int64) * th + row * tr
    value = tl.load(at, mask=row >= 0, other=0.0)
    value = value.to(tl.float32)
    if slab.dtype.element_ty == tl.float16:
        value = tl.clamp(value, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    width = width // CB * CB
    at = slab + tl.cast(h, tl.int64) * N * width + a[:, None] * width + w[None, :]
    tl.store(at, value.to(slab.dtype.element_ty))


@triton.jit
def ends(tables, h, d, D: tl.constexpr, SIDE: tl.constexpr):
    """Σ of the tables' rows at one end, fp32 [len(d)]."""
    total = tl.zeros_like(d).to(tl.float32)
    for t in tl.static_range(len(tables)):
        row = tables[t].left
        if SIDE == 1:
            row = tables[t].right
        at = tables[t].table + tl.cast(h, tl.int64) * tables[t].head + tl.cast(row, tl.int64) * tables[t].row + d
        total += tl.load(at, mask=(d < D) & (row >= 0), other=0.0).to(tl.float32)
    return total


@triton.jit
def _shift(x, sx, out, tables, b, h, hk, first, T, B, H, D: tl.constexpr, W: tl.constexpr, N: tl.constexpr,
           PREC: tl.constexpr):  # fmt: skip
    """out[side, b, h, t] = x[b, hk, t] + Σ of the tables' rows at that end; out is contiguous."""
    d = tl.arange(0, W)
    tile = load_rows(x, sx, b, hk, first, T, D, N, W, False)
    i = first + tl.arange(0, N)
    for side in tl.static_range(2):
        row = tl.cast((side * B + b) * H + h, tl.int64) * T + i
        value = tile.to(tl.float32) + ends(tables, h, d, D, side)[None, :]
        value = operand(value.to(out.dtype.element_ty), PREC)
        tl.store(out + row[:, None] * D + d[None, :], value, mask=(i[:, None] < T) & (d[None, :] < D))


@triton.jit(do_not_specialize=_RUNTIME)
def prepare(q, k, v, g, o, lse, dlse, qx, kx, vx, stats, pad, terms, qtables, ktables, vtables, sq, sk, sv, sg, so, sl,
            scale, H, G, B, Tq, Tk, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
            N: tl.constexpr, EDGES: tl.constexpr, SIDES: tl.constexpr, SHIFT_Q: tl.constexpr, SHIFT_K: tl.constexpr,
            SHIFT_V: tl.constexpr, GRADS: tl.constexpr, DLSE: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """Everything that is once a row: shifted q, k, v; Δ = rowsum(dO∘O) − dlse; and lse in log2 units, three times.

    stats holds [lse of the band, lse of either saturated side, Δ] by [head, query], rows padded to `pad`. A side's lse
    is less what the terms add to a row there, so that the backward's saturated loops see nothing of the terms; shifting
    both factors counted the product of the shifts, which comes off too. Padding has lse = +∞: P = 0.
    """
    blocks = (tl.maximum(pad, Tk) + N - 1) // N
    first = tl.program_id(0) % blocks * N
    bh = tl.program_id(0) // blocks
    b = bh // H
    h = bh % H
    if tl.program_id(1) == 0:
        if SHIFT_Q:
            _shift(q, sq, qx, qtables, b, h, h, first, Tq, B, H, D, BD, N, PREC)
        if GRADS:
            i = first + tl.arange(0, N)
            plane = tl.cast(B * H, tl.int64) * pad
            at = stats + tl.cast(bh, tl.int64) * pad + i
            product = load_rows(o, so, b, h, first, Tq, DV, N, BV, False).to(tl.float32)
            product *= load_rows(g, sg, b, h, first, Tq, DV, N, BV, False).to(tl.float32)
            dl = tl.sum(product, 1)
            if DLSE:
                at_l = dlse + tl.cast(b, tl.int64) * sl[0] + tl.cast(h, tl.int64) * sl[1] + i.to(tl.int64) * sl[2]
                dl -= tl.load(at_l, mask=i < Tq, other=0.0).to(tl.float32)
            tl.store(at + 3 * plane, dl, mask=i < pad)
            # A row that saw no key gets P = 0 from lse = +∞, too.
            log2 = tl.load(lse + tl.cast(bh, tl.int64) * Tq + i, mask=i < Tq, other=float("-inf"))
            log2 = tl.where(log2 == float("-inf"), float("inf"), log2 * 1.4426950408889634)
            tl.store(at, log2, mask=i < pad)
            for side in tl.static_range(2):
                value = log2
                if SIDES:
                    for t in tl.static_range(len(EDGES)):
                        value -= EDGES[t](terms[t], b, h, i, Tq, side)
                    if SHIFT_Q and SHIFT_K:
                        d = tl.arange(0, BD)
                        value += tl.sum(ends(qtables, h, d, D, side) * ends(ktables, h, d, D, side), 0) * scale
                tl.store(at + (side + 1) * plane, value, mask=i < pad)
    else:
        if SHIFT_K:
            _shift(k, sk, kx, ktables, b, h, h // G, first, Tk, B, H, D, BD, N, PREC)
        if SHIFT_V:
            _shift(v, sv, vx, vtables, b, h, h // G, first, Tk, B, H, DV, BV, N, PREC)
