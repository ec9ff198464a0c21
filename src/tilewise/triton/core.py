"""The tile loops of the forward pass, for whatever terms they are given; :mod:`.core_gradients` has the backward ones.

A pass walks three stretches of tiles: saturated left (side 0), band, saturated right (side 1). In a saturated stretch
every offset has its end's table row, so S = c·(q + shift)·k + edge is plain attention on a shifted tile, with no work
for the terms in the loop; in the band, each term adds its tile. Tiles arrive as loads, never as sums made in registers:
a loop-invariant register tensor as the left operand of a Hopper dot is overwritten (ptxas before 13.3). Scores are in
log2 units, c = τ·log2 e. Each value has one writer.
"""

import triton
import triton.language as tl

from .masks import kept, span_of, visible
from .operands import added, operand
from .tiles import load_rows, store_rows, store_skewed

# Lengths, offsets and scales must not make a new kernel each.
RUNTIME = [
    "c", "tau", "drop", "inverse", "H", "G", "h0", "heads", "B", "Tq", "Tk", "offset", "lo", "hi", "left", "right",
    "batch", "blocks", "shift", "width",
]  # fmt: skip


@triton.jit
def band_of(first, ahead, behind, lo, hi, STEP: tl.constexpr, N: tl.constexpr):
    """The stretch [a, e) of tiles that hold an unsaturated offset, for N rows, inside [lo, hi)."""
    a = tl.maximum(first - ahead + 1, 0) // STEP * STEP
    e = (tl.maximum(first + N - 1 + behind, 0) + STEP - 1) // STEP * STEP
    a = tl.minimum(tl.maximum(a, lo), hi)
    return a, tl.minimum(tl.maximum(e, a), hi)


@triton.jit
def part_of(a, e, flo, fhi, PART: tl.constexpr):
    """Of the stretch [a, e): what lies before (0), inside (1) and after (2) the tiles that need no element mask."""
    first = tl.minimum(tl.maximum(flo, a), e)
    last = tl.minimum(tl.maximum(fhi, first), e)
    if PART == 0:
        last = first
        first = a
    if PART == 2:
        first = last
        last = e
    return first, last


@triton.jit
def _attend(acc, l, m, edge, q, k, sk, hk, v, sv, bv, hv, terms, zs, rule, seed, c, drop, b, h, n, bh, i0, a, e,
            Tq, Tk, offset, left, right, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, BANDS: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
            EDGED: tl.constexpr, NEGATIVE: tl.constexpr, PREC: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
            BOTH: tl.constexpr = False, beyond=0, gap=0, other=0.0):  # fmt: skip
    """Online softmax over the keys a … e − 1; BANDS are the terms that add a tile there, EDGED adds `edge` to rows.

    BOTH: all keys are saturated. Those from `beyond` on lie `gap` further, and their rows have the edge `other`.
    """
    for turn in tl.range(a, e, BN, num_stages=STAGES):
        j = turn
        if BOTH:
            j = turn + tl.where(turn < beyond, 0, gap)
        s = tl.dot(q, tl.trans(load_rows(k, sk, b, hk, j, Tk, D, BN, BD, TMA)), input_precision=PREC)
        if MASKED or EDGED or NEGATIVE or len(BANDS) > 0:
            s = s * c + edge[:, None] if EDGED else s * c
            for t in tl.static_range(len(BANDS)):
                s += BANDS[t](terms[t], zs[t], b, h, n, i0, j, offset, Tq, Tk, BM, BN, False, TMA)
            if MASKED:
                i = (i0 + tl.arange(0, BM))[:, None]
                seen = visible(rule, b, h, i, (j + tl.arange(0, BN))[None, :], Tq, Tk, offset, left, right)
                s = tl.where(seen, s, float("-inf"))
            new = tl.maximum(m, tl.max(s, 1))
            p = tl.math.exp2(s - new[:, None])
        else:
            # The scale, which is not negative, joins the subtraction: one multiply-add an element.
            if BOTH:
                here = tl.where(turn < beyond, edge, other)
                new = tl.maximum(m, tl.max(s, 1) * c + here)
                p = tl.math.exp2(s * c - (new - here)[:, None])
            else:
                new = tl.maximum(m, tl.max(s, 1) * c)
                p = tl.math.exp2(s * c - new[:, None])
        shrink = tl.math.exp2(m - new)
        l = l * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        m = new
        if DROPOUT:
            p = tl.where(kept(seed, bh, i0, j, drop, BM, BN), p, 0.0)
        tile = load_rows(v, sv, bv, hv, j, Tk, DV, BN, BV, TMA)
        acc = added(acc, operand(p.to(tile.dtype), PREC), tile, c * 0.0, PREC)
    return acc, l, m


@triton.jit(do_not_specialize=RUNTIME)
def attend(q, k, v, qx, vx, o, lse, terms, z0, z1, z2, z3, z4, z5, z6, z7, rule, ranges, seed, sq, sk, sv, sqx, svx, so,
           c, inverse, drop, H, G, h0, heads, B, Tq, Tk, offset, lo, hi, left, right, batch, D: tl.constexpr,
           DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr,
           BANDS: tl.constexpr, EDGES: tl.constexpr, BAND: tl.constexpr, SIDES: tl.constexpr, SHIFT_Q: tl.constexpr,
           SHIFT_V: tl.constexpr, RANGED: tl.constexpr, MASKED: tl.constexpr, ELEMENTWISE: tl.constexpr,
           DROPOUT: tl.constexpr, EXACT: tl.constexpr, NEGATIVE: tl.constexpr, SCALAR: tl.constexpr,
           PREC: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, BAND_STAGES: tl.constexpr):  # fmt: skip
    """O and lse of BM queries: program (block, batch·heads). SCALAR: all terms are numbers an offset."""
    blocks = (Tq + BM - 1) // BM
    i0 = tl.program_id(0) % blocks * BM
    n = tl.program_id(0) // blocks
    b = n // heads
    h = h0 + n % heads
    hk = h // G
    bh = b * H + h
    zs = (z0, z1, z2, z3, z4, z5, z6, z7)
    i = i0 + tl.arange(0, BM)
    acc = tl.zeros([BM, BV], tl.float32)
    l = tl.zeros([BM], tl.float32)
    m = tl.full([BM], -3.0e38, tl.float32)
    edge = tl.zeros([BM], tl.float32)
    ROWS: tl.constexpr = BM if BM > UNIT else UNIT
    STEP: tl.constexpr = BN if BN > UNIT else UNIT
    vlo, vhi, flo, fhi = span_of(ranges, batch, b, i0 // ROWS * ROWS, Tk, STEP, ROWS, UNIT, RANGED)
    if ELEMENTWISE:
        fhi = flo
    ba, be = band_of(i0 // ROWS * ROWS + offset, hi, -lo, vlo, vhi, STEP, ROWS)
    if not SHIFT_Q:
        # Once for all loops, each of which would wait for it.
        qs = load_rows(q, sq, b, h, i0, Tq, D, BM, BD, TMA)
    # Where nothing but the edge differs between the sides, one loop takes both. With edges that are products of a row,
    # ptxas would run all its products one after the other.
    BOTH: tl.constexpr = SCALAR and BAND and SIDES and not (SHIFT_Q or SHIFT_V or MASKED or EXACT or NEGATIVE)
    if BOTH:
        acc, l, m = _attend(acc, l, m, edge, qs, k, sk, hk, v, sv, b, hk, terms, zs, rule, seed, c, drop, b, h, n, bh,
                            i0, ba, be, Tq, Tk, offset, left, right, D, DV, BD, BV, BM, BN, BANDS, False, DROPOUT,
                            False, False, PREC, TMA, BAND_STAGES)  # fmt: skip
        other = edge
        for t in tl.static_range(len(EDGES)):
            edge += EDGES[t](terms[t], b, h, i, Tq, 0)
            other += EDGES[t](terms[t], b, h, i, Tq, 1)
        acc, l, m = _attend(acc, l, m, edge, qs, k, sk, hk, v, sv, b, hk, terms, zs, rule, seed, c, drop, b, h, n, bh,
                            i0, vlo, vhi - (be - ba), Tq, Tk, offset, left, right, D, DV, BD, BV, BM, BN, (), False,
                            DROPOUT, False, False, PREC, TMA, STAGES, True, ba, be - ba, other)  # fmt: skip
    for side in tl.static_range(0 if BOTH else 2):
        if SIDES or (side == 0 and not BAND):
            if SHIFT_Q:
                qs = load_rows(qx, sqx, side * B + b, h, i0, Tq, D, BM, BD, TMA)
            a = vlo
            e = ba
            if side == 1:
                a = be
                e = vhi
            if not BAND:
                e = vhi
            edge = tl.zeros([BM], tl.float32)
            for t in tl.static_range(len(EDGES)):
                edge += EDGES[t](terms[t], b, h, i, Tq, side)
            # For fp32 inputs two roundings of m would show: there each score takes the edge, in its one multiply-add.
            if not EXACT:
                m = m - edge
            for part in tl.static_range(3):
                if MASKED or part == 1:
                    pa, pe = part_of(a, e, flo, fhi, part)
                    if SHIFT_V:
                        acc, l, m = _attend(acc, l, m, edge, qs, k, sk, hk, vx, svx, side * B + b, h, terms, zs, rule,
                                            seed, c, drop, b, h, n, bh, i0, pa, pe, Tq, Tk, offset, left, right, D, DV,
                                            BD, BV, BM, BN, (), part != 1, DROPOUT, EXACT and len(EDGES) > 0, NEGATIVE,
                                            PREC, TMA, STAGES)  # fmt: skip
                    else:
                        acc, l, m = _attend(acc, l, m, edge, qs, k, sk, hk, v, sv, b, hk, terms, zs, rule, seed, c,
                                            drop, b, h, n, bh, i0, pa, pe, Tq, Tk, offset, left, right, D, DV, BD, BV,
                                            BM, BN, (), part != 1, DROPOUT, EXACT and len(EDGES) > 0, NEGATIVE, PREC,
                                            TMA, STAGES)  # fmt: skip
            if not EXACT:
                m = m + edge
        if side == 0 and BAND:
            if not SIDES:
                ba = vlo
                be = vhi
            if SHIFT_Q:
                qs = load_rows(q, sq, b, h, i0, Tq, D, BM, BD, TMA)
            acc, l, m = _attend(acc, l, m, edge, qs, k, sk, hk, v, sv, b, hk, terms, zs, rule, seed, c, drop, b, h, n,
                                bh, i0, ba, be, Tq, Tk, offset, left, right, D, DV, BD, BV, BM, BN, BANDS, MASKED,
                                DROPOUT, False, NEGATIVE, PREC, TMA, BAND_STAGES)  # fmt: skip
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    store_rows(o, so, b, h, i0, Tq, acc * (inverse / l)[:, None], DV, BM, BV)
    total = tl.where(empty, float("-inf"), (m + tl.math.log2(l)) * 0.6931471805599453)
    tl.store(lse + tl.cast(bh, tl.int64) * Tq + i, total, mask=i < Tq)


@triton.jit(do_not_specialize=RUNTIME)
def probabilities(q, k, lse, terms, z0, z1, z2, z3, z4, z5, z6, z7, out, dz, rule, ranges, seed, sq, sk, c, inverse,
                  drop, H, G, h0, heads, B, Tq, Tk, offset, lo, hi, left, right, batch, D: tl.constexpr,
                  BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr, BANDS: tl.constexpr,
                  SIDES: tl.constexpr, RANGED: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
                  PREC: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """P of the band (as dropout leaves it) into a skewed buffer, for terms that multiply probabilities."""
    blocks = (Tq + BM - 1) // BM
    i0 = tl.program_id(0) % blocks * BM
    n = tl.program_id(0) // blocks
    b = n // heads
    h = h0 + n % heads
    bh = b * H + h
    zs = (z0, z1, z2, z3, z4, z5, z6, z7)
    i = i0 + tl.arange(0, BM)
    ls = tl.load(lse + tl.cast(bh, tl.int64) * Tq + i, mask=i < Tq, other=float("-inf"))
    ls = tl.where(ls == float("-inf"), float("inf"), ls * 1.4426950408889634)
    vlo, vhi, _, _ = span_of(ranges, batch, b, i0 // UNIT * UNIT, Tk, UNIT, UNIT, UNIT, RANGED)
    ba, be = band_of(i0 // UNIT * UNIT + offset, hi, -lo, vlo, vhi, UNIT, UNIT)
    if not SIDES:
        ba = vlo
        be = vhi
    qt = load_rows(q, sq, b, h, i0, Tq, D, BM, BD, TMA)
    for j in tl.range(ba, be, BN, num_stages=STAGES):
        s = tl.dot(qt, tl.trans(load_rows(k, sk, b, h // G, j, Tk, D, BN, BD, TMA)), input_precision=PREC)
        z = tl.zeros([BM, BN], tl.float32)
        for t in tl.static_range(len(BANDS)):
            z += BANDS[t](terms[t], zs[t], b, h, n, i0, j, offset, Tq, Tk, BM, BN, False, TMA)
        p = tl.math.exp2(s * c + (z - ls[:, None]))
        if MASKED:
            seen = visible(rule, b, h, i[:, None], (j + tl.arange(0, BN))[None, :], Tq, Tk, offset, left, right)
            p = tl.where(seen, p, 0.0)
        if DROPOUT:
            p = tl.where(kept(seed, bh, i0, j, drop, BM, BN), p * inverse, 0.0)
        p = operand(p.to(out.z.dtype.element_ty), PREC)
        store_skewed(out, dz, n, i0, j + out.shift, Tq, p, BM, BN, TMA)
