"""Time and memory over length, as a picture."""

from __future__ import annotations

from pathlib import Path

from .experiment import TOLERANCE, Experiment, dense_bytes
from .worker import SYSTEMS

__all__ = ["SUFFIXES", "plot"]

SUFFIXES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp", ".tif", ".tiff")
"""Of a picture's file: what matplotlib writes without further programs."""

_COLOURS = {"transformers": "#b5562b", "tilewise": "#1f6f78"}
_VERDICTS = {
    True: f"same tokens, encoder within {TOLERANCE:g}",
    False: "NOT the same outputs",
    None: "nothing was compared",
}


def plot(experiment: Experiment, path: Path) -> None:
    """Draw both systems' seconds and peak memory over the tokens of the document into the file at `path`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    lengths = sorted({row.n for row in experiment.rows})
    for system in SYSTEMS:
        rows = [row for row in experiment.rows if row.system == system and row.seconds is not None]
        style = {"color": _COLOURS[system], "marker": "o", "linewidth": 2, "label": system}
        left.plot([row.n for row in rows], [row.seconds for row in rows], **style)
        right.plot([row.n for row in rows], [row.peak_mib for row in rows], **style)
    missing = [row for row in experiment.rows if row.system == "transformers" and row.seconds is None]
    if missing:
        needs = [dense_bytes(row.n) / 2**20 for row in missing]
        label = "transformers would need"
        right.plot([row.n for row in missing], needs, "x", color=_COLOURS["transformers"], label=label)
    for axes, title in ((left, "Time, seconds (encode and generate)"), (right, "Peak memory, MiB above the model")):
        axes.set(xscale="log", xlabel="tokens of the document")
        axes.set_title(title, fontsize=11)
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths], minor=False)
        positive = [value for line in axes.lines for value in line.get_ydata() if value > 0]
        if positive and max(positive) >= 10 * min(positive):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        else:
            # A logarithmic axis has one labelled tick or none within less than a factor of 10.
            axes.set_ylim(0, 1.1 * max(positive, default=1))
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value == round(value) else f"{value:g}")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.suptitle(f"A trained T5 on one long document, fp32 on a CPU: {_VERDICTS[experiment.exact]}", fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
