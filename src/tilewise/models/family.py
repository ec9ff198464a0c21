"""One entry of the table of supported layers: which class of which library, and what a patched layer does instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["Family"]


def _nothing(module: nn.Module) -> str | None:
    return None


@dataclass(frozen=True)
class Family:
    """A class of attention layers that :func:`tilewise.patch` knows.

    Attributes:
        name: the model family, as people call it.
        target: ``"package.module:Class"`` of the layer; matched exactly, so that two classes of one name never mix.
        base: goes in front of that class among the bases of the patched layer's class.
        mechanism: layer, its parent → what its scores depend on, in words.
        example: layer, its parent → arguments of :func:`tilewise.explain` for a small call such as the layer makes.
        obstacle: layer → why it cannot be patched, or None.
        left_alone: layer → why it is not one of the mechanisms and stays as it is, or None.
        interface: whether the layer reaches its operator through transformers' attention interface, and its stack
            makes its mask through it (:mod:`tilewise.models.hf`).
        stack: ``"package.module:Class"`` of the module above the layers that makes what they are handed, bias and mask;
            None for the nearest ``PreTrainedModel``.
        stack_base: goes in front of the stack's class, as `base` does; None leaves that class as it is.
    """

    name: str
    target: str
    base: type
    mechanism: Callable[[nn.Module, nn.Module | None], str]
    example: Callable[[nn.Module, nn.Module | None], dict[str, Any]]
    obstacle: Callable[[nn.Module], str | None] = _nothing
    left_alone: Callable[[nn.Module], str | None] = _nothing
    interface: bool = True
    stack: str | None = None
    stack_base: type | None = None
