"""A configuration object for patched layers: every setting is the model's own, but for the attention implementation."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

__all__ = ["shared_settings"]


class SharedSettings:
    """Goes in front of a configuration's class: one set of attributes for two objects, and one name for each.

    A plain copy would not follow the model's configuration: ``model.config.layerdrop = 0.0`` would change nothing.
    """

    __slots__ = ("_implementation", "_settings")

    # transformers 5.17 would hand a name down to a stack whose configuration has another class, once and never again.
    _attn_was_changed = True

    @property
    def _attn_implementation_internal(self) -> str | None:
        return self._implementation

    @_attn_implementation_internal.setter
    def _attn_implementation_internal(self, name: str | None) -> None:
        object.__setattr__(self, "_implementation", name)

    def __copy__(self) -> Any:
        return shared_settings(copy.copy(self._settings), self._implementation)

    def __deepcopy__(self, memo: dict) -> Any:
        if memo:
            return shared_settings(copy.deepcopy(self._settings, memo), self._implementation)
        # A copy of this object alone, as transformers' caches make in every forward: compilers can trace a plain one.
        settings = copy.deepcopy(self._settings, memo)
        settings._attn_implementation_internal = self._implementation
        return settings

    def __reduce_ex__(self, protocol: int) -> tuple:
        # An unpickled model shares its settings as this one does; so does a copied one, above.
        return shared_settings, (self._settings, self._implementation)


def shared_settings(config: Any, implementation: str | None) -> Any:
    """An object of `config`'s class (one derived from it) that has its attributes, then and later, and this name."""
    settings = object.__new__(_shared_class(type(config)))
    settings.__dict__ = config.__dict__
    object.__setattr__(settings, "_settings", config)
    object.__setattr__(settings, "_implementation", implementation)
    return settings


@cache
def _shared_class(cls: type) -> type:
    names = {"__slots__": (), "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (SharedSettings, cls), names)
