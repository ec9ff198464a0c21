"""How the any-device path cuts a call: blocks of rows, tiles of keys that a mask leaves, and the scores of a tile.

A block is some query heads of one batch entry times n query rows, in descending order (:mod:`tilewise.band` says why);
a tile is a block times m keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .band import Factor, Terms, Workspace, diagonals, skew, skew_of_keys
from .call import Call
from .dropout import keep

__all__ = ["Block", "Plan", "Tile", "tile_sizes"]


def tile_sizes(call: Call) -> tuple[int, int, int]:
    """(key heads, query rows of a head, keys) of a tile: 2¹⁸ scores, which stay in a CPU's cache; 2²⁴ elsewhere.

    On-key terms are read across their rows, a cache line a key: 256 keys fit a first-level cache (512: 8 % slower).
    """
    heads, group = call.k.shape[1], call.q.shape[1] // call.k.shape[1]
    scores, keys = (2**18, 512) if call.q.device.type == "cpu" else (2**24, 2048)
    if any(port.kind == "key" for port in call.ports):
        keys //= 2
    m = max(1, min(call.k.shape[2], keys))
    n = max(1, min(call.q.shape[2], max(16, 256 // group)))
    chunks = -(-heads // max(1, scores // (group * n * m)))
    return -(-heads // chunks), n, m


@dataclass(frozen=True, eq=False)
class Block:
    """Rows i0 … i1 − 1 (exclusive end, in reading order) of query heads `heads` of batch entry b, and their factors.

    `q` is [heads, n, d], `lefts` one [heads, n, d'] for each of the terms' `queries`; rows descend. `first` is i' of
    the first of them, `shifts` what :meth:`Plan.shifted` gave already.
    """

    b: int
    heads: slice
    key_heads: slice
    i0: int
    i1: int
    first: int
    q: Tensor
    lefts: list[Tensor]
    shifts: dict[int | None, tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    @property
    def rows(self) -> slice:
        return slice(self.i0, self.i1)


@dataclass(frozen=True)
class Tile:
    """Keys j0 … j1 − 1; `at` is the row of the expanded tables that all of it takes, or None in the band.

    In the band, `columns` are the rows of the expanded tables that the tile meets: n + m − 1 of them.
    """

    j0: int
    j1: int
    at: int | None
    columns: slice
    whole: bool

    @property
    def keys(self) -> slice:
        return slice(self.j0, self.j1)


class Plan:
    """What forward and backward share: the blocks, their tiles, and the scores of a tile."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        self.device = call.q.device
        self.hc, self.n, self.m = tile_sizes(call)
        self.group = call.q.shape[1] // call.k.shape[1]
        self.terms = Terms(call, self.dtype, self.n)
        self.work = Workspace(self.dtype, self.device)
        self.k, self.v = call.k.to(self.dtype), call.v.to(self.dtype)
        # Probabilities below e^floor (1e-26, in fp64 1e-215) stand for smaller ones: exp and matrix products are 20 to
        # 200 times slower on subnormal numbers, and no sum with the row's largest P ≥ 1/N sees the difference.
        self.floor = 0.7 * math.log(torch.finfo(self.dtype).tiny)
        self._read_mask()

    def _read_mask(self) -> None:
        """Read which keys the key mask shows, once, on the host; elsewhere reading would stall the device."""
        keys, Tk = self.call.mask.keys, self.call.k.shape[2]
        self.readable = self.device.type == "cpu"
        self.seen_before, self.seen_range = None, [(0, Tk)] * self.call.k.shape[0]
        if keys is not None and self.readable:
            self.seen_before = torch.nn.functional.pad(keys.cumsum(1), (1, 0)).tolist()
            shown = [row.nonzero().flatten() for row in keys]
            self.seen_range = [(int(j[0]), int(j[-1]) + 1) if len(j) else (0, 0) for j in shown]

    def key_ranges(self) -> list[tuple[int, int]] | None:
        """The keys of each batch entry, if besides the window the mask is one range of keys an entry; else None."""
        mask, ranges = self.call.mask, self.seen_range
        if not self.readable or mask.dense is not None or (mask.bounds is not None and mask.bounds.shape[1] != 1):
            return None
        if self.seen_before is not None and any(
            seen[-1] != hi - lo for seen, (lo, hi) in zip(self.seen_before, ranges, strict=True)
        ):
            return None
        if mask.bounds is None:
            return ranges
        bounds = mask.bounds[:, 0].expand(len(ranges), 2).tolist()
        return [(max(a, lo), min(b, hi)) for (a, b), (lo, hi) in zip(ranges, bounds, strict=True)]

    def window(self, i0: int, i1: int, lo: int, hi: int) -> tuple[int, int]:
        """The part of the keys lo … hi − 1 that the window shows to any of the rows i0 … i1 − 1."""
        mask, offset = self.call.mask, self.call.offset
        return max(lo, i0 + offset - mask.left), min(hi, i1 + offset + mask.right)

    def take(self, x: Tensor, b: int, heads: slice, rows: slice) -> Tensor:
        """Rows of x [B, H, T, …] in descending order, contiguous and in the dtype of the computation."""
        return x[b, heads, rows].flip(1).to(self.dtype).contiguous()

    def planes(self) -> Iterator[tuple[int, slice]]:
        """(batch entry, key heads) of the tiles that share rows of dK and dV."""
        B, Hk = self.call.k.shape[:2]
        for b in range(B):
            for g in range(0, Hk, self.hc):
                yield b, slice(g, min(g + self.hc, Hk))

    def blocks(self, b: int, key_heads: slice) -> Iterator[Block]:
        """The blocks of some planes."""
        heads = slice(key_heads.start * self.group, key_heads.stop * self.group)
        Tq = self.call.q.shape[2]
        for i0 in range(0, Tq, self.n):
            yield self._block(b, heads, key_heads, i0, min(i0 + self.n, Tq))

    def _block(self, b: int, heads: slice, key_heads: slice, i0: int, i1: int) -> Block:
        rows = slice(i0, i1)
        q = self.take(self.call.q, b, heads, rows)
        lefts = []
        for factor in self.terms.queries:
            left = factor.port.left
            left = q if left is None else self.take(left, b, heads, rows).view(*q.shape[:2], -1)
            lefts.append(left * factor.scale)
        return Block(b, heads, key_heads, i0, i1, self.call.q.shape[2] - i1, q, lefts)

    def tiles(self, block: Block) -> Iterator[Tile]:
        """The tiles of a block that have a visible key, so far as window, bounds and key mask say without an N × N."""
        mask, n, offset = self.call.mask, block.i1 - block.i0, self.call.offset
        lo, hi = self.window(block.i0, block.i1, *self.seen_range[block.b])
        # Keys inner_lo … inner_hi − 1 are shown to every row.
        inner_lo, inner_hi = block.i1 - 1 + offset - mask.left, block.i0 + offset + mask.right + 1
        if mask.bounds is not None and self.readable:
            rows = mask.bounds[block.b if mask.bounds.shape[0] > 1 else 0]
            rows = rows if rows.shape[0] == 1 else rows[block.rows]
            (some, least), (far, most) = rows.amin(0).tolist(), rows.amax(0).tolist()
            lo, hi, inner_lo, inner_hi = max(lo, some), min(hi, most), max(inner_lo, far), min(inner_hi, least)
        certain = mask.dense is None and (self.readable or (mask.bounds is None and mask.keys is None))
        for start, stop, at in self.terms.zones(block.first, block.first + n, lo, hi):
            for j0 in range(start, stop, self.m):
                j1 = min(j0 + self.m, stop)
                whole = certain and inner_lo <= j0 and j1 <= inner_hi
                if self.seen_before is not None:
                    seen = self.seen_before[block.b][j1] - self.seen_before[block.b][j0]
                    if seen == 0:
                        continue
                    whole = whole and seen == j1 - j0
                w = block.first + j0 - self.terms.base
                yield Tile(j0, j1, at, slice(w, w + n + j1 - j0 - 1), whole)

    def seen(self, block: Block, tile: Tile) -> Tensor:
        """Whether the mask shows the key, as [1 or heads, 1 or n, m]; rows descend."""
        mask = self.call.mask
        j = torch.arange(tile.j0, tile.j1, device=self.device)
        delta = torch.arange(block.i1 - 1, block.i0 - 1, -1, device=self.device)[:, None] + self.call.offset - j
        seen = ((delta <= mask.left) & (delta >= -mask.right))[None]
        if mask.bounds is not None:
            bounds = mask.bounds[block.b if mask.bounds.shape[0] > 1 else 0]
            bounds = bounds if bounds.shape[0] == 1 else bounds[block.rows].flip(0)
            seen = seen & (j >= bounds[:, :1]) & (j < bounds[:, 1:])
        if mask.keys is not None:
            seen = seen & mask.keys[block.b, tile.keys]
        if mask.dense is not None:
            dense = mask.dense[block.b if mask.dense.shape[0] > 1 else 0]
            dense = dense if dense.shape[0] == 1 else dense[block.heads]
            seen = seen & dense[:, block.rows, tile.keys].flip(1)
        return seen

    def kept(self, block: Block, tile: Tile) -> Tensor:
        """Dropout's factor on P: 0 or 1 / (1 − p), [heads, n, m]."""
        H = self.call.q.shape[1]
        heads = torch.arange(block.heads.start, block.heads.stop, device=self.device) + block.b * H
        rows = torch.arange(block.i1 - 1, block.i0 - 1, -1, device=self.device)
        kept = keep(self.call.seed, heads, rows, (tile.j0, tile.j1), self.call.dropout_p)
        return kept.to(self.dtype) / (1.0 - self.call.dropout_p)

    def shifted(self, block: Block, at: int | None) -> tuple[Tensor, Tensor | None]:
        """(τ(q + C), c): in a saturated zone the terms are C, added to the query, and c [heads, n, 1], added to S."""
        if at in block.shifts:
            return block.shifts[at]
        heads, q, c = block.heads, block.q, None
        if at is not None:
            for factor in self.terms.keys:
                q = q + factor.heads(factor.E, heads)[:, at : at + 1]
            if self.terms.bias is not None:
                c = self.terms.bias[heads, at, None, None]
            for factor, left in zip(self.terms.queries, block.lefts, strict=True):
                part = factor.constant(left, heads, at)
                c = part if c is None else c + part
        block.shifts[at] = q * self.call.scale, c
        return block.shifts[at]

    def scores(self, block: Block, tile: Tile, minus: Tensor | None, seen: Tensor | None, name: str = "S") -> Tensor:
        """S − minus of a tile, [heads, n, m], in the workspace's buffer `name`; −∞ where the mask hides the key.

        `minus` is [heads, n, 1]. The sum with c is rounded as if nothing were subtracted: from 10⁸ on, other roundings
        in the backward than in the forward would leave S − lse at hundreds, and its exp without bounds.
        """
        heads, terms, k = block.heads, self.terms, self.k[block.b, block.key_heads, tile.keys]
        q, c = self.shifted(block, tile.at)
        S = self.product(name, q, k.mT)
        if tile.at is None:
            if terms.queries:
                S.add_(skew(self.projected(terms.queries, block.lefts, heads, tile.columns), S.shape[2]))
            if terms.bias is not None:
                S.add_(diagonals(terms.bias[heads], tile.columns.start, *S.shape[1:]))
            if terms.keys:
                left = self.repeated(k) * self.call.scale
                G = self.projected(terms.keys, [left] * len(terms.keys), heads, tile.columns)
                S.add_(skew_of_keys(G, S.shape[1]))
        if c is not None:
            S.add_(c)
        if minus is not None:
            S.sub_(minus)
        # Not a sum with −∞: a hidden score may have overflowed.
        return S if seen is None else torch.where(seen, S, S.new_full((), float("-inf")), out=S)

    def product(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """left·right in the workspace: [heads, n, ·] times [key heads, ·, m]."""
        groups = right.shape[0]
        out = self.work(name, groups, left.shape[1] * self.group, right.shape[-1])
        torch.bmm(self.by_group(left), right, out=out)
        return out.view(groups * self.group, -1, right.shape[-1])

    def projected(self, factors: list[Factor], lefts: list[Tensor], heads: slice, columns: slice) -> Tensor:
        """G = Σ left·Eᵀ over the factors, [heads, rows, columns], in the workspace."""
        G = self.work("G", *lefts[0].shape[:2], columns.stop - columns.start)
        for index, (factor, rows) in enumerate(zip(factors, lefts, strict=True)):
            left, E = factor.project(rows, heads, columns)
            out = G.view(left.shape[0], -1, G.shape[-1])
            if index == 0:
                torch.bmm(left, E, out=out)
            else:
                out.baddbmm_(left, E)
        return G

    def columns(self, tile: Tile) -> slice:
        """The rows of the expanded tables that a tile takes."""
        return tile.columns if tile.at is None else slice(tile.at, tile.at + 1)

    def by_offset(self, x: Tensor, tile: Tile) -> tuple[Tensor, slice]:
        """A tile's entries [heads, n, m] added up by offset: [heads, n, columns], and the columns they belong to."""
        if tile.at is not None:
            return x.sum(-1, keepdim=True), self.columns(tile)
        D = self.work("D", *x.shape[:2], tile.columns.stop - tile.columns.start).zero_()
        skew(D, x.shape[2]).copy_(x)
        return D, tile.columns

    def repeated(self, x: Tensor) -> Tensor:
        """[key heads, …] as [query heads, …]."""
        return x if self.group == 1 else x.repeat_interleave(self.group, 0)

    def by_group(self, x: Tensor) -> Tensor:
        """[query heads, rows, …] as [key heads, rows of all its queries, …]."""
        return x.view(x.shape[0] // self.group, -1, x.shape[-1])
