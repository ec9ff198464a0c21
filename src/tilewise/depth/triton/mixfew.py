"""One-pass mix for few rows: all sources of a row in one tile, so that a row costs three barriers, not one a source."""

import triton
import triton.language as tl

from tilewise.depth.triton.common import rstd, source_rows, sum2


@triton.jit(
    do_not_specialize=[
        "n",
        "source_stride8",
        "row_stride8",
        "update_stride8",
        "prefix_stride8",
        "new_stride8",
        "block_stride8",
    ]
)
def mix_few_kernel(
    base,
    table,
    update,
    prefix,
    q_ptr,
    g_ptr,
    w_ptr,
    new_prefix,
    block,
    y_ptr,
    source_stride8,
    row_stride8,
    update_stride8,
    prefix_stride8,
    new_stride8,
    block_stride8,
    n,
    eps,
    output_eps,
    TABLE: tl.constexpr,
    PREFIX: tl.constexpr,
    WRITE_PREFIX: tl.constexpr,
    WRITE_BLOCK: tl.constexpr,
    KEY: tl.constexpr,
    NORM: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """As `mix_fwd_kernel`, for 1 <= n <= BN sources given as a bank or a table. PREFIX and KEY as there."""
    t = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    c = tl.arange(0, BD)
    m = c < D
    j = tl.arange(0, BN)
    live = j < n
    at = tl.where(live, j, 0)
    rows = source_rows(base, table, at, at * 0 + t, source_stride8, row_stride8, TABLE)
    v = tl.load(rows[:, None] + c[None, :], mask=live[:, None] & m[None, :], other=0.0)
    q = tl.load(q_ptr + c, mask=m, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if KEY:
        q *= tl.load(g_ptr + c, mask=m, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if NORM:
        w = tl.load(w_ptr + c, mask=m, other=0.0, eviction_policy="evict_last")
    if PREFIX > 0:
        if PREFIX == 1:
            p = tl.load(update + t * update_stride8 * 8 + c, mask=m, other=0.0)
        else:
            p = tl.load(prefix + t * prefix_stride8 * 8 + c, mask=m, other=0.0)
            if PREFIX == 2:
                u = tl.load(update + t * update_stride8 * 8 + c, mask=m, other=0.0)
                p = (p.to(tl.float32) + u.to(tl.float32)).to(dtype)
        if WRITE_PREFIX:
            tl.store(new_prefix + t * new_stride8 * 8 + c, p, mask=m)
        if WRITE_BLOCK:
            tl.store(block + t * block_stride8 * 8 + c, p, mask=m)
        p = p.to(tl.float32)
    wide = v.to(tl.float32)
    vv, vq = tl.reduce((wide * wide, wide * q[None, :]), 1, sum2)
    s = tl.where(live, vq * rstd(vv, eps, D, dtype == tl.float32), -float("inf"))
    mx = tl.max(s, 0)
    if PREFIX > 0:
        pp, pq = tl.reduce((p * p, p * q), 0, sum2)
        sp = pq * rstd(pp, eps, D, dtype == tl.float32)
        mx = tl.maximum(mx, sp)
    e = tl.exp(s - mx)
    l = tl.sum(e, 0)
    h = tl.sum(e[:, None] * v.to(tl.float32), 0)
    if PREFIX > 0:
        e = tl.exp(sp - mx)
        l += e
        h += e * p
    h = h / l
    if NORM:
        h = h * rstd(tl.sum(h * h, 0), output_eps, D, dtype == tl.float32) * w.to(tl.float32)
    tl.store(y_ptr + t * D + c, h.to(dtype), mask=m)
