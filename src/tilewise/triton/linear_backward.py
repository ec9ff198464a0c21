"""Backward of an identity-mapped query term on Hopper, on the host; and the table's gradient from tiles of dG.

The table's gradient sums diagonals of dS, which neither pass owns. Forming it in a third pass over the tiles costs
five products for each tile of dG (a program that owns two tiles of offsets meets three tiles of scores: 1.5 S, 1.5 dP,
one G, one dGᵀ·left) and three skews: by the products' measured rate above 2 ms on an H200 at 8,192 tokens of 16,384 and
12 heads. Writing dG once and reading it once moves 2 · 8 KiB a tile, 6.4 GB; the write hides behind products, the read
takes about 1.1 ms. So dG is stored, of as many query blocks at once as fit :data:`BUDGET`; each launch of the pass is
followed by one that adds what it stored to the table's rows, in a fixed order. Memory stays linear in the length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..call import Call
from .hopper import dtype_of, expanded, misfits, rows_layout, tiles_of
from .launch import cdiv, launch
from .linear_gradients import key_pass, query_pass
from .plan import Layout, Source
from .skew import TILE

__all__ = ["backward", "unsuited"]

BUDGET = 320 << 20
"""Bytes of dG at once: at 8,192 keys, as many query blocks as an H200 runs (two on each of 132 SMs) need 272 MiB."""

WAVE = 264
"""Query blocks that run at once; a launch takes a multiple where it can."""


@triton.jit(do_not_specialize=["f0", "f1", "B", "blocks", "tiles", "Tq", "batch"])
def collect_tiles(dg, left, out, ranges, sl, f0, f1, B, blocks, tiles, Tq, batch, D: tl.constexpr,
                  T: tl.constexpr, RANGED: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """out[h, m] += Σ over this launch's batches and query blocks of dGᵀ·left: program (table tile m, head of f0 on).

    Query block n meets table tile m in its tile m − blocks + n + 1 of dG. A head's first launch sets instead of adding.
    """
    # Computed here, where it shows that it is a multiple of 64: rows are read 16 bytes at a time.
    pitch = (tiles + 1) * T
    m = tl.program_id(0)
    h = f0 // (blocks * B) + tl.program_id(1)
    start = h * B * blocks
    a = tl.maximum(f0, start)
    e = tl.minimum(f1, start + B * blocks)
    cc = tl.arange(0, T)
    d = tl.arange(0, D)
    to = out + tl.cast(h * tl.num_programs(0) + m, tl.int64) * (T * D) + cc[:, None] * D + d[None, :]
    total = tl.load(to, mask=(cc[:, None] >= 0) & (a > start), other=0.0)
    n0 = tl.maximum(blocks - m - 1, 0)
    count = tl.maximum(tl.minimum(blocks, tiles + blocks - m) - n0, 0)
    b0 = (a - start) // blocks
    b1 = (e - start + blocks - 1) // blocks
    for turn in tl.range(0, (b1 - b0) * count, num_stages=STAGES):
        b = b0 + turn // count
        n = n0 + turn % count
        f = start + b * blocks + n
        tile = m - blocks + n + 1
        valid = (f >= a) & (f < e)
        if RANGED:
            at = ranges + b * batch + n * 4
            lo = tl.load(at) // T
            valid = valid & (tile >= lo) & (tile <= (tl.load(at + 1) + T - 1) // T)
        r = n * T + cc
        at_g = dg + tl.cast(f - f0, tl.int64) * T * pitch + cc[:, None] * pitch + tile * T + cc[None, :]
        ds = tl.load(at_g, mask=(cc[:, None] >= 0) & valid, other=0.0)
        at_l = left + tl.cast(b, tl.int64) * sl[0] + tl.cast(h, tl.int64) * sl[1] + r.to(tl.int64)[:, None] * sl[2]
        rows = tl.load(at_l + d[None, :], mask=(r[:, None] < Tq) & valid, other=0.0)
        total = tl.dot(tl.trans(ds), rows, total, input_precision="ieee")
    tl.store(to, total)


@triton.jit(do_not_specialize=["tau", "heads", "R", "count", "zero", "step"])
def spread(partial, grad, tau, heads, R, count, zero, step, sh, sr, sd, D: tl.constexpr, N: tl.constexpr):
    """grad[h, r] = τ · partial[h, zero + step·r], 0 where there is none; `heads` heads are summed, in order."""
    r = tl.program_id(0) * N + tl.arange(0, N)
    h = tl.program_id(1)
    d = tl.arange(0, D)
    at = zero + step * r
    inside = ((r < R) & (at >= 0) & (at < count))[:, None]
    total = tl.zeros([N, D], tl.float32)
    for n in range(heads):
        place = (tl.cast(h * heads + n, tl.int64) * count + at)[:, None] * D + d[None, :]
        total += tl.load(partial + place, mask=inside, other=0.0)
    to = grad + tl.cast(h, tl.int64) * sh + r.to(tl.int64)[:, None] * sr + d[None, :] * sd
    tl.store(to, (total * tau).to(grad.dtype.element_ty), mask=(r < R)[:, None] & (d[None, :] >= 0))


def unsuited(L: Layout) -> list[str]:
    """Why the call must take the portable kernels; empty where these run it."""
    if len(L.ports) != 1 or L.ports[0].kind != "query" or L.ports[0].rows.kind != "identity":
        return ["the terms are not one identity-mapped OnQuery"]
    # At 128 the pass over queries needs more registers than there are.
    return misfits(L) + ([f"the width is {L.d}; it takes 64"] if L.d != 64 else [])


def backward(
    call: Call, do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, need: list[bool], grads: list[Tensor]
) -> None:
    """Write the gradients that `need` asks for, of a call that :func:`unsuited` has nothing against."""
    from .passes import prepare_rows

    if not any(need):
        return
    L = Layout(call)
    port, left = L.ports[0], L.lefts[0]
    g = Source(do)
    if not g.describable:
        g = Source(do.clone(memory_format=torch.contiguous_format))
    own = port.left is None
    stats = torch.empty(4, L.B * L.H, -(-L.Tq // 128) * 128, dtype=torch.float32, device=L.device)
    prepare_rows(L, L.q, L.k, L.v, (g, Source(o), lse, dlse, stats), (), (), ())
    table, origin = expanded(L, 0, True)
    q, w, k, v, p, dout = (tiles_of(x) for x in (L.q, left, L.k, L.v, table, g))

    def room(position: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """(what a kernel writes, what it must be copied to): descriptors need q's dtype and strides of 16 bytes."""
        grad = grads[position] if need[position] else None
        if grad is not None and grad.dtype == L.dtype and Source(grad).x is grad and Source(grad).describable:
            return grad, None
        return torch.empty(like.shape, dtype=L.dtype, device=L.device), grad

    places = {0: room(0, call.q), 1: room(1, call.k), 2: room(2, call.v)}
    if not own:
        places[4] = room(4, port.left)
    to = {n: tiles_of(Source(x)) for n, (x, _) in places.items()}
    shared = dict(
        D=L.d, DTYPE=dtype_of(L.dtype), OWN=own, RANGED=L.mask.ranged, MASKED=L.masked(TILE) or L.mask.elementwise,
        ROWS=rows_layout(L.d, L.dtype), num_warps=4,
    )  # fmt: skip
    sizes = (L.G, table.shape[0], L.Tq, L.Tk, stats.shape[2], call.offset, origin, L.mask.left, L.mask.right,
             L.mask.batch)  # fmt: skip
    if need[1] or need[2]:
        launch(
            key_pass, (cdiv(L.Tk, TILE) * L.B * L.Hk,), q, w, k, v, p, dout, to[1], to[2], stats, L.mask.rule,
            L.mask.keys, L.c, call.scale, L.B, L.H, L.Hk, *sizes, SHARED=L.G > 1, **shared,
        )  # fmt: skip
    if need[0] or any(need[3:]):
        _queries(L, (q, w, k, v, p, dout, to[0], to[0 if own else 4]), stats, shared, sizes, origin,
                 grads[3] if need[3] else None)  # fmt: skip
    for written, grad in places.values():
        if grad is not None:
            grad.copy_(written)


def _queries(L: Layout, tensors, stats, shared, sizes, origin: int, grad: Tensor | None) -> None:
    """The pass over queries, a share of the blocks at a time, each followed by its part of the table's gradient."""
    left = L.lefts[0]
    blocks, tiles = cdiv(L.Tq, TILE), cdiv(L.Tk, TILE)
    pitch = (tiles + 1) * TILE
    total = L.H * L.B * blocks
    share = min(total, max(1, BUDGET // (TILE * pitch * L.bytes)))
    share = share // WAVE * WAVE if share > WAVE else share
    dg = torch.empty(share * TILE, pitch, dtype=L.dtype, device=L.device)
    square = gl.NVMMASharedLayout.get_default_for([TILE, TILE], dtype_of(L.dtype))
    described = TensorDescriptor(dg, list(dg.shape), [pitch, 1], [TILE, TILE], square)
    partial = torch.empty(L.H, blocks + tiles, TILE, L.d, dtype=torch.float32, device=L.device)
    for f0 in range(0, total, share):
        f1 = min(total, f0 + share)
        launch(
            query_pass, (f1 - f0,), *tensors, described, stats, L.mask.rule, L.mask.queries, L.c, L.call.scale, f0, L.B,
            L.H, *sizes, SQUARE=square, **shared,
        )  # fmt: skip
        if grad is not None:
            per_head = L.B * blocks
            heads = (f1 - 1) // per_head - f0 // per_head + 1
            launch(
                collect_tiles, (blocks + tiles, heads), dg, left.x, partial, L.mask.queries, left.strides, f0, f1,
                L.B, blocks, tiles, L.Tq, L.mask.batch, D=L.d, T=TILE, RANGED=L.mask.ranged, STAGES=4,
                num_warps=4,
            )  # fmt: skip
    if grad is None:
        return
    # Row x of the table that descends in δ is entry x − origin + offset + 64·blocks of a head's partial sums.
    reach, descending = L.ports[0].rows.params
    entry = L.call.offset + TILE * blocks
    zero, step = (entry - reach, 1) if descending else (entry + reach, -1)
    heads = L.H if grad.shape[0] == 1 else 1
    launch(
        spread, (cdiv(grad.shape[1], 64), grad.shape[0]), partial, grad, L.call.scale, heads, grad.shape[1],
        (blocks + tiles) * TILE, zero, step, *grad.stride(), D=L.d, N=64, num_warps=4,
    )  # fmt: skip
