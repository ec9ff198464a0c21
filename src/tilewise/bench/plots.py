"""PNG plots from records: TFLOP/s and peak memory over the length, one picture a case and device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .carried_plots import plot_carried
from .report import Task, compared, ours

__all__ = ["plot"]

_STYLE = Path(__file__).with_name("style.mplstyle")
_MARKERS = "osD^vP*X<>"
_TITLES = {
    "none": "No term",
    "t5": "T5 (32 buckets, distance 128)",
    "shaw": "Shaw (clipped at ±64)",
    "deberta_v3": "DeBERTa-v3 (256 buckets, distance 512, c2p + p2c)",
    "transformer_xl": "Transformer-XL (a table per head)",
}


def plot(records: Sequence[dict], folder: str | Path) -> list[Path]:
    """Write ``<case>-<dtype>-<head_dim>.png`` files into `folder`; a system keeps its colour in all of them.

    Upper row: TFLOP/s of forward and backward, with the plain-attention baseline measured in the same rounds as a grey
    line unless it is drawn as a system; lower row: peak memory, on a logarithmic axis where it spans a factor of 10. A
    system without a valid result at a length has no speed there. Cells of the carried set become bars
    (:func:`tilewise.bench.carried_plots.plot_carried`); the depth set is not drawn.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    device = next((r["gpu"] for r in records if r.get("record") == "environment"), "")
    groups = compared([r for r in records if r.get("record") == "cell" and "n" in r])
    looks = _looks(list(groups.values()))
    pictures: dict[Task, dict[str, dict]] = {}
    for task, by_system in groups.items():
        pictures.setdefault(task._replace(pass_=""), {})[task.pass_] = by_system
    with plt.style.context(_STYLE):
        written = plot_carried(records, folder, device)
        for task, passes in pictures.items():
            figure, axes = plt.subplots(2, len(passes), figsize=(4.6 * len(passes), 6.0), squeeze=False)
            for column, (pass_, by_system) in enumerate(sorted(passes.items(), reverse=True)):
                _speed(axes[0][column], by_system, looks)
                _memory(axes[1][column], by_system, looks)
                axes[0][column].set_title({"fwd": "Forward", "bwd": "Backward"}[pass_])
            axes[0][0].set_ylabel("TFLOP/s")
            axes[1][0].set_ylabel("Peak memory above the inputs, MiB")
            for axis in axes[1]:
                axis.set_xlabel("Sequence length")
            handles = {}
            for axis in axes.flat:
                handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
            figure.suptitle(f"{_TITLES.get(task.case, task.case)} · {device}, {task.dtype}, {task.sizes}")
            figure.legend(handles.values(), handles.keys(), loc="center left", bbox_to_anchor=(1.0, 0.5))
            figure.tight_layout()
            path = folder / f"{task.case}-{task.dtype}-{dict(task.fixed)['head_dim']}.png"
            figure.savefig(path)
            plt.close(figure)
            written.append(path)
    return written


def _looks(groups: list[dict[str, dict]]) -> dict[str, tuple[str, str]]:
    """System ↦ (colour, marker), the same in every picture and different from all systems that share one with it."""
    looks: dict[str, int] = {}
    for system in sorted({s for group in groups for s in group}, key=lambda s: (not ours(s), s)):
        taken = {looks.get(other) for group in groups if system in group for other in group}
        looks[system] = next(i for i in range(len(looks) + 1) if i not in taken)
    return {system: (f"C{i % 8}", _MARKERS[i % len(_MARKERS)]) for system, i in looks.items()}


def _speed(axis, by_system: dict[str, dict[int, dict]], looks: dict) -> None:
    plain: dict[int, float] = {}
    name = "baseline"
    for system, by_length in _sorted(by_system):
        points = [(n, r["tflops"]) for n, r in sorted(by_length.items()) if r["ok"]]
        for n, r in by_length.items():
            if r["ok"]:
                plain.setdefault(n, r["tflops"] / r["ratio_to_baseline"])
                name = r["baseline"]
        _line(axis, points, system, looks)
    if plain and name not in by_system:
        look = {"color": "0.6", "ls": "--", "lw": 1.2, "marker": "_" if len(plain) == 1 else None}
        axis.plot(*zip(*sorted(plain.items()), strict=True), **look, label=f"{name}, no term")
    axis.set_ylim(bottom=0)
    _lengths(axis, by_system)


def _memory(axis, by_system: dict[str, dict[int, dict]], looks: dict) -> None:
    from matplotlib.ticker import LogLocator

    drawn = []
    for system, by_length in _sorted(by_system):
        points = [(n, r["peak_mib"]) for n, r in sorted(by_length.items()) if r["peak_mib"]]
        drawn += [mib for _, mib in points]
        _line(axis, points, system, looks)
    if drawn and max(drawn) >= 10 * min(drawn):
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        # A logarithmic axis has no labelled tick within less than a factor of 2.
        axis.set_ylim(0, 1.1 * max(drawn, default=1))
    axis.yaxis.set_major_formatter(lambda mib, _: f"{mib:,.0f}" if mib == round(mib) else f"{mib:g}")
    _lengths(axis, by_system)


def _sorted(by_system: dict[str, dict]) -> list[tuple[str, dict]]:
    return sorted(by_system.items(), key=lambda item: (not ours(item[0]), item[0]))


def _line(axis, points: list[tuple[int, float]], system: str, looks: dict) -> None:
    if points:
        colour, marker = looks[system]
        width, order = (2.6, 5) if ours(system) else (1.4, 3)
        axis.plot(*zip(*points, strict=True), color=colour, marker=marker, lw=width, zorder=order, label=system)


def _lengths(axis, by_system: dict[str, dict[int, dict]]) -> None:
    lengths = sorted({n for by_length in by_system.values() for n in by_length})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths])
    axis.minorticks_off()
