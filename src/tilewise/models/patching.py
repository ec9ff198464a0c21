"""patch() and unpatch(): change the class of a loaded model's attention layers, and nothing else of it.

A layer's parameters, buffers, hooks and name stay, so checkpoints are interchangeable both ways. No class, function or
configuration that another model could see is changed.
"""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from ..api import IMPLEMENTATIONS
from ..info import explain
from . import hf, t5
from .family import Family
from .report import Patched, Report

__all__ = ["PatchError", "patch", "unpatch"]

FAMILIES: dict[str, Family] = {family.target: family for family in t5.FAMILIES}


class PatchError(ValueError):
    """A model that cannot be patched; it is as it was, and the message names the layers and the reasons."""


@dataclass(frozen=True)
class _Original:
    """What unpatch() needs: kept on the patched layer, and on the stack above it, under the name ``_tilewise``."""

    cls: type
    config: Any
    impl: str


@dataclass(frozen=True)
class _Match:
    path: str
    module: nn.Module
    parent: nn.Module | None
    family: Family


def patch(model: nn.Module, *, impl: str = "auto") -> Report:
    """Let a loaded model's attention run on :func:`tilewise.attention`: same weights, same outputs, linear memory.

    Works on the model in place, wrapped or not (PEFT, compiled), in training and generation. State-dict keys stay as
    they are; :func:`unpatch` restores everything. A model that is patched already is patched anew.

    Not offered by a patched model: ``output_attentions`` (the matrix of weights is never formed; it raises).
    Dropout on the weights has the same law as transformers', and other random numbers.

    Args:
        model: any module that holds attention layers of a family that this package knows: T5, mT5, UMT5, Pop2Piano,
            Pix2Struct (text), Switch Transformers and UDOP (decoder) of transformers.
        impl: as in :func:`tilewise.attention`, for every call of the patched layers.

    Returns:
        What was done, layer by layer; ``print`` shows it as a table.

    Raises:
        PatchError: no layer is of a known family, a layer of one cannot be patched, or the implementation asked for
            cannot run one. The model is then as it was.
        ValueError: `impl` is not an implementation's name.

    Example:
        >>> from transformers import T5Config, T5EncoderModel
        >>> model = T5EncoderModel(T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4))
        >>> [row.path for row in patch(model).rows][:1]
        ['encoder.block.0.layer.0.SelfAttention']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a loaded model (torch.nn.Module)")
    if impl not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"impl is {impl!r}; expected 'auto', {', '.join(map(repr, IMPLEMENTATIONS))}")
    matches = _matches(model)
    rows, chosen = [], []
    for match in matches:
        if reason := match.family.left_alone(match.module):
            rows.append(_row(match, "transformers", (reason,)))
        else:
            rows.append(_row(match, *_choose(match, impl)))
            chosen.append(match)
    if not chosen:
        left = "; ".join(f"{row.path}: {row.reasons[0]}" for row in rows)
        raise PatchError(left or _no_match(model))
    unpatch(model)
    if any(match.family.interface for match in chosen):
        hf.register()
    try:
        _apply(model, chosen, impl)
    except BaseException:
        unpatch(model)
        raise
    return Report(type(model).__name__, tuple(rows))


def unpatch(model: nn.Module) -> int:
    """Undo :func:`patch`: every layer has its class and its configuration object back.

    Returns:
        How many attention layers were restored; 0 if the model was not patched.
    """
    restored = 0
    for module in model.modules():
        original = module.__dict__.pop("_tilewise", None)
        if original is None:
            continue
        restored += type(module) is not original.cls
        module.__class__ = original.cls
        if original.config is not None:
            module.config = original.config
    return restored


@cache
def _patched_class(target: str, cls: type) -> type:
    """The class that a layer of `cls` gets: the same object every time, and one that can be pickled."""
    names = {"__module__": __name__, "__qualname__": _importable(target), "__doc__": cls.__doc__}
    return type(f"Tilewise{cls.__name__}", (FAMILIES[target].base, cls), names)


def _importable(target: str) -> str:
    module, cls = target.split(":")
    return f"{module.rpartition('.')[2]}_{cls}"


def __getattr__(name: str) -> type:
    # Unpickling a patched layer looks its class up by name, perhaps before patch() was called in this process.
    target = next((target for target in FAMILIES if _importable(target) == name), None)
    if target is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, cls = target.split(":")
    if FAMILIES[target].interface:
        hf.register()
    return _patched_class(target, getattr(importlib.import_module(module), cls))


def _matches(model: nn.Module) -> list[_Match]:
    matches, problems = [], []
    modules = dict(model.named_modules())
    for path, module in modules.items():
        original = module.__dict__.get("_tilewise")
        cls = type(module) if original is None else original.cls
        family = FAMILIES.get(_target(cls))
        if family is None:
            known = next((base for base in cls.__mro__ if _target(base) in FAMILIES), None)
            if known is not None:
                problems.append(
                    f"{path}: its class {cls.__qualname__} derives from {known.__qualname__}; expected "
                    f"{known.__qualname__} itself, since a subclass may compute something else"
                )
        elif (reason := family.obstacle(module)) and not family.left_alone(module):
            problems.append(f"{path} ({cls.__qualname__}): {reason}")
        elif family.interface and not _inside_stack(modules, path):
            problems.append(
                f"{path or 'the module'} ({cls.__qualname__}): the stack that it belongs to is not part of "
                f"{type(model).__name__}; expected the stack or the model, since a stack's layers share bias and mask"
            )
        else:
            matches.append(_Match(path, module, modules.get(path.rpartition(".")[0]) if path else None, family))
    if problems:
        raise PatchError("nothing was patched, because of " + "; ".join(problems))
    return matches


def _choose(match: _Match, impl: str) -> tuple[str, tuple[str, ...]]:
    """The implementation that will run the layer's usual call, and why no faster one does."""
    reasons = explain(**match.family.example(match.module, match.parent))
    if impl == "auto":
        chosen = next(name for name in IMPLEMENTATIONS if not reasons[name])
    elif reasons[impl]:
        raise PatchError(
            f"nothing was patched: impl={impl!r} cannot run {match.path}: {'; '.join(reasons[impl])}. "
            "impl='auto' runs it."
        )
    else:
        chosen = impl
    faster = IMPLEMENTATIONS[: IMPLEMENTATIONS.index(chosen)]
    return chosen, tuple(f"{name}: {reason}" for name in faster for reason in reasons[name])


def _apply(model: nn.Module, matches: list[_Match], impl: str) -> None:
    """Reclass the layers. Those of the attention interface, and the stacks above them, get a configuration of their
    own that names this implementation: the object they had may be shared with other models."""
    stacks = {path: module for path, module in model.named_modules() if _is_stack(module)}
    copies: dict[int, Any] = {}

    def own_config(module: nn.Module) -> Any:
        config = module.config
        if id(config) not in copies:
            copies[id(config)] = copy.deepcopy(config)
            copies[id(config)]._attn_implementation = hf.IMPLEMENTATION
        return copies[id(config)]

    for match in matches:
        module, cls = match.module, type(match.module)
        if not match.family.interface:
            module.__dict__["_tilewise"] = _Original(cls, None, impl)
            module.__class__ = _patched_class(match.family.target, cls)
            continue
        owners = [path for path in stacks if f"{match.path}.".startswith(f"{path}." if path else "")]
        stack = stacks[max(owners, key=len)] if owners else None
        shared = module.config
        if stack is not None and "_tilewise" not in stack.__dict__ and stack.config is shared:
            stack.__dict__["_tilewise"] = _Original(type(stack), stack.config, impl)
            stack.config = own_config(module)
        module.__dict__["_tilewise"] = _Original(cls, shared, impl)
        module.config = own_config(module)
        module.__class__ = _patched_class(match.family.target, cls)


def _inside_stack(modules: dict[str, nn.Module], path: str) -> bool:
    parts = path.split(".")
    return any(_is_stack(modules[".".join(parts[:n])]) for n in range(len(parts)))


def _is_stack(module: nn.Module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)


def _target(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _row(match: _Match, implementation: str, reasons: tuple[str, ...]) -> Patched:
    original = match.module.__dict__.get("_tilewise")
    cls = type(match.module) if original is None else original.cls
    return Patched(
        match.path, cls.__qualname__, match.family.mechanism(match.module, match.parent), implementation, reasons
    )


def _no_match(model: nn.Module) -> str:
    names = ", ".join(dict.fromkeys(family.name for family in FAMILIES.values()))
    return f"{type(model).__name__} has no attention layer that this package knows; families supported: {names}"
