"""Phase 2: prefix add, online-softmax merge with o1, output norm, one program a row; and its backward."""

import triton
import triton.language as tl

from tilewise.depth.triton.common import rstd, sum2, sum4, sum6


@triton.jit
def merge_fwd_kernel(
    update,
    prefix,
    o1_ptr,
    lse_ptr,
    q_ptr,
    w_ptr,
    new_prefix,
    y_ptr,
    eps,
    output_eps,
    PREFIX: tl.constexpr,
    NORM: tl.constexpr,
    ONE_REDUCTION: tl.constexpr,
    EARLY: tl.constexpr,
    DOWN: tl.constexpr,
    STREAM: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """PREFIX: 0 o1 only, 1 p = update, 2 p = prefix + update (written).

    ONE_REDUCTION takes |h|^2 from |p|^2, <o1, p> and |o1|^2 instead of a second reduction over h: one barrier less for
    few rows, where latency counts; with many rows the extra sums cost more than the barrier. EARLY loads the weights
    before the first barrier, which no load moves across: less latency, more registers. DOWN takes the last rows first,
    whose update the L2 cache still has, and leaves it the first rows of y, where the next kernel begins. STREAM marks
    what no kernel soon reads again, so that those stay.
    """
    t = tl.program_id(0)
    if DOWN:
        t = tl.num_programs(0) - 1 - t
    t = t.to(tl.int64)
    policy: tl.constexpr = "evict_first" if STREAM else ""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    c = tl.arange(0, BD)
    m = c < D
    row = t * D + c
    if EARLY and NORM:
        w = tl.load(w_ptr + c, mask=m, other=0.0, eviction_policy="evict_last")
    if EARLY and PREFIX > 0:
        q = tl.load(q_ptr + c, mask=m, other=0.0, eviction_policy="evict_last")
    h = tl.load(o1_ptr + row, mask=m, other=0.0, eviction_policy=policy)
    if PREFIX == 2:
        p = tl.load(prefix + row, mask=m, other=0.0, eviction_policy=policy)
    if PREFIX > 0:
        lse = tl.load(lse_ptr + t)
        u = tl.load(update + row, mask=m, other=0.0, eviction_policy=policy)
        if PREFIX == 2:
            u = (u.to(tl.float32) + p.to(tl.float32)).to(dtype)
            tl.store(new_prefix + row, u, mask=m, eviction_policy=policy)
        p = u.to(tl.float32)
        if not EARLY:
            q = tl.load(q_ptr + c, mask=m, other=0.0, eviction_policy="evict_last")
        h = h.to(tl.float32)
        q = q.to(tl.float32)
        if ONE_REDUCTION:
            pp, pq, oo, op = tl.reduce((p * p, p * q, h * h, h * p), 0, sum4)
        else:
            pp, pq = tl.reduce((p * p, p * q), 0, sum2)
        pi = 1.0 / (1.0 + tl.exp(lse - pq * rstd(pp, eps, D, dtype == tl.float32)))
        h = h + pi * (p - h)
    else:
        h = h.to(tl.float32)
    if NORM:
        if not EARLY:
            w = tl.load(w_ptr + c, mask=m, other=0.0, eviction_policy="evict_last")
        if ONE_REDUCTION and PREFIX > 0:
            hh = (1 - pi) * (1 - pi) * oo + 2 * pi * (1 - pi) * op + pi * pi * pp
            hh = tl.maximum(hh, 0.0, propagate_nan=tl.PropagateNan.ALL)
        else:
            hh = tl.sum(h * h, 0)
        h = h * rstd(hh, output_eps, D, dtype == tl.float32) * w.to(tl.float32)
    tl.store(y_ptr + row, h.to(dtype), mask=m)


@triton.jit
def _operands(dy_ptr, dp_ptr, p_ptr, o1_ptr, at, m, PREFIX: tl.constexpr, DP: tl.constexpr):
    """dy, o1, p and dp of some columns of a row in fp32; what is absent is another of them, which no variant reads."""
    dy = tl.load(dy_ptr + at, mask=m, other=0.0).to(tl.float32)
    o = tl.load(o1_ptr + at, mask=m, other=0.0).to(tl.float32)
    p = o
    dp = dy
    if PREFIX:
        p = tl.load(p_ptr + at, mask=m, other=0.0).to(tl.float32)
        if DP:
            dp = tl.load(dp_ptr + at, mask=m, other=0.0).to(tl.float32)
    return dy, o, p, dp


@triton.jit
def _merged_grads(
    dy, dp, o, p, q, w, pi, rp, rh, k, ds, square, DP: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """(do, dprefix, dq, dw) of some columns from the row's scalars; square = ds s rp^2 / d."""
    h = o + pi * (p - o)
    dh = dy
    dw = dy
    if NORM:
        dw = h * rh * dy
        dh = (w * dy - h * k) * rh
    dv = pi * dh + ds * (rp * q) - square * p
    if DP:
        dv += dp
    return (1.0 - pi) * dh, dv, ds * rp * p, dw


@triton.jit
def _merge_scalars(
    pp, pq, oo, op, ow, pw, lse, eps, output_eps, NORM: tl.constexpr, EXACT: tl.constexpr, D: tl.constexpr
):
    """(pi, rp, rh, k, ds, ds s rp^2 / d) of a row from its six sums."""
    rp = rstd(pp, eps, D, EXACT)
    s = pq * rp
    pi = 1.0 / (1.0 + tl.exp(lse - s))
    qi = 1.0 - pi
    rh = rp
    k = rp
    if NORM:
        hh = tl.maximum(qi * qi * oo + 2 * pi * qi * op + pi * pi * pp, 0.0, propagate_nan=tl.PropagateNan.ALL)
        rh = rstd(hh, output_eps, D, EXACT)
        k = rh * rh * (qi * ow + pi * pw) / D
        ds = pi * qi * rh * (pw - ow - k * (qi * (op - oo) + pi * (pp - op)))
    else:
        ds = pi * qi * (pw - ow)
    return pi, rp, rh, k, ds, ds * (s * rp * rp / D)


@triton.jit(do_not_specialize=["T"])
def merge_bwd_kernel(
    dy_ptr,
    dp_ptr,
    p_ptr,
    o1_ptr,
    lse_ptr,
    q_ptr,
    w_ptr,
    dprefix,
    do_ptr,
    dlse_ptr,
    part,
    T,
    eps,
    output_eps,
    PREFIX: tl.constexpr,
    DP: tl.constexpr,
    NORM: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    TAIL: tl.constexpr,
    STAGES: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """Every scalar of a row comes from one fused reduction of six sums. do may overwrite o1: a row is read first.

    A row is BD columns and, where the next power of two would be much wider than D, TAIL more: d = 2,304 as 2,048 + 256
    has 56 % of the arithmetic and registers of 4,096. dq and dw of a program go to part[0] and part[1],
    `[2, programs, D]`. ZEROS: without a prefix dq and dlse are written too, as zeros.
    """
    c = tl.arange(0, BD)
    m = c < D
    dtype: tl.constexpr = do_ptr.dtype.element_ty
    exact: tl.constexpr = dtype == tl.float32
    dq = tl.zeros([BD], tl.float32)
    dw = tl.zeros([BD], tl.float32)
    q = dq
    w = dq
    if PREFIX:
        q = tl.load(q_ptr + c, mask=m, other=0.0)
    if NORM:
        w = tl.load(w_ptr + c, mask=m, other=0.0).to(tl.float32)
    if TAIL:
        c2 = BD + tl.arange(0, TAIL)
        m2 = c2 < D
        dq2 = tl.zeros([TAIL], tl.float32)
        dw2 = tl.zeros([TAIL], tl.float32)
        q2 = dq2
        w2 = dq2
        if PREFIX:
            q2 = tl.load(q_ptr + c2, mask=m2, other=0.0)
        if NORM:
            w2 = tl.load(w_ptr + c2, mask=m2, other=0.0).to(tl.float32)
    for i in tl.range(tl.program_id(0), T, tl.num_programs(0), num_stages=STAGES):
        t = tl.cast(i, tl.int64)
        row = t * D + c
        dy, o, p, dp = _operands(dy_ptr, dp_ptr, p_ptr, o1_ptr, row, m, PREFIX, DP)
        wdy = dy
        if NORM:
            wdy = w * dy
        if TAIL:
            row2 = t * D + c2
            dy2, o2, p2, dp2 = _operands(dy_ptr, dp_ptr, p_ptr, o1_ptr, row2, m2, PREFIX, DP)
            wdy2 = dy2
            if NORM:
                wdy2 = w2 * dy2
        if PREFIX:
            lse = tl.load(lse_ptr + t)
            pp, pq, oo, op, ow, pw = tl.reduce((p * p, p * q, o * o, o * p, o * wdy, p * wdy), 0, sum6)
            if TAIL:
                a, b, e, f, g, h = tl.reduce((p2 * p2, p2 * q2, o2 * o2, o2 * p2, o2 * wdy2, p2 * wdy2), 0, sum6)
                pp, pq, oo, op, ow, pw = pp + a, pq + b, oo + e, op + f, ow + g, pw + h
            pi, rp, rh, k, ds, square = _merge_scalars(pp, pq, oo, op, ow, pw, lse, eps, output_eps, NORM, exact, D)
            do, dv, gq, gw = _merged_grads(dy, dp, o, p, q, w, pi, rp, rh, k, ds, square, DP, NORM)
            tl.store(do_ptr + row, do.to(dtype), mask=m)
            tl.store(dlse_ptr + t, -ds)
            tl.store(dprefix + row, dv.to(dtype), mask=m)
            dq += gq
            dw += gw
            if TAIL:
                do, dv, gq, gw = _merged_grads(dy2, dp2, o2, p2, q2, w2, pi, rp, rh, k, ds, square, DP, NORM)
                tl.store(do_ptr + row2, do.to(dtype), mask=m2)
                tl.store(dprefix + row2, dv.to(dtype), mask=m2)
                dq2 += gq
                dw2 += gw
        else:
            dh = wdy
            if TAIL:
                dh2 = wdy2
            if NORM:
                hh, hw = tl.reduce((o * o, o * wdy), 0, sum2)
                if TAIL:
                    a, b = tl.reduce((o2 * o2, o2 * wdy2), 0, sum2)
                    hh, hw = hh + a, hw + b
                rh = rstd(hh, output_eps, D, exact)
                k = rh * rh * hw / D
                dw += o * rh * dy
                dh = (wdy - o * k) * rh
                if TAIL:
                    dw2 += o2 * rh * dy2
                    dh2 = (wdy2 - o2 * k) * rh
            tl.store(do_ptr + row, dh.to(dtype), mask=m)
            if TAIL:
                tl.store(do_ptr + row2, dh2.to(dtype), mask=m2)
            if ZEROS:
                tl.store(dlse_ptr + t, 0.0)
    q_part = part + tl.program_id(0).to(tl.int64) * D
    w_part = q_part + tl.num_programs(0).to(tl.int64) * D
    if PREFIX or ZEROS:
        tl.store(q_part + c, dq, mask=m)
        if TAIL:
            tl.store(q_part + c2, dq2, mask=m2)
    if NORM:
        tl.store(w_part + c, dw, mask=m)
        if TAIL:
            tl.store(w_part + c2, dw2, mask=m2)
