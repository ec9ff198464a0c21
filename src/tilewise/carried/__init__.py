"""Attention whose scores accumulate from layer to layer inside a block of layers."""

from .config import CarriedConfig
from .inference import DecodeCost, carried_decode, decode_cost
from .layout import TileLayout
from .policy import Decision, choose_plan
from .reference import carried_attention_reference
from .shared_keys import SharedKeyCarry, shared_key_attention
from .state import Carry, carried_attention

__all__ = [
    "CarriedConfig",
    "Carry",
    "Decision",
    "DecodeCost",
    "SharedKeyCarry",
    "TileLayout",
    "carried_attention",
    "carried_attention_reference",
    "carried_decode",
    "choose_plan",
    "decode_cost",
    "shared_key_attention",
]
