"""The forward pass: online softmax over scores that start from the carried tile and may be stored."""

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
    shifts_of,
    softmax_argument,
    store_packed,
    summed,
    visible,
)  # fmt: skip

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _keys(acc, l, m, q, k, sk, v, sv, z_in, z_out, gains, shifts, bounds, seed, lo, hi, b, bh, hk, B, i0, tm, base,
          before, before_end, a, e, Tq, Tk, slots, scale, bend, drop, D: tl.constexpr, DV: tl.constexpr,
          BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, S: tl.constexpr, DTYPE: tl.constexpr,
          TOP: tl.constexpr, ENTERS: tl.constexpr, WRITES: tl.constexpr, COUNT: tl.constexpr, GAIN: tl.constexpr,
          CENTRE: tl.constexpr, ROUND: tl.constexpr, UNIFORM: tl.constexpr, BATCHED: tl.constexpr,
          SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
          STAGES: tl.constexpr):  # fmt: skip
    """The keys a … e − 1 of one block of queries."""
    i = i0 + tl.arange(0, BM)
    for j0 in tl.range(a, e, BN, num_stages=STAGES):
        j = j0 + tl.arange(0, BN)
        tn = j0 // S
        slot = bh * slots + base + tn
        u = tl.zeros([BM, BN], tl.float32)
        if ENTERS:
            u = load_packed(z_in, slot, i0 - tm * S, j0 - tn * S, S, BM, BN, TMA).to(tl.float32)
            if not UNIFORM:
                u = tl.where((tn >= before) & (tn < before_end), u, 0.0)
        kt = load_each(k, sk, b, hk, j0, Tk, D, BN, BD, COUNT, TMA)
        u, _ = summed(u, q, kt, gains, shifts, bounds, b, B, i, j, Tq, DTYPE, TOP, ENTERS, COUNT,
                      GAIN, CENTRE, ROUND, UNIFORM, BATCHED, False)  # fmt: skip
        if MASKED:
            seen = visible(lo, hi, j)
        if WRITES:
            stored = u
            if MASKED and not UNIFORM:
                stored = tl.where(seen, u, 0.0)
            store_packed(z_out, slot, i0 - tm * S, j0 - tn * S, stored.to(DTYPE), S, BM, BN, TMA)
        if SOFTCAP or MASKED:
            s, _ = softmax_argument(u, scale, bend, SOFTCAP)
            if MASKED:
                s = tl.where(seen, s, float("-inf"))
            new = tl.maximum(m, tl.max(s, 1))
            p = tl.math.exp2(s - new[:, None])
        else:
            # The scale joins the subtraction: one multiply-add an element.
            new = tl.maximum(m, tl.max(u, 1) * scale)
            p = tl.math.exp2(u * scale - new[:, None])
        shrink = tl.math.exp2(m - new)
        l = l * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        m = new
        if DROPOUT:
            p = tl.where(kept(seed, bh, i0, j0, drop, BM, BN), p, 0.0)
        vt = load_rows(v, sv, b, hk, j0, Tk, DV, BN, BV, TMA)
        acc = tl.dot(p.to(vt.dtype), vt, acc, input_precision="ieee")
    return acc, l, m


@triton.jit(do_not_specialize=RUNTIME)
def attend(q0, q1, q2, q3, k0, k1, k2, k3, v, o, lse, z_in, z_out, gains, shifts, q, bounds, rows, sink, seed, sq, sk,
           sv, so, B, H, G, Tq, Tk, M, slots, back, scale, bend, drop, inverse, D: tl.constexpr, DV: tl.constexpr,
           BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, S: tl.constexpr, DTYPE: tl.constexpr,
           TOP: tl.constexpr, ENTERS: tl.constexpr, WRITES: tl.constexpr, COUNT: tl.constexpr, GAIN: tl.constexpr,
           CENTRE: tl.constexpr, FORMS: tl.constexpr, ROUND: tl.constexpr, UNIFORM: tl.constexpr,
           BATCHED: tl.constexpr, CLOSED: tl.constexpr, SOFTCAP: tl.constexpr, SINK: tl.constexpr,
           DROPOUT: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """O and lse, in log2 units, of BM queries: program (block from the last, batch · heads).

    FORMS: `shifts` is k̄ of the one layer that is summed, and its queries' shifts are formed here, from the pointer q.
    """
    # The last rows of a causal matrix have the most keys: they start first.
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    hk = h // G
    i = i0 + tl.arange(0, BM)
    tm = i0 // S
    own = tl.load(rows + M + tm)
    own_end = tl.load(rows + 2 * M + tm)
    before = tl.load(rows + 3 * M + tm)
    before_end = tl.load(rows + 4 * M + tm)
    whole = tl.load(rows + 7 * M + tm)
    whole_end = tl.load(rows + 8 * M + tm)
    base = base_of(rows, tm, back, CLOSED)
    lo, hi = bounds_of(bounds, COUNT - 1 if not UNIFORM else 0, b, i, B, Tq, BATCHED)

    each_q = load_each((q0, q1, q2, q3), sq, b, h, i0, Tq, D, BM, BD, COUNT, TMA)
    each_gain = load_gains(gains, h, H, COUNT, GAIN)
    if FORMS:
        # Loaded again, by the pointer: a tile that also feeds register arithmetic would leave shared memory.
        shift = shifts_of(q, shifts, sq, b, h, hk, H // G, i0, Tq, D, BM, BD)
        each_shift = (shift, shift, shift, shift)
    else:
        each_shift = load_shifts(shifts, bh, i, B * H, Tq, COUNT, CENTRE)
    acc = tl.zeros([BM, BV], tl.float32)
    l = tl.zeros([BM], tl.float32)
    # Finite, so that rows whose first tiles are masked do not meet −∞ − (−∞).
    m = tl.full([BM], -3.0e38, tl.float32)
    if SINK:
        logit = tl.load(sink + h).to(tl.float32) * LOG2E
        m = tl.maximum(m, logit)
        l = tl.math.exp2(logit - m)
    for part in tl.static_range(3):
        # Tiles before, inside and after those of which every row sees every key.
        first = tl.minimum(tl.maximum(whole, own), own_end)
        last = tl.minimum(tl.maximum(whole_end, first), own_end)
        if part == 0:
            a = own
            e = first
        if part == 1:
            a = first
            e = last
        if part == 2:
            a = last
            e = own_end
        acc, l, m = _keys(acc, l, m, each_q, (k0, k1, k2, k3), sk, v, sv, z_in, z_out, each_gain, each_shift, bounds,
                          seed, lo, hi, b, bh, hk, B, i0, tm, base, before, before_end, a * S, tl.minimum(e * S, Tk),
                          Tq, Tk, slots, scale, bend, drop, D, DV, BD, BV, BM, BN, S, DTYPE, TOP, ENTERS, WRITES, COUNT,
                          GAIN, CENTRE, ROUND, UNIFORM, BATCHED, SOFTCAP, DROPOUT, part != 1, TMA,
                          STAGES)  # fmt: skip
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    scaled = acc / l[:, None]
    if DROPOUT:
        scaled = scaled * inverse
    store_rows(o, so, b, h, i0, Tq, tl.where(empty[:, None], 0.0, scaled), DV, BM, BV)
    value = tl.where(empty, float("inf"), m + tl.math.log2(l))
    tl.store(lse + tl.cast(bh, tl.int64) * Tq + i, value, mask=i < Tq)
