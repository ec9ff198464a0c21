"""The backward pass: one pass over the keys forms the gradient of the scores, once, and keeps it as E; all else is
products with E.

Every value has one writer and every sum one order, so two runs are bitwise equal.
"""

import triton
import triton.language as tl

from ...triton.masks import kept
from ...triton.tiles import load_rows, load_statistics, store_rows
from .tiles import (
    RUNTIME,
    base_of,
    bounds_of,
    load_each,
    load_gains,
    load_packed,
    load_shifts,
    softmax_argument,
    start_of,
    store_packed,
    summed,
    visible,
)  # fmt: skip


@triton.jit
def score_gradient(u, v, do, lse, delta, seen, seed, bh, i0, j0, scale, bend, factor, drop, inverse, BM: tl.constexpr,
                   BN: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
                   LOADED: tl.constexpr):  # fmt: skip
    """P as dropout leaves it, and dS in units of the scale, of one tile [keys, queries] of unscaled scores u.

    LOADED: u comes from memory and not from a product.
    """
    s, slope = softmax_argument(u, scale, bend, SOFTCAP)
    s = s - lse[None, :]
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    p = tl.math.exp2(s)
    dp = tl.dot(v, tl.trans(do), input_precision="ieee")
    if LOADED:
        # Never true, which LLVM knows and Triton does not: without a value of the product's layout in P it forms P
        # twice, for dV and for dS: 64 exponentials a thread and tile instead of 32, one P through shared memory, and
        # 204 bytes spilled instead of 84.
        p = tl.where(tl.abs(dp) < 0.0, 0.0, p)
    dropped = p
    if DROPOUT:
        keep = tl.trans(kept(seed, bh, i0, j0, drop, BM, BN))
        dropped = tl.where(keep, p * inverse, 0.0)
        dp = tl.where(keep, dp * inverse, 0.0)
    ds = p * (dp - delta[None, :]) * factor
    if SOFTCAP:
        ds = ds * slope
        if MASKED:
            # A score that nothing wrote may be NaN, and so is its slope.
            ds = tl.where(seen, ds, 0.0)
    return dropped, ds


@triton.jit
def gains_above(gains, COUNT: tl.constexpr, TARGET: tl.constexpr, GAIN: tl.constexpr):
    """What the gradient of the last of COUNT layers' scores is multiplied by on its way to layer TARGET."""
    factor = 1.0
    if GAIN:
        for r in tl.static_range(COUNT - 1 - TARGET):
            factor = factor * gains[TARGET + 1 + r]
    return factor


@triton.jit
def seen_between(tile, bounds, b, i, j, B, Tq, COUNT: tl.constexpr, TARGET: tl.constexpr, BATCHED: tl.constexpr):
    """The tile [queries, keys] where layers TARGET … COUNT − 2 all see it, else 0: there they handed on zero."""
    for r in tl.static_range(COUNT - 1 - TARGET):
        lo, hi = bounds_of(bounds, TARGET + r, b, i, B, Tq, BATCHED)
        tile = tl.where(visible(lo, hi, j), tile, 0.0)
    return tile


@triton.jit
def gain_gradients(d0, d1, d2, d3, ds, taken, gains, bounds, b, B, i, j, Tq, COUNT: tl.constexpr, LEARNED: tl.constexpr,
                   UNIFORM: tl.constexpr, BATCHED: tl.constexpr):  # fmt: skip
    """d_t += Σ_queries E_t · (the carry that entered layer t), for the layers of LEARNED's bits."""
    t0, t1, t2, t3 = taken
    for r in tl.static_range(COUNT):
        if (LEARNED >> (COUNT - 1 - r)) & 1:
            if COUNT - 1 - r == 0:
                d0 += tl.sum(tl.where(ds != 0.0, ds * t0, 0.0), 1)
            if COUNT - 1 - r == 1:
                d1 += tl.sum(tl.where(ds != 0.0, ds * t1, 0.0), 1)
            if COUNT - 1 - r == 2:
                d2 += tl.sum(tl.where(ds != 0.0, ds * t2, 0.0), 1)
            if COUNT - 1 - r == 3:
                d3 += tl.sum(tl.where(ds != 0.0, ds * t3, 0.0), 1)
        if r < COUNT - 1:
            ds = ds * gains[COUNT - 1 - r]
            if not UNIFORM:
                before, before_end = bounds_of(bounds, COUNT - 2 - r, b, i, B, Tq, BATCHED)
                ds = tl.where(visible(before, before_end, j, True), ds, 0.0)
    return d0, d1, d2, d3


@triton.jit
def _queries(dk, dv, d0, d1, d2, d3, q, kt, sq, v, do, sdo, stats, stat, pad, z, e, gains, shifts, bounds, rows, seed,
             b, bh, plane, h, B, j0, tn, a, end, Tq, M, zslots, slots, start, back, planes, scale, bend, factor, drop,
             inverse, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
             BN: tl.constexpr, S: tl.constexpr, DTYPE: tl.constexpr, TOP: tl.constexpr, OWN: tl.constexpr,
             ENTERS: tl.constexpr, COUNT: tl.constexpr, GAIN: tl.constexpr, LEARNED: tl.constexpr, CENTRE: tl.constexpr,
             ROUND: tl.constexpr, UNIFORM: tl.constexpr, BATCHED: tl.constexpr, CLOSED: tl.constexpr,
             SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, READS_E: tl.constexpr, ETYPE: tl.constexpr,
             SAID: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """The queries a … end − 1 against one block of keys; tiles of scores are [keys, queries]."""
    j = j0 + tl.arange(0, BN)
    for i0 in tl.range(a, end, BM, num_stages=STAGES):
        i = i0 + tl.arange(0, BM)
        tm = i0 // S
        place = base_of(rows, tm, back, CLOSED) + tn
        slot = plane * slots + place - start
        zslot = bh * zslots + place
        if MASKED:
            # A dead tile between live ones has no slot: the spare one takes what it writes, and no value read counts.
            live = (tn >= tl.load(rows + M + tm)) & (tn < tl.load(rows + 2 * M + tm))
            slot = tl.where(live, slot, plane * slots + slots - 1)
            zslot = tl.where(live, zslot, bh * zslots + zslots - 1)
        qt = load_each(q, sq, b, h, i0, Tq, D, BM, BD, COUNT, TMA)
        u = tl.zeros([BN, BM], tl.float32)
        if OWN or ENTERS:
            u = tl.trans(load_packed(z, zslot, i0 - tm * S, j0 - tn * S, S, BM, BN, TMA)).to(tl.float32)
            if not UNIFORM and not OWN:
                entered = (tn >= tl.load(rows + 3 * M + tm)) & (tn < tl.load(rows + 4 * M + tm))
                u = tl.where(entered, u, 0.0)
        taken = (u, u, u, u)
        if not OWN:
            each_shift = load_shifts(shifts, bh, i, planes, Tq, COUNT, CENTRE)
            u, taken = summed(u, qt, kt, gains, each_shift, bounds, b, B, i, j, Tq, DTYPE, TOP, ENTERS,
                              COUNT, GAIN, CENTRE, ROUND, UNIFORM, BATCHED, True)  # fmt: skip
        if SAID > 0:
            # A bound a query, loaded, costs a register a column of the tile: hundreds of bytes more are spilled.
            distance = i[None, :] - j[:, None]
            seen = distance >= 0
            if SAID > 1:
                seen = seen & (distance < SAID)
        else:
            lo, hi = bounds_of(bounds, COUNT - 1 if not UNIFORM else 0, b, i, B, Tq, BATCHED)
            seen = visible(lo, hi, j, True)
        g = load_rows(do, sdo, b, h, i0, Tq, DV, BM, BV, TMA)
        lse = load_statistics(stats, stat, 0, bh, i0, planes, pad, BM, TMA)
        delta = load_statistics(stats, stat, 1, bh, i0, planes, pad, BM, TMA)
        p, ds = score_gradient(u, v, g, lse, delta, seen, seed, bh, i0, j0, scale, bend, factor, drop, inverse, BM, BN,
                               SOFTCAP, DROPOUT, MASKED, OWN)  # fmt: skip
        dv = tl.dot(p.to(g.dtype), g, dv, input_precision="ieee")
        if READS_E:
            asked = tl.trans(load_packed(e, slot, i0 - tm * S, j0 - tn * S, S, BM, BN, TMA)).to(tl.float32)
            if not UNIFORM:
                after = (tn >= tl.load(rows + 5 * M + tm)) & (tn < tl.load(rows + 6 * M + tm))
                asked = tl.where(after, asked, 0.0)
            if MASKED:
                asked = tl.where(seen, asked, 0.0)
            ds += asked
        stored = ds
        if ETYPE == tl.float16:
            stored = tl.clamp(ds, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        store_packed(e, slot, i0 - tm * S, j0 - tn * S, tl.trans(stored.to(ETYPE)), S, BM, BN, TMA)
        dk = tl.dot(ds.to(g.dtype), qt[COUNT - 1], dk, input_precision="ieee")
        if LEARNED > 0:
            d0, d1, d2, d3 = gain_gradients(d0, d1, d2, d3, ds, taken, gains, bounds, b, B, i, j, Tq, COUNT, LEARNED,
                                            UNIFORM, BATCHED)  # fmt: skip
    return dk, dv, d0, d1, d2, d3


@triton.jit
def _head(dk, dv, q, kt, sq, v, do, sdo, stats, stat, pad, z, e, dg, gains, shifts, bounds, rows, seed, b, h, B, H, j0,
          tn, own, first, last, own_end, Tq, M, zslots, slots, start, back, first_plane, scale, bend, factor,
          drop, inverse, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
          BN: tl.constexpr, S: tl.constexpr, DTYPE: tl.constexpr, TOP: tl.constexpr, OWN: tl.constexpr,
          ENTERS: tl.constexpr, COUNT: tl.constexpr, GAIN: tl.constexpr, LEARNED: tl.constexpr, CENTRE: tl.constexpr,
          ROUND: tl.constexpr, UNIFORM: tl.constexpr, BATCHED: tl.constexpr, CLOSED: tl.constexpr,
          SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, READS_E: tl.constexpr, ETYPE: tl.constexpr,
          SAID: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """What one query head adds to dK and dV of a block of keys, its part of E and of dβ."""
    bh = b * H + h
    each_gain = load_gains(gains, h, H, COUNT, GAIN)
    d0 = tl.zeros([BN], tl.float32)
    d1 = tl.zeros([BN], tl.float32)
    d2 = tl.zeros([BN], tl.float32)
    d3 = tl.zeros([BN], tl.float32)
    for part in tl.static_range(3):
        # Tile rows before, inside and after a run of rows that see every key of the tile.
        if part == 0:
            a = own
            end = first
        if part == 1:
            a = first
            end = last
        if part == 2:
            a = last
            end = own_end
        dk, dv, d0, d1, d2, d3 = _queries(
            dk, dv, d0, d1, d2, d3, q, kt, sq, v, do, sdo, stats, stat, pad, z, e, each_gain, shifts, bounds, rows,
            seed, b, bh, bh - first_plane, h, B, j0, tn, a * S, tl.minimum(end * S, Tq), Tq, M, zslots, slots, start,
            back, B * H, scale, bend, factor, drop, inverse, D, DV, BD, BV, BM, BN, S, DTYPE, TOP, OWN, ENTERS,
            COUNT, GAIN, LEARNED, CENTRE, ROUND, UNIFORM, BATCHED, CLOSED, SOFTCAP, DROPOUT, READS_E, ETYPE,
            SAID if part == 2 else SAID > 0, part != 1, TMA, STAGES)  # fmt: skip
    for t in tl.static_range(COUNT):
        if (LEARNED >> t) & 1:
            value = d0
            if t == 1:
                value = d1
            if t == 2:
                value = d2
            if t == 3:
                value = d3
            at = dg + (tl.cast(t * B * H + bh, tl.int64)) * tl.num_programs(0) + tl.program_id(0)
            tl.store(at, tl.sum(value, 0))
    return dk, dv


@triton.jit(do_not_specialize=RUNTIME)
def keys_gradient(q0, q1, q2, q3, k0, k1, k2, k3, v, do, stats, stat, z, e, dk, dv, dg, gains, shifts, bounds, rows,
                  columns, seed, sq, sk, sv, sdo, sdk, sdv, pad, B, H, G, Tq, Tk, M, zslots, slots, back, first_plane,
                  first_row, end_row, scale, bend, factor, drop, inverse, final, D: tl.constexpr,
                  DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                  S: tl.constexpr, DTYPE: tl.constexpr, TOP: tl.constexpr, OWN: tl.constexpr, ENTERS: tl.constexpr,
                  COUNT: tl.constexpr, GAIN: tl.constexpr, LEARNED: tl.constexpr, CENTRE: tl.constexpr,
                  ROUND: tl.constexpr, UNIFORM: tl.constexpr, BATCHED: tl.constexpr, CLOSED: tl.constexpr,
                  SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, READS_E: tl.constexpr, ETYPE: tl.constexpr,
                  SAID: tl.constexpr, GROUPED: tl.constexpr, PART: tl.constexpr, ADDS: tl.constexpr, TMA: tl.constexpr,
                  STAGES: tl.constexpr):  # fmt: skip
    """dK of the last layer, dV, E and dβ for BN keys: program (block, query head, or key head where GROUPED).

    Planes (batch · heads) from `first_plane` on and tile rows first_row … end_row − 1 (PART: E holds these only). ADDS:
    dK and dV already hold what earlier rows gave. SAID: 1 for
    queries that see every key up to their own and whole tiles, the window where they see so many of them; 0: bounds say
    what they see. Rows before a run of whole tiles meet the diagonal alone.
    """
    j0 = tl.program_id(0) * BN
    tn = j0 // S
    N = (Tk + S - 1) // S
    if GROUPED:
        n = first_plane // G + tl.program_id(1)
        b = n // (H // G)
        hk = n % (H // G)
        out = hk
    else:
        n = first_plane + tl.program_id(1)
        b = n // H
        out = n % H
        hk = out // G
    own = tl.load(columns + tn)
    own_end = tl.load(columns + N + tn)
    whole = tl.load(columns + 2 * N + tn)
    whole_end = tl.load(columns + 3 * N + tn)
    if PART:
        own = tl.maximum(own, first_row)
        own_end = tl.maximum(tl.minimum(own_end, end_row), own)
    first = tl.minimum(tl.maximum(whole, own), own_end)
    last = tl.minimum(tl.maximum(whole_end, first), own_end)
    start = start_of(rows, first_row, M, back, CLOSED, PART)
    kt = load_each((k0, k1, k2, k3), sk, b, hk, j0, Tk, D, BN, BD, COUNT, TMA)
    vt = load_rows(v, sv, b, hk, j0, Tk, DV, BN, BV, TMA)
    dkt = tl.zeros([BN, BD], tl.float32)
    dvt = tl.zeros([BN, BV], tl.float32)
    if GROUPED:
        for h in range(hk * G, hk * G + G):
            dkt, dvt = _head(dkt, dvt, (q0, q1, q2, q3), kt, sq, vt, do, sdo, stats, stat, pad, z, e, dg, gains, shifts,
                             bounds, rows, seed, b, h, B, H, j0, tn, own, first, last, own_end, Tq, M, zslots, slots,
                             start, back, first_plane, scale, bend, factor, drop, inverse, D, DV, BD, BV, BM,
                             BN, S, DTYPE, TOP, OWN, ENTERS, COUNT, GAIN, LEARNED, CENTRE, ROUND, UNIFORM, BATCHED,
                             CLOSED, SOFTCAP, DROPOUT, READS_E, ETYPE, SAID, TMA, STAGES)  # fmt: skip
    else:
        dkt, dvt = _head(dkt, dvt, (q0, q1, q2, q3), kt, sq, vt, do, sdo, stats, stat, pad, z, e, dg, gains, shifts,
                         bounds, rows, seed, b, out, B, H, j0, tn, own, first, last, own_end, Tq, M, zslots, slots,
                         start, back, first_plane, scale, bend, factor, drop, inverse, D, DV, BD, BV, BM, BN, S,
                         DTYPE, TOP, OWN, ENTERS, COUNT, GAIN, LEARNED, CENTRE, ROUND, UNIFORM, BATCHED, CLOSED,
                         SOFTCAP, DROPOUT, READS_E, ETYPE, SAID, TMA, STAGES)  # fmt: skip
    dkt = dkt * final
    if ADDS:
        dkt += load_rows(dk, sdk, b, out, j0, Tk, D, BN, BD, False)
        dvt += load_rows(dv, sdv, b, out, j0, Tk, DV, BN, BV, False)
    store_rows(dk, sdk, b, out, j0, Tk, dkt, D, BN, BD)
    store_rows(dv, sdv, b, out, j0, Tk, dvt, DV, BN, BV)


@triton.jit(do_not_specialize=RUNTIME)
def queries_from_e(e, k, dq, gains, bounds, rows, sk, sdq, B, H, G, Tq, Tk, M, slots, back, first_plane, first_row,
                   final, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, S: tl.constexpr,
                   COUNT: tl.constexpr, TARGET: tl.constexpr, GAIN: tl.constexpr, UNIFORM: tl.constexpr,
                   BATCHED: tl.constexpr, CLOSED: tl.constexpr, PART: tl.constexpr, TMA: tl.constexpr,
                   STAGES: tl.constexpr):  # fmt: skip
    """dQ = s E K of layer TARGET for BM queries: program (block from the last, plane)."""
    i0 = first_row * S + (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    bh = first_plane + tl.program_id(1)
    b = bh // H
    h = bh % H
    tm = i0 // S
    i = i0 + tl.arange(0, BM)
    base = base_of(rows, tm, back, CLOSED) - start_of(rows, first_row, M, back, CLOSED, PART)
    acc = tl.zeros([BM, BD], tl.float32)
    first = tl.load(rows + M + tm) * S
    for j0 in tl.range(first, tl.minimum(tl.load(rows + 2 * M + tm) * S, Tk), BN, num_stages=STAGES):
        tn = j0 // S
        tile = load_packed(e, tl.program_id(1) * slots + base + tn, i0 - tm * S, j0 - tn * S, S, BM, BN, TMA)
        if not UNIFORM and TARGET < COUNT - 1:
            tile = seen_between(tile, bounds, b, i, j0 + tl.arange(0, BN), B, Tq, COUNT, TARGET, BATCHED)
        kt = load_rows(k, sk, b, h // G, j0, Tk, D, BN, BD, TMA)
        acc = tl.dot(tile.to(kt.dtype), kt, acc, input_precision="ieee")
    acc = acc * (final * gains_above(load_gains(gains, h, H, COUNT, GAIN), COUNT, TARGET, GAIN))
    store_rows(dq, sdq, b, h, i0, Tq, acc, D, BM, BD)


@triton.jit(do_not_specialize=RUNTIME)
def keys_from_e(e, q, dk, gains, bounds, rows, columns, sq, sdk, B, H, G, Tq, Tk, M, slots, back, first_plane,
                first_row, end_row, final, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                S: tl.constexpr, COUNT: tl.constexpr, TARGET: tl.constexpr, GAIN: tl.constexpr, UNIFORM: tl.constexpr,
                BATCHED: tl.constexpr, CLOSED: tl.constexpr, PART: tl.constexpr, ADDS: tl.constexpr, TMA: tl.constexpr,
                STAGES: tl.constexpr):  # fmt: skip
    """dK = s Eᵀ Q of layer TARGET for BN keys of one query head: program (block, plane)."""
    j0 = tl.program_id(0) * BN
    bh = first_plane + tl.program_id(1)
    b = bh // H
    h = bh % H
    tn = j0 // S
    N = (Tk + S - 1) // S
    j = j0 + tl.arange(0, BN)
    own = tl.maximum(tl.load(columns + tn), first_row)
    own_end = tl.minimum(tl.load(columns + N + tn), end_row)
    start = start_of(rows, first_row, M, back, CLOSED, PART)
    acc = tl.zeros([BN, BD], tl.float32)
    for i0 in tl.range(own * S, tl.minimum(own_end * S, Tq), BM, num_stages=STAGES):
        tm = i0 // S
        slot = tl.program_id(1) * slots + base_of(rows, tm, back, CLOSED) + tn - start
        live = True
        if not CLOSED:
            live = (tn >= tl.load(rows + M + tm)) & (tn < tl.load(rows + 2 * M + tm))
            slot = tl.where(live, slot, tl.program_id(1) * slots + slots - 1)
        tile = load_packed(e, slot, i0 - tm * S, j0 - tn * S, S, BM, BN, TMA)
        if not CLOSED:
            tile = tl.where(live, tile, 0.0)
        if not UNIFORM and TARGET < COUNT - 1:
            tile = seen_between(tile, bounds, b, i0 + tl.arange(0, BM), j, B, Tq, COUNT, TARGET, BATCHED)
        qt = load_rows(q, sq, b, h, i0, Tq, D, BM, BD, TMA)
        acc = tl.dot(tl.trans(tile.to(qt.dtype)), qt, acc, input_precision="ieee")
    acc = acc * (final * gains_above(load_gains(gains, h, H, COUNT, GAIN), COUNT, TARGET, GAIN))
    if ADDS:
        acc += load_rows(dk, sdk, b, h, j0, Tk, D, BN, BD, False)
    store_rows(dk, sdk, b, h, j0, Tk, acc, D, BN, BD)
