"""Gradients of tables from the tiles of dG (or dH) that :mod:`.band_queries` and :mod:`.band_keys` store.

A table's gradient sums diagonals of dS, which no pass over rows owns. Tile (n, m) of dG belongs to row block n and to
the offsets of diagonal m: tile `first` + m + n of the others, less one. Each launch of a pass is followed by one that
adds what it stored to its diagonals; offsets are summed to table rows at the end. Every sum has a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .biases import rows_of_heads
from .cached import cached
from .launch import cdiv, launch
from .plan import Layout
from .skew import TILE
from .terms import rows_of

__all__ = ["Diagonals"]

AT_ONCE = {True: 2, False: 1}
"""Whether there are saturated tiles ↦ diagonals of a program. A tile of the rows' factor is read once for all of them:
of the bytes that pass the L2 cache two save a quarter. DeBERTa's backward at 2,048 tokens took 1.915 ms with two, 1.983
with one and 1.982 with four, Transformer-XL's, where diagonals are of unequal lengths, 1.870, 1.845 and 1.951."""

SLOTS = {True: 396, False: 2112}
"""Likewise ↦ programs; where there are fewer diagonals, their row blocks are shared out to as many."""

SHARES = 16
"""At most: each is a vector of every offset more to read. At 128 tokens 44 of them cost Transformer-XL's backward 0.05
of 0.29 ms."""

STAGES = 3
"""Of the tiles that such a program reads, so that an SM runs three: 4.252 ms for 4.319 with four stages and two
programs (DeBERTa's backward at 8,192 tokens)."""

PIECES = 32
"""Sums into which the summands of an end row are shared out first. With one program for all of them Shaw's backward
took 1.047 ms for 0.965 at 2,048 tokens, 0.478 for 0.401 at 512."""


@triton.jit(do_not_specialize=["f0", "f1", "H", "B", "G", "blocks", "tiles", "rows", "first", "count", "per", "offset",
                               "ahead", "behind", "batch"])  # fmt: skip
def collect_tiles(dg, x, bias, out, ranges, sx, head_v, f0, f1, B, G, blocks, tiles, rows, first, count, per, offset,
                  ahead, behind, batch, D: tl.constexpr, T: tl.constexpr, W: tl.constexpr, BIASED: tl.constexpr,
                  SIDES: tl.constexpr, RANGED: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """out[h, s, m …] += Σ of dGᵀ·x over the row blocks that this launch of the pass made, of the head's s-th share.

    BIASED: x + bias_h instead of x.

    Programs (W diagonals from m on, head, share). f = (key head, batch, block) are the row blocks, f0 … f1 − 1 those
    made; dG has them for each of G heads. A share's first launch sets instead of adding. SIDES: dG's columns are
    diagonals, else tiles of the others.
    """
    # Computed here, where it shows that it is a multiple of 64: rows are read 16 bytes at a time.
    pitch = (tiles + 1) * T
    if SIDES:
        pitch = count * T
    m = tl.program_id(0) * W
    s = tl.program_id(2)
    h = f0 // (blocks * B) * G + tl.program_id(1)
    start = h // G * B * blocks
    a = tl.maximum(f0, start + s * per)
    e = tl.minimum(f1, tl.minimum(start + (s + 1) * per, start + B * blocks))
    rr = tl.arange(0, T)
    cc = tl.arange(0, W * T)
    d = tl.arange(0, D)
    place = (h * tl.num_programs(2) + s) * count + m
    to = out + tl.cast(place, tl.int64) * (T * D) + cc[:, None] * D + d[None, :]
    if BIASED:
        # Sums of dG's columns by a narrow product: a bias added to x would need a copy of each tile in shared memory.
        ones = tl.full([T, 16], 1.0, tl.float32).to(dg.dtype.element_ty)
        sums = tl.zeros([W * T, 16], tl.float32)
    mine = (m + cc // T < count)[:, None] & (d[None, :] >= 0)
    total = tl.load(to, mask=mine & (a > start + s * per), other=0.0)
    if SIDES:
        turns = tl.maximum(e - a, 0)
        n0 = 0
        met = 1
        b0 = 0
    else:
        n0 = tl.maximum(-first - m - W + 1, 0)
        met = tl.maximum(tl.minimum(blocks, tiles - first - m + 1) - n0, 0)
        b0 = (a - start) // blocks
        turns = ((e - start + blocks - 1) // blocks - b0) * met
    for turn in tl.range(0, turns, num_stages=STAGES):
        if SIDES:
            f = a + turn
            b = (f - start) // blocks
            n = f - start - b * blocks
        else:
            b = b0 + turn // met
            n = n0 + turn % met
            f = start + b * blocks + n
        tile = first + m + n
        lo = 0
        hi = tiles
        if RANGED:
            at = ranges + b * batch + n * 4
            lo = tl.load(at) // T
            hi = (tl.load(at + 1) + T - 1) // T
        column = tile
        if SIDES:
            # The band as the pass decides it.
            low = tl.minimum(tl.maximum(tl.maximum(n * T + offset - ahead + 1, 0) // T, lo), tl.maximum(hi, lo))
            high = (tl.maximum(n * T + T - 1 + offset + behind, 0) + T - 1) // T
            hi = tl.minimum(tl.maximum(high, low), tl.maximum(hi, lo))
            lo = low
            column = m
        # A row block without a band has stored nothing.
        made = (f >= a) & (f < e) & (hi > lo)
        at = tile + cc // T
        valid = made & (at >= lo) & (at <= hi) & (m + cc // T < count)
        r = n * T + rr
        at_g = dg + tl.cast((f - f0) * G + h % G, tl.int64) * T * pitch + column * T
        at_g = at_g + rr.to(tl.int64)[:, None] * pitch + cc[None, :]
        ds = tl.load(at_g, mask=(rr[:, None] >= 0) & valid[None, :], other=0.0)
        at_x = x + tl.cast(b, tl.int64) * sx[0] + tl.cast(h // G, tl.int64) * sx[1] + r.to(tl.int64)[:, None] * sx[2]
        met_here = made & (tile + W > lo) & (tile <= hi)
        value = tl.load(at_x + d[None, :], mask=(r[:, None] < rows) & met_here, other=0.0)
        total = tl.dot(tl.trans(ds), value, total, input_precision="ieee")
        if BIASED:
            sums = tl.dot(tl.trans(ds), ones, sums, input_precision="ieee")
    if BIASED:
        row = tl.load(bias + tl.cast(h, tl.int64) * head_v + d).to(tl.float32)
        # All columns are equal.
        total += tl.max(sums, 1)[:, None] * row[None, :]
    tl.store(to, total, mask=mine)


@triton.jit(do_not_specialize=["tau", "heads", "R", "count", "zero", "step"])
def spread(partial, grad, tau, heads, R, count, zero, step, sh, sr, sd, D: tl.constexpr, N: tl.constexpr):
    """grad[h, r] = τ · partial[h, zero + step·r], 0 where there is none; `heads` of them are summed, in order."""
    r = tl.program_id(0) * N + tl.arange(0, N)
    h = tl.program_id(1)
    d = tl.arange(0, D)
    at = zero + step * r
    inside = ((r < R) & (at >= 0) & (at < count))[:, None]
    total = tl.zeros([N, D], tl.float32)
    for n in range(heads):
        place = (tl.cast(h * heads + n, tl.int64) * count + at)[:, None] * D + d[None, :]
        total += tl.load(partial + place, mask=inside, other=0.0)
    to = grad + tl.cast(h, tl.int64) * sh + r.to(tl.int64)[:, None] * sr + d.to(tl.int64)[None, :] * sd
    tl.store(to, (total * tau).to(grad.dtype.element_ty), mask=(r < R)[:, None] & (d[None, :] >= 0))


@triton.jit
def _offsets(partial, order, h, first, begin, end, count, shares, D: tl.constexpr, N: tl.constexpr):
    """Σ of partial[h] over the slots begin … end − 1 of a row, N at a time: [N, D]. A slot is (offset, share)."""
    n = tl.arange(0, N)
    d = tl.arange(0, D)
    total = tl.zeros([N, D], tl.float32)
    for c in tl.range(begin, end, N, loop_unroll_factor=2):
        x = tl.load(order + first + (c + n) // shares, mask=c + n < end, other=0)
        place = (tl.cast(h * shares + (c + n) % shares, tl.int64) * count + x)[:, None] * D + d[None, :]
        total += tl.load(partial + place, mask=(c + n < end)[:, None] & (d[None, :] >= 0), other=0.0)
    return total


@triton.jit(do_not_specialize=["count", "shares", "blocks", "left_row", "right_row"])
def sum_ends(partial, order, starts, parts, sums, count, shares, blocks, left_row, right_row, sp, sn, D: tl.constexpr,
             N: tl.constexpr):  # fmt: skip
    """sums[h, side, k] = the k-th piece of what an end row sums: partial[h] at its offsets, and its side's parts[h].

    parts[h, n] are the vectors that the saturated sides of block n add to their end rows.

    Programs (h, side, k). A map that gives both ends one row sums its offsets on the left side alone.
    """
    h = tl.program_id(0)
    side = tl.program_id(1)
    k = tl.program_id(2)
    n = tl.arange(0, N)
    d = tl.arange(0, D)
    r = tl.where(side == 0, left_row, right_row)
    own = (r >= 0) & ((side == 0) | (left_row != right_row))
    first = tl.load(starts + r, mask=own, other=0)
    slots = (tl.load(starts + r + 1, mask=own, other=0) - first) * shares
    piece = tl.cdiv(slots, tl.num_programs(2))
    total = _offsets(partial, order, h, first, k * piece, tl.minimum((k + 1) * piece, slots), count, shares, D, N)
    piece = tl.cdiv(blocks, tl.num_programs(2))
    end = tl.where(r >= 0, tl.minimum((k + 1) * piece, blocks), 0)
    for c in tl.range(k * piece, end, N, loop_unroll_factor=2):
        # A head's parts reach 2^31 numbers with 64 GiB of its queries, so (c + n)·sn is an int32.
        at = parts + tl.cast(h, tl.int64) * sp + (c + n)[:, None] * sn + side * D + d[None, :]
        total += tl.load(at, mask=(c + n < end)[:, None] & (d[None, :] >= 0), other=0.0)
    to = sums + tl.cast((h * 2 + side) * tl.num_programs(2) + k, tl.int64) * D
    tl.store(to + d, tl.sum(total, 0))


@triton.jit(do_not_specialize=["tau", "count", "shares", "left_row", "right_row"])
def sum_rows(partial, order, starts, sums, grad, tau, count, shares, left_row, right_row, sh, sr, sd,
             D: tl.constexpr, N: tl.constexpr, ENDS: tl.constexpr, PIECES: tl.constexpr):  # fmt: skip
    """grad[h, r] = τ · Σ of partial[h] over shares and offsets of row r, N vectors at a time; ENDS: end rows by `sums`.

    Programs (h, r).
    """
    h = tl.program_id(0)
    r = tl.program_id(1)
    d = tl.arange(0, D)
    first = tl.load(starts + r)
    slots = (tl.load(starts + r + 1) - first) * shares
    if ENDS:
        slots = tl.where((r == left_row) | (r == right_row), 0, slots)
    value = tl.sum(_offsets(partial, order, h, first, 0, slots, count, shares, D, N), 0)
    if ENDS:
        k = tl.arange(0, PIECES)
        for side in tl.static_range(2):
            end = left_row
            if side == 1:
                end = right_row
            at = sums + tl.cast((h * 2 + side) * PIECES, tl.int64) * D + k[:, None] * D + d[None, :]
            value += tl.sum(tl.load(at, mask=(r == end) & (d[None, :] >= 0), other=0.0), 0)
    to = grad + tl.cast(h, tl.int64) * sh + tl.cast(r, tl.int64) * sr + d.to(tl.int64) * sd
    tl.store(to, (value * tau).to(grad.dtype.element_ty))


@dataclass(frozen=True)
class Diagonals:
    """The offsets of one port's dG (rows are queries) or dH (keyed: rows are keys).

    Attributes:
        first: diagonal m has the offsets up to that of tile `first` + m + n of the others, for row block n.
        count: diagonals.
        columns: tiles of a row of the buffer.
        base: where a row block's columns begin, less its first row; only where tiles are saturated.
        heads: of a launch, at most.
    """

    L: Layout
    n: int
    blocks: int
    tiles: int
    first: int
    count: int
    columns: int
    base: int
    heads: int

    @classmethod
    def of(cls, L: Layout, n: int) -> Diagonals:
        keyed = L.ports[n].kind == "key"
        blocks, tiles = cdiv(L.Tk if keyed else L.Tq, TILE), cdiv(L.Tq if keyed else L.Tk, TILE)
        if not L.sides:
            return cls(L, n, blocks, tiles, 1 - blocks, blocks + tiles, tiles + 1, 0, L.H)
        offset, ahead, behind = cls._band(L, keyed)
        first = (offset - ahead + 1) // TILE
        count = cdiv(TILE - 1 + offset + behind, TILE) - first + 1
        return cls(L, n, blocks, tiles, first, count, count, first * TILE, L.H)

    def within(self, share: int) -> Diagonals:
        """The same, for launches of so many row blocks."""
        return replace(self, heads=min(self.L.H, cdiv(share, self.L.B * self.blocks) * self.group))

    @staticmethod
    def _band(L: Layout, keyed: bool) -> tuple[int, int, int]:
        return (-L.call.offset, -L.lo, L.hi) if keyed else (L.call.offset, L.hi, -L.lo)

    @property
    def keyed(self) -> bool:
        return self.L.ports[self.n].kind == "key"

    @property
    def group(self) -> int:
        """Heads of a row block."""
        return self.L.G if self.keyed else 1

    @property
    def shares(self) -> int:
        """Into how many sums the row blocks of a head are shared out: whole sequences, or no fewer than four blocks."""
        L = self.L
        programs = cdiv(self.count, AT_ONCE[L.sides]) * self.heads
        return max(1, min(SLOTS[L.sides] // programs, SHARES, L.B * self.blocks // 4 if L.sides else L.B))

    @property
    def per(self) -> int:
        """Row blocks of a share."""
        L = self.L
        return cdiv(L.B * self.blocks, self.shares) if L.sides else cdiv(L.B, self.shares) * self.blocks

    def room(self) -> Tensor:
        shape = self.L.H, self.shares, self.count * TILE, self.L.d
        return torch.empty(shape, dtype=torch.float32, device=self.L.device)

    def add(self, dg: Tensor, partial: Tensor, f0: int, f1: int) -> None:
        """Add the row blocks f0 … f1 − 1, of which dg has the tiles."""
        L, G = self.L, self.group
        x = L.k if self.keyed else L.lefts[self.n]
        per_head = L.B * self.blocks
        biased = L.ports[self.n].bias is not None
        v, head_v = rows_of_heads(L, "bias") if biased else (L.anchor, 0)
        heads = ((f1 - 1) // per_head - f0 // per_head + 1) * G
        width = AT_ONCE[L.sides]
        launch(
            collect_tiles, (cdiv(self.count, width), heads, self.shares), dg, x.x, v, partial,
            L.ranges(self.keyed), x.strides, head_v, f0, f1, L.B, G, self.blocks, self.tiles,
            L.Tk if self.keyed else L.Tq, self.first, self.count, self.per, *self._band(L, self.keyed), L.mask.batch,
            D=L.d, T=TILE, W=width, BIASED=biased, SIDES=L.sides, RANGED=L.mask.ranged, STAGES=STAGES, num_warps=4,
        )  # fmt: skip

    def finish(self, partial: Tensor, parts: Tensor | None, grad: Tensor) -> None:
        """Write the table's gradient; `parts` [H, ·, 2, d] is what the saturated sides add to end rows, over τ."""
        L, n = self.L, self.n
        rows, shared = L.ports[n].rows, grad.shape[0] == 1
        # The offset of the entry x of a head: start + step·x.
        step = 1 if self.keyed else -1
        start = L.call.offset + step * TILE * (self.first - 1)
        if rows.kind == "identity":
            reach, descending = rows.params
            zero, turn = (reach - start, -1) if descending else (-reach - start, 1)
            heads = self.shares * (L.H if shared else 1)
            launch(
                spread, (cdiv(grad.shape[1], 64), grad.shape[0]), partial, grad, L.call.scale, heads, grad.shape[1],
                self.count * TILE, step * zero, step * turn, *grad.stride(), D=L.d, N=64, num_warps=4,
            )  # fmt: skip
            return
        # One table for all heads: theirs are further shares and blocks of it.
        merged = L.H if shared else 1
        shares, count = merged * self.shares, self.count * TILE
        order, starts = _by_row(rows, start, step, count, grad.shape[1], L.device)
        # Where no tile is saturated, a table a head has few summands even there.
        ends = max(L.ends[n]) >= 0 and (parts is not None or shared)
        sums, vectors, blocks = (partial, partial, 0) if parts is None else (partial, parts, parts.shape[1] * merged)
        if ends:
            sums = torch.empty(grad.shape[0], 2, PIECES, L.d, dtype=torch.float32, device=L.device)
            launch(
                sum_ends, (grad.shape[0], 2, PIECES), partial, order, starts, vectors, sums, count,
                shares, blocks, *L.ends[n], *vectors.stride()[:2], D=L.d, N=64, num_warps=4,
            )  # fmt: skip
        warps = 8 if shared else 1
        launch(
            sum_rows, grad.shape[:2], partial, order, starts, sums, grad, L.call.scale, count, shares,
            *L.ends[n], *grad.stride(), D=L.d, N=16 * warps, ENDS=ends, PIECES=PIECES, num_warps=warps,
        )  # fmt: skip


@cached(64)
def _by_row(rows, start: int, step: int, count: int, R: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Entries in the order of their table rows, and where each of the R rows starts (int32)."""
    row = rows_of(rows, start + step * torch.arange(count, device=device))
    ordered, order = torch.sort(row, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(R + 1, dtype=torch.int32, device=device))
    return order.to(torch.int32), starts.to(torch.int32)
