"""The commands ``tilewise bench …``, a Typer application of its own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(
    help="Time, check and compare: Tilewise, PyTorch's own ways and other projects' kernels.", no_args_is_help=True
)
UNFINISHED = 3
"""Exit status of a run that its time limit ended; the same command goes on from there."""


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str | None) -> list[int] | None:
    names = _names(text)
    if names is None:
        return None
    if not names or not all(name.isascii() and name.isdecimal() and len(name) <= 12 for name in names):
        raise typer.BadParameter(f"{text!r}; expected numbers such as 512,2048")
    return [int(name) for name in names]


def _sizes(given: list[str] | None, named: dict[str, list[int] | int | None]) -> dict[str, list[int]]:
    """Size field ↦ values, from ``NAME=N,…`` and from the options that are fields of the relative set."""
    sizes = {name: value if isinstance(value, list) else [value] for name, value in named.items() if value is not None}
    for text in given or ():
        name, _, numbers = text.partition("=")
        if not name.strip() or not numbers.strip():
            raise typer.BadParameter(f"--size {text!r}; expected a field and numbers, such as tokens=4096,8192")
        sizes[name.strip()] = _numbers(numbers)
    return sizes


def _merged(files: list[Path]) -> list[dict]:
    """The records of the files; later ones win."""
    from . import records

    loaded = []
    for file in files:
        try:
            loaded.append(records.load(file))
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"{str(file)!r} is no file of results ({error}); expected a JSON list") from None
    return records.merge(*loaded)


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cuda", "cpu"):
        raise typer.BadParameter(f"device {name!r}; expected auto, cuda or cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("device 'cuda'; this machine has no CUDA device that torch can use: take cpu")
    return name


def _dtype(name: str | None) -> str | None:
    if name not in (None, "float16", "bfloat16", "float32"):
        raise typer.BadParameter(f"dtype {name!r}; expected float16, bfloat16 or float32")
    return name


@app.command()
def run(
    set_name: Annotated[str, typer.Option("--set", help="Which benchmarks: relative, depth or carried.")] = "relative",
    cases: Annotated[str | None, typer.Option(help="Cases of the set, such as t5,shaw; default all.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Sequence lengths, such as 512,2048.")] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=N,…", help="Values of a size field in place of the set's own; repeatable."),
    ] = None,
    passes: Annotated[str | None, typer.Option(help="fwd, bwd or step, such as fwd,bwd; default all.")] = None,
    systems: Annotated[str | None, typer.Option(help="Systems, such as tilewise,flex; default all.")] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="float16 (default on a GPU), bfloat16 or float32.")] = None,
    heads: Annotated[int | None, typer.Option(min=1)] = None,
    head_dim: Annotated[int | None, typer.Option(min=8)] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Tokens of a batch: B = tokens / length.")] = None,
    vllm_source: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="vLLM's kimi_k3/nvidia/ops/attn_res.py, for system vllm."),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Results; default benchmarks/results/<gpu>/<set>.json.")
    ] = None,
    time_limit: Annotated[float | None, typer.Option(help="Seconds after which the run stops.")] = None,
    cell_limit: Annotated[float, typer.Option(help="Seconds that the measurement of one cell may take.")] = 60.0,
    compile_limit: Annotated[float, typer.Option(help="Seconds that the first run of one cell may take.")] = 120.0,
    patience: Annotated[
        float, typer.Option(help="Seconds that what is ready waits for what still compiles, which then comes last.")
    ] = 60.0,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds.")] = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds of samples, in place of the 5 (3 with --quick or on the CPU).")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure cells that the results have already.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run and how long it would take.")] = False,
) -> None:
    """Measure cells: check against an fp64 oracle, then time interleaved with plain attention, a process a system.

    Results are written after every cell, so a run that ends early goes on with the same command (exit status 3).
    The exit status is 1 if a Tilewise cell has no valid result.
    """
    from . import records, runner
    from .report import ours
    from .sets import VLLM_SOURCE
    from .timing import Plan

    where = _device(device)
    if vllm_source is not None:
        os.environ[VLLM_SOURCE] = str(vllm_source.resolve())
    try:
        cells = runner.select(
            set_name, where, cases=_names(cases), passes=_names(passes), systems=_names(systems), dtype=_dtype(dtype),
            sizes=_sizes(size, {"n": _numbers(lengths), "heads": heads, "head_dim": head_dim, "tokens": tokens}),
        )  # fmt: skip
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    plan = Plan(rounds=3, replays=5, round_ms=25.0) if quick or where == "cpu" else Plan()
    plan = plan if rounds is None else replace(plan, rounds=rounds)
    if dry_run:
        for cell in cells:
            typer.echo(f"{cell.case:<15}{cell.order[0]:>6} {','.join(cell.passes):<8} {cell.system}")
        typer.echo(f"{len(cells)} cells, about {runner.estimate(cells, plan):.0f} s")
        return
    path = json_path or Path("benchmarks/results") / records.gpu_name(where).lower() / f"{set_name}.json"
    limits = runner.Limits(measure=cell_limit, compile=compile_limit, patience=patience, total=time_limit)
    outcome = runner.run(cells, path, plan=plan, limits=limits, again=again, say=typer.echo)
    typer.echo(f"Results: {path}")
    if outcome.missing:
        typer.echo(f"{len(outcome.missing)} results are missing; the same command goes on from here")
        raise typer.Exit(UNFINISHED)
    if any(not r["ok"] and ours(r["system"]) for r in outcome.records):
        raise typer.Exit(1)


@app.command()
def merge(
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="Results; later files win.")],
) -> None:
    """Join result files into one."""
    from . import records

    merged = _merged(files)
    records.save(out, merged)
    typer.echo(f"{out}: {len(merged)} records")


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="Results; later files win.")],
    plots: Annotated[Path | None, typer.Option(help="Folder for PNG plots; default: that of the first file.")] = None,
    no_plots: Annotated[bool, typer.Option("--no-plots", help="Tables only.")] = False,
) -> None:
    """Tables of speed, ratio and memory, the cells not won, the cells without a result, and PNG plots."""
    import importlib.util

    from .report import render

    merged = _merged(files)
    render(merged)
    if no_plots:
        return
    if importlib.util.find_spec("matplotlib") is None:
        typer.echo("No plots: matplotlib is not installed. Install with: pip install 'tilewise[bench]'")
        raise typer.Exit(1)
    from .plots import plot

    drawn = plot(merged, plots or files[0].parent)
    for path in drawn:
        typer.echo(f"Plot: {path}")
    if not drawn:
        typer.echo("No plots: there are none of the depth set, and none without results.")


@app.command()
def plan(
    case: Annotated[str, typer.Option(help="A mechanism.")] = "t5",
    batch: Annotated[int, typer.Option("--batch", "-B", min=1)] = 1,
    heads: Annotated[int, typer.Option("--heads", "-H", min=1)] = 12,
    length: Annotated[int, typer.Option("--length", "-N", min=2)] = 8192,
    head_dim: Annotated[int, typer.Option("--head-dim", "-D", min=8)] = 64,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "float16",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
) -> None:
    """Say which implementation would run a call, why the others would not, and what it holds. Runs nothing."""
    import torch

    from ..testing import Sizes
    from . import plan as planning
    from .relative import CASES

    if case not in CASES:
        raise typer.BadParameter(f"case {case!r}; expected one of {', '.join(CASES)}")
    where = _device(device)
    kind = getattr(torch, _dtype(dtype))
    sizes = Sizes(B=batch, H=heads, Hk=heads, Tq=length, Tk=length, d=head_dim, d_v=head_dim, published=True)
    typer.echo(f"{case}: q [{batch}, {heads}, {length}, {head_dim}], {dtype}, on {where}")
    for choice in planning.choices(CASES[case], sizes, kind, where):
        typer.echo(f"  {choice.impl:<10} {'runs' if not choice.reasons else 'does not: ' + '; '.join(choice.reasons)}")
    for what, mib in planning.memory_mib(sizes, kind).items():
        typer.echo(f"  {what:<36} {mib:12,.1f} MiB")


@app.command()
def tune(
    classes: Annotated[
        str | None, typer.Option(help="plain, scalar, query, key, identity, value; default all.")
    ] = None,
    passes: Annotated[str | None, typer.Option(help="forward, projection, queries, keys, fold; default all.")] = None,
    lengths: Annotated[str, typer.Option(help="Keys at which shapes are compared.")] = "512,2048,8192",
    out: Annotated[Path | None, typer.Option(help="File; default: the one that calls read, else the cache's.")] = None,
    compile_limit: Annotated[float, typer.Option(help="Seconds for compiling ahead, by many processes.")] = 300.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be measured, and where it would go.")
    ] = False,
) -> None:
    """Measure a few tile shapes for each kind of call on this GPU, and let every later call use the fastest.

    The result goes to TILEWISE_TILES, else to tilewise/tiles.json in the user's cache folder, where calls find it;
    TILEWISE_TILES=builtin turns it off.
    """
    import importlib.util
    import os

    if importlib.util.find_spec("triton") is None:
        raise typer.BadParameter("triton is not installed: there are no tiles to tune")
    from ..triton import tuned
    from . import tune as tuning

    def names(text: str | None, legal: tuple[str, ...], what: str) -> list[str]:
        chosen = _names(text) or list(legal)
        if unknown := [name for name in chosen if name not in legal]:
            raise typer.BadParameter(f"{what} {unknown[0]!r}; expected some of {', '.join(legal)}")
        return chosen

    kinds = names(classes, tuple(tuning.CLASSES), "classes")
    chosen = list(tuning.jobs(kinds, names(passes, tuning.PASSES, "passes"), _numbers(lengths)))
    named = os.environ.get(tuned.VARIABLE)
    path = out or (tuned.default_path() if named in (None, "", tuned.BUILTIN) else Path(named))
    if dry_run:
        for what, kind, _, N in chosen:
            shown = ", ".join("×".join(map(str, shape)) for shape in tuning.shapes(what, kind, N))
            typer.echo(f"{what:<11}{kind:<9}{N:>6}  {shown}")
        trials = sum(len(tuning.shapes(what, kind, N)) for what, kind, _, N in chosen)
        typer.echo(f"{trials} measurements, results to {path}")
        return
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device here that torch can use; --dry-run says what would be measured")
    gpu = torch.cuda.get_device_name()
    if path.is_file():
        tuned.read(path)
    tuning.precompile(chosen, compile_limit, typer.echo)
    table = tuning.tune(tuning.measure(), kinds, names(passes, tuning.PASSES, "passes"), _numbers(lengths), typer.echo)
    tuned.write(path, gpu, table)
    typer.echo(f"{len(table)} entries of {gpu} are faster than the built-in ones. Written to {path}")
