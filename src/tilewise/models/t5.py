"""The T5 family of transformers: the layers whose scores get a bias by the bucket of the distance.

transformers computes the bias once, [1, H, Tq, Tk], and hands it from layer to layer; where a layer has none, it makes
zeros of that size. Here what travels in its place is

* the table [num_buckets, H], of which the operator picks rows by itself, or
* the bias of each diagonal, [1, H, 2·Tk − 1], where the queries' position is not Tk − Tq (a static cache, whose
  position may be a tensor), or
* an empty tensor, where there is no bias (cross-attention).

All three are tensors, so gradient checkpointing, compilation and autograd treat them as they treat the dense bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..mask import Mask
from ..mechanisms import T5
from ..rows import identity, t5_buckets
from ..terms import Scalar
from .family import Family
from .hf import IMPLEMENTATION

__all__ = ["FAMILIES"]


class T5Bias:
    """Goes in front of a ``T5Attention`` among the bases of a patched layer's class."""

    @property
    def has_relative_attention_bias(self) -> bool:
        # True makes forward ask compute_bias for cross-attention as well, instead of making zeros.
        return _has_table(self) or _is_active(self)

    def compute_bias(self, query_length, key_length, device=None, past_seen_tokens=0) -> Tensor:
        if not _is_active(self):
            return super().compute_bias(query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)
        if not _has_table(self):
            return torch.zeros(0, device=device)
        if not isinstance(past_seen_tokens, Tensor) and past_seen_tokens == key_length - query_length:
            # Through the module and not its weight: an adapter or a quantiser may stand in front of that.
            buckets = torch.arange(self.relative_attention_num_buckets, device=device)
            return self.relative_attention_bias(buckets)
        # Column c of this one row has j − i = c − (past + Tq − 1): the diagonals, the lowest last.
        return super().compute_bias(
            1, 2 * key_length - 1, device=device, past_seen_tokens=past_seen_tokens + query_length - 1
        )[:, :, 0]

    def relative_terms(self, position_bias: Tensor | None, device: torch.device) -> tuple[Scalar, ...]:
        """What travelled as position_bias, as terms."""
        if position_bias is None or position_bias.numel() == 0:
            return ()
        if position_bias.dim() == 2:
            return (T5(position_bias, bidirectional=_bidirectional(self), max_distance=_max_distance(self)),)
        if position_bias.dim() == 3:
            reach = (position_bias.shape[-1] - 1) // 2
            return (Scalar(position_bias[0], identity(reach, descending=True)),)
        raise ValueError(
            f"position_bias has shape {tuple(position_bias.shape)}; expected None, since a patched "
            f"{type(self).__name__} makes its own from the table. For a bias of another kind: tilewise.unpatch(model)"
        )


def _has_table(module: nn.Module) -> bool:
    return "relative_attention_bias" in module._modules


def _is_active(module: nn.Module) -> bool:
    # After set_attn_implementation on a patched model the layer is transformers' again.
    return module.config._attn_implementation == IMPLEMENTATION


def _bidirectional(module: nn.Module) -> bool:
    # Pix2Struct's text layers have no such attribute: they are a decoder.
    return not getattr(module, "is_decoder", True)


def _max_distance(module: nn.Module) -> int:
    return module.relative_attention_max_distance


def _obstacle(module: nn.Module) -> str | None:
    if not _has_table(module):
        return None
    buckets = module.relative_attention_num_buckets
    if module.relative_attention_bias.weight.shape[0] != buckets:
        return f"relative_attention_bias has {module.relative_attention_bias.weight.shape[0]} rows; expected {buckets}"
    try:
        t5_buckets(buckets, _max_distance(module), _bidirectional(module))
    except ValueError as error:
        return str(error)
    return None


def _is_cross(parent: nn.Module | None) -> bool:
    return "CrossAttention" in type(parent).__name__


def _mechanism(module: nn.Module, parent: nn.Module | None) -> str:
    if _has_table(module):
        return "T5 bias"
    return "no bias (cross-attention)" if _is_cross(parent) else "T5 bias (shared)"


def _example(module: nn.Module, parent: nn.Module | None) -> dict[str, Any]:
    like = next((p for p in module.parameters() if p.dtype.is_floating_point), torch.empty(0))
    q = torch.zeros(1, module.n_heads, 128, module.key_value_proj_dim, dtype=like.dtype, device=like.device)
    if _is_cross(parent):
        return {"q": q, "k": q, "v": q, "scale": 1.0}
    table = q.new_zeros(module.relative_attention_num_buckets, module.n_heads)
    mask = Mask() if _bidirectional(module) else Mask.causal()
    terms = T5(table, bidirectional=_bidirectional(module), max_distance=_max_distance(module))
    return {"q": q, "k": q, "v": q, "terms": terms, "mask": mask, "scale": 1.0}


def _udop_encoder(module: nn.Module) -> str | None:
    if module.is_decoder:
        return None
    return "its bias depends on where the words' boxes are on the page, not on the distance of tokens alone"


def _family(name: str, model: str, cls: str, **changes) -> Family:
    target = f"transformers.models.{model}.modeling_{model}:{cls}"
    return Family(name, target, T5Bias, _mechanism, _example, _obstacle, **changes)


FAMILIES = (
    _family("T5", "t5", "T5Attention"),
    _family("mT5", "mt5", "MT5Attention"),
    _family("UMT5", "umt5", "UMT5Attention"),
    _family("Pop2Piano", "pop2piano", "Pop2PianoAttention"),
    _family("Pix2Struct", "pix2struct", "Pix2StructTextAttention"),
    _family("Switch Transformers", "switch_transformers", "SwitchTransformersAttention"),
    _family("UDOP", "udop", "UdopAttention", left_alone=_udop_encoder),
)
"""ByT5, Flan-T5, ProtT5 and all others that load into these classes are of these families."""
