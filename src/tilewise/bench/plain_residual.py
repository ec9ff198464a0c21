"""The plain residual as one kernel a direction: h += u and y = RMSNorm(h) · w, the baseline of the depth set.

Forward and backward move 4 vectors of d a token each. Tuned as the depth kernels are: a row a program forward, two
persistent programs an SM backward, where the gradient of w is summed over rows in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["add_rms_norm", "add_rms_norm_"]


@triton.jit
def add_norm_kernel(U, H, W, HN, Y, eps, D: tl.constexpr, BD: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BD)
    m = c < D
    h = tl.load(H + t * D + c, mask=m, other=0.0)
    u = tl.load(U + t * D + c, mask=m, other=0.0)
    h = (h.to(tl.float32) + u.to(tl.float32)).to(h.dtype)
    tl.store(HN + t * D + c, h, mask=m)
    h = h.to(tl.float32)
    w = tl.load(W + c, mask=m, other=0.0, eviction_policy="evict_last").to(tl.float32)
    tl.store(Y + t * D + c, (h * tl.rsqrt(tl.sum(h * h, 0) / D + eps) * w).to(Y.dtype.element_ty), mask=m)


@triton.jit
def add_norm_bwd_kernel(DY, DH, H, W, DX, PART, T, eps, D: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr):
    """dx = dh + r (w dy − h r² mean(w dy h)); PART receives this program's share of dw = Σ dy h r."""
    c = tl.arange(0, BD)
    m = c < D
    w = tl.load(W + c, mask=m, other=0.0).to(tl.float32)
    dw = tl.zeros((BD,), tl.float32)
    for row in tl.range(tl.program_id(0), T, tl.num_programs(0), num_stages=STAGES):
        t = tl.cast(row, tl.int64)
        h = tl.load(H + t * D + c, mask=m, other=0.0).to(tl.float32)
        dy = tl.load(DY + t * D + c, mask=m, other=0.0).to(tl.float32)
        dh = tl.load(DH + t * D + c, mask=m, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(h * h, 0) / D + eps)
        g = dy * w
        dx = dh + r * (g - h * (r * r * tl.sum(g * h, 0) / D))
        tl.store(DX + t * D + c, dx.to(DX.dtype.element_ty), mask=m)
        dw += dy * h * r
    tl.store(PART + tl.program_id(0).to(tl.int64) * D + c, dw, mask=m)


def _block(d: int) -> int:
    return max(1 << (d - 1).bit_length(), 256)


def _forward(update: Tensor, hidden: Tensor, weight: Tensor, new: Tensor, y: Tensor, eps: float) -> None:
    T, d = hidden.shape
    warps = 4 if T > 1024 else min(max(_block(d) // 1024, 1), 16)
    add_norm_kernel[(T,)](update, hidden, weight, new, y, eps, D=d, BD=_block(d), num_warps=warps)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, update, hidden, weight, eps):
        new, y = torch.empty_like(hidden), torch.empty_like(hidden)
        _forward(update, hidden, weight, new, y, eps)
        ctx.save_for_backward(new, weight)
        ctx.eps = eps
        return new, y

    @staticmethod
    @once_differentiable
    def backward(ctx, dh, dy):
        h, weight = ctx.saved_tensors
        T, d = h.shape
        block, programs = _block(d), min(T, 264)
        dx, part = torch.empty_like(h), torch.empty((programs, d), dtype=torch.float32, device=h.device)
        add_norm_bwd_kernel[(programs,)](
            dy.contiguous(), dh.contiguous(), h, weight, dx, part, T, ctx.eps, D=d, BD=block, STAGES=2,
            num_warps=min(max(block // 512, 4), 16),
        )  # fmt: skip
        return dx, dx, part.sum(0).to(weight.dtype), None


def add_rms_norm(update: Tensor, hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(h + u, RMSNorm(h + u) · w) of `[T, d]` tensors; differentiable."""
    return _AddNorm.apply(update, hidden, weight, eps)


@torch.no_grad()
def add_rms_norm_(update: Tensor, hidden: Tensor, weight: Tensor, y: Tensor, eps: float) -> None:
    """The same for inference: `hidden` in place, the normalised rows into `y`."""
    _forward(update, hidden, weight, hidden, y, eps)
