"""Transformer-XL's biases without sums in memory: S_ij = τ·((q_i + u)·k_j + (q_i + v)·p_{i−j}).

The Hopper kernels add u and v to the query tile in shared memory, once a program; where queries are the tiles of a loop
(the pass over keys), v is added in registers, and u enters as u·k_j, a constant of each row there. The portable kernels
take u·k_j, a number a key, and v·p_δ, a number a table row, both in fp32. Gradients are sums over queries, by blocks of
rows first, in a fixed order: du = τ·Σ_i (dS·K)_i, dv = τ·Σ_i (dG·P)_i.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cached import cached
from .launch import cdiv, launch

__all__ = ["ContentBias", "add_up", "content_band", "content_edge", "content_of", "position_of", "rows_of_heads"]


class ContentBias(NamedTuple):
    """c·u_h·k_j: fp32 numbers by [batch, query head, key]."""

    numbers: Any
    heads: Any
    keys: Any


@triton.jit
def content_band(t, z, b, h, n, i0, j0, offset, Tq, Tk, BM: tl.constexpr, BN: tl.constexpr, TURNED: tl.constexpr,
                 TMA: tl.constexpr):  # fmt: skip
    """The bias of BN keys in log2 units, to broadcast over a [BM, BN] tile ([BN, BM] where TURNED)."""
    j = j0 + tl.arange(0, BN)
    at = t.numbers + tl.cast(b * t.heads + h, tl.int64) * t.keys + j
    value = tl.load(at, mask=j < Tk, other=0.0)
    if TURNED:
        value = value[:, None]
    else:
        value = value[None, :]
    return value


@triton.jit
def content_edge(t, b, h, i, Tq, SIDE: tl.constexpr):
    """Nothing: a bias of keys is no constant of a row, and calls that have one have no saturated tiles."""
    return tl.zeros_like(i).to(tl.float32)


@triton.jit(do_not_specialize=["scale", "H", "G", "T"])
def dots(x, bias, out, sx, su, scale, H, G, T, D: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """out[b, h, t] = scale · x[b, h // G, t] · bias[h] in fp32; out is contiguous."""
    blocks = (T + N - 1) // N
    t = tl.program_id(0) % blocks * N + tl.arange(0, N)
    bh = tl.program_id(0) // blocks
    b = bh // H
    h = bh % H
    d = tl.arange(0, W)
    at = x + tl.cast(b, tl.int64) * sx[0] + tl.cast(h // G, tl.int64) * sx[1] + t.to(tl.int64)[:, None] * sx[2]
    tile = tl.load(at + d[None, :], mask=(t[:, None] < T) & (d[None, :] < D), other=0.0).to(tl.float32)
    row = tl.load(bias + tl.cast(h, tl.int64) * su + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out + tl.cast(bh, tl.int64) * T + t, tl.sum(tile * row[None, :], 1) * scale, mask=t < T)


@triton.jit(do_not_specialize=["tau", "count", "heads"])
def add_parts(parts, grad, tau, count, heads, sp, sg, D: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """grad[h] = τ · Σ of parts[n] over its count·heads rows, which begin at h·count·heads: program h."""
    h = tl.program_id(0)
    d = tl.arange(0, W)
    n = tl.arange(0, N)
    total = tl.zeros([N, W], tl.float32)
    for first in range(0, count * heads, N):
        at = parts + (tl.cast(h, tl.int64) * count * heads + first + n)[:, None] * sp + d[None, :]
        total += tl.load(at, mask=(first + n < count * heads)[:, None] & (d[None, :] < D), other=0.0)
    to = grad + tl.cast(h, tl.int64) * sg[0] + d.to(tl.int64) * sg[1]
    tl.store(to, (tl.sum(total, 0) * tau).to(grad.dtype.element_ty), mask=d < D)


def add_up(parts: Tensor, grad: Tensor, tau: float) -> None:
    """grad [H or 1, d] = τ · the sum of parts [H, n, d], fp32, over n (and the heads)."""
    H, n, d = parts.shape
    rows, heads = grad.shape[0], H // grad.shape[0]
    launch(
        add_parts, (rows,), parts, grad, tau, n, heads, parts.stride(1), grad.stride(), D=d,
        W=max(16, triton.next_power_of_2(d)), N=32, num_warps=4,
    )  # fmt: skip


def rows_of_heads(L, name: str) -> tuple[Tensor, int]:
    """The call's ``content`` or ``bias`` in q's dtype, and the distance of its heads; zeros where there is none."""
    given = getattr(L.ports[0], name)
    if given is None:
        return _zeros(L.d, L.dtype, L.device), 0
    rows = given.to(L.dtype)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows, 0 if rows.shape[0] == 1 else rows.stride(0)


def content_of(L) -> ContentBias | None:
    """c·u·k_j of every head, made once a pass; None where the call has no u."""
    if not L.ports or L.ports[0].content is None:
        return None
    if "content" not in L.lookups:
        u, step = rows_of_heads(L, "content")
        values = torch.empty(L.B, L.H, L.Tk, dtype=torch.float32, device=L.device)
        _dots(L, L.k.x, u, values, L.k.strides, step, L.c, L.H, L.G)
        L.lookups["content"] = ContentBias(values, L.H, L.Tk)
    return L.lookups["content"]


def position_of(L, n: int) -> tuple[Tensor, int] | None:
    """v·p of every row of port n's table, and the distance of the heads, made once a pass; None without a v."""
    port, table = L.ports[n], L.tables[n]
    if port.bias is None:
        return None
    if "bias" not in L.lookups:
        v, step = rows_of_heads(L, "bias")
        # One head's numbers serve all where neither the table nor the bias differs.
        heads = 1 if table.shape[0] == v.shape[0] == 1 else L.H
        values = torch.empty(1, heads, table.shape[1], dtype=torch.float32, device=L.device)
        _dots(L, table, v, values, (0, L.head_stride(n), table.stride(1)), step, 1.0, heads, 1)
        L.lookups["bias"] = values, 0 if heads == 1 else values.stride(1)
    return L.lookups["bias"]


def _dots(L, x: Tensor, bias: Tensor, out: Tensor, strides, step: int, scale: float, heads: int, group: int) -> None:
    B, H, T = out.shape
    launch(
        dots, (cdiv(T, 64) * B * H,), x, bias, out, strides, step, scale, heads, group, T, D=L.d, W=L.BD, N=64,
        num_warps=4,
    )  # fmt: skip


@cached(16)
def _zeros(d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(1, d, dtype=dtype, device=device)
