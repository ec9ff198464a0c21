"""Backward of query and key terms on Hopper (Gluon), without Z: the pass over keys.

The mirror image of :mod:`.band_queries`: tiles have keys as rows, so the key term's H = k·Cᵀ is skewed in registers, dS
is skewed back to tiles of dH, which give dK += dH·C at once and are stored for C's gradient, and the query term's
left·A is turned through shared memory. In a saturated stretch the queries come shifted by C's end row and the prepared
lse contains A's: dK = dSᵀ·Q is complete there without another step. Scores are in log2 units, c = τ·log2 e. One writer
a value.
"""

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

from .skew import TILE, barrier, carried, products, skew, skew_carried, to_half, unskew, visible

__all__ = ["key_pass"]

_T = gl.constexpr(TILE)


@gluon.jit
def _of_step(u, tiles, t1, band, first, SHARED: gl.constexpr):
    """(query head of the group, stretch, first query) of step u.

    A head's tiles are those of the band (stretch 0, from tile t1 on), then those before it (2), then those after (1).
    """
    head = t1 * 0
    t = u
    if SHARED:
        head = u // gl.maximum(tiles, 1)
        t = u - head * tiles
    stretch = gl.where(t < band, 0, gl.where(t < band + t1, 2, 1))
    return head, stretch, first + _T * gl.where(t < band, t + t1, gl.where(t < band + t1, t - band, t))


@gluon.jit
def _fetch(q, w, x, g, qs, ws, gs, qbars, wbars, gbars, slot, b, B, h, stretch, i, go, BYTES: gl.constexpr,
           OWN: gl.constexpr, BAND: gl.constexpr, SHIFTED: gl.constexpr):  # fmt: skip
    """Queries and dO of a step, whose slot is free: all barriers are told first, each copy has its own.

    SHIFTED: a saturated stretch has its queries from x. BAND: the step may be one of the band.
    """
    mbarrier.expect(qbars.index(slot), BYTES, pred=go)
    if not OWN:
        mbarrier.expect(wbars.index(slot), BYTES, pred=go)
    mbarrier.expect(gbars.index(slot), BYTES, pred=go)
    if BAND:
        mine = go & (stretch == 0) if SHIFTED else go
        tma.async_copy_global_to_shared(q, [b, h, i, 0], qbars.index(slot), qs.index(slot), pred=mine)
    if SHIFTED:
        at = gl.where(stretch == 2, B + b, b)
        mine = go & (stretch > 0) if BAND else go
        tma.async_copy_global_to_shared(x, [at, h, i, 0], qbars.index(slot), qs.index(slot), pred=mine)
    if not OWN:
        tma.async_copy_global_to_shared(w, [b, h, i, 0], wbars.index(slot), ws.index(slot), pred=go)
    tma.async_copy_global_to_shared(g, [b, h, i, 0], gbars.index(slot), gs.index(slot), pred=go)


@gluon.jit
def _statistics(stats, stretch, planes, row, i, lines, go):
    """lse and Δ of the 64 queries of a step."""
    at = stats + row + i + lines
    inside = (lines >= 0) & go
    return (gl.load(at + stretch * planes, mask=inside, other=0.0), gl.load(at + 3 * planes, mask=inside, other=0.0))


@gluon.jit(
    do_not_specialize=[
        "c", "tau", "f0", "B", "H", "HK", "G", "HA", "HC", "Tq", "Tk", "pad", "offset", "lo", "hi", "origin_a",
        "origin_c", "base", "left", "right", "batch",
    ]
)  # fmt: skip
def key_pass(q, w, x, k, v, a, cr, g, dk, dv, dh, content, bias, stats, rule, ranges, c, tau, f0, B, H, HK, G, HA, HC,
             Tq, Tk, pad, offset, lo, hi, origin_a, origin_c, base, head_u, head_v, left, right, batch, D: gl.constexpr,
             DTYPE: gl.constexpr, OWN: gl.constexpr, BIASED: gl.constexpr, KEY: gl.constexpr, SIDES: gl.constexpr,
             SHIFTED: gl.constexpr, SHARED: gl.constexpr, RANGED: gl.constexpr, MASKED: gl.constexpr,
             STAGES: gl.constexpr, ROWS: gl.constexpr, SQUARE: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """dK and dV = Pᵀ·dO of 64 keys, summed over the G query heads of their key head in order; and dH of each (KEY).

    Programs f0, f0 + 1, … are (key head, batch, block). Of dH, program f writes the rows 64·((f − f0)·G + head) … for
    each query head of the group, by tiles of 64 offsets, in columns counted from query 0 or, where SIDES, from query
    `base` + its first key. A band of n tiles needs n + 1 tiles of either table's rows a head; they are counted through
    all heads of the group.

    BIASED (with OWN, without KEY and SIDES): left is q + bias, added in registers, and the queries are q + content,
    whose heads are `head_v` and `head_u` apart: k·content is a constant of each row, and dK gets content times the sums
    of dS's rows.
    """
    s_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _T, 16])
    o_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, o_mma, 2)
    fragment: gl.constexpr = gl.DotOperandLayout(0, s_mma, 2)
    column: gl.constexpr = gl.SliceLayout(0, s_mma)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    BYTES: gl.constexpr = _T * D * 2
    blocks = (Tk + _T - 1) // _T
    f = f0 + gl.program_id(0)
    j0 = f % blocks * _T
    b = f // blocks % B
    hk = f // blocks // B
    first = j0 * 0
    beyond = first + Tq
    # Tiles from query `flo` to query `fhi` need no mask: queries beyond Tq have P = 0 without one.
    flo = first
    fhi = beyond + _T
    if RANGED:
        at = ranges + b * batch + j0 // _T * 4
        first = gl.load(at) // _T * _T
        beyond = gl.load(at + 1)
        flo = gl.load(at + 2)
        fhi = gl.load(at + 3)
    fhi = gl.where(j0 + _T > Tk, flo, fhi)
    if rule.KEYS:
        fhi = flo
    tiles = (beyond - first + _T - 1) // _T
    t1 = j0 * 0
    band = tiles
    place = first
    if SIDES:
        # Tiles t1 … t1 + band − 1 hold an unsaturated offset.
        t1 = gl.minimum(gl.maximum(gl.maximum(j0 - offset + lo + 1, 0) // _T - first // _T, 0), tiles)
        t2 = (gl.maximum(j0 + _T - 1 - offset + hi, 0) + _T - 1) // _T - first // _T
        band = gl.minimum(gl.maximum(t2, t1), tiles) - t1
        place = first + t1 * _T - j0 - base
    total = tiles * G
    row_a = origin_a - offset - first - t1 * _T + j0
    row_c = origin_c + offset + first + t1 * _T - j0

    ks = gl.allocate_shared_memory(DTYPE, [_T, D], ROWS)
    vs = gl.allocate_shared_memory(DTYPE, [_T, D], ROWS)
    qs = gl.allocate_shared_memory(DTYPE, [STAGES, _T, D], ROWS)
    gs = gl.allocate_shared_memory(DTYPE, [STAGES, _T, D], ROWS)
    ps = gl.allocate_shared_memory(DTYPE, [2, _T, D], ROWS)
    turned = gl.allocate_shared_memory(gl.float16, [_T, _T], gl.NVMMASharedLayout(128, 16, 2))
    shared_ls = gl.allocate_shared_memory(gl.float32, [_T], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    shared_dl = gl.allocate_shared_memory(gl.float32, [_T], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ws = qs
    if not OWN:
        ws = gl.allocate_shared_memory(DTYPE, [STAGES, _T, D], ROWS)
    if KEY:
        cs = gl.allocate_shared_memory(DTYPE, [3, _T, D], ROWS)
        stage = gl.allocate_shared_memory(DTYPE, [_T, _T], SQUARE)
    kbars = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    qbars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    wbars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    gbars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    pbars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    cbars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kbars.index(0), count=1)
    for n in gl.static_range(STAGES):
        mbarrier.init(qbars.index(n), count=1)
        mbarrier.init(wbars.index(n), count=1)
        mbarrier.init(gbars.index(n), count=1)
    for n in gl.static_range(2):
        mbarrier.init(pbars.index(n), count=1)
    for n in gl.static_range(3):
        mbarrier.init(cbars.index(n), count=1)
    fence_async_shared()
    barrier()
    mbarrier.expect(kbars.index(0), 2 * BYTES)
    tma.async_copy_global_to_shared(k, [b, hk, j0, 0], kbars.index(0), ks)
    tma.async_copy_global_to_shared(v, [b, hk, j0, 0], kbars.index(0), vs)
    for n in gl.static_range(STAGES - 1):
        ahead, side, i = _of_step(n, tiles, t1, band, first, SHARED)
        _fetch(q, w, x, g, qs, ws, gs, qbars, wbars, gbars, n, b, B, hk * G + ahead, side, i, n < total, BYTES, OWN,
               True, SHIFTED)  # fmt: skip
    lines = gl.arange(0, _T, line)
    planes = (B * H).to(gl.int64) * pad
    row = (b * H + hk * G).to(gl.int64) * pad
    _, side0, i_first = _of_step(0, tiles, t1, band, first, SHARED)
    ls, dl = _statistics(stats, side0, planes, row, i_first, lines, total > 0)
    acc_k = warpgroup_mma_init(gl.zeros([_T, D], gl.float32, o_mma))
    acc_v = warpgroup_mma_init(gl.zeros([_T, D], gl.float32, o_mma))
    zero = gl.zeros([_T, _T], gl.float32, s_mma)
    j = j0 + gl.arange(0, _T, gl.SliceLayout(1, s_mma))
    some = band > 0
    mbarrier.wait(kbars.index(0), 0)
    for n in range(0, G if SHARED else 1):
        h = hk * G + n
        # The head's first step, and the first of the tiles of table rows that it needs.
        v0 = n * tiles
        e0 = n * (band + 1)
        if SHARED:
            # Every warp is done with the table rows of the head before.
            barrier()
        if BIASED:
            at_keys = products(ks, content + h.to(gl.int64) * head_u, D, gl.SliceLayout(1, s_mma))
            position = gl.load(bias + h.to(gl.int64) * head_v + gl.arange(0, D, gl.SliceLayout(0, fragment)))
            sigma = gl.zeros([_T], gl.float32, gl.SliceLayout(1, s_mma))
        ha = gl.where(HA > 1, h, 0)
        hc = gl.where(HC > 1, h, 0)
        for e in gl.static_range(2):
            mbarrier.expect(pbars.index((e0 + e) % 2), BYTES, pred=some)
            if KEY:
                mbarrier.expect(cbars.index((e0 + e) % 3), BYTES, pred=some)
        for e in gl.static_range(2):
            tma.async_copy_global_to_shared(a, [ha, row_a - e * _T, 0], pbars.index((e0 + e) % 2),
                                            ps.index((e0 + e) % 2), pred=some)  # fmt: skip
            if KEY:
                tma.async_copy_global_to_shared(cr, [hc, row_c - _T + e * _T, 0], cbars.index((e0 + e) % 3),
                                                cs.index((e0 + e) % 3), pred=some)  # fmt: skip
        if KEY:
            # Without a band this multiplies what nobody wrote, and nobody reads the product.
            mbarrier.wait(cbars.index(e0 % 3), e0 // 3 & 1, pred=some)
            product = warpgroup_mma(ks, cs.index(e0 % 3).permute((1, 0)), zero, use_acc=False, is_async=True)
            last = carried(to_half(warpgroup_mma_wait(0, deps=[product])))
            before = carried(gl.zeros([_T, _T], DTYPE, s_mma))
            to = ((f - f0) * G + n) * _T
        for t in range(0, band):
            u = v0 + t
            slot = u % STAGES
            phase = u // STAGES & 1
            upper = (e0 + t) % 2
            lower = 1 - upper
            mbarrier.wait(pbars.index(upper), (e0 + t) // 2 & 1)
            mbarrier.wait(pbars.index(lower), (e0 + t + 1) // 2 & 1)
            mbarrier.wait(qbars.index(slot), phase)
            mbarrier.wait(gbars.index(slot), phase)
            if not OWN:
                mbarrier.wait(wbars.index(slot), phase)
            by = ws.index(slot)
            if BIASED:
                by = by.load(fragment) + position[None, :]
            low = warpgroup_mma(by, ps.index(lower).permute((1, 0)), zero, use_acc=False, is_async=True)
            high = warpgroup_mma(by, ps.index(upper).permute((1, 0)), zero, use_acc=False, is_async=True)
            if KEY:
                mbarrier.wait(cbars.index((e0 + t + 1) % 3), (e0 + t + 1) // 3 & 1)
                y = warpgroup_mma(ks, cs.index((e0 + t + 1) % 3).permute((1, 0)), zero, use_acc=False, is_async=True)
                low, high, y = warpgroup_mma_wait(0, deps=[low, high, y])
                # The product with the queries is added to the key term: its tile needs no registers of its own.
                here = to_half(y)
                term = warpgroup_mma_init(skew_carried(last, here).to(gl.float32))
                last = carried(here)
                s = warpgroup_mma(ks, qs.index(slot).permute((1, 0)), term, is_async=True)
            else:
                low, high = warpgroup_mma_wait(0, deps=[low, high])
                s = warpgroup_mma(ks, qs.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            low = to_half(low)
            high = to_half(high)
            dp = warpgroup_mma(vs, gs.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            turned.store(skew(low, high))
            shared_ls.store(ls)
            shared_dl.store(dl)
            if KEY:
                tma.store_wait(0)
            # Every warp is done with step u − 1 and with this step's rows of A, and dH has left `stage`.
            barrier()
            later = u + STAGES - 1
            ahead, side, i = _of_step(later, tiles, t1, band, first, SHARED)
            more = t + 1 < band
            mbarrier.expect(pbars.index(upper), BYTES, pred=more)
            if KEY:
                mbarrier.expect(cbars.index((e0 + t + 2) % 3), BYTES, pred=more)
            _fetch(q, w, x, g, qs, ws, gs, qbars, wbars, gbars, later % STAGES, b, B, hk * G + ahead, side, i,
                   later < total, BYTES, OWN, True, SHIFTED)  # fmt: skip
            tma.async_copy_global_to_shared(a, [ha, row_a - (t + 2) * _T, 0], pbars.index(upper), ps.index(upper),
                                            pred=more)  # fmt: skip
            if KEY:
                tma.async_copy_global_to_shared(cr, [hc, row_c + (t + 1) * _T, 0], cbars.index((e0 + t + 2) % 3),
                                                cs.index((e0 + t + 2) % 3), pred=more)  # fmt: skip
            by_query = turned.permute((1, 0)).load(s_mma)
            ls_now = shared_ls.load(column)
            ahead, side, i = _of_step(u + 1, tiles, t1, band, first, SHARED)
            ls, dl = _statistics(stats, side, planes, row + ahead.to(gl.int64) * pad, i, lines, u + 1 < total)
            s = warpgroup_mma_wait(1, deps=[s])
            if BIASED:
                s = s + at_keys[:, None]
            prob = gl.exp2((s + by_query.to(gl.float32)) * c - ls_now[None, :])
            if MASKED:
                i_now = first + (t1 + t) * _T
                if (i_now < flo) | (i_now + _T > fhi):
                    query = i_now + gl.arange(0, _T, column)
                    seen = visible(rule, b, query[None, :], j[:, None], Tq, Tk, offset, left, right)
                    prob = gl.where(seen, prob, 0.0)
            prob_v = gl.convert_layout(prob.to(DTYPE), operand)
            acc_v = warpgroup_mma(prob_v, gs.index(slot), acc_v, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            ds = prob * (dp - shared_dl.load(column)[None, :])
            if BIASED:
                sigma += gl.sum(ds, 1)
            now = ds.to(DTYPE)
            acc_k = warpgroup_mma(gl.convert_layout(now, operand), qs.index(slot), acc_k, is_async=True)
            if KEY:
                tile = unskew(before, now)
                before = carried(now)
                stage.store(tile)
                fence_async_shared()
                barrier()
                tma.async_copy_shared_to_global(dh, [to, place + t * _T], stage)
                acc_k = warpgroup_mma(gl.convert_layout(tile, operand), cs.index((e0 + t) % 3), acc_k, is_async=True)
            # Left running into the next step, these make ptxas run all products of the kernel one after the other.
            acc_k, acc_v = warpgroup_mma_wait(0, deps=[acc_k, acc_v])
            acc_k = warpgroup_mma_init(acc_k)
            acc_v = warpgroup_mma_init(acc_v)
        if BIASED:
            at_d = content + h.to(gl.int64) * head_u + gl.arange(0, D, gl.SliceLayout(0, o_mma))
            weight = gl.convert_layout(sigma, gl.SliceLayout(1, o_mma))
            acc_k, acc_v = warpgroup_mma_wait(0, deps=[acc_k, acc_v])
            acc_k = warpgroup_mma_init(acc_k + weight[:, None] * gl.load(at_d).to(gl.float32)[None, :])
            acc_v = warpgroup_mma_init(acc_v)
        if KEY:
            tile = unskew(before, gl.zeros([_T, _T], DTYPE, s_mma))
            tma.store_wait(0)
            barrier()
            stage.store(tile)
            fence_async_shared()
            barrier()
            if some:
                # Without a band no column of dH is this block's; a copy that begins before its tensor stopped an H200.
                tma.async_copy_shared_to_global(dh, [to, place + band * _T], stage)
            rest = warpgroup_mma(gl.convert_layout(tile, operand), cs.index((e0 + band) % 3),
                                 warpgroup_mma_init(gl.zeros([_T, D], gl.float32, o_mma)), is_async=True)  # fmt: skip
            acc_k, acc_v, rest = warpgroup_mma_wait(0, deps=[acc_k, acc_v, rest])
            acc_k = warpgroup_mma_init(acc_k + gl.where(some, rest, 0.0))
            acc_v = warpgroup_mma_init(acc_v)
        if SIDES:
            for u in range(v0 + band, v0 + tiles):
                slot = u % STAGES
                phase = u // STAGES & 1
                # Every warp is done with step u − 1. Copies come before this step's products: after them, the compiler
                # would make the threads wait again for each later product that reads the same memory.
                barrier()
                shared_ls.store(ls)
                shared_dl.store(dl)
                later = u + STAGES - 1
                ahead, side, i = _of_step(later, tiles, t1, band, first, SHARED)
                _fetch(q, w, x, g, qs, ws, gs, qbars, wbars, gbars, later % STAGES, b, B, hk * G + ahead, side, i,
                       later < total, BYTES, OWN, SHARED or not SHIFTED, SHIFTED)  # fmt: skip
                barrier()
                mbarrier.wait(qbars.index(slot), phase)
                s = warpgroup_mma(ks, qs.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
                mbarrier.wait(gbars.index(slot), phase)
                dp = warpgroup_mma(vs, gs.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
                ls_now = shared_ls.load(column)
                ahead, side, i = _of_step(u + 1, tiles, t1, band, first, SHARED)
                ls, dl = _statistics(stats, side, planes, row + ahead.to(gl.int64) * pad, i, lines, u + 1 < total)
                s = warpgroup_mma_wait(1, deps=[s])
                prob = gl.exp2(s * c - ls_now[None, :])
                if MASKED:
                    _, _, i_now = _of_step(u, tiles, t1, band, first, SHARED)
                    if (i_now < flo) | (i_now + _T > fhi):
                        query = i_now + gl.arange(0, _T, column)
                        seen = visible(rule, b, query[None, :], j[:, None], Tq, Tk, offset, left, right)
                        prob = gl.where(seen, prob, 0.0)
                prob_v = gl.convert_layout(prob.to(DTYPE), operand)
                acc_v = warpgroup_mma(prob_v, gs.index(slot), acc_v, is_async=True)
                dp = warpgroup_mma_wait(1, deps=[dp])
                now = (prob * (dp - shared_dl.load(column)[None, :])).to(DTYPE)
                acc_k = warpgroup_mma(gl.convert_layout(now, operand), qs.index(slot), acc_k, is_async=True)
                acc_k, acc_v = warpgroup_mma_wait(0, deps=[acc_k, acc_v])
                acc_k = warpgroup_mma_init(acc_k)
                acc_v = warpgroup_mma_init(acc_v)
    acc_k, acc_v = warpgroup_mma_wait(0, deps=[acc_k, acc_v])
    # Every warp is done with the keys and values.
    barrier()
    tma.store_wait(0)
    ks.store((acc_k * tau).to(DTYPE))
    vs.store(acc_v.to(DTYPE))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(dk, [b, hk, j0, 0], ks)
    tma.async_copy_shared_to_global(dv, [b, hk, j0, 0], vs)
    tma.store_wait(0)
