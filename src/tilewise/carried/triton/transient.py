"""E of a layer that no other layer asks for: formed for some heads (and, if one is too large, some rows) at a time."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Parts", "parts_of"]


class Parts(NamedTuple):
    """How a backward pass is cut.

    Attributes:
        slots: tiles of one plane in the buffer, with the spare one.
        planes: planes (batch · heads) in the buffer.
        heads: (first plane, end) of each part.
        rows: (first tile row, end) of each part; every part of the heads goes through all of them.
    """

    slots: int
    planes: int
    heads: list[tuple[int, int]]
    rows: list[tuple[int, int]]


def parts_of(planes: int, together: int, rows: int, columns: int, back: int, tile_bytes: int, limit: int) -> Parts:
    """Parts whose tiles take at most `limit` bytes, as far as one tile row of `together` planes does.

    Args:
        planes: batch · heads.
        together: planes that one program serves (a multiple of it goes at once).
        rows, columns: tile rows and columns.
        back: tiles that a row holds before its own, −1 if unknown (then a row may hold every column).
        tile_bytes: of one tile.
        limit: bytes.

    Example:
        >>> parts_of(20, 5, 64, 64, 63, 32768, 512 << 20).heads
        [(0, 5), (5, 10), (10, 15), (15, 20)]
    """

    def tiles(first: int, end: int) -> int:
        if back < 0:
            return (end - first) * columns
        ramp = lambda m: min(m, back) * (min(m, back) + 1) // 2 + max(m - back, 0) * (back + 1)  # noqa: E731
        return ramp(end) - ramp(first)

    whole = (tiles(0, rows) + 1) * tile_bytes
    if together * whole <= limit:
        count = max(together, limit // whole // together * together)
        heads = [(n, min(n + count, planes)) for n in range(0, planes, count)]
        return Parts(tiles(0, rows) + 1, min(count, planes), heads, [(0, rows)])
    spans, first = [], 0
    while first < rows:
        end = first + 1
        while end < rows and together * (tiles(first, end + 1) + 1) * tile_bytes <= limit:
            end += 1
        spans.append((first, end))
        first = end
    heads = [(n, n + together) for n in range(0, planes, together)]
    return Parts(max(tiles(a, b) for a, b in spans) + 1, together, heads, spans)
