"""Any-device path of depth attention: explicit forward and backward formulas, one source at a time, nothing stacked.

Tensors are flat: sources, updates and prefixes `[T, d]`, queries folded (w * g) in the statistics' dtype. Backward
formulas are closed forms; delta is always sum_j a_j <do, v_j> with the sources at hand, never <do, o1> with a rounded
o1: for sources correlated 0.99 the latter is wrong by 37 % in bf16.

A backward takes `into`, a list with one wide accumulator a source (or None for "return the gradients"): gradients are
added there in place, in fp32, so that a source read by many sublayers is rounded once. `fresh` accumulators are
unwritten: they are stored to.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.depth.reference import fold_queries, rstd, wide

__all__ = [
    "combine",
    "complete",
    "direct",
    "merge_queries",
    "mix_bwd",
    "mix_fwd",
    "partials",
    "phase1_bwd",
    "phase2_bwd",
    "phase2_from_scores",
    "phase2_fwd",
    "prepare",
    "read",
    "scores",
    "serve_",
]


def exact_products(function):
    """Under autocast the products of fp32 statistics would be taken in bf16: an error of 1 % of a score."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        given = (x for a in args for x in (a if isinstance(a, (list, tuple)) else (a,)))
        device = next(x.device for x in given if isinstance(x, Tensor))
        with torch.autocast(device.type, enabled=False):
            return function(*args, **kwargs)

    return run


def _norm_fwd(h: Tensor, w: Tensor | None, eps: float) -> Tensor:
    return h if w is None else h * rstd(h, eps)[:, None] * wide(w)


def _norm_bwd(dy: Tensor, h: Tensor, w: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None]:
    """(dh, dw) of y = RMSNorm(h) * w; all wide."""
    if w is None:
        return dy, None
    r = rstd(h, eps)[:, None]
    x, wdy = h * r, wide(w) * dy
    return (wdy - x * (x * wdy).mean(-1, keepdim=True)) * r, (x * dy).sum(0)


def _score(v: Tensor, q: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(s, rstd) of one wide source against one query."""
    r = rstd(v, eps)
    return r * (v @ q), r


def _score_grad(ds: Tensor, s: Tensor, r: Tensor, v: Tensor, q: Tensor) -> Tensor:
    """dv through s = rstd(v) <v, q>: ds (r q - s r^2 / d v)."""
    return (ds * r)[:, None] * q - (ds * s * r * r / v.shape[-1])[:, None] * v


def _deliver(grads: list[Tensor], sources: Sequence[Tensor], into: list[Tensor] | None, fresh: bool) -> list[Tensor]:
    if into is None:
        return [g.to(v.dtype) for g, v in zip(grads, sources, strict=True)]
    for g, acc in zip(grads, into, strict=True):
        acc.copy_(g) if fresh else acc.add_(g)
    return []


def partials(v: Tensor) -> int:
    """Rows of dq and dw that :func:`phase2_bwd` leaves in `part`."""
    return 1


def _add(update: Tensor | None, prefix: Tensor | None, new: Tensor | None = None) -> Tensor | None:
    return update if prefix is None else prefix if update is None else torch.add(prefix, update, out=new)


@exact_products
def mix_fwd(
    sources: Sequence[Tensor],
    update: Tensor | None,
    prefix: Tensor | None,
    q: Tensor,
    w: Tensor | None,
    eps: float,
    output_eps: float,
    new: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """(p, y) of the one-pass mix over the sources and, if there is one, p = prefix + update, which `new` receives."""
    p = _add(update, prefix, new)
    values = [*sources] if p is None else [*sources, p]
    s = torch.stack([_score(wide(v), q, eps)[0] for v in values])
    alpha = s.softmax(0)
    h = sum(a[:, None] * wide(v) for a, v in zip(alpha, values, strict=True))
    return p, _norm_fwd(h, w, output_eps).to(values[0].dtype)


@exact_products
def mix_bwd(
    dy: Tensor,
    dp: Tensor | None,
    sources: Sequence[Tensor],
    p: Tensor | None,
    q: Tensor,
    w: Tensor | None,
    eps: float,
    output_eps: float,
    into: list[Tensor] | None = None,
    fresh: bool = False,
) -> tuple[list[Tensor], Tensor | None, Tensor, Tensor | None]:
    """(dsources, dprefix, dq, dw); the mix is recomputed. `dp` is the gradient of the returned prefix, or None."""
    values = [*sources] if p is None else [*sources, p]
    stats = [_score(wide(v), q, eps) for v in values]
    alpha = torch.stack([s for s, _ in stats]).softmax(0)
    h = sum(a[:, None] * wide(v) for a, v in zip(alpha, values, strict=True))
    dh, dw = _norm_bwd(wide(dy), h, w, output_eps)
    inner = torch.stack([(dh * wide(v)).sum(-1) for v in values])
    delta = (alpha * inner).sum(0)
    dq, grads = torch.zeros_like(q), []
    for a, g, (s, r), v in zip(alpha, inner, stats, values, strict=True):
        ds = a * (g - delta)
        dq += (ds * r) @ wide(v)
        grads.append(a[:, None] * dh + _score_grad(ds, s, r, wide(v), q))
    dprefix = None
    if p is not None:
        last = grads.pop()
        dprefix = (last if dp is None else last + wide(dp)).to(p.dtype)
    return _deliver(grads, sources, into, fresh), dprefix, dq, dw


@exact_products
def scores(sources: Sequence[Tensor], q: Tensor, eps: float, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(s [S, n, T], rstd [n, T]). `out` receives s, if given."""
    r = torch.stack([rstd(wide(v), eps) for v in sources])
    s = torch.stack([(wide(v) @ q.mT).mT for v in sources], 1) * r
    return s if out is None else out.copy_(s), r


@exact_products
def complete(
    update: Tensor,
    prefix: Tensor | None,
    q: Tensor,
    eps: float,
    block: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(b, s [S, T], rstd [T]) of the block that `update` completes. `block` and `out` receive b and s, if given."""
    b = _add(update, prefix)
    b = b if block is None else block.copy_(b)
    s, r = scores([b], q, eps)
    return b, s[:, 0] if out is None else out.copy_(s[:, 0]), r[0]


@exact_products
def combine(
    sources: Sequence[Tensor], s: Tensor, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(o1 [S, T, d], lse [S, T]) from scores [S, n, T]. `out` and `lse` receive them, if given."""
    alpha, total = s.softmax(1), s.logsumexp(1)
    o1 = sum(alpha[:, j, :, None] * wide(v) for j, v in enumerate(sources)).to(sources[0].dtype)
    return o1 if out is None else out.copy_(o1), total if lse is None else lse.copy_(total)


@exact_products
def phase1_bwd(
    do1: Sequence[Tensor],
    dlse: Tensor | None,
    sources: Sequence[Tensor],
    q: Tensor,
    s: Tensor,
    lse: Tensor,
    r: Tensor,
    into: list[Tensor] | None = None,
    fresh: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """(dsources, dq [S, d]) of phase 1 from its saved scores, lse and rstd."""
    do = torch.stack([wide(g) for g in do1])
    # exp(s − lse) sums to 1 only as far as lse is exact: with scores of 300 that cost 2 % of dV.
    a = s.softmax(1)
    inner = torch.stack([(do * wide(v)).sum(-1) for v in sources], 1)
    ds = a * (inner - (a * inner).sum(1, keepdim=True) + (0 if dlse is None else dlse[:, None]))
    dq, grads = torch.zeros_like(q), []
    for j, v in enumerate(sources):
        v, dr = wide(v), ds[:, j] * r[j]
        dq += dr @ v
        shrink = (ds[:, j] * s[:, j]).sum(0) * r[j].square() / v.shape[-1]
        grads.append((a[:, j, :, None] * do).sum(0) + dr.mT @ q - shrink[:, None] * v)
    return _deliver(grads, sources, into, fresh), dq


@exact_products
def phase2_fwd(
    update: Tensor | None,
    prefix: Tensor | None,
    o1: Tensor,
    lse: Tensor | None,
    q: Tensor | None,
    w: Tensor | None,
    eps: float,
    output_eps: float,
    new: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """(p, y) of the merge; without update and prefix it is the block's first sublayer: y = norm(o1).

    A sum of both is written to `new`, if given.
    """
    p, h = _add(update, prefix, new), wide(o1)
    if p is not None:
        pi = torch.sigmoid(_score(wide(p), q, eps)[0] - lse)
        h = h + pi[:, None] * (wide(p) - h)
    y = _norm_fwd(h, w, output_eps).to(o1.dtype)
    return p, y.clone() if y is o1 else y


@exact_products
def phase2_bwd(
    dy: Tensor,
    dp: Tensor | None,
    p: Tensor | None,
    o1: Tensor,
    lse: Tensor | None,
    q: Tensor | None,
    w: Tensor | None,
    eps: float,
    output_eps: float,
    do: Tensor | None = None,
    dlse: Tensor | None = None,
    part: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(dprefix, do1, dlse, dq, dw); dprefix is the gradient of the prefix and of the update alike.

    Buffers, if given, receive do1 (`do` may be o1), dlse, and dq and dw in `part[0, 0]` and `part[1, 0]`; without
    a prefix dlse and dq are zeros there.
    """
    results = _phase2_bwd(dy, dp, p, o1, lse, q, w, eps, output_eps)
    if p is None and dlse is not None:
        dlse.zero_(), part[0, 0].zero_()
    places = (None, do, dlse, None if part is None else part[0, 0], None if part is None else part[1, 0])
    for place, x in zip(places, results, strict=True):
        if place is not None and x is not None:
            place.copy_(x)
    return results


def direct(T: int, n: int, queries: int) -> bool:
    """Whether :func:`phase2_from_scores` over n sources beats phase 1 and :func:`phase2_fwd` for T tokens."""
    return False


def phase2_from_scores(
    update: Tensor | None,
    prefix: Tensor | None,
    sources: Sequence[Tensor],
    s: Tensor,
    q: Tensor | None,
    w: Tensor | None,
    eps: float,
    output_eps: float,
    new: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """(p, y) of :func:`phase2_fwd` with o1 and lse from one query's scores s [n, T]; o1 is not stored."""
    o1, lse = combine(sources, s[None])
    return phase2_fwd(update, prefix, o1[0], lse[0], q, w, eps, output_eps, new=new)


def prepare(q: Tensor, dtype: torch.dtype) -> None:
    """Derive at once what `scores` derives from queries of which later calls take rows; here nothing."""


def merge_queries(q: Tensor, dtype: torch.dtype) -> Tensor:
    """The queries as merges at inference take them, for sources of a dtype; here as they are."""
    return q


@exact_products
def read(
    o1: Tensor | None,
    lse: Tensor | None,
    sources: Sequence[Tensor],
    update: Tensor | None,
    s: Tensor,
    w: Tensor | None,
    output_eps: float,
    slot: Tensor | None = None,
) -> Tensor:
    """y `[T, d]` of one read whose scores are known, in one softmax over all that is given, with the output norm.

    Args:
        o1, lse: phase 1 over earlier sources, a source of score lse; or None.
        sources: n of them, `[T, d]` each; may be empty.
        update: one source more, or None.
        s: scores of the sources and then of the update, `[n or n + 1, T]`.
        w: weight of the norm, or None for h itself.
        output_eps: epsilon of the norm.
        slot: receives a copy of the update, if given.
    """
    values = [*sources] if update is None else [*sources, update]
    if slot is not None:
        slot.copy_(update)
    if o1 is not None:
        values, s = [o1, *values], torch.cat([lse[None], s[: len(values)]])
    alpha = s[: len(values)].softmax(0)
    h = sum(a[:, None] * wide(v) for a, v in zip(alpha, values, strict=True))
    return _norm_fwd(h, w, output_eps).to(values[0].dtype)


def _phase2_bwd(dy, dp, p, o1, lse, q, w, eps, output_eps):
    o = wide(o1)
    if p is None:
        do, dw = _norm_bwd(wide(dy), o, w, output_eps)
        do = do.to(o1.dtype)
        return None, do.clone() if do is dy else do, None, None, dw
    v = wide(p)
    s, r = _score(v, q, eps)
    pi = torch.sigmoid(s - lse)
    dh, dw = _norm_bwd(wide(dy), o + pi[:, None] * (v - o), w, output_eps)
    ds = pi * (1 - pi) * (dh * (v - o)).sum(-1)
    dv = pi[:, None] * dh + _score_grad(ds, s, r, v, q)
    dprefix = (dv if dp is None else dv + wide(dp)).to(p.dtype)
    return dprefix, ((1 - pi)[:, None] * dh).to(o1.dtype), -ds, (ds * r) @ v, dw


@exact_products
def serve_(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Tensor,
    q: Tensor,
    g: Tensor | None,
    w: Tensor | None,
    num_blocks: int,
    block_write_idx: int,
    eps: float,
    output_eps: float,
) -> Tensor:
    """The serving contract, in place on `prefix` and `blocks`; the query w and the key weight g are not folded yet."""
    q = fold_queries(q, g, prefix.dtype).to(wide(prefix).dtype)
    if delta is not None:
        prefix.add_(delta)
    if block_write_idx >= 0:
        blocks[:, block_write_idx].copy_(prefix)
    return mix_fwd([blocks[:, j] for j in range(num_blocks)], None, prefix, q, w, eps, output_eps)[1]
