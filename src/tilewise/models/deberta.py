"""DeBERTa v2 and v3 of transformers: the layers' own projections, and the encoder without its two N×N matrices.

transformers' encoder makes, once a forward, the relative positions [1, N, N] (int64) and the outer product of the
padding mask [B, 1, N, N]. A patched encoder hands its layers None and a :class:`tilewise.Mask` instead: an interval of
keys for each query, which is empty for a padded query. Such a query gives the mean of all values, padded ones included,
which is what transformers' softmax over a row of equal minima amounts to.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..api import attention
from ..mask import Mask
from ..mechanisms import DeBERTa
from ..rows import deberta_buckets
from .family import Family
from .hf import matrix_mask

__all__ = ["FAMILIES"]


class DisentangledAttention:
    """Goes in front of a ``DisentangledSelfAttention`` of deberta_v2 among the bases of a patched layer's class."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Mask | Tensor,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """As transformers' layer: hidden_states [B, N, hidden] to the context [B, N, H·d], and None for the weights.

        Raises:
            ValueError: the attention weights were asked for, relative positions were handed in, the queries are not as
                many as the keys, or the mask has another shape.
        """
        if output_attentions:
            raise ValueError(
                "output_attentions is True; expected False, since a patched model never forms the matrix of attention "
                "weights. To see them: tilewise.unpatch(model)"
            )
        if relative_pos is not None:
            raise ValueError(
                f"relative_pos has shape {tuple(relative_pos.shape)}; expected None, since a patched layer takes the "
                "distance of the tokens. For positions of another kind: tilewise.unpatch(model)"
            )
        if rel_embeddings is None:
            raise ValueError("rel_embeddings is None; expected the encoder's table [2·span, hidden]")
        queries = hidden_states if query_states is None else query_states
        if queries.shape[1] != hidden_states.shape[1]:
            raise ValueError(f"query_states has {queries.shape[1]} tokens; expected {hidden_states.shape[1]}, as keys")
        q = self._heads(self.query_proj(queries))
        k, v = self._heads(self.key_proj(hidden_states)), self._heads(self.value_proj(hidden_states))
        mask = _as_mask(attention_mask, *q.shape[:3])
        output = attention(
            q,
            k,
            v,
            terms=self.relative_terms(rel_embeddings),
            mask=mask,
            scale=_scale(self),
            dropout_p=self.dropout.p if self.dropout.training else 0.0,
            empty_rows="zero" if mask.bounds is None and mask.keys is None and mask.dense is None else "uniform",
            impl=self._tilewise.impl,
        )
        return output.transpose(1, 2).flatten(2), None

    def relative_terms(self, rel_embeddings: Tensor) -> tuple:
        """The layer's projections of the table, dropped out as transformers does, as c2p and p2c terms."""
        table = self.pos_dropout(rel_embeddings)[: 2 * self.pos_ebd_size]
        # Through the modules and not their weights: an adapter or a quantiser may stand in front of those.
        names = {"c2p": "pos_key_proj", "p2c": "pos_query_proj"}
        if self.share_att_key:
            # The order of transformers' calls: an adapter that drops its input draws the same numbers.
            names = {"p2c": "query_proj", "c2p": "key_proj"}
        tables = {
            kind: self._heads(getattr(self, name)(table)) for kind, name in names.items() if kind in self.pos_att_type
        }
        return DeBERTa(
            tables.get("c2p"),
            tables.get("p2c"),
            position_buckets=self.position_buckets,
            max_relative_positions=self.max_relative_positions,
        )

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_attention_heads, self.attention_head_size)).transpose(-2, -3)


class LinearEncoder:
    """Goes in front of ``DebertaV2Encoder`` among the bases of a patched encoder's class."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, *args, **kwargs):
        """As transformers' encoder, whose product of masks refuses one of another size; a mask in linear memory that
        hides nothing has no size to refuse."""
        B, N = hidden_states.shape[:2]
        # Not `in`: to torch.compile a size is a symbol, which it does not find in a tuple.
        rows = attention_mask.shape[0] if attention_mask.dim() else 0
        if attention_mask.dim() < 3 and (
            attention_mask.dim() != 2 or (rows != 1 and rows != B) or attention_mask.shape[1] != N
        ):
            raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}; expected [{B} or 1, {N}]")
        return super().forward(hidden_states, attention_mask, *args, **kwargs)

    def get_attention_mask(self, attention_mask: Tensor) -> Mask | Tensor:
        """What the layers take: [B, N] becomes a :class:`tilewise.Mask`; a matrix of the caller's stays one."""
        if attention_mask.dim() != 2:
            return super().get_attention_mask(attention_mask)
        return _outer_product(attention_mask != 0)

    def get_rel_pos(self, hidden_states, query_states=None, relative_pos=None):
        """None, from which a patched layer knows that the positions are its own; the caller's as they are."""
        return relative_pos


def _outer_product(real: Tensor) -> Mask:
    """Real queries see real keys and padded queries see nothing: real[b, i] and real[b, j], as intervals of keys."""
    N = real.shape[1]
    number = real.sum(1)
    first = real.int().argmax(1)
    end = torch.where(number > 0, N - real.flip(1).int().argmax(1), 0)
    bounds = torch.stack((first, end), -1)[:, None] * real[..., None]
    bounds = bounds.to(torch.int32)
    if torch.compiler.is_compiling() or real.is_meta:
        return Mask(bounds=bounds, keys=real)
    # One read of two numbers: without holes the intervals say all, and whole tiles need no look-up.
    everything, unbroken = torch.stack(((number == N).all(), (end - first == number).all())).tolist()
    return Mask() if everything else Mask(bounds=bounds, keys=None if unbroken else real)


def _as_mask(mask: Mask | Tensor, B: int, H: int, N: int) -> Mask:
    if isinstance(mask, Mask):
        # One row of padding for the whole batch.
        return mask if mask.keys is None else replace(mask, keys=mask.keys.expand(B, -1))
    return matrix_mask(mask != 0, B, H, N, N)


def _kinds(module: nn.Module) -> list[str]:
    return [kind for kind in ("c2p", "p2c") if kind in module.pos_att_type]


def _scale(module: nn.Module) -> float:
    return 1.0 / math.sqrt(module.attention_head_size * (1 + len(_kinds(module))))


def _left_alone(module: nn.Module) -> str | None:
    if not module.relative_attention:
        return "it has no relative positions (relative_attention is False)"
    if "p2p" in module.pos_att_type:
        return "pos_att_type has 'p2p', a term of two positions that neither transformers nor tilewise.DeBERTa computes"
    if not _kinds(module):
        return f"it has no relative term (pos_att_type is {module.pos_att_type!r})"
    return None


def _obstacle(module: nn.Module) -> str | None:
    if _left_alone(module):
        return None
    for name in ("forward", "transpose_for_scores", "disentangled_attention_bias"):
        if _is_replaced(module, name):
            return f"its {name} was replaced on the module itself; expected the method of DisentangledSelfAttention"
    if not isinstance(module.dropout, nn.Dropout):
        return f"dropout is a {type(module.dropout).__name__}; expected torch.nn.Dropout"
    try:
        deberta_buckets(module.position_buckets, module.max_relative_positions)
    except ValueError as error:
        return str(error)
    return None


def _is_replaced(module: nn.Module, name: str) -> bool:
    """Whether the module has something else than its class's method, which a patched layer would not call."""
    # Hooks of accelerate keep the method that they call in the end.
    kept = module.__dict__.get("_old_forward" if name == "forward" and "_old_forward" in module.__dict__ else name)
    return kept is not None and not (inspect.ismethod(kept) and kept.__func__ is getattr(type(module), name))


def _mechanism(module: nn.Module, parent: nn.Module | None) -> str:
    kinds = [kind for kind in ("c2p", "p2c", "p2p") if module.relative_attention and kind in module.pos_att_type]
    return f"DeBERTa {' + '.join(kinds)}" if kinds else "no relative term"


def _example(module: nn.Module, parent: nn.Module | None) -> dict[str, Any]:
    like = next((p for p in module.parameters() if p.dtype.is_floating_point), torch.empty(0))
    H, d = module.num_attention_heads, module.attention_head_size
    q = torch.zeros(1, H, 128, d, dtype=like.dtype, device=like.device)
    tables = [q.new_zeros(H, 2 * module.pos_ebd_size, d) if kind in _kinds(module) else None for kind in ("c2p", "p2c")]
    terms = DeBERTa(
        *tables, position_buckets=module.position_buckets, max_relative_positions=module.max_relative_positions
    )
    return {"q": q, "k": q, "v": q, "terms": terms, "scale": _scale(module)}


_MODULE = "transformers.models.deberta_v2.modeling_deberta_v2"

FAMILIES = (
    Family(
        "DeBERTa v2 and v3", f"{_MODULE}:DisentangledSelfAttention", DisentangledAttention, _mechanism, _example,
        _obstacle, _left_alone, interface=False, stack=f"{_MODULE}:DebertaV2Encoder", stack_base=LinearEncoder,
    ),
)  # fmt: skip
"""mDeBERTa, GLiNER and all others that load into these classes are of this family."""
