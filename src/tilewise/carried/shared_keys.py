"""Blocks whose layers share their keys: the carry folds into the queries, exactly, and nothing else is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from ..mask import Mask
from .arguments import require
from .checks import (
    check_batch,
    check_heads,
    check_layout,
    check_like,
    check_ranks,
    check_recorded,
    check_same_keys,
    like_of,
)
from .config import CarriedConfig
from .layout import TileLayout
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

    Raises:
        ValueError, TypeError: tensors of other shapes or dtypes, named with what was found and expected.
    """
    check_ranks(q=q)
    if folded is not None:
        require("folded", folded, Tensor)
        if folded.shape != q.shape or folded.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"folded is {folded.dtype} of shape {tuple(folded.shape)}; expected fp32 or fp64 of {tuple(q.shape)}, "
                "what the layer before returned"
            )
        if gain is not None:
            require("gain", gain, Tensor)
            if tuple(gain.shape) != (q.shape[1],):
                raise ValueError(f"gain has shape {tuple(gain.shape)}; expected [{q.shape[1]}], one number a head")
    if folded is None:
        return q.to(torch.promote_types(q.dtype, torch.float32))
    # An addition promotes its operands in one kernel, where q.to(…) is one of its own.
    return q + (folded if gain is None else gain.to(folded.dtype)[:, None, None] * folded)


class SharedKeyCarry:
    """The folded queries between the layers of a block; opaque and never changed, as :class:`Carry`.

    Args:
        config: the block's options; one window for all layers, and no `detach` (the folded product would still train
            the shared keys through earlier layers' queries).
        mask, offset, layout: as in :class:`Carry`.

    Raises:
        ValueError: `config` has windows that differ, or `detach`; or a layout was made for other options.
        TypeError: an argument of another type.
    """

    def __init__(
        self, config: CarriedConfig, mask: Mask | None = None, offset: int | None = None,
        layout: TileLayout | None = None,
    ) -> None:  # fmt: skip
        check_batch(config, mask, offset)
        if not config.uniform:
            raise ValueError(f"windows is {config.windows}; expected one window for all layers that share their keys")
        if config.detach:
            raise ValueError("detach is True; expected False: shared keys are trained through every layer's queries")
        if layout is not None:
            check_layout(layout, config, mask, offset)
            mask, offset = layout.mask, layout.offset
        self.config, self.mask, self.offset = config, mask, offset
        self.index = 0
        self._folded: Tensor | None = None
        self._keys: Tensor | None = None
        self._layout = layout
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

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`carried_attention`; and, on the CPU, other keys than in the
            layers before.

    Example:
        >>> config = CarriedConfig(layers=2)
        >>> k, v = torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 8)
        >>> carry = SharedKeyCarry(config)
        >>> for q in torch.randn(2, 1, 4, 10, 8):
        ...     o, carry = shared_key_attention(q, k, v, carry)
    """
    require("carry", carry, SharedKeyCarry, "SharedKeyCarry(config)")
    config, i = carry.config, carry.index
    check_ranks(q=q, k=k)
    check_like(carry._like, q, k)
    check_same_keys(carry._keys, k)
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
        following._recorded, following._like, following._keys = torch.is_grad_enabled(), like_of(q, k), k
    return O, following
