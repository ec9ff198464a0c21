"""Exact fused attention for the models that FlashAttention leaves behind."""

from .api import attention
from .call import Options, Unsupported
from .info import explain
from .mask import Mask
from .mechanisms import T5, VITS, ALiBi, DeBERTa, DeBERTaV1, Inkling, MPNet, Shaw, TransformerXL, WavLM
from .rows import RowMap, clipped, compact, deberta_buckets, explicit, identity, t5_buckets, windowed
from .terms import OnKey, OnQuery, OnValue, QueryBias, Scalar

__version__ = "0.1.0"
__all__ = [
    "T5", "VITS", "ALiBi", "DeBERTa", "DeBERTaV1", "Inkling", "MPNet", "Mask", "OnKey", "OnQuery", "OnValue",
    "Options", "QueryBias", "RowMap", "Scalar", "Shaw", "TransformerXL", "Unsupported", "WavLM", "attention", "clipped",
    "compact", "deberta_buckets", "explain", "explicit", "identity", "patch", "t5_buckets", "unpatch", "windowed",
]  # fmt: skip


def __getattr__(name: str):
    # The drop-ins are imported on first use: they know the names of libraries that need not be installed.
    if name in ("patch", "unpatch"):
        from . import models

        return getattr(models, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
