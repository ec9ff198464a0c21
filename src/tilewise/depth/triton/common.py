"""Device helpers shared by the depth kernels: reductions, row addressing, the pointer table of scattered sources."""

import triton
import triton.language as tl


@triton.jit
def sum2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def sum3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def sum4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def sum6(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def rstd(total, eps, D: tl.constexpr, EXACT: tl.constexpr):
    """1 / sqrt(total / D + eps). EXACT, for fp32: with a Newton step, and 1 / D as a factor.

    The approximate root and quotient are off by 2^-23 of themselves, by which a score s would be off by 2^-23 s.
    """
    if EXACT:
        x = total * (1.0 / D) + eps
        r = tl.rsqrt(x)
        return tl.fma(0.5 * r, tl.fma(-x * r, r, 1.0), r)
    return tl.rsqrt(total / D + eps)


@triton.jit
def add_kept(total, part, lost):
    """(total + part + lost rounded, what that rounding took away), a compensated sum.

    A GPU adds the products of an fp32 dot one after another: without this a sum over d is one chain of d additions.
    """
    part += lost
    new = total + part
    return new, part - (new - total)


@triton.jit
def aligned(table, j, DTYPE: tl.constexpr):
    """Pointer j of a table of int64 addresses; the host checked that each is a multiple of 16 bytes."""
    return tl.multiple_of(tl.load(table + j).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def table_kernel(pointers, table, COUNT: tl.constexpr):
    """Write COUNT pointers to a device table: the addresses travel as kernel arguments, so nothing is copied."""
    for j in tl.static_range(COUNT):
        tl.store(table + j, pointers[j].to(tl.int64))


@triton.jit
def source_rows(base, table, j, t, source_stride8, row_stride8, TABLE: tl.constexpr):
    """Pointers to element 0 of row t of source j, for index tensors j and t of one shape.

    Strides count units of 8 elements, which tells the compiler that every row starts 16 bytes aligned.
    """
    if TABLE:
        rows = tl.multiple_of(tl.load(table + j).to(tl.pointer_type(base.dtype.element_ty)), 16)
    else:
        # 64 bits before the factor: two tensors of a list may lie more than 2^31 elements apart.
        rows = base + j.to(tl.int64) * source_stride8 * 8
    return rows + t.to(tl.int64) * row_stride8 * 8
