"""Whole models as transformers runs them and patched: time and peak memory of a forward and of a training step.

    python benchmarks/drop_ins.py --out drop_ins.json [--models deberta wav2vec2-bert] [--lengths 512 2048 8192]

Weights are random, of the published sizes (DeBERTa-v3-base; Wav2Vec2-BERT 2.0 with a quarter of its layers). A batch
has `--tokens` tokens or one example; the last eighth of every second example is padding. Forwards run without
gradients, training steps with `--dropout` in the places where the models have it. Both run in interleaved rounds.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
from pathlib import Path

import torch
import transformers
from torch import nn

import tilewise
from tilewise.bench.records import environment
from tilewise.bench.timing import Plan, compare, peak_mib


def deberta(layers: int | None, dropout: float) -> nn.Module:
    config = transformers.DebertaV2Config(
        vocab_size=1000, num_hidden_layers=layers or 12, relative_attention=True, position_buckets=256,
        max_relative_positions=-1, max_position_embeddings=512, pos_att_type="p2c|c2p", share_att_key=True,
        norm_rel_ebd="layer_norm", position_biased_input=False, type_vocab_size=0, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.DebertaV2Model(config)


def wav2vec2_bert(layers: int | None, dropout: float) -> nn.Module:
    config = transformers.Wav2Vec2BertConfig(
        num_hidden_layers=layers or 6, layerdrop=0.0, apply_spec_augment=False, attention_dropout=dropout,
        hidden_dropout=dropout, activation_dropout=dropout, conformer_conv_dropout=dropout, feat_proj_dropout=dropout,
    )  # fmt: skip
    return transformers.Wav2Vec2BertModel(config)


MODELS = {"deberta": deberta, "wav2vec2-bert": wav2vec2_bert}


def batch(model: nn.Module, B: int, N: int, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    mask = torch.ones(B, N, dtype=torch.long, device=device)
    mask[1::2, N - N // 8 :] = 0
    if hasattr(model.config, "feature_projection_input_dim"):
        width = model.config.feature_projection_input_dim
        return {"input_features": torch.randn(B, N, width, dtype=dtype, device=device), "attention_mask": mask}
    return {"input_ids": torch.randint(2, model.config.vocab_size, (B, N), device=device), "attention_mask": mask}


def forward_of(model: nn.Module, arguments: dict[str, torch.Tensor]):
    def run() -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(**arguments).last_hidden_state

    return run


def step_of(model: nn.Module, arguments: dict[str, torch.Tensor]):
    def run() -> None:
        model.train().zero_grad(set_to_none=True)
        model(**arguments).last_hidden_state.float().square().mean().backward()

    return run


PASSES = {"forward": forward_of, "training step": step_of}


def out_of_memory(run) -> str | None:
    """What PyTorch says where a run does not fit; what the run held is free again, which its traceback kept."""
    try:
        run()
    except torch.OutOfMemoryError as error:
        said = str(error).splitlines()[0][:120]
    else:
        return None
    gc.collect()
    torch.cuda.empty_cache()
    return said


def measured(plain: nn.Module, patched: nn.Module, pass_: str, arguments: dict, device: str) -> dict:
    """Milliseconds and MiB of both; of the patched model alone, and the reason, where transformers' runs out."""
    ours, theirs = PASSES[pass_](patched, arguments), PASSES[pass_](plain, arguments)
    found: dict = {}
    ours()
    if why := out_of_memory(theirs):
        found["transformers_error"] = why
        plain.zero_grad(set_to_none=True)
    samples = compare(ours, ours if why else theirs, device, Plan(rounds=5, replays=5, round_ms=400.0))
    found |= {"tilewise_ms": samples.ms, "tilewise_mib": peak_mib(ours, device)}
    if not why:
        found |= {"transformers_ms": samples.baseline_ms, "transformers_mib": peak_mib(theirs, device)}
        if pass_ == "forward":
            found["difference"] = float((ours().float() - theirs().float()).abs().max())
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("drop_ins.json"))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=400, help="nothing begins later than this")
    options = parser.parse_args()
    until, dtype = time.time() + options.seconds, getattr(torch, options.dtype)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    packages = ("torch", "triton", "transformers")
    records = [environment("drop_ins", "drop-ins", options.device, packages, settings)]
    for name in options.models:
        torch.manual_seed(0)
        plain = MODELS[name](options.layers, options.dropout).to(options.device, dtype)
        patched = copy.deepcopy(plain)
        implementations = sorted({row.implementation for row in tilewise.patch(patched).rows})
        for N in options.lengths:
            B = max(1, options.tokens // N)
            arguments = batch(plain, B, N, dtype, options.device)
            for pass_ in PASSES:
                record = {"model": name, "pass": pass_, "b": B, "n": N, "dtype": options.dtype,
                          "implementations": implementations}  # fmt: skip
                if time.time() > until:
                    record["error"] = "no time left"
                else:
                    record |= measured(plain, patched, pass_, arguments, options.device)
                records.append(record)
                options.out.write_text(json.dumps(records, indent=1) + "\n")
                print({key: float(f"{x:.4g}") if isinstance(x, float) else x for key, x in record.items()}, flush=True)
    sys.exit(any("error" in record for record in records))


if __name__ == "__main__":
    main()
