"""Which tiles of the score matrix are live, where each is packed, and which keys a row sees: made once a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..mask import UNBOUNDED, Mask
from .arguments import check_integer, require
from .config import CarriedConfig

__all__ = ["LayerTiles", "TileLayout", "by_token", "room"]


class LayerTiles:
    """What one layer of a block needs to know; a plain class, so that no framework walks into it and casts it.

    Attributes:
        bounds: int32 [1, 2, 1 or B, Tq], of which lo and hi are views: row i of sequence b sees the keys lo ≤ j < hi;
            lo = hi = 0 for a row that sees none.
        rows: int32 [9, ⌈Tq/tile⌉], per tile row m: ``base`` (tile (m, n) is packed at base + n), then first and end
            (exclusive) of the tiles n that are live in this layer, in the one before, in the one after, and of those
            of which this layer sees every element.
        columns: int32 [4, ⌈Tk/tile⌉]: first and end of the tile rows that may see tile column n, and of an unbroken run
            of rows that see all of it.
        window: if not 0, query i sees the keys i − window < j ≤ i and no tensor is needed to say so.
    """

    def __init__(self, bounds: Tensor, rows: Tensor, columns: Tensor, window: int = 0) -> None:
        self.bounds, self.rows, self.columns, self.window = bounds, rows, columns, window

    @property
    def lo(self) -> Tensor:
        return self.bounds[0, 0]

    @property
    def hi(self) -> Tensor:
        return self.bounds[0, 1]


class TileLayout:
    """The packed live tiles of a block, the same for Z and E and for forward and backward.

    Tile (m, n) holds query rows m·tile … and keys n·tile …; it is live if some layer sees one of its elements in some
    sequence of the batch. Live tiles of one head are packed row by row, and one slot more takes what kernels write for
    dead tiles: a buffer is [B, H, total + 1, tile, tile].

    Attributes:
        total: live tiles of a head (an upper bound where queries and keys differ in number).
        mask, offset: see below.
        back: if not −1, every tile row m holds the tiles m − back … m as far as they exist, so that a kernel can
            compute where a row starts instead of reading it.
        plain: whether all layers are causal and nothing else.
        bounds: int32 [layers, 2, 1 or B, Tq], of all layers.
        shown: None if every key is seen by some query, else the keys that are (bool [1 or B, 1, Tk, 1]) and
            Tk / their number (fp32 [1 or B, 1, 1]).

    Args:
        config: the block's options.
        Tq, Tk: queries and keys.
        mask: documents, lengths or intervals beside the config's causality and windows.
        offset: position of the first query among the keys; default Tk − Tq.
        device: where attention runs.

    Raises:
        TypeError: options, a mask or a number of another type.
        ValueError: no tokens, a mask of other sizes, or one with parts that no interval of keys per row can say.

    Example:
        >>> TileLayout(CarriedConfig(tile=16), 64, 64).total
        10
    """

    def __init__(
        self, config: CarriedConfig, Tq: int, Tk: int, mask: Mask | None = None, offset: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        require("config", config, CarriedConfig, "TileLayout(CarriedConfig(), Tq, Tk)")
        Tq, Tk = check_integer("Tq", Tq), check_integer("Tk", Tk)
        if offset is not None:
            offset = check_integer("offset", offset, None, none=", or None for Tk − Tq")
        if mask is not None:
            require("mask", mask, Mask, "Mask.lengths(lengths)")
        if mask is not None and (mask.keys is not None or mask.dense is not None):
            part = "keys" if mask.keys is not None else "dense"
            raise ValueError(
                f"mask has {part}; carried attention takes one interval of keys per row. Nearest legal calls: "
                "Mask.lengths (padding at either side), Mask.packed, Mask.intervals"
            )
        if mask is not None and mask.bounds is not None and mask.bounds.dim():
            mask.check(mask.bounds.shape[0], 1, Tq, Tk)
        self.tile, self.Tq, self.Tk, self.mask = config.tile, Tq, Tk, mask
        self._made = (config.tile, config.causal, config.layers, config.uniform, config.windows)
        self.offset = Tk - Tq if offset is None else offset
        self.uniform = config.uniform
        square = Tq == Tk and self.offset == 0
        said = config.causal and mask is None and square
        self.plain = said and config.uniform and config.window(0) is None
        kinds = [config.window(i) for i in range(config.layers)]
        seen, spans, wholes = {}, {}, {}
        for i, kind in enumerate(kinds):
            if kind not in seen:
                seen[kind] = _intervals(config.mask(i, mask), Tq, Tk, self.offset, device)
                spans[kind] = _tiles(*seen[kind], self.tile)
                wholes[kind] = _whole(*seen[kind], self.tile)

        first, end = spans[kinds[0]]
        for kind in list(spans)[1:]:
            first, end = _hull(first, end, *spans[kind])
        counts = end - first
        base = counts.cumsum(0) - counts - first
        # Layers of which windows differ are never centred, which is what wants to know.
        shown = self._shown(config, mask, *seen[kinds[0]]) if config.uniform else None
        self.total, self.back, hides = self._count(config, mask, counts, shown)
        self.shown = _with_factor(shown) if hides else None
        self.layers: list[LayerTiles] = []
        count = (Tk + self.tile - 1) // self.tile
        columns = {kind: _columns(*spans[kind], *wholes[kind], count) for kind in spans}
        self.bounds = torch.stack([torch.stack(seen[kind]) for kind in kinds])
        for i, kind in enumerate(kinds):
            before, after = kinds[max(i - 1, 0)], kinds[min(i + 1, config.layers - 1)]
            rows = torch.stack((base, *spans[kind], *spans[before], *spans[after], *wholes[kind])).to(torch.int32)
            window = 0 if not said else UNBOUNDED if kind is None else kind
            self.layers.append(LayerTiles(self.bounds[i : i + 1], rows, columns[kind], window))

    def span(self, layer: int, count: int) -> Tensor:
        """Bounds of `count` layers up to `layer`; of one where all see the same keys."""
        return self.layers[layer].bounds if self.uniform else self.bounds[layer - count + 1 : layer + 1]

    def check(self, config: CarriedConfig, mask: Mask | None, offset: int | None) -> None:
        """Raise ValueError naming what differs, if this layout was made for other options, mask or offset.

        A layout of more layers serves a shorter block if all layers see the same keys. No mask stands for its own.
        """
        tile, causal, layers, uniform, windows = self._made
        for name, mine, given in (("tile", tile, config.tile), ("causal", causal, config.causal)):
            if mine != given:
                raise ValueError(f"layout was made for {name} = {mine}; expected {given}, the config's")
        alike = uniform and config.uniform
        if layers < config.layers or (layers > config.layers and not alike):
            raise ValueError(f"layout was made for layers = {layers}; expected {config.layers}, the config's")
        one = lambda w: w[0] if isinstance(w, tuple) else w  # noqa: E731
        if (one(windows) != one(config.windows)) if alike else (windows != config.windows):
            raise ValueError(f"layout was made for windows = {windows}; expected {config.windows}, the config's")
        if mask is not None and not _same(mask, self.mask):
            found = "no mask" if self.mask is None else "another mask"
            raise ValueError(f"layout was made for {found}; expected the carry's mask, or a carry without one")
        if offset is not None and offset != self.offset:
            raise ValueError(f"layout was made for offset = {self.offset}; expected {offset}, the carry's")

    @property
    def slots(self) -> int:
        """Tiles of one head in a buffer: the live ones and one that nothing reads."""
        return self.total + 1

    def mean(self, k: Tensor) -> Tensor:
        """k̄ [B, Hk, d] in fp32 (fp64 for fp64), over the keys that some query of their sequence sees.

        A key that none sees is not multiplied by 0, which would keep NaN, but left out. Nothing is read back.
        """
        real = torch.promote_types(k.dtype, torch.float32)
        if self.shown is None:
            return k.mean(2, dtype=real)
        seen, factor = self.shown
        return torch.where(seen, k, 0.0).mean(2, dtype=real) * factor

    def _shown(self, config: CarriedConfig, mask: Mask | None, lo: Tensor, hi: Tensor) -> Tensor | None:
        """Which keys some query sees, bool [1 or B, Tk]; None where it is clear from the options that all are."""
        if mask is None:
            if self.Tq == self.Tk and self.offset == 0:
                return None
            if config.window(0) is None and (not config.causal or self.offset + self.Tq >= self.Tk):
                return None
        # Intervals begin and end; keys within any are where more have begun than ended.
        steps = torch.zeros(lo.shape[0], self.Tk + 1, dtype=torch.int32, device=lo.device)
        one = torch.ones_like(lo)
        steps = steps.scatter_add(1, lo.long(), one).scatter_add(1, hi.long(), -one)
        return steps.cumsum(1)[:, :-1] > 0

    def _count(
        self, config: CarriedConfig, mask: Mask | None, counts: Tensor, shown: Tensor | None
    ) -> tuple[int, int, bool]:
        """Live tiles a head, known without reading the device for causality and windows alone; `back`; and whether
        a key may be hidden from all queries."""
        if mask is not None and (mask.bounds is not None or mask.left != UNBOUNDED or mask.right != UNBOUNDED):
            if shown is None:
                return int(counts.sum()), -1, False
            total, hidden = torch.stack((counts.sum(), (~shown).sum())).tolist()
            return total, -1, hidden > 0
        hides = shown is not None
        rows, columns = (self.Tq + self.tile - 1) // self.tile, (self.Tk + self.tile - 1) // self.tile
        windows = [config.window(i) for i in range(config.layers)]
        back = columns if None in windows else -(-(max(windows) - 1) // self.tile)
        if self.Tq == self.Tk and self.offset == 0:
            ramp = torch.sym_min(rows, back + 1)
            below = ramp * (ramp - 1) // 2 + (rows - ramp) * back
            return rows + below * (1 if config.causal else 2), ramp - 1 if config.causal else -1, hides
        # Queries that start anywhere: a bound, at most two tiles a row above the count.
        return rows * torch.sym_min(columns, back + 2 if config.causal else 2 * back + 2), -1, hides

    def buffer(self, B: int, H: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised packed buffer [B, H, total + 1, tile, tile]."""
        return torch.empty(B, H, self.slots, self.tile, self.tile, dtype=dtype, device=device)

    def nbytes(self, B: int, H: int, itemsize: int = 2) -> int:
        """Bytes of one packed buffer."""
        return B * H * self.slots * self.tile**2 * itemsize


def _same(a: Mask, b: Mask | None) -> bool:
    """Whether two masks hold the same numbers; on a GPU, whose numbers are not read here, the same tensors."""
    if b is None or (a.left, a.right) != (b.left, b.right):
        return False
    for x, y in ((a.bounds, b.bounds), (a.keys, b.keys), (a.dense, b.dense)):
        if x is y:
            continue
        if x is None or y is None or x.shape != y.shape or {x.device.type, y.device.type} != {"cpu"}:
            return False
        if not torch.equal(x, y):
            return False
    return True


def _with_factor(shown: Tensor) -> tuple[Tensor, Tensor]:
    """Seen keys and what turns the mean over all keys, zero where hidden, into theirs."""
    count = shown.sum(1, dtype=torch.float32).clamp(min=1.0)
    return shown[:, None, :, None], (shown.shape[1] / count)[:, None, None]


def by_token(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Room for […, heads, T, d] that is […, T, heads, d] in memory."""
    return like.new_empty_strided(*room(*shape), dtype=dtype or like.dtype)


def room(*shape: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of […, heads, T, d] that is […, T, heads, d] in memory."""
    *outer, heads, T, d = shape
    strides, size = [T * heads * d], T * heads * d
    for n in outer[:0:-1]:
        size *= n
        strides.insert(0, size)
    return shape, (*strides, d, heads * d, 1)


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


def _whole(lo: Tensor, hi: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """First and end of the tiles of which every row sees every key, in every sequence; first = end where none.

    A row of tiles that reaches beyond the last query has none: kernels mask there what nothing wrote.
    """
    T = lo.shape[1]
    pad = (T + tile - 1) // tile * tile - T
    lo = torch.nn.functional.pad(lo.amax(0), (0, pad)).view(-1, tile).amax(1)
    hi = torch.nn.functional.pad(hi.amin(0), (0, pad)).view(-1, tile).amin(1)
    first = (lo + tile - 1) // tile
    return first, torch.maximum(first, hi // tile)


def _hull(first: Tensor, end: Tensor, other_first: Tensor, other_end: Tensor) -> tuple[Tensor, Tensor]:
    far = lambda f, e: torch.where(e > f, f, UNBOUNDED)  # noqa: E731
    joined = torch.maximum(end, other_end)
    return torch.where(joined > 0, torch.minimum(far(first, end), far(other_first, other_end)), 0), joined


def _columns(first: Tensor, end: Tensor, whole_first: Tensor, whole_end: Tensor, count: int) -> Tensor:
    n = torch.arange(count, device=first.device)[:, None]
    m = torch.arange(first.shape[0], device=first.device)
    start, stop = _run((first <= n) & (n < end), m)
    whole = (whole_first <= n) & (n < whole_end)
    run_start, _ = _run(whole, m)
    # The first row after the run's start that does not see the whole tile ends the run.
    broken = torch.where(~whole & (m >= run_start[:, None]), m, first.shape[0]).amin(1)
    return torch.stack((start, stop, run_start, torch.where(whole.any(1), broken, run_start))).to(torch.int32)


def _run(chosen: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """First and end of the chosen rows of every column; 0, 0 where there is none."""
    some = chosen.any(1)
    start = torch.where(chosen, m, UNBOUNDED).amin(1)
    return torch.where(some, start, 0), torch.where(chosen, m + 1, 0).amax(1)
