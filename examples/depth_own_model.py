"""Put Attention Residuals into a Transformer of your own: one module, one read and one write a sublayer."""

import torch
from torch import nn

from tilewise.depth import Schedule
from tilewise.nn import AttnRes


class Attention(nn.Module):
    """Any sublayer: from a normalised input to an update, with no residual of its own."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Attention and MLP sublayers in turn; blocks of four sublayers, which is two decoder layers."""

    def __init__(self, vocab: int = 64, d: int = 32, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, d)
        mlp = lambda: nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))  # noqa: E731
        self.sublayers = nn.ModuleList(m for _ in range(layers) for m in (Attention(d, 4), mlp()))
        self.norms = nn.ParameterList(torch.ones(d) for _ in self.sublayers)
        self.final_norm = nn.Parameter(torch.ones(d))
        self.residual = AttnRes(d, Schedule.block(len(self.sublayers), 4))
        self.head = nn.Linear(d, vocab)

    def forward(self, tokens):
        stream = self.residual(self.embedding(tokens), norms=list(self.norms))
        for l, f in enumerate(self.sublayers):
            stream.write(l, f(stream.read(l)))
        return self.head(stream.output(self.final_norm))


def main(steps: int = 60) -> list[float]:
    """Learn a fixed pattern; returns the losses."""
    torch.manual_seed(0)
    model, tokens = Model(), torch.arange(33).repeat(4, 1) * 7 % 64
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; largest query {model.residual.query.abs().max():.3f}")
    return losses


if __name__ == "__main__":
    main()
