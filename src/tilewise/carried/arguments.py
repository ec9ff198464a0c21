"""What a single argument has to be; refusals name it, what was found and what was expected."""

from __future__ import annotations

import math
from numbers import Integral, Real

import torch
from torch import Tensor

from ..mask import unreadable

__all__ = [
    "check_base",
    "check_flag",
    "check_hidden",
    "check_integer",
    "check_positions",
    "check_rotary_width",
    "check_tokens",
    "require",
]


def require(name: str, value: object, kind: type, nearest: str = "") -> None:
    """Raise TypeError if `value` is no `kind`."""
    if not isinstance(value, kind):
        expected = f"a {kind.__name__}" if kind is not Tensor else "a tensor"
        found = f"is a {type(value).__name__}" if value is not None else "is None"
        raise TypeError(f"{name} {found}; expected {expected}{'; nearest legal call: ' + nearest if nearest else ''}")


def check_integer(name: str, value: int, low: int | None = 1, high: int | None = None, none: str = "") -> int:
    """Raise TypeError if `value` is no integer, ValueError if it is not from `low` to `high`; `none` ends the text.

    Returns the value, NumPy's integers as Python's.
    """
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} is {value!r}; expected an integer{none}")
        value = int(value)
    if (low is not None and value < low) or (high is not None and value > high):
        legal = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(f"{name} is {value}; expected {legal}{none}")
    return value


def check_flag(name: str, value: bool) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; expected True or False")


def check_base(name: str, base: float, none: str = "") -> None:
    """Base of rotary frequencies: others give angles that are NaN, or all the same."""
    if isinstance(base, bool) or not isinstance(base, int | float | Real):
        raise TypeError(f"{name} is {base!r}; expected a number{none}")
    if not 0.0 < base < math.inf:
        raise ValueError(f"{name} is {base}; expected a positive, finite number{none}")


def check_rotary_width(name: str, d: int) -> None:
    """Raise unless `d` can be cut into halves that turn into each other."""
    check_integer(name, d, 2)
    if d % 2:
        raise ValueError(f"{name} is {d}; expected an even number: halves of a head turn into each other")


def check_positions(positions: Tensor) -> None:
    """Positions of tokens; interpolated ones, in fp32 or fp64, pass."""
    require("positions", positions, Tensor, "torch.arange(T)")
    if positions.dtype not in _POSITIONS:
        raise TypeError(
            f"positions is {positions.dtype}; expected an integer dtype (or fp32 or fp64: 16 bits do not hold them)"
        )
    if positions.dim() not in (1, 2):
        raise ValueError(f"positions has shape {tuple(positions.shape)}; expected [T] or [B, T]")


_POSITIONS = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    torch.float32, torch.float64,
)  # fmt: skip


def check_hidden(name: str, x: Tensor, width: int) -> None:
    """A hidden state."""
    require(name, x, Tensor)
    if x.dim() != 3 or x.shape[-1] != width:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected [B, T, {width}]")
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name} is {x.dtype}; expected a floating dtype")


def check_tokens(tokens: Tensor, least: int, meaning: str, vocabulary: int) -> None:
    """Numbers of tokens [B, T], T at least `least`."""
    require("tokens", tokens, Tensor)
    if tokens.dim() != 2 or tokens.shape[0] == 0 or tokens.shape[1] < least:
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}; expected [B, T] with T at least {least}{meaning}")
    if tokens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"tokens is {tokens.dtype}; expected torch.int64 or torch.int32")
    # Reading a GPU's numbers would stall its stream.
    if type(tokens) is Tensor and tokens.device.type == "cpu" and not unreadable():
        low, high = (int(x) for x in torch.aminmax(tokens))
        if low < 0 or high >= vocabulary:
            raise ValueError(f"tokens reach from {low} to {high}; expected 0 to {vocabulary - 1}, the vocabulary's")
