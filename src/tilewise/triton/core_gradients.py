"""The tile loops of the backward: a pass over queries (dQ, dS by query) and a pass over keys (dK, dV, dS by key).

Both walk the forward's stretches (:mod:`.core`), decided on the same 64 × 64 blocks, so that what they write adds up.
In a saturated stretch the loops run on shifted q, k and v and on an lse that has the terms' constants in it: dQ, dK and
dV come out complete, and nothing of the terms is left in the loop.
"""

import triton
import triton.language as tl

from .core import RUNTIME, band_of, part_of
from .masks import kept, span_of, visible
from .operands import added, operand
from .tiles import load_rows, load_statistics, store_rows, store_skewed


@triton.jit
def _grad_query(acc, rows, q, g, ls, dl, k, sk, bk, hk, v, sv, bv, hv, terms, zs, values, zvs, out, dz, rule, seed, c,
                drop, inverse, b, h, n, bh, i0, a, e, Tq, Tk, offset, left, right, D: tl.constexpr, DV: tl.constexpr,
                BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BANDS: tl.constexpr,
                VALUES: tl.constexpr, STORE: tl.constexpr, SUMS: tl.constexpr, MASKED: tl.constexpr,
                DROPOUT: tl.constexpr, PREC: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """acc += dS·K over the keys a … e − 1; STORE writes dS to the skewed buffer, SUMS adds its rows to `rows`."""
    for j in tl.range(a, e, BN, num_stages=STAGES):
        kt = load_rows(k, sk, bk, hk, j, Tk, D, BN, BD, TMA)
        vt = load_rows(v, sv, bv, hv, j, Tk, DV, BN, BV, TMA)
        s = tl.dot(q, tl.trans(kt), input_precision=PREC)
        dp = tl.dot(g, tl.trans(vt), input_precision=PREC)
        if len(BANDS) > 0:
            z = tl.zeros([BM, BN], tl.float32)
            for t in tl.static_range(len(BANDS)):
                z += BANDS[t](terms[t], zs[t], b, h, n, i0, j, offset, Tq, Tk, BM, BN, False, TMA)
            p = tl.math.exp2(s * c + (z - ls[:, None]))
        else:
            p = tl.math.exp2(s * c - ls[:, None])
        for t in tl.static_range(len(VALUES)):
            dp += VALUES[t](values[t], zvs[t], b, h, n, i0, j, offset, Tq, Tk, BM, BN, False, TMA)
        if MASKED:
            i = (i0 + tl.arange(0, BM))[:, None]
            seen = visible(rule, b, h, i, (j + tl.arange(0, BN))[None, :], Tq, Tk, offset, left, right)
            p = tl.where(seen, p, 0.0)
        if DROPOUT:
            dp = tl.where(kept(seed, bh, i0, j, drop, BM, BN), dp * inverse, 0.0)
        ds = p * (dp - dl[:, None])
        if SUMS != "none" and kt.dtype == tl.float32:
            rows += tl.sum(tl.reshape(ds, (BM, BN // 16, 16)), 1)
        ds = operand(ds.to(kt.dtype), PREC)
        # Sums by additions took 8 % of the pass. Each column of the product has a sixteenth of the row's sum.
        if SUMS != "none" and kt.dtype != tl.float32:
            rows = tl.dot(ds, tl.full([BN, 16], 0.0625, tl.float32).to(kt.dtype), rows)
        if STORE:
            store_skewed(out, dz, n, i0, j + out.shift, Tq, ds, BM, BN, TMA)
        acc = added(acc, ds, kt, c * 0.0, PREC)
    return acc, rows


@triton.jit(do_not_specialize=RUNTIME)
def grad_query(q, k, v, g, qx, kx, vx, dq, stats, stat, pad, terms, z0, z1, z2, z3, z4, z5, z6, z7, values, y0, y1, out,
               dz, sums, parts, rule, ranges, seed, sq, sk, sv, sg, sqx, skx, svx, sdq, c, tau, inverse, drop, H, G, h0,
               heads, B, Tq, Tk, offset, lo, hi, left, right, batch, D: tl.constexpr, DV: tl.constexpr,
               BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr,
               BANDS: tl.constexpr, VALUES: tl.constexpr, BAND: tl.constexpr, SIDES: tl.constexpr,
               SHIFT_Q: tl.constexpr, SHIFT_K: tl.constexpr, SHIFT_V: tl.constexpr, STORE: tl.constexpr,
               SUMS: tl.constexpr, PARTS: tl.constexpr, RANGED: tl.constexpr, MASKED: tl.constexpr,
               ELEMENTWISE: tl.constexpr, DROPOUT: tl.constexpr, PREC: tl.constexpr, TMA: tl.constexpr,
               STAGES: tl.constexpr, BAND_STAGES: tl.constexpr):  # fmt: skip
    """dQ = τ·dS·K of BM queries, dS of the band into its skewed buffer, and the sums that the ends' rows need."""
    blocks = (Tq + BM - 1) // BM
    i0 = tl.program_id(0) % blocks * BM
    n = tl.program_id(0) // blocks
    b = n // heads
    h = h0 + n % heads
    hk = h // G
    bh = b * H + h
    zs = (z0, z1, z2, z3, z4, z5, z6, z7)
    ys = (y0, y1)
    i = i0 + tl.arange(0, BM)
    at = tl.cast(bh, tl.int64) * Tq + i
    plane = tl.cast(B * H, tl.int64) * Tq
    dl = load_statistics(stats, stat, 3, bh, i0, B * H, pad, BM, TMA)
    g_tile = load_rows(g, sg, b, h, i0, Tq, DV, BM, BV, TMA)
    acc = tl.zeros([BM, BD], tl.float32)
    # Decided on UNIT × UNIT blocks in every pass: only then do the ends' sums and dZ add up.
    ROWS: tl.constexpr = BM if BM > UNIT else UNIT
    vlo, vhi, flo, fhi = span_of(ranges, batch, b, i0 // ROWS * ROWS, Tk, UNIT, ROWS, UNIT, RANGED)
    if ELEMENTWISE:
        fhi = flo
    ba, be = band_of(i0 // ROWS * ROWS + offset, hi, -lo, vlo, vhi, UNIT, ROWS)
    for side in tl.static_range(2):
        if SIDES or (side == 0 and not BAND):
            rows = tl.zeros([BM, 16], tl.float32)
            a = vlo
            e = ba
            if side == 1:
                a = be
                e = vhi
            if not BAND:
                e = vhi
            lss = load_statistics(stats, stat, side + 1, bh, i0, B * H, pad, BM, TMA)
            if SHIFT_Q:
                qs = load_rows(qx, sqx, side * B + b, h, i0, Tq, D, BM, BD, TMA)
            else:
                qs = load_rows(q, sq, b, h, i0, Tq, D, BM, BD, TMA)
            for part in tl.static_range(3):
                if MASKED or part == 1:
                    pa, pe = part_of(a, e, flo, fhi, part)
                    if SHIFT_K:
                        k_, sk_, bk, hk_ = kx, skx, side * B + b, h
                    else:
                        k_, sk_, bk, hk_ = k, sk, b, hk
                    if SHIFT_V:
                        v_, sv_, bv, hv = vx, svx, side * B + b, h
                    else:
                        v_, sv_, bv, hv = v, sv, b, hk
                    acc, rows = _grad_query(acc, rows, qs, g_tile, lss, dl, k_, sk_, bk, hk_, v_, sv_, bv, hv, terms,
                                            zs, values, ys, out, dz, rule, seed, c, drop, inverse, b, h, n, bh, i0,
                                            pa, pe, Tq, Tk, offset, left, right, D, DV, BD, BV, BM, BN, (), (), False,
                                            SUMS, part != 1, DROPOUT, PREC, TMA, STAGES)  # fmt: skip
            if SUMS == "block":
                tl.store(sums + (side * B * H + bh) * blocks + i0 // BM, tl.sum(rows))
            if SUMS == "row":
                tl.store(sums + side * plane + at, tl.sum(rows, 1), mask=i < Tq)
            if PARTS:
                d = tl.arange(0, BD)
                at_part = (tl.cast(bh, tl.int64) * blocks + i0 // BM) * 2 + side
                tl.store(parts + at_part * D + d, tl.sum(acc, 0), mask=d < D)
    if BAND:
        if not SIDES:
            ba = vlo
            be = vhi
        qs = load_rows(q, sq, b, h, i0, Tq, D, BM, BD, TMA)
        lss = load_statistics(stats, stat, 0, bh, i0, B * H, pad, BM, TMA)
        acc, _ = _grad_query(acc, tl.zeros([BM, 16], tl.float32), qs, g_tile, lss, dl, k, sk, b, hk, v, sv, b, hk,
                             terms, zs, values, ys, out, dz, rule, seed, c, drop, inverse, b, h, n, bh, i0, ba, be, Tq,
                             Tk, offset, left, right, D, DV, BD, BV, BM, BN, BANDS, VALUES, STORE, "none", MASKED,
                             DROPOUT, PREC, TMA, BAND_STAGES)  # fmt: skip
    store_rows(dq, sdq, b, h, i0, Tq, acc * tau, D, BM, BD)


@triton.jit
def _grad_key(dk, dv, sigma, k, v, q, sq, bq, g, sg, stats, stat, pad, plane, planes, terms, zs, values, zvs, out, dz,
              rule, seed, c, drop, inverse, b, h, n, bh, j0, a, e, Tq, Tk, offset, left, right, D: tl.constexpr,
              DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
              BANDS: tl.constexpr, VALUES: tl.constexpr, STORE: tl.constexpr, MASKED: tl.constexpr,
              BIASED: tl.constexpr, DROPOUT: tl.constexpr, PREC: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
              BOTH: tl.constexpr = False, beyond=0, gap=0, other=0):  # fmt: skip
    """dk += dSᵀ·Q and dv += Pᵀ·dO over the queries a … e − 1; tiles are [keys, queries]. BIASED: sigma += Σ dS.

    BOTH: those from `beyond` on lie `gap` further, and their lse is in plane `other`.
    """
    for turn in tl.range(a, e, BM, num_stages=STAGES):
        i0 = turn
        if BOTH:
            i0 = turn + tl.where(turn < beyond, 0, gap)
        i = i0 + tl.arange(0, BM)
        qt = load_rows(q, sq, bq, h, i0, Tq, D, BM, BD, TMA)
        gt = load_rows(g, sg, b, h, i0, Tq, DV, BM, BV, TMA)
        here = plane
        if BOTH:
            here = tl.where(turn < beyond, plane, other)
        lss = load_statistics(stats, stat, here, bh, i0, planes, pad, BM, TMA)
        dl = load_statistics(stats, stat, 3, bh, i0, planes, pad, BM, TMA)
        s = tl.dot(k, tl.trans(qt), input_precision=PREC)
        if len(BANDS) > 0:
            z = tl.zeros([BN, BM], tl.float32)
            for t in tl.static_range(len(BANDS)):
                z += BANDS[t](terms[t], zs[t], b, h, n, i0, j0, offset, Tq, Tk, BM, BN, True, TMA)
            p = tl.math.exp2(s * c + (z - lss[None, :]))
        else:
            p = tl.math.exp2(s * c - lss[None, :])
        if MASKED:
            j = (j0 + tl.arange(0, BN))[:, None]
            p = tl.where(visible(rule, b, h, i[None, :], j, Tq, Tk, offset, left, right), p, 0.0)
        dp = tl.dot(v, tl.trans(gt), input_precision=PREC)
        for t in tl.static_range(len(VALUES)):
            dp += VALUES[t](values[t], zvs[t], b, h, n, i0, j0, offset, Tq, Tk, BM, BN, True, TMA)
        pd = p
        if DROPOUT:
            keep = tl.trans(kept(seed, bh, i0, j0, drop, BM, BN))
            pd = tl.where(keep, p * inverse, 0.0)
            dp = tl.where(keep, dp * inverse, 0.0)
        dv = added(dv, operand(pd.to(gt.dtype), PREC), gt, c * 0.0, PREC)
        ds = p * (dp - dl[None, :])
        if BIASED:
            sigma += tl.sum(ds, 1)
        ds = operand(ds.to(qt.dtype), PREC)
        if STORE:
            store_skewed(out, dz, n, j0, i0 + out.shift, Tk, ds, BN, BM, TMA)
        dk = added(dk, ds, qt, c * 0.0, PREC)
    return dk, dv, sigma


@triton.jit
def _key_head(dk, dv, q, k, v, g, qx, kx, vx, stats, stat, pad, terms, zs, values, ys, out, dz, parts, vparts, bias, su,
              rule, ranges, seed, sq, sk, sv, sg, sqx, skx, svx, c, inverse, drop, H, h0, heads, B, Tq, Tk, offset, lo,
              hi, left, right, batch, b, h, hk, j0, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
              BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr, BANDS: tl.constexpr,
              VALUES: tl.constexpr, BAND: tl.constexpr, SIDES: tl.constexpr, SHIFT_Q: tl.constexpr,
              SHIFT_K: tl.constexpr, SHIFT_V: tl.constexpr, STORE: tl.constexpr, PARTS: tl.constexpr,
              BIASED: tl.constexpr, RANGED: tl.constexpr, MASKED: tl.constexpr, ELEMENTWISE: tl.constexpr,
              DROPOUT: tl.constexpr, PREC: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
              BAND_STAGES: tl.constexpr):  # fmt: skip
    """What one query head adds to dk and dv. BIASED: its queries are q + bias_h."""
    bh = b * H + h
    n = b * heads + h - h0
    j = j0 + tl.arange(0, BN)
    sigma = tl.zeros([BN], tl.float32)
    blocks = (Tk + BN - 1) // BN
    dk0 = tl.sum(tl.where((j < Tk)[:, None], dk, 0.0), 0)
    dv0 = tl.sum(tl.where((j < Tk)[:, None], dv, 0.0), 0)
    ROWS: tl.constexpr = BN if BN > UNIT else UNIT
    vlo, vhi, flo, fhi = span_of(ranges, batch, b, j0 // ROWS * ROWS, Tq, UNIT, ROWS, UNIT, RANGED)
    if not RANGED:
        # Queries beyond Tq have lse = +∞, hence P = 0; keys beyond Tk need the mask.
        fhi = vhi
    if ELEMENTWISE or MASKED:
        fhi = tl.where(j0 + BN > Tk, flo, fhi)
    if ELEMENTWISE:
        fhi = flo
    ba, be = band_of(j0 // ROWS * ROWS - offset, -lo, hi, vlo, vhi, UNIT, ROWS)
    # Where nothing but lse differs between the sides, one loop takes both: the smaller queries are side 1.
    BOTH: tl.constexpr = BAND and SIDES and not (SHIFT_Q or SHIFT_K or SHIFT_V or MASKED or PARTS)
    if BOTH:
        ks = load_rows(k, sk, b, hk, j0, Tk, D, BN, BD, TMA)
        vs = load_rows(v, sv, b, hk, j0, Tk, DV, BN, BV, TMA)
        dk, dv, sigma = _grad_key(dk, dv, sigma, ks, vs, q, sq, b, g, sg, stats, stat, pad, 2, B * H, terms, zs,
                                  values, ys, out, dz, rule, seed, c, drop, inverse, b, h, n, bh, j0, vlo,
                                  vhi - (be - ba), Tq, Tk, offset, left, right, D, DV, BD, BV, BM, BN, (), (), False,
                                  False, BIASED, DROPOUT, PREC, TMA, STAGES, True, ba, be - ba, 1)  # fmt: skip
    for side in tl.static_range(0 if BOTH else 2):
        if SIDES or (side == 0 and not BAND):
            a = be
            e = vhi
            if side == 1:
                a = vlo
                e = ba
            if not BAND:
                a = vlo
            if SHIFT_K:
                ks = load_rows(kx, skx, side * B + b, h, j0, Tk, D, BN, BD, TMA)
            else:
                ks = load_rows(k, sk, b, hk, j0, Tk, D, BN, BD, TMA)
            if SHIFT_V:
                vs = load_rows(vx, svx, side * B + b, h, j0, Tk, DV, BN, BV, TMA)
            else:
                vs = load_rows(v, sv, b, hk, j0, Tk, DV, BN, BV, TMA)
            for part in tl.static_range(3):
                if MASKED or part == 1:
                    pa, pe = part_of(a, e, flo, fhi, part)
                    if SHIFT_Q:
                        q_, sq_, bq = qx, sqx, side * B + b
                    else:
                        q_, sq_, bq = q, sq, b
                    dk, dv, sigma = _grad_key(dk, dv, sigma, ks, vs, q_, sq_, bq, g, sg, stats, stat, pad, side + 1,
                                              B * H, terms, zs, values, ys, out, dz, rule, seed, c, drop, inverse, b,
                                              h, n, bh, j0, pa, pe, Tq, Tk, offset, left, right, D, DV, BD, BV, BM, BN,
                                              (), (), False, part != 1, BIASED, DROPOUT, PREC, TMA,
                                              STAGES)  # fmt: skip
            at_part = (tl.cast(bh, tl.int64) * blocks + j0 // BN) * 2 + side
            if PARTS:
                d = tl.arange(0, BD)
                total = tl.sum(tl.where((j < Tk)[:, None], dk, 0.0), 0)
                tl.store(parts + at_part * D + d, total - dk0, mask=d < D)
            if SHIFT_V:
                d = tl.arange(0, BV)
                total = tl.sum(tl.where((j < Tk)[:, None], dv, 0.0), 0)
                tl.store(vparts + at_part * DV + d, total - dv0, mask=d < DV)
    if BAND:
        if not SIDES:
            ba = vlo
            be = vhi
        ks = load_rows(k, sk, b, hk, j0, Tk, D, BN, BD, TMA)
        vs = load_rows(v, sv, b, hk, j0, Tk, DV, BN, BV, TMA)
        dk, dv, sigma = _grad_key(dk, dv, sigma, ks, vs, q, sq, b, g, sg, stats, stat, pad, 0, B * H, terms, zs,
                                  values, ys, out, dz, rule, seed, c, drop, inverse, b, h, n, bh, j0, ba, be, Tq, Tk,
                                  offset, left, right, D, DV, BD, BV, BM, BN, BANDS, VALUES, STORE, MASKED, BIASED,
                                  DROPOUT, PREC, TMA, BAND_STAGES)  # fmt: skip
    if BIASED:
        d = tl.arange(0, BD)
        row = tl.load(bias + tl.cast(h, tl.int64) * su + d, mask=d < D, other=0.0).to(tl.float32)
        dk += sigma[:, None] * row[None, :]
    return dk, dv


@triton.jit(do_not_specialize=RUNTIME)
def grad_key(q, k, v, g, qx, kx, vx, dk, dv, stats, stat, pad, terms, z0, z1, z2, z3, z4, z5, z6, z7, values, y0, y1,
             out, dz, parts, vparts, bias, rule, ranges, seed, sq, sk, sv, sg, sqx, skx, svx, sdk, sdv, su, c, tau,
             inverse, drop, H, G, h0, heads, B, Tq, Tk, offset, lo, hi, left, right, batch, D: tl.constexpr,
             DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
             UNIT: tl.constexpr, BANDS: tl.constexpr, VALUES: tl.constexpr, BAND: tl.constexpr, SIDES: tl.constexpr,
             SHIFT_Q: tl.constexpr, SHIFT_K: tl.constexpr, SHIFT_V: tl.constexpr, STORE: tl.constexpr,
             PARTS: tl.constexpr, BIASED: tl.constexpr, SHARED: tl.constexpr, RANGED: tl.constexpr,
             MASKED: tl.constexpr, ELEMENTWISE: tl.constexpr, DROPOUT: tl.constexpr, PREC: tl.constexpr,
             TMA: tl.constexpr, STAGES: tl.constexpr, BAND_STAGES: tl.constexpr):  # fmt: skip
    """dK = τ·dSᵀ·Q and dV = Pᵀ·dO of BN keys, summed over the G query heads of their key head, in order."""
    blocks = (Tk + BN - 1) // BN
    j0 = tl.program_id(0) % blocks * BN
    n = tl.program_id(0) // blocks
    kheads = heads // G
    b = n // kheads
    hk = h0 // G + n % kheads
    zs = (z0, z1, z2, z3, z4, z5, z6, z7)
    ys = (y0, y1)
    acc_k = tl.zeros([BN, BD], tl.float32)
    acc_v = tl.zeros([BN, BV], tl.float32)
    if SHARED:
        for h in range(hk * G, hk * G + G):
            acc_k, acc_v = _key_head(acc_k, acc_v, q, k, v, g, qx, kx, vx, stats, stat, pad, terms, zs, values, ys, out,
                                     dz, parts, vparts, bias, su, rule, ranges, seed, sq, sk, sv, sg, sqx, skx, svx, c,
                                     inverse, drop, H, h0, heads, B, Tq, Tk, offset, lo, hi, left, right, batch, b, h,
                                     hk, j0, D, DV, BD, BV, BM, BN, UNIT, BANDS, VALUES, BAND, SIDES, SHIFT_Q, SHIFT_K,
                                     SHIFT_V, STORE, PARTS, BIASED, RANGED, MASKED, ELEMENTWISE, DROPOUT, PREC, TMA,
                                     STAGES, BAND_STAGES)  # fmt: skip
    else:
        acc_k, acc_v = _key_head(acc_k, acc_v, q, k, v, g, qx, kx, vx, stats, stat, pad, terms, zs, values, ys, out, dz,
                                 parts, vparts, bias, su, rule, ranges, seed, sq, sk, sv, sg, sqx, skx, svx, c,
                                 inverse, drop, H, h0, heads, B, Tq, Tk, offset, lo, hi, left, right, batch, b, hk, hk,
                                 j0, D, DV, BD, BV, BM, BN, UNIT, BANDS, VALUES, BAND, SIDES, SHIFT_Q, SHIFT_K,
                                 SHIFT_V, STORE, PARTS, BIASED, RANGED, MASKED, ELEMENTWISE, DROPOUT, PREC, TMA,
                                 STAGES, BAND_STAGES)  # fmt: skip
    store_rows(dk, sdk, b, hk, j0, Tk, acc_k * tau, D, BN, BD)
    store_rows(dv, sdv, b, hk, j0, Tk, acc_v, DV, BN, BV)
