"""Tables from records: speed, ratio to the baseline and memory by length, and the cells that are lost to another."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Table", "compared", "lost", "ours", "render", "tables"]

_PASSES = {"fwd": "forward", "bwd": "backward"}


@dataclass(frozen=True)
class Table:
    """A title, a header and rows of text; `emphasis` are the (row, column) of the fastest system of a column."""

    title: str
    header: list[str]
    rows: list[list[str]]
    emphasis: frozenset[tuple[int, int]] = frozenset()


def ours(system: str) -> bool:
    return system.startswith("tilewise")


def _cells(records: Iterable[dict]) -> list[dict]:
    return [r for r in records if r.get("record") == "cell"]


def _ordered(values: Iterable[str]) -> list[str]:
    """Ours first, the others as they came."""
    return sorted(dict.fromkeys(values), key=lambda name: not ours(name))


def _workload(record: dict) -> tuple:
    return record["case"], record["pass"], record["dtype"], record["heads"], record["head_dim"], record["tokens"]


def compared(records: Sequence[dict]) -> dict[tuple, dict[str, dict[int, dict]]]:
    """(case, pass, dtype, heads, head_dim, tokens) ↦ system ↦ length ↦ record."""
    groups: dict[tuple, dict[str, dict[int, dict]]] = {}
    for r in _cells(records):
        groups.setdefault(_workload(r), {}).setdefault(r["system"], {})[r["n"]] = r
    return groups


def _title(workload: tuple) -> str:
    case, pass_, dtype, heads, head_dim, tokens = workload
    return f"{case}, {_PASSES[pass_]}: {dtype}, {heads} heads × {head_dim}, {tokens:,} tokens a batch"


def _speed(record: dict | None) -> str:
    if record is None:
        return ""
    if not record["ok"]:
        return "–"
    tflops = f"{record['tflops']:.0f}" if record["tflops"] >= 10 else f"{record['tflops']:.2g}"
    return f"{tflops} ({record['ratio_to_baseline']:.2f})"


def _memory(record: dict | None) -> str:
    return "" if record is None or record["peak_mib"] is None else f"{record['peak_mib']:,.0f}"


def tables(records: Sequence[dict]) -> list[Table]:
    """TFLOP/s (ratio to the baseline) and peak MiB by length, one pair of tables a case and pass."""
    made = []
    for workload, systems in compared(records).items():
        lengths = sorted({n for by_length in systems.values() for n in by_length})
        names = _ordered(systems)
        baseline = next(iter(next(iter(systems.values())).values()))["baseline"]
        fastest = set()
        for column, n in enumerate(lengths, start=1):
            timed = [(systems[s][n]["ms"], row) for row, s in enumerate(names) if systems[s].get(n, {}).get("ok")]
            if timed:
                fastest.add((min(timed)[1], column))
        header = ["system", *(f"{n:,}" for n in lengths)]
        for what, show, marks in (
            (f"TFLOP/s (ratio to {baseline} without a term)", _speed, frozenset(fastest)),
            ("peak MiB above the inputs", _memory, frozenset()),
        ):
            rows = [[name, *(show(systems[name].get(n)) for n in lengths)] for name in names]
            made.append(Table(f"{_title(workload)} · {what}", header, rows, marks))
    return made


def lost(records: Sequence[dict]) -> Table:
    """Cells where no system of ours is the fastest; the ceilings (case ``none``) are no competition."""
    rows = []
    for workload, systems in compared(records).items():
        if workload[0] == "none" or not any(ours(s) for s in systems):
            continue
        for n in sorted({n for by_length in systems.values() for n in by_length}):
            timed = {s: r[n]["ms"] for s, r in systems.items() if r.get(n, {}).get("ok")}
            mine = {s: ms for s, ms in timed.items() if ours(s)}
            others = {s: ms for s, ms in timed.items() if not ours(s)}
            if not mine:
                why = next((r[n]["error"] for s, r in systems.items() if ours(s) and n in r), "not measured")
                rows.append([*map(str, workload[:2]), f"{n:,}", "no result", str(why), ""])
            elif others and min(others.values()) < min(mine.values()):
                best = min(others, key=others.get)
                factor = min(mine.values()) / others[best]
                rows.append(
                    [*map(str, workload[:2]), f"{n:,}", f"{min(mine.values()):.3f}", f"{best} {others[best]:.3f}",
                     f"{factor:.2f}×"]
                )  # fmt: skip
    return Table("Cells not won", ["case", "pass", "length", "ours, ms", "fastest, ms", "slower by"], rows)


def failures(records: Sequence[dict]) -> Table:
    """Cells without a result, and why."""
    rows = [
        [r["case"], r["pass"], f"{r['n']:,}", r["system"], (r["error"] or "")[:110]]
        for r in _cells(records)
        if not r["ok"]
    ]
    return Table("Cells without a result", ["case", "pass", "length", "system", "why"], rows)


def environments(records: Sequence[dict]) -> Table:
    """One line a run."""
    rows = []
    for r in records:
        if r.get("record") == "environment":
            versions = ", ".join(f"{k} {v}" for k, v in r["versions"].items() if v)
            rows.append([r["run"], r["date"], r["gpu"], r["cuda"] or "", versions])
    return Table("Runs", ["run", "date", "device", "CUDA", "versions"], rows)


def render(records: Sequence[dict], *, rich: bool | None = None, write=None) -> None:
    """Print every table; with rich where it is installed and the output is a terminal, else as plain text.

    Args:
        records: from :func:`tilewise.bench.records.load`.
        rich: force one or the other.
        write: for plain text, gets each line; default print.
    """
    shown = [environments(records), *tables(records), lost(records), failures(records)]
    shown = [table for table in shown if table.rows]
    if rich is None:
        rich = write is None and sys.stdout.isatty() and importlib.util.find_spec("rich") is not None
    if rich:
        _render_rich(shown)
        return
    write = write or print
    for table in shown:
        widths = [max(len(row[i]) for row in [table.header, *table.rows]) for i in range(len(table.header))]
        write(table.title)
        write("  ".join(name.ljust(w) for name, w in zip(table.header, widths, strict=True)).rstrip())
        for r, row in enumerate(table.rows):
            marked = [text + "*" * ((r, c) in table.emphasis) for c, text in enumerate(row)]
            write("  ".join(text.ljust(w) for text, w in zip(marked, widths, strict=True)).rstrip())
        write("")


def _render_rich(shown: list[Table]) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    for table in shown:
        out = RichTable(title=table.title, title_justify="left")
        for i, name in enumerate(table.header):
            out.add_column(name, justify="left" if i == 0 or not table.emphasis else "right")
        for r, row in enumerate(table.rows):
            out.add_row(*(Text(t, style="bold green" if (r, c) in table.emphasis else "") for c, t in enumerate(row)))
        console.print(out)
