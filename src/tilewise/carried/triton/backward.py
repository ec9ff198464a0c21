"""The backward pass: keys stay while queries pass (dK, dV and the chain of E), then dQ as a product with stored E.

Every value has one writer and every sum one order, so two runs are bitwise equal.
"""

import triton
import triton.language as tl

from ...triton.masks import kept
from ...triton.tiles import load_rows, store_rows
from .tiles import (
    RUNTIME,
    base_of,
    bounds_of,
    load_each,
    load_gains,
    load_packed,
    load_shifts,
    softmax_argument,
    store_packed,
    summed,
    visible,
)  # fmt: skip


@triton.jit
def score_gradient(u, v, do, lse, delta, seen, seed, bh, i0, j0, scale, bend, factor, drop, inverse, BM: tl.constexpr,
                   BN: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """P as dropout leaves it, and dS in units of the scale, of one tile of unscaled scores u."""
    s, slope = softmax_argument(u, scale, bend, SOFTCAP)
    s = s - lse[:, None]
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    p = tl.math.exp2(s)
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    dropped = p
    if DROPOUT:
        keep = kept(seed, bh, i0, j0, drop, BM, BN)
        dropped = tl.where(keep, p * inverse, 0.0)
        dp = tl.where(keep, dp * inverse, 0.0)
    ds = p * (dp - delta[:, None]) * factor
    if SOFTCAP:
        ds = ds * slope
        if MASKED:
            # A score that nothing wrote may be NaN, and so is its slope.
            ds = tl.where(seen, ds, 0.0)
    return dropped, ds


@triton.jit
def back_to(ds, gains, bounds, b, B, i, j, Tq, COUNT: tl.constexpr, TARGET: tl.constexpr, GAIN: tl.constexpr,
            UNIFORM: tl.constexpr, BATCHED: tl.constexpr):  # fmt: skip
    """The gradient of layer TARGET's scores from that of the last one's."""
    for r in tl.static_range(COUNT - 1 - TARGET):
        t = COUNT - 1 - r
        if GAIN:
            ds = ds * gains[t]
        if not UNIFORM:
            lo, hi = bounds_of(bounds, t - 1, b, i, B, Tq, BATCHED)
            ds = tl.where(visible(lo, hi, j), ds, 0.0)
    return ds


@triton.jit
def _queries(dk, dv, dg, q, kt, sq, v, do, sdo, lse, delta, z, e, gains, shifts, bounds, rows, seed, b, bh, h, B,
             j0, tn, a, e_row, Tq, M, slots, back, planes, scale, bend, factor, drop, inverse, D: tl.constexpr,
             DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, S: tl.constexpr,
             DTYPE: tl.constexpr, TOP: tl.constexpr, OWN: tl.constexpr, ENTERS: tl.constexpr, COUNT: tl.constexpr,
             TARGET: tl.constexpr, GAIN: tl.constexpr, LEARNED: tl.constexpr, CENTRE: tl.constexpr, ROUND: tl.constexpr,
             UNIFORM: tl.constexpr, BATCHED: tl.constexpr, CLOSED: tl.constexpr, SOFTCAP: tl.constexpr,
             DROPOUT: tl.constexpr, READS_E: tl.constexpr, STORES_E: tl.constexpr, ETYPE: tl.constexpr,
             VALUES: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """The queries a … e_row − 1 against one block of keys."""
    j = j0 + tl.arange(0, BN)
    for i0 in tl.range(a, e_row, BM, num_stages=STAGES):
        i = i0 + tl.arange(0, BM)
        tm = i0 // S
        slot = bh * slots + base_of(rows, tm, back, CLOSED) + tn
        if MASKED:
            # A dead tile between live ones has no slot: the spare one takes what it writes, and no value read counts.
            live = (tn >= tl.load(rows + M + tm)) & (tn < tl.load(rows + 2 * M + tm))
            slot = tl.where(live, slot, bh * slots + slots - 1)
        qt = load_each(q, sq, b, h, i0, Tq, D, BM, BD, COUNT, TMA)
        u = tl.zeros([BM, BN], tl.float32)
        if OWN or ENTERS:
            u = load_packed(z, slot, i0 - tm * S, j0 - tn * S, S, BM, BN, TMA).to(tl.float32)
            if not UNIFORM and not OWN:
                entered = (tn >= tl.load(rows + 3 * M + tm)) & (tn < tl.load(rows + 4 * M + tm))
                u = tl.where(entered, u, 0.0)
        taken = u
        if not OWN:
            each_shift = load_shifts(shifts, bh, i, planes, Tq, COUNT, CENTRE)
            u, taken = summed(u, qt, kt, gains, each_shift, bounds, b, B, i, j, Tq, DTYPE, TOP, ENTERS,
                              COUNT, GAIN, CENTRE, ROUND, UNIFORM, BATCHED, TARGET)  # fmt: skip
        lo, hi = bounds_of(bounds, COUNT - 1 if not UNIFORM else 0, b, i, B, Tq, BATCHED)
        seen = visible(lo, hi, j)
        g = load_rows(do, sdo, b, h, i0, Tq, DV, BM, BV, TMA)
        at = tl.cast(bh, tl.int64) * Tq + i
        row = tl.load(lse + at, mask=i < Tq, other=float("inf"))
        p, ds = score_gradient(u, v, g, row, tl.load(delta + at, mask=i < Tq, other=0.0), seen, seed, bh, i0, j0, scale,
                               bend, factor, drop, inverse, BM, BN, SOFTCAP, DROPOUT, MASKED)  # fmt: skip
        if VALUES:
            dv = tl.dot(tl.trans(p.to(g.dtype)), g, dv, input_precision="ieee")
        if READS_E:
            asked = load_packed(e, slot, i0 - tm * S, j0 - tn * S, S, BM, BN, TMA).to(tl.float32)
            if not UNIFORM:
                after = (tn >= tl.load(rows + 5 * M + tm)) & (tn < tl.load(rows + 6 * M + tm))
                asked = tl.where(after, asked, 0.0)
            if MASKED:
                asked = tl.where(seen, asked, 0.0)
            ds += asked
        if STORES_E:
            kept_ds = ds
            if ETYPE == tl.float16:
                kept_ds = tl.minimum(tl.maximum(ds, -65504.0), 65504.0)
            store_packed(e, slot, i0 - tm * S, j0 - tn * S, kept_ds.to(ETYPE), S, BM, BN, TMA)
        ds = back_to(ds, gains, bounds, b, B, i, j, Tq, COUNT, TARGET, GAIN, UNIFORM, BATCHED)
        dk = tl.dot(tl.trans(ds.to(g.dtype)), qt[TARGET], dk, input_precision="ieee")
        if LEARNED:
            if MASKED:
                taken = tl.where(ds != 0.0, taken, 0.0)
            dg += tl.sum(ds * taken, 0)
    return dk, dv, dg


@triton.jit(do_not_specialize=RUNTIME)
def keys_gradient(q0, q1, q2, q3, k0, k1, k2, k3, v, do, lse, delta, z, e, dk, dv, dg, gains, shifts, bounds, rows,
                  columns, seed, sq, sk, sv, sdo, sdk, sdv, B, H, G, Tq, Tk, M, slots, back, scale, bend, factor, drop,
                  inverse, final, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, 
                  BM: tl.constexpr, BN: tl.constexpr, S: tl.constexpr, DTYPE: tl.constexpr, TOP: tl.constexpr,
                  OWN: tl.constexpr,
                  ENTERS: tl.constexpr, COUNT: tl.constexpr, TARGET: tl.constexpr, GAIN: tl.constexpr,
                  LEARNED: tl.constexpr, CENTRE: tl.constexpr, ROUND: tl.constexpr, UNIFORM: tl.constexpr,
                  BATCHED: tl.constexpr, CLOSED: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
                  READS_E: tl.constexpr, STORES_E: tl.constexpr, ETYPE: tl.constexpr, VALUES: tl.constexpr,
                  TMA: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """dK of layer TARGET, dV, E and dβ for BN keys of one query head: program (block, batch · heads)."""
    j0 = tl.program_id(0) * BN
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    hk = h // G
    tn = j0 // S
    N = (Tk + S - 1) // S
    own = tl.load(columns + tn)
    own_end = tl.load(columns + N + tn)
    whole = tl.load(columns + 2 * N + tn)
    whole_end = tl.load(columns + 3 * N + tn)
    kt = load_each((k0, k1, k2, k3), sk, b, hk, j0, Tk, D, BN, BD, COUNT, TMA)
    vt = load_rows(v, sv, b, hk, j0, Tk, DV, BN, BV, TMA)
    each_gain = load_gains(gains, h, H, COUNT, GAIN)
    dkt = tl.zeros([BN, BD], tl.float32)
    dvt = tl.zeros([BN, BV], tl.float32)
    dgt = tl.zeros([BN], tl.float32)
    for part in tl.static_range(3):
        # Tile rows before, inside and after a run of rows that see every key of the tile.
        first = tl.minimum(tl.maximum(whole, own), own_end)
        last = tl.minimum(tl.maximum(whole_end, first), own_end)
        if part == 0:
            a = own
            end = first
        if part == 1:
            a = first
            end = last
        if part == 2:
            a = last
            end = own_end
        dkt, dvt, dgt = _queries(dkt, dvt, dgt, (q0, q1, q2, q3), kt, sq, vt, do, sdo, lse, delta, z,
                                 e, each_gain, shifts, bounds, rows, seed, b, bh, h, B, j0, tn, a * S,
                                 tl.minimum(end * S, Tq), Tq, M, slots, back, B * H, scale, bend, factor, drop, inverse,
                                 D, DV, BD, BV, BM, BN, S, DTYPE, TOP, OWN, ENTERS, COUNT, TARGET, GAIN, LEARNED,
                                 CENTRE, ROUND, UNIFORM, BATCHED, CLOSED, SOFTCAP, DROPOUT, READS_E, STORES_E, ETYPE,
                                 VALUES, part != 1, TMA, STAGES)  # fmt: skip
    store_rows(dk, sdk, b, h, j0, Tk, dkt * final, D, BN, BD)
    if VALUES:
        store_rows(dv, sdv, b, h, j0, Tk, dvt, DV, BN, BV)
    if LEARNED:
        tl.store(dg + tl.cast(bh, tl.int64) * tl.num_programs(0) + tl.program_id(0), tl.sum(dgt, 0))


@triton.jit(do_not_specialize=RUNTIME)
def queries_from_e(e, k, dq, rows, sk, sdq, H, G, Tq, Tk, M, slots, back, scale, D: tl.constexpr, BD: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr, S: tl.constexpr, CLOSED: tl.constexpr, TMA: tl.constexpr,
                   STAGES: tl.constexpr):  # fmt: skip
    """dQ = s E K for BM queries, a product of stored tiles: program (block from the last, batch · heads)."""
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    tm = i0 // S
    base = base_of(rows, tm, back, CLOSED)
    acc = tl.zeros([BM, BD], tl.float32)
    first = tl.load(rows + M + tm) * S
    for j0 in tl.range(first, tl.minimum(tl.load(rows + 2 * M + tm) * S, Tk), BN, num_stages=STAGES):
        tn = j0 // S
        tile = load_packed(e, bh * slots + base + tn, i0 - tm * S, j0 - tn * S, S, BM, BN, TMA)
        kt = load_rows(k, sk, b, h // G, j0, Tk, D, BN, BD, TMA)
        acc = tl.dot(tile.to(kt.dtype), kt, acc, input_precision="ieee")
    store_rows(dq, sdq, b, h, i0, Tq, acc * scale, D, BM, BD)


@triton.jit(do_not_specialize=RUNTIME)
def queries_again(q0, q1, q2, q3, k0, k1, k2, k3, v, do, lse, delta, z, dq, gains, shifts, bounds, rows, seed, sq, sk,
                  sv, sdo, sdq, B, H, G, Tq, Tk, M, slots, back, scale, bend, factor, drop, inverse, final,
                  D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
                  BN: tl.constexpr, S: tl.constexpr, DTYPE: tl.constexpr, TOP: tl.constexpr, OWN: tl.constexpr,
                  ENTERS: tl.constexpr, COUNT: tl.constexpr, TARGET: tl.constexpr, GAIN: tl.constexpr,
                  CENTRE: tl.constexpr, ROUND: tl.constexpr, UNIFORM: tl.constexpr, BATCHED: tl.constexpr,
                  CLOSED: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, TMA: tl.constexpr,
                  STAGES: tl.constexpr):  # fmt: skip
    """dQ of layer TARGET for BM queries where no E is stored: the gradient of the scores is formed again."""
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    hk = h // G
    i = i0 + tl.arange(0, BM)
    tm = i0 // S
    base = base_of(rows, tm, back, CLOSED)
    lo, hi = bounds_of(bounds, COUNT - 1 if not UNIFORM else 0, b, i, B, Tq, BATCHED)
    at = tl.cast(bh, tl.int64) * Tq + i
    row = tl.load(lse + at, mask=i < Tq, other=float("inf"))
    d_row = tl.load(delta + at, mask=i < Tq, other=0.0)
    before = tl.load(rows + 3 * M + tm)
    before_end = tl.load(rows + 4 * M + tm)
    qt = load_each((q0, q1, q2, q3), sq, b, h, i0, Tq, D, BM, BD, COUNT, TMA)
    g = load_rows(do, sdo, b, h, i0, Tq, DV, BM, BV, TMA)
    each_gain = load_gains(gains, h, H, COUNT, GAIN)
    each_shift = load_shifts(shifts, bh, i, B * H, Tq, COUNT, CENTRE)
    acc = tl.zeros([BM, BD], tl.float32)
    first = tl.load(rows + M + tm) * S
    for j0 in tl.range(first, tl.minimum(tl.load(rows + 2 * M + tm) * S, Tk), BN, num_stages=STAGES):
        j = j0 + tl.arange(0, BN)
        tn = j0 // S
        kt = load_each((k0, k1, k2, k3), sk, b, hk, j0, Tk, D, BN, BD, COUNT, TMA)
        u = tl.zeros([BM, BN], tl.float32)
        if OWN or ENTERS:
            u = load_packed(z, bh * slots + base + tn, i0 - tm * S, j0 - tn * S, S, BM, BN, TMA).to(tl.float32)
            if not UNIFORM and not OWN:
                u = tl.where((tn >= before) & (tn < before_end), u, 0.0)
        if not OWN:
            u, _ = summed(u, qt, kt, each_gain, each_shift, bounds, b, B, i, j, Tq, DTYPE, TOP, ENTERS, COUNT,
                          GAIN, CENTRE, ROUND, UNIFORM, BATCHED, TARGET)  # fmt: skip
        vt = load_rows(v, sv, b, hk, j0, Tk, DV, BN, BV, TMA)
        _, ds = score_gradient(u, vt, g, row, d_row, visible(lo, hi, j), seed, bh, i0, j0, scale, bend, factor, drop,
                               inverse, BM, BN, SOFTCAP, DROPOUT, True)  # fmt: skip
        ds = back_to(ds, each_gain, bounds, b, B, i, j, Tq, COUNT, TARGET, GAIN, UNIFORM, BATCHED)
        acc = tl.dot(ds.to(g.dtype), kt[TARGET], acc, input_precision="ieee")
    store_rows(dq, sdq, b, h, i0, Tq, acc * final, D, BM, BD)
