"""Tilewise as an attention implementation of transformers: the function and the mask its models call by name.

Both are registered under a name of their own, which only patched layers carry in their configuration, so no other
model of the process is touched. The mask is a :class:`tilewise.Mask`, linear in the lengths, where transformers'
own formats are [B, 1, Tq, Tk].
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..api import attention
from ..mask import Mask

__all__ = ["IMPLEMENTATION", "attention_forward", "linear_mask", "matrix_mask", "register"]

IMPLEMENTATION = "tilewise"
"""The name under which the two functions are registered."""


def register() -> None:
    """Make :data:`IMPLEMENTATION` known to transformers. The function without the mask would ignore padding."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, linear_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """What a patched layer calls: query, key, value are [B, H, T, d]; returns the output [B, Tq, H, d] and None.

    Rows that see no key give the mean of the values, which is what transformers' finite masks amount to.

    Raises:
        ValueError: the attention weights were asked for, or the mask or the bias is one that only a dense score
            matrix could take.
    """
    if kwargs.get("output_attentions") or module.config.output_attentions:
        raise ValueError(
            "output_attentions is True; expected False, since a patched model never forms the matrix of attention "
            'weights. To see them: tilewise.unpatch(model); model.set_attn_implementation("eager")'
        )
    patched = getattr(module, "_tilewise", None)
    if patched is None:
        raise ValueError(
            f"attn_implementation is {IMPLEMENTATION!r} on a {type(module).__name__} that was not patched; "
            "load the model with another one and call tilewise.patch(model)"
        )
    mask = _as_mask(attention_mask, module, *query.shape[:3], key.shape[2])
    padded = mask.keys is not None or mask.bounds is not None or mask.dense is not None
    output = attention(
        query,
        key,
        value,
        terms=module.relative_terms(position_bias, query.device),
        mask=mask,
        scale=scaling,
        dropout_p=dropout,
        empty_rows="uniform" if padded else "zero",
        impl=patched.impl,
    )
    return output.transpose(1, 2), None


def linear_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function=None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs,
) -> Mask:
    """The mask of one stack, by transformers' contract for mask functions, without a matrix.

    Positions are counted so that the last query meets the last key. Where a cache has room beyond the last query (a
    static cache), the causal rule is written as one interval of keys a query instead; its start may be a tensor.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    if mask_function is causal_mask_function:
        first = q_offset - kv_offset
        if isinstance(first, Tensor) or first != kv_length - q_length:
            last = torch.arange(q_length, device=device) + first + 1
            mask = Mask.intervals(torch.zeros_like(last), last.clamp(max=kv_length))
        else:
            mask = Mask.causal()
    elif mask_function is bidirectional_mask_function:
        mask = Mask()
    else:
        # Any other rule is an opaque function of four indices: only its matrix says what it shows.
        kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        dense = sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device=device, **kwargs
        )
        return Mask.full(dense)
    return mask if attention_mask is None else mask & _padding(attention_mask, kv_length, kv_offset)


def _padding(attention_mask: Tensor, kv_length: int, kv_offset: int) -> Mask:
    """[B, tokens seen] as a mask over the keys kv_offset … kv_offset + kv_length − 1; keys beyond it are empty."""
    if attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; expected [B, Tk] or [B, 1 or H, 1 or Tq, Tk]"
        )
    missing = kv_offset + kv_length - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = nn.functional.pad(attention_mask, (0, missing))
    keys = attention_mask[:, kv_offset : kv_offset + kv_length]
    # A mask that hides nothing costs every tile a look-up; one reduction here is what transformers' own masks cost too.
    if not torch.compiler.is_compiling() and not keys.is_meta and bool(keys.all()):
        return Mask()
    return Mask.padding(keys.bool())


def matrix_mask(seen: Tensor, B: int, H: int, Tq: int, Tk: int) -> Mask:
    """A matrix of the caller's, True where a key is seen, as the model's own code would broadcast it.

    Raises:
        ValueError: its shape is not [1 or B, 1 or H, 1 or Tq, 1 or Tk].
    """
    # Not `in`: to torch.compile a size is a symbol, which it does not find in a tuple.
    fits = seen.dim() == 4 and all(n == 1 or n == m for n, m in zip(seen.shape, (B, H, Tq, Tk), strict=True))
    if not fits:
        raise ValueError(
            f"attention_mask has shape {tuple(seen.shape)}; expected [{B}, {Tk}], or a matrix "
            f"[1 or {B}, 1 or {H}, 1 or {Tq}, {Tk}]"
        )
    if seen.shape[1] == seen.shape[2] == 1:
        return Mask.padding(seen[:, 0, 0].expand(B, Tk))
    return Mask.full(seen.expand(-1, -1, Tq, Tk))


def _as_mask(mask: Mask | Tensor | None, module: nn.Module, B: int, H: int, Tq: int, Tk: int) -> Mask:
    if isinstance(mask, Mask):
        if mask.keys is None:
            return mask
        if mask.keys.shape[0] != B or mask.keys.shape[1] < Tk:
            raise ValueError(f"attention_mask has shape {tuple(mask.keys.shape)}; expected [{B}, {Tk}]")
        return replace(mask, keys=mask.keys[:, :Tk])
    if mask is None:
        return Mask.causal() if getattr(module, "is_causal", False) else Mask()
    mask = mask[..., :Tk]
    if mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if not torch.compiler.is_compiling() and not bool((hidden | (mask == 0)).all()):
            raise ValueError(
                "attention_mask adds numbers to the scores; expected a boolean mask, or 0 and the dtype's minimum. "
                "A bias by position is a term: see tilewise.attention"
            )
        mask = ~hidden
    return matrix_mask(mask, B, H, Tq, Tk)
