"""Forward on Hopper (Gluon) for scores with at most a number an offset: the softmax runs beside the products.

While a tile's exponentials are formed, the product of the tile before with V is under way, and the scores of the next
tile precede it; tiles of 64 rows leave room for three programs on an SM, which fill each other's waits. All tiles come
in one loop: the band's first, where a tile of the Toeplitz slab is added, then those before and after it, where the
side's constant joins the running maximum.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .buffers import Slab
from .hopper import dtype_of, misfits, rows_layout, tiles_of
from .launch import cdiv, launch
from .masks import BLOCK
from .plan import Layout, Source
from .skew import barrier, visible

__all__ = ["BIASED_FROM", "SHAPES", "Shape", "forward", "unsuited"]


@dataclass(frozen=True)
class Shape:
    """Keys of a tile, whose queries are 64, and registers a thread (None: the compiler's choice)."""

    keys: int
    registers: int | None


SHAPES = {64: Shape(128, 168), 128: Shape(64, None)}
"""Width ↦ tile. Of 64 queries and 128 keys, 73 KiB and 168 registers, an SM holds three programs; not where entries are
masked, which needs more registers. At width 128 tiles of 128 × 128 took 1.66 ms for 1.59 with T5's term."""

BIASED_FROM = 1024
"""Keys from which calls with a term take this kernel: at 512 it took 10 % longer than the portable one, whose tiles of
64 keys waste less of a band; at 2,048 7 % less. Without a term it won at both."""

_STAGES = gl.constexpr(2)


@gluon.jit
def _key_of(u, t1, band, first, BN: gl.constexpr):
    """The first key of the u-th tile: those of the band (from tile t1 on), then those before it, then those after."""
    return first + BN * gl.where(u < band, u + t1, gl.where(u < band + t1, u - band, u))


@gluon.jit
def _weights(s, u, t1, band, first, m, slab, at, reach, over, left_edge, right_edge, rule, b, i, flo, fhi, Tq, Tk,
             offset, left, right, c, BN: gl.constexpr, S: gl.constexpr, TERM: gl.constexpr, SIDES: gl.constexpr,
             MASKED: gl.constexpr):  # fmt: skip
    """P of the u-th tile, its rows' new maximum and by how much what was summed before shrinks.

    The slab's tile is added in units of the unscaled scores (`over` = 1 / scale), the scale in one multiply-add.
    """
    j = _key_of(u, t1, band, first, BN)
    edge = c * 0.0
    if SIDES:
        edge = gl.where(u < band, 0.0, gl.where(u < band + t1, left_edge, right_edge))
    if TERM:
        if u < band:
            # Beyond its ends the slab holds what no visible entry needs.
            x = gl.minimum(gl.maximum(j + at, 0), reach) // 16 * 16
            s = s + gl.load(slab + x).to(gl.float32) * over
    if MASKED:
        if (j < flo) | (j + BN > fhi):
            key = j + gl.arange(0, BN, gl.SliceLayout(0, S))
            s = gl.where(visible(rule, b, i[:, None], key[None, :], Tq, Tk, offset, left, right), s, float("-inf"))
    new = gl.maximum(m, gl.max(s, 1) * c + edge)
    return gl.exp2(s * c - (new - edge)[:, None]), new, gl.exp2(m - new)


@gluon.jit(
    do_not_specialize=[
        "c", "over", "H", "G", "HT", "Tq", "Tk", "offset", "lo", "hi", "end_a", "end_b", "head_t", "step_t", "left",
        "right", "batch",
    ]
)  # fmt: skip
def attend_overlapped(q, k, v, o, lse, slab, table, rule, ranges, c, over, H, G, HT, Tq, Tk, offset, lo, hi, head,
                      width, shift, end_a, end_b, head_t, step_t, left, right, batch, D: gl.constexpr,
                      DTYPE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, TERM: gl.constexpr, SIDES: gl.constexpr,
                      RANGED: gl.constexpr, MASKED: gl.constexpr, ROWS_Q: gl.constexpr, ROWS_K: gl.constexpr,
                      num_warps: gl.constexpr):  # fmt: skip
    """O and lse of BM queries, a block of :mod:`.masks`.

    TERM: `slab` has a row for each of them, `width` columns wide, the tile of query i0 and key j from column
    j − i0 + shift on. SIDES: offsets ≥ hi and ≤ lo are saturated, on the rows `end_a` and `end_b` of `table`.
    """
    s_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BN, 16])
    o_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, D, 16])
    row_of_s: gl.constexpr = gl.SliceLayout(1, s_mma)
    row_of_o: gl.constexpr = gl.SliceLayout(1, o_mma)
    BYTES: gl.constexpr = BN * D * 2
    blocks = (Tq + BM - 1) // BM
    i0 = gl.program_id(0) % blocks * BM
    n = gl.program_id(0) // blocks
    b = n // H
    h = n % H
    hk = h // G
    ht = gl.where(HT > 1, h, 0)
    first = i0 * 0
    beyond = first + Tk
    flo = first
    fhi = beyond
    if RANGED:
        at_ranges = ranges + b * batch + i0 // BM * 4
        first = gl.load(at_ranges)
        beyond = gl.load(at_ranges + 1)
        flo = gl.load(at_ranges + 2)
        fhi = gl.load(at_ranges + 3)
        first = first // BN * BN
    if rule.KEYS:
        fhi = flo
    # Rows that see nothing take one tile, of which all is masked.
    tiles = gl.maximum((beyond - first + BN - 1) // BN, 1)
    t1 = i0 * 0
    band = tiles
    left_edge = c * 0.0
    right_edge = c * 0.0
    if SIDES:
        # Tiles t1 … t1 + band − 1 hold an unsaturated offset.
        t1 = gl.minimum(gl.maximum(gl.maximum(i0 + offset - hi + 1, 0) // BN - first // BN, 0), tiles)
        t2 = (gl.maximum(i0 + BM - 1 + offset - lo, 0) + BN - 1) // BN - first // BN
        band = gl.minimum(gl.maximum(t2, t1), tiles) - t1
        ends = table + ht.to(gl.int64) * head_t
        LOG2E: gl.constexpr = 1.4426950408889634
        left_edge = gl.load(ends + gl.maximum(end_a, 0).to(gl.int64) * step_t).to(gl.float32) * LOG2E
        right_edge = gl.load(ends + gl.maximum(end_b, 0).to(gl.int64) * step_t).to(gl.float32) * LOG2E
        left_edge = gl.where(end_a >= 0, left_edge, 0.0)
        right_edge = gl.where(end_b >= 0, right_edge, 0.0)

    qs = gl.allocate_shared_memory(DTYPE, [BM, D], ROWS_Q)
    ks = gl.allocate_shared_memory(DTYPE, [_STAGES, BN, D], ROWS_K)
    vs = gl.allocate_shared_memory(DTYPE, [_STAGES, BN, D], ROWS_K)
    kbars = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    vbars = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    qbar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(kbars.index(stage), count=1)
        mbarrier.init(vbars.index(stage), count=1)
    mbarrier.init(qbar.index(0), count=1)
    fence_async_shared()
    barrier()
    mbarrier.expect(qbar.index(0), BM * D * 2)
    mbarrier.expect(kbars.index(0), BYTES)
    mbarrier.expect(vbars.index(0), BYTES)
    mbarrier.expect(kbars.index(1), BYTES, pred=tiles > 1)
    j = _key_of(0, t1, band, first, BN)
    tma.async_copy_global_to_shared(q, [b, h, i0, 0], qbar.index(0), qs)
    tma.async_copy_global_to_shared(k, [b, hk, j, 0], kbars.index(0), ks.index(0))
    tma.async_copy_global_to_shared(v, [b, hk, j, 0], vbars.index(0), vs.index(0))
    j = _key_of(1, t1, band, first, BN)
    tma.async_copy_global_to_shared(k, [b, hk, j, 0], kbars.index(1), ks.index(1), pred=tiles > 1)

    i = i0 + gl.arange(0, BM, row_of_s)
    here = slab
    reach = i0 * 0
    if TERM:
        row = gl.arange(0, BM, row_of_s)
        column = gl.arange(0, BN, gl.SliceLayout(0, s_mma))
        here = slab + ht.to(gl.int64) * head + (row.to(gl.int64) * width)[:, None] + column[None, :]
        reach = width - BN
    m = gl.full([BM], -3.0e38, gl.float32, row_of_s)
    zero = gl.zeros([BM, BN], gl.float32, s_mma)
    mbarrier.wait(qbar.index(0), 0)
    mbarrier.wait(kbars.index(0), 0)
    scores = warpgroup_mma(qs, ks.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[scores])
    prob, m, shrink = _weights(s, 0, t1, band, first, m, here, shift - i0, reach, over, left_edge, right_edge, rule, b,
                               i, flo, fhi, Tq, Tk, offset, left, right, c, BN, s_mma, TERM, SIDES, MASKED)  # fmt: skip
    l = gl.sum(prob, 1)
    operand = gl.convert_layout(prob.to(DTYPE), gl.DotOperandLayout(0, o_mma, 2))
    acc = gl.zeros([BM, D], gl.float32, o_mma)
    mbarrier.wait(kbars.index(1), 0, pred=tiles > 1)
    mbarrier.wait(vbars.index(0), 0)
    for u in range(1, tiles):
        slot = u % 2
        scores = warpgroup_mma(qs, ks.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        sums = warpgroup_mma(operand, vs.index(1 - slot), acc, is_async=True)
        # Every warp is done with the keys of the tile before, and with the values of the one before that.
        barrier()
        mbarrier.expect(kbars.index(1 - slot), BYTES, pred=u + 1 < tiles)
        mbarrier.expect(vbars.index(slot), BYTES)
        j = _key_of(u + 1, t1, band, first, BN)
        tma.async_copy_global_to_shared(k, [b, hk, j, 0], kbars.index(1 - slot), ks.index(1 - slot), pred=u + 1 < tiles)
        j = _key_of(u, t1, band, first, BN)
        tma.async_copy_global_to_shared(v, [b, hk, j, 0], vbars.index(slot), vs.index(slot))
        s = warpgroup_mma_wait(1, deps=[scores])
        prob, new, shrink = _weights(s, u, t1, band, first, m, here, shift - i0, reach, over, left_edge, right_edge,
                                     rule, b, i, flo, fhi, Tq, Tk, offset, left, right, c, BN, s_mma, TERM, SIDES,
                                     MASKED)  # fmt: skip
        l = l * shrink + gl.sum(prob, 1)
        m = new
        # These waits end a basic block: without them ptxas waits for the products before it forms the exponentials.
        mbarrier.wait(kbars.index(1 - slot), (u + 1) // 2 & 1, pred=u + 1 < tiles)
        mbarrier.wait(vbars.index(slot), u // 2 & 1)
        acc = warpgroup_mma_wait(0, deps=[sums])
        acc = acc * gl.convert_layout(shrink, row_of_o)[:, None]
        operand = gl.convert_layout(prob.to(DTYPE), gl.DotOperandLayout(0, o_mma, 2))
    u = tiles - 1
    sums = warpgroup_mma(operand, vs.index(u % 2), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[sums])
    empty = l == 0.0
    l = gl.where(empty, 1.0, l)
    total = gl.where(empty, float("-inf"), (m + gl.log2(l)) * 0.6931471805599453)
    gl.store(lse + n.to(gl.int64) * Tq + i, total, mask=i < Tq)
    barrier()
    qs.store((acc / gl.convert_layout(l, row_of_o)[:, None]).to(DTYPE))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(o, [b, h, i0, 0], qs)
    tma.store_wait(0)


def unsuited(L: Layout) -> list[str]:
    """Why the call must take the portable kernels; empty where this one runs it."""
    reasons = []
    if len(L.ports) > 1 or any(p.kind != "scalar" or p.left is not None for p in L.ports):
        reasons.append("the terms are not at most one Scalar without a gate")
    elif L.ports and not L.sides:
        reasons.append("no tile is saturated: the slab would be read for all of them")
    elif L.ports and L.Tk < BIASED_FROM:
        reasons.append(f"the keys are {L.Tk}, and with a term they should be {BIASED_FROM}")
    # 1 / scale joins the slab.
    if not L.call.scale >= 1e-20:
        reasons.append(f"scale is {L.call.scale}; it takes scales ≥ 1e-20")
    return reasons + misfits(L)


def forward(L: Layout, o: Tensor, lse: Tensor) -> None:
    """Write O and lse of a call that :func:`unsuited` has nothing against."""
    shape = SHAPES[L.d]
    # shift − offset is 0 at every offset: a kernel is compiled for multiples of 16 and another for the rest.
    slab, table, heads, ends = Slab(L.q.x, 0, L.call.offset), L.q.x, 1, (-1, -1)
    if L.ports:
        slab, table, heads, ends = L.slab(0, (BLOCK, shape.keys)), L.tables[0], L.tables[0].shape[0], L.ends[0]
    masked = L.masked(shape.keys) or L.mask.elementwise
    launch(
        attend_overlapped, (cdiv(L.Tq, BLOCK) * L.B * L.H,), tiles_of(L.q), tiles_of(L.k, shape.keys),
        tiles_of(L.v, shape.keys), tiles_of(Source(o)), lse, slab.memory, table, L.mask.rule, L.mask.queries, L.c,
        1.0 / L.call.scale, L.H, L.G, heads, L.Tq, L.Tk,
        L.call.offset, L.lo, L.hi, slab.memory.stride(0), slab.width, slab.shift - L.call.offset, *ends,
        L.head_stride(0) if L.ports else 0, table.stride(1), L.mask.left, L.mask.right, L.mask.batch, D=L.d,
        DTYPE=dtype_of(L.dtype), BM=BLOCK, BN=shape.keys, TERM=bool(L.ports), SIDES=bool(L.ports) and L.sides,
        RANGED=L.mask.ranged, MASKED=masked, ROWS_Q=rows_layout(L.d, L.dtype),
        ROWS_K=rows_layout(L.d, L.dtype, shape.keys), num_warps=BLOCK // 16,
        **({"maxnreg": shape.registers} if shape.registers and not masked else {}),
    )  # fmt: skip
