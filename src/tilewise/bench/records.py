"""Results as data: a JSON list with one environment record a run and one record a cell and pass."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .. import __version__
from . import cells

__all__ = ["environment", "gpu_name", "key", "load", "merge", "save", "size"]

_FIRST = ("n", "heads", "head_dim", "tokens")
"""The size fields of records written before records named them."""


def size(record: dict) -> dict[str, int]:
    """The size fields of a cell's record, which it names in ``size``; the one that tables run over is the first."""
    return {name: record[name] for name in record.get("size", _FIRST)}


def key(record: dict) -> tuple:
    """What a record measures; a later record with the same key replaces an earlier one."""
    return cells.key(*(record[name] for name in ("set", "case", "pass", "system", "dtype")), size(record))


def gpu_name(device: str) -> str:
    """``H200`` for "NVIDIA H200", ``cpu`` on the CPU."""
    return torch.cuda.get_device_name().removeprefix("NVIDIA ").strip() if device == "cuda" else "cpu"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """What $COMMIT says, else the repository's commit, with "-dirty" where files differ from it."""
    if named := os.environ.get("COMMIT"):
        return named[:12]
    root = Path(__file__).parent
    describe = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"]
    try:
        shown = subprocess.run(describe, cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return shown.stdout.strip() if shown.returncode == 0 else None


def environment(run: str, set_name: str, device: str, packages: Iterable[str], options: dict) -> dict:
    """The environment record of a run, identified by `run`, which its other records repeat."""
    cuda = device == "cuda"
    return {
        "record": "environment",
        "run": run,
        "set": set_name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpu": gpu_name(device),
        "cpu_cores": os.cpu_count(),
        "tilewise": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "versions": {package: _version(package) for package in packages},
        "options": options,
    }


def load(path: str | Path) -> list[dict]:
    """The records of a file; none where it does not exist.

    Raises:
        ValueError: the file is not a JSON list.
    """
    path = Path(path)
    if not path.exists():
        return []
    records = json.loads(path.read_text())
    if not isinstance(records, list):
        raise ValueError(f"{path} holds a {type(records).__name__}; expected a list of records")
    return records


def save(path: str | Path, records: list[dict]) -> None:
    """Write a JSON list, one record a line, replacing the file in one step."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text("[\n" + ",\n".join(json.dumps(r, allow_nan=False) for r in records) + "\n]\n")
    partial.replace(path)


def merge(*lists: list[dict]) -> list[dict]:
    """Environment records of every run that still has cells, then the cells; of equal keys the last one stays."""
    cells: dict[tuple, dict] = {}
    runs: dict[str, dict] = {}
    for records in lists:
        for record in records:
            if record.get("record") == "environment":
                runs[record["run"]] = record
            else:
                cells.pop(key(record), None)
                cells[key(record)] = record
    used = {record["run"] for record in cells.values()}
    return [environment for run, environment in runs.items() if run in used] + list(cells.values())
