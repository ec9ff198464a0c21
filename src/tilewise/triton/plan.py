"""A call laid out for the kernels: which terms act where, on which geometry, and how many heads go at once."""

from __future__ import annotations

from functools import cached_property, lru_cache

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..call import Call
from ..terms import Port
from . import config
from .biases import position_of
from .buffers import Buffer, Lookup, Slab, Source, is_long, spaced
from .cached import cached
from .config import Limits, Tiles, forward_tiles
from .launch import cdiv, launch, next_power_of_2
from .masks import BLOCK, Masking, dropping
from .operands import rounded
from .project import expand, project, toeplitz
from .terms import (
    FAR,
    LOG2E,
    Geometry,
    Skewed,
    Store,
    Table,
    Toeplitz,
    column_rows,
    end_rows,
    rows_of,
    saturation,
    skewed_band,
    skewed_edge,
    toeplitz_band,
    toeplitz_edge,
)  # fmt: skip

__all__ = ["MOST", "Buffer", "Facts", "Layout", "Source", "limits_of"]

MOST = 8
"""Score terms that a kernel takes: each has its own descriptor argument."""

BUDGET = 1 << 30
"""Bytes of skewed buffers that one launch may use while there are enough programs to fill the GPU."""

PROGRAMS = 1024
"""Programs that fill the GPU: below it, memory is not saved."""


@lru_cache(maxsize=16)
def limits_of(device: torch.device) -> Limits:
    """The limits of a CUDA device; of an H200 for anything else (ahead-of-time compilation, the interpreter)."""
    if device.type != "cuda":
        return Limits(232448, True, device.type == "meta")
    properties = torch.cuda.get_device_properties(device)
    return Limits.of((properties.major, properties.minor), properties.shared_memory_per_block_optin, properties.name)


def padded(d: int) -> int:
    """The width of a block that holds d columns: a power of two, at least 16."""
    return max(16, next_power_of_2(d))


def fitted(shape: tuple[int, ...], rows: int, batch: int) -> tuple[int, ...]:
    """(rows, columns, warps, stages, sequences) of a tile: rows of one residue (mod 8), of several sequences if short.

    A sequence with fewer rows than the tile shares it with others of the batch; where there are not enough of them, the
    tile is lower.
    """
    rows = min(shape[0], max(16, next_power_of_2(cdiv(rows, 8))))
    pack = shape[0] // rows
    return (shape[0], *shape[1:], pack) if batch >= pack else (rows, *shape[1:], 1)


def saturated(Tq: int, Tk: int, offset: int, lo: int, hi: int) -> bool:
    """Whether some BLOCK × BLOCK tile has only offsets ≥ hi, or only offsets ≤ lo."""
    last = (Tq - 1) // BLOCK * BLOCK
    left = last + offset - hi + 1 >= BLOCK
    return left or cdiv(max(BLOCK - 1 + offset - lo, 0), BLOCK) < cdiv(Tk, BLOCK)


class Facts:
    """What follows from the sizes and the terms of a call alone; made without starting anything."""

    def __init__(self, call: Call):
        self.call = call
        self.B, self.H, self.Tq, _ = call.q.shape
        self.Hk, self.Tk = call.k.shape[1:3]
        # Lengths may be symbols of a compiler, widths are always numbers.
        self.d, self.dv = int(call.q.shape[3]), int(call.v.shape[3])
        self.G = self.H // self.Hk
        self.device, self.dtype = call.q.device, call.q.dtype
        self.bytes = call.q.dtype.itemsize
        self.limits = limits_of(self.device)
        self.BD, self.BV = padded(self.d), padded(self.dv)
        self.c = call.scale * LOG2E
        self.ports = list(call.ports)
        ends = saturation([p.rows for p in self.ports], self.Tq + self.Tk + abs(call.offset)) if self.ports else None
        self.bounded = ends is not None
        # Where no tile is saturated, nothing of what prepares for such tiles is done.
        self.sides = self.bounded and saturated(self.Tq, self.Tk, call.offset, *ends)
        self.lo, self.hi = ends if self.sides else (-FAR, FAR)
        self.score = [n for n, p in enumerate(self.ports) if p.kind != "value"]
        self.values = [n for n, p in enumerate(self.ports) if p.kind == "value"]
        self.kind = self._kind()
        # Z in fp16 is finer than in bf16; for fp32 inputs its rounding would be the largest error of all.
        self.zdtype = torch.float32 if self.dtype == torch.float32 else torch.float16

    def _kind(self) -> str:
        """The class of the call, by which tiles are chosen: its most demanding kind of term."""
        if not self.ports:
            return "plain"
        if self.values:
            return "value"
        if not self.bounded:
            return "identity"
        return next(kind for kind in ("key", "query", "scalar") if any(p.kind == kind for p in self.ports))

    @property
    def projected(self) -> list[int]:
        """The score terms that are read from a skewed projection."""
        return [n for n in self.score if self.ports[n].kind != "scalar"]

    def forward_tiles(self) -> Tiles:
        return forward_tiles(max(self.BD, self.BV), self.bytes, self.Tk, self.kind, self.limits)

    def block_of(self, tiles: Tiles) -> tuple[int, int]:
        """The (queries, keys) block on which a pass with these tiles decides its band."""
        return max(tiles.queries, BLOCK), max(tiles.keys, BLOCK)

    def geometry(self, keyed: bool, tile: tuple[int, int]) -> Geometry:
        rows, others = (self.Tk, self.Tq) if keyed else (self.Tq, self.Tk)
        return Geometry.make(rows, others, self.call.offset, self.lo, self.hi, tile, keyed)

    def projection(self, n: int, block: tuple[int, int]) -> Geometry:
        """Where port n's projection lies, for passes that decide their bands on this (queries, keys) block."""
        keyed = self.ports[n].kind == "key"
        return self.geometry(keyed, block[::-1] if keyed else block)

    def shares(self, per_head: int) -> int:
        """How many query heads (a multiple of G) one launch takes, `per_head` bytes of buffers each, all batches."""
        enough = -(-PROGRAMS // max(1, self.B * cdiv(self.Tq, BLOCK)))
        fitting = BUDGET // max(1, per_head)
        groups = min(self.Hk, max(1, -(-enough // self.G), fitting // self.G))
        # Even shares: 12 heads that fit 8 at a time go 6 and 6.
        return self.G * -(-self.Hk // -(-self.Hk // groups))

    @property
    def in_registers(self) -> bool:
        """Whether both passes are to skew in registers, which makes no projection (:mod:`.linear_backward`)."""
        if not (config.SKEW_IN_REGISTERS and self.limits.hopper and self.call.options.skew == "auto"):
            return False
        from .linear_backward import unplanned

        return not unplanned(self)

    def kept(self) -> int:
        """Elements of all projections as the forward makes them, where the call's options keep them; else 0."""
        if self.call.options.projections == "auto" and self.in_registers:
            return 0
        block = self.block_of(self.forward_tiles())
        count = sum(self.B * self.H * self.projection(n, block).head for n in self.projected)
        if self.call.options.projections != "auto":
            return count if self.call.options.projections == "keep" else 0
        # Where tiles are saturated, sequences are long, and a projection is a small part of the time.
        beside = self.B * (self.H * self.Tq + self.Hk * self.Tk) * (self.d + self.dv) * self.bytes
        return 0 if self.sides or count * self.zdtype.itemsize > beside else count


class Layout(Facts):
    """A call laid out: what is the same for all heads and both directions, and how kernels address it."""

    def __init__(self, call: Call, kept: Tensor | None = None):
        super().__init__(call)
        self.q, self.k, self.v = Source(call.q), Source(call.k), Source(call.v)
        self.tables = [_table(p, self.dtype) for p in self.ports]
        self.lefts = [self._left(p) for p in self.ports]
        self.lookups: dict = {}
        self.left_factors: dict = {}
        self.ends = [end_rows(p.rows) for p in self.ports]
        self.anchor = call.q
        self.drop = dropping(call.dropout_p)
        self.inverse = 1.0 / (1.0 - call.dropout_p)
        self.seed = self.anchor if call.seed is None else call.seed
        self.keeping = kept
        self.precision = _precision(call)

    def factor(self, x: Source) -> Source:
        """x as products read it: rounded to TF32 in memory where that is asked for."""
        return Source(rounded(x.x)) if self.precision == "tf32" else x

    @cached_property
    def factors(self) -> tuple[Source, Source, Source]:
        """q, k and v as products read them."""
        return self.factor(self.q), self.factor(self.k), self.factor(self.v)

    def left_factor(self, n: int) -> Source | None:
        """The left factor of port n as products read it."""
        if self.ports[n].kind != "query":
            return self.lefts[n]
        if n not in self.left_factors:
            own = self.ports[n].left is None
            self.left_factors[n] = self.factors[0] if own else self.factor(self.lefts[n])
        return self.left_factors[n]

    @cached_property
    def mask(self) -> Masking:
        return Masking(self.call.mask, self.B, self.Tq, self.Tk, self.call.offset, self.anchor_int)

    def heads_at_once(self, per_head: int) -> int:
        """:meth:`shares`, or the same share in both directions where the forward's projections are kept."""
        if self.keeping is None:
            return self.shares(per_head)
        # dS beside every projection, and dO projected on the values' rows.
        each = sum(self.B * self.geometry(keyed, (BLOCK, BLOCK)).head for keyed in (False, True))
        return self.shares((len(self.projected) + len(self.values) + 2) * each * self.bytes)

    def share_of_kept(self, n: int, block: tuple[int, int], h0: int, heads: int) -> Buffer:
        """Port n's kept projection of heads h0 … h0 + heads − 1."""
        at = 0
        for other in self.projected:
            g = self.projection(other, block)
            if other == n:
                at += self.B * h0 * g.head
                return Buffer(self.keeping[at : at + self.B * heads * g.head], g, self.B * heads)
            at += self.B * self.H * g.head
        raise ValueError(f"port {n} has no projection; expected one of {self.projected}")

    @property
    def anchor_int(self) -> Tensor:
        return _nothing(self.device)

    def _left(self, port: Port) -> Source | None:
        if port.kind == "scalar":
            if port.left is None:
                return None
            return Source(spaced(port.left.to(torch.promote_types(port.left.dtype, torch.float16))).unsqueeze(-1))
        if port.kind == "query":
            return self.q if port.left is None else Source(port.left.to(self.dtype))
        return None

    def masked(self, step: int = BLOCK) -> bool:
        """Whether blocks of `step` keys need the element mask somewhere."""
        return self.mask.ranged or self.mask.elementwise or self.Tk % step != 0

    def edge(self, n: int) -> Table:
        """Port n's table with its end rows, for device functions."""
        table, (left, right) = self.tables[n], self.ends[n]
        return Table(table, self.head_stride(n), table.stride(1), left, right)

    def head_stride(self, n: int) -> int:
        return 0 if self.tables[n].shape[0] == 1 else self.tables[n].stride(0)

    def shifting(self, kind: str) -> tuple[Table, ...]:
        """The tables whose end rows shift a factor: of `key` terms the query, of `query` terms the key, of values V."""
        chosen = [
            n for n, p in enumerate(self.ports)
            if p.kind == kind and self.sides and max(self.ends[n]) >= 0 and (kind != "query" or p.left is None)
        ]  # fmt: skip
        return tuple(self.edge(n) for n in chosen)

    def buffer(self, geometry: Geometry, heads: int, dtype: torch.dtype) -> Buffer:
        n = self.B * heads
        return Buffer(torch.empty(n * geometry.head, dtype=dtype, device=self.device), geometry, n)

    def band_args(self, g: Geometry) -> tuple[int, int, int]:
        """(offset, ahead, behind) of a geometry, as the kernels around the tile loops take them."""
        return (-g.offset, -g.lo, g.hi) if g.keyed else (g.offset, g.hi, -g.lo)

    def ranges(self, keyed: bool) -> Tensor:
        return self.mask.keys if keyed else self.mask.queries

    def lookup(self, n: int, g: Geometry) -> Lookup:
        """How kernels find port n's table row of a column of g; made once a call."""
        if (n, g) not in self.lookups:
            self.lookups[n, g] = self._lookup(n, g)
        return self.lookups[n, g]

    def _lookup(self, n: int, g: Geometry) -> Lookup:
        rows, table = self.ports[n].rows, self.tables[n]
        if table.dim() == 2:
            table = table.unsqueeze(-1)
        elif self.precision == "tf32":
            table = rounded(table.unsqueeze(0))[0]
        heads = 0 if table.shape[0] == 1 else table.stride(0)
        # δ = start + step · (column − first)
        start, step = (g.first - g.top, 1) if g.keyed else (g.top - g.first, -1)
        if rows.kind in ("identity", "clipped"):
            descending = rows.params[-1]
            zero = -rows.params[0] if rows.kind == "identity" else rows.params[0]
            zero = zero + rows.size - 1 if descending else zero
            sign = -1 if descending else 1
            return Lookup(table, heads, table.stride(1), sign * (start - zero), sign * step, rows.size)
        columns = g.span + 8
        phi = column_rows(rows, g, g.first - 8, g.first + g.span, self.device)
        width = table.shape[2]
        out = torch.empty(table.shape[0], columns, width, dtype=table.dtype, device=self.device)
        launch(
            expand, (cdiv(columns, 64), table.shape[0]), table, phi, out, heads, table.stride(1), columns,
            D=width, BD=padded(width), N=64, num_warps=4,
        )  # fmt: skip
        return Lookup(out, 0 if out.shape[0] == 1 else out.stride(0), out.stride(1), 8, 1, columns)

    def project(self, n: int, x: Source, group: int, buffer: Buffer, scale: float, h0: int, heads: int, tile, shape):
        """Port n's projection of x (rows of one head in `group`) into the buffer, for heads h0 … h0 + heads − 1."""
        g, at, bias = buffer.geometry, self.lookup(n, buffer.geometry), position_of(self, n)
        TM, CB, warps, stages, pack = fitted(shape, g.rows, self.B)
        offset, ahead, behind = self.band_args(g)
        width = at.table.shape[2]
        launch(
            project, (8 * cdiv(g.rows, 8 * TM // pack) * cdiv(self.B, pack) * heads,), x.x, at.table,
            buffer.memory, bias[0] if bias else x.x, self.ranges(g.keyed), x.strides, at.head, at.row,
            bias[1] if bias else 0, at.origin, at.step, at.size, scale, g.head, g.stride, self.H, group, h0, heads,
            self.B, g.rows, g.others, offset, ahead, behind, g.shift, g.first, g.span, self.mask.batch, D=width,
            BD=padded(width), WM=tile[0], WN=tile[1], TM=TM, PACK=pack, CB=CB, SIZE=BLOCK, RANGED=self.mask.ranged,
            BIASED=bias is not None, LONG=is_long(at.table), PREC=self.precision, STAGES=stages, num_warps=warps,
        )  # fmt: skip

    def slab(self, n: int, block: tuple[int, int]) -> Slab:
        """Port n's Toeplitz slab, for blocks of these (queries, keys)."""
        table = self.tables[n]
        near, far = self.call.offset + 1 - self.Tk, self.Tq - 1 + self.call.offset
        low, high = min(max(self.lo, near), far), max(min(self.hi, far), near)
        low, high = min(low, high), max(low, high)
        # Tiles begin at j − i − offset + shift, which must be a multiple of 16 bytes.
        shift = -(-(high + 2 * block[1] - self.call.offset) // 16) * 16 + self.call.offset
        width = -(-(shift + block[0] - low + 2 * block[1]) // 128) * 128
        dtype = torch.float32 if torch.float32 in (table.dtype, self.dtype) else torch.float16
        memory = torch.empty(table.shape[0], block[0], width, dtype=dtype, device=self.device)
        launch(
            toeplitz, (width // 128, table.shape[0]), table, _scalar_rows(self.ports[n].rows, low, high, self.device),
            memory, *table.stride(), width, shift, low, high, N=block[0], CB=128, LONG=is_long(table, memory),
            num_warps=4,
        )  # fmt: skip
        return Slab(memory, width, shift)

    def toeplitz_term(self, n: int, slab: Slab, tiles: Tiles, tma: bool):
        """(device functions, fields, descriptor) of a scalar port."""
        gate, heads = self.lefts[n], self.tables[n].shape[0]
        term = Toeplitz(
            slab.memory, slab.memory.stride(0), slab.width, slab.width, slab.shift - self.call.offset, int(heads > 1),
            self.edge(n),
            self.anchor if gate is None else gate.x, *((0, 0, 0) if gate is None else gate.strides),
            tl.constexpr(gate is not None),
        )  # fmt: skip
        z = None
        if tma:
            steps = list(slab.memory.stride())
            z = TensorDescriptor(slab.memory, list(slab.memory.shape), steps, [1, tiles.queries, tiles.keys])
        return (toeplitz_band, toeplitz_edge), term, z

    def storing(self, buffer: Buffer) -> Store:
        """Fields with which a kernel stores tiles into the buffer."""
        g = buffer.geometry
        return Store(buffer.memory, g.head, g.stride, g.width, g.shift)

    def skewed_term(self, n: int, buffer: Buffer, tiles: Tiles, tma: bool):
        """(device functions, fields, descriptor) of a query, key or value port."""
        port, g = self.ports[n], buffer.geometry
        left = self.lefts[n]
        strides = (0, 0, 0) if left is None else left.strides
        width = self.tables[n].shape[2]
        term = Skewed(
            buffer.memory, g.head, g.stride, g.width, g.shift, self.edge(n),
            self.anchor if left is None else left.x, *strides, self.c,
            tl.constexpr(width), tl.constexpr(padded(width)), tl.constexpr(port.kind == "key"),
        )  # fmt: skip
        tile = (tiles.keys, tiles.queries) if port.kind == "key" else (tiles.queries, tiles.keys)
        return (skewed_band, skewed_edge), term, buffer.descriptor(*tile, tma)


def _table(port: Port, dtype: torch.dtype) -> Tensor:
    table = port.table
    if port.kind != "scalar":
        table = table.to(dtype)
        return table if table.stride(-1) == 1 else table.contiguous()
    return table.to(torch.float32) if table.dtype == torch.float64 else table


def _precision(call: Call) -> str:
    """How products of fp32 tiles are formed; 16-bit tiles have one way, under the same name so that nothing is new."""
    if call.q.dtype != torch.float32 or call.options.fp32 == "ieee":
        return "ieee"
    if call.options.fp32 == "auto" and torch.backends.cuda.matmul.fp32_precision != "tf32":
        return "ieee"
    return "tf32"


@cached(64)
def _scalar_rows(rows, low: int, high: int, device: torch.device) -> Tensor:
    return rows_of(rows, torch.arange(low, high + 1, device=device))


@cached(16)
def _nothing(device: torch.device) -> Tensor:
    return torch.zeros(4, dtype=torch.int32, device=device)
