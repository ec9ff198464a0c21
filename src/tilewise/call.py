"""One attention call, checked and lowered: what every implementation receives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .mask import Mask
from .terms import Port

__all__ = ["Call"]


@dataclass(frozen=True, eq=False)
class Call:
    """Everything that defines O and lse.

    Attributes:
        q, k, v: [B, H, Tq, d], [B, Hk, Tk, d], [B, Hk, Tk, d_v]; Hk divides H; any strides.
        ports: the relative terms (:class:`tilewise.terms.Port`).
        mask: its tensors lie on q's device.
        scale: τ.
        offset: the position of query 0 relative to key 0, so that δ = i + offset − j.
        dropout_p, seed: see :mod:`tilewise.dropout`; seed is an int64 tensor [1] on q's device, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    ports: tuple[Port, ...]
    mask: Mask
    scale: float
    offset: int
    dropout_p: float = 0.0
    seed: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The ports' tensors in the order of their gradients: each table, then its left factor if it has one."""
        return [tensor for port in self.ports for tensor in port.tensors]
