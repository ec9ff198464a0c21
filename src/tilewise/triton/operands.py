"""What the products of fp32 tiles read and how their sums are made: TF32 operands to the nearest, fp32 sums by tile.

Tensor cores read the upper 19 bits of an fp32 operand and drop the rest, which shortens every number: products are
0.07 % too small on average, four times the error of PyTorch, whose operands are rounded to the nearest. Tensors are
rounded in memory, once a pass: a rounded copy in registers would be a loop-invariant left operand (:mod:`.core`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .buffers import Source
from .launch import cdiv, launch, next_power_of_2
from .tiles import load_rows, store_rows

__all__ = ["added", "operand", "rounded"]


@triton.jit
def operand(x, PREC: tl.constexpr):
    """x as a product with this precision should read it: TF32 to the nearest, ties away from zero; NaN stays NaN."""
    if PREC == "tf32":
        bits = x.to(tl.int32, bitcast=True)
        # Half of the last bit that stays; the carry may reach the exponent, as it should. A NaN would wrap around.
        near = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, near, x)
    return x


@triton.jit
def added(acc, a, b, zero, PREC: tl.constexpr):
    """acc + a·b; `zero` is 0 made at run time.

    For fp32 products each tile has a sum of its own, which is then added: in one chain over all tiles the rounding
    errors of 16,384 additions would be three times those of dense PyTorch. A constant zero would be folded into the
    chain again by the compiler.
    """
    if PREC == "ieee" and a.dtype == tl.float32:
        acc += tl.dot(a, b, tl.zeros_like(acc) + zero, input_precision=PREC)
    else:
        acc = tl.dot(a, b, acc, input_precision=PREC)
    return acc


@triton.jit(do_not_specialize=["H", "T"])
def _round_rows(x, out, sx, so, H, T, D: tl.constexpr, N: tl.constexpr, W: tl.constexpr):
    blocks = (T + N - 1) // N
    first = tl.program_id(0) % blocks * N
    b = tl.program_id(0) // blocks // H
    h = tl.program_id(0) // blocks % H
    tile = load_rows(x, sx, b, h, first, T, D, N, W, False)
    store_rows(out, so, b, h, first, T, operand(tile, "tf32"), D, N, W)


def rounded(x: Tensor) -> Tensor:
    """A copy of x [B, H, T, d] (fp32) with TF32's 10 bits of mantissa, to the nearest."""
    source, out = Source(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    B, H, T, d = x.shape
    launch(
        _round_rows, (cdiv(T, 64) * B * H,), source.x, out, source.strides, out.stride()[:3], H, T, D=d, N=64,
        W=max(16, next_power_of_2(d)), num_warps=4,
    )  # fmt: skip
    return out
