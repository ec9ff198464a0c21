"""Tiny random models of the T5 family, with inputs that have padding on both sides, for the drop-in's tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers

_COMMON = {
    "vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
SHAPE = (3, 150, 23)
"""Batch, tokens read (beyond the distance where the buckets saturate), tokens written."""


@dataclass
class Case:
    """A model class, its configuration, and what to call it with."""

    model: type
    config: Any
    inputs: dict[str, Any]

    def build(self, dtype: torch.dtype = torch.float32, attention: str | None = None):
        """The model with the same random weights every time; larger than at initialisation, so that every part of the
        scores matters."""
        torch.manual_seed(1)
        config = self.config()
        if attention is not None:
            config._attn_implementation = attention
        model = self.model(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" not in name:
                    parameter.normal_(std=3.0 if "relative_attention_bias" in name else 0.18)
        return model.to(dtype)

    def arguments(self, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        return {name: x.to(dtype) if x.is_floating_point() else x for name, x in self.inputs.items()}


def _tokens(seed: int) -> dict[str, torch.Tensor]:
    B, N, M = SHAPE
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(B, N, dtype=torch.long)
    mask[1, N - 40 :], mask[2, :17] = 0, 0
    draw = lambda *shape: torch.randint(2, 99, shape, generator=generator)  # noqa: E731
    return {"input_ids": draw(B, N), "attention_mask": mask, "labels": draw(B, M)}


def _t5(name: str, **changes) -> Case:
    config = getattr(transformers, f"{name}Config")
    return Case(
        getattr(transformers, f"{name}ForConditionalGeneration"), lambda: config(**{**_COMMON, **changes}), _tokens(3)
    )


def _pop2piano() -> Case:
    inputs = _tokens(4)
    features = torch.randn(*inputs.pop("input_ids").shape, 32, generator=torch.Generator().manual_seed(5))
    case = _t5("Pop2Piano", composer_vocab_size=3)
    return Case(case.model, case.config, {"input_features": features, **inputs})


def _pix2struct() -> Case:
    B, N, M = SHAPE
    text = {
        "vocab_size": 99, "hidden_size": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "is_decoder": True,
        "layer_norm_epsilon": 1e-6, "use_cache": True,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "patch_embed_hidden_size": 12, "d_ff": 64, "d_kv": 8, "num_hidden_layers": 1,
        "num_attention_heads": 4, "seq_len": N, "dropout_rate": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(6)
    patches = torch.randn(B, N, 14, generator=generator)
    patches[..., :2] = torch.randint(1, 30, (B, N, 2), generator=generator).float()
    mask = torch.ones(B, N)
    mask[1, N - 40 :] = 0
    labels = torch.randint(2, 99, (B, M), generator=generator)
    return Case(
        transformers.Pix2StructForConditionalGeneration,
        lambda: transformers.Pix2StructConfig(text_config=dict(text), vision_config=dict(vision)),
        {"flattened_patches": patches, "attention_mask": mask, "labels": labels},
    )


def _udop() -> Case:
    inputs = _tokens(7)
    corners = torch.rand(*inputs["input_ids"].shape, 2, generator=torch.Generator().manual_seed(8)) * 0.5
    case = _t5("Udop", image_size=8, patch_size=4, max_2d_position_embeddings=20)
    return Case(case.model, case.config, {**inputs, "bbox": torch.cat((corners, corners + 0.3), -1)})


CASES = {
    "T5": lambda: _t5("T5", feed_forward_proj="gated-gelu"),
    "mT5": lambda: _t5("MT5"),
    "UMT5": lambda: _t5("UMT5"),
    "Pop2Piano": _pop2piano,
    "Pix2Struct": _pix2struct,
    "Switch": lambda: _t5("SwitchTransformers", num_decoder_layers=2, num_experts=2, expert_capacity=500),
    "UDOP": _udop,
}
