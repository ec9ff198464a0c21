"""Masks on the device: which tiles a block of 64 rows meets, and which entries of a tile are visible; and dropout."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..dropout import ROUNDS, threshold
from ..mask import UNBOUNDED, Mask
from .launch import cdiv, launch

BLOCK = 64
"""Rows of a block: ranges, bands and gradients are all decided on BLOCK × BLOCK blocks, whatever the tile."""

_ROUNDS = tl.constexpr(ROUNDS)


class Rule(NamedTuple):
    """A mask's tensors and strides, with a switch for each part."""

    bounds: Any
    bounds_batch: Any
    bounds_row: Any
    keys: Any
    dense: Any
    dense_batch: Any
    dense_head: Any
    WINDOW: tl.constexpr
    BOUNDS: tl.constexpr
    KEYS: tl.constexpr
    DENSE: tl.constexpr


@triton.jit
def visible(rule, b, h, i, j, Tq, Tk, offset, left, right):
    """Whether query i may see key j, for index tensors that broadcast to a tile; no key lies beyond Tk."""
    seen = (i >= 0) & (j < Tk)
    if rule.WINDOW:
        delta = i + offset - j
        seen = seen & (delta <= left) & (delta >= -right)
    if rule.BOUNDS:
        at = rule.bounds + tl.cast(b, tl.int64) * rule.bounds_batch + i * rule.bounds_row
        seen = seen & (j >= tl.load(at, mask=i < Tq, other=0)) & (j < tl.load(at + 1, mask=i < Tq, other=0))
    if rule.KEYS:
        seen = seen & (tl.load(rule.keys + tl.cast(b, tl.int64) * Tk + j, mask=j < Tk, other=0) != 0)
    if rule.DENSE:
        at = rule.dense + tl.cast(b, tl.int64) * rule.dense_batch + tl.cast(h, tl.int64) * rule.dense_head
        at = at + i.to(tl.int64) * Tk + j
        seen = seen & (tl.load(at, mask=(i < Tq) & (j < Tk), other=0) != 0)
    return seen


@triton.jit
def kept(seed, n, i0, j0, drop, BM: tl.constexpr, BN: tl.constexpr):
    """Which entries of the tile dropout keeps: Philox at counter (j >> 2, i, n, 0), word j & 3, against `drop`."""
    key = tl.load(seed)
    k0 = (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = tl.zeros([BM, BN // 4], tl.uint32)
    c0 = zero + ((j0 // 4) + tl.arange(0, BN // 4)).to(tl.uint32)[None, :]
    c1 = zero + (i0 + tl.arange(0, BM)).to(tl.uint32)[:, None]
    w0, w1, w2, w3 = tl.philox_impl(c0, c1, zero + n.to(tl.uint32), zero, k0 + zero, k1 + zero, _ROUNDS)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BM, BN))
    return words >= drop.to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["Tq", "Tk", "offset", "left", "right", "queries"])
def _ranges(out, rule, Tq, Tk, offset, left, right, queries, SIZE: tl.constexpr):
    block = tl.program_id(0)
    b = tl.program_id(1)
    lane = tl.arange(0, SIZE)
    vlo = tl.full([SIZE], 2**30, tl.int32)
    vhi = tl.zeros([SIZE], tl.int32)
    if block < queries:
        i = block * SIZE + lane
        lo = tl.maximum(i + offset - left, 0)
        hi = tl.minimum(i + offset + right + 1, Tk)
        if rule.BOUNDS:
            at = rule.bounds + tl.cast(b, tl.int64) * rule.bounds_batch + i * rule.bounds_row
            lo = tl.maximum(lo, tl.load(at, mask=i < Tq, other=0))
            hi = tl.minimum(hi, tl.load(at + 1, mask=i < Tq, other=0))
        some = (i < Tq) & (lo < hi)
        vlo = tl.where(some, lo, vlo)
        vhi = tl.where(some, hi, vhi)
        flo = tl.max(tl.where(i < Tq, tl.where(some, lo, Tk), 0), 0)
        fhi = tl.min(tl.where(i < Tq, tl.where(some, hi, 0), Tk), 0)
    else:
        j0 = (block - queries) * SIZE
        j1 = tl.minimum(j0 + SIZE, Tk)
        a = tl.maximum(j0 - offset - right, 0)
        e = tl.minimum(Tq, j1 - offset + left)
        if rule.BOUNDS:
            first = tl.full([SIZE], 2**30, tl.int32)
            last = tl.zeros([SIZE], tl.int32)
            count = tl.zeros([SIZE], tl.int32)
            for i0 in range(a // SIZE * SIZE, e, SIZE):
                i = i0 + lane
                at = rule.bounds + tl.cast(b, tl.int64) * rule.bounds_batch + i * rule.bounds_row
                lo = tl.maximum(tl.maximum(i + offset - left, 0), tl.load(at, mask=i < Tq, other=0))
                hi = tl.minimum(tl.minimum(i + offset + right + 1, Tk), tl.load(at + 1, mask=i < Tq, other=0))
                some = (i < Tq) & (lo < hi) & (lo < j1) & (hi > j0)
                vlo = tl.minimum(vlo, tl.where(some, i, 2**30))
                vhi = tl.maximum(vhi, tl.where(some, i + 1, 0))
                whole = some & (lo <= j0) & (hi >= j1)
                first = tl.minimum(first, tl.where(whole, i, 2**30))
                last = tl.maximum(last, tl.where(whole, i + 1, 0))
                count += whole.to(tl.int32)
            flo = tl.min(first, 0)
            fhi = tl.max(last, 0)
            # Rows that see the whole block need not be neighbours; only an unbroken run may skip the element mask.
            fhi = tl.where(fhi - flo == tl.sum(count, 0), fhi, 0)
        else:
            vlo = tl.where(a < e, a, vlo)
            vhi = tl.where(a < e, e, vhi)
            flo = tl.maximum(j1 - 1 - offset - right, 0)
            fhi = tl.minimum(Tq, j0 - offset + left + 1)
    lo1 = tl.min(vlo, 0)
    hi1 = tl.max(vhi, 0)
    at = out + (b * tl.num_programs(0) + block) * 4
    tl.store(at, tl.where(hi1 > 0, lo1, 0))
    tl.store(at + 1, hi1)
    tl.store(at + 2, flo)
    tl.store(at + 3, fhi)


@triton.jit
def span_of(ranges, batch, b, first, T, STEP: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr, RANGED: tl.constexpr):
    """(from, to, whole from, whole to) of the tiles, STEP wide, that rows first … first + N − 1 meet.

    `ranges` has 4 ints a block of SIZE rows; without it every row sees all T columns. Tiles inside [whole from,
    whole to) need no element mask.
    """
    lo, hi, flo, fhi = first * 0, first * 0 + T, first * 0, first * 0 + T
    if RANGED:
        blocks: tl.constexpr = (N + SIZE - 1) // SIZE
        at = ranges + b * batch + (first // SIZE + tl.arange(0, blocks)) * 4
        some = tl.load(at + 1) > 0
        lo = tl.min(tl.where(some, tl.load(at), 2**30), 0)
        hi = tl.max(tl.load(at + 1), 0)
        lo = tl.minimum(lo, hi)
        flo = tl.max(tl.load(at + 2), 0)
        fhi = tl.min(tl.load(at + 3), 0)
    lo = lo // STEP * STEP
    hi = (hi + STEP - 1) // STEP * STEP
    flo = (flo + STEP - 1) // STEP * STEP
    fhi = fhi // STEP * STEP
    return lo, hi, flo, fhi


class Masking:
    """A call's mask, ready for the kernels: the rule, the ranges of every block, and what the kernels specialise on."""

    def __init__(self, mask: Mask, B: int, Tq: int, Tk: int, offset: int, anchor: torch.Tensor):
        window = mask.left < UNBOUNDED or mask.right < UNBOUNDED
        bounds = None if mask.bounds is None else mask.bounds.to(torch.int32).contiguous()
        dense = None if mask.dense is None else mask.dense.contiguous().view(torch.uint8)
        keys = None if mask.keys is None else mask.keys.contiguous().view(torch.uint8)
        c = tl.constexpr
        # An absent part still needs an argument; `anchor` is never read through it.
        self.rule = Rule(
            anchor if bounds is None else bounds,
            0 if bounds is None or bounds.shape[0] == 1 else bounds.stride(0),
            0 if bounds is None or bounds.shape[1] == 1 else 2,
            anchor if keys is None else keys,
            anchor if dense is None else dense,
            0 if dense is None or dense.shape[0] == 1 else dense.stride(0),
            0 if dense is None or dense.shape[1] == 1 else dense.stride(1),
            c(window), c(bounds is not None), c(keys is not None), c(dense is not None),
        )  # fmt: skip
        self.left, self.right = min(mask.left, UNBOUNDED), min(mask.right, UNBOUNDED)
        self.ranged = window or bounds is not None
        self.elementwise = keys is not None or dense is not None
        self.query_blocks, self.key_blocks = cdiv(Tq, BLOCK), cdiv(Tk, BLOCK)
        if not self.ranged:
            self.queries = self.keys = anchor
            self.batch = 0
            return
        batches = 1 if bounds is None else bounds.shape[0]
        # A tile of 128 rows reads two blocks: one spare block a part, which sees nothing.
        q, k = self.query_blocks + 1, self.key_blocks + 1
        ranges = torch.empty(batches, q + k, 4, dtype=torch.int32, device=anchor.device)
        launch(
            _ranges, (q + k, batches), ranges, self.rule, Tq, Tk, offset, self.left, self.right, q, SIZE=BLOCK,
            num_warps=2,
        )  # fmt: skip
        self.queries, self.keys = ranges, ranges[:, q:]
        self.batch = 0 if batches == 1 else ranges.stride(0)


def dropping(p: float) -> int:
    """Philox words below it are dropped, as the int32 with the same bits."""
    word = threshold(p)
    return word - 2**32 if word >= 2**31 else word
