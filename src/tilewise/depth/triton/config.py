"""Measured tile table (H200, bf16): warps, tiles and program counts by width, number of tokens and sources."""

from __future__ import annotations

from triton import cdiv, next_power_of_2

__all__ = [
    "combine_tiles",
    "dv_tiles",
    "few",
    "inner_tiles",
    "merge_bwd",
    "merge_warps",
    "mix_bwd",
    "mix_warps",
    "score_tiles",
]

SMS = 132
UNROLLED = 16
"""Up to this many sources travel as kernel arguments; more are read through a device table of addresses."""


def few(T: int) -> bool:
    """Decode-sized: fewer rows than keep the card busy, so that latency counts and not bytes."""
    return T <= 1024


def row_block(d: int) -> int:
    return max(next_power_of_2(d), 256)


def merge_warps(T: int, d: int) -> int:
    block = row_block(d)
    if few(T):
        return min(max(block // 1024, 1), 16)
    return min(max(block // 2048, 1), 16) if block > 2048 else 4


def mix_warps(T: int, d: int, n: int) -> int:
    block = row_block(d)
    if n == 2 and not few(T):
        return min(max(block // 2048, 4), 16)
    return min(max(block // 1024, 4), 16)


def merge_bwd(T: int, d: int, size: int) -> dict:
    """programs, num_warps, STAGES. Two persistent programs an SM: one loads while the other reduces.

    Each stage but the first keeps a row of four tensors in shared memory.
    """
    block = row_block(d)
    warps = min(max(block // 512, 4), 16)
    stage = 4 * block * size
    stages = 3 if 2 * stage <= 72 << 10 else 2 if stage <= 136 << 10 else 1
    return {"programs": min(T, SMS * (2 if warps < 16 else 1)), "num_warps": warps, "STAGES": stages}


def mix_bwd(T: int, d: int) -> dict:
    block = row_block(d)
    warps = min(max(block // 512, 4), 16)
    return {"programs": min(T, SMS * (2 if warps < 16 else 1)), "num_warps": warps}


def score_tiles(T: int, d: int, S: int, size: int) -> dict:
    """BT tokens, BK columns, BS queries, splits of d; `size` is the element size in bytes."""
    block_s = min(max(next_power_of_2(S), 16), 128 if size == 2 else 32)
    if not few(T):
        return {"BT": 32, "BK": 64 if size == 2 else 32, "BS": block_s, "splits": 1, "num_warps": 4, "STAGES": 3}
    splits = max(1, min(cdiv(d, 512), 16))
    return {"BT": 16, "BK": 128 if size == 2 else 32, "BS": block_s, "splits": splits, "num_warps": 4, "STAGES": 3}


def combine_tiles(T: int, d: int, n: int, S: int, size: int) -> dict:
    """BS x BT = 32 rows on the left of the dot, BN x BT >= 16 in its sum; `span` tiles of BD columns a program."""
    block_s = min(max(next_power_of_2(S), 1), 16)
    block_t = 32 // block_s
    block_n = min(max(next_power_of_2(n), -(-16 // block_t)), 16)
    if size == 4:
        return {"BS": block_s, "BT": block_t, "BN": block_n, "BD": 32, "span": 8, "num_warps": 4, "STAGES": 2}
    block_d = 128 if few(T) else 256
    if block_n * block_t > 32:
        block_d = 64
    span = cdiv(cdiv(d, block_d), 8 if few(T) else 2)
    return {"BS": block_s, "BT": block_t, "BN": block_n, "BD": block_d, "span": span, "num_warps": 4, "STAGES": 3}


def inner_tiles(n: int, S: int, size: int) -> dict:
    block_s = min(max(next_power_of_2(S), 1), 16)
    block_t = 32 // block_s
    block_n = min(max(next_power_of_2(n), -(-16 // block_t)), 32 // block_t)
    return {"BS": block_s, "BT": block_t, "BN": block_n, "BK": 128 if size == 2 else 32, "num_warps": 4, "STAGES": 3}


def dv_tiles(T: int, d: int, n: int, S: int, size: int) -> dict:
    """`programs` groups of tokens; each group and each BD columns give one partial of dQ."""
    tiles = inner_tiles(n, S, size)
    block_d = 128 if size == 2 else 32
    columns = cdiv(d, block_d) * cdiv(n, tiles["BN"])
    programs = max(1, min(cdiv(T, tiles["BT"]), cdiv(4 * SMS, columns)))
    del tiles["BK"]
    return {**tiles, "BQ": max(tiles["BS"], 16), "BD": block_d, "programs": programs, "STAGES": 2}
