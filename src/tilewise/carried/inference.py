"""Decoding with a carried row of scores beside the key-value cache, and what it costs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..mask import Mask
from .arguments import check_integer, require
from .checks import autocast, check_step
from .config import CarriedConfig

__all__ = ["DecodeCost", "carried_decode", "decode_cost"]


def carried_decode(
    q: Tensor, k: Tensor, v: Tensor, row: Tensor | None, layer: int, config: CarriedConfig, *, mask: Mask | None = None,
    offset: int | Tensor | None = None, gain: Tensor | None = None, sink: Tensor | None = None,
    row_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """One layer of a decoding step: O_i and the row of scores for the next layer.

    The row is transient: it lives from the first layer of a block to its last within one step, so the cache keeps
    nothing but K and V. On a GPU one kernel reads K and V once, and the keys are split where sequences are few; any
    other device takes dense products. O(Tq · Tk) memory a head, for few queries. Prefill, chunked or not, is
    :func:`carried_attention` without gradients: there the carry of a chunk of C queries is C × Tk scores.

    Args:
        q: [B, H, Tq, d], the new tokens (one, or a few that are checked at once). k: [B, Hk, Tk, d] and
            v: [B, Hk, Tk, d_v], the cache with the new tokens in it; what the mask hides must not be NaN. Of one dtype
            (under autocast they are cast to its dtype, but for fp64; the row is not).
        row: what the layer before returned, or None for the first layer of a block.
        layer: i, from 0 within the block.
        mask: lengths or intervals beside the config's causality and window; Mask.lengths for a cache of fixed size.
        offset: position of the first new token, at most Tk − Tq: a number, or int tensor [B] for sequences of different
            length (then `mask` has no bounds); default Tk − Tq.
        gain, sink: as in :func:`carried_attention`.
        row_dtype: dtype of the row; default fp32 (fp64 for fp64 inputs). fp16 halves its traffic, up to ±65504.

    Returns:
        O [B, H, Tq, d_v] and ΣQKᵀ [B, H, Tq, Tk] where seen, else 0; None after the last layer of the block.

    Raises:
        ValueError, TypeError: arguments that do not fit, named with what was found and expected; ``impl="triton"``
            for a step that the kernel cannot run.

    Example:
        >>> q, k, v = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
        >>> o, row = carried_decode(q, k, v, None, 0, CarriedConfig(layers=2))
        >>> o, row = carried_decode(q, k, v, row, 1, CarriedConfig(layers=2))
        >>> row is None
        True
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(name, x, Tensor)
    q, k, v = autocast(q, k, v)
    check_step(q, k, v, row, layer, config, mask, offset, gain, sink, row_dtype)
    if config.impl == "triton" or (config.impl == "auto" and q.device.type == "cuda"):
        from .triton.decode import decode, refusal

        why = refusal(q, k, v, mask, row_dtype)
        if why is None:
            given = {"mask": mask, "offset": offset, "gain": gain, "sink": sink, "row_dtype": row_dtype}
            return decode(q, k, v, row, layer, config, **given)
        if config.impl == "triton":
            raise ValueError(f"impl='triton' cannot run this step: {why}; nearest legal call: impl='blocked'")
    given = (q, k, v, row, layer, config, mask, offset, gain, sink, row_dtype)
    kind = q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return _dense(*given)
    # Scores in bf16 would cost a carried row three digits of fp32.
    with torch.autocast(kind, enabled=False):
        return _dense(*given)


def _dense(
    q: Tensor, k: Tensor, v: Tensor, row: Tensor | None, layer: int, config: CarriedConfig, mask: Mask | None,
    offset: int | Tensor | None, gain: Tensor | None, sink: Tensor | None, row_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    B, H, Tq, d = q.shape
    Hk, Tk = k.shape[1:3]
    real = torch.promote_types(q.dtype, torch.float32)
    seen = _seen(config, layer, mask, Tq, Tk, offset, q.device)

    U = (q.to(real).reshape(B, Hk, -1, d) @ k.to(real).mT).view(B, H, Tq, Tk)
    if row is not None:
        U = U + (gain.to(real)[:, None, None] * row.to(real) if config.scaling == "gain" else row.to(real))
    carried = None
    if layer < config.layers - 1:
        carried = U.masked_fill(~seen, 0.0)
        # Larger scores would be stored as infinite, and the softmax of two of them is NaN.
        carried = (carried.clamp(-65504.0, 65504.0) if row_dtype == torch.float16 else carried).to(row_dtype or real)
        U = carried.to(real)

    S = U * ((d**-0.5 if config.scale is None else config.scale) / config.divisor(layer))
    if config.softcap is not None:
        S = config.softcap * torch.tanh(S / config.softcap)
    S = S.masked_fill(~seen, float("-inf"))
    top = S.amax(-1, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink.to(real)[:, None, None])
    top = top.masked_fill(top == float("-inf"), 0.0)
    P = (S - top).exp()
    total = P.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink.to(real)[:, None, None] - top).exp()
    P = P / total.masked_fill(total == 0.0, 1.0)
    return (P.view(B, Hk, -1, Tk) @ v.to(real)).view(B, H, Tq, -1).to(q.dtype), carried


def _seen(
    config: CarriedConfig,
    layer: int,
    mask: Mask | None,
    Tq: int,
    Tk: int,
    offset: int | Tensor | None,
    device: torch.device,
) -> Tensor:
    if not isinstance(offset, Tensor):
        return config.mask(layer, mask).allowed(Tq, Tk, Tk - Tq if offset is None else offset, device=device)
    shape = config.mask(layer, mask)
    position = offset.to(device)[:, None, None, None] + torch.arange(Tq, device=device)[:, None]
    delta = position - torch.arange(Tk, device=device)
    return (delta <= shape.left) & (delta >= -min(shape.right, Tk))


class DecodeCost(NamedTuple):
    """Bytes a block moves for one position of the cache, one sequence and one new token.

    Attributes:
        cache: keys and values.
        carried: the row of scores, written by every layer but the last and read by every layer but the first.
        concatenated: what keeping no row would read in keys of earlier layers.
    """

    cache: int
    carried: int
    concatenated: int

    @property
    def carried_share(self) -> float:
        """The row's traffic as a share of the cache's."""
        return self.carried / self.cache

    @property
    def concatenated_share(self) -> float:
        """The alternative's traffic as a share of the cache's."""
        return self.concatenated / self.cache


def decode_cost(
    config: CarriedConfig, H: int, Hk: int, d: int, *, cache_bytes: int = 2, row_bytes: int = 4
) -> DecodeCost:
    """What carrying reads at decode: nothing more only where the layers share their keys (:mod:`.shared_keys`).

    Args:
        H, Hk, d: query heads, key heads, head width (the same for keys and values).
        cache_bytes, row_bytes: bytes of an element of the cache and of the row.

    Raises:
        TypeError: options that are none, or a number that is no integer.
        ValueError: a number below 1, or key heads that do not divide the query heads.

    Example:
        >>> cost = decode_cost(CarriedConfig(), 20, 4, 128, row_bytes=2)
        >>> f"{cost.carried_share:.1%}, {cost.concatenated_share:.0%}"
        '2.9%, 75%'
    """
    require("config", config, CarriedConfig)
    sizes = {"H": H, "Hk": Hk, "d": d, "cache_bytes": cache_bytes, "row_bytes": row_bytes}
    for name, value in sizes.items():
        check_integer(name, value)
    if H % Hk:
        raise ValueError(f"Hk is {Hk}; expected a divisor of H = {H}")
    layers = config.layers
    cache = layers * 2 * Hk * d * cache_bytes
    return DecodeCost(cache, 2 * (layers - 1) * H * row_bytes, layers * (layers - 1) // 2 * Hk * d * cache_bytes)
