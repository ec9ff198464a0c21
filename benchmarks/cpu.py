"""Relative attention on a CPU: Hugging Face's own attention modules against the same modules' weights through Tilewise.

Each row is one module (projections included) at one length, forward alone and forward with backward of every parameter.
Outputs and gradients are compared first, and a row whose comparison fails has no times. The systems take turns, round
by round; medians are printed and every sample is kept in the JSON. On a machine that others load too, ``--clock cpu``
with one thread counts the processor time of this process instead of the wall's.

    python benchmarks/cpu.py --lengths 1024 --lengths 2048 --json benchmarks/results/cpu/relative.json
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DebertaV2Config,
    DisentangledSelfAttention,
    build_relative_position,
)
from transformers.models.t5.modeling_t5 import T5Attention, T5Config
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertConfig, Wav2Vec2BertSelfAttention
from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import (
    Wav2Vec2ConformerConfig,
    Wav2Vec2ConformerRelPositionalEmbedding,
    Wav2Vec2ConformerSelfAttention,
)

import tilewise

HEADS, WIDTH = 6, 64
HIDDEN = HEADS * WIDTH


@dataclass(frozen=True)
class Bench:
    """One mechanism: the host's module, and functions hidden [1, N, HIDDEN] ↦ output, for each system.

    `floor`, where there is one, is the module without its position term, through scaled_dot_product_attention.
    `dense` is the size in N² fp32 entries of the host's largest tensor.
    """

    name: str
    module: nn.Module
    host: Callable[[Tensor], Tensor]
    ours: Callable[[Tensor], Tensor]
    floor: Callable[[Tensor], Tensor]
    dense: int


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)


def merged(o: Tensor) -> Tensor:
    return o.transpose(1, 2).flatten(2)


def t5() -> Bench:
    config = T5Config(d_model=HIDDEN, num_heads=HEADS, d_kv=WIDTH, dropout_rate=0.0)
    config._attn_implementation = "sdpa"
    m = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    nn.init.normal_(m.q.weight, std=HIDDEN**-0.5 * WIDTH**-0.5)
    nn.init.normal_(m.k.weight, std=HIDDEN**-0.5)

    def apply(x: Tensor, attend: Callable) -> Tensor:
        return m.o(merged(attend(heads(m.q(x)), heads(m.k(x)), heads(m.v(x)))))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, terms=tilewise.T5(m.relative_attention_bias.weight), scale=1.0)

    def floor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)

    return Bench("T5", m, lambda x: m(x)[0], lambda x: apply(x, ours), lambda x: apply(x, floor), HEADS)


def sdpa_floor(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = (heads(linear(x)) for linear in (m.linear_q, m.linear_k, m.linear_v))
    return m.linear_out(merged(nn.functional.scaled_dot_product_attention(q, k, v)))


def shaw() -> Bench:
    config = Wav2Vec2BertConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, attention_dropout=0.0)
    config._attn_implementation = "sdpa"
    m = Wav2Vec2BertSelfAttention(config)
    left, right = m.left_max_position_embeddings, m.right_max_position_embeddings

    def ours(x: Tensor) -> Tensor:
        q, k, v = (heads(linear(x)) for linear in (m.linear_q, m.linear_k, m.linear_v))
        terms = tilewise.Shaw(m.distance_embedding.weight, left=left, right=right)
        return m.linear_out(merged(tilewise.attention(q, k, v, terms=terms)))

    return Bench("Shaw (Wav2Vec2-BERT)", m, lambda x: m(x)[0], ours, lambda x: sdpa_floor(m, x), WIDTH)


def transformer_xl() -> Bench:
    config = Wav2Vec2ConformerConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, attention_dropout=0.0, position_embeddings_type="relative"
    )
    config._attn_implementation = "sdpa"
    m = Wav2Vec2ConformerSelfAttention(config)
    for bias in (m.pos_bias_u, m.pos_bias_v):
        nn.init.normal_(bias, std=0.1)
    positions = Wav2Vec2ConformerRelPositionalEmbedding(config)

    def ours(x: Tensor) -> Tensor:
        q, k, v = (heads(linear(x)) for linear in (m.linear_q, m.linear_k, m.linear_v))
        table = heads(m.linear_pos(positions(x)))[0]
        return m.linear_out(
            merged(tilewise.attention(q, k, v, terms=tilewise.TransformerXL(table, m.pos_bias_u, m.pos_bias_v)))
        )

    def host(x: Tensor) -> Tensor:
        return m(x, relative_position_embeddings=positions(x))[0]

    return Bench("Transformer-XL (Conformer)", m, host, ours, lambda x: sdpa_floor(m, x), 2 * HEADS)


def deberta() -> Bench:
    config = DebertaV2Config(
        hidden_size=HIDDEN, num_attention_heads=HEADS, relative_attention=True, position_buckets=256,
        max_relative_positions=512, share_att_key=True, pos_att_type=["c2p", "p2c"], hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    m = DisentangledSelfAttention(config)
    m.rel_embeddings = nn.Parameter(torch.randn(512, HIDDEN) * 0.5)

    def host(x: Tensor) -> Tensor:
        relative_pos = build_relative_position(x, x, bucket_size=256, max_position=512)
        seen = torch.ones(1, 1, x.shape[1], x.shape[1], dtype=torch.bool)
        return m(x, seen, relative_pos=relative_pos, rel_embeddings=m.rel_embeddings)[0]

    def projections(x: Tensor) -> list[Tensor]:
        return [heads(linear(x)) for linear in (m.query_proj, m.key_proj, m.value_proj)]

    def ours(x: Tensor) -> Tensor:
        pos_query, pos_key = (heads(linear(m.rel_embeddings[None]))[0] for linear in (m.query_proj, m.key_proj))
        terms = tilewise.DeBERTa(pos_key, pos_query, position_buckets=256, max_relative_positions=512)
        return merged(tilewise.attention(*projections(x), terms=terms, scale=(3 * WIDTH) ** -0.5))

    def floor(x: Tensor) -> Tensor:
        return merged(nn.functional.scaled_dot_product_attention(*projections(x), scale=(3 * WIDTH) ** -0.5))

    return Bench("DeBERTa-v3", m, host, ours, floor, 4 * HEADS)


def step(module: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, backward: bool) -> Tensor:
    if not backward:
        with torch.no_grad():
            return call(x)
    module.zero_grad(set_to_none=True)
    x.grad = None
    o = call(x)
    # The same for both sides: a gradient taken from the sign of O flips where rounding moves an entry across 0.
    o.backward(torch.randn(o.shape, generator=torch.Generator().manual_seed(1)))
    return o.detach()


def difference(bench: Bench, x: Tensor) -> float:
    """The largest difference of output and gradients between host and ours, relative to the largest of each tensor."""
    results = []
    for call in (bench.host, bench.ours):
        o = step(bench.module, call, x, True)
        grads = [p.grad.clone() for p in bench.module.parameters() if p.grad is not None]
        results.append([o, x.grad.clone(), *grads])
    # A key's bias shifts a whole row of scores: its gradient is rounding noise around 0 in both.
    scale = max(t.abs().max().item() for t in results[0]) * 1e-3
    return max(((a - b).abs().max() / max(a.abs().max().item(), scale)).item() for a, b in zip(*results, strict=True))


def main(
    lengths: Annotated[list[int], typer.Option(help="Sequence lengths.")] = (1024, 2048, 4096),
    rounds: Annotated[int, typer.Option(help="Timed rounds; one more warms up.")] = 5,
    threads: Annotated[int, typer.Option()] = 2,
    clock: Annotated[str, typer.Option(help="wall, or cpu (with --threads 1).")] = "wall",
    only: Annotated[str, typer.Option(help="Mechanisms whose name contains this.")] = "",
    json_path: Annotated[Path | None, typer.Option("--json", help="Where to write every sample.")] = None,
) -> None:
    """Time the attention modules of four mechanisms on the CPU."""
    if clock not in ("wall", "cpu") or (clock == "cpu" and threads != 1):
        raise typer.BadParameter(f"clock is {clock!r} with {threads} threads; expected wall, or cpu with --threads 1")
    now = time.perf_counter if clock == "wall" else time.process_time
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    rows, failed = [], False
    table = Table(
        title=f"CPU, threads: {threads}, {clock} clock, fp32, 1 × {HEADS} heads × {WIDTH}; median ms of {rounds} rounds"
    )
    for column in ("module", "N", "pass", "Hugging Face", "Tilewise", "no term (SDPA)", "speed-up", "difference"):
        table.add_column(column, justify="left" if column in ("module", "pass") else "right")
    for make in (t5, shaw, transformer_xl, deberta):
        bench = make()
        if only.lower() not in bench.name.lower():
            continue
        for n in lengths:
            gib = 4 * bench.dense * n * n / 2**30
            x = torch.randn(1, n, HIDDEN).requires_grad_()
            # Hugging Face's dense tensors of a training step are alive four at a time.
            fits = 4 * gib < psutil.virtual_memory().available / 2**30
            error = difference(bench, x) if fits else None
            systems = {"host": bench.host, "ours": bench.ours, "floor": bench.floor}
            if not fits:
                del systems["host"]
            for backward in (False, True):
                samples: dict[str, list[float]] = {name: [] for name in systems}
                for index in range(rounds + 1):
                    for name, call in systems.items():
                        start = now()
                        step(bench.module, call, x, backward)
                        if index:
                            samples[name].append((now() - start) * 1e3)
                exact = error is None or error < 1e-4
                failed |= not exact
                median = {name: statistics.median(times) for name, times in samples.items()} if exact else {}
                show = lambda name: f"{median[name]:.0f}" if name in median else "–"  # noqa: B023, E731
                host = show("host") if fits else f"{gib:.1f} GiB a tensor"
                ratio = f"{median['host'] / median['ours']:.2f}×" if "host" in median else "–"
                label = "forward + backward" if backward else "forward"
                shown = "not compared" if error is None else f"{error:.1e}"
                table.add_row(bench.name, str(n), label, host, show("ours"), show("floor"), ratio, shown)
                rows.append({"mechanism": bench.name, "n": n, "backward": backward, "difference": error, "exact": exact,
                             "milliseconds": samples if exact else {}, "load": os.getloadavg()[0]})  # fmt: skip
    Console(width=140).print(table)
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        versions = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        about = {
            "threads": threads,
            "clock": clock,
            "cores": os.cpu_count(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "heads": HEADS,
            "width": WIDTH,
            "dtype": "float32",
            "rounds": rounds,
            "seed": 0,
        }
        json_path.write_text(json.dumps({"versions": versions, "about": about, "rows": rows}, indent=1) + "\n")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
