"""Phase 1 forward: scores of many queries against each source, and the weighted sums that need no reduction over d.

Tiles have at most 32 rows on the left of a dot, so that Hopper's asynchronous wgmma is never used: with wgmma the
compiler gives a pipelined tile that also feeds register arithmetic one buffer too few, and corrupts loop-invariant
register operands. Both products are small next to the memory traffic.
"""

import triton
import triton.language as tl

from tilewise.depth.triton.common import add_kept, rstd, source_rows


@triton.jit
def _rows_of(
    base, update, prefix, block, rows, c, t, T, write, vv, vv_lost, ADD: tl.constexpr, LOW: tl.constexpr,
    GRAM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A tile of source rows, read or summed (and written), and `vv` plus its sums of squares (fp32: compensated).

    GRAM (1 or 2) keeps v v^T, whose diagonal these are: a tile that only feeds products goes from memory to the tensor
    cores without a change of layout.
    """
    m = (t < T)[:, None] & (c < D)[None, :]
    if ADD:
        at = rows[:, None] + c[None, :]
        v = tl.load(prefix + at, mask=m, other=0.0).to(tl.float32)
        v = (v + tl.load(update + at, mask=m, other=0.0).to(tl.float32)).to(base.dtype.element_ty)
        tl.store(block + at, v, mask=m & write)
    else:
        v = tl.load(rows[:, None] + c[None, :], mask=m, other=0.0)
    if GRAM:
        vv = tl.dot(v, tl.trans(v), vv, input_precision="ieee")
    else:
        wide = v.to(tl.float32)
        if LOW:
            vv += tl.sum(wide * wide, 1)
        else:
            vv, vv_lost = add_kept(vv, tl.sum(wide * wide, 1), vv_lost)
    return v, vv, vv_lost


@triton.jit
def _put_scores(
    s_at, r_at, acc, vv, t, sq, T, S, first, eps, SPLIT: tl.constexpr, EXACT: tl.constexpr, D: tl.constexpr
):
    sm = (sq < S)[None, :] & (t < T)[:, None]
    if SPLIT:
        tl.store(s_at + t[:, None], acc, mask=sm)
        tl.store(r_at + t, vv, mask=(t < T) & first)
    else:
        r = rstd(vv, eps, D, EXACT)
        tl.store(s_at + t[:, None], acc * r[:, None], mask=sm)
        tl.store(r_at + t, r, mask=(t < T) & first)


@triton.jit(
    do_not_specialize=[
        "T",
        "S",
        "chunk",
        "splits",
        "s_stride_q",
        "s_stride_n",
        "part_stride",
        "r_part_stride",
        "source_stride8",
        "row_stride8",
    ]
)
def scores_kernel(
    base,
    table,
    update,
    prefix,
    block,
    q_high,
    q_low,
    s_ptr,
    r_ptr,
    T,
    S,
    splits,
    chunk,
    source_stride8,
    row_stride8,
    s_stride_q,
    s_stride_n,
    part_stride,
    r_part_stride,
    eps,
    TABLE: tl.constexpr,
    ADD: tl.constexpr,
    LOW: tl.constexpr,
    SPLIT: tl.constexpr,
    GRAM: tl.constexpr,
    SUB: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BS: tl.constexpr,
    STAGES: tl.constexpr,
    D: tl.constexpr,
):
    """s[q, j, t] = rstd(v_j[t]) <v_j[t], Q_q>, Q = q_high + q_low. ADD: v = prefix + update, written to `block`.

    LOW: 16 bits, with a low part of the queries; without it fp32, whose sums over tiles are compensated.

    A program takes SUB tiles of BT tokens, which share each tile of queries. SPLIT: program axis 2 also splits d; raw
    partial sums go to s_ptr and r_ptr at part strides, for `finish_kernel`.
    """
    j = tl.program_id(1)
    part = tl.program_id(2) % splits
    q0 = (tl.program_id(2) // splits) * BS
    t = tl.program_id(0) * (BT * SUB) + tl.arange(0, BT)
    sq = q0 + tl.arange(0, BS)
    ck = tl.arange(0, BK)
    acc = tl.zeros([BT, BS], tl.float32)
    if GRAM:
        vv = tl.zeros([BT, BT], tl.float32)
    else:
        vv = tl.zeros([BT], tl.float32)
    lost = acc
    vv_lost = vv
    if ADD:
        rows = t.to(tl.int64) * D
    else:
        rows = source_rows(base, table, t * 0 + j, t, source_stride8, row_stride8, TABLE)
    if SUB == 2:
        acc2 = acc
        vv2 = vv
        lost2 = acc
        vv_lost2 = vv
        rows2 = rows + (BT * D if ADD else BT * row_stride8 * 8)
    # `chunk` counts tiles of BK columns: only so does the compiler know the alignment and copy 16 bytes at a time.
    for i in tl.range(part * chunk, tl.minimum(part * chunk + chunk, tl.cdiv(D, BK)), num_stages=STAGES):
        k = i * BK
        v, vv, vv_lost = _rows_of(
            base, update, prefix, block, rows, k + ck, t, T, q0 == 0, vv, vv_lost, ADD, LOW, GRAM, D
        )
        if SUB == 2:
            v2, vv2, vv_lost2 = _rows_of(
                base, update, prefix, block, rows2, k + ck, t + BT, T, q0 == 0, vv2, vv_lost2, ADD, LOW, GRAM, D
            )
        qm = (sq < S)[:, None] & (k + ck < D)[None, :]
        qat = sq[:, None].to(tl.int64) * D + (k + ck)[None, :]
        qh = tl.trans(tl.load(q_high + qat, mask=qm, other=0.0, eviction_policy="evict_last"))
        if LOW:
            acc = tl.dot(v, qh, acc, input_precision="ieee")
            if SUB == 2:
                acc2 = tl.dot(v2, qh, acc2, input_precision="ieee")
            ql = tl.trans(tl.load(q_low + qat, mask=qm, other=0.0, eviction_policy="evict_last"))
            acc = tl.dot(v, ql, acc, input_precision="ieee")
            if SUB == 2:
                acc2 = tl.dot(v2, ql, acc2, input_precision="ieee")
        else:
            acc, lost = add_kept(acc, tl.dot(v, qh, input_precision="ieee"), lost)
            if SUB == 2:
                acc2, lost2 = add_kept(acc2, tl.dot(v2, qh, input_precision="ieee"), lost2)
    if GRAM:
        same = tl.arange(0, BT)[:, None] == tl.arange(0, BT)[None, :]
        vv = tl.sum(tl.where(same, vv, 0.0), 1)
        if SUB == 2:
            vv2 = tl.sum(tl.where(same, vv2, 0.0), 1)
    s_at = s_ptr + sq[None, :].to(tl.int64) * s_stride_q + j.to(tl.int64) * s_stride_n
    r_at = r_ptr + j.to(tl.int64) * T
    if SPLIT:
        s_at += part.to(tl.int64) * part_stride
        r_at += part.to(tl.int64) * r_part_stride
    _put_scores(s_at, r_at, acc, vv, t, sq, T, S, q0 == 0, eps, SPLIT, not LOW, D)
    if SUB == 2:
        _put_scores(s_at, r_at, acc2, vv2, t + BT, sq, T, S, q0 == 0, eps, SPLIT, not LOW, D)


@triton.jit(do_not_specialize=["T", "N", "S", "splits", "s_stride_q", "s_stride_n"])
def finish_kernel(
    s_part, r_part, s_ptr, r_ptr, T, N, S, splits, s_stride_q, s_stride_n, eps, EXACT: tl.constexpr, D: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of a split `scores_kernel` in order: one program a (query, source, token tile)."""
    j = tl.program_id(1)
    q = tl.program_id(2)
    t = tl.program_id(0) * B + tl.arange(0, B)
    m = t < T
    s = tl.zeros([B], tl.float32)
    vv = tl.zeros([B], tl.float32)
    for k in range(splits):
        s += tl.load(s_part + ((k * S + q).to(tl.int64) * N + j) * T + t, mask=m, other=0.0)
        vv += tl.load(r_part + (k * N + j).to(tl.int64) * T + t, mask=m, other=0.0)
    r = rstd(vv, eps, D, EXACT)
    tl.store(s_ptr + q.to(tl.int64) * s_stride_q + j.to(tl.int64) * s_stride_n + t, s * r, mask=m)
    tl.store(r_ptr + j.to(tl.int64) * T + t, r, mask=m & (q == 0))


@triton.jit
def _weights(s_ptr, mx, l, ms, t, j, hit, s_stride_q, s_stride_n):
    """Block-diagonal weights [(s, t), (j, t')] = exp(s - max) / sum where t = t'.

    exp(s - lse) would be off by the rounding of lse: the weights' sum is not 1, which shows in fp32 when sources agree.
    """
    at = ms[:, None].to(tl.int64) * s_stride_q + j[None, :].to(tl.int64) * s_stride_n + t[:, None]
    s = tl.load(s_ptr + at, mask=hit, other=-float("inf"))
    return tl.exp(s - mx[:, None]) / l[:, None]


@triton.jit(do_not_specialize=["T", "n", "S", "s_stride_q", "s_stride_n", "span", "source_stride8", "row_stride8"])
def combine_kernel(
    base,
    table,
    s_ptr,
    o_ptr,
    lse_ptr,
    T,
    n,
    S,
    source_stride8,
    row_stride8,
    s_stride_q,
    s_stride_n,
    span,
    TABLE: tl.constexpr,
    LOW: tl.constexpr,
    ONE: tl.constexpr,
    BS: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    STAGES: tl.constexpr,
    D: tl.constexpr,
):
    """o1[s, t] = sum_j softmax_j(s) v_j[t] for BT tokens, BS queries, `span` tiles of BD columns; ONE: n <= BN."""
    M: tl.constexpr = BS * BT
    R: tl.constexpr = BN * BT
    dtype: tl.constexpr = o_ptr.dtype.element_ty
    groups = tl.cdiv(S, BS)
    t0 = (tl.program_id(0) // groups) * BT
    q0 = (tl.program_id(0) % groups) * BS
    first = tl.program_id(1) * span
    a = tl.arange(0, M)
    b = tl.arange(0, R)
    ms = q0 + a // BT
    mt = t0 + a % BT
    rt = t0 + b % BT
    okm = (ms < S) & (mt < T)
    same = (a % BT)[:, None] == (b % BT)[None, :]
    cd = tl.arange(0, BD)
    mx = tl.full([M], -float("inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    for j0 in range(0, n, BN):
        j = j0 + b // BT
        hit = same & (j < n)[None, :] & okm[:, None]
        at = ms[:, None].to(tl.int64) * s_stride_q + j[None, :].to(tl.int64) * s_stride_n + mt[:, None]
        s = tl.load(s_ptr + at, mask=hit, other=-float("inf"))
        new = tl.maximum(tl.maximum(mx, tl.max(s, 1)), -1e30)
        l = l * tl.exp(mx - new) + tl.sum(tl.exp(s - new[:, None]), 1)
        mx = new
    l = tl.where(okm, l, 1.0)
    lse = mx + tl.log(l)
    tl.store(lse_ptr + ms.to(tl.int64) * T + mt, lse, mask=okm & (first == 0))
    if ONE:
        j = b // BT
        hit = same & (j < n)[None, :] & okm[:, None]
        w = _weights(s_ptr, mx, l, ms, mt, j, hit, s_stride_q, s_stride_n)
        wh = w.to(dtype)
        if LOW:
            wl = (w - wh.to(tl.float32)).to(dtype)
        okr = (j < n) & (rt < T)
        rows = source_rows(base, table, tl.where(okr, j, 0), tl.where(okr, rt, 0), source_stride8, row_stride8, TABLE)
    out = (ms.to(tl.int64) * T + mt) * D
    for i in tl.range(first, tl.minimum(first + span, tl.cdiv(D, BD)), num_stages=STAGES):
        k = i * BD
        if ONE:
            vm = okr[:, None] & (k + cd < D)[None, :]
            v = tl.load(rows[:, None] + (k + cd)[None, :], mask=vm, other=0.0, eviction_policy="evict_first")
            o = tl.dot(wh, v, input_precision="ieee")
            if LOW:
                o = tl.dot(wl, v, o, input_precision="ieee")
        else:
            o = tl.zeros([M, BD], tl.float32)
            for j0 in range(0, n, BN):
                j = j0 + b // BT
                hit = same & (j < n)[None, :] & okm[:, None]
                w = _weights(s_ptr, mx, l, ms, mt, j, hit, s_stride_q, s_stride_n)
                okr = (j < n) & (rt < T)
                rows = source_rows(
                    base, table, tl.where(okr, j, 0), tl.where(okr, rt, 0), source_stride8, row_stride8, TABLE
                )
                vm = okr[:, None] & (k + cd < D)[None, :]
                v = tl.load(rows[:, None] + (k + cd)[None, :], mask=vm, other=0.0)
                wh = w.to(dtype)
                o = tl.dot(wh, v, o, input_precision="ieee")
                if LOW:
                    o = tl.dot((w - wh.to(tl.float32)).to(dtype), v, o, input_precision="ieee")
        om = okm[:, None] & (k + cd < D)[None, :]
        tl.store(o_ptr + out[:, None] + (k + cd)[None, :], o.to(dtype), mask=om, eviction_policy="evict_first")
