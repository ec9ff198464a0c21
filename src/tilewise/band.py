"""Relative terms in a block of rows: tables expanded over offsets once a call, strided views in place of gathers.

Rows run backwards within a block. With i' = Tq − 1 − i the offset is δ = top − w, where w = i' + j and
top = Tq − 1 + offset, and a tile whose first element has w = w₀ meets w₀ … w₀ + n + m − 2: element (a, c) takes
w₀ + a + c. So an expanded scalar table is read through a view of strides (1, 1), and a projection G = left·Eᵀ
[n, n + m − 1] through one of row stride n + m: a score tile is a view of G, dG receives dS through the same view, and
no two elements share an entry. Where every row is saturated a term is one constant a row, or a shifted query.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .call import Call
from .mask import UNBOUNDED
from .terms import Port

__all__ = ["Factor", "Terms", "Workspace", "diagonals", "skew", "skew_of_keys"]

NARROW = 64
"""A saturated zone of fewer columns joins the band: two small products cost more than one larger."""


class Workspace:
    """Buffers by name, allocated at their largest size and viewed at the size asked for; never initialised."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._empty = torch.empty(0, dtype=dtype, device=device)
        self._held: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        count = 1
        for size in shape:
            count *= size
        held = self._held.get(name)
        if held is None or held.numel() < count:
            held = self._held[name] = self._empty.new_empty(count)
        return held[:count].view(shape)


def diagonals(bias: Tensor, w: int, n: int, m: int) -> Tensor:
    """[h, n, m] view of an expanded scalar table [h, W]: element (a, c) is bias[w + a + c]."""
    return bias.as_strided((bias.shape[0], n, m), (bias.stride(0), 1, 1), bias.storage_offset() + w)


def skew(G: Tensor, m: int) -> Tensor:
    """[h, n, m] view of contiguous G [h, n, n + m − 1]: element (a, c) is G[a, a + c]."""
    h, n, width = G.shape
    return G.as_strided((h, n, m), (n * width, width + 1, 1), G.storage_offset())


def skew_of_keys(G: Tensor, n: int) -> Tensor:
    """[h, n, m] view of contiguous G [h, m, n + m − 1], a row for each key: element (a, c) is G[c, a + c]."""
    h, m, width = G.shape
    return G.as_strided((h, n, m), (m * width, 1, width + 1), G.storage_offset())


@dataclass(eq=False)
class Factor:
    """One port's table over the offsets of the band, E [h, W, d'] (h = 1 where heads share it), and its gradient.

    A scalar table has d' = 1. `scale` multiplies the left factor before it meets E.
    """

    port: Port
    scale: float
    E: Tensor
    rows: Tensor
    dE: Tensor | None = None

    def heads(self, x: Tensor, heads: slice) -> Tensor:
        """The part of E or dE that belongs to a range of query heads."""
        return x if x.shape[0] == 1 else x[heads]

    def project(self, left: Tensor, heads: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """(left, Eᵀ) as the two operands of bmm: heads that share a table are rows of one product."""
        E = self.heads(self.E, heads)[:, columns]
        return left.reshape(E.shape[0], -1, left.shape[-1]), E.mT

    def constant(self, left: Tensor, heads: slice, at: int) -> Tensor:
        """left·E[at] as [heads, n, 1]."""
        return torch.bmm(*self.project(left, heads, slice(at, at + 1))).view(left.shape[0], -1, 1)

    def accumulate(self, dG: Tensor, left: Tensor, heads: slice, columns: slice) -> None:
        """dE += dGᵀ·left over some columns; dG is [heads, rows, columns], `left` [heads, rows, d']."""
        dE = self.heads(self.dE, heads)[:, columns]
        h = dE.shape[0]
        dE.add_(torch.bmm(dG.reshape(h, -1, dG.shape[-1]).mT, left.reshape(h, -1, left.shape[-1])))

    def back(self, dG: Tensor, heads: slice, columns: slice) -> Tensor:
        """The left factor's gradient, dG·E, as [heads, rows, d']."""
        E = self.heads(self.E, heads)[:, columns]
        return torch.bmm(dG.reshape(E.shape[0], -1, dG.shape[-1]), E).view(*dG.shape[:2], -1)

    def fold(self, out: Tensor) -> None:
        """Add up dE's offsets by table row, in a fixed order, into the gradient `out` [h, R(, d')] of the table."""
        dE = self.dE if self.dE.shape[0] == out.shape[0] else self.dE.sum(0, keepdim=True)
        met = (self.rows >= 0).nonzero().flatten()
        rows, dE = self.rows[met], dE[:, met].view(dE.shape[0], len(met), *out.shape[2:])
        total = torch.zeros(out.shape, dtype=dE.dtype, device=dE.device)
        if out.device.type == "cpu":
            total.index_add_(1, rows, dE)
        else:
            # index_add_ adds by atomics on a GPU, in any order; this sorts first.
            total.transpose(0, 1).index_put_((rows,), dE.transpose(0, 1), accumulate=True)
        out.copy_(total)


@dataclass(eq=False)
class Terms:
    """The ports of a call, expanded. w ≤ `first` and w ≥ `last` are saturated for every port; E starts at w = `base`.

    Attributes:
        queries: what multiplies a vector of the query's row, in S: on-query terms and gated scalars.
        scalars: ungated scalar terms; `bias` [H, W] is their sum.
        keys, values: on-key terms, on-value terms.
    """

    call: Call
    dtype: torch.dtype
    block: int
    first: int = 0
    last: int = 0
    base: int = 0
    queries: list[Factor] = field(default_factory=list)
    scalars: list[Factor] = field(default_factory=list)
    keys: list[Factor] = field(default_factory=list)
    values: list[Factor] = field(default_factory=list)
    bias: Tensor | None = None
    dbias: Tensor | None = None

    def __post_init__(self) -> None:
        call = self.call
        H, Tq, Tk = call.q.shape[1], call.q.shape[2], call.k.shape[2]
        top, end = Tq - 1 + call.offset, Tq + Tk - 1
        ends = [port.rows.saturation for port in call.ports]
        if None in ends:
            self.first, self.last = -1, end
        else:
            self.first = min([end - 1, *(top - hi for _, hi in ends)])
            self.last = max([0, *(top - lo for lo, _ in ends)])
        margin = self.block + NARROW
        self.base = max(0, self.first - margin)
        stop = min(end, self.last + margin + 1)
        for port in call.ports:
            rows = port.rows.span(top - stop + 1, top - self.base).flip(0).to(call.q.device, torch.int64)
            table = port.table if port.table.dim() == 3 else port.table[..., None]
            E = table.index_select(1, rows.clamp(min=0)).to(self.dtype)
            if bool((port.rows.span(top - stop + 1, top - self.base) < 0).any()):
                E = E.masked_fill_((rows < 0)[:, None], 0.0)
            gated = port.kind == "scalar" and port.left is not None
            kind = "queries" if gated or port.kind == "query" else {"key": "keys", "value": "values"}.get(port.kind)
            scale = 1.0 if port.kind in ("scalar", "value") else call.scale
            getattr(self, kind or "scalars").append(Factor(port, scale, E, rows))
        if self.scalars:
            self.bias = sum(factor.E[..., 0] for factor in self.scalars).expand(H, -1).contiguous()

    @property
    def factors(self) -> list[Factor]:
        """One a port, in the order of the call's ports."""
        by_port = {id(f.port): f for group in (self.queries, self.scalars, self.keys, self.values) for f in group}
        return [by_port[id(port)] for port in self.call.ports]

    def all_offsets(self) -> Tensor | None:
        """Scalar terms and the mask's window as one vector [H or 1, Tq + Tk − 1] over every w; None if it is all 0."""
        call, mask = self.call, self.call.mask
        end = call.q.shape[2] + call.k.shape[2] - 1
        bias = None
        if self.bias is not None:
            after = end - self.base - self.bias.shape[1]
            head = self.bias[:, self.first - self.base, None].expand(-1, self.base) if self.base else self.bias[:, :0]
            tail = self.bias[:, self.last - self.base, None].expand(-1, after) if after else self.bias[:, :0]
            bias = torch.cat((head, self.bias, tail), 1)
        if mask.left < UNBOUNDED or mask.right < UNBOUNDED:
            delta = call.q.shape[2] - 1 + call.offset - torch.arange(end, device=call.q.device)
            bias = torch.zeros(1, end, dtype=self.dtype, device=delta.device) if bias is None else bias
            bias = bias.masked_fill((delta > mask.left) | (delta < -mask.right), float("-inf"))
        return bias

    def zones(self, i0: int, i1: int, lo: int, hi: int) -> list[tuple[int, int, int | None]]:
        """Split the columns lo … hi − 1 of the rows i' = i0 … i1 − 1: (start, stop, row of E; None in the band)."""
        head = min(max(self.first - i1 + 2, lo), hi)
        tail = min(max(self.last - i0, head), hi)
        if tail > head:
            head = head if head - lo >= NARROW else lo
            tail = tail if hi - tail >= NARROW else hi
        parts = ((lo, head, self.first - self.base), (head, tail, None), (tail, hi, self.last - self.base))
        return [part for part in parts if part[1] > part[0]]

    def zero_gradients(self, need: list[bool]) -> None:
        """Buffers for the gradients of the tables asked for (`need` has one entry a factor)."""
        for factor, wanted in zip(self.factors, need, strict=True):
            if wanted and factor not in self.scalars:
                factor.dE = torch.zeros_like(factor.E)
            elif wanted and self.dbias is None:
                self.dbias = torch.zeros_like(self.bias)

    def fold(self, factor: Factor, out: Tensor) -> None:
        """The gradient of the factor's table."""
        if factor in self.scalars:
            factor.dE = self.dbias[..., None]
            out = out[..., None]
        elif out.dim() == 2:
            out = out[..., None]
        factor.fold(out)
