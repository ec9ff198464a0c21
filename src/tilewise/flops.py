"""FLOP formulas of the operators for ``torch.utils.flop_counter``, registered once somebody imports that module.

It imports Triton where that is installed, so importing it here would make ``import tilewise`` do so.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from math import prod

import torch

__all__ = ["register_when_counted"]

_COUNTER = "torch.utils.flop_counter"


def register_when_counted() -> None:
    """Register the formulas now if FLOPs can be counted already, else as soon as they can."""
    if _COUNTER in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(torch.ops.tilewise.attn_fwd)(_forward)
    register_flop_formula(torch.ops.tilewise.attn_bwd)(_backward)


def _forward(q_shape, k_shape, v_shape, *args, out_shape=None, **kwargs) -> int:
    """2 a multiply-add of QKᵀ and PV, as PyTorch counts SDPA: no discount for masks, none of the terms' own work."""
    return 2 * prod(q_shape[:3]) * k_shape[2] * (q_shape[3] + v_shape[3])


def _backward(
    do_shape, dlse_shape, o_shape, lse_shape, kept_shape, need, q_shape, k_shape, v_shape, *args, out_shape=None,
    **kwargs,
) -> int:  # fmt: skip
    """S, dQ and dK cost d a score, dP and dV d_v."""
    return 2 * prod(q_shape[:3]) * k_shape[2] * (3 * q_shape[3] + 2 * v_shape[3])


class _Finder(MetaPathFinder):
    """Steps aside at its one use, after handing out the module's own loader with the registration behind it."""

    def find_spec(self, fullname, path, target=None):
        if fullname != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, own: Loader) -> None:
        self.own = own

    def create_module(self, spec):
        return self.own.create_module(spec)

    def exec_module(self, module) -> None:
        self.own.exec_module(module)
        _register()

    def __getattr__(self, name: str):
        # inspect and linecache ask the loader for the module's source.
        return getattr(self.own, name)
