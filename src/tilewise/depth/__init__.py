"""Attention Residuals: a residual stream that mixes earlier sublayers' outputs by a softmax over depth."""

from tilewise.depth.functional import (
    fold_queries,
    fused_attn_res,
    mix,
    mix_norm,
    mix_update,
    phase1,
    phase1_from_scores,
    phase2,
    phase2_first,
    scores,
)

__all__ = [
    "fold_queries",
    "fused_attn_res",
    "mix",
    "mix_norm",
    "mix_update",
    "phase1",
    "phase1_from_scores",
    "phase2",
    "phase2_first",
    "scores",
]
