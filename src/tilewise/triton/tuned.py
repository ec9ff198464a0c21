"""The file of tile shapes that ``tilewise bench tune`` writes: where it is, what may stand in it, and what is in it.

The path is ``TILEWISE_TILES``, else ``tilewise/tiles.json`` in the user's cache folder (``XDG_CACHE_HOME`` or
``~/.cache``) if that file is there; ``TILEWISE_TILES=builtin`` reads none. It is read once, at the first call.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path

__all__ = ["BUILTIN", "VARIABLE", "Table", "default_path", "path_in_use", "read", "shape_error", "table_of", "write"]

Table = dict[tuple[str, str], tuple[tuple[int, tuple[int, ...]], ...]]
"""(pass, class of call) ↦ (keys from, shape), in ascending order from 0."""

VARIABLE = "TILEWISE_TILES"
BUILTIN = "builtin"

_SHAPES = {
    "forward": ("queries", "keys", "warps", "stages", "band stages"),
    "queries": ("queries", "keys", "warps", "stages", "band stages"),
    "keys": ("queries", "keys", "warps", "stages", "band stages"),
    "projection": ("rows", "columns", "warps", "stages"),
    "fold": ("rows", "columns", "warps", "stages"),
}
_KINDS = ("plain", "scalar", "query", "key", "identity", "value")
_CLASSES = {
    "forward": _KINDS, "queries": _KINDS, "keys": _KINDS, "projection": ("query", "key", "identity"), "fold": ("",),
}  # fmt: skip


def default_path() -> Path:
    """The file in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilewise" / "tiles.json"


def path_in_use() -> Path | None:
    """The file that calls read, None where they use the table that comes with the package.

    Raises:
        ValueError: ``TILEWISE_TILES`` names a file that is not there.
    """
    named = os.environ.get(VARIABLE)
    if named == BUILTIN:
        return None
    if named:
        if not Path(named).is_file():
            raise ValueError(
                f"{VARIABLE} is {named!r}, which is no file; expected one from `tilewise bench tune`, or {BUILTIN!r}"
            )
        return Path(named)
    return default_path() if default_path().is_file() else None


def table_of(gpu: str) -> Table:
    """The entries for the GPU of this name; empty where no file has any."""
    return _tables().get(gpu, {}) if gpu else {}


@lru_cache(maxsize=1)
def _tables() -> dict[str, Table]:
    path = path_in_use()
    return {} if path is None else read(path)


def read(path: Path) -> dict[str, Table]:
    """GPU ↦ its entries.

    Raises:
        ValueError: naming the file, the key, the value found and the value expected.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a file of tile shapes ({error})") from None

    def wrong(key: str, value: object, expected: str) -> ValueError:
        return ValueError(f"{path}: {key} is {json.dumps(value)}; expected {expected}")

    def part(value: object, key: str) -> dict:
        if not isinstance(value, dict):
            raise wrong(key, value, "an object")
        return value

    version = part(found, "the file").get("tilewise_tiles")
    if version != 1:
        raise wrong("tilewise_tiles", version, "1")
    tables: dict[str, Table] = {}
    for gpu, passes in part(found.get("gpus"), "gpus").items():
        tables[gpu] = {}
        for what, classes in part(passes, f"gpus[{gpu!r}]").items():
            key = f"gpus[{gpu!r}].{what}"
            if what not in _SHAPES:
                raise wrong(key, "a pass", f"one of {', '.join(_SHAPES)}")
            for kind, entries in part(classes, key).items():
                at = f"{key}[{kind!r}]"
                if kind not in _CLASSES[what]:
                    raise wrong(at, "a class", f"one of {', '.join(map(repr, _CLASSES[what]))}")
                listed = isinstance(entries, list) and all(isinstance(e, list) and len(e) == 2 for e in entries)
                firsts = [e[0] for e in entries] if listed else []
                numbers = all(type(n) is int for n in firsts)
                if not firsts or not numbers or firsts[0] != 0 or sorted(set(firsts)) != firsts:
                    raise wrong(at, entries, "pairs [keys from, shape] that ascend from 0")
                for first, shape in entries:
                    if error := shape_error(what, kind, shape):
                        raise wrong(f"{at}, from {first} keys,", shape, error)
                tables[gpu][what, kind] = tuple((first, tuple(shape)) for first, shape in entries)
    return tables


def shape_error(what: str, kind: str, shape: object) -> str | None:
    """What was expected of a shape that the kernels cannot take."""
    names = _SHAPES[what]
    if not isinstance(shape, (list, tuple)) or len(shape) != len(names) or not all(type(n) is int for n in shape):
        return f"{len(names)} integers: {', '.join(names)}"
    # Both passes of the backward, and what is left to a fold afterwards, decide their bands on 64 × 64 blocks; with
    # scalar terms alone nothing but a pass's own rows depends on its band.
    own = 128 if kind in ("plain", "scalar") else 64
    most = {"keys": (64, own), "queries": (own, 64)}.get(what, (64, 64) if kind == "value" else (256, 256))
    for name, n, largest in zip(names[:2], shape[:2], most, strict=True):
        powers = [2**k for k in range(4, 9) if 2**k <= largest]
        if n not in powers:
            return f"{name} of {', '.join(map(str, powers))}"
    if shape[2] not in (1, 2, 4, 8, 16):
        return "warps of 1, 2, 4, 8, 16"
    return None if all(1 <= n <= 8 for n in shape[3:]) else "stages from 1 to 8"


def write(path: Path, gpu: str, table: Table) -> None:
    """Put the entries of a GPU into the file; entries of other GPUs, passes and classes stay."""
    tables = read(path) if path.is_file() else {}
    tables[gpu] = {**tables.get(gpu, {}), **table}
    gpus: dict = {}
    for name, entries in tables.items():
        for (what, kind), rows in entries.items():
            gpus.setdefault(name, {}).setdefault(what, {})[kind] = [[first, list(shape)] for first, shape in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"tilewise_tiles": 1, "gpus": gpus}, indent=1) + "\n")
    _tables.cache_clear()
