"""Which keys a query may see, without an N×N matrix wherever the rule does not need one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .rows import as_tokens

__all__ = ["UNBOUNDED", "Mask"]

UNBOUNDED = 2**30
"""A window side without a bound."""


@dataclass(frozen=True, eq=False)
class Mask:
    """The conjunction of its parts; build one with the class methods and join with ``&``.

    With query position i + offset (see :func:`tilewise.attention`), key j is visible if all of these hold:

    * −right ≤ i + offset − j ≤ left (window; causal is right = 0),
    * bounds[b, i, 0] ≤ j < bounds[b, i, 1] (lengths, packed documents, intervals),
    * keys[b, j] (padding of any pattern),
    * dense[b, h, i, j] (costs N² bytes: for rules that nothing else can say).

    Attributes:
        left, right: window in tokens; :data:`UNBOUNDED` for none.
        bounds: int32 [1 or B, 1 or Tq, 2], or None.
        keys: bool [B, Tk], True where a key may be seen, or None.
        dense: bool [1 or B, 1 or H, Tq, Tk], or None.

    Example:
        >>> mask = Mask.causal() & Mask.padding(torch.tensor([[1, 1, 0]]))
        >>> mask.allowed(3, 3)[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 0]]
    """

    left: int = UNBOUNDED
    right: int = UNBOUNDED
    bounds: Tensor | None = None
    keys: Tensor | None = None
    dense: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            side = as_tokens(f"mask.{name}", getattr(self, name))
            object.__setattr__(self, name, side)
            if side < 0 or side >= 2**62:
                raise ValueError(f"mask.{name} is {side}; expected a number from 0 to 2⁶² − 1")
        for name in ("bounds", "keys", "dense"):
            part = getattr(self, name)
            if part is not None and not isinstance(part, Tensor):
                raise TypeError(f"mask.{name} is a {type(part).__name__}; expected a tensor or None")

    @classmethod
    def causal(cls) -> Mask:
        """Keys at or before the query's position."""
        return cls(right=0)

    @classmethod
    def window(cls, left: int, right: int = 0) -> Mask:
        """At most `left` tokens back and `right` ahead, both ≥ 0. Causal sliding window: ``window(W - 1)``."""
        try:
            left, right = as_tokens("left", left), as_tokens("right", right)
        except TypeError:
            raise TypeError(f"window is ({left}, {right}); expected two integers") from None
        if left < 0 or right < 0:
            raise ValueError(f"window is ({left}, {right}); expected two numbers ≥ 0")
        return cls(left=left, right=right)

    @classmethod
    def lengths(cls, lengths: Sequence[int] | Tensor, starts: Sequence[int] | Tensor | None = None) -> Mask:
        """Keys starts[b] ≤ j < lengths[b] (right padding; `starts` adds left padding); both [B], or [1] for all.

        Raises:
            ValueError: negative lengths, or starts beyond them (checked for lists and CPU tensors; on a GPU, values
                beyond the keys are cut instead, since reading them would stall the stream).
        """
        hi = _integers("lengths", lengths)
        lo = torch.zeros_like(hi) if starts is None else _integers("starts", starts).to(hi.device)
        if hi.dim() != 1 or lo.shape != hi.shape:
            raise ValueError(
                f"lengths and starts have shapes {tuple(hi.shape)} and {tuple(lo.shape)}; expected [B] twice"
            )
        if hi.device.type == "cpu" and not unreadable() and bool(((lo < 0) | (hi < lo)).any()):
            raise ValueError(f"lengths {hi.tolist()} and starts {lo.tolist()}; expected 0 ≤ starts ≤ lengths")
        return cls(bounds=torch.stack((lo, hi), -1)[:, None])

    @classmethod
    def padding(cls, mask: Tensor) -> Mask:
        """A padding mask [B, Tk], 1 or True where a token is real; any pattern, left, right or holes.

        Raises:
            ValueError: numbers other than 0 and 1 (checked on the CPU), such as a mask to be added to scores.
        """
        _require_tensor("padding mask", mask)
        if mask.dim() != 2:
            raise ValueError(
                f"padding mask has shape {tuple(mask.shape)}; expected [B, Tk] (a [B, H, Tq, Tk] mask is Mask.full)"
            )
        if mask.dtype != torch.bool and mask.device.type == "cpu" and not unreadable():
            if not bool(((mask == 0) | (mask == 1)).all()):
                raise ValueError("padding mask has values other than 0 and 1; expected 1 or True where a token is real")
        return cls(keys=mask if mask.dtype == torch.bool else mask != 0)

    @classmethod
    def packed(cls, cu_seqlens: Sequence[int] | Tensor, total: int | None = None) -> Mask:
        """Documents packed into one row (B = 1): tokens cu[n] … cu[n+1] − 1 see only each other.

        Args:
            cu_seqlens: [documents + 1], rising from 0.
            total: the row's length, if tokens follow the last document (they see nothing); default cu[-1]. A function
                compiled with fullgraph=True must give it: cu[-1] is a number in a tensor.
        """
        cu = _integers("cu_seqlens", cu_seqlens)
        if cu.dim() != 1 or cu.numel() < 2:
            raise ValueError(f"cu_seqlens has shape {tuple(cu.shape)}; expected [documents + 1]")
        if cu.device.type == "cpu" and not unreadable() and (int(cu[0]) != 0 or bool((cu.diff() < 0).any())):
            raise ValueError(f"cu_seqlens is {cu.tolist()}; expected numbers rising from 0")
        if total is None:
            total = int(cu[-1])
        elif (total := as_tokens("total", total)) < 0:
            raise ValueError(f"total is {total}; expected an integer, cu_seqlens[-1] or more")
        document = torch.searchsorted(cu, torch.arange(total, dtype=torch.int32, device=cu.device), right=True)
        ends = torch.cat((cu, cu[-1:]))
        return cls(bounds=torch.stack((ends[document - 1], ends[document]), -1)[None])

    @classmethod
    def intervals(cls, lo: Tensor, hi: Tensor) -> Mask:
        """Keys lo[b, i] ≤ j < hi[b, i]; both [Tq] or [B, Tq]. Chunked and look-ahead masks of streaming encoders."""
        lo, hi = _integers("lo", lo), _integers("hi", hi)
        if lo.shape != hi.shape or lo.dim() not in (1, 2):
            raise ValueError(
                f"lo and hi have shapes {tuple(lo.shape)} and {tuple(hi.shape)}; expected [Tq] or [B, Tq] twice"
            )
        both = torch.stack((lo, hi), -1)
        return cls(bounds=both if lo.dim() == 2 else both[None])

    @classmethod
    def full(cls, mask: Tensor) -> Mask:
        """A boolean matrix, True where a key is visible: [Tq, Tk], [1 or H, Tq, Tk] or [1 or B, 1 or H, Tq, Tk].

        Which keys are real, for every query alike, is :meth:`padding`, which costs no N² bytes.
        """
        _require_tensor("mask", mask)
        if mask.dtype != torch.bool:
            raise TypeError(f"mask is {mask.dtype}; expected bool, True where a key is visible")
        if not 2 <= mask.dim() <= 4:
            raise ValueError(f"mask has shape {tuple(mask.shape)}; expected [Tq, Tk] up to [B, H, Tq, Tk]")
        return cls(dense=mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape)))

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        bounds = self.bounds if other.bounds is None else other.bounds
        if self.bounds is not None and other.bounds is not None:
            a, b = _joinable("bounds", self.bounds, other.bounds.to(self.bounds.device))
            bounds = torch.stack((torch.maximum(a[..., 0], b[..., 0]), torch.minimum(a[..., 1], b[..., 1])), -1)
        return Mask(min(self.left, other.left), min(self.right, other.right), bounds,
                    _both("keys", self.keys, other.keys), _both("dense", self.dense, other.dense))  # fmt: skip

    def to(self, device: torch.device) -> Mask:
        """The same mask with its tensors on `device`."""
        parts = {"bounds": self.bounds, "keys": self.keys, "dense": self.dense}
        for name, part in parts.items():
            if part is not None and part.is_meta and torch.device(device).type != "meta":
                raise ValueError(f"mask.{name} is on meta; expected {device}, or a device that holds values")
        return replace(self, **{n: None if t is None else t.to(device, non_blocking=True) for n, t in parts.items()})

    def check(self, B: int, H: int, Tq: int, Tk: int) -> None:
        """Raise ValueError or TypeError naming the part that does not fit attention of these sizes."""
        parts = (
            ("bounds", self.bounds, torch.int32, ((1, B), (1, Tq), (2,))),
            ("keys", self.keys, torch.bool, ((B,), (Tk,))),
            ("dense", self.dense, torch.bool, ((1, B), (1, H), (Tq,), (Tk,))),
        )
        for name, tensor, dtype, sizes in parts:
            if tensor is None:
                continue
            if tensor.dtype != dtype:
                raise TypeError(f"mask.{name} is {tensor.dtype}; expected {dtype}, as Mask's class methods make it")
            # Not `in`: to torch.compile a size is a symbol, which it does not find in a tuple.
            if tensor.dim() != len(sizes) or any(
                all(n != m for m in s) for n, s in zip(tensor.shape, sizes, strict=True)
            ):
                wanted = ", ".join(" or ".join(map(str, dict.fromkeys(s))) for s in sizes)
                raise ValueError(f"mask.{name} has shape {tuple(tensor.shape)}; expected [{wanted}]")
        if self.bounds is not None and self.bounds.device.type == "cpu" and not unreadable() and self.bounds.numel():
            far = int(self.bounds.max())
            if far > Tk or int(self.bounds.min()) < 0:
                raise ValueError(f"mask.bounds reach from {int(self.bounds.min())} to {far}; expected 0 to Tk = {Tk}")

    def allowed(
        self, Tq: int, Tk: int, offset: int = 0, rows: slice | None = None, device: torch.device | None = None
    ) -> Tensor:
        """The mask as a boolean matrix [1 or B, 1 or H, rows, Tk] on `device` (default: where its tensors are)."""
        if device is not None:
            return self.to(device)._allowed(Tq, Tk, offset, rows, device)
        held = next((t.device for t in (self.bounds, self.keys, self.dense) if t is not None), torch.device("cpu"))
        return self._allowed(Tq, Tk, offset, rows, held)

    def _allowed(self, Tq: int, Tk: int, offset: int, rows: slice | None, device: torch.device) -> Tensor:
        i = torch.arange(Tq, device=device)[rows or slice(None)]
        j = torch.arange(Tk, device=device)
        delta = i[:, None] + offset - j
        seen = ((delta <= self.left) & (delta >= -self.right))[None, None]
        if self.bounds is not None:
            bounds = self.bounds if self.bounds.shape[1] == 1 else self.bounds[:, rows or slice(None)]
            seen = seen & ((j >= bounds[..., :1]) & (j < bounds[..., 1:]))[:, None]
        if self.keys is not None:
            seen = seen & self.keys[:, None, None]
        return seen if self.dense is None else seen & self.dense[:, :, rows or slice(None)]


def _both(name: str, a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return torch.logical_and(*_joinable(name, a, b.to(a.device)))


def _joinable(name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if a.dim() != b.dim() or any(m != n and m != 1 and n != 1 for m, n in zip(a.shape, b.shape, strict=True)):
        raise ValueError(f"two masks are joined whose {name} have shapes {tuple(a.shape)} and {tuple(b.shape)}")
    return a, b


def _require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a tensor")


def _integers(name: str, values: Sequence[int] | Tensor) -> Tensor:
    """`values` as int32 (lists on the CPU, whatever the default device); refused if not integers of 32 bits."""
    try:
        given = values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{name} is {values!r}; expected integers, as a list or a tensor") from error
    if given.dtype.is_floating_point or given.dtype == torch.bool:
        raise TypeError(f"{name} are {given.dtype}; expected integers")
    if given.device.type == "cpu" and not unreadable() and given.numel() and int(given.abs().max()) >= 2**31:
        raise ValueError(f"{name} reach {int(given.abs().max())}; expected numbers below 2³¹")
    return given.to(torch.int32)


def unreadable() -> bool:
    """Whether no value of a tensor can be read: torch.compile and make_fx have none yet, torch.func.vmap has many."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
    )
