"""After the tile loops: gradients of tables and of what they multiply, from dS in the skewed buffer.

Each entry of dS was written once and is read by row (fold) and by column (collect), always in the same order; a table
row's gradient is then the sum over its columns' residues and its ends (reduce). No atomics: repeats are bitwise equal.
"""

import triton
import triton.language as tl

from .operands import added, operand
from .project import ends, row_of, rows_of_tile, stored

_RUNTIME = [
    "scale", "H", "G", "h0", "heads", "B", "rows", "others", "offset", "ahead", "behind", "shift", "cmin", "span",
    "batch", "length", "R", "blocks", "T", "origin", "step", "size", "left_row", "right_row", "first", "second",
    "start",
]  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME)
def fold(dz, table, acc, sums, out, ranges, th, tr, origin, step, size, eh, er, end_table, sa, so, left_row, right_row,
         scale, head, stride, H, G, h0, heads, B, rows, others, offset, ahead, behind, shift, cmin, span, batch,
         D: tl.constexpr, BD: tl.constexpr, WM: tl.constexpr, WN: tl.constexpr, TM: tl.constexpr, PACK: tl.constexpr,
         CB: tl.constexpr, SIZE: tl.constexpr, RANGED: tl.constexpr, ACC: tl.constexpr, SUMS: tl.constexpr,
         SCALAR: tl.constexpr, LONG: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """out_r = scale · (acc_r + Σ_column dz[r, column] · table[row_of(column)] + Σ_side sums[side, r] · end_table[end]).

    The G heads that share a key head are summed, in order. SCALAR: the table's rows are numbers (D = 1).
    """
    TALL: tl.constexpr = 8 * (TM // PACK)
    tiles = (rows + TALL - 1) // TALL * 8
    pid = tl.program_id(0) % tiles
    n = tl.program_id(0) // tiles
    groups = heads // G
    hg = n % groups
    rho = pid % 8
    cmin = cmin // 16 * 16
    first = pid // 8 * TALL
    b, r, down = rows_of_tile(n // groups, first, rho, rows, B, TM, PACK)
    d = tl.arange(0, BD)
    cc = tl.arange(0, CB)
    lo, hi = stored(r, ranges, batch, b, rows, others, offset, ahead, behind, shift, WM, WN, SIZE, RANGED)
    some = hi > lo
    cfrom = tl.min(tl.where(some, lo - r, 2**30), 0)
    cto = tl.max(tl.where(some, hi - r, -(2**30)), 0)
    bfrom = tl.maximum(cfrom - cmin + rho, 0) // CB
    bto = tl.minimum((tl.maximum(cto - cmin + rho, 0) + CB - 1) // CB, span // CB)
    total = tl.zeros([TM, BD], tl.float32)
    number = tl.zeros([TM], tl.float32)
    group = h0 // G + hg
    if ACC:
        initial = acc + tl.cast(b, tl.int64) * sa[0] + tl.cast(group, tl.int64) * sa[1] + r.to(tl.int64) * sa[2]
        total = tl.load(initial[:, None] + d[None, :], mask=(r[:, None] < rows) & (d[None, :] < D), other=0.0).to(
            tl.float32
        )
    for h in range(group * G, group * G + G):
        zrow = dz + tl.cast(b * heads + h - h0, tl.int64) * head + r.to(tl.int64) * stride
        rows_of_h = table + tl.cast(h, tl.int64) * th
        ends_of_h = end_table + tl.cast(h, tl.int64) * eh
        for block in tl.range(bfrom, bto, num_stages=STAGES):
            row = row_of(block * CB + cc - rho, origin, step, size, LONG)
            place = (first + down + (cmin + block * CB))[:, None] + cc[None, :]
            inside = (place >= lo[:, None]) & (place < hi[:, None])
            ds = tl.load(zrow[:, None] + place, mask=inside, other=0.0)
            if SCALAR:
                value = tl.load(rows_of_h + row * tr).to(tl.float32)
                number += tl.sum(ds.to(tl.float32) * value[None, :], 1)
            else:
                right_at = rows_of_h + row[:, None] * tr + d[None, :]
                right = tl.load(right_at, mask=d[None, :] < D, other=0.0)
                total = added(total, ds, right, scale * 0.0, PREC)
        if SUMS:
            for side in tl.static_range(2):
                end = tl.cast(left_row, tl.int64)
                if side == 1:
                    end = tl.cast(right_row, tl.int64)
                sigma_at = tl.cast((side * B + b) * H + h, tl.int64) * rows + r
                sigma = tl.load(sums + sigma_at, mask=r < rows, other=0.0)
                if SCALAR:
                    number += sigma * tl.load(ends_of_h + end * er, mask=end >= 0, other=0.0).to(tl.float32)
                else:
                    value = tl.load(ends_of_h + end * er + d, mask=(end >= 0) & (d < D), other=0.0).to(tl.float32)
                    total += sigma[:, None] * value[None, :]
    to = out + tl.cast(b, tl.int64) * so[0] + tl.cast(group, tl.int64) * so[1] + r.to(tl.int64) * so[2]
    if SCALAR:
        tl.store(to, (number * scale).to(out.dtype.element_ty), mask=r < rows)
    else:
        tl.store(to[:, None] + d[None, :], (total * scale).to(out.dtype.element_ty),
                 mask=(r[:, None] < rows) & (d[None, :] < D))  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME)
def collect(dz, x, bias, out, ranges, sx, su, head, stride, H, G, h0, heads, B, rows, others, offset, ahead, behind,
            shift, cmin, length, batch, D: tl.constexpr, BD: tl.constexpr, WM: tl.constexpr, WN: tl.constexpr,
            TM: tl.constexpr, PACK: tl.constexpr, CB: tl.constexpr, SIZE: tl.constexpr, RANGED: tl.constexpr,
            BIASED: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """out[h, ρ, c] = Σ over batch and rows r ≡ ρ of dz[r, cmin + c − ρ] · x_r. BIASED: x_r + bias_h instead of x_r."""
    block = tl.program_id(0)
    local = tl.program_id(1) // 8
    rho = tl.program_id(1) % 8
    h = h0 + local
    TALL: tl.constexpr = 8 * (TM // PACK)
    d = tl.arange(0, BD)
    cc = tl.arange(0, CB)
    total = tl.zeros([CB, BD], tl.float32)
    column = cmin // 16 * 16 + block * CB
    zero = tl.minimum(B, 0).to(tl.float32)
    # Rows whose entries at these columns lie among the others at all.
    tiles = (rows + TALL - 1) // TALL
    n0 = tl.maximum(shift - column - CB - TALL, 0) // TALL
    n1 = tl.minimum(tl.maximum(shift + others + WN - column, 0) // TALL + 1, tiles)
    # One loop over batches and tiles: at short lengths a batch has a single tile, and loads must still run ahead.
    count = tl.maximum(n1 - n0, 1)
    for turn in tl.range(0, (B + PACK - 1) // PACK * count, num_stages=STAGES):
        first = (n0 + turn % count) * TALL
        b, r, down = rows_of_tile(turn // count, first, rho, rows, B, TM, PACK)
        zrow = dz + tl.cast(b * heads + local, tl.int64) * head + r.to(tl.int64) * stride
        xrow = x + tl.cast(b, tl.int64) * sx[0] + tl.cast(h // G, tl.int64) * sx[1] + r.to(tl.int64) * sx[2]
        lo, hi = stored(r, ranges, batch, b, rows, others, offset, ahead, behind, shift, WM, WN, SIZE, RANGED)
        place = (first + down + column)[:, None] + cc[None, :]
        inside = (place >= lo[:, None]) & (place < hi[:, None])
        ds = tl.load(zrow[:, None] + place, mask=inside, other=0.0)
        right = tl.load(xrow[:, None] + d[None, :], mask=(r[:, None] < rows) & (d[None, :] < D), other=0.0)
        if BIASED:
            added_row = tl.load(bias + tl.cast(h, tl.int64) * su + d, mask=d < D, other=0.0)
            moved = right.to(tl.float32) + added_row.to(tl.float32)[None, :]
            right = operand(moved.to(right.dtype), PREC)
        total = added(total, tl.trans(ds), right, zero, PREC)
    at = tl.cast(local * 8 + rho, tl.int64) * length + block * CB + cc
    tl.store(out + at[:, None] * D + d[None, :], total, mask=d[None, :] < D)


@triton.jit(do_not_specialize=_RUNTIME)
def collect_scalars(dz, gate, out, ranges, sg, head, stride, h0, heads, B, rows, others, offset, ahead, behind, shift,
                    cmin, span, batch, length, start, WM: tl.constexpr, SIZE: tl.constexpr, RANGED: tl.constexpr,
                    GATED: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """out[h, ρ, c + ρ], whose sum over the eight ρ is Σ over batch and rows r of dz[r, cmin + c] · gate_r (or · 1).

    Program (distance, head and quarter of the batch's blocks of rows) sums the SIZE × SIZE tiles that begin `distance`
    beyond their first row: first entry by entry, once along the diagonals. Those above the main one and those below
    belong to neighbouring columns, so each column has two sums of each quarter, one writer each.
    """
    local = tl.program_id(1) // 4
    quarter = tl.program_id(1) % 4
    distance = start + tl.program_id(0)
    # Blocks of rows that have a tile at this distance among the others at all.
    n0 = tl.maximum(-distance, 0)
    n1 = tl.minimum((rows + SIZE - 1) // SIZE, (others + SIZE - 1) // SIZE - distance)
    count = tl.maximum(n1 - n0, 0)
    each = tl.maximum(count, 1)
    turns = (B * count + 3) // 4
    a = tl.arange(0, SIZE)[:, None]
    w = tl.arange(0, SIZE)[None, :]
    entry = a.to(tl.int64) * stride + w
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for turn in tl.range(quarter * turns, tl.minimum(quarter * turns + turns, B * count), num_stages=STAGES):
        b = turn // each
        r = (n0 + turn % each) * SIZE
        place = r + distance * SIZE + shift // 16 * 16
        lo, hi = stored(r, ranges, batch, b, rows, others, offset, ahead, behind, shift, WM, SIZE, SIZE, RANGED)
        inside = (place >= lo) & (place < hi) & (r + a < rows)
        at = dz + tl.cast(b * heads + local, tl.int64) * head + tl.cast(r, tl.int64) * stride + place
        value = tl.load(at + entry, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            at_gate = gate + tl.cast(b, tl.int64) * sg[0] + tl.cast(h0 + local, tl.int64) * sg[1] + (r + a) * sg[2]
            value *= tl.load(at_gate, mask=r + a < rows, other=0.0).to(tl.float32)
        total += value
    # Entry (a, u) becomes (a, u + a): a diagonal is now a column, from SIZE − a on that of the tile before.
    turned = tl.gather(total, (w + a) % SIZE, 1)
    beyond = w + a >= SIZE
    column = (distance * SIZE + shift // 16 * 16 - cmin // 16 * 16) + tl.arange(0, SIZE)
    to = out + (tl.cast(local, tl.int64) * 8 + 2 * quarter) * length + 2 * quarter
    tl.store(to + column, tl.sum(tl.where(beyond, 0.0, turned), 0), mask=(column >= 0) & (column < span))
    column -= SIZE
    tl.store(to + length + 1 + column, tl.sum(tl.where(beyond, turned, 0.0), 0), mask=(column >= 0) & (column < span))


@triton.jit(do_not_specialize=_RUNTIME)
def reduce(partial, order, starts, parts, sums, crossed, gate, grad, sgrad, sgate, left_row, right_row, first, second,
           scale, H, h0, B, length, T, blocks, D: tl.constexpr, BD: tl.constexpr, N: tl.constexpr,
           SCALAR: tl.constexpr, GATED: tl.constexpr, ENDS: tl.constexpr, PARTS: tl.constexpr, CROSS: tl.constexpr,
           LONG: tl.constexpr):  # fmt: skip
    """grad[h, row] = scale · (Σ of the row's columns and residues + what the saturated sides add to end rows).

    Program (row, head) for all rows but the two ends, which have far more to sum and a launch of their own (ENDS: rows
    `first` and `second`). PARTS: the sides' sums come as one vector a block of `blocks` (the second includes the
    first), CROSS: less Σ sums · Σ ends of the tables `crossed`, which the shifted factor had added; else they are
    Σ sums · gate, of T sums a head. LONG: an int32 does not count eight residues of `length` columns,
    or what grad spans.
    """
    local = tl.program_id(1)
    h = h0 + local
    d = tl.arange(0, BD)
    n = tl.arange(0, N)
    total = tl.zeros([N, BD], tl.float32)
    number = tl.zeros([N], tl.float32)
    row = tl.program_id(0)
    mine = (row != left_row) & (row != right_row)
    if ENDS:
        row = tl.where(row == 0, first, second)
        mine = row >= 0
    a = tl.load(starts + row)
    e = tl.where(mine, tl.load(starts + row + 1), a)
    base = tl.cast(local, tl.int64) * 8 * length
    for c in range(a, e, N // 8):
        slot = c + n // 8
        column = tl.load(order + slot, mask=slot < e, other=0)
        residue = n % 8
        if LONG:
            residue = residue.to(tl.int64)
        place = base + residue * length + column + n % 8
        if SCALAR:
            number += tl.load(partial + place, mask=slot < e, other=0.0)
        else:
            total += tl.load(partial + place[:, None] * D + d[None, :],
                             mask=(slot < e)[:, None] & (d[None, :] < D), other=0.0)  # fmt: skip
    if ENDS:
        for side in tl.static_range(2):
            end = left_row
            if side == 1:
                end = right_row
            if row == end:
                if PARTS:
                    for c in range(0, B * blocks, N):
                        which = c + n
                        bh = (which // blocks) * H + h
                        part = ((bh.to(tl.int64) * blocks + which % blocks) * 2 + side)[:, None] * D + d[None, :]
                        inside = (which < B * blocks)[:, None] & (d[None, :] < D)
                        value = tl.load(parts + part, mask=inside, other=0.0)
                        if side == 1:
                            value -= tl.load(parts + part - D, mask=inside, other=0.0)
                        total += value
                if SCALAR or CROSS:
                    sigma = tl.zeros([N], tl.float32)
                    for c in range(0, B * T, N):
                        b = (c + n) // T
                        i = (c + n) % T
                        within = c + n < B * T
                        summed = tl.load(sums + ((side * B + b) * H + h).to(tl.int64) * T + i, mask=within, other=0.0)
                        if GATED:
                            gate_at = gate + b.to(tl.int64) * sgate[0] + tl.cast(h, tl.int64) * sgate[1] + i * sgate[2]
                            summed *= tl.load(gate_at, mask=within, other=0.0).to(tl.float32)
                        sigma += summed
                    if SCALAR:
                        number += sigma
                    else:
                        total -= sigma[:, None] * ends(crossed, h, d, D, side)[None, :]
    if LONG:
        row = tl.cast(row, tl.int64)
        d = d.to(tl.int64)
    to = grad + tl.cast(h, tl.int64) * sgrad[0] + row * sgrad[1]
    if SCALAR:
        tl.store(to, (tl.sum(number, 0) * scale).to(grad.dtype.element_ty), mask=mine)
    else:
        tl.store(to + d * sgrad[2], (tl.sum(total, 0) * scale).to(grad.dtype.element_ty), mask=mine & (d < D))
