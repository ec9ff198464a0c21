"""The mathematics: what a relative term adds to an attention score, one small class an interaction.

With δ = i − j and φ a row map (:mod:`tilewise.rows`), attention computes

    S_ij = τ · (q_i·k_j + Σ left_i·A[φ(δ)] + Σ k_j·C[φ(δ)]) + Σ gate_i · b[φ(δ)]
    O_i  = Σ_j P_ij · (v_j + Σ V[φ(δ)]),   P = softmax(S)

:class:`OnQuery` is A, :class:`OnKey` is C, :class:`Scalar` is b (added after the scale τ), :class:`OnValue` is V, and
:class:`QueryBias` adds u_h·k_j. An offset without a row adds 0. The constructors at the end carry the names of the
mechanisms; what they return goes into ``attention(..., terms=...)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .rows import RowMap, as_integer, clipped, deberta_buckets, identity, parse, t5_buckets, windowed

__all__ = [
    "T5",
    "VITS",
    "ALiBi",
    "DeBERTa",
    "DeBERTaV1",
    "Inkling",
    "MPNet",
    "OnKey",
    "OnQuery",
    "OnValue",
    "QueryBias",
    "Scalar",
    "Shaw",
    "Term",
    "TransformerXL",
    "WavLM",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Scalar:
    """b: adds gate_i · table[h, φ(i − j)] to the scaled score. The gate is 1 unless given.

    Attributes:
        table: [H, R] or [R] (shared by the heads), any floating dtype.
        rows: φ, of R rows.
        gate: [B, H, Tq] or None. WavLM gates its bias by the query.
    """

    table: Tensor
    rows: RowMap
    gate: Tensor | None = None

    def __post_init__(self) -> None:
        _check_table(self, dims=(1, 2), shape="[H, R] or [R]")


@dataclass(frozen=True, eq=False)
class OnQuery:
    """A: adds τ · (left_i + bias_h) · table[h, φ(i − j)], where left is the query unless given.

    Attributes:
        table: [H, R, d'] or [R, d'] (shared by the heads).
        rows: φ, of R rows.
        left: [B, H, Tq, d'] or None for the query itself (then d' = d).
        bias: [H, d'] or None. Transformer-XL's v.
    """

    table: Tensor
    rows: RowMap
    left: Tensor | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        _check_table(self, dims=(2, 3), shape="[H, R, d] or [R, d]")


@dataclass(frozen=True, eq=False)
class OnKey:
    """C: adds τ · k_j · table[h, φ(i − j)]; table is [H, R, d] or [R, d], H counting *query* heads."""

    table: Tensor
    rows: RowMap

    def __post_init__(self) -> None:
        _check_table(self, dims=(2, 3), shape="[H, R, d] or [R, d]")


@dataclass(frozen=True, eq=False)
class OnValue:
    """V: adds Σ_j P_ij · table[h, φ(i − j)] to the output; table is [H, R, d_v] or [R, d_v]."""

    table: Tensor
    rows: RowMap

    def __post_init__(self) -> None:
        _check_table(self, dims=(2, 3), shape="[H, R, d_v] or [R, d_v]")


@dataclass(frozen=True, eq=False)
class QueryBias:
    """u: adds τ · bias_h · k_j; bias is [H, d]. Transformer-XL's content bias."""

    bias: Tensor

    def __post_init__(self) -> None:
        _require_dim("QueryBias.bias", self.bias, 2, "[H, d]")


Term = Scalar | OnQuery | OnKey | OnValue | QueryBias


def T5(weight: Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> Scalar:
    """T5's bias from its embedding ``relative_attention_bias.weight`` [num_buckets, H]. T5's scale is 1.0.

    Source: Raffel et al. 2020 (arXiv 1910.10683); transformers' ``T5Attention``. UMT5 and mT5 have the same form.

    Example:
        >>> T5(torch.zeros(32, 6)).table.shape
        torch.Size([6, 32])
    """
    _require_dim("weight", weight, 2, "[num_buckets, H]")
    return Scalar(weight.t(), t5_buckets(weight.shape[0], max_distance, bidirectional))


def MPNet(weight: Tensor, *, max_distance: int = 128) -> Scalar:
    """MPNet's bias: T5's bidirectional buckets, added after the scale 1/√d. Source: Song et al. 2020 (2004.09297)."""
    return T5(weight, bidirectional=True, max_distance=max_distance)


def ALiBi(slopes: Tensor, reach: int) -> Scalar:
    """−slope_h · |i − j|, for offsets up to `reach` (the larger length − 1). Source: Press et al. 2022 (2108.12409).

    The table stays in the slopes' dtype: give them in fp32, since fp16 distances lose units beyond 2,048.

    Example:
        >>> ALiBi(torch.tensor([0.5]), reach=2).table.tolist()
        [[-1.0, -0.5, -0.0, -0.5, -1.0]]
    """
    _require_dim("slopes", slopes, 1, "[H]")
    reach = as_integer("reach", reach)
    if reach < 0:
        raise ValueError(f"reach is {reach}; expected a number ≥ 0")
    distance = torch.arange(-reach, reach + 1, device=slopes.device).abs().to(slopes.dtype)
    return Scalar(-slopes[:, None] * distance, identity(reach))


def Shaw(keys: Tensor, values: Tensor | None = None, *, left: int, right: int) -> tuple[Term, ...]:
    """Shaw's clipped rows: a_ij = keys[clip(j − i, −left, right) + left], and `values` likewise on the output side.

    Source: Shaw et al. 2018 (arXiv 1803.02155). Wav2Vec2-BERT and SeamlessM4T v2: left = 64, right = 8.

    Args:
        keys: [left + right + 1, d] or [H, left + right + 1, d]; row 0 is j − i ≤ −left.
        values: the same shape with d_v, or None.

    Example:
        >>> [type(t).__name__ for t in Shaw(torch.zeros(9, 64), torch.zeros(9, 64), left=4, right=4)]
        ['OnQuery', 'OnValue']
    """
    left, right = as_integer("left", left), as_integer("right", right)
    if left + right < 0:
        raise ValueError(f"left is {left} and right {right}; expected left + right ≥ 0")
    rows = clipped(-right, left, descending=True)
    return (OnQuery(keys, rows), *(() if values is None else (OnValue(values, rows),)))


def VITS(keys: Tensor, values: Tensor, *, window: int) -> tuple[Term, ...]:
    """VITS' window: as Shaw within |j − i| ≤ window, and nothing (not the clipped row) beyond.

    Source: Kim et al. 2021 (arXiv 2106.06103); ``emb_rel_k`` and ``emb_rel_v`` [1 or H, 2·window + 1, d].
    """
    window = as_integer("window", window)
    if window < 0:
        raise ValueError(f"window is {window}; expected a number ≥ 0")
    rows = windowed(-window, window, descending=True)
    return OnQuery(keys, rows), OnValue(values, rows)


def TransformerXL(table: Tensor, u: Tensor, v: Tensor, *, descending: bool = True) -> tuple[Term, ...]:
    """Transformer-XL: S_ij = τ · ((q_i + u_h)·k_j + (q_i + v_h)·table[h, φ(i − j)]), one row an offset.

    Source: Dai et al. 2019 (arXiv 1901.02860); NeMo's ``RelPositionMultiHeadAttention``, whose `table` is
    ``linear_pos(pos_emb)`` per head.

    Args:
        table: [H, 2·reach + 1, d] or [2·reach + 1, d], from offset +reach down to −reach (`descending`, as the
            Conformers store it) or upwards. reach ≥ the largest offset met.
        u, v: [H, d], the content and position biases.

    Raises:
        ValueError: an even number of rows.

    Example:
        >>> [type(t).__name__ for t in TransformerXL(torch.zeros(2, 7, 8), torch.zeros(2, 8), torch.zeros(2, 8))]
        ['QueryBias', 'OnQuery']
    """
    for name, value in (("table", table), ("u", u), ("v", v)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; expected a tensor")
    rows = table.shape[-2] if table.dim() >= 2 else 0
    if rows % 2 != 1:
        raise ValueError(f"table has {rows} rows; expected an odd number, 2·reach + 1")
    return QueryBias(u), OnQuery(table, identity((rows - 1) // 2, descending), bias=v)


def DeBERTa(
    pos_key: Tensor | None, pos_query: Tensor | None, *, position_buckets: int, max_relative_positions: int
) -> tuple[Term, ...]:
    """DeBERTa v2/v3: c2p = q_i·pos_key[slot], p2c = k_j·pos_query[slot]; either may be None.

    The model's scale is 1/√(d · (1 + number of these terms)). Source: He et al. 2021 (arXiv 2006.03654, 2111.09543);
    transformers' ``deberta_v2``. Tables are [H, 2·span, d], span = position_buckets (256 in v3) or, where that is ≤ 0,
    max_relative_positions.

    Example:
        >>> t = torch.zeros(12, 512, 64)
        >>> [type(x).__name__ for x in DeBERTa(t, t, position_buckets=256, max_relative_positions=512)]
        ['OnQuery', 'OnKey']
    """
    rows = deberta_buckets(position_buckets, max_relative_positions)
    c2p = () if pos_key is None else (OnQuery(pos_key, rows),)
    p2c = () if pos_query is None else (OnKey(pos_query, rows),)
    return c2p + p2c


def DeBERTaV1(
    pos_key: Tensor | None, pos_query: Tensor | None, *, max_relative_positions: int = 512
) -> tuple[Term, ...]:
    """DeBERTa v1: as v2 without buckets, tables [H, 2·max_relative_positions, d]."""
    return DeBERTa(pos_key, pos_query, position_buckets=-1, max_relative_positions=max_relative_positions)


def WavLM(weight: Tensor, gate: Tensor, *, max_distance: int = 800) -> Scalar:
    """WavLM's gated bias: gate[b, h, i] · weight[bucket, h]; weight is [320, H] (arXiv 2110.13900)."""
    return Scalar(weight.t(), t5_buckets(weight.shape[0], max_distance), gate=gate)


def Inkling(table: Tensor, left: Tensor) -> OnQuery:
    """Inkling's causal window: left_i · table[i − j] for 0 ≤ i − j < R, nothing elsewhere; table is [R, d'].

    Source: transformers' ``inkling``; `left` [B, H, Tq, d'] is the model's own projection (d' = 16 there).
    """
    if not isinstance(table, Tensor):
        raise TypeError(f"table is a {type(table).__name__}; expected a tensor [R, d']")
    if table.dim() < 2 or table.shape[-2] < 1:
        raise ValueError(f"table has shape {tuple(table.shape)}; expected [R, d'] with at least one row")
    if not isinstance(left, Tensor):
        raise TypeError(f"left is a {type(left).__name__}; expected a tensor [B, H, Tq, d']")
    return OnQuery(table, windowed(0, table.shape[-2] - 1), left=left)


@dataclass(frozen=True, eq=False)
class Port:
    """One lowered term, as the implementations see it: kind, φ, table [1 or H, R(, d)] and its left factor.

    `left` is [B, H, Tq, d'] for ``query`` (None: the query), [B, H, Tq] for ``scalar`` (None: 1). Biases that
    :func:`lower` leaves to the kernels are a ``query`` port's `content`, u, and `bias`, v, [H or 1, d] each.
    """

    kind: str
    rows: RowMap
    table: Tensor
    left: Tensor | None = None
    content: Tensor | None = None
    bias: Tensor | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that hold tensors, in the order of their gradients."""
        return tuple(n for n in ("table", "left", "content", "bias") if getattr(self, n) is not None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.names)

    @property
    def biased(self) -> bool:
        """Whether a bias is left to the kernels."""
        return self.content is not None or self.bias is not None


def flatten(terms: Term | Iterable) -> tuple[Term, ...]:
    """The terms of a term, or of any nesting of iterables of terms.

    Raises:
        TypeError: something in it is not a term.
    """
    if isinstance(terms, Term):
        return (terms,)
    if not isinstance(terms, (tuple, list)):
        if isinstance(terms, (str, Tensor)) or not isinstance(terms, Iterable):
            raise TypeError(
                f"terms has a {type(terms).__name__}; expected Scalar, OnQuery, OnKey, OnValue or QueryBias"
            )
        terms = tuple(terms)
    return tuple(term for part in terms for term in flatten(part))


def lower(q: Tensor, terms: tuple[Term, ...], biases: bool = False) -> tuple[Tensor, list[Port]]:
    """Fold the biases into the query and into left factors: (query of the content product, ports).

    `biases`: where the terms are Transformer-XL's and nothing else, leave them to the kernels: no sum with q is formed.
    """
    if biases and (port := _transformer_xl(terms)) is not None:
        return q, [port]
    ports, content = [], q
    for term in terms:
        match term:
            case QueryBias():
                content = content + term.bias.to(q.dtype)[:, None, :]
            case Scalar():
                ports.append(
                    Port("scalar", term.rows, term.table if term.table.dim() == 2 else term.table[None], term.gate)
                )
            case OnQuery():
                left = q if term.left is None else term.left
                biased = None if term.bias is None else left + term.bias.to(left.dtype)[:, None, :]
                # A query that a QueryBias changed is no longer the left factor: hand over the original.
                own = term.left is not None or any(isinstance(t, QueryBias) for t in terms)
                ports.append(
                    Port(
                        "query", term.rows, _headed(term.table), biased if biased is not None else left if own else None
                    )
                )
            case OnKey():
                ports.append(Port("key", term.rows, _headed(term.table)))
            case OnValue():
                ports.append(Port("value", term.rows, _headed(term.table)))
    return content, ports


def _transformer_xl(terms: tuple[Term, ...]) -> Port | None:
    """One port for at most one u and an identity-mapped table that the query multiplies; None for other terms."""
    biases = [t for t in terms if isinstance(t, QueryBias)]
    tables = [t for t in terms if not isinstance(t, QueryBias)]
    if len(biases) > 1 or len(tables) != 1 or not isinstance(tables[0], OnQuery):
        return None
    term, content = tables[0], biases[0].bias if biases else None
    if term.rows.kind != "identity" or term.left is not None:
        return None
    return Port("query", term.rows, _headed(term.table), None, content, term.bias)


_MARKS = {"left": "+", "content": "u", "bias": "v"}


def spec_of(ports: list[Port]) -> str:
    """Kinds and maps of the ports as text; with their tensors, :func:`ports_of` gives the ports back."""
    return ";".join(f"{p.kind}:{''.join(_MARKS[n] for n in p.names[1:])}={p.rows.spec}" for p in ports)


def ports_of(spec: str, tensors: list[Tensor]) -> list[Port]:
    """Inverse of :func:`spec_of`."""
    rest, ports = iter(tensors), []
    for part in spec.split(";") if spec else []:
        kind, rows = part.split("=", 1)
        kind, marks = kind.split(":")
        table = next(rest)
        rows = parse(rows, table.shape[-1 if kind == "scalar" else -2])
        ports.append(Port(kind, rows, table, **{n: next(rest) for n, mark in _MARKS.items() if mark in marks}))
    return ports


def _headed(table: Tensor) -> Tensor:
    return table if table.dim() == 3 else table[None]


def _require_dim(name: str, tensor: Tensor, dim: int, shape: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; expected a tensor {shape}")
    if tensor.dim() != dim:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")


def _check_table(term: Scalar | OnQuery | OnKey | OnValue, dims: tuple[int, int], shape: str) -> None:
    table, name = term.table, type(term).__name__
    if not isinstance(term.rows, RowMap):
        raise TypeError(f"{name}.rows is a {type(term.rows).__name__}; expected a RowMap (tilewise.rows)")
    if not isinstance(table, Tensor):
        raise TypeError(f"{name}.table is a {type(table).__name__}; expected a tensor {shape}")
    if table.dim() not in dims:
        raise ValueError(f"{name}.table has shape {tuple(table.shape)}; expected {shape}")
    if not table.dtype.is_floating_point:
        raise TypeError(f"{name}.table is {table.dtype}; expected a floating dtype")
    for part in ("left", "bias", "gate"):
        factor = getattr(term, part, None)
        if factor is not None and not isinstance(factor, Tensor):
            raise TypeError(f"{name}.{part} is a {type(factor).__name__}; expected a tensor or None")
    rows = table.shape[-1] if isinstance(term, Scalar) else table.shape[-2]
    if term.rows.kind == "identity" and rows != term.rows.size:
        raise ValueError(f"{name}.table has {rows} rows; expected {term.rows.size}, one for each offset of its map")
    if rows < max(term.rows.size, 1):
        raise ValueError(
            f"{name}.table has {rows} rows; expected at least {term.rows.size}, which its map {term.rows.spec} needs"
        )
