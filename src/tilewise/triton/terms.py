"""The device half of the relative terms, and their geometry on the host.

The tile loops know a term by a few device functions and a NamedTuple: ``edge`` gives the constant that it adds to the
rows of a saturated tile, ``band`` the tile that it adds to the scores elsewhere. Two forms serve every mechanism: a
*Toeplitz* table (a number an offset) and a *skewed* projection (a number a row and an offset). With columns in
descending δ and a row stride one less than the row, entry (i, j) of the latter lies at i·stride + j + const, so a score
tile is an ordinary strided tile.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..rows import RowMap
from .cached import cached
from .tiles import load_skewed

LOG2E = 1.4426950408889634
_LOG2E = tl.constexpr(LOG2E)

FAR = 2**29
"""Beyond any offset."""


class Table(NamedTuple):
    """Rows of a table: pointer, strides, and the rows of the two saturated ends (−1: none)."""

    table: Any
    head: Any
    row: Any
    left: Any
    right: Any


class Store(NamedTuple):
    """Where tiles of dS or P go: a skewed buffer, as :class:`Geometry` lays it out."""

    z: Any
    head: Any
    stride: Any
    width: Any
    shift: Any


class Toeplitz(NamedTuple):
    """gate_i · b[φ(δ)]: `z` holds b as a [rows, width] slab a head, each row the one above shifted by one.

    The tile of query i and key j begins at column j − i + shift; shift is a multiple of 16 whatever the call's offset.
    """

    z: Any
    head: Any
    stride: Any
    width: Any
    shift: Any
    heads: Any
    edges: Table
    gate: Any
    gate_batch: Any
    gate_head: Any
    gate_row: Any
    GATED: tl.constexpr


class Skewed(NamedTuple):
    """left_i · A[φ(δ)] (or k_j · C[φ(δ)], KEYED): `z` holds the projection in log2 units, skewed."""

    z: Any
    head: Any
    stride: Any
    width: Any
    shift: Any
    edges: Table
    left: Any
    left_batch: Any
    left_head: Any
    left_row: Any
    scale: Any
    WIDE: tl.constexpr
    BLOCK: tl.constexpr
    KEYED: tl.constexpr


@triton.jit
def toeplitz_band(t, z, b, h, n, i0, j0, offset, Tq, Tk, BM: tl.constexpr, BN: tl.constexpr,
                  TURNED: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """The term's [BM, BN] tile ([BN, BM] where TURNED) in log2 units."""
    tile = load_skewed(t, z, h * t.heads, 0, j0 - i0 + t.shift, BM, BM, BN, TMA).to(tl.float32) * _LOG2E
    if t.GATED:
        i = i0 + tl.arange(0, BM)
        at = t.gate + tl.cast(b, tl.int64) * t.gate_batch + tl.cast(h, tl.int64) * t.gate_head + i * t.gate_row
        tile = tile * tl.load(at, mask=i < Tq, other=0.0).to(tl.float32)[:, None]
    if TURNED:
        tile = tl.trans(tile)
    return tile


@triton.jit
def toeplitz_edge(t, b, h, i, Tq, SIDE: tl.constexpr):
    """What the term adds to rows i of tiles saturated on SIDE (0: δ at its largest), in log2 units."""
    row = t.edges.left
    if SIDE == 1:
        row = t.edges.right
    at = t.edges.table + tl.cast(h, tl.int64) * t.edges.head + tl.cast(row, tl.int64) * t.edges.row
    value = tl.load(at, mask=row >= 0, other=0.0).to(tl.float32)
    value = value * _LOG2E + tl.zeros_like(i).to(tl.float32)
    if t.GATED:
        at = t.gate + tl.cast(b, tl.int64) * t.gate_batch + tl.cast(h, tl.int64) * t.gate_head + i * t.gate_row
        value = value * tl.load(at, mask=i < Tq, other=0.0).to(tl.float32)
    return value


@triton.jit
def skewed_band(t, z, b, h, n, i0, j0, offset, Tq, Tk, BM: tl.constexpr, BN: tl.constexpr,
                TURNED: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """The term's [BM, BN] tile ([BN, BM] where TURNED) in log2 units."""
    if t.KEYED:
        tile = load_skewed(t, z, n, j0, i0 + t.shift, Tk, BN, BM, TMA)
        if not TURNED:
            tile = tl.trans(tile)
    else:
        tile = load_skewed(t, z, n, i0, j0 + t.shift, Tq, BM, BN, TMA)
        if TURNED:
            tile = tl.trans(tile)
    return tile.to(tl.float32)


@triton.jit
def skewed_edge(t, b, h, i, Tq, SIDE: tl.constexpr):
    """As :func:`toeplitz_edge`; a keyed term acts through the shifted queries instead and adds nothing here."""
    value = tl.zeros_like(i).to(tl.float32)
    if not t.KEYED:
        row = t.edges.left
        if SIDE == 1:
            row = t.edges.right
        d = tl.arange(0, t.BLOCK)
        at = t.left + tl.cast(b, tl.int64) * t.left_batch + tl.cast(h, tl.int64) * t.left_head
        at = at + i.to(tl.int64)[:, None] * t.left_row + d[None, :]
        left = tl.load(at, mask=(i[:, None] < Tq) & (d[None, :] < t.WIDE), other=0.0).to(tl.float32)
        at = t.edges.table + tl.cast(h, tl.int64) * t.edges.head + tl.cast(row, tl.int64) * t.edges.row + d
        value = tl.sum(left * tl.load(at, mask=(d < t.WIDE) & (row >= 0), other=0.0).to(tl.float32)[None, :], 1)
        value = value * t.scale
    return value


@dataclass(frozen=True)
class Geometry:
    """Where entry (row, other) of a skewed buffer lies: row·stride + other + shift; and which offset a column has.

    A column is other + shift − row, so its offset is `top` − column (descending; rows are queries) or column − `top`
    (rows are keys). Rows are stored from `lo` to `hi`, the offsets that some tile of `tile` = (rows, others) may meet
    unsaturated.

    Attributes:
        shift: a multiple of 16, so that stores of residue-class rows stay 16 bytes wide.
        first, last: columns that any tile can meet, [first, last).
    """

    rows: int
    others: int
    offset: int
    lo: int
    hi: int
    tile: tuple[int, int]
    keyed: bool
    stride: int
    shift: int
    top: int
    first: int
    last: int

    @classmethod
    def make(cls, rows: int, others: int, offset: int, lo: int, hi: int, tile: tuple[int, int], keyed: bool):
        """Rows as far apart as a block's window is wide, or whole rows where those are no longer."""
        whole = -(-others // 128) * 128
        ahead, behind = (-lo, hi) if keyed else (hi, -lo)
        # The sign of the offset in `top` differs between the two sides: i + offset − j seen from a row i or a row j.
        signed = -offset if keyed else offset
        blocks = range(0, max(tile), tile[0])
        windows = [_window(first, tile, signed, ahead, behind) for first in blocks]
        # Windows move right with their rows, so two rows at this distance never share a place.
        stride = -(-max(e - a for a, e in windows) // 64) * 64
        # Where all of the band lies beyond the others nothing is stored, and the strided view still needs a size.
        shift = -min(max(windows[0][0], 0), (others - 1) // 64 * 64)
        if stride >= whole:
            shift, stride = 0, whole
        top = shift + signed
        # A block's tiles reach this much beyond the band, seen from its first or last row.
        pad = tile[0] + tile[1] - 2
        first = max(-rows - 8, top - ahead - pad) // 16 * 16
        last = max(min(shift + whole, top + behind + pad), first + 16)
        return cls(rows, others, offset, lo, hi, tile, keyed, stride, shift, top, first, last)

    @property
    def head(self) -> int:
        """Elements of one head's buffer: up to the end of the last row's window."""
        ahead, behind = (-self.lo, self.hi) if self.keyed else (self.hi, -self.lo)
        first = (self.rows - 1) // self.tile[0] * self.tile[0]
        _, end = _window(first, self.tile, self.top - self.shift, ahead, behind)
        end = max(min(end, -(-self.others // self.tile[1]) * self.tile[1]) + self.shift, 0)
        return max((self.rows - 1) * self.stride + end + 127, 128) // 128 * 128

    @property
    def width(self) -> int:
        """Columns of the strided view: whole blocks of 64, so a ragged tile is stored completely."""
        return -(-self.others // 64) * 64 + self.shift

    @property
    def span(self) -> int:
        """Columns from `first` on in whole blocks of 256, with room for the residues' shift."""
        return -(-(self.last - self.first + 8) // 256) * 256

    def offsets(self, first: int, last: int, device: torch.device) -> torch.Tensor:
        """δ of the columns first … last − 1, cut to what the lengths allow."""
        column = torch.arange(first, last, device=device)
        Tq, Tk = (self.others, self.rows) if self.keyed else (self.rows, self.others)
        delta = column - self.top if self.keyed else self.top - column
        return delta.clamp(self.offset + 1 - Tk, Tq - 1 + self.offset)


def _window(first: int, tile: tuple[int, int], signed: int, ahead: int, behind: int) -> tuple[int, int]:
    """[from, to) of the others that the block of rows from `first` on may meet unsaturated, in whole blocks."""
    WM, WN = tile
    return (first + signed - ahead + 1) // WN * WN, -(-(first + WM - 1 + signed + behind) // WN) * WN


def saturation(maps: list[RowMap], reach: int) -> tuple[int, int] | None:
    """The band of several maps at once: (lo, hi) beyond which all are saturated; None where one never is.

    No further than `reach`, which no offset has: few buckets of a vast distance end far beyond any length, and what is
    made for a band is as wide as the band.
    """
    ends = [m.saturation for m in maps]
    if any(e is None for e in ends):
        return None
    lo, hi = min(e[0] for e in ends), max(e[1] for e in ends)
    return min(max(lo, -reach), reach), min(max(hi, -reach), reach)


def end_rows(rows: RowMap) -> tuple[int, int]:
    """The rows of the largest and the smallest offsets; none for a map without ends (it has no saturated tiles)."""
    if rows.saturation is None:
        return -1, -1
    lo, hi = rows.saturation
    return int(rows.span(hi, hi)[0]), int(rows.span(lo, lo)[0])


LISTED = 1 << 22
"""Offsets between a map's ends up to which all their rows are kept; few buckets of a vast distance have more."""


@cached(64)
def _master(rows: RowMap, device: torch.device) -> torch.Tensor:
    lo, hi = rows.saturation
    return rows.span(lo, hi).to(device)


def rows_of(rows: RowMap, delta: torch.Tensor) -> torch.Tensor:
    """φ of offsets on their own device (int32): maps with near ends are read from a copy made once a device."""
    if rows.saturation is None:
        reach, descending = rows.params
        return (reach - delta if descending else delta + reach).clamp(0, rows.size - 1).to(torch.int32)
    lo, hi = rows.saturation
    if hi - lo > LISTED:
        return rows(delta).to(delta.device)
    return _master(rows, delta.device)[(delta.clamp(lo, hi) - lo).to(torch.int64)]


@cached(128)
def column_rows(rows: RowMap, geometry: Geometry, first: int, last: int, device: torch.device) -> torch.Tensor:
    """The table row of each column first … last − 1 (int32, −1 for none)."""
    return rows_of(rows, geometry.offsets(first, last, device)).contiguous()
