"""Tile shapes: a small table of measured choices; the nearest entry serves what was not measured."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits", "Tiles", "backward_tiles", "fold_tiles", "forward_tiles", "projection_tiles"]


@dataclass(frozen=True)
class Tiles:
    """queries × keys of a tile, warps, and pipeline stages of the saturated and of the band loops."""

    queries: int
    keys: int
    warps: int
    stages: int
    band_stages: int


@dataclass(frozen=True)
class Limits:
    """What a device allows: bytes of shared memory a program, and whether it has tensor descriptors (sm_90 on)."""

    shared: int
    descriptors: bool

    @classmethod
    def of(cls, capability: tuple[int, int], shared: int) -> Limits:
        return cls(shared, capability >= (9, 0))


def forward_tiles(d: int, bytes_: int, N: int, kinds: frozenset[str], sides: bool, limits: Limits) -> Tiles:
    """Tiles of the forward pass. d is the wider of the padded head widths, kinds the score terms' kinds."""
    if bytes_ == 4:
        return _fit(Tiles(32, 32, 4, 2, 2), d, bytes_, len(kinds) + 2, limits)
    if "value" in kinds:
        # What P·V leaves to the fold afterwards is decided on 64 × 64 blocks.
        return _fit(Tiles(64, 64, 4 if d <= 128 else 8, 3, 2), d, bytes_, len(kinds) + 2, limits)
    if d > 64:
        wide = (
            Tiles(128, 64, 8, 3, 2) if d <= 128 and "scalar" not in kinds else Tiles(64, 64, 4 if d <= 128 else 8, 3, 2)
        )
        return _fit(wide, d, bytes_, len(kinds) + 2, limits)
    if not kinds:
        best = Tiles(128, 64, 8, 3, 2)
    elif not sides:
        best = Tiles(64, 64, 4, 3, 3)
    elif "key" in kinds and "scalar" not in kinds:
        best = Tiles(128, 64, 4, 3, 2)
    else:
        best = Tiles(64, 128, 4, 3, 2) if N >= 4096 else Tiles(64, 64, 4, 3, 2)
    return _fit(best, d, bytes_, len(kinds) + 2, limits)


def backward_tiles(d: int, bytes_: int, kinds: frozenset[str], keyed: bool, limits: Limits) -> Tiles:
    """Tiles of a backward pass; keyed: the pass over keys. Bands live on 64 × 64 blocks, so none is larger there."""
    if bytes_ == 4:
        return _fit(Tiles(32, 32, 4, 2, 2), d, bytes_, len(kinds) + 3, limits)
    if d > 128:
        return _fit(Tiles(32, 64, 8, 2, 2) if keyed else Tiles(64, 32, 8, 2, 2), d, bytes_, len(kinds) + 3, limits)
    if d > 64:
        return _fit(Tiles(64, 64, 8, 2, 2), d, bytes_, len(kinds) + 3, limits)
    if not kinds and not keyed:
        return _fit(Tiles(128, 64, 4, 3, 2), d, bytes_, 3, limits)
    return _fit(Tiles(64, 64, 4, 3, 2), d, bytes_, len(kinds) + 3, limits)


def projection_tiles(d: int, bytes_: int, others: int, sides: bool) -> tuple[int, int, int, int]:
    """(rows, columns, warps, stages) of the projection."""
    if not sides and bytes_ == 2 and d <= 64 and others >= 1024:
        return 64, 256, 8, 3
    if bytes_ == 4:
        return 16, 32, 4, 2
    if d > 128:
        return 32, 64, 4, 2
    if d > 64:
        return 64, 64, 4, 2
    return (64, 128, 4, 3) if others >= 2048 else (64, 64, 4, 3)


def fold_tiles(d: int, bytes_: int) -> tuple[int, int, int, int]:
    """(rows, columns, warps, stages) of the fold and collect kernels."""
    if bytes_ == 4:
        return 16, 32, 4, 2
    return (64, 64, 4, 3) if d <= 64 else (32, 64, 4, 2)


def _fit(tiles: Tiles, d: int, bytes_: int, loads: int, limits: Limits) -> Tiles:
    """Fewer stages, then smaller tiles, until a rough count of the tiles in shared memory fits."""
    while True:
        resident = 2 * max(tiles.queries, tiles.keys) * d * bytes_
        stage = (2 * max(tiles.queries, tiles.keys) * d + max(loads - 2, 0) * tiles.queries * tiles.keys) * bytes_
        if resident + max(tiles.stages, tiles.band_stages) * stage <= limits.shared or tiles.queries <= 16:
            return tiles
        if tiles.stages > 2 or tiles.band_stages > 2:
            tiles = Tiles(tiles.queries, tiles.keys, tiles.warps, min(tiles.stages, 2), min(tiles.band_stages, 2))
        elif tiles.stages > 1 and tiles.queries <= 32:
            tiles = Tiles(tiles.queries, tiles.keys, tiles.warps, 1, 1)
        else:
            tiles = Tiles(
                max(tiles.queries // 2, 16), max(tiles.keys // 2, 16), tiles.warps, tiles.stages, tiles.band_stages
            )
