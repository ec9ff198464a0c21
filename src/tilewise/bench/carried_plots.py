"""PNG plots of the carried set: bars of milliseconds and peak memory of every system, a column a case and length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from .report import compared, ours

__all__ = ["plot_carried"]

_PICTURES = {"step": "A training step, forward and backward", "block": "Attention of a block, forward and backward"}
_CASES = {"graph": ", one CUDA graph", "window": ", window {window:,}"}
CUT = 2.0
"""Bars longer than so many times the baseline's would leave no room for the others: they end at the edge."""


class Panel(NamedTuple):
    """A case at one length: its title and its records by system, slowest first."""

    title: str
    records: dict[str, dict]


def plot_carried(records: Sequence[dict], folder: Path, device: str) -> list[Path]:
    """Write ``carried-step.png`` and ``carried-block.png``, as far as there are cells of them.

    Upper row: the median of the samples as a bar, each sample as a dot, the baseline's median within the same rounds of
    all systems as a dashed line. Lower row: peak memory; cells without one are left out. Bars beyond :data:`CUT`
    times the baseline are cut and say so. To be called within the plots' style.
    """
    import matplotlib.pyplot as plt

    written = []
    for kind, title in _PICTURES.items():
        panels = _panels(records, kind)
        if not panels:
            continue
        systems = max((p.records for p in panels), key=len)
        size = (3.9 * len(panels) + 1.0, 2.0 * (0.36 * len(systems) + 1.1))
        figure, axes = plt.subplots(2, len(panels), figsize=size, squeeze=False)
        for column, panel in enumerate(panels):
            _times(axes[0][column], panel)
            _memory(axes[1][column], panel)
        dtype = next(iter(panels[0].records.values()))["dtype"]
        note = "bars: medians; dots: samples; dashed: the baseline in the same rounds; →: cut"
        figure.suptitle(f"{title} · {device}, {dtype} · {note}")
        figure.tight_layout()
        path = folder / f"carried-{kind}.png"
        figure.savefig(path)
        plt.close(figure)
        written.append(path)
    return written


def _panels(records: Sequence[dict], kind: str) -> list[Panel]:
    cells = [r for r in records if r.get("record") == "cell" and r["set"] == "carried" and r["ok"] and r["peak_mib"]]
    cells = [r for r in cells if r["case"].split("-")[0] == kind]
    found = []
    for task, systems in compared(cells).items():
        what = _CASES.get(task.case.partition("-")[2], "").format(**dict(task.fixed))
        for tokens in {n for by_size in systems.values() for n in by_size}:
            present = {s: by_size[tokens] for s, by_size in systems.items() if tokens in by_size}
            rows = dict(sorted(present.items(), key=lambda item: -item[1]["ms"]))
            found.append(((tokens, task.case), Panel(f"{tokens:,} tokens{what}", rows)))
    return [panel for _, panel in sorted(found, key=lambda x: x[0])]


def _colour(system: str, record: dict) -> str:
    return "C0" if ours(system) else "0.65" if record["ceiling"] else "C1"


def _samples(record: dict) -> list[float]:
    return [x for round_ in (record["samples"] or {}).get("system", []) for x in round_]


def _bars(axis, panel: Panel, values: dict[str, float], ends: dict[str, float], limit: float, text: str) -> None:
    """A bar a system; `ends` is where the room for its number begins. A bar that ends beyond `limit` is cut."""
    for y, (system, value) in enumerate(values.items()):
        beyond = value > limit
        axis.barh(y, min(value, limit), color=_colour(system, panel.records[system]), height=0.66)
        axis.annotate(
            text.format(value) + " →" * beyond, (limit if beyond else ends[system], y), xytext=(-4 if beyond else 5, 0),
            textcoords="offset points", ha="right" if beyond else "left", va="center", fontsize=8,
            color="white" if beyond else "0.2", bbox=None if beyond else {"fc": "white", "ec": "none", "pad": 0.6},
        )  # fmt: skip
    axis.set_yticks(range(len(values)), list(values))
    axis.set_ylim(-0.6, len(panel.records) - 0.4)
    axis.set_xlim(0, limit)
    axis.grid(False, axis="y")
    axis.set_axisbelow(True)


def _times(axis, panel: Panel) -> None:
    ms = {s: r["ms"] for s, r in panel.records.items()}
    ends = {s: max(r["ms"], *_samples(r)) for s, r in panel.records.items()}
    baseline = median(r["baseline_ms"] for r in panel.records.values())
    shown = [ends[s] for s, value in ms.items() if value <= CUT * baseline]
    limit = 1.22 * max(shown, default=max(ends.values()))
    axis.axvline(baseline, color="0.3", ls="--", lw=1.0)
    _bars(axis, panel, ms, ends, limit, "{:,.0f}" if limit > 50 else "{:,.2f}")
    for y, (system, record) in enumerate(panel.records.items()):
        if ms[system] <= limit:
            samples = _samples(record)
            axis.plot(samples, [y] * len(samples), ls="", marker="o", ms=2.6, color="0.15", alpha=0.6, zorder=4)
    axis.set_title(panel.title)
    axis.set_xlabel("ms")


def _memory(axis, panel: Panel) -> None:
    gib = {s: r["peak_mib"] / 1024 for s, r in panel.records.items()}
    _bars(axis, panel, gib, gib, 1.22 * max(gib.values()), "{:,.1f}")
    axis.set_xlabel("peak GiB above the inputs")
