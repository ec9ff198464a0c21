"""A dry run: which implementation would serve a call, why the others would not, and what it would hold in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..api import IMPLEMENTATIONS, why_not
from ..call import Call
from ..mask import Mask
from ..terms import lower
from ..testing import Case, Sizes

__all__ = ["Choice", "choices", "memory_mib"]


@dataclass(frozen=True)
class Choice:
    """An implementation and the reasons for which it cannot run the call (none: it can)."""

    impl: str
    reasons: list[str]


def choices(case: Case, sizes: Sizes, dtype: torch.dtype, device: str) -> list[Choice]:
    """Every implementation in the order in which ``impl="auto"`` tries them, for a case of :mod:`tilewise.testing`."""
    shapes = {
        "q": (sizes.B, sizes.H, sizes.Tq, sizes.d),
        "k": (sizes.B, sizes.Hk, sizes.Tk, sizes.d),
        "v": (sizes.B, sizes.Hk, sizes.Tk, sizes.d_v),
    }
    x = {n: torch.empty(s, dtype=dtype, device=device) for n, s in (shapes | case.shapes(sizes)).items()}
    content, ports = lower(x["q"], case.build(x, sizes), biases=True)
    offset = sizes.Tk - sizes.Tq if sizes.offset is None else sizes.offset
    call = Call(content, x["k"], x["v"], tuple(ports), Mask(), case.scale(sizes.d), offset)
    return [Choice(impl, why_not(impl, call)) for impl in IMPLEMENTATIONS]


def memory_mib(sizes: Sizes, dtype: torch.dtype) -> dict[str, float]:
    """MiB of what a call must hold (inputs, output with lse), and of one dense score matrix, which eager holds."""
    unit = dtype.itemsize / 2**20
    s = sizes
    queries, keys = s.B * s.H * s.Tq, s.B * s.Hk * s.Tk
    return {
        "q, k, v": (queries * s.d + keys * (s.d + s.d_v)) * unit,
        "output and lse": queries * (s.d_v * unit + 4 / 2**20),
        "one dense score matrix (not held)": queries * s.Tk * unit,
    }
