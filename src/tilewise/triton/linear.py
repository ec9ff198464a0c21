"""Identity maps in linear memory on Hopper (Gluon): G = left·tableᵀ of one tile, skewed in shared memory, never stored.

Score (i, j) needs entry (i, j − i + const) of G: each row of the [64, 128] pair of neighbouring G tiles is shifted by
its own number. Shared memory does multiples of 8: G is written with 16 elements of padding every 8 rows and read with
8, so rows 8n … 8n + 7 move by 8n and all accesses stay 16 bytes wide. What remains, row mod 8, are shuffles among the
four threads that hold a row of the matrix fragment. Triton from 3.8 on has ``gather`` for shared memory instead. The
second G tile of one step is the first of the next: a step costs one product more than attention without the term.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .biases import rows_of_heads
from .launch import cdiv, launch
from .plan import Layout, Source
from .skew import add_biases, to_half, visible

__all__ = ["forward", "unsuited"]

_TILE = 64
_T = gl.constexpr(_TILE)
_STAGES = 2

HAS_GATHER = hasattr(gl.shared_memory_descriptor, "gather")


def _fine_shift() -> str:
    """PTX that moves row r of a thread's fragment (16 registers of two halves) right by r mod 8 columns.

    Register 2n + s holds columns 8n + 2·(lane mod 4) + {0, 1} of row lane / 4 + 8s. Inputs 16 … 31 are the tile, inputs
    32 … 47 the tile to its left, of which only the last 8 columns can be needed.
    """
    head = """{
.reg .u32 lane, four, row, half, odd, sum, from0, from1, pick, a, b; .reg .pred p, q, o;
mov.u32 lane, %laneid; and.b32 four, lane, 3; shr.u32 row, lane, 2; shr.u32 half, row, 1; and.b32 odd, row, 1;
add.u32 sum, four, half; setp.lt.u32 p, sum, 4; setp.lt.u32 q, sum, 3;
sub.u32 from0, four, half; sub.u32 from1, from0, 1;
setp.eq.u32 o, odd, 1; selp.b32 pick, 0x5432, 0x7654, o;
"""
    body = []
    for n in range(16):
        here, before = 16 + n, 16 + n - 2 if n >= 2 else 32 + 14 + n
        body.append(
            f"selp.b32 a, ${here}, ${before}, p; selp.b32 b, ${here}, ${before}, q; "
            "shfl.sync.idx.b32 a, a, from0, 0x1c1f, 0xffffffff; shfl.sync.idx.b32 b, b, from1, 0x1c1f, 0xffffffff; "
            f"prmt.b32 ${n}, b, a, pick;\n"
        )
    return head + "".join(body) + "}"


_FINE = gl.constexpr(_fine_shift())
_FINE_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 32))


@gluon.jit
def _fetch(k, p, v, ks, ps, vs, bars, slot, b, hk, hp, j, row, go, BYTES: gl.constexpr):
    bar = bars.index(slot)
    mbarrier.expect(bar, 3 * BYTES, pred=go)
    tma.async_copy_global_to_shared(k, [b, hk, j, 0], bar, ks.index(slot), pred=go)
    tma.async_copy_global_to_shared(p, [hp, row, 0], bar, ps.index(slot), pred=go)
    tma.async_copy_global_to_shared(v, [b, hk, j, 0], bar, vs.index(slot), pred=go)


@gluon.jit(do_not_specialize=["c", "H", "G", "HP", "Tq", "Tk", "offset", "origin", "left", "right", "batch"])
def attend_linear(q, w, k, v, p, content, bias, o, lse, rule, ranges, c, H, G, HP, Tq, Tk, offset, origin, head_u,
                  head_v, left, right, batch, D: gl.constexpr, DTYPE: gl.constexpr, WRITE: gl.constexpr,
                  READ: gl.constexpr, BIASED: gl.constexpr, RANGED: gl.constexpr, MASKED: gl.constexpr,
                  GATHER: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """O and lse of 64 queries. `origin` is the table row of offset 0; rows descend in δ.

    BIASED: w is not read: its rows are q + bias, and the queries are q + content.
    """
    s_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _T, 16])
    o_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    row_of_s: gl.constexpr = gl.SliceLayout(1, s_mma)
    row_of_o: gl.constexpr = gl.SliceLayout(1, o_mma)
    BYTES: gl.constexpr = _T * D * 2
    blocks = (Tq + _T - 1) // _T
    i0 = gl.program_id(0) % blocks * _T
    n = gl.program_id(0) // blocks
    b = n // H
    h = n % H
    hk = h // G
    hp = gl.where(HP > 1, h, 0)
    lo = i0 * 0
    hi = Tk
    if RANGED:
        at = ranges + b * batch + i0 // _T * 4
        lo = gl.load(at) // _T * _T
        hi = gl.load(at + 1)
    tiles = (hi - lo + _T - 1) // _T
    row = origin - offset - i0 + lo

    qs = gl.allocate_shared_memory(DTYPE, [_T, D], ROWS)
    ws = gl.allocate_shared_memory(DTYPE, [_T, D], ROWS)
    ks = gl.allocate_shared_memory(DTYPE, [STAGES, _T, D], ROWS)
    vs = gl.allocate_shared_memory(DTYPE, [STAGES, _T, D], ROWS)
    ps = gl.allocate_shared_memory(DTYPE, [STAGES, _T, D], ROWS)
    if GATHER:
        gs = gl.allocate_shared_memory(gl.float16, [_T, 2 * _T], READ)
        skew = gl.arange(0, _T, gl.SliceLayout(0, s_mma))[None, :] - gl.arange(0, _T, row_of_s)[:, None] + _T
    else:
        gs = gl.allocate_shared_memory(gl.float16, [_T, 2 * _T], WRITE)
        shifted = gs._reinterpret(gl.float16, [_T, 2 * _T], READ)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES + 1):
        mbarrier.init(bars.index(stage), count=1)
    fence_async_shared()
    first = bars.index(STAGES)
    mbarrier.expect(first, 2 * BYTES if BIASED else 3 * BYTES)
    tma.async_copy_global_to_shared(q, [b, h, i0, 0], first, qs)
    if not BIASED:
        tma.async_copy_global_to_shared(w, [b, h, i0, 0], first, ws)
    tma.async_copy_global_to_shared(p, [hp, row - _T, 0], first, ps.index(STAGES - 1))
    for stage in gl.static_range(STAGES - 1):
        at_j, at_row = lo + stage * _T, row + stage * _T
        _fetch(k, p, v, ks, ps, vs, bars, stage, b, hk, hp, at_j, at_row, stage < tiles, BYTES)
    mbarrier.wait(first, 0)
    if BIASED:
        add_biases(qs, ws, content + h.to(gl.int64) * head_u, bias + h.to(gl.int64) * head_v, D)
    zero = gl.zeros([_T, _T], gl.float32, s_mma)
    g = warpgroup_mma(ws, ps.index(STAGES - 1).permute((1, 0)), zero, use_acc=False, is_async=True)
    g = warpgroup_mma_wait(0, deps=[g])
    last = to_half(g)
    acc = warpgroup_mma_init(gl.zeros([_T, D], gl.float32, o_mma))
    l = gl.zeros([_T], gl.float32, row_of_s)
    m = gl.full([_T], -1.0e30, gl.float32, row_of_s)
    i = i0 + gl.arange(0, _T, row_of_s)
    slot = 0
    phase = 0
    for t in range(tiles):
        mbarrier.wait(bars.index(slot), phase)
        s = warpgroup_mma(qs, ks.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        g = warpgroup_mma(ws, ps.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        s, g, acc = warpgroup_mma_wait(0, deps=[s, g, acc])
        here = to_half(g)
        gs.slice(0, _T, dim=1).store(last)
        gs.slice(_T, _T, dim=1).store(here)
        if GATHER:
            x = gs.gather(skew, 1)
        else:
            x = shifted.slice(_T, _T, dim=1).load(s_mma)
            before = shifted.slice(0, _T, dim=1).load(s_mma)
        last = here
        # The barrier of the exchange above: every warp is done with the tile before this one, whose slot is free.
        free = gl.where(slot == 0, STAGES - 1, slot - 1)
        later = t + STAGES - 1
        _fetch(k, p, v, ks, ps, vs, bars, free, b, hk, hp, lo + later * _T, row + later * _T, later < tiles, BYTES)
        if not GATHER:
            x = gl.inline_asm_elementwise(_FINE, _FINE_CONSTRAINTS, [x, before], gl.float16, False, 32)
        s = s + x.to(gl.float32)
        if MASKED:
            j = lo + t * _T + gl.arange(0, _T, gl.SliceLayout(0, s_mma))
            s = gl.where(visible(rule, b, i[:, None], j[None, :], Tq, Tk, offset, left, right), s * c, float("-inf"))
            new = gl.maximum(m, gl.max(s, 1))
            prob = gl.exp2(s - new[:, None])
        else:
            new = gl.maximum(m, gl.max(s, 1) * c)
            prob = gl.exp2(s * c - new[:, None])
        shrink = gl.exp2(m - new)
        l = l * shrink + gl.sum(prob, 1)
        acc = acc * gl.convert_layout(shrink, row_of_o)[:, None]
        m = new
        operand = gl.convert_layout(prob.to(DTYPE), gl.DotOperandLayout(0, o_mma, 2))
        acc = warpgroup_mma(operand, vs.index(slot), acc, is_async=True)
        slot += 1
        phase = gl.where(slot == STAGES, phase ^ 1, phase)
        slot = gl.where(slot == STAGES, 0, slot)
    acc = warpgroup_mma_wait(0, deps=[acc])
    empty = l == 0.0
    l = gl.where(empty, 1.0, l)
    total = gl.where(empty, float("-inf"), (m + gl.log2(l)) * 0.6931471805599453)
    gl.store(lse + n.to(gl.int64) * Tq + i, total, mask=i < Tq)
    qs.store((acc / gl.convert_layout(l, row_of_o)[:, None]).to(DTYPE))
    fence_async_shared()
    tma.async_copy_shared_to_global(o, [b, h, i0, 0], qs)
    tma.store_wait(0)


def unsuited(L: Layout) -> list[str]:
    """Why the call must take the portable kernels; empty where this one runs it."""
    call = L.call
    reasons = []
    if not L.limits.hopper:
        reasons.append("the GPU is not a Hopper (sm_90)")
    if len(L.ports) != 1 or L.ports[0].kind != "query" or L.ports[0].rows.kind != "identity":
        reasons.append("the terms are not one identity-mapped OnQuery")
        return reasons
    if L.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"q is {L.dtype}")
    if not L.d == L.dv == L.tables[0].shape[2] or L.d not in (64, 128):
        reasons.append(f"the widths are {L.d}, {L.dv} and {L.tables[0].shape[2]}; it takes 64 or 128 alike")
    if call.dropout_p > 0.0 or call.mask.dense is not None:
        reasons.append("it has neither dropout nor dense masks")
    if not all(s.describable for s in (L.q, L.k, L.v, L.lefts[0])):
        reasons.append("a tensor is not laid out in multiples of 16 bytes")
    return reasons


def forward(L: Layout, o: Tensor, lse: Tensor) -> None:
    """Write O and lse of a call that :func:`unsuited` has nothing against."""
    call, port, table = L.call, L.ports[0], L.tables[0]
    reach, descending = port.rows.params
    if not descending:
        table = table[:, : port.rows.size].flip(1)
    # Expanded heads have the stride 0, which no descriptor takes; an unaligned table may be contiguous already.
    if any(s == 0 or s * 2 % 16 for s in table.stride()[:2]) or table.data_ptr() % 16:
        table = table.clone(memory_format=torch.contiguous_format)
    layout = lambda shape: gl.NVMMASharedLayout.get_default_for(shape, _gluon(L.dtype))  # noqa: E731

    def rows(x: Source | Tensor):
        x = x if isinstance(x, Source) else Source(x)
        shape = [1, 1, _TILE, L.d]
        return TensorDescriptor(x.x, list(x.x.shape), [*x.strides, 1], shape, layout(shape))

    box = [1, _TILE, L.d]
    positions = TensorDescriptor(table, list(table.shape), list(table.stride()), box, layout(box))
    (u, head_u), (v, head_v) = (rows_of_heads(L, n) if port.biased else (L.anchor, 0) for n in ("content", "bias"))
    launch(
        attend_linear, (cdiv(L.Tq, _TILE) * L.B * L.H,), rows(L.q), rows(L.lefts[0]), rows(L.k), rows(L.v),
        positions, u, v, rows(o), lse, L.mask.rule, L.mask.queries, L.c, L.H, L.G, table.shape[0], L.Tq, L.Tk,
        call.offset, reach, head_u, head_v, L.mask.left, L.mask.right, L.mask.batch, D=L.d, DTYPE=_gluon(L.dtype),
        WRITE=_padded(16), READ=_padded(8), BIASED=port.biased, RANGED=L.mask.ranged,
        MASKED=L.masked(_TILE) or L.mask.elementwise, GATHER=HAS_GATHER, STAGES=_STAGES, ROWS=layout([_TILE, L.d]),
        num_warps=4,
    )  # fmt: skip


def _gluon(dtype: torch.dtype):
    return gl.float16 if dtype == torch.float16 else gl.bfloat16


def _padded(every_8_rows: int):
    bases = [[0, 1 << n] for n in range(7)] + [[1 << n, 0] for n in range(6)]
    return gl.PaddedSharedLayout([[128, 8], [1024, every_8_rows]], bases, [], [_TILE, 2 * _TILE])
