"""One attention call, checked and lowered: what every implementation receives."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from .mask import Mask
from .terms import Port

__all__ = ["Call", "Options", "Unsupported"]


class Unsupported(ValueError):
    """The implementation asked for cannot run this call; the message has the reasons and a call that would run."""


_CHOICES = {
    "skew": ("auto", "shared", "memory"),
    "projections": ("auto", "keep", "recompute"),
    "fp32": ("auto", "ieee", "tf32"),
}


@dataclass(frozen=True)
class Options:
    """How the kernels compute a call; what they compute stays the same. ``"auto"`` leaves a choice to them.

    Attributes:
        skew: where products with the rows of a query or key term's table are shifted into place: inside the kernels,
            a tile at a time, with memory linear in the lengths (``"shared"``: Hopper GPUs, the forward and where there
            are kernels for it the backward), or in device ``"memory"``, of an identity map (Transformer-XL) N² a head
            with the heads in turn (any GPU). Auto: shared where it can be and was not measured to be slower.
        projections: products of q and k with the tables' rows that the forward made are kept for the backward
            (``"keep"``) or made again (``"recompute"``). Auto: kept for sequences so short that no tile of
            scores is beyond the offsets that the maps tell apart, if they take no more memory than q, k, v and O. Where
            no gradient will be asked for, nothing is kept.
        fp32: how fp32 inputs are multiplied on a GPU: ``"ieee"``, or ``"tf32"``, with 10 bits of mantissa. Auto: as
            ``torch.backends.cuda.matmul.fp32_precision`` says when a pass runs, which PyTorch's own products follow
            too. It is ieee unless somebody changed it.

    Raises:
        ValueError: a value that is none of these.

    Example:
        >>> q = torch.zeros(1, 2, 16, 8)
        >>> attention(q, q, q, options=Options(projections="recompute")).shape
        torch.Size([1, 2, 16, 8])
    """

    skew: str = "auto"
    projections: str = "auto"
    fp32: str = "auto"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                expected = ", ".join(map(repr, choices[:-1]))
                raise ValueError(f"options.{name} is {getattr(self, name)!r}; expected {expected} or {choices[-1]!r}")

    @property
    def spec(self) -> str:
        """The values as text; :meth:`of` gives the options back."""
        return ",".join(getattr(self, field.name) for field in fields(self))

    @classmethod
    def of(cls, spec: str) -> Options:
        """Inverse of :attr:`spec`."""
        return cls(*spec.split(","))


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
        options: how to compute it.
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
    options: Options = Options()

    @property
    def tensors(self) -> list[Tensor]:
        """The ports' tensors in the order of their gradients: each table, then its left factor if it has one."""
        return [tensor for port in self.ports for tensor in port.tensors]
