"""Phase 1 backward: inner products <do_l, v_j>, then the weights' gradients, then dV and dQ, batched over the readers.

delta_l = sum_j a_lj <do_l, v_j> from the sources themselves. dV of a tile is one product over all S readers, added to
an fp32 accumulator in place; dQ is a sum in registers over the tokens of a program, one partial a program. No atomics.
Left operands of dots have at most 32 rows for the reason given in `phase1`.
"""

import triton
import triton.language as tl

from tilewise.depth.triton.common import add_kept, source_rows


@triton.jit(do_not_specialize=["T", "n", "S", "do_stride8", "source_stride8", "row_stride8"])
def inner_kernel(
    do_ptr,
    do_table,
    base,
    table,
    g_ptr,
    T,
    n,
    S,
    do_stride8,
    source_stride8,
    row_stride8,
    TABLE: tl.constexpr,
    DO_TABLE: tl.constexpr,
    BS: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    D: tl.constexpr,
):
    """g[l, j, t] = <do_l[t], v_j[t]>."""
    M: tl.constexpr = BS * BT
    R: tl.constexpr = BN * BT
    t0 = tl.program_id(0) * BT
    a = tl.arange(0, M)
    b = tl.arange(0, R)
    ms = tl.program_id(2) * BS + a // BT
    mt = t0 + a % BT
    j = tl.program_id(1) * BN + b // BT
    rt = t0 + b % BT
    okm = (ms < S) & (mt < T)
    okr = (j < n) & (rt < T)
    rows = source_rows(base, table, tl.where(okr, j, 0), tl.where(okr, rt, 0), source_stride8, row_stride8, TABLE)
    dos = source_rows(do_ptr, do_table, tl.where(okm, ms, 0), tl.where(okm, mt, 0), do_stride8, D // 8, DO_TABLE)
    ck = tl.arange(0, BK)
    acc = tl.zeros([M, R], tl.float32)
    lost = acc
    for k in tl.range(0, D, BK, num_stages=STAGES):
        k = tl.multiple_of(k, BK)
        kc = (k + ck < D)[None, :]
        v = tl.load(rows[:, None] + (k + ck)[None, :], mask=okr[:, None] & kc, other=0.0)
        do = tl.load(dos[:, None] + (k + ck)[None, :], mask=okm[:, None] & kc, other=0.0)
        if v.dtype == tl.float32:
            acc, lost = add_kept(acc, tl.dot(do, tl.trans(v), input_precision="ieee"), lost)
        else:
            acc = tl.dot(do, tl.trans(v), acc, input_precision="ieee")
    hit = (a % BT)[:, None] == (b % BT)[None, :]
    at = (ms[:, None].to(tl.int64) * n + j[None, :]) * T + mt[:, None]
    tl.store(g_ptr + at, acc, mask=hit & okm[:, None] & okr[None, :])


@triton.jit(do_not_specialize=["T", "n", "S"])
def weights_kernel(
    s_ptr, lse_ptr, dlse_ptr, r_ptr, g_ptr, a_ptr, c_ptr, T, n, S, DLSE: tl.constexpr, BS: tl.constexpr,
    BT: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """a = softmax(s); ds = a (g - delta + dlse); g becomes ds r; c[j] = sum_l ds s r^2 / d. A quotient of two equal
    numbers is 1 only if it is rounded correctly, which the plain one is not on a GPU."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    q = tl.arange(0, BS)
    m = (q < S)[:, None] & (t < T)[None, :]
    row = q[:, None].to(tl.int64) * T + t[None, :]
    lse = tl.load(lse_ptr + row, mask=m, other=0.0)
    at = q[:, None].to(tl.int64) * n * T + t[None, :]
    shift = tl.zeros([BS, BT], tl.float32)
    total = tl.zeros([BS, BT], tl.float32)
    for j in range(n):
        jt = tl.cast(j, tl.int64) * T
        a = tl.exp(tl.load(s_ptr + at + jt, mask=m, other=-float("inf")) - lse)
        total += a
        shift -= a * tl.load(g_ptr + at + jt, mask=m, other=0.0)
    # The weights' sum is 1 up to the rounding of lse; ds = a (g - delta) cancels, so that this rounding would show.
    total = tl.where(m, total, 1.0)
    shift = shift / total
    if n == 1:
        # Exactly: a g / a is g but for a unit on a GPU, and the query's gradient would be that unit of g.
        shift = -tl.load(g_ptr + at, mask=m, other=0.0)
    dlse = tl.zeros([BS, BT], tl.float32)
    if DLSE:
        dlse = tl.load(dlse_ptr + row, mask=m, other=0.0)
    for j in range(n):
        jt = tl.cast(j, tl.int64) * T
        s = tl.load(s_ptr + at + jt, mask=m, other=0.0)
        r = tl.load(r_ptr + jt + t, mask=t < T, other=0.0)
        a = tl.div_rn(tl.exp(tl.where(m, s, -float("inf")) - lse), total)
        # g - delta first: dlse, which is far smaller, would lose digits in a sum with delta.
        ds = a * ((tl.load(g_ptr + at + jt, mask=m, other=0.0) + shift) + dlse)
        tl.store(a_ptr + at + jt, a, mask=m)
        tl.store(g_ptr + at + jt, ds * r[None, :], mask=m)
        tl.store(c_ptr + jt + t, tl.sum(ds * s, 0) * r * r / D, mask=t < T)


@triton.jit(do_not_specialize=["T", "n", "S", "do_stride8", "source_stride8", "row_stride8", "grad_stride8"])
def source_grad_kernel(
    do_ptr,
    do_table,
    base,
    table,
    a_ptr,
    dr_ptr,
    c_ptr,
    q_ptr,
    grad_base,
    grad_table,
    dq_part,
    T,
    n,
    S,
    do_stride8,
    source_stride8,
    row_stride8,
    grad_stride8,
    TABLE: tl.constexpr,
    DO_TABLE: tl.constexpr,
    GRAD_TABLE: tl.constexpr,
    ADD: tl.constexpr,
    SHRINK: tl.constexpr,
    BS: tl.constexpr,
    BQ: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    STAGES: tl.constexpr,
    D: tl.constexpr,
):
    """dv_j += sum_l [a_lj do_l + dr_lj Q_l] - c_j v_j and dQ_l = sum_{t, j} dr_lj v_j for BD columns.

    dr is divided by its largest magnitude of the tile before it is rounded: fp16 would flush small gradients. SHRINK is
    false for every group of queries but the first, because c already is a sum over all queries. BQ is BS, but at least
    the 16 that a dot reduces over.
    """
    M: tl.constexpr = BS * BT
    R: tl.constexpr = BN * BT
    dtype: tl.constexpr = base.dtype.element_ty
    k = tl.program_id(0) * BD
    a = tl.arange(0, M)
    b = tl.arange(0, R)
    ms = a // BT
    q = tl.arange(0, BQ)
    j = tl.program_id(2) * BN + b // BT
    cd = k + tl.arange(0, BD)
    kc = (cd < D)[None, :]
    same = (b % BT)[:, None] == (a % BT)[None, :]
    qt = tl.load(q_ptr + q[:, None] * D + cd[None, :], mask=(q < S)[:, None] & kc, other=0.0)
    dq = tl.zeros([BQ, BD], tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(T, BT), tl.num_programs(1), num_stages=STAGES):
        t0 = tile * BT
        mt = t0 + a % BT
        rt = t0 + b % BT
        okm = (ms < S) & (mt < T)
        okr = (j < n) & (rt < T)
        at = (ms[None, :].to(tl.int64) * n + j[:, None]) * T + rt[:, None]
        wt = tl.load(a_ptr + at, mask=same & okm[None, :] & okr[:, None], other=0.0).to(dtype)
        at = (q[None, :].to(tl.int64) * n + j[:, None]) * T + rt[:, None]
        dr = tl.load(dr_ptr + at, mask=(q < S)[None, :] & okr[:, None], other=0.0)
        scale = tl.maximum(tl.max(tl.max(tl.abs(dr), 1), 0), 1e-30)
        dr = (dr / scale).to(dtype)
        rows = source_rows(base, table, tl.where(okr, j, 0), tl.where(okr, rt, 0), source_stride8, row_stride8, TABLE)
        grads = source_rows(
            grad_base, grad_table, tl.where(okr, j, 0), tl.where(okr, rt, 0), grad_stride8, D // 8, GRAD_TABLE
        )
        vm = okr[:, None] & kc
        v = tl.load(rows[:, None] + cd[None, :], mask=vm, other=0.0)
        dos = source_rows(do_ptr, do_table, tl.where(okm, ms, 0), tl.where(okm, mt, 0), do_stride8, D // 8, DO_TABLE)
        do = tl.load(dos[:, None] + cd[None, :], mask=okm[:, None] & kc, other=0.0)
        dv = tl.dot(dr, qt, input_precision="ieee") * scale
        dv = tl.dot(wt, do, dv, input_precision="ieee")
        if SHRINK:
            c = tl.load(c_ptr + j.to(tl.int64) * T + rt, mask=okr, other=0.0)
            dv -= c[:, None] * v.to(tl.float32)
        at = grads[:, None] + cd[None, :]
        if ADD:
            dv += tl.load(at, mask=vm, other=0.0).to(tl.float32)
        tl.store(at, dv.to(grad_base.dtype.element_ty), mask=vm)
        dq += tl.dot(tl.trans(dr), v, input_precision="ieee") * scale
    part = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * S * D
    tl.store(dq_part + part + q[:, None] * D + cd[None, :], dq, mask=(q < S)[:, None] & kc)
