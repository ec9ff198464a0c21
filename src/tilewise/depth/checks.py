"""Validation at the call: every error names the argument, what was found, what is expected, and a legal call."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "IMPLS",
    "check_eps",
    "check_impl",
    "check_matrix",
    "check_norms",
    "check_same",
    "check_sources",
    "check_update",
    "check_vector",
    "check_weight",
]

IMPLS = ("auto", "triton", "eager", "reference")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_impl(impl: str) -> None:
    """Raise ValueError unless `impl` is one of auto, triton, eager, reference."""
    if impl not in IMPLS:
        raise ValueError(f"impl: found {impl!r}, expected one of {', '.join(IMPLS)}")


def check_eps(name: str, eps: float) -> None:
    """Raise TypeError or ValueError unless `eps` is a finite number, 0 or above."""
    if not isinstance(eps, (int, float)):
        raise TypeError(f"{name}: found {eps!r}, expected a finite number >= 0")
    if not 0 <= eps < math.inf:
        raise ValueError(f"{name}: found {eps}, expected a finite number >= 0")


def check_weight(name: str, weight: Tensor | None) -> None:
    """Raise TypeError unless `weight` is None or a tensor; a norm module is the likely mistake."""
    if weight is not None and not isinstance(weight, Tensor):
        raise TypeError(
            f"{name}: found {type(weight).__name__}, expected a tensor [d]; of a norm module pass its .weight"
        )


def check_norms(norms: Sequence[Tensor] | None, sublayers: int, d: int) -> None:
    """Check the input norms' weights that a stream is given at its start; None passes.

    Raises:
        TypeError: no sequence, or an element that is no tensor.
        ValueError: another number than `sublayers`, or a weight that is not `[d]`.
    """
    if norms is None:
        return
    if not (hasattr(norms, "__len__") and hasattr(norms, "__getitem__")):
        raise TypeError(f"norms: found {type(norms).__name__}, expected a list or tuple of weights; pass list(norms)")
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


def check_update(update: Tensor, shape: torch.Size, name: str = "update") -> None:
    """Check a sublayer's output, the argument `name`, that is written to a stream of `shape`.

    Raises:
        TypeError: no tensor, or a dtype that is no float.
        ValueError: another shape.
    """
    if not isinstance(update, Tensor):
        raise TypeError(f"{name}: found {type(update).__name__}, expected a tensor {tuple(shape)}")
    if update.dtype not in FLOATS:
        raise TypeError(f"{name}: found dtype {update.dtype}, expected one of {', '.join(map(str, FLOATS))}")
    if update.shape != shape:
        raise ValueError(f"{name}: found shape {tuple(update.shape)}, expected {tuple(shape)}")


def check_sources(sources: Sequence[Tensor] | Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """The common shape `[..., d]`, dtype and device of the sources.

    Raises:
        TypeError: not tensors, or a dtype that is no float.
        ValueError: no source, or shapes, dtypes or devices that differ.
    """
    if isinstance(sources, Tensor):
        if sources.ndim < 2 or sources.shape[0] == 0:
            raise ValueError(
                f"sources: found a bank of shape {tuple(sources.shape)}, expected [n, ..., d] with n >= 1; "
                "pass bank[:n] for the first n blocks"
            )
        first, rest = sources[0], ()
    else:
        if not isinstance(sources, (list, tuple)):
            raise TypeError(
                f"sources: found {type(sources).__name__}, expected a list, a tuple or a tensor [n, ..., d]"
            )
        if not sources:
            raise ValueError("sources: found none, expected at least one; the embedding is the first source")
        first, rest = sources[0], sources[1:]
    if first.dtype not in FLOATS:
        raise TypeError(f"sources: found dtype {first.dtype}, expected one of {', '.join(map(str, FLOATS))}")
    for j, v in enumerate(rest, 1):
        if v.shape != first.shape or v.dtype != first.dtype or v.device != first.device:
            raise ValueError(
                f"sources[{j}]: found {tuple(v.shape)} {v.dtype} on {v.device}, expected {tuple(first.shape)} "
                f"{first.dtype} on {first.device} as sources[0]"
            )
    if first.ndim < 1 or first.shape[-1] == 0:
        raise ValueError(f"sources: found shape {tuple(first.shape)}, expected [..., d] with d >= 1")
    return first.shape, first.dtype, first.device


def check_same(name: str, x: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless `x` has this shape, dtype and device."""
    if x.shape != shape or x.dtype != dtype or x.device != device:
        raise ValueError(
            f"{name}: found {tuple(x.shape)} {x.dtype} on {x.device}, expected {tuple(shape)} {dtype} on {device}"
        )


def check_vector(name: str, x: Tensor | None, d: int, device: torch.device) -> None:
    """Raise ValueError unless `x` is None or a vector [d] on `device`, TypeError if it is no tensor."""
    check_weight(name, x)
    if x is not None and (x.ndim != 1 or x.shape[0] != d or x.device != device):
        hint = f"; pass {name}.view(-1)" if x.numel() == d and x.ndim != 1 else ""
        raise ValueError(f"{name}: found {tuple(x.shape)} on {x.device}, expected [{d}] on {device}{hint}")


def check_matrix(name: str, x: Tensor | None, d: int, device: torch.device, rows: int | None = None) -> None:
    """Raise ValueError unless `x` is None or a matrix [rows, d] on `device`."""
    if x is not None and (x.ndim != 2 or x.shape[1] != d or x.device != device or rows not in (None, x.shape[0])):
        hint = f"; pass {name}[None] for one query" if x.ndim == 1 and x.shape[0] == d else ""
        raise ValueError(
            f"{name}: found {tuple(x.shape)} on {x.device}, expected [{'S' if rows is None else rows}, {d}] "
            f"on {device}{hint}"
        )
