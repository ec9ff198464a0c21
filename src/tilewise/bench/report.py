"""Tables from records: speed, ratio to the baseline and memory by length, and the cells that are lost to another."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .cells import PASSES
from .records import size

__all__ = ["Table", "Task", "carry_costs", "compared", "lost", "ours", "render", "tables"]


class Task(NamedTuple):
    """What the systems of one table do; `fixed` are the size fields but the one that the table runs over."""

    case: str
    pass_: str
    dtype: str
    over: str
    fixed: tuple[tuple[str, int], ...]

    @property
    def title(self) -> str:
        return f"{self.case}, {PASSES[self.pass_]}: {self.dtype}, {self.sizes}"

    @property
    def sizes(self) -> str:
        """The fixed sizes in words."""
        found = dict(self.fixed)
        if set(found) == {"heads", "head_dim", "tokens"}:
            return f"{found['heads']} heads × {found['head_dim']}, {found['tokens']:,} tokens a batch"
        return ", ".join(f"{name} {value:,}" for name, value in found.items())


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


def compared(records: Sequence[dict]) -> dict[Task, dict[str, dict[int, dict]]]:
    """Task ↦ system ↦ value of the size field that the table runs over ↦ record."""
    groups: dict[Task, dict[str, dict[int, dict]]] = {}
    for r in _cells(records):
        (over, value), *fixed = size(r).items()
        task = Task(r["case"], r["pass"], r["dtype"], over, tuple(fixed))
        groups.setdefault(task, {}).setdefault(r["system"], {})[value] = r
    return groups


def _ceiling(record: dict) -> bool:
    """Whether the system does less than the case asks for; before records said so, that was the case ``none``."""
    return record.get("ceiling", record["case"] == "none")


def _time(record: dict) -> float:
    """Milliseconds, the harness's own share taken off where it was measured."""
    return record.get("net_ms", record["ms"])


def _speed(record: dict | None) -> str:
    if record is None:
        return ""
    if not record["ok"]:
        return "–"
    shown = f"{_time(record):.3f}"
    if record["tflops"] is not None:
        shown = f"{record['tflops']:.0f}" if record["tflops"] >= 10 else f"{record['tflops']:.2g}"
    return shown if record["ratio_to_baseline"] is None else f"{shown} ({record['ratio_to_baseline']:.2f})"


def _memory(record: dict | None) -> str:
    return "" if record is None or record["peak_mib"] is None else f"{record['peak_mib']:,.0f}"


def tables(records: Sequence[dict]) -> list[Table]:
    """Speed (ratio to the baseline) and peak MiB by size, one pair of tables a case and pass."""
    made = []
    for task, systems in compared(records).items():
        columns = sorted({n for by_size in systems.values() for n in by_size})
        names = _ordered(systems)
        every = [r for by_size in systems.values() for r in by_size.values()]
        fastest = set()
        for column, n in enumerate(columns, start=1):
            found = [(row, systems[s].get(n)) for row, s in enumerate(names)]
            timed = [(_time(r), row) for row, r in found if r and r["ok"] and (not _ceiling(r) or task.case == "none")]
            if timed:
                fastest.add((min(timed)[1], column))
        measure = "TFLOP/s" if any(r["tflops"] is not None for r in every) else "ms"
        net = ", without the update" if any("net_ms" in r for r in every) else ""
        plain = " without a term" if "n" == task.over else ""
        header = ["system", *(f"{n:,}" for n in columns)]
        for what, show, marks in (
            (f"{measure}{net} (ratio to {every[0]['baseline']}{plain})", _speed, frozenset(fastest)),
            ("peak MiB above the inputs", _memory, frozenset()),
        ):
            rows = [[name, *(show(systems[name].get(n)) for n in columns)] for name in names]
            made.append(Table(f"{task.title} · {what}", header, rows, marks))
    return made


def _range(record: dict) -> str:
    """The lowest and the highest sample."""
    samples = [x for round_ in (record["samples"] or {}).get("system", []) for x in round_]
    return f"{min(samples):.4g}–{max(samples):.4g}" if samples else ""


def carry_costs(records: Sequence[dict]) -> Table:
    """What carrying the scores costs: each of our systems with a carry over the same kernels without one (by the
    medians), and over the baseline (by the ratios within rounds), the fastest first. Differences smaller than those of
    the samples say nothing: one plan under two names shows how small."""
    rows, fastest = [], set()
    for task, systems in compared(records).items():
        for n in sorted(systems.get("no-carry", {})):
            plain = systems["no-carry"][n]
            mine = {s: x[n] for s, x in systems.items() if ours(s) and n in x and x[n]["ok"]}
            if not mine or not plain["ok"]:
                continue
            fastest.add((len(rows), 3))
            for name, r in [*sorted(mine.items(), key=lambda item: item[1]["ms"]), ("no-carry", plain)]:
                over = "" if r is plain else f"{r['ms'] / plain['ms'] - 1:+.1%}"
                base = f"{1 / r['ratio_to_baseline'] - 1:+.1%}"
                rows.append([task.case, f"{n:,}", name, f"{r['ms']:.4g}", _range(r), over, base])
    header = ["case", "size", "system", "ms", "samples", "over no-carry", "over the baseline"]
    return Table("Cost of the carry", header, rows, frozenset(fastest))


def lost(records: Sequence[dict]) -> Table:
    """Cells where no system of ours is the fastest; ceilings are no competition."""
    rows = []
    for task, everyone in compared(records).items():
        systems = {s: {n: r for n, r in found.items() if not _ceiling(r)} for s, found in everyone.items()}
        if not any(ours(s) and found for s, found in systems.items()):
            continue
        for n in sorted({n for by_size in systems.values() for n in by_size}):
            timed = {s: _time(r[n]) for s, r in systems.items() if r.get(n, {}).get("ok")}
            mine = {s: ms for s, ms in timed.items() if ours(s)}
            others = {s: ms for s, ms in timed.items() if not ours(s)}
            where = [task.case, task.pass_, f"{n:,}"]
            if not mine:
                why = next((r[n]["error"] for s, r in systems.items() if ours(s) and n in r), "not measured")
                rows.append([*where, "no result", str(why), ""])
            elif others and min(others.values()) < min(mine.values()):
                best = min(others, key=others.get)
                factor = min(mine.values()) / others[best]
                rows.append([*where, f"{min(mine.values()):.3f}", f"{best} {others[best]:.3f}", f"{factor:.2f}×"])
    return Table("Cells not won", ["case", "pass", "size", "ours, ms", "fastest, ms", "slower by"], rows)


def failures(records: Sequence[dict]) -> Table:
    """Cells without a result, and why."""
    rows = [
        [r["case"], r["pass"], f"{next(iter(size(r).values())):,}", r["system"], (r["error"] or "")[:110]]
        for r in _cells(records)
        if not r["ok"]
    ]
    return Table("Cells without a result", ["case", "pass", "size", "system", "why"], rows)


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
    shown = [environments(records), *tables(records), carry_costs(records), lost(records), failures(records)]
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
        out = RichTable(title=Text(table.title), title_justify="left")
        for i, name in enumerate(table.header):
            out.add_column(Text(name), justify="left" if i == 0 or not table.emphasis else "right")
        for r, row in enumerate(table.rows):
            out.add_row(*(Text(t, style="bold green" if (r, c) in table.emphasis else "") for c, t in enumerate(row)))
        console.print(out)
