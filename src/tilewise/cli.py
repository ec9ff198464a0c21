"""The command ``tilewise``: demo, info, bench."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

__all__ = ["main"]

_DEMO_NEEDS = ("transformers", "tokenizers", "onnx", "matplotlib", "psutil", "traceforge_title_model")
_BAD_OPTION = 2
"""Exit status of Click's own refusals too."""


def main() -> None:
    """Entry point of the console script."""
    _require("The command line", ("typer", "rich"), "cli")
    _app()()


def _require(what: str, modules: tuple[str, ...], extra: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"{what} needs {', '.join(missing)}, not installed here. Install with: pip install 'tilewise[{extra}]'"
        )


def _refuse(message: str) -> NoReturn:
    """One line on standard error, and the exit status of a command line that cannot be run."""
    print(f"tilewise: {message}", file=sys.stderr)
    sys.exit(_BAD_OPTION)


def _app():
    import typer

    from .bench.cli import app as bench

    app = typer.Typer(help="Exact fused attention with relative positions.", no_args_is_help=True, add_completion=False)
    app.add_typer(bench, name="bench")

    def lengths_of(text: str) -> tuple[int, ...]:
        parts = [part.strip().replace("_", "") for part in text.split(",")]
        if not all(part.isdecimal() and int(part) >= 64 for part in parts):
            raise typer.BadParameter(f"{text!r}; expected numbers of tokens from 64 on, such as 512,1024,2048")
        return tuple(sorted({int(part) for part in parts}))

    def writable(path: Path | None) -> Path | None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

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
        impl: Annotated[str, typer.Option(help="Implementation: auto, triton, blocked or reference.")] = "auto",
        budget: Annotated[
            float, typer.Option(help="Seconds; transformers is not started where it would exceed them.")
        ] = 170,
        picture: Annotated[Path, typer.Option("--plot", help="PNG of time and memory.")] = Path("tilewise-demo.png"),
        json_path: Annotated[Path | None, typer.Option("--json", help="Write every figure to this file.")] = None,
    ) -> None:
        """A trained T5 on a long document, as transformers runs it and patched: outputs, time and memory compared.

        The exit status is 1 if the outputs differ.
        """
        _require("The demo", _DEMO_NEEDS, "demo")
        from .demo import show

        try:
            experiment = show.demo(
                file or show.SAMPLE,
                lengths_of(lengths),
                new_tokens=new_tokens,
                impl=impl,
                budget=budget,
                picture=writable(picture),
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        except RuntimeError as error:
            sys.exit(f"The demo could not run: {error}")
        if json_path is not None:
            writable(json_path).write_text(json.dumps(experiment.as_dict(), indent=1) + "\n")
            typer.echo(f"Figures: {json_path}")
        raise typer.Exit(0 if experiment.exact else 1)

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
        except ValueError as error:
            _refuse(f"--device: {error}")
        if as_json:
            typer.echo(json.dumps(everything, indent=1))
        else:
            _show(everything)

    return app


def _show(everything: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in everything["versions"].items())
    console.print(f"{versions}\nPython {everything['python']}, {everything['platform']}")
    for device in everything["devices"]:
        rest = ", ".join(f"{key} {value}" for key, value in device.items() if key not in ("device", "name"))
        console.print(f"{device['device']}: {device['name']} ({rest})")
    table = Table("implementation", "mechanism", "usable", "why not", title=f"On {everything['support'][0]['device']}")
    for line in everything["support"]:
        usable = "[green]yes[/green]" if line["usable"] else "[yellow]no[/yellow]"
        table.add_row(line["implementation"], line["mechanism"], usable, "; ".join(line["reasons"]))
    console.print(table)
