"""Backward of an identity-mapped query term on Hopper (Gluon): its two passes over the tiles, without Z.

Both form G = left·tableᵀ again and skew it in registers (:mod:`.skew`). The pass over queries also skews dS back: a
tile of dG is [dS of one tile | dS of the next], shifted; complete one step later, it gives d(left) += dG·table at once
and is stored for the table's gradient, whose rows own diagonals (:mod:`.linear_backward`). The pass over keys has keys
as rows and turns the skewed tile through shared memory. Scores are in log2 units, c = τ·log2 e. One writer a value.
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

from .skew import TILE, barrier, skew, to_half, unskew, visible

__all__ = ["key_pass", "query_pass"]

_T = gl.constexpr(TILE)

_RUNTIME = [
    "c", "tau", "f0", "B", "H", "HK", "G", "HP", "Tq", "Tk", "pad", "offset", "origin", "left", "right", "batch",
]  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def query_pass(q, w, k, v, p, g, dq, dw, dg, stats, rule, ranges, c, tau, f0, B, H, G, HP, Tq, Tk, pad, offset, origin,
               left, right, batch, D: gl.constexpr, DTYPE: gl.constexpr, OWN: gl.constexpr, RANGED: gl.constexpr,
               MASKED: gl.constexpr, ROWS: gl.constexpr, SQUARE: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """dQ and d(left) of 64 queries, and their dG by tiles of 64 offsets.

    Programs f0, f0 + 1, … are (head, batch, block); program f writes the rows 64·(f − f0) … of dG. Table rows descend
    in δ from `origin`, the row of δ = 0. OWN: left is q, and dQ has both parts.
    """
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
    hp = gl.where(HP > 1, h, 0)
    first = i0 * 0
    beyond = first + Tk
    if RANGED:
        at = ranges + b * batch + i0 // _T * 4
        first = gl.load(at) // _T * _T
        beyond = gl.load(at + 1)
    tiles = (beyond - first + _T - 1) // _T
    row = origin - offset - i0 + first

    qs = gl.allocate_shared_memory(DTYPE, [_T, D], ROWS)
    gs = gl.allocate_shared_memory(DTYPE, [_T, D], ROWS)
    ks = gl.allocate_shared_memory(DTYPE, [2, _T, D], ROWS)
    vs = gl.allocate_shared_memory(DTYPE, [2, _T, D], ROWS)
    ps = gl.allocate_shared_memory(DTYPE, [3, _T, D], ROWS)
    stage = gl.allocate_shared_memory(DTYPE, [_T, _T], SQUARE)
    ws = qs
    if not OWN:
        ws = gl.allocate_shared_memory(DTYPE, [_T, D], ROWS)
    qbars = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    kbars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    vbars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    pbars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    mbarrier.init(qbars.index(0), count=1)
    for n in gl.static_range(2):
        mbarrier.init(kbars.index(n), count=1)
        mbarrier.init(vbars.index(n), count=1)
    for n in gl.static_range(3):
        mbarrier.init(pbars.index(n), count=1)
    fence_async_shared()
    barrier()
    some = tiles > 0
    mbarrier.expect(qbars.index(0), 2 * BYTES if OWN else 3 * BYTES)
    mbarrier.expect(kbars.index(0), BYTES, pred=some)
    mbarrier.expect(vbars.index(0), BYTES, pred=some)
    mbarrier.expect(pbars.index(0), BYTES, pred=some)
    mbarrier.expect(pbars.index(1), BYTES, pred=some)
    tma.async_copy_global_to_shared(q, [b, h, i0, 0], qbars.index(0), qs)
    tma.async_copy_global_to_shared(p, [hp, row - _T, 0], pbars.index(0), ps.index(0), pred=some)
    tma.async_copy_global_to_shared(k, [b, hk, first, 0], kbars.index(0), ks.index(0), pred=some)
    tma.async_copy_global_to_shared(v, [b, hk, first, 0], vbars.index(0), vs.index(0), pred=some)
    tma.async_copy_global_to_shared(g, [b, h, i0, 0], qbars.index(0), gs)
    if not OWN:
        tma.async_copy_global_to_shared(w, [b, h, i0, 0], qbars.index(0), ws)
    tma.async_copy_global_to_shared(p, [hp, row, 0], pbars.index(1), ps.index(1), pred=some)

    i = i0 + gl.arange(0, _T, row_of_s)
    at = stats + (b * H + h).to(gl.int64) * pad + i
    ls = gl.load(at)
    dl = gl.load(at + (B * H).to(gl.int64) * 3 * pad)
    acc = warpgroup_mma_init(gl.zeros([_T, D], gl.float32, o_mma))
    acc_w = warpgroup_mma_init(gl.zeros([_T, D], gl.float32, o_mma))
    zero = gl.zeros([_T, _T], gl.float32, s_mma)
    before = gl.zeros([_T, _T], DTYPE, s_mma)
    mbarrier.wait(qbars.index(0), 0)
    # Without a tile this multiplies what nobody wrote, and nobody reads the product.
    mbarrier.wait(pbars.index(0), 0, pred=some)
    product = warpgroup_mma(ws, ps.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    last = to_half(warpgroup_mma_wait(0, deps=[product]))
    # Table tile e = t + 1 is the right one of tile t, the left one of the next, and in slot e mod 3.
    for t in range(0, tiles):
        slot = t % 2
        phase = t // 2 & 1
        right_slot = (t + 1) % 3
        mbarrier.wait(kbars.index(slot), phase)
        mbarrier.wait(pbars.index(right_slot), (t + 1) // 3 & 1)
        mbarrier.wait(vbars.index(slot), phase)
        s = warpgroup_mma(qs, ks.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        y = warpgroup_mma(ws, ps.index(right_slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(gs, vs.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        s, y, acc, acc_w = warpgroup_mma_wait(1, deps=[s, y, acc, acc_w])
        tma.store_wait(0)
        # Every warp is done with the slots of tile t − 1 and of table tile t − 1, and dG has left `stage`.
        barrier()
        more = t + 1 < tiles
        mbarrier.expect(kbars.index(1 - slot), BYTES, pred=more)
        mbarrier.expect(vbars.index(1 - slot), BYTES, pred=more)
        mbarrier.expect(pbars.index((t + 2) % 3), BYTES, pred=more)
        j = first + (t + 1) * _T
        tma.async_copy_global_to_shared(k, [b, hk, j, 0], kbars.index(1 - slot), ks.index(1 - slot), pred=more)
        tma.async_copy_global_to_shared(v, [b, hk, j, 0], vbars.index(1 - slot), vs.index(1 - slot), pred=more)
        tma.async_copy_global_to_shared(p, [hp, row + (t + 1) * _T, 0], pbars.index((t + 2) % 3),
                                        ps.index((t + 2) % 3), pred=more)  # fmt: skip
        here = to_half(y)
        s = s + skew(last, here).to(gl.float32)
        last = here
        prob = gl.exp2(s * c - ls[:, None])
        if MASKED:
            key = first + t * _T + gl.arange(0, _T, gl.SliceLayout(0, s_mma))
            seen = visible(rule, b, i[:, None], key[None, :], Tq, Tk, offset, left, right)
            prob = gl.where(seen, prob, 0.0)
        dp = warpgroup_mma_wait(0, deps=[dp])
        now = (prob * (dp - dl[:, None])).to(DTYPE)
        acc = warpgroup_mma(gl.convert_layout(now, operand), ks.index(slot), acc, is_async=True)
        tile = unskew(before, now)
        before = now
        stage.store(tile)
        fence_async_shared()
        barrier()
        tma.async_copy_shared_to_global(dg, [gl.program_id(0) * _T, first + t * _T], stage)
        if OWN:
            acc = warpgroup_mma(gl.convert_layout(tile, operand), ps.index(t % 3), acc, is_async=True)
        else:
            acc_w = warpgroup_mma(gl.convert_layout(tile, operand), ps.index(t % 3), acc_w, is_async=True)
    tile = unskew(before, gl.zeros([_T, _T], DTYPE, s_mma))
    tma.store_wait(0)
    barrier()
    stage.store(tile)
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(dg, [gl.program_id(0) * _T, first + tiles * _T], stage)
    rest = warpgroup_mma(gl.convert_layout(tile, operand), ps.index(tiles % 3),
                         warpgroup_mma_init(gl.zeros([_T, D], gl.float32, o_mma)), is_async=True)  # fmt: skip
    acc, acc_w, rest = warpgroup_mma_wait(0, deps=[acc, acc_w, rest])
    rest = gl.where(some, rest, 0.0)
    # Every warp is done with the queries.
    barrier()
    if OWN:
        qs.store(((acc + rest) * tau).to(DTYPE))
    else:
        qs.store((acc * tau).to(DTYPE))
        ws.store(((acc_w + rest) * tau).to(DTYPE))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(dq, [b, h, i0, 0], qs)
    if not OWN:
        tma.async_copy_shared_to_global(dw, [b, h, i0, 0], ws)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=_RUNTIME)
def key_pass(q, w, k, v, p, g, dk, dv, stats, rule, ranges, c, tau, B, H, HK, G, HP, Tq, Tk, pad, offset, origin, left,
             right, batch, D: gl.constexpr, DTYPE: gl.constexpr, OWN: gl.constexpr, SHARED: gl.constexpr,
             RANGED: gl.constexpr, MASKED: gl.constexpr, ROWS: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """dK = τ·dSᵀ·Q and dV = Pᵀ·dO of 64 keys, summed over the G query heads of their key head, in order.

    Step u is query head u // tiles and query block u mod tiles. It needs two tiles of table rows, of which the next
    step of the same head keeps the lower; they are counted e = u + head, the upper one being e and the lower e + 1.
    """
    s_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _T, 16])
    o_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, o_mma, 2)
    column: gl.constexpr = gl.SliceLayout(0, s_mma)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    BYTES: gl.constexpr = _T * D * 2
    blocks = (Tk + _T - 1) // _T
    j0 = gl.program_id(0) % blocks * _T
    b = gl.program_id(0) // blocks // HK
    hk = gl.program_id(0) // blocks % HK
    first = j0 * 0
    beyond = first + Tq
    if RANGED:
        at = ranges + b * batch + j0 // _T * 4
        first = gl.load(at) // _T * _T
        beyond = gl.load(at + 1)
    tiles = (beyond - first + _T - 1) // _T
    total = tiles * G
    row = origin - offset - first + j0
    many = HP > 1

    ks = gl.allocate_shared_memory(DTYPE, [_T, D], ROWS)
    vs = gl.allocate_shared_memory(DTYPE, [_T, D], ROWS)
    qs = gl.allocate_shared_memory(DTYPE, [2, _T, D], ROWS)
    gs = gl.allocate_shared_memory(DTYPE, [2, _T, D], ROWS)
    ps = gl.allocate_shared_memory(DTYPE, [2, _T, D], ROWS)
    turned = gl.allocate_shared_memory(gl.float16, [_T, _T], gl.NVMMASharedLayout(128, 16, 2))
    shared_ls = gl.allocate_shared_memory(gl.float32, [_T], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    shared_dl = gl.allocate_shared_memory(gl.float32, [_T], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ws = qs
    if not OWN:
        ws = gl.allocate_shared_memory(DTYPE, [2, _T, D], ROWS)
    kbars = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    qbars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    wbars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    gbars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    pbars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kbars.index(0), count=1)
    for n in gl.static_range(2):
        mbarrier.init(qbars.index(n), count=1)
        mbarrier.init(wbars.index(n), count=1)
        mbarrier.init(gbars.index(n), count=1)
        mbarrier.init(pbars.index(n), count=1)
    fence_async_shared()
    barrier()
    some = total > 0
    h = hk * G
    mbarrier.expect(kbars.index(0), 2 * BYTES)
    mbarrier.expect(qbars.index(0), BYTES, pred=some)
    if not OWN:
        mbarrier.expect(wbars.index(0), BYTES, pred=some)
    mbarrier.expect(gbars.index(0), BYTES, pred=some)
    mbarrier.expect(pbars.index(0), BYTES, pred=some)
    mbarrier.expect(pbars.index(1), BYTES, pred=some)
    tma.async_copy_global_to_shared(p, [gl.where(many, h, 0), row, 0], pbars.index(0), ps.index(0), pred=some)
    tma.async_copy_global_to_shared(q, [b, h, first, 0], qbars.index(0), qs.index(0), pred=some)
    if not OWN:
        tma.async_copy_global_to_shared(w, [b, h, first, 0], wbars.index(0), ws.index(0), pred=some)
    tma.async_copy_global_to_shared(k, [b, hk, j0, 0], kbars.index(0), ks)
    tma.async_copy_global_to_shared(g, [b, h, first, 0], gbars.index(0), gs.index(0), pred=some)
    tma.async_copy_global_to_shared(v, [b, hk, j0, 0], kbars.index(0), vs)
    tma.async_copy_global_to_shared(p, [gl.where(many, h, 0), row - _T, 0], pbars.index(1), ps.index(1), pred=some)

    lines = gl.arange(0, _T, line)
    planes = (B * H).to(gl.int64) * 3 * pad
    at = stats + (b * H + h).to(gl.int64) * pad + first + lines
    ls = gl.load(at, mask=(lines >= 0) & some, other=0.0)
    dl = gl.load(at + planes, mask=(lines >= 0) & some, other=0.0)
    acc_k = warpgroup_mma_init(gl.zeros([_T, D], gl.float32, o_mma))
    acc_v = warpgroup_mma_init(gl.zeros([_T, D], gl.float32, o_mma))
    zero = gl.zeros([_T, _T], gl.float32, s_mma)
    j = j0 + gl.arange(0, _T, gl.SliceLayout(1, s_mma))
    mbarrier.wait(kbars.index(0), 0)
    for u in range(0, total):
        slot = u % 2
        other = 1 - slot
        phase = u // 2 & 1
        head = u // tiles
        t = u - head * tiles
        e = u + head
        upper = e % 2
        lower = 1 - upper
        mbarrier.wait(pbars.index(upper), e // 2 & 1)
        mbarrier.wait(pbars.index(lower), (e + 1) // 2 & 1)
        mbarrier.wait(qbars.index(slot), phase)
        mbarrier.wait(gbars.index(slot), phase)
        if not OWN:
            mbarrier.wait(wbars.index(slot), phase)
        low = warpgroup_mma(ws.index(slot), ps.index(lower).permute((1, 0)), zero, use_acc=False, is_async=True)
        high = warpgroup_mma(ws.index(slot), ps.index(upper).permute((1, 0)), zero, use_acc=False, is_async=True)
        low, high = warpgroup_mma_wait(0, deps=[low, high])
        low = to_half(low)
        high = to_half(high)
        s = warpgroup_mma(ks, qs.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(vs, gs.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        turned.store(skew(low, high))
        shared_ls.store(ls)
        shared_dl.store(dl)
        # Every warp is done with step u − 1 and with this step's table rows.
        barrier()
        later = u + 1
        more = later < total
        next_head = later // tiles
        i_next = first + (later - next_head * tiles) * _T
        h_next = h + next_head
        mbarrier.expect(qbars.index(other), BYTES, pred=more)
        if not OWN:
            mbarrier.expect(wbars.index(other), BYTES, pred=more)
        mbarrier.expect(gbars.index(other), BYTES, pred=more)
        mbarrier.expect(pbars.index(upper), BYTES, pred=more)
        if SHARED:
            mbarrier.expect(pbars.index(lower), BYTES, pred=more & (next_head > head))
        tma.async_copy_global_to_shared(q, [b, h_next, i_next, 0], qbars.index(other), qs.index(other), pred=more)
        if not OWN:
            tma.async_copy_global_to_shared(w, [b, h_next, i_next, 0], wbars.index(other), ws.index(other), pred=more)
        tma.async_copy_global_to_shared(g, [b, h_next, i_next, 0], gbars.index(other), gs.index(other), pred=more)
        # The lower tile of the next step, or the upper of the next head's first.
        p_next = gl.where(next_head > head, row, row - (t + 2) * _T)
        tma.async_copy_global_to_shared(p, [gl.where(many, h_next, 0), p_next, 0], pbars.index(upper), ps.index(upper),
                                        pred=more)  # fmt: skip
        if SHARED:
            tma.async_copy_global_to_shared(p, [gl.where(many, h_next, 0), row - _T, 0], pbars.index(lower),
                                            ps.index(lower), pred=more & (next_head > head))  # fmt: skip
        x = turned.permute((1, 0)).load(s_mma)
        ls_now = shared_ls.load(column)
        dl_now = shared_dl.load(column)
        at = stats + (b * H + h_next).to(gl.int64) * pad + i_next + lines
        ls = gl.load(at, mask=(lines >= 0) & more, other=0.0)
        dl = gl.load(at + planes, mask=(lines >= 0) & more, other=0.0)
        s = warpgroup_mma_wait(1, deps=[s])
        prob = gl.exp2((s + x.to(gl.float32)) * c - ls_now[None, :])
        if MASKED:
            i = first + t * _T + gl.arange(0, _T, column)
            seen = visible(rule, b, i[None, :], j[:, None], Tq, Tk, offset, left, right)
            prob = gl.where(seen, prob, 0.0)
        prob_v = gl.convert_layout(prob.to(DTYPE), operand)
        acc_v = warpgroup_mma(prob_v, gs.index(slot), acc_v, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = (prob * (dp - dl_now[None, :])).to(DTYPE)
        acc_k = warpgroup_mma(gl.convert_layout(ds, operand), qs.index(slot), acc_k, is_async=True)
        # Left running into the next step, these make ptxas run all products of the kernel one after the other.
        acc_k, acc_v = warpgroup_mma_wait(0, deps=[acc_k, acc_v])
        acc_k = warpgroup_mma_init(acc_k)
        acc_v = warpgroup_mma_init(acc_v)
    acc_k, acc_v = warpgroup_mma_wait(0, deps=[acc_k, acc_v])
    # Every warp is done with the keys and values.
    barrier()
    ks.store((acc_k * tau).to(DTYPE))
    vs.store(acc_v.to(DTYPE))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(dk, [b, hk, j0, 0], ks)
    tma.async_copy_shared_to_global(dv, [b, hk, j0, 0], vs)
    tma.store_wait(0)
