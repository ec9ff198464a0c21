"""Tiny random DeBERTas of each configuration, with inputs that are padded on both sides, for the drop-in's tests."""

import torch
import transformers
from torch import nn

B, N, LAYERS = 3, 130, 2
COMMON = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "type_vocab_size": 0,
    "intermediate_size": 48, "relative_attention": True, "position_buckets": 16, "max_relative_positions": 40,
    "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3,
    "position_biased_input": False, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
CONFIGS = {
    "v3": {},
    "own projections": {"share_att_key": False, "norm_rel_ebd": "none", "conv_kernel_size": 0},
    "no buckets": {"position_buckets": -1, "type_vocab_size": 2, "position_biased_input": True},
    "c2p": {
        "pos_att_type": "c2p",
        "share_att_key": False,
        "max_relative_positions": -1,
        "max_position_embeddings": 150,
    },
    "p2c": {"pos_att_type": ["p2c"], "attention_head_size": 12},
}
"""Both terms and one, shared projections and own, logarithmic buckets and none; some tables saturated, some not."""


def config(**changes):
    return transformers.DebertaV2Config(**{**COMMON, **changes})


def build(cls="Model", dtype=torch.float32, **changes):
    """The model with the same random weights every time, large enough that every part of the scores matters."""
    torch.manual_seed(1)
    model = getattr(transformers, f"DebertaV2{cls}")(config(**changes)).eval()
    if "attention_head_size" in changes:
        for layer in model.modules():
            # transformers' own layers cannot join heads of another width than hidden / heads.
            if type(layer).__name__ == "DebertaV2SelfOutput":
                layer.dense = nn.Linear(4 * changes["attention_head_size"], 32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "LayerNorm" not in name:
                parameter.normal_(std=0.18)
    return model.to(dtype)


def tokens():
    """Right padding, left padding with a hole, and an example that is all real."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(B, N, dtype=torch.long)
    mask[0, N - 40 :], mask[1, :17], mask[1, 60] = 0, 0, 0
    draw = lambda: torch.randint(2, 99, (B, N), generator=generator)  # noqa: E731
    return {"input_ids": draw(), "attention_mask": mask, "labels": draw()}


def inputs():
    return {name: x for name, x in tokens().items() if name != "labels"}
