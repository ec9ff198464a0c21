"""The oracle of depth attention: each operator as its equation, in plain PyTorch, differentiable, any device.

Notation is the paper's (Attention Residuals, arXiv:2603.15031): sources v_j (completed blocks b_j and the running
partial sum p), one pseudo-query w_l and one key-norm weight g_l a sublayer, scores
s_{l,j} = <w_l, RMSNorm_{g_l}(v_j)> = rstd(v_j) <w_l * g_l, v_j>, weights softmax_j(s), values not normalised.
Statistics are computed in fp32, or in fp64 when an input is fp64, under autocast too; results are stored in the
sources' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.products import product

__all__ = [
    "complete",
    "fold_queries",
    "fused_attn_res",
    "mix",
    "mix_norm",
    "mix_update",
    "phase1",
    "phase1_from_scores",
    "phase2",
    "phase2_first",
    "rms_norm",
    "scores",
    "wide",
]


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype of the statistics: fp64 stays, everything else becomes fp32."""
    return x if x.dtype == torch.float64 else x.float()


def rstd(v: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(v^2) + eps) over the last axis, which is dropped."""
    return torch.rsqrt(v.square().mean(-1) + eps)


def rms_norm(h: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """h * rstd(h) * weight in the statistics' dtype; `weight=None` returns h unchanged (no norm at all)."""
    return h if weight is None else h * rstd(h, eps)[..., None] * wide(weight)


def fold_queries(queries: Tensor, key_weights: Tensor | None = None, sources: torch.dtype = torch.float32) -> Tensor:
    """w * g in the dtype of the statistics, also those of sources in fp64: the only query that the scores ever see."""
    q = queries.double() if sources == torch.float64 else wide(queries)
    return q if key_weights is None else q * wide(key_weights)


def _stack(sources: Sequence[Tensor] | Tensor) -> Tensor:
    return wide(sources if isinstance(sources, Tensor) else torch.stack(tuple(sources)))


def scores(
    sources: Sequence[Tensor] | Tensor, queries: Tensor, key_weights: Tensor | None = None, *, eps: float = 1e-6
) -> Tensor:
    """s[l, j] = rstd(v_j) <w_l * g_l, v_j>: [S, n, ...]."""
    v = _stack(sources)
    q = fold_queries(queries, key_weights, v.dtype).to(v.dtype)
    return product("n...d,sd->sn...", v * rstd(v, eps)[..., None], q)


def complete(
    update: Tensor, prefix: Tensor, queries: Tensor, key_weights: Tensor | None = None, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """(b, s): b = prefix + update and its scores [S, ...]."""
    b = prefix + update
    return b, scores([b], queries, key_weights, eps=eps)[:, 0]


def phase1_from_scores(sources: Sequence[Tensor] | Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """(softmax_j(s) @ v, logsumexp_j(s)) from scores [S, n, ...]."""
    v = _stack(sources)
    dtype = sources.dtype if isinstance(sources, Tensor) else sources[0].dtype
    return product("sn...,n...d->s...d", s.softmax(1), v).to(dtype), s.logsumexp(1)


def phase1(
    sources: Sequence[Tensor] | Tensor, queries: Tensor, key_weights: Tensor | None = None, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """All queries of a block over the completed sources: (o1 [S, ..., d], lse [S, ...])."""
    return phase1_from_scores(sources, scores(sources, queries, key_weights, eps=eps))


def mix(
    sources: Sequence[Tensor] | Tensor, query: Tensor, key_weight: Tensor | None = None, *, eps: float = 1e-6
) -> Tensor:
    """h = sum_j softmax_j(s)_j v_j."""
    key_weights = None if key_weight is None else key_weight[None]
    return phase1(sources, query[None], key_weights, eps=eps)[0][0]


def mix_norm(
    sources: Sequence[Tensor] | Tensor,
    query: Tensor,
    key_weight: Tensor | None = None,
    output_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    output_eps: float | None = None,
) -> Tensor:
    """y = RMSNorm(mix(...)) * output_weight; the mix is not rounded in between."""
    v = _stack(sources)
    dtype = sources.dtype if isinstance(sources, Tensor) else sources[0].dtype
    key_weights = None if key_weight is None else key_weight[None]
    alpha = scores(sources, query[None], key_weights, eps=eps)[0].softmax(0)
    h = (alpha[..., None] * v).sum(0)
    return rms_norm(h, output_weight, eps if output_eps is None else output_eps).to(dtype)


def mix_update(
    update: Tensor,
    prefix: Tensor | None,
    sources: Sequence[Tensor] | Tensor,
    query: Tensor,
    key_weight: Tensor | None = None,
    output_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    output_eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """p = prefix + update, then the mix over the sources and p, then the norm."""
    p = update if prefix is None else prefix + update
    stacked = [*sources, p]
    return p, mix_norm(stacked, query, key_weight, output_weight, eps=eps, output_eps=output_eps)


def phase2(
    update: Tensor,
    prefix: Tensor | None,
    o1: Tensor,
    lse: Tensor,
    query: Tensor,
    key_weight: Tensor | None = None,
    output_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    output_eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """p = prefix + update; h = o1 + sigmoid(s_p - lse) (p - o1); y = RMSNorm(h) * output_weight."""
    p = update if prefix is None else prefix + update
    pw, ow = wide(p), wide(o1)
    s = rstd(pw, eps) * product("...d,d->...", pw, fold_queries(query, key_weight, pw.dtype).to(pw.dtype))
    h = ow + torch.sigmoid(s - lse)[..., None] * (pw - ow)
    return p, rms_norm(h, output_weight, eps if output_eps is None else output_eps).to(p.dtype)


def phase2_first(o1: Tensor, output_weight: Tensor | None = None, *, output_eps: float = 1e-6) -> Tensor:
    """The first sublayer of a block has no partial sum: y = RMSNorm(o1) * output_weight."""
    return o1.clone() if output_weight is None else rms_norm(wide(o1), output_weight, output_eps).to(o1.dtype)


def fused_attn_res(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Tensor,
    norm_weight: Tensor | None,
    qk_weight: Tensor,
    output_norm_weight: Tensor | None,
    num_blocks: int,
    block_write_idx: int,
    eps: float,
    output_norm_eps: float,
) -> Tensor:
    """The serving contract, in place on `prefix` and `blocks`: add, block write, mix over blocks and prefix, norm."""
    if delta is not None:
        prefix.add_(delta)
    if block_write_idx >= 0:
        blocks[:, block_write_idx].copy_(prefix)
    sources = [*blocks[:, :num_blocks].unbind(1), prefix]
    return mix_norm(sources, qk_weight, norm_weight, output_norm_weight, eps=eps, output_eps=output_norm_eps)
