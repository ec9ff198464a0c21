"""Do carried scores learn better? A small decoder on real text, two baselines, each with and without a carry.

    python benchmarks/prepare_text.py --out out/text
    python benchmarks/carried_train.py --data out/text --out out/carried_train --tokens 2097152 --processes 16

`window`: every layer sees 128 keys back and gates its output, element by element. `hidden`: full attention whose keys
and values are projected, in groups of four layers, from the hidden state that enters the group (SwiftKV's
SingleInputKV). `full`: full attention and nothing else. Then the carry: none, the sum in blocks of 2, 4 and 8 layers,
or their running mean. No variant adds a parameter to its baseline; for a seed all see the same batches. The recipe, the
data and the batches are those of depth_train.py: the tokens above are 256 steps of 16 sequences of 512; without
`--tokens` a run is half as long again.

With `--processes` the variants are trained side by side, a process each, seed after seed: their speeds do not compare,
and a run that is cut short has all variants of fewer seeds. Each writes OUT/<variant>.json after every run, and nothing
of a run that did not end; OUT/carried_train.json joins them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from train_harness import Recipe, Text, compare, summary

from tilewise.bench.records import environment
from tilewise.carried import CarriedConfig, TileLayout
from tilewise.carried.llama import CarriedLlama, LlamaOptions

BASES = {
    "full": {},
    "window": {"gated": True, "windows": 128},
    "hidden": {"keys": "hidden", "group": 4},
}
CARRIES = {
    "none": {"layers": 1},
    "sum2": {"layers": 2},
    "sum4": {"layers": 4},
    "sum8": {"layers": 8},
    **{f"mean{n}": {"layers": n, "scaling": "mean"} for n in (2, 4, 8)},
}
VARIANTS = [f"{base}-{carry}" for base in ("window", "hidden") for carry in CARRIES] + ["full-none", "full-sum4"]
SIZES = {"width": 256, "layers": 8, "heads": 4, "kv-heads": 2, "hidden": 704}


class Model(CarriedLlama):
    """fp32 weights, products in `dtype`; the layout of live tiles is made once a length."""

    def __init__(self, options: LlamaOptions, dtype: torch.dtype) -> None:
        super().__init__(options)
        self.dtype = dtype
        self._layouts: dict[tuple, TileLayout] = {}

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean next-token cross entropy in nats."""
        T, device = tokens.shape[1] - 1, tokens.device
        if (T, device) not in self._layouts:
            self._layouts[T, device] = TileLayout(self.options.carried, T, T, device=device)
        with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
            return super().loss(tokens, layout=self._layouts[T, device])


def options_of(variant: str, vocabulary: int, sizes: dict[str, int], windows: int, plan: str) -> LlamaOptions:
    """The model of a variant such as ``window-sum4``."""
    base, carry = variant.split("-")
    parts = dict(BASES[base])
    window = windows if parts.pop("windows", None) else None
    carried = CarriedConfig(windows=window, plan=plan, **CARRIES[carry])
    return LlamaOptions(vocabulary=vocabulary, carried=carried, **sizes, **parts)


def builders(
    names: list[str], vocabulary: int, sizes: dict[str, int], windows: int, plan: str, device: str, dtype: torch.dtype
) -> dict[str, Callable[[], nn.Module]]:
    """Name → builder."""

    def builder(name: str) -> Callable[[], nn.Module]:
        return lambda: Model(options_of(name, vocabulary, sizes, windows, plan), dtype).to(device).train()

    return {name: builder(name) for name in names}


def joined(paths: list[Path]) -> dict:
    """One record of several, made side by side from one recipe, model and data.

    Raises:
        ValueError: a record of another recipe, model or data.
    """
    records = [json.loads(path.read_text()) for path in paths]
    for path, record in zip(paths, records, strict=True):
        if {**record, "runs": None} != {**records[0], "runs": None}:
            raise ValueError(f"{path}: found another recipe, model or data than in {paths[0]}")
    runs = {name: found for record in records for name, found in record["runs"].items()}
    return {**records[0], "runs": {name: runs[name] for name in VARIANTS if name in runs}}


def tables(record: dict) -> str:
    """A table for each baseline, of the seeds that all of its variants have finished; differences are paired by it."""
    parts = []
    for base in BASES:
        runs = {name: found for name, found in record["runs"].items() if name.startswith(f"{base}-") and found}
        if not runs:
            continue
        finished = [{run["seed"] for run in found} for found in runs.values()]
        seeds = set.intersection(*finished)
        said = f"{base}: {record['recipe']['tokens']:,} tokens, seeds {', '.join(map(str, sorted(seeds))) or 'none'}"
        if left := sorted(set.union(*finished) - seeds):
            said += f"; not all variants have finished {', '.join(map(str, left))}"
        if missing := [name for name in VARIANTS if name.startswith(f"{base}-") and name not in runs]:
            said += f"; no run of {', '.join(missing)}"
        kept = {name: [run for run in found if run["seed"] in seeds] for name, found in runs.items()}
        parts.append(f"{said}\n{summary({**record, 'runs': kept})}")
    return "\n\n".join(parts)


def side_by_side(arguments: list[str], names: list[str], out: Path, count: int, seconds: float) -> None:
    """Train every variant in a process of its own, `count` at a time; those that are late are ended."""
    began, waiting, running = time.monotonic(), list(names), {}
    while waiting or running:
        if waiting and time.monotonic() - began > seconds:
            print("no time for", ", ".join(waiting), flush=True)
            waiting.clear()
        while waiting and len(running) < count:
            name = waiting.pop(0)
            left = seconds - (time.monotonic() - began)
            command = [sys.executable, __file__, *arguments, "--variants", name, "--seconds", str(left)]
            # Each has work for one processor: starting kernels.
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            with (out / f"{name}.log").open("w") as log:
                running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        time.sleep(0.2)
        for name, process in list(running.items()):
            if process.poll() is None and time.monotonic() - began > seconds + 3:
                process.kill()
                process.wait()
            if process.poll() is not None:
                running.pop(name)
                if process.returncode:
                    print(f"{name}: status {process.returncode}", (out / f"{name}.log").read_text()[-600:], flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Command line. Returns the exit status: 1 if a variant lacks a seed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("out/text"))
    parser.add_argument("--out", type=Path, default=Path("out/carried_train"), help="a folder")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--plan", choices=("stored", "mixed", "recompute"), default="stored")
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run that would end later")
    parser.add_argument("--processes", type=int, default=0, help="variants at a time, a process each; 0: in this one")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    recipe = Recipe(tokens=3_145_728, batch=16)
    for name, value in asdict(recipe).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.processes:
        kept = _without(arguments, ("--variants", "--processes", "--seconds"))
        side_by_side(kept, given.variants, given.out, given.processes, given.seconds)
    else:
        torch.backends.cuda.matmul.allow_tf32 = True
        text = Text(given.data)
        recipe = Recipe(**{name: getattr(given, name) for name in asdict(recipe)})
        sizes = {n.replace("-", "_"): getattr(given, n.replace("-", "_")) for n in SIZES}
        dtype = getattr(torch, given.dtype)
        kind = torch.device(given.device).type
        made_with = environment("carried_train", "carried", kind, ("torch", "triton", "numpy"), {})
        # Runs on either side of midnight are joined all the same.
        del made_with["date"]
        model = {**sizes, "window": given.window, "dtype": given.dtype, "plan": given.plan}
        notes = {"model": model, "made_with": made_with}
        built = builders(given.variants, text.vocab, sizes, given.window, given.plan, given.device, dtype)
        began = time.monotonic()
        for name, build in built.items():
            left = given.seconds - (time.monotonic() - began)
            compare({name: build}, text, recipe, given.seeds, given.out / f"{name}.json", seconds=left, notes=notes)
    found = [path for name in VARIANTS if (path := given.out / f"{name}.json").exists()]
    if found and (given.processes or len(given.variants) > 1):
        record = joined(found)
        (given.out / "carried_train.json").write_text(json.dumps(record) + "\n")
        print(tables(record))
    done = {path.stem: len(json.loads(path.read_text())["runs"][path.stem]) for path in found}
    return int(any(done.get(name, 0) < len(given.seeds) for name in given.variants))


def _without(arguments: list[str], names: tuple[str, ...]) -> list[str]:
    """The arguments less the options in `names` and what follows them."""
    kept, skipping = [], False
    for argument in arguments:
        if argument.startswith("--"):
            skipping = argument.split("=")[0] in names
        if not skipping:
            kept.append(argument)
    return kept


if __name__ == "__main__":
    sys.exit(main())
