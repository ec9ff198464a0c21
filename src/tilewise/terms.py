"""The mathematics: what a relative term adds to an attention score, one small class an interaction.

With δ = i − j and φ a row map (:mod:`tilewise.rows`), attention computes

    S_ij = τ · (q_i·k_j + Σ left_i·A[φ(δ)] + Σ k_j·C[φ(δ)]) + Σ gate_i · b[φ(δ)]
    O_i  = Σ_j P_ij · (v_j + Σ V[φ(δ)]),   P = softmax(S)

:class:`OnQuery` is A, :class:`OnKey` is C, :class:`Scalar` is b (added after the scale τ), :class:`OnValue` is V, and
:class:`QueryBias` adds u_h·k_j. An offset without a row adds 0. The mechanisms' own
constructors (:mod:`tilewise.mechanisms`) return these; they go into ``attention(..., terms=...)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from .rows import RowMap, parse

__all__ = ["OnKey", "OnQuery", "OnValue", "QueryBias", "Scalar", "Term"]


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
        require_dim("QueryBias.bias", self.bias, 2, "[H, d]")


Term = Scalar | OnQuery | OnKey | OnValue | QueryBias


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


def require_dim(name: str, tensor: Tensor, dim: int, shape: str) -> None:
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
