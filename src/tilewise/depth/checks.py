"""Validation at the call: every error names the argument, what was found, what is expected, and a legal call.

A hint that costs anything is put together after the comparison has failed: reads of a stream pass here each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "FLOATS",
    "IMPLS",
    "check_eps",
    "check_impl",
    "check_int",
    "check_kind",
    "check_matrix",
    "check_norms",
    "check_same",
    "check_sources",
    "check_statistics",
    "check_stream",
    "check_update",
    "check_vector",
    "check_weight",
    "kind_of",
]

IMPLS = ("auto", "triton", "eager", "reference")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FLOATS = f"one of {', '.join(map(str, FLOATS))}"


def kind_of(x: Any) -> str:
    """What an error says of something that is no tensor: None, or the name of its type."""
    return "None" if x is None else type(x).__name__


def check_kind(name: str, x: Any, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raise TypeError unless `x` is one of `kinds`, which `expected` says in words."""
    if not isinstance(x, kinds):
        raise TypeError(f"{name}: found {kind_of(x)}, expected {expected}")


def check_impl(impl: str) -> None:
    """Raise ValueError unless `impl` is one of auto, triton, eager, reference."""
    if impl not in IMPLS:
        raise ValueError(f"impl: found {impl!r}, expected one of {', '.join(IMPLS)}")


def check_eps(name: str, eps: float) -> None:
    """Raise TypeError or ValueError unless `eps` is a finite number, 0 or above."""
    if not isinstance(eps, (int, float)) or isinstance(eps, bool):
        raise TypeError(f"{name}: found {eps!r}, expected a finite number >= 0")
    if not 0 <= eps < math.inf:
        raise ValueError(f"{name}: found {eps}, expected a finite number >= 0")


def check_int(name: str, value: int, low: int, high: int | None = None, meaning: str = "") -> None:
    """Raise TypeError unless `value` is an integer, ValueError unless low <= value <= high; `meaning` ends the text."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: found {value!r}, expected an integer{meaning}")
    if value < low or (high is not None and value > high):
        legal = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(f"{name}: found {value}, expected {legal}{meaning}")


def check_weight(name: str, weight: Tensor | None) -> None:
    """Raise TypeError unless `weight` is None or a tensor of floats; a norm module is the likely mistake."""
    if weight is None:
        return
    if not isinstance(weight, Tensor):
        raise TypeError(
            f"{name}: found {type(weight).__name__}, expected a tensor [d]; of a norm module pass its .weight"
        )
    _check_float(name, weight)


def check_norms(norms: Sequence[Tensor] | None, sublayers: int, d: int, device: torch.device | None = None) -> None:
    """Check the input norms' weights that a stream is given at its start; None passes.

    Raises:
        TypeError: no sequence, or an element that is no tensor of floats.
        ValueError: another number than `sublayers`, or a weight that is not `[d]` on `device`.
    """
    if norms is None:
        return
    if not (hasattr(norms, "__len__") and hasattr(norms, "__getitem__")) or isinstance(norms, (str, dict)):
        raise TypeError(f"norms: found {type(norms).__name__}, expected a list or tuple of weights; pass list(norms)")
    if isinstance(norms, Tensor) and norms.ndim < 2:
        raise ValueError(f"norms: found a tensor {tuple(norms.shape)}, expected {sublayers} weights [{d}]")
    if len(norms) != sublayers:
        raise ValueError(f"norms: found {len(norms)} weights, expected {sublayers}")
    shape = (d,)
    for l, weight in enumerate(norms):
        if not isinstance(weight, Tensor):
            raise TypeError(
                f"norms[{l}]: found {type(weight).__name__}, expected a weight [{d}]; of a norm module pass its .weight"
            )
        if weight.shape != shape:
            raise ValueError(f"norms[{l}]: found shape {tuple(weight.shape)}, expected [{d}]")
        if weight.dtype not in FLOATS:
            raise TypeError(f"norms[{l}]: found dtype {weight.dtype}, expected {_FLOATS}")
        if device is not None and weight.device != device:
            raise ValueError(f"norms[{l}]: found a weight on {weight.device}, expected one on {device}")


def check_update(update: Tensor, shape: torch.Size, device: torch.device, name: str = "update") -> None:
    """Check a sublayer's output, the argument `name`, that is written to a stream of `shape`.

    Raises:
        TypeError: no tensor, or a dtype that is no float.
        ValueError: another shape or device.
    """
    if not isinstance(update, Tensor):
        raise TypeError(f"{name}: found {type(update).__name__}, expected a tensor {tuple(shape)}")
    if update.dtype not in FLOATS:
        raise TypeError(f"{name}: found dtype {update.dtype}, expected {_FLOATS}")
    if update.shape != shape:
        raise ValueError(f"{name}: found shape {tuple(update.shape)}, expected {tuple(shape)}")
    if update.device != device:
        raise ValueError(f"{name}: found a tensor on {update.device}, expected one on {device}")


def check_sources(
    sources: Sequence[Tensor] | Tensor, name: str = "sources"
) -> tuple[torch.Size, torch.dtype, torch.device]:
    """The common shape `[..., d]`, dtype and device of the sources, the argument `name`.

    Raises:
        TypeError: not tensors, or a dtype that is no float.
        ValueError: no source, or shapes, dtypes or devices that differ.
    """
    if isinstance(sources, Tensor):
        if sources.ndim < 2 or sources.shape[0] == 0:
            raise ValueError(
                f"{name}: found a bank of shape {tuple(sources.shape)}, expected [n, ..., d] with n >= 1; "
                "pass bank[:n] for the first n blocks"
            )
        first, rest = sources[0], ()
    else:
        if not isinstance(sources, (list, tuple)):
            raise TypeError(f"{name}: found {kind_of(sources)}, expected a list, a tuple or a tensor [n, ..., d]")
        if not sources:
            raise ValueError(f"{name}: found none, expected at least one; the embedding is the first source")
        first, rest = sources[0], sources[1:]
        if not isinstance(first, Tensor):
            raise TypeError(f"{name}[0]: found {kind_of(first)}, expected a tensor [..., d]")
    _check_float(name, first)
    for j, v in enumerate(rest, 1):
        if not isinstance(v, Tensor):
            raise TypeError(f"{name}[{j}]: found {kind_of(v)}, expected a tensor {tuple(first.shape)}")
        if v.shape != first.shape or v.dtype != first.dtype or v.device != first.device:
            raise ValueError(
                f"{name}[{j}]: found {tuple(v.shape)} {v.dtype} on {v.device}, expected {tuple(first.shape)} "
                f"{first.dtype} on {first.device} as {name}[0]"
            )
    if first.ndim < 1 or first.shape[-1] == 0:
        raise ValueError(f"{name}: found shape {tuple(first.shape)}, expected [..., d] with d >= 1")
    return first.shape, first.dtype, first.device


def check_stream(name: str, x: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Shape `[..., d]`, dtype and device of one tensor of a stream, the argument `name`; errors as for the sources."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: found {kind_of(x)}, expected a tensor [..., d]")
    _check_float(name, x)
    if x.ndim < 1 or x.shape[-1] == 0:
        raise ValueError(f"{name}: found shape {tuple(x.shape)}, expected [..., d] with d >= 1")
    return x.shape, x.dtype, x.device


def check_same(name: str, x: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless `x` has this shape, dtype and device, TypeError if it is no tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: found {kind_of(x)}, expected a tensor {tuple(shape)} {dtype}")
    if x.shape != shape or x.dtype != dtype or x.device != device:
        raise ValueError(
            f"{name}: found {tuple(x.shape)} {x.dtype} on {x.device}, expected {tuple(shape)} {dtype} on {device}"
        )


def check_statistics(name: str, x: Tensor, shape: Sequence[int], sources: torch.dtype, device: torch.device) -> None:
    """Check lse or scores that the caller gives: fp32 beside sources of up to 32 bits, fp64 beside fp64 ones.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another shape or device.
    """
    wide = torch.float64 if sources == torch.float64 else torch.float32
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: found {kind_of(x)}, expected a tensor {tuple(shape)} {wide}")
    if x.shape != shape or x.device != device:
        raise ValueError(f"{name}: found {tuple(x.shape)} on {x.device}, expected {tuple(shape)} on {device}")
    if x.dtype != wide:
        raise TypeError(
            f"{name}: found {x.dtype}, expected {wide} beside sources in {sources}: rounded statistics change every "
            "weight; keep what phase 1 and scores return as it is"
        )


def check_vector(name: str, x: Tensor | None, d: int, device: torch.device, optional: bool = True) -> None:
    """Raise ValueError unless `x` is a vector [d] on `device`, TypeError if it is no tensor of floats.

    None passes if `optional`.
    """
    if x is None and optional:
        return
    if not isinstance(x, Tensor):
        hint = "; a mean of the sources is torch.zeros(d)" if x is None else "; of a norm module pass its .weight"
        raise TypeError(f"{name}: found {kind_of(x)}, expected a tensor [{d}]{hint}")
    if x.ndim != 1 or x.shape[0] != d or x.device != device:
        hint = f"; pass {name}.view(-1)" if x.numel() == d and x.ndim != 1 else ""
        raise ValueError(f"{name}: found {tuple(x.shape)} on {x.device}, expected [{d}] on {device}{hint}")
    _check_float(name, x)


def check_matrix(
    name: str, x: Tensor | None, d: int, device: torch.device, rows: int | None = None, optional: bool = True
) -> None:
    """Raise ValueError unless `x` is a matrix [rows, d] on `device`, TypeError if it is no tensor of floats.

    None passes if `optional`.
    """
    if x is None and optional:
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: found {kind_of(x)}, expected a tensor [{'S' if rows is None else rows}, {d}]")
    if x.ndim != 2 or x.shape[1] != d or x.device != device or rows not in (None, x.shape[0]):
        hint = f"; pass {name}[None] for one query" if x.ndim == 1 and x.shape[0] == d else ""
        raise ValueError(
            f"{name}: found {tuple(x.shape)} on {x.device}, expected [{'S' if rows is None else rows}, {d}] "
            f"on {device}{hint}"
        )
    _check_float(name, x)


def _check_float(name: str, x: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"{name}: found dtype {x.dtype}, expected {_FLOATS}")
