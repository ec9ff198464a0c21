"""Δ as Σ P·dP of the very P and dP that the backward's passes form, for fp32 gradients of biases.

A bias's gradient sums dS over many rows, each of which sums to nothing. With Δ = dO·O, where O and lse were rounded,
it does not quite, and a table that weighs offsets (ALiBi's slopes: by distance) sees the rest: emulated at 1,024 tokens
its gradient erred 2.5e-4 (root mean square of 24 heads), with this Δ 6.2e-5, dense PyTorch 9.2e-5. With TF32, where P
was rounded for the product that made O, this Δ leaves the very error of dense PyTorch. It costs two products beside the
seven of both passes.
"""

import triton
import triton.language as tl

from .core import RUNTIME, band_of
from .launch import cdiv, launch
from .masks import BLOCK, kept, span_of, visible
from .tiles import load_rows

__all__ = ["cancel"]


@triton.jit
def _sums(l, total, qt, gt, ls, k, sk, v, sv, terms, zs, rule, seed, c, drop, inverse, b, h, hk, n, bh, i0, a, e, Tq,
          Tk, offset, left, right, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
          BM: tl.constexpr, BN: tl.constexpr, BANDS: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
          PREC: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """(l + Σ P, total + Σ P·dP) of the rows over the keys a … e − 1."""
    for j in tl.range(a, e, BN, num_stages=STAGES):
        s = tl.dot(qt, tl.trans(load_rows(k, sk, b, hk, j, Tk, D, BN, BD, TMA)), input_precision=PREC)
        dp = tl.dot(gt, tl.trans(load_rows(v, sv, b, hk, j, Tk, DV, BN, BV, TMA)), input_precision=PREC)
        if len(BANDS) > 0:
            z = tl.zeros([BM, BN], tl.float32)
            for t in tl.static_range(len(BANDS)):
                z += BANDS[t](terms[t], zs[t], b, h, n, i0, j, offset, Tq, Tk, BM, BN, False, TMA)
            p = tl.math.exp2(s * c + (z - ls[:, None]))
        else:
            p = tl.math.exp2(s * c - ls[:, None])
        if MASKED:
            i = (i0 + tl.arange(0, BM))[:, None]
            seen = visible(rule, b, h, i, (j + tl.arange(0, BN))[None, :], Tq, Tk, offset, left, right)
            p = tl.where(seen, p, 0.0)
        if DROPOUT:
            dp = tl.where(kept(seed, bh, i0, j, drop, BM, BN), dp * inverse, 0.0)
        l += tl.sum(p, 1)
        total += tl.sum(p * dp, 1)
    return l, total


@triton.jit(do_not_specialize=[*RUNTIME, "pad"])
def cancel_rows(q, k, v, g, stats, pad, dlse, terms, z0, z1, z2, z3, z4, z5, z6, z7, rule, ranges, seed, sq, sk, sv, sg,
                sl, c, inverse, drop, H, G, B, Tq, Tk, offset, lo, hi, left, right, batch, D: tl.constexpr,
                DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                UNIT: tl.constexpr, BANDS: tl.constexpr, SIDES: tl.constexpr, RANGED: tl.constexpr,
                MASKED: tl.constexpr, DROPOUT: tl.constexpr, DLSE: tl.constexpr, PREC: tl.constexpr, TMA: tl.constexpr,
                STAGES: tl.constexpr):  # fmt: skip
    """Plane 3 of the statistics = Σ P·dP / Σ P − dlse of BM queries."""
    blocks = (Tq + BM - 1) // BM
    i0 = tl.program_id(0) % blocks * BM
    n = tl.program_id(0) // blocks
    b = n // H
    h = n % H
    bh = b * H + h
    zs = (z0, z1, z2, z3, z4, z5, z6, z7)
    i = i0 + tl.arange(0, BM)
    plane = tl.cast(B * H, tl.int64) * pad
    at = stats + tl.cast(bh, tl.int64) * pad + i
    vlo, vhi, _, _ = span_of(ranges, batch, b, i0 // UNIT * UNIT, Tk, UNIT, UNIT, UNIT, RANGED)
    ba, be = band_of(i0 // UNIT * UNIT + offset, hi, -lo, vlo, vhi, UNIT, UNIT)
    if not SIDES:
        ba = vlo
        be = vhi
    qt = load_rows(q, sq, b, h, i0, Tq, D, BM, BD, TMA)
    gt = load_rows(g, sg, b, h, i0, Tq, DV, BM, BV, TMA)
    l = tl.zeros([BM], tl.float32)
    total = tl.zeros([BM], tl.float32)
    l, total = _sums(l, total, qt, gt, tl.load(at), k, sk, v, sv, terms, zs, rule, seed, c, drop, inverse, b, h, h // G,
                     n, bh, i0, ba, be, Tq, Tk, offset, left, right, D, DV, BD, BV, BM, BN, BANDS, MASKED, DROPOUT,
                     PREC, TMA, STAGES)  # fmt: skip
    if SIDES:
        for side in tl.static_range(2):
            a = vlo
            e = ba
            if side == 1:
                a = be
                e = vhi
            l, total = _sums(l, total, qt, gt, tl.load(at + (side + 1) * plane), k, sk, v, sv, terms, zs, rule, seed, c,
                             drop, inverse, b, h, h // G, n, bh, i0, a, e, Tq, Tk, offset, left, right, D, DV, BD, BV,
                             BM, BN, (), MASKED, DROPOUT, PREC, TMA, STAGES)  # fmt: skip
    delta = total / tl.where(l > 0.0, l, 1.0)
    if DLSE:
        place = dlse + tl.cast(b, tl.int64) * sl[0] + tl.cast(h, tl.int64) * sl[1] + i
        delta -= tl.load(place, mask=i < Tq, other=0.0)
    tl.store(at + 3 * plane, delta, mask=i < Tq)


def cancel(L, q, k, v, g, stats, dlse, tiles, made, tma: bool) -> None:
    """Launch :func:`cancel_rows` for a layout whose terms are all scalar; `made` is what they read, by port.

    Args:
        L: the layout of the call.
        q, k, v, g: sources of its factors and of dO.
        stats: the prepared statistics [4, B·H, ·], whose last plane is written anew.
        dlse: the gradient of lse [B, H, Tq] with rows that begin at multiples of 16 entries, or None.
        tiles, tma: those of the pass over queries.
    """
    from .passes import terms_of

    functions, terms, zs = terms_of(L, made, tiles, tma)
    rows, keys = tiles.queries, tiles.keys
    launch(
        cancel_rows, (cdiv(L.Tq, rows) * L.B * L.H,), q(rows, L.BD, tma), k(keys, L.BD, tma), v(keys, L.BV, tma),
        g(rows, L.BV, tma), stats, stats.shape[2], L.anchor if dlse is None else dlse, terms, *zs, L.mask.rule,
        L.mask.queries, L.seed, q.strides, k.strides, v.strides, g.strides,
        (0, 0, 0) if dlse is None else dlse.stride(), L.c, L.inverse, L.drop, L.H, L.G, L.B, L.Tq, L.Tk, L.call.offset,
        L.lo, L.hi, L.mask.left, L.mask.right, L.mask.batch, D=L.d, DV=L.dv, BD=L.BD, BV=L.BV, BM=rows, BN=keys,
        UNIT=BLOCK, BANDS=tuple(f[0] for f in functions), SIDES=L.sides, RANGED=L.mask.ranged, MASKED=L.masked(),
        DROPOUT=L.call.dropout_p > 0.0, DLSE=dlse is not None, PREC=L.precision, TMA=tma, STAGES=tiles.stages,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
