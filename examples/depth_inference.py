"""Plan the memory of a served model, then prefill in chunks and decode through one preallocated bank."""

from dataclasses import replace

import torch

from tilewise.depth import InferenceState, Schedule, memory_table, plan_memory
from tilewise.nn import Decoder, DecoderConfig, KVCache


def plans() -> str:
    """What 128K tokens cost in Kimi K3's shape, and 32K with Full Attention Residuals, alone and on eight devices; in
    chunks; and with phase 1 for at most six sublayers at a time."""
    k3, full = Schedule.kimi_k3(), Schedule.full_attention(128)
    return memory_table(
        [
            plan_memory(131072, 7168, k3),
            plan_memory(131072, 7168, k3, shards=8),
            plan_memory(131072, 7168, k3, shards=8, chunk=32768),
            plan_memory(131072, 7168, replace(k3, max_queries=6), shards=8, chunk=32768),
            plan_memory(32768, 7168, full),
            plan_memory(32768, 7168, full, shards=8),
        ]
    )


@torch.no_grad()
def generate(model: Decoder, prompt: torch.Tensor, new: int, chunk: int) -> torch.Tensor:
    """Greedy decoding after a prefill in chunks of `chunk` tokens."""
    batch, length = prompt.shape
    state = InferenceState(model.residual.schedule, model.residual.reads(), max_tokens=batch * chunk)
    weight = model.head.weight
    cache = KVCache(model.config, batch, length + new, device=weight.device, dtype=weight.dtype)
    for part in prompt.split(chunk, 1):
        logits = model(part, cache, residual=state)
    tokens = [prompt]
    for _ in range(new):
        tokens.append(logits[:, -1:].argmax(-1))
        logits = model(tokens[-1], cache, residual=state)
    return torch.cat(tokens, 1)


def main() -> torch.Tensor:
    """Print the plans and generate a few tokens with a small random model."""
    print(plans())
    torch.manual_seed(0)
    config = DecoderConfig(vocab=64, d=32, layers=6, heads=4, kv_heads=2, hidden=64, residual="block", block=4)
    out = generate(Decoder(config), torch.randint(64, (2, 20)), new=5, chunk=8)
    print(out[0].tolist())
    return out


if __name__ == "__main__":
    main()
