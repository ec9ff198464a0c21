"""Does a residual stream over depth learn better? A small decoder on real text: standard, Block of 2, 4, 8, Full.

    python benchmarks/prepare_text.py --out out/text
    python benchmarks/depth_train.py --data out/text --out out/depth_train.json --seeds 0 1 2

Sizes, recipe, data and their order are those of carried_train.py, and `standard` is the model that it calls
`full-none`: with the same initial weights both lose the same at every step. Matrix products run in bf16, the residual
stream of every variant in fp32 (`--stream`).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from depth_record import where
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


SIZES = {"d": 256, "layers": 8, "heads": 4, "kv-heads": 2, "hidden": 704}
RECIPE = Recipe(tokens=3_145_728, batch=16)


class MixedDecoder(Decoder):
    """A decoder with fp32 weights whose matrix products run in `dtype` and whose stream is in `stream`."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, stream: torch.dtype) -> None:
        super().__init__(config)
        self.dtype, self.stream = dtype, stream

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean next-token cross entropy in nats."""
        if self.dtype == torch.float32:
            return super().loss(tokens)
        with torch.autocast(tokens.device.type, self.dtype):
            return super().loss(tokens, residual=lambda x, norms: self.residual(x.to(self.stream), norms=norms))


def sized(vocab: int, sizes: dict[str, int]) -> DecoderConfig:
    """The model: an output projection of its own, and the epsilon of an fp32 `torch.nn.RMSNorm`."""
    fields = {name.replace("-", "_"): value for name, value in sizes.items()}
    return DecoderConfig(vocab=vocab, tied=False, eps=torch.finfo(torch.float32).eps, **fields)


def variants(
    names: list[str],
    base: DecoderConfig,
    device: torch.device,
    dtype: torch.dtype,
    stream: torch.dtype = torch.float32,
) -> dict[str, Callable[[], nn.Module]]:
    """Name → builder for the kinds of residual asked for."""

    def builder(name: str) -> Callable[[], nn.Module]:
        return lambda: MixedDecoder(replace(base, **KINDS[name]), dtype, stream).to(device).train()

    return {name: builder(name) for name in names}


def joined(paths: list[Path]) -> dict:
    """One record of several, of one recipe, model, data and versions; it names all their commits.

    Raises:
        ValueError: a record of another recipe, model, data or version, or a variant's seed in two of them.
    """
    records = [json.loads(path.read_text()) for path in paths]
    commits = [record["made"].pop("commit", None) for record in records]
    runs = {}
    for path, record in zip(paths, records, strict=True):
        for name, found in record["runs"].items():
            known = runs.setdefault(name, [])
            again = {run["seed"] for run in known} & {run["seed"] for run in found}
            if again:
                raise ValueError(f"{path}: found seeds {sorted(again)} of {name} again, expected each in one file")
            runs[name] = sorted(known + found, key=lambda run: run["seed"])
        if {**record, "runs": None} != {**records[0], "runs": None}:
            raise ValueError(f"{path}: found another recipe, model, data or version than in {paths[0]}")
    order = [name for name in KINDS if name in runs]
    made = records[0]["made"] | {"commit": ", ".join(dict.fromkeys(filter(None, commits))) or None}
    return {**records[0], "made": made, "runs": {name: runs[name] for name in order}}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("out/text"))
    parser.add_argument("--out", type=Path, default=Path("out/depth_train.json"))
    parser.add_argument("--variants", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of matrix products")
    parser.add_argument("--stream", choices=("float32", "bfloat16"), default="float32", help="of the residual stream")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run that would end later")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--join", type=Path, nargs="+", help="train nothing: join these records in --out and show them")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in asdict(RECIPE).items():
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
    recipe = Recipe(**{name: getattr(options, name) for name in asdict(RECIPE)})
    base = sized(text.vocab, {name: getattr(options, name.replace("-", "_")) for name in SIZES})
    dtypes = {"dtype": options.dtype, "stream": options.stream}
    model = {k: v for k, v in asdict(base).items() if k not in ("residual", "block")} | dtypes
    dtype, stream = (getattr(torch, name) for name in dtypes.values())
    # Without the day: records of one comparison are joined, and one may be made after midnight.
    made = where(options.device, "train")
    del made["date"]
    built = variants(options.variants, base, torch.device(options.device), dtype, stream)
    record = compare(
        built,
        text,
        recipe,
        options.seeds,
        options.out,
        seconds=options.seconds,
        compiled=options.compile,
        notes={"model": model, "compiled": options.compile, "made": made},
    )
    print(summary(record))


if __name__ == "__main__":
    main()
