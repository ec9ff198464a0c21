"""Wav2Vec2-BERT of transformers: the layers whose scores get a clipped distance's row ("relative_key", Shaw's keys).

transformers looks the rows up as a tensor [N, N, d] and makes of it a bias [B, H, N, N] in every layer. A patched
layer's own code runs as if it had no positions, and the operator picks rows of the table [left + right + 1, d].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..mechanisms import Shaw
from .family import Family
from .hf import IMPLEMENTATION

__all__ = ["FAMILIES"]


class ShawKeys:
    """Goes in front of a ``Wav2Vec2BertSelfAttention`` among the bases of a patched layer's class."""

    @property
    def position_embeddings_type(self) -> str | None:
        # None keeps forward from making the bias. After set_attn_implementation the layer is transformers' again.
        return None if self.config._attn_implementation == IMPLEMENTATION else _type(self)

    def relative_terms(self, position_bias: Tensor | None, device: torch.device) -> tuple:
        """The table as terms; nothing travels as position_bias."""
        if position_bias is not None:
            raise ValueError(
                f"position_bias has shape {tuple(position_bias.shape)}; expected None, since a patched "
                f"{type(self).__name__} makes its own from the table. For a bias of another kind: "
                "tilewise.unpatch(model)"
            )
        # Through the module and not its weight: an adapter, a quantiser or an offloader may stand in front of that.
        rows = torch.arange(_rows(self), device=device)
        left, right = self.left_max_position_embeddings, self.right_max_position_embeddings
        return Shaw(self.distance_embedding(rows), left=left, right=right)


def _type(module: nn.Module) -> str | None:
    return module.__dict__["position_embeddings_type"]


def _rows(module: nn.Module) -> int:
    return module.left_max_position_embeddings + module.right_max_position_embeddings + 1


def _left_alone(module: nn.Module) -> str | None:
    if _type(module) == "relative_key":
        return None
    if _type(module) is None:
        return "it has no relative positions (an adapter's layer, or position_embeddings_type is None)"
    return f"position_embeddings_type is {_type(module)!r}; expected 'relative_key'"


def _obstacle(module: nn.Module) -> str | None:
    if _left_alone(module):
        return None
    found = module.distance_embedding.weight.shape[0]
    return None if found == _rows(module) else f"distance_embedding has {found} rows; expected {_rows(module)}"


def _mechanism(module: nn.Module, parent: nn.Module | None) -> str:
    if _left_alone(module):
        return f"positions of type {_type(module)!r}"
    return f"Shaw keys, {module.left_max_position_embeddings} back, {module.right_max_position_embeddings} ahead"


def _example(module: nn.Module, parent: nn.Module | None) -> dict[str, Any]:
    like = next((p for p in module.parameters() if p.dtype.is_floating_point), torch.empty(0))
    q = torch.zeros(1, module.num_heads, 128, module.head_size, dtype=like.dtype, device=like.device)
    left, right = module.left_max_position_embeddings, module.right_max_position_embeddings
    terms = Shaw(q.new_zeros(_rows(module), module.head_size), left=left, right=right)
    return {"q": q, "k": q, "v": q, "terms": terms, "scale": module.scaling}


_MODULE = "transformers.models.wav2vec2_bert.modeling_wav2vec2_bert"

FAMILIES = (
    Family(
        "Wav2Vec2-BERT", f"{_MODULE}:Wav2Vec2BertSelfAttention", ShawKeys, _mechanism, _example, _obstacle, _left_alone,
        stack=f"{_MODULE}:Wav2Vec2BertEncoder",
    ),
)  # fmt: skip
