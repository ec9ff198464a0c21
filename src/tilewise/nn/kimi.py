"""Kimi K3's convention for Attention Residuals: its configuration, parameter names and shapes, in both directions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewise.depth.checks import FLOATS, check_eps, check_int, check_kind
from tilewise.depth.schedule import Schedule, layers_from_sublayers

from .residual import AttnRes

__all__ = ["attn_res_from_config", "kimi_k3_state_dict", "load_kimi_k3"]

OUTPUT = "output_attn_res"
SUBLAYERS = ("self_attention_res", "mlp_res")


def attn_res_from_config(config: Any, **options) -> AttnRes:
    """An :class:`AttnRes` from a configuration with `hidden_size`, `num_hidden_layers`, `attn_res_block_size` (counted
    in decoder layers) and `rms_norm_eps`.

    Args:
        config: an object or a mapping with these fields.
        options: further arguments of :class:`AttnRes`.

    Raises:
        TypeError: a field that is no number.
        ValueError: a field is missing, or a number is not positive.

    Example:
        >>> config = {"hidden_size": 64, "num_hidden_layers": 7, "attn_res_block_size": 3, "rms_norm_eps": 1e-5}
        >>> attn_res_from_config(config).schedule.starts
        (0, 6, 12)
    """
    read = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
    names = ("hidden_size", "num_hidden_layers", "attn_res_block_size", "rms_norm_eps")
    if missing := [name for name in names if read(name) is None]:
        raise ValueError(f"config: found no {', '.join(missing)}, expected {', '.join(names)}")
    for name in names[:3]:
        check_int(f"config.{name}", read(name), 1)
    check_eps("config.rms_norm_eps", read("rms_norm_eps"))
    d, layers, size, eps = (read(name) for name in names)
    return AttnRes(d, Schedule.kimi_k3(layers, size), **({"eps": eps} | options))


def _stems(schedule: Schedule, span: tuple[int, int] | None = None) -> list[str]:
    first, last = span or (0, schedule.sublayers)
    stems = [f"layers.{l // 2}.{SUBLAYERS[l % 2]}" for l in range(first, last)]
    return [*stems, OUTPUT] if last == schedule.sublayers else stems


def _prefix(names: Mapping[str, Tensor]) -> str:
    marks = (f"{OUTPUT}_proj.weight", *(f"layers.0.{stem}_proj.weight" for stem in SUBLAYERS))
    found = sorted({name.removesuffix(mark) for name in names for mark in marks if name.endswith(mark)})
    if not found:
        raise ValueError(f"state_dict: found no Attention Residuals parameters, expected …{marks[0]} or …{marks[1]}")
    if len(found) > 1:
        raise ValueError(f"prefix: found {', '.join(map(repr, found))} in state_dict, expected one; name it")
    return found[0]


def _check_names(names: Mapping[str, Tensor], prefix: str, module: AttnRes) -> None:
    """Refuse what a model of another shape has: more decoder layers, reads of another form, parameters with a bias."""
    whole = {f"{prefix}{stem}_{part}.weight" for stem in _stems(module.schedule) for part in ("proj", "norm")}
    read = re.compile(rf"{re.escape(prefix)}(layers\.\d+\.({'|'.join(SUBLAYERS)})|{OUTPUT})_")
    for name in names:
        if name not in whole and read.match(name):
            found, layers = names[name], -(-module.schedule.sublayers // 2)
            shape = f" {tuple(found.shape)}" if isinstance(found, Tensor) else ""
            raise ValueError(
                f"state_dict: found {name}{shape}, expected no such parameter: the module's schedule has {layers} "
                "decoder layers, each with a proj and a norm before attention and MLP, and one of both for the output"
            )


@torch.no_grad()
def load_kimi_k3(module: AttnRes, state_dict: Mapping[str, Tensor], prefix: str | None = None) -> AttnRes:
    """Copy `…_res_proj.weight` `[1, d]` into the queries and `…_res_norm.weight` `[d]` into the key weights.

    Args:
        module: its span says which layers are read.
        state_dict: parameters by Kimi K3's names; parameters of other parts of the model are ignored, reads over depth
            of another model (more decoder layers than the schedule has) are refused.
        prefix: what stands before `layers.0.` and `output_attn_res_proj`, such as `model.`; None finds it.

    Returns:
        The module.

    Raises:
        TypeError: no module, mapping or prefix, or a parameter that is no tensor of floats.
        ValueError: a parameter is missing, has another shape, or belongs to no sublayer of the schedule; nothing is
            changed then.
    """
    check_kind("module", module, AttnRes, "an AttnRes")
    check_kind("state_dict", state_dict, Mapping, "a mapping of names to tensors")
    check_kind("prefix", prefix, (str, type(None)), "a string or None")
    prefix = _prefix(state_dict) if prefix is None else prefix
    stems = _stems(module.schedule, module.span)
    wanted = {f"{prefix}{s}_{part}.weight": shape for s in stems for part, shape in _shapes(module.d).items()}
    if missing := [name for name in wanted if name not in state_dict]:
        names = ", ".join(f"{name} {wanted[name]}" for name in missing[:4])
        raise ValueError(f"state_dict: found no {names} ({len(missing)} missing), expected {len(wanted)} parameters")
    _check_names(state_dict, prefix, module)
    for name, shape in wanted.items():
        value = state_dict[name]
        if not isinstance(value, Tensor) or value.dtype not in FLOATS:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"state_dict[{name!r}]: found {kind}, expected a tensor of floats {shape}")
        if tuple(value.shape) != shape:
            raise ValueError(f"state_dict[{name!r}]: found {tuple(value.shape)}, expected {shape}")
    for row, stem in enumerate(stems):
        module.query[row].copy_(state_dict[f"{prefix}{stem}_proj.weight"][0])
        module.key_weight[row].copy_(state_dict[f"{prefix}{stem}_norm.weight"])
    return module


def _shapes(d: int) -> dict[str, tuple[int, ...]]:
    return {"proj": (1, d), "norm": (d,)}


def kimi_k3_state_dict(module: AttnRes, prefix: str = "model.") -> dict[str, Tensor]:
    """The module's parameters by Kimi K3's names and shapes.

    Raises:
        TypeError: no AttnRes, or a prefix that is no string.
        ValueError: a block boundary inside a decoder layer, which Kimi K3 cannot express.
    """
    check_kind("module", module, AttnRes, "an AttnRes")
    check_kind("prefix", prefix, str, "a string")
    for start in module.schedule.starts[1:]:
        layers_from_sublayers(start)
    result = {}
    for row, stem in enumerate(_stems(module.schedule, module.span)):
        result[f"{prefix}{stem}_proj.weight"] = module.query[row].detach()[None].clone()
        result[f"{prefix}{stem}_norm.weight"] = module.key_weight[row].detach().clone()
    return result
