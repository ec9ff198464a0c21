"""Replace the residual stream of a Hugging Face decoder by Attention Residuals, train it, and take it out again."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tilewise.models.depth_hf import unwrap_residuals, wrap_residuals


def main(steps: int = 20) -> list[float]:
    """Train a small random Llama with blocks of four sublayers; returns the losses."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    tokens = torch.arange(32).repeat(4, 1) * 7 % 64
    plain = model(tokens).logits
    print(wrap_residuals(model, 4))
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for _ in range(steps):
        loss = model(tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    unwrap_residuals(model)
    assert model(tokens).logits.shape == plain.shape
    return losses


if __name__ == "__main__":
    main()
