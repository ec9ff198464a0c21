"""Tile shapes of the carried kernels. Chosen by what the compiler reports for sm_90, not by measured times."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Shape", "again_tiles", "backward_tiles", "forward_tiles", "product_tiles"]

SHARED = 232448
"""Bytes of shared memory a program may use on sm_90."""


CUDNN = False
"""Whether layers that are causal attention and nothing else go forward through cuDNN."""


class Shape(NamedTuple):
    """queries × keys of a tile, warps, pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


WIDE = {
    "forward": Shape(128, 64, 8, 3),
    "backward": Shape(128, 64, 8, 2),
    "backward, summed": Shape(64, 64, 8, 2),
    "again": Shape(64, 64, 4, 2),
    "product": Shape(128, 64, 8, 3),
}
"""16-bit tiles of heads wider than 64. By what the compiler reports for sm_90 at 128: the pass over keys holds one
program a multiprocessor either way (255 registers, 8 warps); with 128 queries its products are 64 columns wide a warp
group instead of 32, and it spills 0 to 108 bytes instead of 4 to 124 (Triton 3.6). Where layers are
summed, 128 do not fit twice."""

NARROW = {
    "forward": Shape(128, 64, 4, 3),
    "backward": Shape(64, 64, 4, 3),
    "backward, summed": Shape(64, 64, 4, 3),
    "again": Shape(64, 64, 4, 2),
    "product": Shape(128, 64, 8, 3),
}
"""16-bit tiles of heads up to 64 wide."""

SINGLE = Shape(32, 32, 4, 1)
"""fp32 tiles."""


def forward_tiles(width: int, bytes_: int, tile: int, count: int, packed: int) -> Shape:
    """Tiles of the forward pass: `count` summed layers, `packed` buffers read or written."""

    def elements(s: Shape) -> int:
        return count * s.queries * width + s.stages * s.keys * ((count + 1) * width + packed * s.queries)

    return _fit("forward", width, bytes_, tile, elements)


def backward_tiles(width: int, bytes_: int, tile: int, count: int, packed: int) -> Shape:
    """Tiles of the pass over keys."""

    def elements(s: Shape) -> int:
        # Compiled for sm_90: what is not K, V, Q and dO takes 3.1 to 3.4 tiles of scores, one without a pipeline.
        tiles = 1.0 if s.stages == 1 else 3.5
        return (count + 1) * width * (s.keys + s.stages * s.queries) + int(tiles * s.queries * s.keys)

    return _fit("backward" if count == 1 else "backward, summed", width, bytes_, tile, elements)


def again_tiles(width: int, bytes_: int, tile: int, count: int, packed: int) -> Shape:
    """Tiles of dQ where the gradient of the scores is formed again."""

    def elements(s: Shape) -> int:
        passing = s.keys * ((count + 1) * width + packed * s.queries)
        return (count + 1) * s.queries * width + s.stages * passing + s.queries * s.keys

    return _fit("again", width, bytes_, tile, elements)


def product_tiles(width: int, bytes_: int, tile: int) -> Shape:
    """Tiles of dQ."""
    return _fit("product", width, bytes_, tile, lambda s: s.stages * s.keys * (width + s.queries))


def _within(shape: Shape, tile: int) -> Shape:
    return shape._replace(queries=min(shape.queries, tile), keys=min(shape.keys, tile))


def _fit(kernel: str, width: int, bytes_: int, tile: int, elements) -> Shape:
    """Fewer stages, then fewer keys, then fewer queries, until the count of 2-byte elements fits in shared memory."""
    if bytes_ == 4:
        return _within(SINGLE, tile)
    shape = _within((WIDE if width > 64 else NARROW)[kernel], tile)
    while 2 * elements(shape) > SHARED:
        if shape.stages > 1:
            shape = shape._replace(stages=shape.stages - 1)
        elif shape.keys > 32:
            shape = shape._replace(keys=shape.keys // 2)
        elif shape.queries > 32:
            shape = shape._replace(queries=shape.queries // 2)
        else:
            return shape
    return shape
