"""The oracle: attention with relative terms, dense, differentiable, in any dtype and on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from .dropout import keep
from .mask import Mask
from .terms import Port

__all__ = ["attention_reference"]


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, ports: list[Port], mask: Mask, scale: float, offset: int = 0,
    dropout_p: float = 0.0, seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O and lse of one call, by the equation of :mod:`tilewise.terms`, in the dtype of q (lse in fp32 or fp64).

    q is [B, H, Tq, d], k [B, Hk, Tk, d] and v [B, Hk, Tk, d_v], where Hk divides H. Rows that see no key give 0 and
    lse −∞.
    """
    B, H, Tq, _ = q.shape
    Tk = k.shape[2]
    k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
    delta = torch.arange(Tq, device="cpu")[:, None] + offset - torch.arange(Tk, device="cpu")
    phi = [port.rows(delta).to(q.device, torch.int64) for port in ports]

    S = q @ k.mT
    for port, row in zip(ports, phi, strict=True):
        if port.kind == "query":
            Z = (q if port.left is None else port.left.to(q.dtype)) @ port.table.to(q.dtype).mT
            S = S + Z.gather(-1, row.clamp(min=0).expand_as(S)).masked_fill(row < 0, 0.0)
        elif port.kind == "key":
            Z = k @ port.table.to(q.dtype).mT
            S = S + Z.gather(-1, row.clamp(min=0).mT.expand(B, H, Tk, Tq)).mT.masked_fill(row < 0, 0.0)
    S = S * scale
    for port, row in zip(ports, phi, strict=True):
        if port.kind == "scalar":
            b = port.table.to(q.dtype)[:, row.clamp(min=0)].masked_fill(row < 0, 0.0)
            S = S + (b if port.left is None else b * port.left.to(q.dtype)[..., None])

    S = S.masked_fill(~mask.allowed(Tq, Tk, offset, device=q.device), float("-inf"))
    lse = torch.logsumexp(S.to(torch.promote_types(S.dtype, torch.float32)), -1)
    # A row of −∞ alone would give NaN, in the gradient too.
    empty = (lse == float("-inf"))[..., None]
    P = S.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    if dropout_p > 0.0:
        kept = keep(seed, torch.arange(B * H, device=q.device), torch.arange(Tq, device=q.device), (0, Tk), dropout_p)
        P = P * kept.view(B, H, Tq, Tk) / (1.0 - dropout_p)

    O = P @ v
    for port, row in zip(ports, phi, strict=True):
        if port.kind == "value":
            by_row = P.new_zeros(B, H, Tq, port.table.shape[1])
            by_row = by_row.scatter_add(-1, row.clamp(min=0).expand_as(P), P * (row >= 0))
            O = O + by_row @ port.table.to(q.dtype)
    return O, lse
