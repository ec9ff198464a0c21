"""The demo on a terminal: live progress, the table, and the words around it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..info import environment
from .experiment import TOLERANCE, Experiment, Row, check, run
from .model import PREFIX, load_tokenizer
from .plot import plot

__all__ = ["SAMPLE", "demo", "tokens_of"]

SAMPLE = Path(__file__).with_name("opticks-book-3.txt")
"""The text that comes with the package."""

_SHORTEST = 64


def tokens_of(path: Path, lengths: tuple[int, ...]) -> tuple[list[int], tuple[int, ...]]:
    """The file's tokens, with the model's prefix in front, and the lengths that they suffice for.

    Where the text is shorter than the longest length, its own length takes the place of those beyond.

    Raises:
        ValueError: the file cannot be read, is not UTF-8 text, or has fewer than 64 tokens.
    """
    found = f"the text is {str(path)!r}"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{found}, which cannot be read ({error.strerror}); expected a text file") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{found}, which is not UTF-8 text ({error.reason} at byte {error.start}); expected a text file"
        ) from None
    ids = load_tokenizer().encode(PREFIX + text).ids
    if len(ids) < _SHORTEST:
        raise ValueError(f"{found}, which has {len(ids)} tokens; expected at least {_SHORTEST}")
    within = tuple(n for n in lengths if n <= len(ids))
    return ids, within if len(within) == len(lengths) else (*within, len(ids))


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Where nobody reads on, print nothing more: the files and the exit status are still wanted."""
        with suppress(SystemExit):
            super().on_broken_pipe()


def _say(console: Console, *parts: str | tuple[str, str], style: str = "", wrap: bool = True) -> None:
    """Print text, or pairs of text and style, as it is: nothing in it is taken for markup or for the name of an emoji.

    Without `wrap` a long line is left to the terminal, so that a path can be copied whole.
    """
    console.print(Text.assemble(*parts, style=style), soft_wrap=not wrap)


def demo(
    file: Path,
    lengths: tuple[int, ...],
    *,
    new_tokens: int,
    impl: str,
    budget: float,
    picture: Path | None,
    figures: Path | None = None,
) -> Experiment:
    """Run the comparison, write the files `figures` (JSON) and `picture`, and show what came out.

    Raises:
        OSError: a file could not be written; everything was shown all the same.
        ValueError: as :func:`tokens_of` and :func:`tilewise.demo.experiment.check`.
        RuntimeError: a worker could not load the model.
    """
    check(impl, budget)
    console = _Console()
    ids, lengths = tokens_of(file, lengths)
    machine = environment()
    cpu = machine["devices"][0]
    _say(
        console,
        "A trained T5 (8 + 8 layers, 6 heads, 77 M parameters, fp32) reads the first tokens of ",
        (file.name, "bold"),
        f" ({len(ids):,} tokens) and writes a title: as transformers {machine['versions']['transformers']} runs it, "
        "and after ",
        ("tilewise.patch(model)", "bold"),
        f" (tilewise {__version__}).\n{cpu['name']}, {cpu['threads']} threads, torch {machine['versions']['torch']}.",
    )
    if console.is_terminal:
        spinner = Spinner("dots")
        with Live(console=console, refresh_per_second=8) as live:

            def progress(experiment: Experiment, doing: str) -> None:
                spinner.update(text=doing)
                live.update(Group(_table(experiment), spinner) if doing else _table(experiment))

            experiment = run(ids, lengths, new_tokens=new_tokens, impl=impl, budget=budget, progress=progress)
    else:

        def progress(experiment: Experiment, doing: str) -> None:
            if doing:
                _say(console, f"… {doing}")

        experiment = run(ids, lengths, new_tokens=new_tokens, impl=impl, budget=budget, progress=progress)
    experiment.environment = {"document": file.name, "document_tokens": len(ids), **machine, **experiment.environment}
    # Before anything of it is printed: minutes of measuring must not hang on a terminal.
    written, failures = _write(experiment, figures, picture)
    if not console.is_terminal:
        console.print(_table(experiment))
    _conclude(console, experiment)
    for line in written:
        _say(console, line, wrap=False)
    if failures:
        raise OSError("; ".join(failures))
    return experiment


def _write(experiment: Experiment, figures: Path | None, picture: Path | None) -> tuple[list[str], list[str]]:
    """Write both files. What was written and what was not, in words."""
    written, failures = [], []
    for what, path, write in (
        ("Figures", figures, lambda path: path.write_text(json.dumps(experiment.as_dict(), indent=1) + "\n")),
        ("Picture", picture, lambda path: plot(experiment, path)),
    ):
        if path is None:
            continue
        try:
            write(path)
        except OSError as error:
            failures.append(f"{what}: {str(path)!r} could not be written ({error.strerror or error})")
        else:
            written.append(f"{what}: {path}")
    return written, failures


def _table(experiment: Experiment) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    columns = ("tokens", "system", "seconds", "peak MiB", "faster", "smaller", "encoder\ndiffers by", "same\ntokens")
    for name in columns:
        table.add_column(name, justify="left" if name == "system" else "right", no_wrap=True)
    for n in sorted({row.n for row in experiment.rows}):
        theirs, ours = experiment.row(n, "transformers"), experiment.row(n, "tilewise")
        if theirs is not None:
            table.add_row(f"{n:,}", theirs.system, *_measured(theirs))
        if ours is None:
            continue
        number = f"{n:,}" if theirs is None else ""
        if theirs is None or ours.max_abs_diff is None:
            table.add_row(number, f"[b]{ours.system}[/b]", *_measured(ours))
        else:
            table.add_row(
                number,
                f"[b]{ours.system}[/b]",
                *_measured(ours),
                f"{theirs.seconds / ours.seconds:.1f} ×",
                # Below a mebibyte both are noise of the allocator.
                f"{theirs.peak_mib / max(ours.peak_mib, 1):.0f} ×",
                f"{ours.max_abs_diff:.1e}",
                "yes" if ours.tokens_equal else "[red]NO[/red]",
            )
    return table


def _measured(row: Row) -> tuple[str, str]:
    if row.seconds is None:
        return "not run" if row.note.startswith("not run") else "failed", ""
    return f"{row.seconds:.2f}", f"{row.peak_mib:,.0f}"


def _conclude(console: Console, experiment: Experiment) -> None:
    tokenizer = load_tokenizer()
    for row in experiment.rows:
        if row.note:
            _say(console, f"{row.system} at {row.n:,} tokens: {row.note}")
    for row in experiment.rows:
        if row.system == "tilewise" and row.seconds is not None:
            # The model may end a title before its first word.
            title = tokenizer.decode(row.tokens).strip()
            _say(console, f"Title at {row.n:,} tokens: " + (f"“{title}”" if title else "(empty)"))
    workers = experiment.environment["workers"]
    _say(
        console,
        f"Time: encoding and generating greedily. Memory: {workers['tilewise']['memory_method']}. transformers ran its "
        f"attention implementation “{workers['transformers']['attention']}”.",
        style="dim",
    )
    if experiment.exact is None:
        console.print(
            "[b yellow]Nothing was compared[/b yellow]: at no length did both systems run. See the notes above.",
            highlight=False,
        )
    elif experiment.exact:
        console.print(
            f"[b green]Exact[/b green]: the encoder's output within {TOLERANCE:g} of transformers', the same tokens, "
            "wherever both ran.",
            highlight=False,
        )
    else:
        console.print("[b red]Not exact[/b red]: see the table and the notes above.", highlight=False)
