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
from tilewise.depth.planner import MemoryPlan, memory_table, plan_memory
from tilewise.depth.schedule import Schedule, layers_from_sublayers, sublayers_from_layers
from tilewise.depth.serving import fused_attn_res
from tilewise.depth.shared import BlockReads, SharedSource, mix_norm_shared
from tilewise.depth.state import InferenceState, InferenceStream

__all__ = [
    "BlockReads",
    "InferenceState",
    "InferenceStream",
    "MemoryPlan",
    "Schedule",
    "SharedSource",
    "complete",
    "fold_queries",
    "fused_attn_res",
    "layers_from_sublayers",
    "memory_table",
    "mix",
    "mix_norm",
    "mix_norm_shared",
    "mix_update",
    "phase1",
    "phase1_from_scores",
    "phase2",
    "phase2_first",
    "plan_memory",
    "scores",
    "sublayers_from_layers",
]
