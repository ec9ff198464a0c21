"""Layers for people who build models: residual streams over depth and a small decoder that uses them."""

from .decoder import Decoder, DecoderConfig, KVCache
from .kimi import attn_res_from_config, kimi_k3_state_dict, load_kimi_k3
from .residual import AttnRes, Residual, StandardResidual
from .shared import SharedStream
from .stream import StandardStream, Stream

__all__ = [
    "AttnRes",
    "Decoder",
    "DecoderConfig",
    "KVCache",
    "Residual",
    "SharedStream",
    "StandardResidual",
    "StandardStream",
    "Stream",
    "attn_res_from_config",
    "kimi_k3_state_dict",
    "load_kimi_k3",
]
