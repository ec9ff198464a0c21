"""Forward on Hopper (Gluon) for scores with at most a number an offset: one warp copies, groups of four warps multiply.

A program has two or three groups, each with 64 queries of its own, that share all tiles of K and V, so an SM reads each
tile once for 128 or 192 queries. One more warp copies the tiles into a ring; it is told when a tile is done with by all
groups, and tells them when one has come. Nothing else keeps the groups together. Each forms its exponentials beside the
product of the tile before with V, as :mod:`.overlapped` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .buffers import Slab
from .hopper import dtype_of, rows_layout, tiles_of
from .launch import cdiv, launch
from .masks import BLOCK
from .overlapped import _key_of, _weights
from .plan import Layout, Source
from .skew import barrier

__all__ = ["SHAPES", "Shape", "forward", "shape_of"]


@dataclass(frozen=True)
class Shape:
    """Groups of 64 queries, keys of a tile, tiles of each of K and V in the ring, registers of a group's thread.

    `ordered`: groups start their products in turn, so that those of one run while another forms exponentials.
    `resident`: as many programs as the GPU has SMs, each of which takes one block of queries after the other.
    """

    groups: int
    keys: int
    stages: int
    registers: int
    ordered: bool = False
    resident: bool = False


SHAPES = {(64, False): Shape(3, 128, 4, 160), (64, True): Shape(2, 128, 4, 240),
          (128, False): Shape(2, 128, 3, 240, resident=True), (128, True): Shape(2, 128, 3, 240)}  # fmt: skip
"""(width, whether entries are masked) ↦ shape. Masks need more registers than three groups can have."""

_ROWS = gl.constexpr(BLOCK)


@gluon.jit
def _block(block, H, Tq, GROUPS: gl.constexpr):
    """(first query, sequence, head) of the block-th GROUPS · 64 queries, a head's last ones first.

    Under a causal mask those take longest: what a GPU's SMs end with is short.
    """
    blocks = (Tq + GROUPS * _ROWS - 1) // (GROUPS * _ROWS)
    n = block // blocks
    return (blocks - 1 - block % blocks) * (GROUPS * _ROWS), n // H, n % H


@gluon.jit
def _tiles(ranges, i0, Tq, Tk, offset, lo, hi, BN: gl.constexpr, GROUPS: gl.constexpr, RANGED: gl.constexpr,
           SIDES: gl.constexpr):  # fmt: skip
    """(first key, tiles, t1, band) of GROUPS · 64 queries from i0 on: tiles t1 … t1 + band − 1 are the band's."""
    first = i0 * 0
    beyond = first + Tk
    if RANGED:
        beyond = first
        first = first + 1073741824
        # One block beyond the queries is there, and sees nothing.
        spare = (Tq + _ROWS - 1) // _ROWS
        for n in gl.static_range(GROUPS):
            at = ranges + gl.minimum(i0 // _ROWS + n, spare) * 4
            to = gl.load(at + 1)
            first = gl.minimum(first, gl.where(to > 0, gl.load(at), 1073741824))
            beyond = gl.maximum(beyond, to)
        first = gl.minimum(first, beyond) // BN * BN
    # Rows that see nothing take one tile, of which all is masked.
    tiles = gl.maximum((beyond - first + BN - 1) // BN, 1)
    t1 = i0 * 0
    band = tiles
    if SIDES:
        t1 = gl.minimum(gl.maximum(gl.maximum(i0 + offset - hi + 1, 0) // BN - first // BN, 0), tiles)
        t2 = (gl.maximum(i0 + GROUPS * _ROWS - 1 + offset - lo, 0) + BN - 1) // BN - first // BN
        band = gl.minimum(gl.maximum(t2, t1), tiles) - t1
    return first, tiles, t1, band


@gluon.jit
def _await(bars, turn, STAGES: gl.constexpr):
    """Wait until the ring's slot of this turn is filled; STAGES turns later, until it is free again."""
    mbarrier.wait(bars.index(turn % STAGES), turn // STAGES & 1)


@gluon.jit
def _free(bars, turn, STAGES: gl.constexpr):
    """This group is done with a turn: each of its warps has waited for the products, then one thread says so."""
    barrier()
    mbarrier.arrive(bars.index(turn % STAGES), count=1)


@gluon.jit
def _begin(order, turn, GROUP: gl.constexpr, ORDERED: gl.constexpr):
    """Wait until the group before this one has started its products: for the first group, those of the turn before."""
    if ORDERED:
        if GROUP == 0:
            mbarrier.wait(order.index(GROUP), (turn + 1) & 1)
        else:
            mbarrier.wait(order.index(GROUP), turn & 1)


@gluon.jit
def _begun(order, GROUP: gl.constexpr, GROUPS: gl.constexpr, ORDERED: gl.constexpr):
    """Let the next group start its products."""
    if ORDERED:
        mbarrier.arrive(order.index((GROUP + 1) % GROUPS), count=1)


@gluon.jit
def _copy(k, v, ks, vs, full, free, ranges, H, G, Tq, Tk, offset, lo, hi, batch, blocks, BYTES: gl.constexpr,
          BN: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, RANGED: gl.constexpr,
          SIDES: gl.constexpr):  # fmt: skip
    """Fill the ring. Turn u of a block takes K of tile u and V of tile u − 1: one turn more than there are tiles."""
    turn = blocks * 0
    for block in range(gl.program_id(0), blocks, gl.num_programs(0)):
        i0, b, h = _block(block, H, Tq, GROUPS)
        first, tiles, t1, band = _tiles(ranges + b * batch, i0, Tq, Tk, offset, lo, hi, BN, GROUPS, RANGED, SIDES)
        for u in range(0, tiles + 1):
            slot = turn % STAGES
            _await(free, turn + STAGES, STAGES)
            mbarrier.expect(full.index(slot), 2 * BYTES, pred=(u > 0) & (u < tiles))
            mbarrier.expect(full.index(slot), BYTES, pred=(u == 0) | (u == tiles))
            j = _key_of(u, t1, band, first, BN)
            tma.async_copy_global_to_shared(k, [b, h // G, j, 0], full.index(slot), ks.index(slot), pred=u < tiles)
            j = _key_of(u - 1, t1, band, first, BN)
            tma.async_copy_global_to_shared(v, [b, h // G, j, 0], full.index(slot), vs.index(slot), pred=u > 0)
            turn += 1


@gluon.jit
def _attend(GROUP: gl.constexpr, q, o, qs, ks, vs, q_full, full, free, order, lse, slab, table, rule, ranges, c, over,
            H, HT, Tq, Tk, offset, lo, hi, head, width, shift, end_a, end_b, head_t, step_t, left, right, batch, blocks,
            D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, ORDERED: gl.constexpr,
            TERM: gl.constexpr, SIDES: gl.constexpr, RANGED: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    """O and lse of the GROUP-th 64 queries of each block. See :func:`.overlapped.attend_overlapped`."""
    s_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    row_of_s: gl.constexpr = gl.SliceLayout(1, s_mma)
    row_of_o: gl.constexpr = gl.SliceLayout(1, o_mma)
    LOG2E: gl.constexpr = 1.4426950408889634
    qs = qs.index(GROUP)
    q_full = q_full.index(GROUP)
    turn = blocks * 0
    served = blocks * 0
    for block in range(gl.program_id(0), blocks, gl.num_programs(0)):
        i0, b, h = _block(block, H, Tq, GROUPS)
        at_ranges = ranges + b * batch
        first, tiles, t1, band = _tiles(at_ranges, i0, Tq, Tk, offset, lo, hi, BN, GROUPS, RANGED, SIDES)
        i0 = i0 + GROUP * _ROWS
        mbarrier.expect(q_full, _ROWS * D * 2)
        tma.async_copy_global_to_shared(q, [b, h, i0, 0], q_full, qs)
        flo = i0 * 0
        fhi = flo + Tk
        if RANGED:
            at_ranges = at_ranges + gl.minimum(i0 // _ROWS, (Tq + _ROWS - 1) // _ROWS) * 4
            flo = gl.load(at_ranges + 2)
            fhi = gl.load(at_ranges + 3)
        if rule.KEYS:
            fhi = flo
        ht = gl.where(HT > 1, h, 0)
        left_edge = c * 0.0
        right_edge = c * 0.0
        if SIDES:
            ends = table + ht.to(gl.int64) * head_t
            left_edge = gl.load(ends + gl.maximum(end_a, 0).to(gl.int64) * step_t).to(gl.float32) * LOG2E
            right_edge = gl.load(ends + gl.maximum(end_b, 0).to(gl.int64) * step_t).to(gl.float32) * LOG2E
            left_edge = gl.where(end_a >= 0, left_edge, 0.0)
            right_edge = gl.where(end_b >= 0, right_edge, 0.0)
        i = i0 + gl.arange(0, _ROWS, row_of_s)
        here = slab
        reach = i0 * 0
        if TERM:
            row = gl.arange(0, _ROWS, row_of_s)
            column = gl.arange(0, BN, gl.SliceLayout(0, s_mma))
            here = slab + ht.to(gl.int64) * head + (row.to(gl.int64) * width)[:, None] + column[None, :]
            reach = width - BN

        m = gl.full([_ROWS], -3.0e38, gl.float32, row_of_s)
        zero = gl.zeros([_ROWS, BN], gl.float32, s_mma)
        mbarrier.wait(q_full, served & 1)
        _await(full, turn, STAGES)
        _begin(order, turn, GROUP, ORDERED)
        scores = warpgroup_mma(qs, ks.index(turn % STAGES).permute((1, 0)), zero, use_acc=False, is_async=True)
        _begun(order, GROUP, GROUPS, ORDERED)
        s = warpgroup_mma_wait(0, deps=[scores])
        prob, m, shrink = _weights(s, 0, t1, band, first, m, here, shift - i0, reach, over, left_edge, right_edge, rule,
                                   b, i, flo, fhi, Tq, Tk, offset, left, right, c, BN, s_mma, TERM, SIDES,
                                   MASKED)  # fmt: skip
        l = gl.sum(prob, 1)
        operand = gl.convert_layout(prob.to(qs.dtype), gl.DotOperandLayout(0, o_mma, 2))
        acc = gl.zeros([_ROWS, D], gl.float32, o_mma)
        _free(free, turn, STAGES)
        turn += 1
        _await(full, turn, STAGES)
        for u in range(1, tiles):
            slot = turn % STAGES
            _begin(order, turn, GROUP, ORDERED)
            scores = warpgroup_mma(qs, ks.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            sums = warpgroup_mma(operand, vs.index(slot), acc, is_async=True)
            _begun(order, GROUP, GROUPS, ORDERED)
            s = warpgroup_mma_wait(1, deps=[scores])
            prob, new, shrink = _weights(s, u, t1, band, first, m, here, shift - i0, reach, over, left_edge, right_edge,
                                         rule, b, i, flo, fhi, Tq, Tk, offset, left, right, c, BN, s_mma, TERM, SIDES,
                                         MASKED)  # fmt: skip
            l = l * shrink + gl.sum(prob, 1)
            m = new
            # This wait ends a basic block: without it ptxas waits for the products before it forms exponentials.
            _await(full, turn + 1, STAGES)
            acc = warpgroup_mma_wait(0, deps=[sums])
            _free(free, turn, STAGES)
            turn += 1
            acc = acc * gl.convert_layout(shrink, row_of_o)[:, None]
            operand = gl.convert_layout(prob.to(qs.dtype), gl.DotOperandLayout(0, o_mma, 2))
        _begin(order, turn, GROUP, ORDERED)
        sums = warpgroup_mma(operand, vs.index(turn % STAGES), acc, is_async=True)
        _begun(order, GROUP, GROUPS, ORDERED)
        acc = warpgroup_mma_wait(0, deps=[sums])
        _free(free, turn, STAGES)
        turn += 1
        served += 1
        empty = l == 0.0
        l = gl.where(empty, 1.0, l)
        total = gl.where(empty, float("-inf"), (m + gl.log2(l)) * 0.6931471805599453)
        gl.store(lse + (b * H + h).to(gl.int64) * Tq + i, total, mask=i < Tq)
        qs.store((acc / gl.convert_layout(l, row_of_o)[:, None]).to(qs.dtype))
        fence_async_shared()
        barrier()
        if i0 < Tq:
            tma.async_copy_shared_to_global(o, [b, h, i0, 0], qs)
        tma.store_wait(0)
        # The thread that copies the next queries has waited for these.
        barrier()


@gluon.jit
def _group(GROUP: gl.constexpr, given):
    _attend(GROUP, *given)


@gluon.jit
def _fork(given, copied, GROUPS: gl.constexpr, REGISTERS: gl.constexpr):
    """Run the groups and the producer. Constants in a tuple stay constants only where it is an argument."""
    if GROUPS == 2:
        gl.warp_specialize([(_group, (0, given)), (_group, (1, given)), (_copy, copied)], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([(_group, (0, given)), (_group, (1, given)), (_group, (2, given)), (_copy, copied)],
                           [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "c", "over", "H", "G", "HT", "Tq", "Tk", "offset", "lo", "hi", "end_a", "end_b", "head_t", "step_t", "left",
        "right", "batch", "blocks",
    ]
)  # fmt: skip
def attend_specialised(q, k, v, o, lse, slab, table, rule, ranges, c, over, H, G, HT, Tq, Tk, offset, lo, hi, head,
                       width, shift, end_a, end_b, head_t, step_t, left, right, batch, blocks, D: gl.constexpr,
                       DTYPE: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
                       REGISTERS: gl.constexpr, ORDERED: gl.constexpr, TERM: gl.constexpr, SIDES: gl.constexpr,
                       RANGED: gl.constexpr, MASKED: gl.constexpr, ROWS_Q: gl.constexpr, ROWS_K: gl.constexpr,
                       num_warps: gl.constexpr):  # fmt: skip
    """O and lse of blocks of GROUPS · 64 queries, of which there are `blocks`, every num_programs-th one.

    The other arguments are those of :func:`.overlapped.attend_overlapped`.
    """
    qs = gl.allocate_shared_memory(DTYPE, [GROUPS, _ROWS, D], ROWS_Q)
    ks = gl.allocate_shared_memory(DTYPE, [STAGES, BN, D], ROWS_K)
    vs = gl.allocate_shared_memory(DTYPE, [STAGES, BN, D], ROWS_K)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(group), count=1)
        mbarrier.init(order.index(group), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=GROUPS)
    fence_async_shared()
    barrier()
    _fork((q, o, qs, ks, vs, q_full, full, free, order, lse, slab, table, rule, ranges, c, over, H, HT, Tq, Tk, offset,
           lo, hi, head, width, shift, end_a, end_b, head_t, step_t, left, right, batch, blocks, D, BN, STAGES, GROUPS,
           ORDERED, TERM, SIDES, RANGED, MASKED),
          (k, v, ks, vs, full, free, ranges, H, G, Tq, Tk, offset, lo, hi, batch, blocks, BN * D * 2, BN, STAGES,
           GROUPS, RANGED, SIDES), GROUPS, REGISTERS)  # fmt: skip


def shape_of(L: Layout) -> Shape:
    """The shape that a call takes."""
    return SHAPES[L.d, L.masked(SHAPES[L.d, False].keys) or L.mask.elementwise]


def forward(L: Layout, o: Tensor, lse: Tensor, shape: Shape | None = None) -> None:
    """Write O and lse of a call that :func:`.overlapped.unsuited` has nothing against."""
    shape = shape or shape_of(L)
    # shift − offset is 0 at every offset: a kernel is compiled for multiples of 16 and another for the rest.
    slab, table, heads, ends = Slab(L.q.x, 0, L.call.offset), L.q.x, 1, (-1, -1)
    if L.ports:
        slab, table, heads, ends = L.slab(0, (BLOCK, shape.keys)), L.tables[0], L.tables[0].shape[0], L.ends[0]
    blocks = cdiv(L.Tq, shape.groups * BLOCK) * L.B * L.H
    launch(
        attend_specialised, (min(blocks, _processors(L.device)) if shape.resident else blocks,), tiles_of(L.q),
        tiles_of(L.k, shape.keys), tiles_of(L.v, shape.keys), tiles_of(Source(o)), lse, slab.memory, table, L.mask.rule,
        L.mask.queries, L.c, 1.0 / L.call.scale, L.H, L.G, heads, L.Tq, L.Tk, L.call.offset, L.lo, L.hi,
        slab.memory.stride(0), slab.width, slab.shift - L.call.offset, *ends, L.head_stride(0) if L.ports else 0,
        table.stride(1), L.mask.left, L.mask.right, L.mask.batch, blocks, D=L.d, DTYPE=dtype_of(L.dtype), BN=shape.keys,
        STAGES=shape.stages, GROUPS=shape.groups, REGISTERS=shape.registers, ORDERED=shape.ordered,
        TERM=bool(L.ports), SIDES=bool(L.ports) and L.sides, RANGED=L.mask.ranged,
        MASKED=L.masked(shape.keys) or L.mask.elementwise, ROWS_Q=rows_layout(L.d, L.dtype),
        ROWS_K=rows_layout(L.d, L.dtype, shape.keys), num_warps=4,
    )  # fmt: skip


def _processors(device: torch.device) -> int:
    """SMs of a GPU; of an H200 for anything else."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
