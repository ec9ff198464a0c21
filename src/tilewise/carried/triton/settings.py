"""Tile shapes of the carried kernels and what else is tuned: read from tiles.json, which a sweep writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = [
    "KEYS", "KINDS", "MOST", "SHARED", "Shape", "backward_tiles", "decode_step", "forward_tiles", "grouped", "kind_of",
    "lacking", "product_tiles", "tuned", "use",
]  # fmt: skip

SHARED = 232448
"""Bytes of shared memory a program may use on sm_90."""

SPARE = 1280
"""Bytes beside tiles: sums over rows, barriers. Compiled for sm_90 (tests/carried/shared_memory.py): up to 1,120."""

CUDNN = False
"""Whether layers that are causal attention and nothing else go forward through cuDNN."""

TRANSIENT = 512 << 20
"""Bytes that a backward pass which no buffer of E outlives may use for E at a time."""

MOST = 4
"""Layers whose scores one kernel sums."""

KEYS = 64
"""Keys of a step of decoding, and what the lengths of its splits are multiples of."""


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


def _scratch(s: Shape, dropout: bool) -> int:
    """Bytes to bring what dropout draws into the layout of P: up to 1.5 an element, compiled for sm_90."""
    return SPARE + (2 * s.queries * s.keys if dropout else 0)


def forward_tiles(
    width: int, bytes_: int, tile: int, count: int, packed: int, *, dropout: bool = False, shared: int = SHARED
) -> Shape:
    """Tiles of the forward pass: `count` summed layers, `packed` buffers read or written.

    Args:
        width: padded head width.
        bytes_: of an element of the inputs.
        tile: side of a packed tile.
        count, packed: see above.
        dropout: whether P is dropped.
        shared: bytes of shared memory a program may use.
    """

    def needed(s: Shape) -> int:
        if bytes_ == 4:
            return _single(s, width, count)
        loaded = count * s.queries * width + s.stages * s.keys * ((count + 1) * width + packed * s.queries)
        return 2 * loaded + _scratch(s, dropout)

    return _fit(kind_of("forward", count, packed > 0), width, bytes_, tile, shared, needed)


def backward_tiles(
    width: int, bytes_: int, tile: int, count: int, packed: int, *, dropout: bool = False, shared: int = SHARED
) -> Shape:
    """Tiles of the pass over keys: `packed` buffers read (Z, E); E is written besides. See :func:`forward_tiles`."""

    def needed(s: Shape) -> int:
        if bytes_ == 4:
            return _single(s, width, count)
        # Compiled for sm_90: E on its way out takes a tile, and so does each packed tile that enters, every stage.
        passing = (count + 1) * width * s.queries + packed * s.queries * s.keys
        return 2 * ((count + 1) * width * s.keys + s.stages * passing + s.queries * s.keys) + _scratch(s, dropout)

    return _fit(kind_of("backward", count, packed > 0), width, bytes_, tile, shared, needed)


def product_tiles(width: int, bytes_: int, tile: int, keyed: bool = False, *, shared: int = SHARED) -> Shape:
    """Tiles of dQ = s E K, or of dK = s Eᵀ Q where keyed."""

    def needed(s: Shape) -> int:
        return bytes_ * s.stages * ((s.queries if keyed else s.keys) * width + s.keys * s.queries) + SPARE

    return _fit("product of keys" if keyed else "product", width, bytes_, tile, shared, needed)


def _within(shape: Shape, tile: int) -> Shape:
    return shape._replace(queries=min(shape.queries, tile), keys=min(shape.keys, tile))


def _single(s: Shape, width: int, count: int) -> int:
    """Bytes of the fp32 kernels, none of whose loads are buffered: operands, and three tiles of scores."""
    return 4 * (2 * (count + 1) * max(s.queries, s.keys) * width + 3 * s.queries * s.keys) + SPARE


def _fit(kernel: str, width: int, bytes_: int, tile: int, shared: int, needed: Callable[[Shape], int]) -> Shape:
    """Fewer stages, then fewer keys, then fewer queries, until the bytes needed fit."""
    shape = _within(SINGLE if bytes_ == 4 else (WIDE if width > 64 else NARROW)[kernel], tile)
    while needed(shape) > shared:
        if shape.stages > 1:
            shape = shape._replace(stages=shape.stages - 1)
        elif shape.keys > 32:
            shape = shape._replace(keys=shape.keys // 2)
        elif shape.queries > 32:
            shape = shape._replace(queries=shape.queries // 2)
        elif max(shape.keys, shape.queries) > 16:
            shape = shape._replace(keys=16, queries=16)
        else:
            raise ValueError(f"{kernel} needs {needed(shape)} bytes of shared memory; found {shared}: see `lacking`")
    return shape


@lru_cache(maxsize=256)
def lacking(width: int, bytes_: int, tile: int, count: int, shared: int) -> bool:
    """Whether a program has too little shared memory for kernels that sum the scores of `count` layers."""
    try:
        backward_tiles(width, bytes_, tile, count, 2, dropout=True, shared=shared)
        forward_tiles(width, bytes_, tile, count, 2, dropout=True, shared=shared)
        product_tiles(width, bytes_, tile, shared=shared)
    except ValueError:
        return True
    return False


@lru_cache(maxsize=256)
def decode_step(rows: int, width: int, bytes_: int, shared: int = SHARED) -> tuple[int, int] | None:
    """(keys, stages) of a step of decoding with `rows` query rows a program, or None if none fits.

    As compiled for sm_90 and sm_86: Q, K and V, and the fp32 row of scores that enters, which is buffered in every
    stage; K and V in every stage if 16-bit, in one less if fp32.
    """

    def needed(keys: int, stages: int) -> int:
        buffered = stages if bytes_ == 2 else max(stages - 1, 1)
        return bytes_ * width * (rows + 2 * buffered * keys) + 4 * stages * rows * keys + SPARE

    first = 3 if bytes_ == 2 else 2
    legal = [(KEYS, stages) for stages in range(first, 0, -1)] + [(keys, 1) for keys in (32, 16)]
    return next((step for step in legal if needed(*step) <= shared), None)
