"""One-pass mix over n sources and the running prefix, with prefix add, block write and output norm; and its backward.

One program a row in the forward; the backward is persistent, so that dq and dw are sums in registers, written once a
program and added up in a fixed order.
"""

import triton
import triton.language as tl

from tilewise.depth.triton.common import aligned, rstd, sum2, sum3


@triton.jit
def _take(v, q, mx, l, o, eps, D: tl.constexpr):
    """One step of the online softmax with source v."""
    exact: tl.constexpr = v.dtype == tl.float32
    v = v.to(tl.float32)
    vv, vq = tl.reduce((v * v, v * q), 0, sum2)
    s = vq * rstd(vv, eps, D, exact)
    new = tl.maximum(mx, s)
    old = tl.exp(mx - new)
    # A GPU takes the product into the difference: without its rounding s - new is 1e-7, not 0, and a source that is
    # alone has a gradient.
    e = tl.where((s == new) & (tl.abs(s) < float("inf")), 1.0, tl.exp(s - new))
    return new, l * old + e, o * old + e * v


@triton.jit(
    do_not_specialize=["n", "source_stride8", "update_stride8", "prefix_stride8", "new_stride8", "block_stride8"]
)
def mix_fwd_kernel(
    sources,
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
    update_stride8,
    prefix_stride8,
    new_stride8,
    block_stride8,
    n,
    eps,
    output_eps,
    N: tl.constexpr,
    TABLE: tl.constexpr,
    PREFIX: tl.constexpr,
    WRITE_PREFIX: tl.constexpr,
    WRITE_BLOCK: tl.constexpr,
    KEY: tl.constexpr,
    NORM: tl.constexpr,
    AHEAD: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """PREFIX: 0 none, 1 p = update, 2 p = prefix + update, 3 p = prefix. TABLE: n sources by address, else N named.

    KEY: the query is the product of q and g. AHEAD rows are loaded before they are needed: each source's reduction is a
    barrier, which no load moves across.
    """
    t = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    c = tl.arange(0, BD)
    m = c < D
    q = tl.load(q_ptr + c, mask=m, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if KEY:
        q *= tl.load(g_ptr + c, mask=m, other=0.0, eviction_policy="evict_last").to(tl.float32)
    row = t * source_stride8 * 8 + c
    waiting = ()
    for j in tl.static_range(AHEAD if AHEAD < N else N):
        waiting = waiting + (tl.load(sources[j] + row, mask=m, other=0.0),)  # noqa: RUF005
    mx = -float("inf")
    l = 0.0
    o = tl.zeros([BD], tl.float32)
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
        mx, l, o = _take(p, q, mx, l, o, eps, D)
    for j in tl.static_range(N):
        v = waiting[0]
        waiting = waiting[1:]
        if j + AHEAD < N:
            waiting = waiting + (tl.load(sources[j + AHEAD] + row, mask=m, other=0.0),)  # noqa: RUF005
        mx, l, o = _take(v, q, mx, l, o, eps, D)
    if TABLE:
        v = tl.load(aligned(table, 0, dtype) + row, mask=m, other=0.0)
        for j in range(n):
            later = tl.load(aligned(table, tl.minimum(j + 1, n - 1), dtype) + row, mask=m & (j + 1 < n), other=0.0)
            mx, l, o = _take(v, q, mx, l, o, eps, D)
            v = later
    h = o / l
    if NORM:
        w = tl.load(w_ptr + c, mask=m, other=0.0, eviction_policy="evict_last").to(tl.float32)
        h = h * rstd(tl.sum(h * h, 0), output_eps, D, dtype == tl.float32) * w
    tl.store(y_ptr + t * D + c, h.to(dtype), mask=m)


@triton.jit
def _give(v, q, h, dh, mx, l, eps, ALONE: tl.constexpr, D: tl.constexpr):
    """(dv, dq of this row) of one source: a dh + ds (r q - s r^2 / d v), ds = a <dh, v - h>.

    The difference is taken before the sum: with correlated sources <dh, v> and <dh, h> cancel, v - h does not round.
    It is exactly 0 for a source that is alone, whose weight is 1: s, formed anew, is off by a unit of mx on a GPU.
    """
    exact: tl.constexpr = v.dtype == tl.float32
    v = v.to(tl.float32)
    vv, vq, g = tl.reduce((v * v, v * q, (v - h) * dh), 0, sum3)
    r = rstd(vv, eps, D, exact)
    s = vq * r
    if ALONE:
        a = tl.where(tl.abs(s) < float("inf"), 1.0, float("nan"))
    else:
        a = tl.exp(s - mx) / l
    ds = a * g
    return a * dh + ds * (r * q - (s * r * r / D) * v), ds * r * v


@triton.jit(do_not_specialize=["T", "n", "source_stride8"])
def mix_bwd_kernel(
    dy_ptr,
    dp_ptr,
    sources,
    table,
    p_ptr,
    q_ptr,
    w_ptr,
    grads,
    grad_table,
    dprefix,
    part,
    T,
    n,
    source_stride8,
    eps,
    output_eps,
    N: tl.constexpr,
    TABLE: tl.constexpr,
    PREFIX: tl.constexpr,
    DP: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    GRAD: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """The mix is recomputed and stays in fp32 registers."""
    dtype: tl.constexpr = dy_ptr.dtype.element_ty
    alone: tl.constexpr = N == 1 and not PREFIX and not TABLE
    c = tl.arange(0, BD)
    m = c < D
    q = tl.load(q_ptr + c, mask=m, other=0.0)
    dq = tl.zeros([BD], tl.float32)
    dw = tl.zeros([BD], tl.float32)
    for i in tl.range(tl.program_id(0), T, tl.num_programs(0)):
        t = tl.cast(i, tl.int64)
        row = t * source_stride8 * 8 + c
        out = t * D + c
        mx = -float("inf")
        l = 0.0
        h = tl.zeros([BD], tl.float32)
        if PREFIX:
            mx, l, h = _take(tl.load(p_ptr + out, mask=m, other=0.0), q, mx, l, h, eps, D)
        for j in tl.static_range(N):
            mx, l, h = _take(tl.load(sources[j] + row, mask=m, other=0.0), q, mx, l, h, eps, D)
        if TABLE:
            for j in range(n):
                v = tl.load(aligned(table, j, dtype) + row, mask=m, other=0.0)
                mx, l, h = _take(v, q, mx, l, h, eps, D)
        h = h / l
        dh = tl.load(dy_ptr + out, mask=m, other=0.0).to(tl.float32)
        if NORM:
            w = tl.load(w_ptr + c, mask=m, other=0.0).to(tl.float32)
            wdy = w * dh
            hh, hw = tl.reduce((h * h, h * wdy), 0, sum2)
            rh = rstd(hh, output_eps, D, dtype == tl.float32)
            dw += h * rh * dh
            dh = (wdy - h * (rh * rh * hw / D)) * rh
        for j in tl.static_range(N):
            dv, dqj = _give(tl.load(sources[j] + row, mask=m, other=0.0), q, h, dh, mx, l, eps, alone, D)
            dq += dqj
            if ADD:
                dv += tl.load(grads[j] + out, mask=m, other=0.0)
            tl.store(grads[j] + out, dv.to(GRAD), mask=m)
        if TABLE:
            for j in range(n):
                v = tl.load(aligned(table, j, dtype) + row, mask=m, other=0.0)
                dv, dqj = _give(v, q, h, dh, mx, l, eps, alone, D)
                dq += dqj
                grad = aligned(grad_table, j, GRAD) + out
                if ADD:
                    dv += tl.load(grad, mask=m, other=0.0)
                tl.store(grad, dv.to(GRAD), mask=m)
        if PREFIX:
            dv, dqj = _give(tl.load(p_ptr + out, mask=m, other=0.0), q, h, dh, mx, l, eps, alone, D)
            dq += dqj
            if DP:
                dv += tl.load(dp_ptr + out, mask=m, other=0.0).to(tl.float32)
            tl.store(dprefix + out, dv.to(dtype), mask=m)
    at = tl.program_id(0).to(tl.int64) * D + c
    tl.store(part + at, dq, mask=m)
    if NORM:
        tl.store(part + tl.num_programs(0).to(tl.int64) * D + at, dw, mask=m)
