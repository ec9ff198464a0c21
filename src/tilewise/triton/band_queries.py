"""Backward of query and key terms on Hopper (Gluon), without Z: the pass over queries.

The stretches of :mod:`.band`. In the band G = left·Aᵀ is formed again and skewed in registers (:mod:`.skew`), and dS is
skewed back: a tile of dG is [dS of one tile | dS of the next], shifted; complete one step later, it gives
d(left) += dG·A at once and is stored for A's gradient, whose rows own diagonals (:mod:`.linear_backward`). The key term
k·C has keys as rows: its skewed tile is turned through shared memory, as in the forward. In a saturated stretch A's end
row is a constant of each query, which the prepared lse contains; its gradient is a sum of dS over the stretch. C's end
row is in the shifted queries; dS·K of the stretch, summed over the queries, is its gradient. Scores are in log2 units,
c = τ·log2 e. One writer a value.
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

from .skew import TILE, add_biases, barrier, carried, skew, skew_carried, to_half, unskew, visible

__all__ = ["query_pass"]

_T = gl.constexpr(TILE)


@gluon.jit
def _key_of(u, t1, band, first):
    """The first key of the u-th tile: those of the band (from tile t1 on), then those before it, then those after."""
    return first + _T * gl.where(u < band, u + t1, gl.where(u < band + t1, u - band, u))


@gluon.jit
def _fetch(k, v, ks, vs, kbars, vbars, u, j, b, hk, go, BYTES: gl.constexpr, STAGES: gl.constexpr):
    """Keys and values of the u-th tile, whose slot is free: all barriers are told first, each copy has its own."""
    slot = u % STAGES
    mbarrier.expect(kbars.index(slot), BYTES, pred=go)
    mbarrier.expect(vbars.index(slot), BYTES, pred=go)
    tma.async_copy_global_to_shared(k, [b, hk, j, 0], kbars.index(slot), ks.index(slot), pred=go)
    tma.async_copy_global_to_shared(v, [b, hk, j, 0], vbars.index(slot), vs.index(slot), pred=go)


@gluon.jit
def _weighted(sums, rows, to, D: gl.constexpr):
    """to[d] = Σ_i sums_i · rows[i, d], for 64 rows in shared memory."""
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    weight = gl.convert_layout(sums, gl.SliceLayout(1, blocked))
    total = gl.sum(rows.load(blocked).to(gl.float32) * weight[:, None], 0)
    gl.store(to + gl.arange(0, D, gl.SliceLayout(0, blocked)), total)


@gluon.jit
def _saturated(acc, qs, gs, ks, vs, kbars, vbars, k, v, ls, dl, rule, b, hk, i, first, t1, band, u0, u1, tiles, flo,
               fhi, c, Tq, Tk, offset, left, right, S: gl.constexpr, OPERAND: gl.constexpr, DTYPE: gl.constexpr,
               BYTES: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """acc += dS·K over the tiles u0 … u1 − 1, without a term; and dS summed over their keys."""
    zero = gl.zeros([_T, _T], gl.float32, S)
    sums = gl.zeros([_T], gl.float32, gl.SliceLayout(1, S))
    for u in range(u0, u1):
        slot = u % STAGES
        phase = u // STAGES & 1
        mbarrier.wait(kbars.index(slot), phase)
        s = warpgroup_mma(qs, ks.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(vbars.index(slot), phase)
        dp = warpgroup_mma(gs, vs.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        s, acc = warpgroup_mma_wait(1, deps=[s, acc])
        # Every warp is done with the tile before this one, whose slot is free.
        barrier()
        later = u + STAGES - 1
        _fetch(k, v, ks, vs, kbars, vbars, later, _key_of(later, t1, band, first), b, hk, later < tiles, BYTES, STAGES)
        prob = gl.exp2(s * c - ls[:, None])
        if MASKED:
            j = _key_of(u, t1, band, first)
            if (j < flo) | (j + _T > fhi):
                key = j + gl.arange(0, _T, gl.SliceLayout(0, S))
                prob = gl.where(visible(rule, b, i[:, None], key[None, :], Tq, Tk, offset, left, right), prob, 0.0)
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = prob * (dp - dl[:, None])
        acc = warpgroup_mma(gl.convert_layout(ds.to(DTYPE), OPERAND), ks.index(slot), acc, is_async=True)
        sums += gl.sum(ds, 1)
    return acc, sums


@gluon.jit(
    do_not_specialize=[
        "c", "tau", "f0", "B", "H", "G", "HA", "HC", "Tq", "Tk", "pad", "offset", "lo", "hi", "origin_a", "origin_c",
        "end_a", "end_b", "base", "left", "right", "batch",
    ]
)  # fmt: skip
def query_pass(q, w, x, k, v, a, cr, g, dq, dw, dg, ends, parts, content, bias, stats, rule, ranges, c, tau, f0, B, H,
               G, HA, HC, Tq, Tk, pad, offset, lo, hi, origin_a, origin_c, end_a, end_b, head_a, step_a, base, head_u,
               head_v, left, right, batch, D: gl.constexpr, DTYPE: gl.constexpr, OWN: gl.constexpr,
               BIASED: gl.constexpr, KEY: gl.constexpr, SIDES: gl.constexpr, SHIFTED: gl.constexpr,
               RANGED: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
               SQUARE: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """dQ and d(left) of 64 queries, their dG by tiles of 64 offsets, and what the saturated sides add to end rows.

    Programs f0, f0 + 1, … are (head, batch, block); program f writes the rows 64·(f − f0) … of dG, in columns counted
    from key 0 or, where SIDES, from key `base` + its first query. A's rows descend in δ from `origin_a`, the row of
    δ = 0 (OWN: left is q, and dQ has both parts); KEY: the term k·C, whose rows ascend from `origin_c`. SIDES: OWN, and
    A has the rows `end_a` and `end_b` of `ends` (heads `head_a`, rows `step_a` apart); SHIFTED: x has the queries plus
    C's end rows, [2·B, H, Tq, D]. `parts` [f, A and C (KEY), side, D] gets what belongs to the end rows, over τ.

    BIASED (with OWN, without SIDES): left is q + bias and the queries are q + content, whose heads are `head_v` and
    `head_u` apart; `parts` [f, 2, D] gets the sums over the 64 queries of the content's and of left's gradient, over τ.
    """
    SPLIT: gl.constexpr = BIASED or not OWN
    s_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _T, 16])
    o_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, o_mma, 2)
    row_of_s: gl.constexpr = gl.SliceLayout(1, s_mma)
    BYTES: gl.constexpr = _T * D * 2
    blocks = (Tq + _T - 1) // _T
    f = f0 + gl.program_id(0)
    i0 = f % blocks * _T
    b = f // blocks % B
    h = f // blocks // B
    hk = h // G
    ha = gl.where(HA > 1, h, 0)
    hc = gl.where(HC > 1, h, 0)
    first = i0 * 0
    beyond = first + Tk
    # Tiles from key `flo` to key `fhi` need no mask.
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
    place = first
    if SIDES:
        # Tiles t1 … t1 + band − 1 hold an unsaturated offset.
        t1 = gl.minimum(gl.maximum(gl.maximum(i0 + offset - hi + 1, 0) // _T - first // _T, 0), tiles)
        t2 = (gl.maximum(i0 + _T - 1 + offset - lo, 0) + _T - 1) // _T - first // _T
        band = gl.minimum(gl.maximum(t2, t1), tiles) - t1
        place = first + t1 * _T - i0 - base

    qs = gl.allocate_shared_memory(DTYPE, [_T, D], ROWS)
    gs = gl.allocate_shared_memory(DTYPE, [_T, D], ROWS)
    ks = gl.allocate_shared_memory(DTYPE, [STAGES, _T, D], ROWS)
    vs = gl.allocate_shared_memory(DTYPE, [STAGES, _T, D], ROWS)
    ps = gl.allocate_shared_memory(DTYPE, [3, _T, D], ROWS)
    stage = gl.allocate_shared_memory(DTYPE, [_T, _T], SQUARE)
    ws = qs
    if SPLIT:
        ws = gl.allocate_shared_memory(DTYPE, [_T, D], ROWS)
    if KEY:
        cs = gl.allocate_shared_memory(DTYPE, [2, _T, D], ROWS)
        turned = gl.allocate_shared_memory(gl.float16, [_T, _T], gl.NVMMASharedLayout(128, 16, 2))
    # Queries and dO, then x's two.
    qbars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    kbars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    vbars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    pbars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    cbars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(kbars.index(n), count=1)
        mbarrier.init(vbars.index(n), count=1)
    for n in gl.static_range(3):
        mbarrier.init(qbars.index(n), count=1)
        mbarrier.init(pbars.index(n), count=1)
    for n in gl.static_range(2):
        mbarrier.init(cbars.index(n), count=1)
    fence_async_shared()
    barrier()
    some = band > 0
    row_a = origin_a - offset - i0 + first + t1 * _T
    row_c = origin_c + offset + i0 - first - t1 * _T
    mbarrier.expect(qbars.index(0), 2 * BYTES if OWN else 3 * BYTES)
    mbarrier.expect(pbars.index(0), BYTES, pred=some)
    mbarrier.expect(pbars.index(1), BYTES, pred=some)
    if KEY:
        mbarrier.expect(cbars.index(0), BYTES, pred=some)
        mbarrier.expect(cbars.index(1), BYTES, pred=some)
    tma.async_copy_global_to_shared(q, [b, h, i0, 0], qbars.index(0), qs)
    tma.async_copy_global_to_shared(a, [ha, row_a - _T, 0], pbars.index(0), ps.index(0), pred=some)
    if KEY:
        tma.async_copy_global_to_shared(cr, [hc, row_c, 0], cbars.index(0), cs.index(0), pred=some)
    tma.async_copy_global_to_shared(g, [b, h, i0, 0], qbars.index(0), gs)
    if not OWN:
        tma.async_copy_global_to_shared(w, [b, h, i0, 0], qbars.index(0), ws)
    tma.async_copy_global_to_shared(a, [ha, row_a, 0], pbars.index(1), ps.index(1), pred=some)
    if KEY:
        tma.async_copy_global_to_shared(cr, [hc, row_c - _T, 0], cbars.index(1), cs.index(1), pred=some)
    for n in gl.static_range(STAGES - 1):
        _fetch(k, v, ks, vs, kbars, vbars, n, _key_of(n, t1, band, first), b, hk, n < tiles, BYTES, STAGES)

    i = i0 + gl.arange(0, _T, row_of_s)
    plane = (B * H).to(gl.int64) * pad
    at = stats + (b * H + h).to(gl.int64) * pad + i
    ls = gl.load(at)
    dl = gl.load(at + 3 * plane)
    acc = warpgroup_mma_init(gl.zeros([_T, D], gl.float32, o_mma))
    if SPLIT:
        acc_w = warpgroup_mma_init(gl.zeros([_T, D], gl.float32, o_mma))
    zero = gl.zeros([_T, _T], gl.float32, s_mma)
    before = carried(gl.zeros([_T, _T], DTYPE, s_mma))
    mbarrier.wait(qbars.index(0), 0)
    if BIASED:
        add_biases(qs, ws, content + h.to(gl.int64) * head_u, bias + h.to(gl.int64) * head_v, D)
    # Without a tile this multiplies what nobody wrote, and nobody reads the product.
    mbarrier.wait(pbars.index(0), 0, pred=some)
    product = warpgroup_mma(ws, ps.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    last = carried(to_half(warpgroup_mma_wait(0, deps=[product])))
    if KEY:
        mbarrier.wait(cbars.index(0), 0, pred=some)
    # Table tile e = u + 1 is the right one of tile u, the left one of the next, and in slot e mod 3.
    for u in range(0, band):
        slot = u % STAGES
        phase = u // STAGES & 1
        right_slot = (u + 1) % 3
        mbarrier.wait(kbars.index(slot), phase)
        if KEY:
            upper = u % 2
            lower = 1 - upper
            mbarrier.wait(cbars.index(lower), (u + 1) // 2 & 1)
            by = ks.index(slot)
            low = warpgroup_mma(by, cs.index(lower).permute((1, 0)), zero, use_acc=False, is_async=True)
            high = warpgroup_mma(by, cs.index(upper).permute((1, 0)), zero, use_acc=False, is_async=True)
            low, high, acc = warpgroup_mma_wait(0, deps=[low, high, acc])
            turned.store(skew(to_half(low), to_half(high)))
        mbarrier.wait(pbars.index(right_slot), (u + 1) // 3 & 1)
        mbarrier.wait(vbars.index(slot), phase)
        s = warpgroup_mma(qs, ks.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        y = warpgroup_mma(ws, ps.index(right_slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(gs, vs.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        if SPLIT:
            s, y, acc, acc_w = warpgroup_mma_wait(1, deps=[s, y, acc, acc_w])
        else:
            s, y, acc = warpgroup_mma_wait(1, deps=[s, y, acc])
        tma.store_wait(0)
        # Every warp is done with the slots of tile u − 1 and of table tile u − 1, and dG has left `stage`.
        barrier()
        more = u + 1 < band
        later = u + STAGES - 1
        mbarrier.expect(pbars.index((u + 2) % 3), BYTES, pred=more)
        if KEY:
            mbarrier.expect(cbars.index(upper), BYTES, pred=more)
        _fetch(k, v, ks, vs, kbars, vbars, later, _key_of(later, t1, band, first), b, hk, later < tiles, BYTES, STAGES)
        tma.async_copy_global_to_shared(a, [ha, row_a + (u + 1) * _T, 0], pbars.index((u + 2) % 3),
                                        ps.index((u + 2) % 3), pred=more)  # fmt: skip
        if KEY:
            tma.async_copy_global_to_shared(cr, [hc, row_c - (u + 2) * _T, 0], cbars.index(upper), cs.index(upper),
                                            pred=more)  # fmt: skip
        here = to_half(y)
        s = s + skew_carried(last, here).to(gl.float32)
        last = carried(here)
        if KEY:
            s = s + turned.permute((1, 0)).load(s_mma).to(gl.float32)
        prob = gl.exp2(s * c - ls[:, None])
        if MASKED:
            j = first + (t1 + u) * _T
            if (j < flo) | (j + _T > fhi):
                key = j + gl.arange(0, _T, gl.SliceLayout(0, s_mma))
                seen = visible(rule, b, i[:, None], key[None, :], Tq, Tk, offset, left, right)
                prob = gl.where(seen, prob, 0.0)
        dp = warpgroup_mma_wait(0, deps=[dp])
        now = (prob * (dp - dl[:, None])).to(DTYPE)
        acc = warpgroup_mma(gl.convert_layout(now, operand), ks.index(slot), acc, is_async=True)
        tile = unskew(before, now)
        before = carried(now)
        stage.store(tile)
        fence_async_shared()
        barrier()
        tma.async_copy_shared_to_global(dg, [gl.program_id(0) * _T, place + u * _T], stage)
        if SPLIT:
            acc_w = warpgroup_mma(gl.convert_layout(tile, operand), ps.index(u % 3), acc_w, is_async=True)
        else:
            acc = warpgroup_mma(gl.convert_layout(tile, operand), ps.index(u % 3), acc, is_async=True)
    tile = unskew(before, gl.zeros([_T, _T], DTYPE, s_mma))
    tma.store_wait(0)
    barrier()
    stage.store(tile)
    fence_async_shared()
    barrier()
    if some:
        # Without a band no column of dG is this block's; a copy that begins before its tensor stopped an H200.
        tma.async_copy_shared_to_global(dg, [gl.program_id(0) * _T, place + band * _T], stage)
    rest = warpgroup_mma(gl.convert_layout(tile, operand), ps.index(band % 3),
                         warpgroup_mma_init(gl.zeros([_T, D], gl.float32, o_mma)), is_async=True)  # fmt: skip
    if SPLIT:
        acc, acc_w, rest = warpgroup_mma_wait(0, deps=[acc, acc_w, rest])
        acc_w = acc_w + gl.where(some, rest, 0.0)
    else:
        acc, rest = warpgroup_mma_wait(0, deps=[acc, rest])
        acc = acc + gl.where(some, rest, 0.0)
    if BIASED:
        d = gl.arange(0, D, gl.SliceLayout(0, o_mma))
        mine = parts + f.to(gl.int64) * (2 * D)
        gl.store(mine + d, gl.sum(acc, 0))
        gl.store(mine + D + d, gl.sum(acc_w, 0))
        acc = acc + acc_w
    if SIDES:
        if SHIFTED:
            # The band's rows of C are no longer needed: every warp passed the last step's barrier after its products.
            mbarrier.expect(qbars.index(1), BYTES, pred=t1 > 0)
            mbarrier.expect(qbars.index(2), BYTES, pred=t1 + band < tiles)
            tma.async_copy_global_to_shared(x, [b, h, i0, 0], qbars.index(1), cs.index(0), pred=t1 > 0)
            tma.async_copy_global_to_shared(x, [B + b, h, i0, 0], qbars.index(2), cs.index(1),
                                            pred=t1 + band < tiles)  # fmt: skip
        column: gl.constexpr = gl.SliceLayout(0, o_mma)
        row_of_o: gl.constexpr = gl.SliceLayout(1, o_mma)
        d = gl.arange(0, D, column)
        WIDTH: gl.constexpr = 2 * D
        mine = parts + f.to(gl.int64) * (2 * WIDTH if KEY else WIDTH)
        table = ends + ha.to(gl.int64) * head_a
        if KEY:
            done = gl.sum(acc, 0)
        for side in gl.static_range(2):
            u0 = band if side == 0 else band + t1
            u1 = band + t1 if side == 0 else tiles
            xs = qs
            if SHIFTED:
                xs = cs.index(side)
                mbarrier.wait(qbars.index(1 + side), 0, pred=u1 > u0)
            lss = gl.load(at + (side + 1) * plane)
            acc, sums = _saturated(warpgroup_mma_init(acc), xs, gs, ks, vs, kbars, vbars, k, v, lss, dl, rule, b, hk, i,
                                   first, t1, band, u0, u1, tiles, flo, fhi, c, Tq, Tk, offset, left, right, s_mma,
                                   operand, DTYPE, BYTES, MASKED, STAGES)  # fmt: skip
            acc = warpgroup_mma_wait(0, deps=[acc])
            _weighted(sums, qs, mine + side * D, D)
            if KEY:
                total = gl.sum(acc, 0)
                gl.store(mine + WIDTH + side * D + d, total - done)
                done = total
            if side == 0:
                left_sums = sums
        for side in gl.static_range(2):
            end = end_a if side == 0 else end_b
            value = gl.load(table + gl.maximum(end, 0).to(gl.int64) * step_a + d).to(gl.float32)
            value = gl.where(end >= 0, value, 0.0)
            weight = gl.convert_layout(left_sums if side == 0 else sums, row_of_o)
            acc = acc + weight[:, None] * value[None, :]
    # Every warp is done with the queries.
    barrier()
    tma.store_wait(0)
    qs.store((acc * tau).to(DTYPE))
    if not OWN:
        ws.store((acc_w * tau).to(DTYPE))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(dq, [b, h, i0, 0], qs)
    if not OWN:
        tma.async_copy_shared_to_global(dw, [b, h, i0, 0], ws)
    tma.store_wait(0)
