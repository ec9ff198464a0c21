"""What patch() did to a model, as data and as a table."""

from __future__ import annotations

import importlib.util
import io
import re
from dataclasses import dataclass

__all__ = ["Patched", "Report"]

_COLUMNS = ("module", "layers", "class", "mechanism", "implementation", "why not faster")


@dataclass(frozen=True)
class Patched:
    """One layer.

    Attributes:
        path: the module's name in the model, as ``named_modules`` gives it.
        cls: the class it had.
        mechanism: what its scores depend on.
        implementation: what runs it now (``triton``, ``blocked``, ``reference``), or ``transformers`` if left alone.
        reasons: why no faster implementation runs it, or why it was left alone.
    """

    path: str
    cls: str
    mechanism: str
    implementation: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What :func:`tilewise.patch` did. ``print(report)`` shows a table; layers that differ in their number are one row.

    Attributes:
        model: the model's class.
        rows: one :class:`Patched` a layer, in the order of ``named_modules``.
    """

    model: str
    rows: tuple[Patched, ...]

    def table(self) -> list[tuple[str, ...]]:
        """The cells of the printed table, without its header."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for row in self.rows:
            pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", row.path, count=1)
            key = (pattern, row.cls, row.mechanism, row.implementation, "; ".join(row.reasons))
            groups.setdefault(key, []).append(row.path)
        return [(paths[0] if len(paths) == 1 else key[0], str(len(paths)), *key[1:]) for key, paths in groups.items()]

    def __rich__(self):
        from rich.table import Table

        table = Table(title=f"{self.model}: {len(self.rows)} attention layers")
        for column in _COLUMNS:
            table.add_column(column, no_wrap=column == "module")
        for cells in self.table():
            table.add_row(*cells)
        return table

    def __str__(self) -> str:
        if importlib.util.find_spec("rich") is None:
            return self._plain()
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=140).print(self)
        return text.getvalue().rstrip("\n")

    def _plain(self) -> str:
        lines = [_COLUMNS, *self.table()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines
        )
