"""Dropout that depends on positions alone: any implementation, tile shape or pass drops the same probabilities.

Philox-4x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with 7 rounds, its authors' fewest that
pass BigCrush. The counter is (j >> 2, i, b·H + h, 0), the key the 64-bit seed, and word j & 3 of the result decides
element (i, j): no counter repeats below 2³² × 2³² positions and 2³² heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ROUNDS", "keep", "philox", "threshold"]

ROUNDS = 7
_WORD = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def threshold(p: float) -> int:
    """Words below it are dropped: ⌊p · 2³²⌉."""
    return round(p * 2**32)


def keep(seed: Tensor, heads: Tensor, rows: Tensor, columns: tuple[int, int], p: float) -> Tensor:
    """Which probabilities survive: bool [len(heads), len(rows), columns[1] − columns[0]].

    Args:
        seed: int64 tensor of one element.
        heads: b·H + h of each plane (integer tensor).
        rows: query rows i.
        columns: first and last (exclusive) key column.
        p: the probability to drop.
    """
    start, stop = columns[0] // 4 * 4, -(-columns[1] // 4) * 4
    groups = torch.arange(start // 4, stop // 4, device=seed.device)
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    key = seed.reshape(())
    counter = (
        groups[None, None, :].expand(len(heads), len(rows), -1),
        rows.to(seed.device, torch.int64)[None, :, None] & _WORD,
        heads.to(seed.device, torch.int64)[:, None, None] & _WORD,
        zero,
    )
    words = torch.stack(torch.broadcast_tensors(*philox(counter, (key & _WORD, (key >> 32) & _WORD))), -1).flatten(-2)
    return words[..., columns[0] - start : columns[1] - start] >= threshold(p)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox-4x32 of :data:`ROUNDS` rounds: four words from four counter words and two key words (int64 tensors)."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(ROUNDS):
        # Products of two 32-bit words wrap in int64, and both halves of the wrapped product are still right.
        a, b = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = ((b >> 32) & _WORD) ^ c1 ^ k0, b & _WORD, ((a >> 32) & _WORD) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
    return c0, c1, c2, c3
