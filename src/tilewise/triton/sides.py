"""The saturated stretches of the backward's pass over queries on Hopper (Gluon), where they are worth a kernel.

Without a term's tiles a program needs two thirds of the registers and of the shared memory of :mod:`.band_queries`:
three share an SM instead of two, and fill each other's waits. The pass over the band comes first, on ranges that
:func:`band_ranges` narrows; this one adds to its dQ. What end rows get is as described there: A's row is a constant of
each query, inside the prepared lse, and its gradient σ·q with σ the sums of dS over the stretch; C's is in the shifted
queries, and its gradient is dS·K of the stretch, summed over queries.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from .skew import TILE, barrier, visible

__all__ = ["band_ranges", "side_pass"]

_T = gl.constexpr(TILE)


@triton.jit(do_not_specialize=["blocks", "batch", "Tk", "offset", "lo", "hi"])
def band_ranges(ranges, out, blocks, batch, Tk, offset, lo, hi, T: tl.constexpr, N: tl.constexpr,
                RANGED: tl.constexpr):  # fmt: skip
    """Each block's range of keys (:mod:`.masks`) cut to its tiles with an unsaturated offset: out [batches, blocks, 4].

    A kernel that takes these finds its band where it was, and no tile beside it.
    """
    n = tl.program_id(0) * N + tl.arange(0, N)
    b = tl.program_id(1)
    first = n * 0
    beyond = n * 0 + Tk
    flo = first
    fhi = beyond
    if RANGED:
        at = ranges + b * batch + n * 4
        first = tl.load(at, mask=n < blocks, other=0) // T * T
        beyond = tl.load(at + 1, mask=n < blocks, other=0)
        flo = tl.load(at + 2, mask=n < blocks, other=0)
        fhi = tl.load(at + 3, mask=n < blocks, other=0)
    tiles = (beyond - first + T - 1) // T
    t1 = tl.minimum(tl.maximum(tl.maximum(n * T + offset - hi + 1, 0) // T - first // T, 0), tiles)
    t2 = (tl.maximum(n * T + T - 1 + offset - lo, 0) + T - 1) // T - first // T
    t2 = tl.minimum(tl.maximum(t2, t1), tiles)
    to = out + (b * blocks + n) * 4
    tl.store(to, first + t1 * T, mask=n < blocks)
    tl.store(to + 1, tl.minimum(beyond, first + t2 * T), mask=n < blocks)
    tl.store(to + 2, flo, mask=n < blocks)
    tl.store(to + 3, fhi, mask=n < blocks)


@gluon.jit
def _fetch(k, v, ks, vs, kbars, vbars, u, t1, band, first, b, hk, go, BYTES: gl.constexpr, STAGES: gl.constexpr):
    """Keys and values of the u-th tile beside the band, whose slot is free: barriers are told first, copies follow."""
    slot = u % STAGES
    j = first + _T * gl.where(u < t1, u, u + band)
    mbarrier.expect(kbars.index(slot), BYTES, pred=go)
    mbarrier.expect(vbars.index(slot), BYTES, pred=go)
    tma.async_copy_global_to_shared(k, [b, hk, j, 0], kbars.index(slot), ks.index(slot), pred=go)
    tma.async_copy_global_to_shared(v, [b, hk, j, 0], vbars.index(slot), vs.index(slot), pred=go)


@gluon.jit(
    do_not_specialize=[
        "c", "tau", "B", "H", "G", "HA", "Tq", "Tk", "pad", "offset", "lo", "hi", "end_a", "end_b", "left", "right",
        "batch",
    ]
)  # fmt: skip
def side_pass(q, x, k, v, g, dq, ends, parts, stats, rule, ranges, c, tau, B, H, G, HA, Tq, Tk, pad, offset, lo, hi,
              end_a, end_b, head_a, step_a, left, right, batch, D: gl.constexpr, DTYPE: gl.constexpr,
              KEY: gl.constexpr, SHIFTED: gl.constexpr, RANGED: gl.constexpr, MASKED: gl.constexpr,
              STAGES: gl.constexpr, ROWS: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """dQ of 64 queries += what keys at saturated offsets (≥ hi, ≤ lo) give; and the gradients of end rows, over τ.

    Arguments as those of :func:`.band_queries.query_pass`: `ranges` are the whole ones, `parts` [f, A and C (KEY),
    side, D] is written for all blocks. Programs are (head, batch, block).
    """
    s_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _T, 16])
    o_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, o_mma, 2)
    row_of_s: gl.constexpr = gl.SliceLayout(1, s_mma)
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    BYTES: gl.constexpr = _T * D * 2
    blocks = (Tq + _T - 1) // _T
    f = gl.program_id(0)
    i0 = f % blocks * _T
    b = f // blocks % B
    h = f // blocks // B
    hk = h // G
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
    tiles = (beyond - first + _T - 1) // _T
    t1 = gl.minimum(gl.maximum(gl.maximum(i0 + offset - hi + 1, 0) // _T - first // _T, 0), tiles)
    t2 = (gl.maximum(i0 + _T - 1 + offset - lo, 0) + _T - 1) // _T - first // _T
    band = gl.minimum(gl.maximum(t2, t1), tiles) - t1
    tiles = tiles - band

    qs = gl.allocate_shared_memory(DTYPE, [_T, D], ROWS)
    gs = gl.allocate_shared_memory(DTYPE, [_T, D], ROWS)
    ks = gl.allocate_shared_memory(DTYPE, [STAGES, _T, D], ROWS)
    vs = gl.allocate_shared_memory(DTYPE, [STAGES, _T, D], ROWS)
    xs = qs
    if SHIFTED:
        xs = gl.allocate_shared_memory(DTYPE, [_T, D], ROWS)
    # Queries and dO, then the band's dQ, then x's two.
    qbars = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    kbars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    vbars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(kbars.index(n), count=1)
        mbarrier.init(vbars.index(n), count=1)
    for n in gl.static_range(4):
        mbarrier.init(qbars.index(n), count=1)
    fence_async_shared()
    barrier()
    mbarrier.expect(qbars.index(0), 2 * BYTES)
    tma.async_copy_global_to_shared(q, [b, h, i0, 0], qbars.index(0), qs)
    tma.async_copy_global_to_shared(g, [b, h, i0, 0], qbars.index(0), gs)
    for n in gl.static_range(STAGES - 1):
        _fetch(k, v, ks, vs, kbars, vbars, n, t1, band, first, b, hk, n < tiles, BYTES, STAGES)
    i = i0 + gl.arange(0, _T, row_of_s)
    plane = (B * H).to(gl.int64) * pad
    at = stats + (b * H + h).to(gl.int64) * pad + i
    dl = gl.load(at + 3 * plane)
    d = gl.arange(0, D, gl.SliceLayout(0, o_mma))
    line = gl.arange(0, D, gl.SliceLayout(0, blocked))
    WIDTH: gl.constexpr = 2 * D
    mine = parts + f.to(gl.int64) * (2 * WIDTH if KEY else WIDTH)
    table = ends + gl.where(HA > 1, h, 0).to(gl.int64) * head_a
    acc = warpgroup_mma_init(gl.zeros([_T, D], gl.float32, o_mma))
    zero = gl.zeros([_T, _T], gl.float32, s_mma)
    done = gl.zeros([D], gl.float32, gl.SliceLayout(0, o_mma))
    mbarrier.wait(qbars.index(0), 0)
    for side in gl.static_range(2):
        u0 = t1 * 0 if side == 0 else t1
        u1 = t1 if side == 0 else tiles
        if SHIFTED:
            # Every warp is done with the products of the side before.
            barrier()
            mbarrier.expect(qbars.index(2 + side), BYTES)
            tma.async_copy_global_to_shared(x, [side * B + b, h, i0, 0], qbars.index(2 + side), xs)
            mbarrier.wait(qbars.index(2 + side), 0)
        ls = gl.load(at + (side + 1) * plane)
        sums = gl.zeros([_T], gl.float32, row_of_s)
        for u in range(u0, u1):
            slot = u % STAGES
            phase = u // STAGES & 1
            mbarrier.wait(kbars.index(slot), phase)
            s = warpgroup_mma(xs, ks.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(vbars.index(slot), phase)
            dp = warpgroup_mma(gs, vs.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            s, acc = warpgroup_mma_wait(1, deps=[s, acc])
            # Every warp is done with the tile before this one, whose slot is free.
            barrier()
            later = u + STAGES - 1
            _fetch(k, v, ks, vs, kbars, vbars, later, t1, band, first, b, hk, later < tiles, BYTES, STAGES)
            prob = gl.exp2(s * c - ls[:, None])
            if MASKED:
                j = first + _T * gl.where(u < t1, u, u + band)
                if (j < flo) | (j + _T > fhi):
                    key = j + gl.arange(0, _T, gl.SliceLayout(0, s_mma))
                    seen = visible(rule, b, i[:, None], key[None, :], Tq, Tk, offset, left, right)
                    prob = gl.where(seen, prob, 0.0)
            dp = warpgroup_mma_wait(0, deps=[dp])
            ds = prob * (dp - dl[:, None])
            acc = warpgroup_mma(gl.convert_layout(ds.to(DTYPE), operand), ks.index(slot), acc, is_async=True)
            sums += gl.sum(ds, 1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        weight = gl.convert_layout(sums, gl.SliceLayout(1, blocked))
        gl.store(mine + side * D + line, gl.sum(qs.load(blocked).to(gl.float32) * weight[:, None], 0))
        if KEY:
            total = gl.sum(acc, 0)
            gl.store(mine + WIDTH + side * D + d, total - done)
            done = total
        if side == 0:
            left_sums = sums
        acc = warpgroup_mma_init(acc)
    acc = warpgroup_mma_wait(0, deps=[acc])
    # Every warp is done with dO: the band's dQ takes its place.
    barrier()
    mbarrier.expect(qbars.index(1), BYTES)
    tma.async_copy_global_to_shared(dq, [b, h, i0, 0], qbars.index(1), gs)
    for side in gl.static_range(2):
        end = end_a if side == 0 else end_b
        value = gl.load(table + gl.maximum(end, 0) * step_a + d).to(gl.float32)
        value = gl.where(end >= 0, value, 0.0)
        weight = gl.convert_layout(left_sums if side == 0 else sums, gl.SliceLayout(1, o_mma))
        acc = acc + weight[:, None] * value[None, :]
    mbarrier.wait(qbars.index(1), 0)
    acc = acc * tau + gs.load(o_mma).to(gl.float32)
    barrier()
    gs.store(acc.to(DTYPE))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(dq, [b, h, i0, 0], gs)
    tma.store_wait(0)
