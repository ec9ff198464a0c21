"""Forward on Hopper in linear memory (Gluon): the band's products with table rows are formed a tile at a time.

The stretches of :mod:`.core`, the band first, then saturated left and right. In the band a tile needs left·A (OnQuery:
one product a step, since neighbouring tiles of scores share a tile of it) and k·C (OnKey: two a step, since every step
has its own keys). Both are skewed in registers (:mod:`.skew`); the second has keys as rows and is turned through shared
memory. Tables come with one row an offset, descending in δ for queries and ascending for keys, so a tile's rows are
contiguous. Nothing of size N² is stored.
"""

from __future__ import annotations

from torch import Tensor
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

from .biases import rows_of_heads
from .hopper import dtype_of, expanded, misfits, rows_layout, tiles_of
from .launch import cdiv, launch
from .plan import Layout
from .skew import TILE, add_biases, barrier, carried, skew, skew_carried, to_half, visible

__all__ = ["forward", "unsuited"]

_T = gl.constexpr(TILE)

STAGES = 2
"""Tiles of K and V in shared memory. With two, three programs of both terms fit an SM (72 of 74 KiB each)."""

REGISTERS: int | None = 168
"""Registers a thread at width 64, with which three programs fit an SM; None leaves them to the compiler."""


@gluon.jit
def _key_of(u, t1, band, first):
    """The first key of the u-th tile: those of the band (from tile t1 on), then those before it, then those after."""
    return first + _T * gl.where(u < band, u + t1, gl.where(u < band + t1, u - band, u))


@gluon.jit
def _expect(kbars, vbars, u, go, BYTES: gl.constexpr, STAGES: gl.constexpr):
    mbarrier.expect(kbars.index(u % STAGES), BYTES, pred=go)
    mbarrier.expect(vbars.index(u % STAGES), BYTES, pred=go)


@gluon.jit
def _fetch(k, v, ks, vs, kbars, vbars, u, j, b, hk, go, STAGES: gl.constexpr):
    """Keys and values of the u-th tile, whose slot is free and whose barriers expect them.

    All barriers are told first and all copies follow, each with a barrier of its own: the compiler puts a barrier of
    the threads between any two operations on the same memory.
    """
    slot = u % STAGES
    tma.async_copy_global_to_shared(k, [b, hk, j, 0], kbars.index(slot), ks.index(slot), pred=go)
    tma.async_copy_global_to_shared(v, [b, hk, j, 0], vbars.index(slot), vs.index(slot), pred=go)


@gluon.jit
def _edge(left, table, row, stride, c, D: gl.constexpr, ROW: gl.constexpr):
    """c · left_i · table[row] for the 64 rows of a shared tile; 0 where there is no row."""
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    d = gl.arange(0, D, gl.SliceLayout(0, blocked))
    value = gl.load(table + gl.maximum(row, 0).to(gl.int64) * stride + d).to(gl.float32)
    value = gl.where(row >= 0, value, 0.0)
    total = gl.sum(left.load(blocked).to(gl.float32) * value[None, :], 1)
    return gl.convert_layout(total * c, ROW)


@gluon.jit
def _step(s, v, arrived, phase, m, l, acc, rule, b, i, j, flo, fhi, Tq, Tk, offset, left, right, c, S: gl.constexpr,
          O: gl.constexpr, DTYPE: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    """One step of the online softmax; the product with V, once it has arrived, is left running.

    Tiles from key `flo` to key `fhi` need no mask.
    """
    if MASKED:
        s = s * c
        if (j < flo) | (j + _T > fhi):
            key = j + gl.arange(0, _T, gl.SliceLayout(0, S))
            s = gl.where(visible(rule, b, i[:, None], key[None, :], Tq, Tk, offset, left, right), s, float("-inf"))
        new = gl.maximum(m, gl.max(s, 1))
        prob = gl.exp2(s - new[:, None])
    else:
        new = gl.maximum(m, gl.max(s, 1) * c)
        prob = gl.exp2(s * c - new[:, None])
    shrink = gl.exp2(m - new)
    l = l * shrink + gl.sum(prob, 1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
    operand = gl.convert_layout(prob.to(DTYPE), gl.DotOperandLayout(0, O, 2))
    mbarrier.wait(arrived, phase)
    acc = warpgroup_mma(operand, v, acc, is_async=True)
    return acc, l, new


@gluon.jit
def _saturated(acc, l, m, qs, ks, vs, kbars, vbars, k, v, rule, b, hk, i, first, t1, band, u0, u1, tiles, flo, fhi, c,
               Tq, Tk, offset, left, right, S: gl.constexpr, O: gl.constexpr, DTYPE: gl.constexpr, BYTES: gl.constexpr,
               MASKED: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The tiles u0 … u1 − 1, without a term."""
    zero = gl.zeros([_T, _T], gl.float32, S)
    for u in range(u0, u1):
        slot = u % STAGES
        phase = u // STAGES & 1
        mbarrier.wait(kbars.index(slot), phase)
        s = warpgroup_mma(qs, ks.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        s, acc = warpgroup_mma_wait(0, deps=[s, acc])
        # Every warp is done with the tile before this one, whose slot is free.
        barrier()
        later = u + STAGES - 1
        _expect(kbars, vbars, later, later < tiles, BYTES, STAGES)
        _fetch(k, v, ks, vs, kbars, vbars, later, _key_of(later, t1, band, first), b, hk, later < tiles, STAGES)
        acc, l, m = _step(s, vs.index(slot), vbars.index(slot), phase, m, l, acc, rule, b, i,
                          _key_of(u, t1, band, first), flo, fhi, Tq, Tk, offset, left, right, c, S, O, DTYPE,
                          MASKED)  # fmt: skip
    return acc, l, m


@gluon.jit(
    do_not_specialize=[
        "c", "H", "G", "HA", "HC", "B", "Tq", "Tk", "offset", "lo", "hi", "origin_a", "origin_c", "end_a", "end_b",
        "left", "right", "batch",
    ]
)  # fmt: skip
def attend_band(q, w, x, k, v, a, cr, ends, content, bias, o, lse, rule, ranges, c, H, G, HA, HC, B, Tq, Tk, offset, lo,
                hi, origin_a, origin_c, end_a, end_b, head_a, step_a, head_u, head_v, left, right, batch,
                D: gl.constexpr, DTYPE: gl.constexpr, QUERY: gl.constexpr, KEY: gl.constexpr, OWN: gl.constexpr,
                BIASED: gl.constexpr, SIDES: gl.constexpr, SHIFTED: gl.constexpr, RANGED: gl.constexpr,
                MASKED: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """O and lse of 64 queries.

    QUERY: the term left·A; A's rows descend in δ from `origin_a`, the row of δ = 0 (OWN: left is q; BIASED: q + bias,
    and the queries are q + content, whose heads are `head_v` and `head_u` apart). KEY: the term k·C; its rows ascend
    from `origin_c`. SIDES: offsets ≥ hi and ≤ lo are saturated; there A has the rows `end_a` and `end_b` of `ends`
    (heads `head_a`, rows `step_a` apart), and SHIFTED: x has the queries plus C's end rows, [2·B, H, Tq, D].
    """
    s_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _T, 16])
    o_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    row_of_s: gl.constexpr = gl.SliceLayout(1, s_mma)
    row_of_o: gl.constexpr = gl.SliceLayout(1, o_mma)
    BYTES: gl.constexpr = _T * D * 2
    blocks = (Tq + _T - 1) // _T
    i0 = gl.program_id(0) % blocks * _T
    n = gl.program_id(0) // blocks
    b = n // H
    h = n % H
    hk = h // G
    ha = gl.where(HA > 1, h, 0)
    hc = gl.where(HC > 1, h, 0)
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
    t1 = i0 * 0
    band = tiles
    if SIDES:
        # Tiles t1 … t1 + band − 1 hold an unsaturated offset.
        t1 = gl.minimum(gl.maximum(gl.maximum(i0 + offset - hi + 1, 0) // _T - first // _T, 0), tiles)
        t2 = (gl.maximum(i0 + _T - 1 + offset - lo, 0) + _T - 1) // _T - first // _T
        band = gl.minimum(gl.maximum(t2, t1), tiles) - t1

    qs = gl.allocate_shared_memory(DTYPE, [_T, D], ROWS)
    ks = gl.allocate_shared_memory(DTYPE, [STAGES, _T, D], ROWS)
    vs = gl.allocate_shared_memory(DTYPE, [STAGES, _T, D], ROWS)
    kbars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    vbars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    abars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    cbars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    # Queries, then x's two.
    qbars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    ws = qs
    if QUERY and (BIASED or not OWN):
        ws = gl.allocate_shared_memory(DTYPE, [_T, D], ROWS)
    if QUERY:
        rows_a = gl.allocate_shared_memory(DTYPE, [_T, D], ROWS)
    if KEY:
        rows_c = gl.allocate_shared_memory(DTYPE, [2, _T, D], ROWS)
        turned = gl.allocate_shared_memory(gl.float16, [_T, _T], gl.NVMMASharedLayout(128, 16, 2))
    for stage in gl.static_range(STAGES):
        mbarrier.init(kbars.index(stage), count=1)
        mbarrier.init(vbars.index(stage), count=1)
    for n_bar in gl.static_range(2):
        mbarrier.init(abars.index(n_bar), count=1)
        mbarrier.init(cbars.index(n_bar), count=1)
    for n_bar in gl.static_range(3):
        mbarrier.init(qbars.index(n_bar), count=1)
    fence_async_shared()
    barrier()
    some = band > 0
    row_a = origin_a - i0 - offset + first + t1 * _T
    row_c = origin_c + i0 + offset - first - t1 * _T
    mbarrier.expect(qbars.index(0), BYTES if OWN or not QUERY else 2 * BYTES)
    for stage in gl.static_range(STAGES - 1):
        _expect(kbars, vbars, stage, stage < tiles, BYTES, STAGES)
    for n_bar in gl.static_range(2):
        if QUERY:
            mbarrier.expect(abars.index(n_bar), BYTES, pred=some)
        if KEY:
            mbarrier.expect(cbars.index(n_bar), BYTES, pred=some)
    tma.async_copy_global_to_shared(q, [b, h, i0, 0], qbars.index(0), qs)
    if QUERY:
        # A's tile before the first has a barrier of its own, and the slot of K that the first step fills.
        tma.async_copy_global_to_shared(a, [ha, row_a - _T, 0], abars.index(1), ks.index(STAGES - 1), pred=some)
    if KEY:
        tma.async_copy_global_to_shared(cr, [hc, row_c, 0], cbars.index(0), rows_c.index(0), pred=some)
    if QUERY and not OWN:
        tma.async_copy_global_to_shared(w, [b, h, i0, 0], qbars.index(0), ws)
    if QUERY:
        tma.async_copy_global_to_shared(a, [ha, row_a, 0], abars.index(0), rows_a, pred=some)
    if KEY:
        tma.async_copy_global_to_shared(cr, [hc, row_c - _T, 0], cbars.index(1), rows_c.index(1), pred=some)
    for stage in gl.static_range(STAGES - 1):
        j = _key_of(stage, t1, band, first)
        _fetch(k, v, ks, vs, kbars, vbars, stage, j, b, hk, stage < tiles, STAGES)
    mbarrier.wait(qbars.index(0), 0)
    if BIASED:
        add_biases(qs, ws, content + h.to(gl.int64) * head_u, bias + h.to(gl.int64) * head_v, D)
    acc = warpgroup_mma_init(gl.zeros([_T, D], gl.float32, o_mma))
    l = gl.zeros([_T], gl.float32, row_of_s)
    m = gl.full([_T], -3.0e38, gl.float32, row_of_s)
    i = i0 + gl.arange(0, _T, row_of_s)
    zero = gl.zeros([_T, _T], gl.float32, s_mma)
    last = carried(gl.zeros([_T, _T], gl.float16, s_mma))
    if QUERY:
        # Without a band this multiplies what nobody wrote, and nobody reads the product.
        mbarrier.wait(abars.index(1), 0, pred=some)
        product = warpgroup_mma(ws, ks.index(STAGES - 1).permute((1, 0)), zero, use_acc=False, is_async=True)
        last = carried(to_half(warpgroup_mma_wait(0, deps=[product])))
    if KEY:
        mbarrier.wait(cbars.index(0), 0, pred=some)
    for u in range(0, band):
        slot = u % STAGES
        keys = ks.index(slot).permute((1, 0))
        phase = u // STAGES & 1
        mbarrier.wait(kbars.index(slot), phase)
        if KEY:
            upper = u % 2
            lower = 1 - upper
            mbarrier.wait(cbars.index(lower), (u + 1) // 2 & 1)
            by = keys.permute((1, 0))
            low = warpgroup_mma(by, rows_c.index(lower).permute((1, 0)), zero, use_acc=False, is_async=True)
            high = warpgroup_mma(by, rows_c.index(upper).permute((1, 0)), zero, use_acc=False, is_async=True)
            low, high, acc = warpgroup_mma_wait(0, deps=[low, high, acc])
            low = to_half(low)
            high = to_half(high)
            if QUERY:
                mbarrier.wait(abars.index(0), u & 1)
                g = warpgroup_mma(ws, rows_a.permute((1, 0)), zero, use_acc=False, is_async=True)
            turned.store(skew(low, high))
            if QUERY:
                here = to_half(warpgroup_mma_wait(0, deps=[g]))
            s = warpgroup_mma(qs, keys, zero, use_acc=False, is_async=True)
        else:
            mbarrier.wait(abars.index(0), u & 1)
            g = warpgroup_mma(ws, rows_a.permute((1, 0)), zero, use_acc=False, is_async=True)
            g, acc = warpgroup_mma_wait(0, deps=[g, acc])
            here = to_half(g)
            s = warpgroup_mma(qs, keys, zero, use_acc=False, is_async=True)
        # Every warp is done with the tile before this one, whose slot is free, and with this tile's products but S.
        barrier()
        later = u + STAGES - 1
        more = u + 1 < band
        _expect(kbars, vbars, later, later < tiles, BYTES, STAGES)
        if QUERY:
            mbarrier.expect(abars.index(0), BYTES, pred=more)
        if KEY:
            mbarrier.expect(cbars.index(upper), BYTES, pred=more)
        _fetch(k, v, ks, vs, kbars, vbars, later, _key_of(later, t1, band, first), b, hk, later < tiles, STAGES)
        if QUERY:
            tma.async_copy_global_to_shared(a, [ha, row_a + (u + 1) * _T, 0], abars.index(0), rows_a, pred=more)
        if KEY:
            tma.async_copy_global_to_shared(cr, [hc, row_c - (u + 2) * _T, 0], cbars.index(upper), rows_c.index(upper),
                                            pred=more)  # fmt: skip
            by_key = turned.permute((1, 0)).load(s_mma)
        if QUERY:
            by_query = skew_carried(last, here)
            last = carried(here)
        s = warpgroup_mma_wait(0, deps=[s])
        if QUERY:
            s = s + by_query.to(gl.float32)
        if KEY:
            s = s + by_key.to(gl.float32)
        acc, l, m = _step(s, vs.index(slot), vbars.index(slot), phase, m, l, acc, rule, b, i,
                          _key_of(u, t1, band, first), flo, fhi, Tq, Tk, offset, left, right, c, s_mma, o_mma, DTYPE,
                          MASKED)  # fmt: skip

    if SIDES:
        if SHIFTED:
            # The band's rows of C are no longer needed: every warp passed the last step's barrier after its products.
            mbarrier.expect(qbars.index(1), BYTES, pred=t1 > 0)
            mbarrier.expect(qbars.index(2), BYTES, pred=t1 + band < tiles)
            tma.async_copy_global_to_shared(x, [b, h, i0, 0], qbars.index(1), rows_c.index(0), pred=t1 > 0)
            tma.async_copy_global_to_shared(x, [B + b, h, i0, 0], qbars.index(2), rows_c.index(1),
                                            pred=t1 + band < tiles)  # fmt: skip
        for side in gl.static_range(2):
            u0 = band if side == 0 else band + t1
            u1 = band + t1 if side == 0 else tiles
            xs = qs
            if SHIFTED:
                xs = rows_c.index(side)
                mbarrier.wait(qbars.index(1 + side), 0, pred=u1 > u0)
            if QUERY:
                end = end_a if side == 0 else end_b
                edge = _edge(ws, ends + ha.to(gl.int64) * head_a, end, step_a, c, D, row_of_s)
                m = m - edge
            acc, l, m = _saturated(acc, l, m, xs, ks, vs, kbars, vbars, k, v, rule, b, hk, i, first, t1, band, u0, u1,
                                   tiles, flo, fhi, c, Tq, Tk, offset, left, right, s_mma, o_mma, DTYPE, BYTES, MASKED,
                                   STAGES)  # fmt: skip
            if QUERY:
                m = m + edge
    acc = warpgroup_mma_wait(0, deps=[acc])
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
    kinds = [p.kind for p in L.ports]
    if not kinds or any(k not in ("query", "key") for k in kinds) or len(set(kinds)) < len(kinds):
        return ["the terms are not one OnQuery, one OnKey or one of each"]
    return misfits(L)


def forward(L: Layout, o: Tensor, lse: Tensor) -> None:
    """Write O and lse of a call that :func:`unsuited` has nothing against."""
    from .passes import prepare_rows, shifted

    by_kind = {p.kind: n for n, p in enumerate(L.ports)}
    query, key = by_kind.get("query"), by_kind.get("key")
    tables = L.shifting("key")
    x = shifted(L, L.q, bool(tables))
    if tables:
        prepare_rows(L, x, None, L.v, None, tables, (), ())
    q = tiles_of(L.q)
    own = query is None or L.ports[query].left is None
    a, origin_a, heads_a, ends, left, right = q, 0, 0, L.q.x, -1, -1
    if query is not None:
        table, origin_a = expanded(L, query, True)
        a, heads_a, ends, (left, right) = tiles_of(table), table.shape[0], L.tables[query], L.ends[query]
    c_rows, origin_c, heads_c = q, 0, 0
    if key is not None:
        table, origin_c = expanded(L, key, False)
        c_rows, heads_c = tiles_of(table), table.shape[0]
    biased = any(p.biased for p in L.ports)
    (u, head_u), (v, head_v) = (rows_of_heads(L, n) if biased else (L.anchor, 0) for n in ("content", "bias"))
    launch(
        attend_band, (cdiv(L.Tq, TILE) * L.B * L.H,), q, q if own else tiles_of(L.lefts[query]), tiles_of(x),
        tiles_of(L.k), tiles_of(L.v), a, c_rows, ends, u, v, tiles_of(o), lse, L.mask.rule, L.mask.queries, L.c, L.H,
        L.G, heads_a, heads_c, L.B, L.Tq, L.Tk, L.call.offset, L.lo, L.hi, origin_a, origin_c, left, right,
        0 if query is None else L.head_stride(query), ends.stride(1), head_u, head_v, L.mask.left, L.mask.right,
        L.mask.batch, D=L.d, DTYPE=dtype_of(L.dtype), QUERY=query is not None, KEY=key is not None,
        OWN=own, BIASED=biased, SIDES=L.sides,
        SHIFTED=bool(tables), RANGED=L.mask.ranged, MASKED=L.masked(TILE) or L.mask.elementwise, STAGES=STAGES,
        ROWS=rows_layout(L.d, L.dtype), num_warps=4,
        **({"maxnreg": REGISTERS} if L.d == 64 and REGISTERS else {}),
    )  # fmt: skip
