"""Phase 2 from scores: the merge sums few sources itself, where reading them costs less than a phase 1 of their own."""

import triton
import triton.language as tl

from tilewise.depth.triton.common import rstd, sum2, sum4


@triton.jit(do_not_specialize=["s_stride_n"])
def merge_sources_kernel(
    sources,
    s_ptr,
    update,
    prefix,
    q_ptr,
    w_ptr,
    new_prefix,
    y_ptr,
    source_row8,
    s_stride_n,
    eps,
    output_eps,
    N: tl.constexpr,
    PREFIX: tl.constexpr,
    NORM: tl.constexpr,
    ONE_REDUCTION: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """As `merge_fwd_kernel`, with o1 = sum_j exp(s_j - max) / sum v_j over N named sources, in fp32.

    The weights are scalars of the row: no reduction over d and no barrier is added.
    """
    t = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    c = tl.arange(0, BD)
    m = c < D
    row = t * D + c
    source_row = t * source_row8 * 8 + c
    mx = -float("inf")
    for j in tl.static_range(N):
        mx = tl.maximum(mx, tl.load(s_ptr + j * s_stride_n + t))
    l = 0.0
    for j in tl.static_range(N):
        l += tl.exp(tl.load(s_ptr + j * s_stride_n + t) - mx)
    h = tl.zeros([BD], tl.float32)
    for j in tl.static_range(N):
        a = tl.exp(tl.load(s_ptr + j * s_stride_n + t) - mx) / l
        h += a * tl.load(sources[j] + source_row, mask=m, other=0.0).to(tl.float32)
    if NORM:
        w = tl.load(w_ptr + c, mask=m, other=0.0, eviction_policy="evict_last")
    if PREFIX > 0:
        q = tl.load(q_ptr + c, mask=m, other=0.0, eviction_policy="evict_last").to(tl.float32)
        u = tl.load(update + row, mask=m, other=0.0)
        if PREFIX == 2:
            p = tl.load(prefix + row, mask=m, other=0.0)
            u = (u.to(tl.float32) + p.to(tl.float32)).to(dtype)
            tl.store(new_prefix + row, u, mask=m)
        p = u.to(tl.float32)
        if ONE_REDUCTION:
            pp, pq, oo, op = tl.reduce((p * p, p * q, h * h, h * p), 0, sum4)
        else:
            pp, pq = tl.reduce((p * p, p * q), 0, sum2)
        pi = 1.0 / (1.0 + tl.exp(mx + tl.log(l) - pq * rstd(pp, eps, D, dtype == tl.float32)))
        h = h + pi * (p - h)
    if NORM:
        if ONE_REDUCTION and PREFIX > 0:
            hh = (1 - pi) * (1 - pi) * oo + 2 * pi * (1 - pi) * op + pi * pi * pp
            hh = tl.maximum(hh, 0.0, propagate_nan=tl.PropagateNan.ALL)
        else:
            hh = tl.sum(h * h, 0)
        h = h * rstd(hh, output_eps, D, dtype == tl.float32) * w.to(tl.float32)
    tl.store(y_ptr + row, h.to(dtype), mask=m)
