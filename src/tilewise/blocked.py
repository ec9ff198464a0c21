"""The exact path for any device: tiles of S = QKᵀ + terms in linear memory, forward and backward, bitwise repeatable.

A block is some query heads of one batch entry times n query rows, in descending order (:mod:`tilewise.band` says why);
a tile is a block times m keys. Forward keeps the running maximum and sum of each row; backward recomputes P from lse:
Δ = rowsum(dO ∘ O) − dlse, dS = P ∘ (dO·Vᵀ − Δ), dQ = τ dS·K, dK = τ dSᵀ·Q, dV = Pᵀ·dO.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .band import Factor, Terms, Workspace, diagonals, skew, skew_of_keys
from .call import Call
from .dropout import keep
from .mask import UNBOUNDED

__all__ = ["backward", "forward", "tile_sizes"]


def tile_sizes(call: Call) -> tuple[int, int, int]:
    """(key heads, query rows of a head, keys) of a tile: 2¹⁹ scores, which stay in a CPU's cache; 2²⁴ elsewhere."""
    heads, group = call.k.shape[1], call.q.shape[1] // call.k.shape[1]
    scores, keys = (2**19, 512) if call.q.device.type == "cpu" else (2**24, 2048)
    m = max(1, min(call.k.shape[2], keys))
    n = max(1, min(call.q.shape[2], max(16, 128 // group)))
    return max(1, min(heads, scores // (group * n * m))), n, m


@dataclass(frozen=True, eq=False)
class Block:
    """Rows i0 … i1 − 1 (exclusive end, in reading order) of query heads `heads` of batch entry b, and their factors.

    `q` is [heads, n, d], `lefts` one [heads, n, d'] for each of the terms' `queries`; rows descend.
    """

    b: int
    heads: slice
    key_heads: slice
    i0: int
    i1: int
    first: int
    q: Tensor
    lefts: list[Tensor]

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
        """Visible key ranges on the host. Where reading them would stall a device, only the window is used."""
        mask, Tk = self.call.mask, self.call.k.shape[2]
        self.bounds = self.seen_before = None
        if self.device.type != "cpu":
            return
        if mask.bounds is not None:
            self.bounds = mask.bounds
        if mask.keys is not None:
            self.seen_before = torch.nn.functional.pad(mask.keys.cumsum(1), (1, 0)).tolist()
            first = [int(row.to(torch.uint8).argmax()) if Tk else 0 for row in mask.keys]
            last = [Tk - int(row.flip(0).to(torch.uint8).argmax()) if Tk else 0 for row in mask.keys]
            self.key_range = list(zip(first, last, strict=True))

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
        mask, n = self.call.mask, block.i1 - block.i0
        first, last = block.i0 + self.call.offset, block.i1 - 1 + self.call.offset
        lo = max(0, first - mask.left) if mask.left < UNBOUNDED else 0
        hi = min(self.call.k.shape[2], last + mask.right + 1) if mask.right < UNBOUNDED else self.call.k.shape[2]
        inner_lo = last - mask.left if mask.left < UNBOUNDED else lo
        inner_hi = first + mask.right + 1 if mask.right < UNBOUNDED else hi
        if self.bounds is not None:
            rows = self.bounds[block.b if self.bounds.shape[0] > 1 else 0]
            rows = rows if rows.shape[0] == 1 else rows[block.rows]
            (some, _), (_, most) = rows.amin(0).tolist(), rows.amax(0).tolist()
            (_, least), (far, _) = rows.amin(0).tolist(), rows.amax(0).tolist()
            lo, hi, inner_lo, inner_hi = max(lo, some), min(hi, most), max(inner_lo, far), min(inner_hi, least)
        if self.seen_before is not None:
            lo, hi = max(lo, self.key_range[block.b][0]), min(hi, self.key_range[block.b][1])
        certain = mask.dense is None and (self.device.type == "cpu" or (mask.bounds is None and mask.keys is None))
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
        """1 where the mask shows the key and 0 elsewhere, as [1 or heads, 1 or n, m]; rows descend."""
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
        return seen.to(self.dtype)

    def kept(self, block: Block, tile: Tile) -> Tensor:
        """Dropout's factor on P: 0 or 1 / (1 − p), [heads, n, m]."""
        H = self.call.q.shape[1]
        heads = torch.arange(block.heads.start, block.heads.stop, device=self.device) + block.b * H
        rows = torch.arange(block.i1 - 1, block.i0 - 1, -1, device=self.device)
        kept = keep(self.call.seed, heads, rows, (tile.j0, tile.j1), self.call.dropout_p)
        return kept.to(self.dtype) / (1.0 - self.call.dropout_p)

    def shifted(self, block: Block, at: int | None) -> tuple[Tensor, Tensor | None]:
        """(τ(q + C), c): in a saturated zone the terms are C, added to the query, and c [heads, n, 1], added to S."""
        if at is None:
            return block.q * self.call.scale, None
        heads, q, c = block.heads, block.q, None
        for factor in self.terms.keys:
            q = q + factor.heads(factor.E, heads)[:, at : at + 1]
        if self.terms.bias is not None:
            c = self.terms.bias[heads, at, None, None].expand(-1, q.shape[1], 1)
        for factor, left in zip(self.terms.queries, block.lefts, strict=True):
            part = factor.constant(left, heads, at)
            c = part if c is None else c + part
        return q * self.call.scale, c

    def scores(self, block: Block, tile: Tile, q: Tensor, c: Tensor | None, seen: Tensor | None) -> Tensor:
        """S + c of a tile in the workspace, [heads, n, m], −∞ where the mask hides the key; (q, c) from `shifted`."""
        heads, n, m = block.heads, q.shape[1], tile.j1 - tile.j0
        k = self.k[block.b, block.key_heads, tile.keys]
        S = self.product("S", q, k.mT, c)
        if tile.at is None:
            terms = self.terms
            if terms.queries:
                S.add_(skew(self.projected(terms.queries, block.lefts, heads, tile.columns), m))
            if terms.bias is not None:
                S.add_(diagonals(terms.bias[heads], tile.columns.start, n, m))
            if terms.keys:
                left = self.repeated(k) * self.call.scale
                S.add_(skew_of_keys(self.projected(terms.keys, [left] * len(terms.keys), heads, tile.columns), n))
        return S if seen is None else S.add_(seen.log())

    def product(self, name: str, left: Tensor, right: Tensor, added: Tensor | None) -> Tensor:
        """left·right + added in the workspace: [heads, n, ·] times [key heads, ·, m], added [heads, n, 1]."""
        groups = right.shape[0]
        left = left.view(groups, -1, left.shape[-1])
        out = self.work(name, groups, left.shape[1], right.shape[-1])
        if added is None:
            torch.bmm(left, right, out=out)
        else:
            torch.baddbmm(added.reshape(groups, -1, 1), left, right, out=out)
        return out.view(groups * self.group, -1, right.shape[-1])

    def projected(self, factors: list[Factor], lefts: list[Tensor], heads: slice, columns: slice) -> Tensor:
        """G = Σ left·Eᵀ over the factors, [heads, rows, columns], in the workspace."""
        rows = lefts[0].shape[1]
        G = self.work("G", heads.stop - heads.start, rows, columns.stop - columns.start)
        for index, (factor, left) in enumerate(zip(factors, lefts, strict=True)):
            left, E = factor.project(left, heads, columns)
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


def forward(call: Call, o: Tensor, lse: Tensor) -> None:
    """Fill o [B, H, Tq, d_v] and lse [B, H, Tq]."""
    plan = Plan(call)
    for b, key_heads in plan.planes():
        for block in plan.blocks(b, key_heads):
            O, row_lse = _rows(plan, block)
            o[b, block.heads, block.rows] = O.flip(1).to(o.dtype)
            lse[b, block.heads, block.rows] = row_lse[..., 0].flip(1)


def _rows(plan: Plan, block: Block) -> tuple[Tensor, Tensor]:
    """O [heads, n, d_v] and lse [heads, n, 1] of a block."""
    call, lowest = plan.call, torch.finfo(plan.dtype).min
    O = block.q.new_zeros(*block.q.shape[:2], call.v.shape[-1])
    total = block.q.new_zeros(*block.q.shape[:2], 1)
    largest = torch.full_like(total, lowest)
    shift = _Shift(plan, block)
    for tile in plan.tiles(block):
        seen = None if tile.whole else plan.seen(block, tile)
        S = plan.scores(block, tile, *shift(tile.at), seen)
        above = torch.maximum(largest, S.amax(-1, keepdim=True))
        P = S.sub_(above).clamp_(min=plan.floor).exp_()
        if seen is not None:
            P.mul_(seen)
        shrink = largest.sub_(above).exp_()
        total.mul_(shrink).add_(P.sum(-1, keepdim=True))
        largest = above
        if call.dropout_p > 0.0:
            P.mul_(plan.kept(block, tile))
        O.mul_(shrink)
        plan.by_group(O).baddbmm_(plan.by_group(P), plan.v[block.b, block.key_heads, tile.keys])
        if plan.terms.values:
            D, columns = plan.by_offset(P, tile)
            for factor in plan.terms.values:
                O.add_(factor.back(D, block.heads, columns))
    empty = largest == lowest
    total.masked_fill_(empty, 1.0)
    return O.div_(total).masked_fill_(empty, 0.0), (largest + total.log()).masked_fill_(empty, float("-inf"))


def backward(
    call: Call, do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, need: list[bool], grads: list[Tensor]
) -> None:
    """Fill the gradients of q, k, v and of each of the call's tensors where `need` says so."""
    plan = Plan(call)
    terms = plan.terms
    dq, dk, dv = (grad if wanted else None for grad, wanted in zip(grads[:3], need[:3], strict=True))
    rest = [grad if wanted else None for grad, wanted in zip(grads[3:], need[3:], strict=True)]
    outputs = iter(rest)
    tables, lefts = {}, {}
    for factor in terms.factors:
        tables[factor] = next(outputs)
        lefts[factor] = next(outputs) if factor.port.left is not None else None
    terms.zero_gradients([tables[factor] is not None for factor in terms.factors])

    for b, key_heads in plan.planes():
        dK = plan.k.new_zeros(*plan.k[b, key_heads].shape) if dk is not None else None
        dV = plan.v.new_zeros(*plan.v[b, key_heads].shape) if dv is not None else None
        for block in plan.blocks(b, key_heads):
            dQ = torch.zeros_like(block.q) if dq is not None else None
            dlefts = [
                dQ if factor.port.left is None else None if lefts[factor] is None else torch.zeros_like(left)
                for factor, left in zip(terms.queries, block.lefts, strict=True)
            ]
            _rows_backward(plan, block, do, dlse, o, lse, dQ, dlefts, dK, dV)
            if dQ is not None:
                dq[b, block.heads, block.rows] = dQ.mul_(call.scale).flip(1).to(dq.dtype)
            for factor, dleft in zip(terms.queries, dlefts, strict=True):
                if lefts[factor] is not None:
                    out = lefts[factor][b, block.heads, block.rows]
                    out.copy_(dleft.mul_(factor.scale).flip(1).view(out.shape))
        if dK is not None:
            dk[b, key_heads] = dK.to(dk.dtype)
        if dV is not None:
            dv[b, key_heads] = dV.to(dv.dtype)
    for factor, out in tables.items():
        if out is not None:
            terms.fold(factor, out)


def _rows_backward(
    plan: Plan, block: Block, do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, dQ: Tensor | None,
    dlefts: list[Tensor | None], dK: Tensor | None, dV: Tensor | None,
) -> None:  # fmt: skip
    """Add a block's part to the gradients: dQ and dlefts [heads, n, ·] of its rows, dK and dV of its planes' keys."""
    call, terms, b, heads = plan.call, plan.terms, block.b, block.heads
    row_lse = plan.take(lse, b, heads, block.rows)[..., None]
    empty = row_lse == float("-inf")
    dO = plan.take(do, b, heads, block.rows).masked_fill_(empty, 0.0)
    delta = (dO * plan.take(o, b, heads, block.rows)).sum(-1, keepdim=True)
    if dlse is not None:
        delta.sub_(plan.take(dlse, b, heads, block.rows)[..., None].masked_fill(empty, 0.0))
    # Finite, so that S − lse is far below the floor and never NaN.
    row_lse.masked_fill_(empty, torch.finfo(plan.dtype).max / 4)
    shift = _Shift(plan, block)
    for tile in plan.tiles(block):
        seen = None if tile.whole else plan.seen(block, tile)
        q, c = shift(tile.at)
        P = plan.scores(block, tile, q, -row_lse if c is None else c - row_lse, seen).clamp_(min=plan.floor).exp_()
        if seen is not None:
            P.mul_(seen)
        kept = plan.kept(block, tile) if call.dropout_p > 0.0 else None
        dropped = P if kept is None else P * kept
        keys, k, v = tile.keys, *(x[b, block.key_heads, tile.keys] for x in (plan.k, plan.v))
        if dV is not None:
            dV[:, keys].add_(torch.bmm(plan.by_group(dropped).mT, plan.by_group(dO)))
        if any(factor.dE is not None for factor in terms.values):
            D, columns = plan.by_offset(dropped, tile)
            for factor in terms.values:
                if factor.dE is not None:
                    factor.accumulate(D, dO, heads, columns)

        dP = plan.product("dP", dO, v.mT, None if kept is not None or terms.values else -delta)
        if terms.values:
            G = plan.projected(terms.values, [dO] * len(terms.values), heads, plan.columns(tile))
            dP.add_(G if tile.at is not None else skew(G, keys.stop - keys.start))
        if kept is not None:
            dP.mul_(kept)
        if kept is not None or terms.values:
            dP.sub_(delta)
        dS = dP.mul_(P)

        dq = None
        if dQ is not None or (tile.at is not None and any(factor.dE is not None for factor in terms.keys)):
            dq = torch.bmm(plan.by_group(dS), k).view_as(block.q)
        if dQ is not None:
            dQ.add_(dq)
        if dK is not None:
            dK[:, keys].add_(torch.bmm(plan.by_group(dS).mT, plan.by_group(q)))
        if terms.queries or terms.dbias is not None:
            D, columns = plan.by_offset(dS, tile)
            if terms.dbias is not None:
                terms.dbias[heads, columns].add_(D.sum(1))
            for factor, left, dleft in zip(terms.queries, block.lefts, dlefts, strict=True):
                if factor.dE is not None:
                    factor.accumulate(D, left, heads, columns)
                if dleft is not None:
                    dleft.add_(factor.back(D, heads, columns))
        if terms.keys:
            _keys_backward(plan, block, tile, dS, dq, k, dK)


def _keys_backward(
    plan: Plan, block: Block, tile: Tile, dS: Tensor, dq: Tensor | None, k: Tensor, dK: Tensor | None
) -> None:
    """What the on-key terms of a tile add to their tables' gradients and, in the band, to dK (elsewhere q has it)."""
    scale, heads = plan.call.scale, block.heads
    if tile.at is not None:
        for factor in plan.terms.keys:
            if factor.dE is not None:
                # dE = Σ_i Σ_j dS_ij τ k_j
                ones = dq.new_full((*dq.shape[:2], 1), scale)
                factor.accumulate(ones, dq, heads, slice(tile.at, tile.at + 1))
        return
    D = plan.work("D", dS.shape[0], dS.shape[2], tile.columns.stop - tile.columns.start).zero_()
    skew_of_keys(D, dS.shape[1]).copy_(dS)
    for factor in plan.terms.keys:
        if factor.dE is not None:
            factor.accumulate(D, plan.repeated(k) * scale, heads, tile.columns)
        if dK is not None:
            dk = factor.back(D, heads, tile.columns).mul_(scale)
            dK[:, tile.keys].add_(dk.view(dK.shape[0], plan.group, *dk.shape[1:]).sum(1))


class _Shift:
    """`Plan.shifted` of a block's zones, computed once a zone."""

    def __init__(self, plan: Plan, block: Block) -> None:
        self.plan, self.block, self.held = plan, block, {}

    def __call__(self, at: int | None) -> tuple[Tensor, Tensor | None]:
        if at not in self.held:
            self.held[at] = self.plan.shifted(self.block, at)
        return self.held[at]
