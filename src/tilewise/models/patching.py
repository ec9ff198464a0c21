"""patch() and unpatch(): change the class of a loaded model's attention layers, and nothing else of it.

A layer's parameters, buffers, hooks and name stay, so checkpoints are interchangeable both ways. No class, function or
configuration that another model could see is changed.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from ..api import IMPLEMENTATIONS
from ..info import explain
from . import deberta, hf, t5, wav2vec2_bert
from .family import Family
from .hints import hint
from .report import Patched, Report
from .settings import shared_settings

__all__ = ["PatchError", "patch", "unpatch"]

FAMILIES: dict[str, Family] = {
    family.target: family for family in (*t5.FAMILIES, *deberta.FAMILIES, *wav2vec2_bert.FAMILIES)
}

_BASES: dict[str, type] = {
    **{family.target: family.base for family in FAMILIES.values()},
    **{family.stack: family.stack_base for family in FAMILIES.values() if family.stack_base is not None},
}
"""Every class that patch() changes, layers and stacks, and what goes in front of it."""


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
    stack: nn.Module | None


def patch(model: nn.Module, *, impl: str = "auto") -> Report:
    """Let a loaded model's attention run on :func:`tilewise.attention`: same weights, same outputs, linear memory.

    Works on the model in place, wrapped or not (PEFT, compiled), in training and generation. State-dict keys stay as
    they are; :func:`unpatch` restores everything. A model that is patched already is patched anew.

    Not offered by a patched model: ``output_attentions`` (the matrix of weights is never formed; it raises).
    Dropout on the weights has the same law as transformers', and other random numbers; the equal weights of a query
    that sees no key are not dropped.

    Args:
        model: any module that holds attention layers of a family that this package knows: T5, mT5, UMT5, Pop2Piano,
            Pix2Struct (text), Switch Transformers, UDOP (decoder), DeBERTa v2 and v3 and Wav2Vec2-BERT of transformers.
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
        left = [(row.path, row.reasons[0]) for row in rows]
        raise PatchError(_grouped(left) if left else _no_match(model))
    _refuse_mixed_stacks(matches, chosen)
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

    Raises:
        PatchError: a layer's class was derived from the patched one since, as ``fully_shard(layer)`` does. Nothing is
            restored then.
    """
    restored = 0
    patched = [(path, module) for path, module in model.named_modules() if "_tilewise" in module.__dict__]
    for path, module in patched:
        cls, made = type(module), _made_class(module)
        if made is not None and cls not in (made, module.__dict__["_tilewise"].cls):
            raise PatchError(
                f"{path or 'the module'} is a {cls.__name__}, a class that was made of the patched {made.__name__}; "
                "expected unpatch(model) before that"
            )
    for _, module in patched:
        made, original = _made_class(module), module.__dict__.pop("_tilewise")
        restored += _target(original.cls) in FAMILIES
        if made is not None:
            _change_class(module, original.cls)
        if original.config is not None:
            module.config = original.config
    return restored


def _made_class(module: nn.Module) -> type | None:
    """The class that patch() gave the module; None for a stack that kept its own."""
    cls = module.__dict__["_tilewise"].cls
    target = _target(cls)
    return _patched_class(target, cls) if target in _BASES else None


@cache
def _patched_class(target: str, cls: type) -> type:
    """The class that a layer of `cls` gets: the same object every time, and one that can be pickled."""
    names = {"__module__": __name__, "__qualname__": _importable(target), "__doc__": cls.__doc__}
    return type(f"Tilewise{cls.__name__}", (_BASES[target], cls), names)


def _importable(target: str) -> str:
    module, cls = target.split(":")
    return f"{module.rpartition('.')[2]}_{cls}"


def __getattr__(name: str) -> type:
    # Unpickling a patched layer looks its class up by name, perhaps before patch() was called in this process.
    target = next((target for target in _BASES if _importable(target) == name), None)
    if target is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, cls = target.split(":")
    if target in FAMILIES and FAMILIES[target].interface:
        hf.register()
    return _patched_class(target, getattr(importlib.import_module(module), cls))


def _matches(model: nn.Module) -> list[_Match]:
    matches, problems = [], []
    modules = dict(model.named_modules())
    for path, module in modules.items():
        cls = _class(module)
        family = FAMILIES.get(_target(cls))
        if family is None:
            known = next((base for base in cls.__mro__ if _target(base) in FAMILIES), None)
            if known is not None:
                why = (
                    f"its class {cls.__qualname__} derives from {known.__qualname__}; expected {known.__qualname__} "
                    "itself, since a subclass may compute something else"
                )
                problems.append((path, why))
        elif (reason := family.obstacle(module)) and not family.left_alone(module):
            problems.append((f"{path} ({cls.__qualname__})", reason))
        elif (stack := _stack(modules, path, family)) is None and not family.left_alone(module):
            why = _no_stack(modules, path, family, model)
            problems.append((f"{path or 'the module'} ({cls.__qualname__})", why))
        else:
            matches.append(_Match(path, module, modules.get(path.rpartition(".")[0]) if path else None, family, stack))
    if problems:
        raise PatchError(f"nothing was patched, because of {_grouped(problems)}")
    return matches


def _grouped(reasons: list[tuple[str, str]]) -> str:
    """(layer, reason): each reason once, with its first layer and the number of the others."""
    layers: dict[str, list[str]] = {}
    for layer, reason in reasons:
        layers.setdefault(reason, []).append(layer)
    others = {reason: f" (the same of {len(x) - 1} more)" if len(x) > 1 else "" for reason, x in layers.items()}
    return "; ".join(f"{x[0]}: {reason}{others[reason]}" for reason, x in layers.items())


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


def _refuse_mixed_stacks(matches: list[_Match], chosen: list[_Match]) -> None:
    """A stack whose class changes hands its layers what only patched ones can take."""
    for match in chosen:
        left = next((m for m in matches if m.stack is match.stack and m not in chosen), None)
        if match.family.stack_base is not None and left is not None:
            raise PatchError(
                f"nothing was patched, because {left.path} stays as it is ({left.family.left_alone(left.module)}) in "
                f"the stack of {match.path}; expected all layers of a {_class(match.stack).__qualname__} or none"
            )


def _apply(model: nn.Module, matches: list[_Match], impl: str) -> None:
    """Reclass the layers, and the stacks of families that ask for it. Layers of the attention interface, and the stacks
    above them, get a configuration of their own that names this implementation: the object they had may be shared with
    other models."""
    own: dict[int, Any] = {}

    def own_config(module: nn.Module) -> Any:
        config = module.config
        if id(config) not in own:
            own[id(config)] = shared_settings(config, hf.IMPLEMENTATION)
        return own[id(config)]

    for match in matches:
        module, stack, family = match.module, match.stack, match.family
        shared = module.config if family.interface else None
        if "_tilewise" not in stack.__dict__:
            cls = type(stack)
            if family.stack_base is not None:
                stack.__dict__["_tilewise"] = _Original(cls, None, impl)
                _change_class(stack, _patched_class(family.stack, cls))
            elif family.interface and stack.config is shared:
                stack.__dict__["_tilewise"] = _Original(cls, shared, impl)
                stack.config = own_config(module)
        cls = type(module)
        module.__dict__["_tilewise"] = _Original(cls, shared, impl)
        if family.interface:
            module.config = own_config(module)
        _change_class(module, _patched_class(family.target, cls))


def _change_class(module: nn.Module, cls: type) -> None:
    """accelerate keeps on a module the forward that its hooks call in the end, and leaves it there without them."""
    for name in ("_old_forward", "forward"):
        kept = module.__dict__.get(name)
        if inspect.ismethod(kept) and kept.__func__ is type(module).forward:
            module.__dict__[name] = cls.forward.__get__(module)
    module.__class__ = cls


def _stack(modules: dict[str, nn.Module], path: str, family: Family) -> nn.Module | None:
    """The nearest module above the layer that is its family's stack."""
    from transformers import PreTrainedModel

    parts = path.split(".")
    above = (modules[".".join(parts[:n])] for n in reversed(range(len(parts))))
    if family.stack is None:
        return next((m for m in above if isinstance(m, PreTrainedModel)), None)
    return next((m for m in above if _target(_class(m)) == family.stack), None)


def _no_stack(modules: dict[str, nn.Module], path: str, family: Family, model: nn.Module) -> str:
    parts = path.split(".")
    for n in reversed(range(len(parts))):
        above = ".".join(parts[:n])
        cls = _class(modules[above])
        known = next((base for base in cls.__mro__ if _target(base) == family.stack), None)
        if known is not None:
            return (
                f"its stack {above} is a {cls.__qualname__}, which derives from {known.__qualname__}; "
                f"expected {known.__qualname__} itself, since a subclass may compute something else"
            )
    which = "" if family.stack is None else f" (a {family.stack.rpartition(':')[2]})"
    return (
        f"the stack that it belongs to{which} is not part of {type(model).__name__}; expected the stack or the model, "
        "since a stack's layers share bias and mask"
    )


def _class(module: nn.Module) -> type:
    """The module's own class, patched or not."""
    original = module.__dict__.get("_tilewise")
    return type(module) if original is None else original.cls


def _target(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _row(match: _Match, implementation: str, reasons: tuple[str, ...]) -> Patched:
    mechanism = match.family.mechanism(match.module, match.parent)
    return Patched(match.path, _class(match.module).__qualname__, mechanism, implementation, reasons)


def _no_match(model: nn.Module) -> str:
    names = ", ".join(dict.fromkeys(family.name for family in FAMILIES.values()))
    known = f"{type(model).__name__} has no attention layer that this package knows; families supported: {names}"
    return f"{known}. {sentence}" if (sentence := hint(model)) else known
