"""Tile shapes: a small table of measured choices, and what a user's own measurements replace in it.

The nearest entry serves what was not measured. ``tilewise bench tune`` writes the file of a user's GPU (:mod:`.tuned`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from .tuned import Table, table_of

__all__ = [
    "MEASURED", "Limits", "Tiles", "backward_tiles", "fold_tiles", "forward_tiles", "projection_tiles", "using",
]  # fmt: skip

SKEW_IN_REGISTERS = True
"""Whether calls that leave the skew to the kernels take the Hopper kernels that do it in registers (:mod:`.band`,
:mod:`.linear_backward`)."""

OVERLAPPED = True
"""Whether scores with at most a number an offset take the Hopper forward that forms exponentials beside the products
(:mod:`.overlapped`)."""

SPECIALISED: dict[int, int] = {128: 512}
"""Head width ↦ keys from which such calls take the forward with a warp for copies and groups of warps that share tiles
(:mod:`.specialised`) instead; widths that are not here never do. T5 took 1.411 ms for 1.752 at 8,192 tokens and width
128, 0.404 for 0.474 at 2,048, and no term 0.118 for 0.140 at 512; at width 64 0.941 for 0.906 and 0.278 for 0.258."""


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
    """What a device allows: bytes of shared memory a program, tensor descriptors (sm_90 on), Hopper's own kernels.

    `gpu` is the name under which its own tile shapes would be found.
    """

    shared: int
    descriptors: bool
    hopper: bool = False
    gpu: str = ""

    @classmethod
    def of(cls, capability: tuple[int, int], shared: int, gpu: str = "") -> Limits:
        return cls(shared, capability >= (9, 0), capability == (9, 0), gpu)


MEASURED: Table = {
    ("forward", "plain"): ((0, (64, 64, 4, 3, 2)), (2048, (64, 128, 4, 3, 2))),
    ("forward", "scalar"): ((0, (64, 64, 4, 2, 2)), (4096, (64, 128, 4, 2, 1))),
    ("forward", "query"): ((0, (64, 64, 4, 3, 2)),),
    ("forward", "key"): ((0, (128, 64, 4, 3, 2)),),
    ("forward", "identity"): ((0, (64, 64, 4, 3, 3)),),
    ("forward", "value"): ((0, (64, 64, 4, 3, 2)),),
    ("queries", "plain"): ((0, (128, 64, 4, 3, 2)),),
    ("queries", "scalar"): ((0, (64, 64, 4, 3, 2)),),
    ("queries", "query"): ((0, (64, 64, 4, 3, 2)),),
    ("queries", "key"): ((0, (64, 64, 4, 3, 3)),),
    ("queries", "identity"): ((0, (64, 64, 4, 3, 3)),),
    ("queries", "value"): ((0, (64, 64, 4, 3, 2)),),
    ("keys", "plain"): ((0, (64, 64, 4, 3, 2)),),
    ("keys", "scalar"): ((0, (64, 64, 4, 3, 3)),),
    ("keys", "query"): ((0, (64, 64, 4, 3, 3)),),
    ("keys", "key"): ((0, (64, 64, 4, 3, 3)),),
    ("keys", "identity"): ((0, (64, 64, 4, 3, 2)),),
    ("keys", "value"): ((0, (64, 64, 4, 3, 2)),),
    ("projection", "query"): ((0, (64, 64, 4, 3)),),
    ("projection", "key"): ((0, (64, 64, 4, 3)), (2048, (64, 128, 8, 3))),
    ("projection", "identity"): ((0, (64, 64, 4, 3)), (1024, (64, 128, 8, 3)), (4096, (64, 256, 8, 3))),
    ("fold", ""): ((0, (64, 64, 4, 3)),),
}
"""(what, class of call) ↦ (keys from, shape), for 16-bit inputs of width 64 on an H200 (docs/relative-tuning.md)."""


WIDE: dict[tuple[str, str], tuple[int, int, int, int, int]] = {
    ("queries", "plain"): (64, 64, 4, 2, 2),
    ("queries", "scalar"): (64, 64, 4, 2, 2),
    ("queries", "query"): (64, 64, 4, 2, 2),
    ("queries", "key"): (64, 32, 4, 3, 3),
    ("queries", "identity"): (64, 64, 4, 2, 2),
    ("queries", "value"): (64, 32, 4, 3, 3),
    ("keys", "plain"): (32, 64, 4, 3, 3),
    ("keys", "scalar"): (32, 64, 4, 3, 3),
    ("keys", "query"): (32, 64, 4, 3, 2),
    ("keys", "key"): (32, 64, 4, 3, 2),
    ("keys", "identity"): (32, 64, 4, 2, 2),
    ("keys", "value"): (32, 64, 4, 2, 2),
}
"""(pass, class of call) ↦ tiles of the backward at widths from 65 to 128, at all lengths. Eight warps on 64 rows split
every product's columns, and take twice as long."""


_used: list[Table] = []


@contextmanager
def using(table: Table) -> Iterator[None]:
    """Inside, these entries come before all others."""
    _used.append(table)
    try:
        yield
    finally:
        _used.remove(table)


def _measured(what: str, kind: str, N: int, gpu: str) -> tuple[int, ...]:
    tables = (*reversed(_used), table_of(gpu), MEASURED)
    entries = next(table[what, kind] for table in tables if (what, kind) in table)
    return [shape for first, shape in entries if N >= first][-1]


def forward_tiles(d: int, bytes_: int, N: int, kind: str, limits: Limits) -> Tiles:
    """Tiles of the forward pass. d is the wider of the padded head widths, kind the class of the call."""
    if bytes_ == 4:
        return _fit(Tiles(32, 32, 4, 2, 2), d, bytes_, limits)
    if d <= 64:
        return _fit(Tiles(*_measured("forward", kind, N, limits.gpu)), d, bytes_, limits)
    # What value-side terms leave to the fold afterwards is decided on 64 × 64 blocks.
    tall = d <= 128 and kind not in ("value", "identity")
    return _fit(Tiles(128, 64, 8, 3, 2) if tall else Tiles(64, 64, 4 if d <= 128 else 8, 3, 2), d, bytes_, limits)


def backward_tiles(d: int, bytes_: int, N: int, kind: str, keyed: bool, limits: Limits) -> Tiles:
    """Tiles of a backward pass; keyed: the pass over keys. Bands live on 64 × 64 blocks, so few are larger there."""
    if bytes_ == 4:
        return _fit(Tiles(32, 32, 4, 2, 2), d, bytes_, limits)
    if d > 128:
        return _fit(Tiles(32, 64, 8, 2, 2) if keyed else Tiles(64, 32, 8, 2, 2), d, bytes_, limits)
    if d > 64:
        return _fit(Tiles(*WIDE["keys" if keyed else "queries", kind]), d, bytes_, limits)
    return _fit(Tiles(*_measured("keys" if keyed else "queries", kind, N, limits.gpu)), d, bytes_, limits)


def projection_tiles(d: int, bytes_: int, N: int, kind: str, gpu: str = "") -> tuple[int, ...]:
    """(rows, columns, warps, stages) of the projection."""
    if bytes_ == 4:
        return 16, 32, 4, 2
    if d > 64:
        return (64, 64, 4, 2) if d <= 128 else (32, 64, 4, 2)
    return _measured("projection", kind if ("projection", kind) in MEASURED else "query", N, gpu)


def fold_tiles(d: int, bytes_: int, N: int, gpu: str = "") -> tuple[int, ...]:
    """(rows, columns, warps, stages) of the fold and collect kernels."""
    if bytes_ == 4:
        return 16, 32, 4, 2
    return _measured("fold", "", N, gpu) if d <= 64 else (32, 64, 4, 2)


def _fit(tiles: Tiles, d: int, bytes_: int, limits: Limits) -> Tiles:
    """Fewer stages, then smaller tiles, until a rough count of the tiles in shared memory fits the device."""
    while True:
        longest = max(tiles.queries, tiles.keys)
        stage = (2 * longest * d + tiles.queries * tiles.keys) * bytes_
        if 2 * longest * d * bytes_ + max(tiles.stages, tiles.band_stages) * stage <= limits.shared or longest <= 16:
            return tiles
        if max(tiles.stages, tiles.band_stages) > 2:
            tiles = replace(tiles, stages=min(tiles.stages, 2), band_stages=min(tiles.band_stages, 2))
        elif tiles.stages > 1 and longest <= 32:
            tiles = replace(tiles, stages=1, band_stages=1)
        elif tiles.queries != tiles.keys:
            tiles = replace(tiles, queries=min(tiles.queries, tiles.keys), keys=min(tiles.queries, tiles.keys))
        else:
            tiles = replace(tiles, queries=max(tiles.queries // 2, 16), keys=max(tiles.keys // 2, 16))
