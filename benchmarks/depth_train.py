"""Does a residual stream over depth learn better? A small decoder on real text: standard, Block of 2, 4, 8, Full.

python benchmarks/prepare_text.py --out out/text
python benchmarks/depth_train.py --data out/text --out out/depth_train.json --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn
from train_harness import Recipe, Text, compare, summary

from tilewise.nn import Decoder, DecoderConfig

KINDS = {
    "standard": {"residual": "standard"},
    "block2": {"residual": "block", "block": 2},
    "block4": {"residual": "block", "block": 4},
    "block8": {"residual": "block", "block": 8},
    "full": {"residual": "full"},
}


class MixedDecoder(Decoder):
    """A decoder with fp32 weights whose matrix products run in `dtype`, and so does the whole residual stream."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__(config)
        self.dtype = dtype

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean next-token cross entropy in nats."""
        if self.dtype == torch.float32:
            return super().loss(tokens)
        with torch.autocast(tokens.device.type, self.dtype):
            return super().loss(tokens, residual=lambda x, norms: self.residual(x.to(self.dtype), norms=norms))


def variants(
    names: list[str], base: DecoderConfig, device: torch.device, dtype: torch.dtype
) -> dict[str, Callable[[], nn.Module]]:
    """Name → builder for the kinds of residual asked for."""
    return {
        name: lambda name=name: MixedDecoder(replace(base, **KINDS[name]), dtype).to(device).train() for name in names
    }


def joined(paths: list[Path]) -> dict:
    """One record of several, made side by side from one recipe, model and data.

    Raises:
        ValueError: a record of another recipe, model or data, or a variant's seed in two of them.
    """
    records = [json.loads(path.read_text()) for path in paths]
    runs = {}
    for path, record in zip(paths, records, strict=True):
        for name, found in record["runs"].items():
            known = runs.setdefault(name, [])
            again = {run["seed"] for run in known} & {run["seed"] for run in found}
            if again:
                raise ValueError(f"{path}: found seeds {sorted(again)} of {name} again, expected each in one file")
            runs[name] = sorted(known + found, key=lambda run: run["seed"])
        if {**record, "runs": None} != {**records[0], "runs": None}:
            raise ValueError(f"{path}: found another recipe, model or data than in {paths[0]}")
    order = [name for name in KINDS if name in runs]
    return {**records[0], "runs": {name: runs[name] for name in order}}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("out/text"))
    parser.add_argument("--out", type=Path, default=Path("out/depth_train.json"))
    parser.add_argument("--variants", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run that would end later")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--join", type=Path, nargs="+", help="train nothing: join these records in --out and show them")
    sizes = {"d": 384, "layers": 16, "heads": 6, "kv-heads": 3, "hidden": 1024}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    recipe = Recipe()
    for name, value in asdict(recipe).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = parser.parse_args()
    if options.join:
        record = joined(options.join)
        options.out.write_text(json.dumps(record) + "\n")
        print(summary(record))
        return

    if options.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    text = Text(options.data)
    recipe = Recipe(**{name: getattr(options, name) for name in asdict(recipe)})
    base = DecoderConfig(
        vocab=text.vocab, **{n.replace("-", "_"): getattr(options, n.replace("-", "_")) for n in sizes}
    )
    model = {k: v for k, v in asdict(base).items() if k not in ("residual", "block")} | {"dtype": options.dtype}
    built = variants(options.variants, base, torch.device(options.device), getattr(torch, options.dtype))
    record = compare(
        built,
        text,
        recipe,
        options.seeds,
        options.out,
        seconds=options.seconds,
        compiled=options.compile,
        notes={"model": model, "compiled": options.compile},
    )
    print(summary(record))


if __name__ == "__main__":
    main()
