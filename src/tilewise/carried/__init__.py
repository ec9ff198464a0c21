"""Attention whose scores accumulate from layer to layer inside a block of layers."""

from .config import CarriedConfig
from .layout import TileLayout
from .policy import Decision, choose_plan
from .reference import carried_attention_reference
from .state import Carry, carried_attention

__all__ = [
    "CarriedConfig",
    "Carry",
    "Decision",
    "TileLayout",
    "carried_attention",
    "carried_attention_reference",
    "choose_plan",
]
