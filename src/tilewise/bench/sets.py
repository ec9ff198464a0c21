"""The benchmark sets by name: what ``tilewise bench run --set`` offers, each imported when it is asked for."""

from __future__ import annotations

import importlib

from .cells import BenchSet

__all__ = ["SETS", "VLLM_SOURCE", "bench_set", "load"]

SETS: dict[str, str] = {
    "relative": "tilewise.bench.relative:RELATIVE",
    "depth": "tilewise.bench.depth:DEPTH",
    "carried": "tilewise.bench.carried:CARRIED",
    "carried-over": "tilewise.bench.carried:CARRIED_OVER",
}
"""Name ↦ ``module:attribute`` of a :class:`tilewise.bench.cells.BenchSet`."""

VLLM_SOURCE = "TILEWISE_VLLM_ATTN_RES"
"""The environment variable that names the source of vLLM's operator."""


def load(path: str) -> BenchSet:
    """The set at ``module:attribute``."""
    module, attribute = path.split(":")
    return getattr(importlib.import_module(module), attribute)


def bench_set(name: str) -> BenchSet:
    """The set of a name.

    Raises:
        ValueError: no such set.
    """
    if name not in SETS:
        raise ValueError(f"set is {name!r}; expected {' or '.join(map(repr, SETS))}")
    return load(SETS[name])
