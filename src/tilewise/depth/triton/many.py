"""Reads over many sources whose scores are known: weighted sums of several queries a token, and whole reads a row.

Both serve Full, where a sublayer has up to L sources. Weights are scalars of a token, so that no source is reduced
over d and each is read once.
"""

import triton
import triton.language as tl

from tilewise.depth.triton.common import rstd, source_rows


@triton.jit(do_not_specialize=["T", "n", "S", "s_stride_q", "s_stride_n", "span", "source_stride8", "row_stride8"])
def combine_many_kernel(
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
    BS: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    STAGES: tl.constexpr,
    D: tl.constexpr,
):
    """o1[s, t] = sum_j softmax_j(s) v_j[t] of one token, BS queries and `span` tiles of BD columns; n <= BN.

    The product of a token, [BS, BN] times [BN, BD], has no zeros but those of the padding; its left side has 16 rows,
    so that it never is a wgmma (see `phase1`). Weights are a high and a low part of the storage dtype.
    """
    dtype: tl.constexpr = o_ptr.dtype.element_ty
    groups = tl.cdiv(S, BS)
    t = (tl.program_id(0) // groups).to(tl.int64)
    q = (tl.program_id(0) % groups) * BS + tl.arange(0, BS)
    first = tl.program_id(1) * span
    j = tl.arange(0, BN)
    cd = tl.arange(0, BD)
    at = q[:, None].to(tl.int64) * s_stride_q + j[None, :].to(tl.int64) * s_stride_n + t
    s = tl.load(s_ptr + at, mask=(q < S)[:, None] & (j < n)[None, :], other=-float("inf"))
    mx = tl.maximum(tl.max(s, 1), -1e30)
    e = tl.exp(s - mx[:, None])
    l = tl.where(q < S, tl.sum(e, 1), 1.0)
    tl.store(lse_ptr + q.to(tl.int64) * T + t, mx + tl.log(l), mask=(q < S) & (first == 0))
    w = e / l[:, None]
    wh = w.to(dtype)
    wl = (w - wh.to(tl.float32)).to(dtype)
    rows = source_rows(base, table, tl.where(j < n, j, 0), t + j * 0, source_stride8, row_stride8, TABLE)
    out = (q.to(tl.int64) * T + t) * D
    for i in tl.range(first, tl.minimum(first + span, tl.cdiv(D, BD)), num_stages=STAGES):
        c = i * BD + cd
        vm = (j < n)[:, None]
        om = (q < S)[:, None]
        if D % BD:
            vm = vm & (c < D)[None, :]
            om = om & (c < D)[None, :]
        v = tl.load(rows[:, None] + c[None, :], mask=vm, other=0.0, eviction_policy="evict_first")
        o = tl.dot(wh, v, input_precision="ieee")
        o = tl.dot(wl, v, o, input_precision="ieee")
        tl.store(o_ptr + out[:, None] + c[None, :], o.to(dtype), mask=om, eviction_policy="evict_first")


@triton.jit
def _source(base, table, s_ptr, j, n, t, c, m, mx, l, source_stride8, row_stride8, s_stride_n, TABLE: tl.constexpr):
    """(row t of source j, its weight); past the last source zeros, and weight 0."""
    at = tl.minimum(j, n - 1)
    row = source_rows(base, table, at, t, source_stride8, row_stride8, TABLE)
    v = tl.load(row + c, mask=m & (j < n), other=0.0)
    s = tl.load(s_ptr + at.to(tl.int64) * s_stride_n + t)
    return v, tl.where(j < n, tl.exp(s - mx) / l, 0.0)


@triton.jit(do_not_specialize=["n", "s_stride_n", "source_stride8", "row_stride8", "update_stride8", "slot_stride8"])
def read_kernel(
    base,
    table,
    s_ptr,
    o1_ptr,
    lse_ptr,
    update,
    slot,
    w_ptr,
    y_ptr,
    n,
    source_stride8,
    row_stride8,
    update_stride8,
    slot_stride8,
    s_stride_n,
    output_eps,
    TABLE: tl.constexpr,
    O1: tl.constexpr,
    UPDATE: tl.constexpr,
    STORE: tl.constexpr,
    NORM: tl.constexpr,
    UNROLL: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """y = norm(sum of softmax-weighted sources) of a row. Its sources: n of a bank, with scores s[0 .. n - 1]; UPDATE:
    the update, with score s[n], copied to `slot` if STORE; O1: o1, with score lse.

    UNROLL rows are loaded before any of them is summed.
    """
    t = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    c = tl.arange(0, BD)
    m = c < D
    if O1:
        o1 = tl.load(o1_ptr + t * D + c, mask=m, other=0.0, eviction_policy="evict_first")
    if UPDATE:
        u = tl.load(update + t * update_stride8 * 8 + c, mask=m, other=0.0)
    mx = -1e30
    for b in range(0, n + UPDATE, BN):
        j = b + tl.arange(0, BN)
        s = tl.load(s_ptr + j.to(tl.int64) * s_stride_n + t, mask=j < n + UPDATE, other=-float("inf"))
        mx = tl.maximum(mx, tl.max(s, 0))
    if O1:
        lse = tl.load(lse_ptr + t)
        mx = tl.maximum(mx, lse)
    l = 0.0
    for b in range(0, n + UPDATE, BN):
        j = b + tl.arange(0, BN)
        s = tl.load(s_ptr + j.to(tl.int64) * s_stride_n + t, mask=j < n + UPDATE, other=-float("inf"))
        l += tl.sum(tl.exp(s - mx), 0)
    if O1:
        l += tl.exp(lse - mx)
    h = tl.zeros([BD], tl.float32)
    if O1:
        h += (tl.exp(lse - mx) / l) * o1.to(tl.float32)
    if UPDATE:
        if STORE:
            tl.store(slot + t * slot_stride8 * 8 + c, u, mask=m)
        h += (tl.exp(tl.load(s_ptr + n.to(tl.int64) * s_stride_n + t) - mx) / l) * u.to(tl.float32)
    for b in range(0, n, UNROLL):
        j = tl.cast(b, tl.int32)
        v0, a0 = _source(base, table, s_ptr, j, n, t, c, m, mx, l, source_stride8, row_stride8, s_stride_n, TABLE)
        if UNROLL >= 2:
            v1, a1 = _source(
                base, table, s_ptr, j + 1, n, t, c, m, mx, l, source_stride8, row_stride8, s_stride_n, TABLE
            )
        if UNROLL >= 4:
            v2, a2 = _source(
                base, table, s_ptr, j + 2, n, t, c, m, mx, l, source_stride8, row_stride8, s_stride_n, TABLE
            )
            v3, a3 = _source(
                base, table, s_ptr, j + 3, n, t, c, m, mx, l, source_stride8, row_stride8, s_stride_n, TABLE
            )
        h += a0 * v0.to(tl.float32)
        if UNROLL >= 2:
            h += a1 * v1.to(tl.float32)
        if UNROLL >= 4:
            h += a2 * v2.to(tl.float32)
            h += a3 * v3.to(tl.float32)
    if NORM:
        w = tl.load(w_ptr + c, mask=m, other=0.0, eviction_policy="evict_last").to(tl.float32)
        h = h * rstd(tl.sum(h * h, 0), output_eps, D, dtype == tl.float32) * w
    tl.store(y_ptr + t * D + c, h.to(dtype), mask=m)
