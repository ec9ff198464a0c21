"""Attention Residuals: a residual stream that mixes earlier sublayers' outputs by a softmax over depth."""

from tilewise.depth.functional import (
    complete,
    fold_queries,
    mix,
    mix_norm,
    mix_update,
    phase1,
    phase1_from_scores,
    phase2,
    phase2_first,
    scores,
)
from tilewise.depth.serving import fused_attn_res

__all__ = [
    "complete",
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
