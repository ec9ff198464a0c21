"""Blocks whose layers share their keys: the carry folds into the queries, exactly, and nothing else is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from ..mask import Mask
from .checks import check_heads, check_like, check_recorded, like_of, require
from .config import CarriedConfig
from .state import Carry, carried_attention

__all__ = ["SharedKeyCarry", "fold_queries", "shared_key_attention"]


def fold_queries(q: Tensor, folded: Tensor | None, gain: Tensor | None = None) -> Tensor:
    """Q̃_i = Q_i + β_i Q̃_{i−1}, so that s Q̃_i Kᵀ = Z_i when all layers have the same keys K.

    Args:
        q: Q_i [B, H, T, d].
        folded: Q̃_{i−1} in fp32 (fp64 for fp64 queries), or None for the first layer of a block.
        gain: β_i [H].

    Returns:
        Q̃_i in the dtype of `folded`: sums of rounded sums would drift.
    """
    if folded is None:
        return q.to(torch.promote_types(q.dtype, torch.float32))
    # An addition promotes its operands in one kernel, where q.to(…) is one of its own.
    return q + (folded if gain is None else gain.to(folded.dtype)[:, None, None] * folded)


class SharedKeyCarry:
    """The folded queries between the layers of a block; opaque and never changed, as :class:`Carry`.

    Args:
        config: the block's options; one window for all layers, and no `detach` (the folded product would still train
            the shared keys through earlier layers' queries).
        mask, offset: as in :class:`Carry`.

    Raises:
        ValueError: `config` has windows that differ, or `detach`.
    """

    def __init__(self, config: CarriedConfig, mask: Mask | None = None, offset: int | None = None) -> None:
        if not config.uniform:
            raise ValueError(f"windows is {config.windows}; expected one window for all layers that share their keys")
        if config.detach:
            raise ValueError("detach is True; expected False: shared keys are trained through every layer's queries")
        self.config, self.mask, self.offset = config, mask, offset
        self.index = 0
        self._folded: Tensor | None = None
        self._layout = None
        self._recorded = True
        self._like: tuple | None = None


def shared_key_attention(
    q: Tensor, k: Tensor, v: Tensor, carry: SharedKeyCarry, *, gain: Tensor | None = None, sink: Tensor | None = None,
    seed: Tensor | None = None, training: bool = True,
) -> tuple[Tensor, SharedKeyCarry]:  # fmt: skip
    """As :func:`carried_attention` for layers that all use the same `k`: plain attention of Q̃_i, no carry in memory.

    Nothing is stored, nothing is formed again, and at inference nothing is read beside the cache: the identity
    Z_i = s (Σ_j w_ij Q_j) Kᵀ holds whenever K is shared. In 16 bits Q̃_i is rounded once more than Q_i. The sum itself
    takes two small kernels a layer.

    Example:
        >>> config = CarriedConfig(layers=2)
        >>> k, v = torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 8)
        >>> carry = SharedKeyCarry(config)
        >>> for q in torch.randn(2, 1, 4, 10, 8):
        ...     o, carry = shared_key_attention(q, k, v, carry)
    """
    require("carry", carry, SharedKeyCarry, "SharedKeyCarry(config)")
    config, i = carry.config, carry.index
    for name, x in (("q", q), ("k", k)):
        require(name, x, Tensor)
    check_like(carry._like, q, k)
    check_heads(config, i, gain, sink, q)
    check_recorded(carry, q, k)
    folded = fold_queries(q, carry._folded, gain if config.scaling == "gain" else None)
    plain = config.plain(i, q.shape[-1])
    start = Carry(plain, carry.mask, carry.offset)
    start.layout = carry._layout
    O, after = carried_attention(
        q if i == 0 else folded.to(q.dtype),
        k,
        v,
        start,
        sink=sink,
        seed=seed,
        training=training,
    )
    following = SharedKeyCarry(config, carry.mask, carry.offset)
    following._layout = after.layout
    if i + 1 < config.layers:
        following.index, following._folded = i + 1, folded
        following._recorded, following._like = torch.is_grad_enabled(), like_of(q, k)
    return O, following
