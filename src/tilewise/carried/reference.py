"""The oracle: a block of carried attention, dense, differentiable, in any dtype and on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..dropout import keep
from ..mask import Mask
from ..products import product
from .arguments import require
from .checks import check_batch, check_heads, check_inputs, check_like, check_seed, like_of
from .config import CarriedConfig

__all__ = ["carried_attention_reference", "carried_layer_reference"]


def carried_layer_reference(
    q: Tensor, k: Tensor, v: Tensor, carry: Tensor | None, layer: int, config: CarriedConfig, *,
    mask: Mask | None = None, offset: int | None = None, gain: Tensor | None = None, sink: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O_i and C_i of one layer, by the equation of :class:`CarriedConfig`.

    Args:
        q: [B, H, Tq, d]. k: [B, Hk, Tk, d]. v: [B, Hk, Tk, d_v]; Hk divides H.
        carry: C_{i−1} [B, H, Tq, Tk], or None for the first layer of a block.
        layer: i, from 0 within the block.
        mask: documents, lengths or intervals beside the config's causality and window.
        offset: position of the first query among the keys; default Tk − Tq.
        gain: β_i [H], for ``scaling="gain"`` and layer > 0.
        sink: [H], an extra score in the softmax's sum that has no value and is not carried.
        seed: int64 tensor of one element, for dropout.

    Returns:
        O_i [B, H, Tq, d_v] and C_i [B, H, Tq, Tk]. Rows that see no key give 0, with zero gradient.
    """
    B, H, Tq, d = q.shape
    Tk, G = k.shape[2], H // k.shape[1]
    scale = d**-0.5 if config.scale is None else config.scale
    seen = config.mask(layer, mask).allowed(Tq, Tk, Tk - Tq if offset is None else offset, device=q.device)

    Z = scale * product("bhid,bhjd->bhij", q, k.repeat_interleave(G, 1))
    if carry is not None:
        carry = carry.detach() if config.detach else carry
        Z = Z + (carry if gain is None else gain.to(Z.dtype)[:, None, None] * carry)

    S = Z / config.divisor(layer)
    if config.softcap is not None:
        S = config.softcap * torch.tanh(S / config.softcap)
    S = S.masked_fill(~seen, float("-inf"))
    if sink is not None:
        S = torch.cat((S, sink.to(S.dtype)[:, None, None].expand(B, H, Tq, 1)), -1)
    # A row of −∞ alone would give NaN, in the gradient too.
    empty = (S == float("-inf")).all(-1, keepdim=True)
    P = S.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)[..., :Tk]
    if config.dropout_p > 0.0:
        planes, rows = torch.arange(B * H, device=q.device), torch.arange(Tq, device=q.device)
        P = P * keep(seed, planes, rows, (0, Tk), config.dropout_p).view(B, H, Tq, Tk) / (1.0 - config.dropout_p)
    return product("bhij,bhjd->bhid", P.to(v.dtype), v.repeat_interleave(G, 1)), Z.masked_fill(~seen, 0.0)


def carried_attention_reference(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], config: CarriedConfig, *, mask: Mask | None = None,
    offset: int | None = None, gain: Sequence[Tensor | None] | None = None, sink: Sequence[Tensor | None] | None = None,
    seed: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:  # fmt: skip
    """O_0 … of one block from the queries, keys and values of its layers (see :func:`carried_layer_reference`).

    Nothing is lowered by autocast.

    Raises:
        ValueError, TypeError: what :func:`carried_attention` refuses of a layer, and numbers of layers that differ or
            exceed the block's.

    Example:
        >>> q, k, v = ([torch.randn(1, 2, 5, 8) for _ in range(4)] for _ in range(3))
        >>> [tuple(o.shape) for o in carried_attention_reference(q, k, v, CarriedConfig())][0]
        (1, 2, 5, 8)
    """
    check_batch(config, mask, offset)
    for name, values in (("q", q), ("k", k), ("v", v), ("gain", gain), ("sink", sink), ("seed", seed)):
        _check_layers(name, values, config.layers if name == "q" else len(q))
    outputs, carry, like = [], None, None
    at = lambda values, i: None if values is None else values[i]  # noqa: E731
    for i in range(len(q)):
        _check_layer(q[i], k[i], v[i], i, config, mask, at(gain, i) if i else None, at(sink, i), at(seed, i), like)
        like = like_of(q[i], k[i])
        O, carry = carried_layer_reference(
            q[i], k[i], v[i], carry, i, config, mask=mask, offset=offset, gain=at(gain, i) if i else None,
            sink=at(sink, i), seed=at(seed, i),
        )  # fmt: skip
        outputs.append(O)
    return outputs


def _check_layers(name: str, values: Sequence | None, count: int) -> None:
    if values is None and name in ("gain", "sink", "seed"):
        return
    # Also nn.ParameterList, which is no Sequence.
    if isinstance(values, Tensor | str | Mapping) or not (
        hasattr(values, "__len__") and hasattr(values, "__getitem__")
    ):
        raise TypeError(f"{name} is a {type(values).__name__}; expected a list with an entry a layer")
    if name == "q" and not 0 < len(values) <= count:
        raise ValueError(f"q has {len(values)} layers; expected 1 to {count}, the block's")
    if name != "q" and len(values) != count:
        raise ValueError(f"{name} has {len(values)} layers; expected {count}, as q")


def _check_layer(
    q: Tensor, k: Tensor, v: Tensor, layer: int, config: CarriedConfig, mask: Mask | None, gain: Tensor | None,
    sink: Tensor | None, seed: Tensor | None, like: tuple | None,
) -> None:  # fmt: skip
    check_inputs(q, k, v)
    check_like(like, q, k)
    check_heads(config, layer, gain, sink, q)
    check_seed(seed, q)
    if config.dropout_p > 0.0:
        require("seed", seed, Tensor, "torch.tensor([5])")
    if mask is not None:
        mask.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
