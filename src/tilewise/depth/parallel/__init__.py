"""Attention Residuals over several devices: sequence-sharded tensor parallelism and cached pipeline parallelism."""

from tilewise.depth.parallel.pipeline import DepthPipelineStage, DepthStage, SourceCache
from tilewise.depth.parallel.plan import PipelinePlan, paper_cached, paper_naive
from tilewise.depth.parallel.tensor import SequenceSharded, ShardedStream

__all__ = [
    "DepthPipelineStage",
    "DepthStage",
    "PipelinePlan",
    "SequenceSharded",
    "ShardedStream",
    "SourceCache",
    "paper_cached",
    "paper_naive",
]
