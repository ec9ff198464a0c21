"""Attention whose scores accumulate from layer to layer inside a block of layers.

    P_i = softmax(Z_i),   Z_i = s Q_i K_iᵀ + β_i Z_{i−1},   O_i = P_i V_i

Exact, forward and backward, on any device, with kernels for NVIDIA GPUs. Options: :class:`CarriedConfig`. One layer:
:func:`carried_attention` with a :class:`Carry`. Modules: :mod:`tilewise.carried.nn`, :mod:`tilewise.carried.llama`.
Inference: :func:`carried_decode`. Not to be confused with attention over the outputs of earlier layers (Attention
Residuals), which is :mod:`tilewise.depth`.

Example:
    >>> import torch
    >>> carry = Carry(CarriedConfig(layers=4, windows=128))
    >>> for _ in range(8):  # two blocks: the carry starts afresh by itself
    ...     q, k, v = torch.randn(1, 8, 100, 32), torch.randn(1, 2, 100, 32), torch.randn(1, 2, 100, 32)
    ...     o, carry = carried_attention(q, k, v, carry)
"""

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
