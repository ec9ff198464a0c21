"""Tile shapes of the carried kernels and what else is tuned: read from tiles.json, which a sweep writes."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["KINDS", "Shape", "backward_tiles", "forward_tiles", "grouped", "kind_of", "product_tiles", "tuned", "use"]

SHARED = 232448
"""Bytes of shared memory a program may use on sm_90."""

CUDNN = False
"""Whether layers that are causal attention and nothing else go forward through cuDNN."""

TRANSIENT = 512 << 20
"""Bytes that a backward pass which no buffer of E outlives may use for E at a time."""


class Shape(NamedTuple):
    """queries × keys of a tile, warps, pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


KINDS = (
    "forward", "forward, carried", "forward, summed", "backward", "backward, carried", "backward, summed", "product",
    "product of keys",
)  # fmt: skip
"""Kernels that have tiles of their own: `carried` reads or writes packed tiles (backward: reads Z or E), `summed` forms
the scores of several layers, `product` is dQ = s E K, `product of keys` dK = s Eᵀ Q."""

WIDE: dict[str, Shape] = {}
"""16-bit tiles of heads wider than 64."""

NARROW: dict[str, Shape] = {}
"""16-bit tiles of heads up to 64 wide."""

SINGLE = Shape(32, 32, 4, 1)
"""fp32 tiles."""

FILL = 0.0
"""Programs a multiprocessor from which the heads of a key head are summed in registers; below it each has a program."""


def use(table: dict) -> None:
    """Take the tiles of a table as tiles.json holds it.

    Args:
        table: ``wide`` and ``narrow``, from :data:`KINDS` to [queries, keys, warps, stages], and ``fill``.

    Raises:
        ValueError: a kernel that is not in the table or not in :data:`KINDS`, named.
    """
    global FILL
    for name in ("wide", "narrow"):
        wrong = set(KINDS) ^ set(table[name])
        if wrong:
            raise ValueError(f"{name} has the kernels {sorted(table[name])}; expected {sorted(KINDS)}")
    WIDE.update({kind: Shape(*shape) for kind, shape in table["wide"].items()})
    NARROW.update({kind: Shape(*shape) for kind, shape in table["narrow"].items()})
    FILL = table["fill"]


def tuned() -> tuple:
    """All that is tuned, as it is now: what was worked out from it holds while this is the same."""
    return FILL, TRANSIENT, *WIDE.values(), *NARROW.values()


use(json.loads(Path(__file__).with_name("tiles.json").read_text()))


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; an H200's for anything else."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def grouped(programs: int, device: torch.device) -> bool:
    """Whether `programs`, one a block of keys and key head, are enough to sum a key head's query heads in registers."""
    return programs >= FILL * multiprocessors(device)


def kind_of(direction: str, count: int, carried: bool) -> str:
    """The kernel's name in the tables: `count` summed layers, `carried` if packed scores or gradients enter."""
    return direction + (", summed" if count > 1 else ", carried" if carried else "")


def forward_tiles(width: int, bytes_: int, tile: int, count: int, packed: int) -> Shape:
    """Tiles of the forward pass: `count` summed layers, `packed` buffers read or written."""

    def elements(s: Shape) -> int:
        return count * s.queries * width + s.stages * s.keys * ((count + 1) * width + packed * s.queries)

    return _fit(kind_of("forward", count, packed > 0), width, bytes_, tile, elements)


def backward_tiles(width: int, bytes_: int, tile: int, count: int, packed: int) -> Shape:
    """Tiles of the pass over keys: `packed` buffers read (Z, E); E is written besides."""

    def elements(s: Shape) -> int:
        # Compiled for sm_90: E on its way out takes a tile, and so does each packed tile that enters, every stage.
        passing = (count + 1) * width * s.queries + packed * s.queries * s.keys
        return (count + 1) * width * s.keys + s.stages * passing + s.queries * s.keys

    return _fit(kind_of("backward", count, packed > 0), width, bytes_, tile, elements)


def product_tiles(width: int, bytes_: int, tile: int, keyed: bool = False) -> Shape:
    """Tiles of dQ = s E K, or of dK = s Eᵀ Q where keyed."""

    def elements(s: Shape) -> int:
        return s.stages * ((s.queries if keyed else s.keys) * width + s.keys * s.queries)

    return _fit("product of keys" if keyed else "product", width, bytes_, tile, elements)


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
