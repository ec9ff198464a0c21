"""The command ``tilewise``: demo, info, bench."""

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, NoReturn

__all__ = ["main"]

_DEMO_NEEDS = ("transformers", "tokenizers", "onnx", "matplotlib", "psutil", "traceforge_title_model")
_DIFFERENT, _BAD_OPTION, _NOT_COMPARED = 1, 2, 3
"""Exit statuses; Click's own refusals have 2 too."""


def main() -> None:
    """Entry point of the console script."""
    _require("The command line", ("typer", "rich"), "cli")
    # A file's name need not be text, and a terminal need not have every character: no reason to lose a run.
    sys.stdout.reconfigure(errors="backslashreplace")
    _app()()


def _require(what: str, modules: tuple[str, ...], extra: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        _refuse(f"{what} needs {', '.join(missing)}, not installed here. Install with: pip install 'tilewise[{extra}]'")


def _refuse(message: str) -> NoReturn:
    """One line on standard error, and the exit status of a command line that cannot be run."""
    print(f"tilewise: {message}", file=sys.stderr)
    sys.exit(_BAD_OPTION)


def _check_output(option: str, path: Path, suffixes: tuple[str, ...], usual: str) -> None:
    """Make the path's folder, and refuse a path that cannot be written; a file that is there keeps what it holds.

    Without `suffixes` any will do; `usual` is the name that a refusal proposes.
    """
    found, expected = f"{option} is {str(path)!r}", "expected a file that can be written"
    try:
        if path.is_dir():
            _refuse(f"{found}, a folder; {expected}, such as {str(path / usual)!r}")
        if suffixes and path.suffix.lower() not in suffixes:
            proposed = str(path.with_suffix(suffixes[0]))
            _refuse(f"{found}; expected a name that ends in one of {', '.join(suffixes)}, such as {proposed!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            # A pipe that is opened and closed would end what its reader reads.
            if not os.access(path, os.W_OK):
                _refuse(f"{found}; {expected} (Permission denied)")
            return
        new = not path.exists()
        with open(path, "ab"):
            pass
        if new:
            # The path may be a link to a file that is not there yet: the link stays.
            path.resolve().unlink()
    except OSError as error:
        # mkdir says so of a file that is used as a folder.
        why = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
        _refuse(f"{found}; {expected} ({why}: {error.filename!r})")


def _app():
    import typer

    from .bench.cli import app as bench

    app = typer.Typer(
        help="Exact fused attention with relative positions, attention over depth, attention with carried logits.",
        no_args_is_help=True, add_completion=False, invoke_without_command=True,
    )  # fmt: skip
    app.add_typer(bench, name="bench")

    @app.callback()
    def everywhere(
        version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
    ) -> None:
        if version:
            from . import __version__

            typer.echo(f"tilewise {__version__}")
            raise typer.Exit

    def lengths_of(text: str) -> tuple[int, ...]:
        parts = [part.strip().replace("_", "") for part in text.split(",")]
        # Python refuses to read more than some thousand digits; no text has more tokens than twelve can say.
        if not all(re.fullmatch("[0-9]{1,12}", part) and int(part) >= 64 for part in parts):
            _refuse(f"--lengths is {text!r}; expected numbers of tokens from 64 on, such as 512,1024,2048")
        return tuple(sorted({int(part) for part in parts}))

    @app.command()
    def demo(
        file: Annotated[
            Path | None,
            typer.Argument(
                exists=True, dir_okay=False, readable=True, help="A text; default: a book that is included."
            ),
        ] = None,
        lengths: Annotated[str, typer.Option(help="Tokens of the text to read.")] = "512,1024,2048,4096,8192,16384",
        new_tokens: Annotated[int, typer.Option(min=1, max=256, help="Tokens to generate at most.")] = 16,
        impl: Annotated[str, typer.Option(help="Implementation: auto, blocked or reference.")] = "auto",
        budget: Annotated[
            float,
            typer.Option(
                help="Seconds from when the models are loaded, more than 0; transformers is not started where it would "
                "exceed them, save at the shortest length."
            ),
        ] = 160,
        picture: Annotated[Path, typer.Option("--plot", help="Picture of time and memory: .png, .pdf, .svg …")] = Path(
            "tilewise-demo.png"
        ),
        json_path: Annotated[Path | None, typer.Option("--json", help="Write every figure to this file.")] = None,
    ) -> None:
        """A trained T5 on a long document, as transformers runs it and patched: outputs, time and memory compared.

        The exit status is 1 if the outputs differ or the patched model failed at a length,
        2 if an option is refused or a file cannot be read or written, 3 if nothing could be compared.
        """
        _require("The demo", _DEMO_NEEDS, "demo")
        from .demo import plot, show
        from .demo.experiment import check

        asked = lengths_of(lengths)
        try:
            check(impl, budget)
        except ValueError as error:
            _refuse(f"--{error}")
        _check_output("--plot", picture, plot.SUFFIXES, "demo.png")
        if json_path is not None:
            _check_output("--json", json_path, (), "demo.json")
        try:
            experiment = show.demo(
                file or show.SAMPLE,
                asked,
                new_tokens=new_tokens,
                impl=impl,
                budget=budget,
                picture=picture,
                figures=json_path,
            )
        except (ValueError, OSError) as error:
            _refuse(str(error))
        except RuntimeError as error:
            print(f"tilewise: the demo could not run: {error}", file=sys.stderr)
            raise typer.Exit(_NOT_COMPARED) from None
        raise typer.Exit({True: 0, False: _DIFFERENT, None: _NOT_COMPARED}[experiment.exact])

    @app.command()
    def info(
        as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
        device: Annotated[
            str | None, typer.Option(help="cpu, cuda, cuda:1 …; default: the GPU if there is one.")
        ] = None,
    ) -> None:
        """Versions, devices, and which implementation can run which mechanism here, or why not."""
        from . import info as facts

        try:
            everything = {**facts.environment(), "support": facts.support(device)}
        except (ValueError, RuntimeError) as error:
            # A GPU that is there may still fail, out of memory for one; torch then says more than a line.
            _refuse(f"--device: {str(error).splitlines()[0]}")
        if as_json:
            typer.echo(json.dumps(everything, indent=1))
        else:
            _show(everything)

    return app


def _show(everything: dict) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def say(line: str) -> None:
        # A name or a path may look like markup: printed as it is.
        console.print(Text(line), soft_wrap=True)

    console = Console()
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in everything["versions"].items())
    say(f"{versions}\nPython {everything['python']}, {everything['platform']}")
    for device in everything["devices"]:
        rest = ", ".join(f"{key} {value}" for key, value in device.items() if key not in ("device", "name"))
        say(f"{device['device']}: {device['name']} ({rest})")
    say(f"Tile shapes: {everything['tiles'] or 'built in'}")
    table = Table("implementation", "mechanism", "usable", "why not", title=f"On {everything['support'][0]['device']}")
    for line in everything["support"]:
        usable = Text("yes", "green") if line["usable"] else Text("no", "yellow")
        table.add_row(line["implementation"], line["mechanism"], usable, Text("; ".join(line["reasons"])))
    console.print(table)
