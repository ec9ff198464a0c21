"""Measured tile table (H200, bf16): warps, tiles and program counts by width, number of tokens and sources."""

from __future__ import annotations

from functools import cache

__all__ = [
    "combine_many",
    "combine_tiles",
    "dv_tiles",
    "few",
    "inner_tiles",
    "merge_bwd",
    "merge_order",
    "merge_warps",
    "mix",
    "mix_bwd",
    "mix_few",
    "narrow_queries",
    "one_reduction",
    "read",
    "row_tiles",
    "score_tiles",
    "sources_warps",
]

SMS = 132


def cdiv(a: int, b: int) -> int:
    """Triton's own cdiv and next_power_of_2 cost a host 45 us each (3.6): three launches."""
    return -(-a // b)


@cache
def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


UNROLLED = 16
"""Up to this many sources travel as kernel arguments; more are read through a device table of addresses."""


DIRECT = 4
"""Up to this many sources a merge of few rows sums itself (`launch.phase2_from_scores`)."""


def few(T: int) -> bool:
    """Decode-sized: fewer rows than keep the card busy, so that latency counts and not bytes."""
    return T <= 1024


@cache
def row_block(d: int) -> int:
    return max(next_power_of_2(d), 256)


ORDER = {"DOWN": True, "STREAM": False}


def merge_warps(T: int, d: int) -> int:
    block = row_block(d)
    if few(T):
        return min(max(block // 1024, 1), 16)
    return min(max(block // 2048, 1), 16) if block > 2048 else 4


def merge_order(T: int, d: int) -> dict:
    """DOWN and STREAM of `merge_fwd_kernel`; few rows stay in the L2 cache in any order."""
    return {"DOWN": False, "STREAM": False} if few(T) else dict(ORDER)


def sources_warps(T: int, d: int) -> int:
    """Of a merge that sums its sources itself: with half the warps 8 sources take 205 registers, so 126."""
    return max(merge_warps(T, d), min(row_block(d) // 1024, 8))


def one_reduction(T: int, size: int) -> bool:
    """|h|^2 from sums over p and o1 (see `merge_fwd_kernel`); fp32 keeps the exact second reduction."""
    return few(T) and size == 2


def mix(T: int, d: int, n: int) -> dict:
    """AHEAD: rows that the one-pass kernel has in flight while it reduces another.

    Few tokens have an SM each: four rows, and the registers that it takes. Of many tokens two rows of 8,192 share an SM
    instead, which 128 registers allow with one row ahead (40 bytes spilled).
    """
    block = row_block(d)
    if n == 2 and not few(T):
        return {"AHEAD": 2, "num_warps": min(max(block // 2048, 4), 16)}
    tile = {"AHEAD": 4, "num_warps": min(max(block // 1024, 4), 16)}
    return tile if few(T) or n <= 4 or block != 8192 else {**tile, "AHEAD": 1, "maxnreg": 128}


def row_tiles(d: int) -> tuple[int, int, int]:
    """(BD, TAIL, warps): columns of a row in one tile, or in two if those are at most five sixths of the padded one.

    A thread holds up to 18 elements of each of eight vectors: at 20 of them, 128 threads take more registers than half
    an SM has. The second tile has at least 4 bytes a thread, the least that is copied asynchronously.
    """
    block = row_block(d)
    half, wide = block // 2, block
    tail = max(next_power_of_2(d - half), 256) if d > half else 0
    if tail and 6 * (half + tail) <= 5 * block:
        wide = half + tail
    warps = 4
    while warps < 16 and wide > 32 * warps * 18:
        warps *= 2
    return (block, 0, warps) if wide == block else (half, max(tail, 64 * warps), warps)


def merge_bwd(T: int, d: int, size: int) -> dict:
    """programs, num_warps, STAGES, BD, TAIL. Two persistent programs an SM: one loads while the other reduces.

    Each stage but the first keeps a row of four tensors in shared memory.
    """
    block_d, tail, warps = row_tiles(d)
    stage = 4 * (block_d + tail) * size
    stages = 3 if 2 * stage <= 72 << 10 else 2 if stage <= 136 << 10 else 1
    return {"programs": min(T, SMS * (2 if warps < 16 else 1)), "num_warps": warps, "STAGES": stages, "BD": block_d,
            "TAIL": tail}  # fmt: skip


def mix_few(T: int, d: int, n: int) -> dict | None:
    """Tile of `mix_few_kernel`, or None where one source after the other is better: a tile of 8 rows spills."""
    if not few(T) or not 1 <= n <= 4 or d > 8192:
        return None
    block_n, block_d = next_power_of_2(n), row_block(d)
    return {"BN": block_n, "BD": block_d, "num_warps": min(max(block_d // 1024, 4), 16)}


def mix_bwd(T: int, d: int) -> dict:
    block = row_block(d)
    warps = min(max(block // 512, 4), 16)
    return {"programs": min(T, SMS * (2 if warps < 16 else 1)), "num_warps": warps}


def score_tiles(T: int, d: int, S: int, size: int) -> dict:
    """SUB tiles of BT tokens, BK columns, BS queries, splits of d; `size` is the element size in bytes.

    The queries (high and low parts) come from L2 for every program: two tiles of tokens share them. Splitting d keeps
    enough loads in flight: 8,192 tokens are only 128 such programs, 32,768 fill the card by themselves. GRAM takes the
    sums of squares from products (see `phase1`): 1 completes a block by an add and a read of its own, 2 by one kernel,
    as 0 does.
    """
    block_s = min(max(next_power_of_2(S), 16), 128 if size == 2 else 32)
    splits = max(1, min(cdiv(d, 512), 16))
    if size == 4:
        sub, splits = (1, splits) if few(T) else (2 if S > 16 else 1, 2 if d >= 4096 and S > 16 else 1)
        return {"GRAM": 0, "SUB": sub, "BT": 16 if few(T) else 32, "BK": 32, "BS": block_s, "splits": splits,
                "num_warps": 4, "STAGES": 2}  # fmt: skip
    if few(T):
        # 112 later queries at 128 tokens: 12.8 us with four tiles of 32, 16.0 with one of 128 without GRAM.
        return {"GRAM": 1, "SUB": 1, "BT": 16, "BK": 128, "BS": min(block_s, 32), "splits": splits, "num_warps": 4,
                "STAGES": 3}  # fmt: skip
    # 8,192 x 7,168: 225 to 178 us for 96 queries and 149 to 148 for 32; 8,192 x 2,048, 8 queries: 172 to 105 us.
    wide = S > 32
    # 32,768 x 7,168, 128 queries: 532 us in one part, 588 in two. Up to 64 queries they were not told apart.
    whole = T >= 32768 and S > 64
    return {"GRAM": 1, "SUB": 2, "BT": 32, "BK": 32 if wide else 64, "BS": block_s,
            "splits": 2 if d >= 4096 and S > 16 and not whole else 1, "num_warps": 4,
            "STAGES": 4 if wide else 3}  # fmt: skip


def narrow_queries() -> bool:
    """Whether merges at inference read queries of 16 bits beside bf16 sources."""
    return True


def combine_tiles(T: int, d: int, n: int, S: int, size: int) -> dict:
    """BS x BT = 32 rows on the left of the dot, BN x BT >= 16 in its sum; `span` tiles of BD columns a program."""
    # One query as four: 32 tokens of up to 16 sources in flight would leave one program an SM.
    block_s = min(max(next_power_of_2(S), 4), 16)
    block_t = 32 // block_s
    block_n = min(max(next_power_of_2(n), -(-16 // block_t)), 16)
    if size == 4:
        return {"BS": block_s, "BT": block_t, "BN": block_n, "BD": 32, "span": 8, "num_warps": 4, "STAGES": 2}
    block_d = 256 if d > 4096 and not few(T) and block_n * block_t <= 16 else 128
    columns = cdiv(d, block_d)
    span = cdiv(columns, cdiv(columns, 7 if few(T) else 14))
    return {"BS": block_s, "BT": block_t, "BN": block_n, "BD": block_d, "span": span, "num_warps": 4, "STAGES": 3}


MANY = 128
"""Up to so many sources of 16 bits have their weights in registers (`combine_many`); more are taken in chunks."""


def combine_many(T: int, d: int, n: int, S: int, size: int) -> dict | None:
    """Tile of `combine_many_kernel`, or None where `combine_tiles` is better: few sources, or elements of 4 bytes.

    A tile of sources is 16 to 32 KiB, so that two programs an SM with three stages have 128 KiB in flight.
    """
    if size != 2 or not 16 < n <= MANY:
        return None
    block_n = max(next_power_of_2(n), 32)
    block_d = 256 if block_n <= 64 else 128
    columns = cdiv(d, block_d)
    span = cdiv(columns, cdiv(columns, 7)) if few(T) else columns
    return {"BS": 16, "BN": block_n, "BD": block_d, "span": span, "num_warps": 4, "STAGES": 3}


def read(T: int, d: int, n: int) -> dict:
    """Tile of `read_kernel`: UNROLL rows of d elements are in flight a program, besides o1 and the update."""
    block = row_block(d)
    return {"UNROLL": 4, "BN": 16 if n < 16 else 128, "BD": block, "num_warps": min(max(block // 1024, 1), 16)}


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
    # Two waves of two programs an SM and not one program more, which would be a third wave.
    programs = max(1, min(cdiv(T, tiles["BT"]), 4 * SMS // columns))
    del tiles["BK"]
    return {**tiles, "BQ": max(tiles["BS"], 16), "BD": block_d, "programs": programs, "STAGES": 3}
