"""The benchmark sets by name: what ``tilewise bench run --set`` offers."""

from __future__ import annotations

from .cells import BenchSet
from .relative import RELATIVE

__all__ = ["SETS"]

SETS: dict[str, BenchSet] = {RELATIVE.name: RELATIVE}
