"""Backward passes on Hopper (Gluon) for scores with at most a number an offset: elementwise work beside products.

As in :mod:`.overlapped`, a step starts the products of its own scores first and then those that wait only for the step
before (dQ += dS·K, or dV += Pᵀ·dO and dK += dSᵀ·Q); exponentials and dS are formed while the latter run. Tiles are
64 × 64 and decided on the same blocks as in every pass; those of the band come first. Scores are in log2 units,
c = τ·log2 e; the prepared lse of a saturated stretch contains its constant. One writer a value.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .skew import TILE, barrier, visible

__all__ = ["key_overlapped", "query_overlapped"]

_T = gl.constexpr(TILE)


@gluon.jit
def _other_of(t, t1, band, first):
    """The first column of the t-th tile: the band (from tile t1 on), then what lies before it, then what lies after."""
    return first + _T * gl.where(t < band, t + t1, gl.where(t < band + t1, t - band, t))


@gluon.jit
def _fetch(x, y, xs, ys, xbars, ybars, b, hx, hy, at, x_slot, y_slot, go, BYTES: gl.constexpr):
    mbarrier.expect(xbars.index(x_slot), BYTES, pred=go)
    mbarrier.expect(ybars.index(y_slot), BYTES, pred=go)
    tma.async_copy_global_to_shared(x, [b, hx, at, 0], xbars.index(x_slot), xs.index(x_slot), pred=go)
    tma.async_copy_global_to_shared(y, [b, hy, at, 0], ybars.index(y_slot), ys.index(y_slot), pred=go)


@gluon.jit
def _store(out, tile, b, h, first, T, s_b, s_h, s_t, N: gl.constexpr, D: gl.constexpr, O: gl.constexpr,
           DTYPE: gl.constexpr):  # fmt: skip
    """Rows first … first + N − 1 of out[b, h], as far as they exist."""
    row = first + gl.arange(0, N, gl.SliceLayout(1, O))
    at = out + b.to(gl.int64) * s_b + h.to(gl.int64) * s_h + row.to(gl.int64)[:, None] * s_t
    gl.store(at + gl.arange(0, D, gl.SliceLayout(0, O))[None, :], tile.to(DTYPE), mask=(row < T)[:, None])


@gluon.jit
def _query_step(s, dp, u, t1, band, first, here, at, reach, over, ls0, ls1, ls2, dl, out, stride_z, width_z, shift_z,
                sum1, sum2, rule, b, i, flo, fhi, Tq, Tk, offset, left, right, c, S: gl.constexpr, DTYPE: gl.constexpr,
                PENDING: gl.constexpr, TERM: gl.constexpr, SIDES: gl.constexpr, STORE: gl.constexpr,
                SUMS: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    """dS of the u-th tile, and the sums of its rows if it is saturated."""
    j = _other_of(u, t1, band, first)
    key = j + gl.arange(0, _T, gl.SliceLayout(0, S))
    s = warpgroup_mma_wait(1 + PENDING, deps=[s])
    ls = ls0
    if SIDES:
        ls = gl.where(u < band, ls0, gl.where(u < band + t1, ls1, ls2))
    if TERM:
        if u < band:
            x = gl.minimum(gl.maximum(j + at, 0), reach) // 16 * 16
            s = s + gl.load(here + x).to(gl.float32) * over
    p = gl.exp2(s * c - ls[:, None])
    if MASKED:
        if (j < flo) | (j + _T > fhi):
            p = gl.where(visible(rule, b, i[:, None], key[None, :], Tq, Tk, offset, left, right), p, 0.0)
    dp = warpgroup_mma_wait(PENDING, deps=[dp])
    ds = p * (dp - dl[:, None])
    if STORE:
        if u < band:
            place = (i.to(gl.int64) * stride_z)[:, None] + (key + shift_z)[None, :]
            inside = (i < Tq)[:, None] & (key + shift_z >= 0)[None, :] & (key + shift_z < width_z)[None, :]
            gl.store(out + place, ds.to(DTYPE), mask=inside)
    if SUMS:
        rows = gl.sum(ds, 1)
        sum1 += gl.where((u >= band) & (u < band + t1), rows, 0.0)
        sum2 += gl.where(u >= band + t1, rows, 0.0)
    return ds, sum1, sum2


@gluon.jit(
    do_not_specialize=[
        "c", "tau", "over", "H", "G", "HT", "h0", "heads", "B", "Tq", "Tk", "offset", "lo", "hi", "left", "right",
        "batch",
    ]
)  # fmt: skip
def query_overlapped(q, k, v, g, dq, slab, stats, dz, sums, rule, ranges, c, tau, over, H, G, HT, h0, heads, B, Tq, Tk,
                     pad, offset, lo, hi, head, width, shift, head_z, stride_z, width_z, shift_z, s_b, s_h, s_t, left,
                     right, batch, D: gl.constexpr, DTYPE: gl.constexpr, TERM: gl.constexpr, SIDES: gl.constexpr,
                     STORE: gl.constexpr, SUMS: gl.constexpr, RANGED: gl.constexpr, MASKED: gl.constexpr,
                     ROWS: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """dQ = τ·dS·K of 64 queries; STORE: dS of the band into its skewed buffer; SUMS: dS summed over each stretch."""
    s_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _T, 16])
    o_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, o_mma, 2)
    row_of_s: gl.constexpr = gl.SliceLayout(1, s_mma)
    BYTES: gl.constexpr = _T * D * 2
    blocks = (Tq + _T - 1) // _T
    i0 = gl.program_id(0) % blocks * _T
    n = gl.program_id(0) // blocks
    b = n // heads
    h = h0 + n % heads
    hk = h // G
    bh = b * H + h
    ht = gl.where(HT > 1, h, 0)
    first = i0 * 0
    beyond = first + Tk
    flo = first
    fhi = beyond
    if RANGED:
        at = ranges + b * batch + i0 // _T * 4
        first = gl.load(at) // _T * _T
        beyond = gl.load(at + 1)
        flo = gl.load(at + 2)
        fhi = gl.load(at + 3)
    if rule.KEYS:
        fhi = flo
    # Rows that see nothing take one tile, where P = 0.
    tiles = gl.maximum((beyond - first + _T - 1) // _T, 1)
    t1 = i0 * 0
    band = tiles
    if SIDES:
        t1 = gl.minimum(gl.maximum(gl.maximum(i0 + offset - hi + 1, 0) // _T - first // _T, 0), tiles)
        t2 = (gl.maximum(i0 + _T - 1 + offset - lo, 0) + _T - 1) // _T - first // _T
        band = gl.minimum(gl.maximum(t2, t1), tiles) - t1

    qs = gl.allocate_shared_memory(DTYPE, [_T, D], ROWS)
    gs = gl.allocate_shared_memory(DTYPE, [_T, D], ROWS)
    ks = gl.allocate_shared_memory(DTYPE, [3, _T, D], ROWS)
    vs = gl.allocate_shared_memory(DTYPE, [2, _T, D], ROWS)
    qbar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    kbars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    vbars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(qbar.index(0), count=1)
    for slot in gl.static_range(3):
        mbarrier.init(kbars.index(slot), count=1)
    for slot in gl.static_range(2):
        mbarrier.init(vbars.index(slot), count=1)
    fence_async_shared()
    barrier()
    mbarrier.expect(qbar.index(0), 2 * BYTES)
    tma.async_copy_global_to_shared(q, [b, h, i0, 0], qbar.index(0), qs)
    tma.async_copy_global_to_shared(g, [b, h, i0, 0], qbar.index(0), gs)
    for u in gl.static_range(2):
        _fetch(k, v, ks, vs, kbars, vbars, b, hk, hk, _other_of(u, t1, band, first), u, u, u < tiles, BYTES)

    i = i0 + gl.arange(0, _T, row_of_s)
    plane = (B * H).to(gl.int64) * pad
    at_stats = stats + bh.to(gl.int64) * pad + i
    ls0 = gl.load(at_stats)
    ls1 = ls0
    ls2 = ls0
    if SIDES:
        ls1 = gl.load(at_stats + plane)
        ls2 = gl.load(at_stats + 2 * plane)
    dl = gl.load(at_stats + 3 * plane)
    here = slab
    reach = i0 * 0
    if TERM:
        row = gl.arange(0, _T, row_of_s)
        column = gl.arange(0, _T, gl.SliceLayout(0, s_mma))
        here = slab + ht.to(gl.int64) * head + (row * width)[:, None] + column[None, :]
        reach = width - _T
    out = dz
    if STORE:
        out = dz + n.to(gl.int64) * head_z
    sum1 = gl.zeros([_T], gl.float32, row_of_s)
    sum2 = gl.zeros([_T], gl.float32, row_of_s)
    acc = gl.zeros([_T, D], gl.float32, o_mma)
    zero = gl.zeros([_T, _T], gl.float32, s_mma)
    mbarrier.wait(qbar.index(0), 0)
    mbarrier.wait(kbars.index(0), 0)
    mbarrier.wait(vbars.index(0), 0)
    s = warpgroup_mma(qs, ks.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(gs, vs.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    ds, sum1, sum2 = _query_step(s, dp, 0, t1, band, first, here, shift - i0, reach, over, ls0, ls1, ls2, dl, out,
                                 stride_z, width_z, shift_z, sum1, sum2, rule, b, i, flo, fhi, Tq, Tk, offset, left,
                                 right, c, s_mma, DTYPE, 0, TERM, SIDES, STORE, SUMS, MASKED)  # fmt: skip
    factor = gl.convert_layout(ds.to(DTYPE), operand)
    mbarrier.wait(kbars.index(1), 0, pred=tiles > 1)
    mbarrier.wait(vbars.index(1), 0, pred=tiles > 1)
    for u in range(1, tiles):
        s = warpgroup_mma(qs, ks.index(u % 3).permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(gs, vs.index(u % 2).permute((1, 0)), zero, use_acc=False, is_async=True)
        sums_q = warpgroup_mma(factor, ks.index((u - 1) % 3), acc, is_async=True)
        # Every warp is done with the values of step u − 1 and with the keys of step u − 2.
        barrier()
        _fetch(k, v, ks, vs, kbars, vbars, b, hk, hk, _other_of(u + 1, t1, band, first), (u + 1) % 3, (u + 1) % 2,
               u + 1 < tiles, BYTES)  # fmt: skip
        ds, sum1, sum2 = _query_step(s, dp, u, t1, band, first, here, shift - i0, reach, over, ls0, ls1, ls2, dl, out,
                                     stride_z, width_z, shift_z, sum1, sum2, rule, b, i, flo, fhi, Tq, Tk, offset, left,
                                     right, c, s_mma, DTYPE, 1, TERM, SIDES, STORE, SUMS, MASKED)  # fmt: skip
        # These waits end a basic block: without them ptxas waits for the product before it forms the exponentials.
        mbarrier.wait(kbars.index((u + 1) % 3), (u + 1) // 3 & 1, pred=u + 1 < tiles)
        mbarrier.wait(vbars.index((u + 1) % 2), (u + 1) // 2 & 1, pred=u + 1 < tiles)
        acc = warpgroup_mma_wait(0, deps=[sums_q])
        factor = gl.convert_layout(ds.to(DTYPE), operand)
    sums_q = warpgroup_mma(factor, ks.index((tiles - 1) % 3), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[sums_q])
    _store(dq, acc * tau, b, h, i0, Tq, s_b, s_h, s_t, _T, D, o_mma, DTYPE)
    if SUMS:
        at_sums = sums + bh * blocks + i0 // _T
        gl.store(at_sums, gl.sum(sum1, 0))
        gl.store(at_sums + B * H * blocks, gl.sum(sum2, 0))


@gluon.jit
def _of_step(u, tiles, t1, band, first, SHARED: gl.constexpr):
    """(query head of the group, tile, first query) of step u."""
    head = t1 * 0
    t = u
    if SHARED:
        head = u // tiles
        t = u - head * tiles
    return head, t, _other_of(t, t1, band, first)


@gluon.jit
def _key_step(s, dp, u, tiles, t1, band, first, slab, ht0, head, width, row, at, reach, over, stats, pad, planes, rule,
              b, j, flo, fhi, Tq, Tk, offset, left, right, c, S: gl.constexpr, PENDING: gl.constexpr,
              TERM: gl.constexpr, SIDES: gl.constexpr, SHARED: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    """P and dS of step u, keys as rows."""
    column = gl.arange(0, _T, gl.SliceLayout(0, S))
    ahead, t, i0 = _of_step(u, tiles, t1, band, first, SHARED)
    at_stats = stats + ahead.to(gl.int64) * pad + i0 + column
    stretch = t * 0
    if SIDES:
        stretch = gl.where(t < band, 0, gl.where(t < band + t1, 2, 1))
    ls = gl.load(at_stats + stretch * planes)
    dl = gl.load(at_stats + 3 * planes)
    s = warpgroup_mma_wait(1 + PENDING, deps=[s])
    if TERM:
        if t < band:
            x = gl.minimum(gl.maximum(at - i0, 0), reach)
            here = slab + (ht0 + ahead).to(gl.int64) * head + x + row[:, None] + (column * width)[None, :]
            s = s + gl.load(here).to(gl.float32) * over
    p = gl.exp2(s * c - ls[None, :])
    if MASKED:
        if (i0 < flo) | (i0 + _T > fhi):
            query = i0 + column
            p = gl.where(visible(rule, b, query[None, :], j[:, None], Tq, Tk, offset, left, right), p, 0.0)
    dp = warpgroup_mma_wait(PENDING, deps=[dp])
    return p, p * (dp - dl[None, :])


@gluon.jit(
    do_not_specialize=[
        "c", "tau", "over", "H", "G", "HT", "h0", "heads", "B", "Tq", "Tk", "offset", "lo", "hi", "left", "right",
        "batch",
    ]
)  # fmt: skip
def key_overlapped(q, k, v, g, dk, dv, slab, stats, rule, ranges, c, tau, over, H, G, HT, h0, heads, B, Tq, Tk, pad,
                   offset, lo, hi, head, width, shift, k_b, k_h, k_t, v_b, v_h, v_t, left, right, batch,
                   D: gl.constexpr, DTYPE: gl.constexpr, TERM: gl.constexpr, SIDES: gl.constexpr,
                   SHARED: gl.constexpr, RANGED: gl.constexpr, MASKED: gl.constexpr, ROWS: gl.constexpr,
                   ROWS_K: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """dK = τ·dSᵀ·Q and dV = Pᵀ·dO of 16 keys a warp, summed over the G query heads of their key head, in order."""
    BN: gl.constexpr = 16 * num_warps
    s_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, _T, 16])
    o_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, o_mma, 2)
    BYTES: gl.constexpr = _T * D * 2
    blocks = (Tk + BN - 1) // BN
    j0 = gl.program_id(0) % blocks * BN
    n = gl.program_id(0) // blocks
    kheads = heads // G
    b = n // kheads
    hk = h0 // G + n % kheads
    first = j0 * 0
    beyond = first + Tq
    # Tiles from query `flo` to query `fhi` need no mask: queries beyond Tq have P = 0 without one.
    flo = first
    fhi = beyond + _T
    if RANGED:
        at = ranges + b * batch + j0 // _T * 4
        first = gl.load(at)
        beyond = gl.load(at + 1)
        flo = gl.load(at + 2)
        fhi = gl.load(at + 3)
        for more in gl.static_range(1, BN // _T):
            # A block that nobody sees is the range 0 … 0.
            first_more = gl.load(at + 4 * more)
            beyond_more = gl.load(at + 4 * more + 1)
            first_more = gl.where(beyond_more > 0, first_more, first)
            first = gl.where(beyond > 0, gl.minimum(first, first_more), first_more)
            beyond = gl.maximum(beyond, beyond_more)
            flo = gl.maximum(flo, gl.load(at + 4 * more + 2))
            fhi = gl.minimum(fhi, gl.load(at + 4 * more + 3))
        first = first // _T * _T
    fhi = gl.where(j0 + BN > Tk, flo, fhi)
    if rule.KEYS:
        fhi = flo
    # Keys that nobody sees take one tile, where P = 0.
    tiles = gl.maximum((beyond - first + _T - 1) // _T, 1)
    t1 = j0 * 0
    band = tiles
    if SIDES:
        t1 = gl.minimum(gl.maximum(gl.maximum(j0 - offset + lo + 1, 0) // _T - first // _T, 0), tiles)
        t2 = (gl.maximum(j0 + BN - 1 - offset + hi, 0) + _T - 1) // _T - first // _T
        band = gl.minimum(gl.maximum(t2, t1), tiles) - t1
    total = tiles
    if SHARED:
        total = tiles * G

    ks = gl.allocate_shared_memory(DTYPE, [BN, D], ROWS_K)
    vs = gl.allocate_shared_memory(DTYPE, [BN, D], ROWS_K)
    qs = gl.allocate_shared_memory(DTYPE, [3, _T, D], ROWS)
    gs = gl.allocate_shared_memory(DTYPE, [3, _T, D], ROWS)
    kbar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    qbars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    gbars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kbar.index(0), count=1)
    for slot in gl.static_range(3):
        mbarrier.init(qbars.index(slot), count=1)
        mbarrier.init(gbars.index(slot), count=1)
    fence_async_shared()
    barrier()
    mbarrier.expect(kbar.index(0), 4 * BN * D)
    tma.async_copy_global_to_shared(k, [b, hk, j0, 0], kbar.index(0), ks)
    tma.async_copy_global_to_shared(v, [b, hk, j0, 0], kbar.index(0), vs)
    for u in gl.static_range(2):
        ahead, _, i0 = _of_step(u, tiles, t1, band, first, SHARED)
        _fetch(q, g, qs, gs, qbars, gbars, b, hk * G + ahead, hk * G + ahead, i0, u, u, u < total, BYTES)

    j = j0 + gl.arange(0, BN, gl.SliceLayout(1, s_mma))
    row = gl.arange(0, BN, gl.SliceLayout(1, s_mma))
    planes = (B * H).to(gl.int64) * pad
    at_stats = stats + (b * H + hk * G).to(gl.int64) * pad
    ht0 = gl.where(HT > 1, hk * G, 0)
    head = gl.where(HT > 1, head, 0)
    acc_k = gl.zeros([BN, D], gl.float32, o_mma)
    acc_v = gl.zeros([BN, D], gl.float32, o_mma)
    zero = gl.zeros([BN, _T], gl.float32, s_mma)
    mbarrier.wait(kbar.index(0), 0)
    mbarrier.wait(qbars.index(0), 0)
    mbarrier.wait(gbars.index(0), 0)
    s = warpgroup_mma(ks, qs.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(vs, gs.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    p, ds = _key_step(s, dp, 0, tiles, t1, band, first, slab, ht0, head, width, row, j0 + shift, width - BN, over,
                      at_stats, pad, planes, rule, b, j, flo, fhi, Tq, Tk, offset, left, right, c, s_mma, 0, TERM,
                      SIDES, SHARED, MASKED)  # fmt: skip
    by_v = gl.convert_layout(p.to(DTYPE), operand)
    by_k = gl.convert_layout(ds.to(DTYPE), operand)
    mbarrier.wait(qbars.index(1), 0, pred=total > 1)
    mbarrier.wait(gbars.index(1), 0, pred=total > 1)
    for u in range(1, total):
        s = warpgroup_mma(ks, qs.index(u % 3).permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(vs, gs.index(u % 3).permute((1, 0)), zero, use_acc=False, is_async=True)
        sums_v = warpgroup_mma(by_v, gs.index((u - 1) % 3), acc_v, is_async=True)
        sums_k = warpgroup_mma(by_k, qs.index((u - 1) % 3), acc_k, is_async=True)
        # Every warp is done with step u − 2.
        barrier()
        ahead, _, i0 = _of_step(u + 1, tiles, t1, band, first, SHARED)
        _fetch(q, g, qs, gs, qbars, gbars, b, hk * G + ahead, hk * G + ahead, i0, (u + 1) % 3, (u + 1) % 3,
               u + 1 < total, BYTES)  # fmt: skip
        p, ds = _key_step(s, dp, u, tiles, t1, band, first, slab, ht0, head, width, row, j0 + shift, width - BN, over,
                          at_stats, pad, planes, rule, b, j, flo, fhi, Tq, Tk, offset, left, right, c, s_mma, 2, TERM,
                          SIDES, SHARED, MASKED)  # fmt: skip
        # These waits end a basic block, as in the pass over queries.
        mbarrier.wait(qbars.index((u + 1) % 3), (u + 1) // 3 & 1, pred=u + 1 < total)
        mbarrier.wait(gbars.index((u + 1) % 3), (u + 1) // 3 & 1, pred=u + 1 < total)
        acc_v, acc_k = warpgroup_mma_wait(0, deps=[sums_v, sums_k])
        by_v = gl.convert_layout(p.to(DTYPE), operand)
        by_k = gl.convert_layout(ds.to(DTYPE), operand)
    sums_v = warpgroup_mma(by_v, gs.index((total - 1) % 3), acc_v, is_async=True)
    sums_k = warpgroup_mma(by_k, qs.index((total - 1) % 3), acc_k, is_async=True)
    acc_v, acc_k = warpgroup_mma_wait(0, deps=[sums_v, sums_k])
    _store(dk, acc_k * tau, b, hk, j0, Tk, k_b, k_h, k_t, BN, D, o_mma, DTYPE)
    _store(dv, acc_v, b, hk, j0, Tk, v_b, v_h, v_t, BN, D, o_mma, DTYPE)
