"""The public operators of depth attention: validation, choice of implementation, documentation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.depth import autograd, reference
from tilewise.depth.checks import (
    check_eps,
    check_matrix,
    check_same,
    check_sources,
    check_statistics,
    check_stream,
    check_update,
    check_vector,
)
from tilewise.depth.ops import check_call, fold, narrowed

__all__ = [
    "complete",
    "fold_queries",
    "mix",
    "mix_norm",
    "mix_update",
    "phase1",
    "phase1_from_scores",
    "phase2",
    "phase2_first",
    "scores",
]

Sources = Sequence[Tensor] | Tensor


def _list(sources: Sources) -> Sequence[Tensor]:
    return sources.unbind(0) if isinstance(sources, Tensor) else sources


def _check_weights(d: int, device: torch.device, query: Tensor, **weights: Tensor | None) -> None:
    check_vector("query", query, d, device, optional=False)
    for name, weight in weights.items():
        check_vector(name, weight, d, device)


def _check_queries(d: int, device: torch.device, queries: Tensor, key_weights: Tensor | None) -> None:
    check_matrix("queries", queries, d, device, optional=False)
    check_matrix("key_weights", key_weights, d, device, queries.shape[0])


def fold_queries(queries: Tensor, key_weights: Tensor | None = None) -> Tensor:
    """w * g `[..., d]`, in fp32, or in fp64 where one of them is: the only query that the scores ever see.

    Raises:
        TypeError: no tensors of floats.
        ValueError: shapes or devices that differ.
    """
    shape, _, device = check_stream("queries", queries)
    if key_weights is not None:
        check_update(key_weights, shape, device, "key_weights")
    return reference.fold_queries(queries, key_weights)


def mix(sources: Sources, query: Tensor, key_weight: Tensor | None = None, *, eps: float = 1e-6, impl="auto") -> Tensor:
    r"""One query's softmax mix over the sources, in one pass.

    .. math:: h = \sum_j \alpha_j v_j, \quad \alpha = \mathrm{softmax}_j(s), \quad
              s_j = \frac{\langle w \odot g, v_j\rangle}{\sqrt{\mathrm{mean}(v_j^2) + \epsilon}}

    Equations 2 to 4 of Attention Residuals (arXiv:2603.15031). With w = 0 the mix is the mean of the sources.

    Args:
        sources: n tensors `[..., d]` (list or tuple), or a bank `[n, ..., d]`; pass `bank[:n]` for the first n blocks.
            A list is never stacked. fp16, bf16, fp32 or fp64, all alike.
        query: w, `[d]`, any float dtype. Initialise it with zeros.
        key_weight: g, the weight of the key RMSNorm, `[d]`, or None for ones. w * g is formed in fp32, or in
            fp64 beside fp64 sources.
        eps: epsilon of the key norm.
        impl: `auto` (Triton kernels on a CUDA device, otherwise the eager path), `triton`, `eager` or `reference`. A
            named implementation never falls back.

    Returns:
        h `[..., d]` in the sources' dtype. Differentiable in sources, query and key_weight.

    Raises:
        TypeError: sources are no tensors of a float dtype.
        ValueError: a shape, device or implementation that does not fit.

    Example:
        >>> import torch
        >>> from tilewise.depth import mix
        >>> v = [torch.randn(2, 5, 64) for _ in range(3)]
        >>> mix(v, torch.zeros(64)).shape
        torch.Size([2, 5, 64])
    """
    shape, dtype, device = check_sources(sources)
    check_call(impl, sources[0], eps=eps)
    _check_weights(shape[-1], device, query, key_weight=key_weight)
    if impl == "reference":
        return reference.mix(sources, query, key_weight, eps=eps)
    q = fold(query, key_weight, dtype)
    return autograd.Mix.apply(eps, eps, impl, None, None, q, None, *_list(sources))[1]


def mix_norm(
    sources: Sources,
    query: Tensor,
    key_weight: Tensor | None = None,
    output_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    output_eps: float | None = None,
    impl="auto",
) -> Tensor:
    r"""The mix followed by the next sublayer's RMSNorm, in one kernel: y = RMSNorm(h) * output_weight.

    Args:
        sources, query, key_weight, eps, impl: as in :func:`mix`.
        output_weight: weight of the output RMSNorm, `[d]`; None applies no norm, so that y = h.
        output_eps: epsilon of the output norm; None means `eps`.

    Returns:
        y `[..., d]` in the sources' dtype. h is not rounded before the norm and is not stored.

    Raises:
        TypeError, ValueError: as in :func:`mix`.

    Example:
        >>> import torch
        >>> from tilewise.depth import mix_norm
        >>> v = torch.randn(9, 5, 64)
        >>> mix_norm(v[:3], torch.zeros(64), output_weight=torch.ones(64)).shape
        torch.Size([5, 64])
    """
    shape, dtype, device = check_sources(sources)
    check_call(impl, sources[0], eps=eps, output_eps=output_eps)
    _check_weights(shape[-1], device, query, key_weight=key_weight, output_weight=output_weight)
    if impl == "reference":
        return reference.mix_norm(sources, query, key_weight, output_weight, eps=eps, output_eps=output_eps)
    q, output_eps = fold(query, key_weight, dtype), eps if output_eps is None else output_eps
    return autograd.Mix.apply(eps, output_eps, impl, None, None, q, narrowed(output_weight, dtype), *_list(sources))[1]


def mix_update(
    update: Tensor,
    prefix: Tensor | None,
    sources: Sources,
    query: Tensor,
    key_weight: Tensor | None = None,
    output_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    output_eps: float | None = None,
    impl="auto",
) -> tuple[Tensor, Tensor]:
    r"""A whole sublayer boundary in one pass: prefix add, mix over the sources and the new prefix, RMSNorm.

    p = prefix + update, rounded to the storage dtype before it serves as a source; then :func:`mix_norm` over
    `[*sources, p]`. Equal to :func:`phase1` + :func:`phase2`, and cheaper while few blocks are complete: it reads
    n + 2 tensors and writes 2, where phase 2 reads 3 and writes 2 and phase 1 reads n/S and writes 1.

    Args:
        update: output of the previous sublayer, `[..., d]`.
        prefix: partial sum of the block before `update`, or None if `update` is the block's first term.
        sources, query, key_weight, output_weight, eps, output_eps, impl: as in :func:`mix_norm`.

    Returns:
        (p, y). With `prefix=None`, p is `update` itself.

    Raises:
        TypeError, ValueError: as in :func:`mix`.

    Example:
        >>> import torch
        >>> from tilewise.depth import mix_update
        >>> x, u = torch.randn(5, 64), torch.randn(5, 64)
        >>> p, y = mix_update(u, None, [x], torch.zeros(64), output_weight=torch.ones(64))
        >>> y.shape
        torch.Size([5, 64])
    """
    shape, dtype, device = check_sources(sources)
    check_call(impl, sources[0], eps=eps, output_eps=output_eps)
    check_same("update", update, shape, dtype, device)
    if prefix is not None:
        check_same("prefix", prefix, shape, dtype, device)
    _check_weights(shape[-1], device, query, key_weight=key_weight, output_weight=output_weight)
    if impl == "reference":
        return reference.mix_update(
            update, prefix, sources, query, key_weight, output_weight, eps=eps, output_eps=output_eps
        )
    q, output_eps = fold(query, key_weight, dtype), eps if output_eps is None else output_eps
    return autograd.Mix.apply(eps, output_eps, impl, update, prefix, q, narrowed(output_weight, dtype), *_list(sources))


def scores(
    sources: Sources, queries: Tensor, key_weights: Tensor | None = None, *, eps: float = 1e-6, impl="auto"
) -> Tensor:
    r"""Scores of many queries against the sources: s[l, j] = rstd(v_j) <w_l * g_l, v_j>.

    A source's scores against every later query are known as soon as the source is complete; with them phase 1 reads
    the bank once, not twice (:func:`phase1_from_scores`).

    Args:
        sources, eps, impl: as in :func:`mix`.
        queries: w, `[S, d]`, any S.
        key_weights: g, `[S, d]`, or None.

    Returns:
        `[S, n, ...]` fp32 (fp64 for fp64 sources). Differentiable.

    Raises:
        TypeError, ValueError: as in :func:`mix`.
    """
    shape, dtype, device = check_sources(sources)
    check_call(impl, sources[0], eps=eps)
    _check_queries(shape[-1], device, queries, key_weights)
    if impl == "reference":
        return reference.scores(sources, queries, key_weights, eps=eps)
    return autograd.Scores.apply(eps, impl, fold(queries, key_weights, dtype, own=True), *_list(sources))


def complete(
    update: Tensor,
    prefix: Tensor,
    queries: Tensor,
    key_weights: Tensor | None = None,
    *,
    eps: float = 1e-6,
    impl="auto",
) -> tuple[Tensor, Tensor]:
    r"""Complete a block: b = prefix + update, and the scores of b against all later queries, in one read.

    Args:
        update: output of the block's last sublayer, `[..., d]`.
        prefix: partial sum before it, `[..., d]`.
        queries: w of every later read, `[S, d]`.
        key_weights: g, `[S, d]`, or None.
        eps, impl: as in :func:`mix`.

    Returns:
        (b `[..., d]`, s `[S, ...]` fp32). Stack the s of all sources along axis 1 and give a block's rows to
        :func:`phase1_from_scores`.

    Raises:
        TypeError, ValueError: as in :func:`mix`.
    """
    shape, dtype, device = check_stream("update", update)
    check_call(impl, update, eps=eps)
    check_same("prefix", prefix, shape, dtype, device)
    _check_queries(shape[-1], device, queries, key_weights)
    if impl == "reference":
        return reference.complete(update, prefix, queries, key_weights, eps=eps)
    return autograd.Complete.apply(eps, impl, fold(queries, key_weights, dtype, own=True), update, prefix)


def phase1_from_scores(sources: Sources, s: Tensor, *, impl="auto") -> tuple[Tensor, Tensor]:
    """Phase 1 from known scores `[S, n, ...]`: one pass over the sources, free of any reduction over d.

    Returns:
        (o1, lse) as :func:`phase1`.

    Raises:
        TypeError, ValueError: as in :func:`mix`.
    """
    shape, dtype, device = check_sources(sources)
    check_call(impl, sources[0])
    rows = s.shape[0] if isinstance(s, Tensor) and s.ndim else 1
    check_statistics("s", s, (rows, len(sources), *shape[:-1]), dtype, device)
    if impl == "reference":
        return reference.phase1_from_scores(sources, s)
    return autograd.Combine.apply(impl, s, *_list(sources))


def phase1(
    sources: Sources, queries: Tensor, key_weights: Tensor | None = None, *, eps: float = 1e-6, impl="auto"
) -> tuple[Tensor, Tensor]:
    r"""All queries of a block over the completed sources, read together (Algorithm 1, phase 1).

    .. math:: o1_l = \sum_j \mathrm{softmax}_j(s_l)_j v_j, \qquad \mathrm{lse}_l = \log\sum_j e^{s_{l,j}}

    Args:
        sources: b_0 .. b_{n-1} as in :func:`mix`.
        queries: w_l of the block's sublayers, `[S, d]`, any S.
        key_weights: g_l, `[S, d]`, or None.
        eps: epsilon of the key norm.
        impl: as in :func:`mix`.

    Returns:
        o1 `[S, ..., d]`, normalised, in the sources' dtype, and lse `[S, ...]` in fp32 (fp64 for fp64 sources).
        Differentiable in sources, queries and key_weights, through both outputs; the gradient of the sources is
        summed over the S readers in fp32 before it is rounded once.

    Raises:
        TypeError, ValueError: as in :func:`mix`.

    Example:
        >>> import torch
        >>> from tilewise.depth import phase1
        >>> o1, lse = phase1(torch.randn(2, 5, 64), torch.zeros(4, 64))
        >>> o1.shape, lse.shape
        (torch.Size([4, 5, 64]), torch.Size([4, 5]))
    """
    shape, dtype, device = check_sources(sources)
    check_call(impl, sources[0], eps=eps)
    _check_queries(shape[-1], device, queries, key_weights)
    if impl == "reference":
        return reference.phase1(sources, queries, key_weights, eps=eps)
    return autograd.Phase1.apply(eps, impl, fold(queries, key_weights, dtype, own=True), *_list(sources))


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
    impl="auto",
) -> tuple[Tensor, Tensor]:
    r"""Prefix add, exact online-softmax merge and RMSNorm in one kernel (Algorithm 1, phase 2).

    .. math:: p = \mathrm{prefix} + \mathrm{update}, \quad s_p = \mathrm{rstd}(p)\langle w \odot g, p\rangle, \quad
              h = o_1 + \sigma(s_p - \mathrm{lse})(p - o_1), \quad y = \mathrm{RMSNorm}(h) \odot \mathrm{output\_weight}

    p is rounded to the storage dtype before it serves as a source, so that one-pass, two-phase and sharded runs see
    the same p.

    Args:
        update: output of the previous sublayer, `[..., d]`.
        prefix: partial sum of the block before `update`, or None for the block's second sublayer. The block's first
            sublayer has no partial sum at all: :func:`phase2_first`.
        o1: `o1[i]` of :func:`phase1` for this sublayer, `[..., d]`.
        lse: `lse[i]`, `[...]` fp32 (fp64 for fp64 sources); rounded ones are refused.
        query, key_weight: w and g of this sublayer, `[d]`.
        output_weight: weight of the next sublayer's RMSNorm, `[d]`; None applies no norm, so that y = h.
        eps: epsilon of the key norm.
        output_eps: epsilon of the output norm; None means `eps`.
        impl: as in :func:`mix`.

    Returns:
        (p, y), both `[..., d]`. With `prefix=None`, p is `update` itself.

    Raises:
        TypeError, ValueError: as in :func:`mix`.

    Example:
        >>> import torch
        >>> from tilewise.depth import phase1, phase2
        >>> w = torch.zeros(4, 64)
        >>> o1, lse = phase1([torch.randn(5, 64)], w)
        >>> p, y = phase2(torch.randn(5, 64), None, o1[1], lse[1], w[1], output_weight=torch.ones(64))
        >>> y.shape
        torch.Size([5, 64])
    """
    shape, dtype, device = check_stream("update", update)
    check_call(impl, update, eps=eps, output_eps=output_eps)
    if prefix is not None:
        check_same("prefix", prefix, shape, dtype, device)
    check_same("o1", o1, shape, dtype, device)
    check_statistics("lse", lse, shape[:-1], dtype, device)
    _check_weights(shape[-1], device, query, key_weight=key_weight, output_weight=output_weight)
    if impl == "reference":
        weights = query, key_weight, output_weight
        return reference.phase2(update, prefix, o1, lse, *weights, eps=eps, output_eps=output_eps)
    q, output_eps = fold(query, key_weight, dtype), eps if output_eps is None else output_eps
    return autograd.Phase2.apply(eps, output_eps, impl, update, prefix, o1, lse, q, narrowed(output_weight, dtype))


def phase2_first(o1: Tensor, output_weight: Tensor | None = None, *, output_eps: float = 1e-6, impl="auto") -> Tensor:
    """The first sublayer of a block reads o1 only: y = RMSNorm(o1) * output_weight.

    Args:
        o1: `o1[0]` of :func:`phase1`, `[..., d]`.
        output_weight: `[d]`, or None for y = o1.
        output_eps: epsilon of the norm.
        impl: as in :func:`mix`.

    Returns:
        y `[..., d]`.

    Raises:
        TypeError, ValueError: as in :func:`mix`.
    """
    shape, dtype, device = check_stream("o1", o1)
    check_call(impl, o1)
    check_eps("output_eps", output_eps)
    check_vector("output_weight", output_weight, shape[-1], device)
    if impl == "reference":
        return reference.phase2_first(o1, output_weight, output_eps=output_eps)
    weight = narrowed(output_weight, dtype)
    return autograd.Phase2.apply(output_eps, output_eps, impl, None, None, o1, None, None, weight)[1]
