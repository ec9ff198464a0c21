"""Which tiles of the score matrix are live, where each is packed, and which keys a row sees: made once a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..mask import UNBOUNDED, Mask
from .config import CarriedConfig

__all__ = ["LayerTiles", "TileLayout"]


class LayerTiles:
    """What one layer of a block needs to know; a plain class, so that no framework walks into it and casts it.

    Attributes:
        lo, hi: int32 [1 or B, Tq]: row i of sequence b sees the keys lo ≤ j < hi; lo = hi = 0 for a row that sees none.
        rows: int32 [7, ⌈Tq/tile⌉], per tile row m: ``base`` (tile (m, n) is packed at base + n), then first and end
            (exclusive) of the tiles n that are live in this layer, in the layer before, and in the layer after.
        columns: int32 [2, ⌈Tk/tile⌉]: first and end of the tile rows that may see tile column n.
    """

    def __init__(self, lo: Tensor, hi: Tensor, rows: Tensor, columns: Tensor) -> None:
        self.lo, self.hi, self.rows, self.columns = lo, hi, rows, columns


class TileLayout:
    """The packed live tiles of a block, the same for Z and E and for forward and backward.

    Tile (m, n) holds query rows m·tile … and keys n·tile …; it is live if some layer sees one of its elements in some
    sequence of the batch. Live tiles of one head are packed row by row: a buffer is [B, H, total, tile, tile].

    Args:
        config: the block's options.
        Tq, Tk: queries and keys.
        mask: documents, lengths or intervals beside the config's causality and windows.
        offset: position of the first query among the keys; default Tk − Tq.
        device: where attention runs.

    Raises:
        ValueError: the mask has parts that no interval of keys per row can say.

    Example:
        >>> TileLayout(CarriedConfig(tile=16), 64, 64).total
        10
    """

    def __init__(
        self, config: CarriedConfig, Tq: int, Tk: int, mask: Mask | None = None, offset: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        if mask is not None and (mask.keys is not None or mask.dense is not None):
            part = "keys" if mask.keys is not None else "dense"
            raise ValueError(
                f"mask has {part}; carried attention takes one interval of keys per row. Nearest legal calls: "
                "Mask.lengths (padding at either side), Mask.packed, Mask.intervals"
            )
        self.tile, self.Tq, self.Tk = config.tile, Tq, Tk
        self.offset = Tk - Tq if offset is None else offset
        self.uniform = config.uniform
        kinds = [config.window(i) for i in range(config.layers)]
        seen, spans = {}, {}
        for i, kind in enumerate(kinds):
            if kind not in seen:
                seen[kind] = _intervals(config.mask(i, mask), Tq, Tk, self.offset, device)
                spans[kind] = _tiles(*seen[kind], self.tile)

        first, end = spans[kinds[0]]
        for kind in list(spans)[1:]:
            first, end = _hull(first, end, *spans[kind])
        counts = end - first
        base = counts.cumsum(0) - counts - first
        self.total = self._total(config, mask, counts)
        self.layers: list[LayerTiles] = []
        columns = {kind: _columns(*span, (Tk + self.tile - 1) // self.tile) for kind, span in spans.items()}
        for i, kind in enumerate(kinds):
            before, after = kinds[max(i - 1, 0)], kinds[min(i + 1, config.layers - 1)]
            rows = torch.stack((base, *spans[kind], *spans[before], *spans[after])).to(torch.int32)
            self.layers.append(LayerTiles(*seen[kind], rows, columns[kind]))

    def _total(self, config: CarriedConfig, mask: Mask | None, counts: Tensor) -> int:
        """Live tiles a head; known without reading the device for causality and windows alone."""
        if mask is not None and (mask.bounds is not None or mask.left != UNBOUNDED or mask.right != UNBOUNDED):
            return int(counts.sum())
        rows, columns = (self.Tq + self.tile - 1) // self.tile, (self.Tk + self.tile - 1) // self.tile
        windows = [config.window(i) for i in range(config.layers)]
        back = columns if None in windows else -(-(max(windows) - 1) // self.tile)
        if config.causal and self.Tq == self.Tk and self.offset == 0:
            ramp = torch.sym_min(rows, back + 1)
            return ramp * (ramp + 1) // 2 + (rows - ramp) * (back + 1)
        # Queries that start anywhere: a bound, at most two tiles a row above the count.
        return rows * torch.sym_min(columns, back + 2 if config.causal else 2 * back + 2)

    def buffer(self, B: int, H: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised packed buffer [B, H, total, tile, tile]."""
        return torch.empty(B, H, self.total, self.tile, self.tile, dtype=dtype, device=device)

    def nbytes(self, B: int, H: int, itemsize: int = 2) -> int:
        """Bytes of one packed buffer."""
        return B * H * self.total * self.tile**2 * itemsize


def _intervals(mask: Mask, Tq: int, Tk: int, offset: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    i = torch.arange(Tq, device=device) + offset
    lo, hi = (i - mask.left).clamp(min=0)[None], (i + mask.right + 1).clamp(max=Tk)[None]
    if mask.bounds is not None:
        bounds = mask.bounds.to(device)
        lo, hi = torch.maximum(lo, bounds[..., 0]), torch.minimum(hi, bounds[..., 1])
    empty = lo >= hi
    return lo.masked_fill(empty, 0).to(torch.int32), hi.masked_fill(empty, 0).to(torch.int32)


def _tiles(lo: Tensor, hi: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """First and end of the live tiles of every tile row, over the batch; 0, 0 where there is none."""
    T = lo.shape[1]
    pad = (T + tile - 1) // tile * tile - T
    lo = torch.nn.functional.pad(lo.masked_fill(lo >= hi, UNBOUNDED), (0, pad), value=UNBOUNDED)
    hi = torch.nn.functional.pad(hi, (0, pad), value=0)
    first = lo.amin(0).view(-1, tile).amin(1) // tile
    end = (hi.amax(0).view(-1, tile).amax(1) + tile - 1) // tile
    return torch.where(end > 0, first, 0), end


def _hull(first: Tensor, end: Tensor, other_first: Tensor, other_end: Tensor) -> tuple[Tensor, Tensor]:
    far = lambda f, e: torch.where(e > f, f, UNBOUNDED)  # noqa: E731
    joined = torch.maximum(end, other_end)
    return torch.where(joined > 0, torch.minimum(far(first, end), far(other_first, other_end)), 0), joined


def _columns(first: Tensor, end: Tensor, count: int) -> Tensor:
    n = torch.arange(count, device=first.device)[:, None]
    live = (first <= n) & (n < end)
    m = torch.arange(first.shape[0], device=first.device)
    some = live.any(1)
    start = torch.where(live, m, UNBOUNDED).amin(1)
    stop = torch.where(live, m + 1, 0).amax(1)
    return torch.stack((torch.where(some, start, 0), torch.where(some, stop, 0))).to(torch.int32)
