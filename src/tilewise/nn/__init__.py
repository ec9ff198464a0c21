"""Layers for people who build models: residual streams over depth and a small decoder that uses them."""

from .decoder import Decoder, DecoderConfig
from .residual import AttnRes, Residual, StandardResidual, StandardStream, Stream

__all__ = ["AttnRes", "Decoder", "DecoderConfig", "Residual", "StandardResidual", "StandardStream", "Stream"]
