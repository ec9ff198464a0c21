"""Inputs and runs shared by the tests of carried attention."""

import torch

from tilewise.carried import CarriedConfig, Carry, carried_attention, carried_attention_reference


def inputs(
    layers=4, B=1, H=4, Hk=2, T=37, Tk=None, d=8, dv=None, dtype=torch.float64, std=1.0, offset=0.0, device="cpu",
):  # fmt: skip
    """q, k, v lists that require gradients; `offset` is the spread of a shift common to a whole row of scores."""
    Tk, dv = Tk or T, dv or d

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, device=device)

    q = [normal(B, H, T, d) * std for _ in range(layers)]
    k = [normal(B, Hk, Tk, d) for _ in range(layers)]
    v = [normal(B, Hk, Tk, dv) for _ in range(layers)]
    if offset:
        for i in range(layers):
            u = torch.nn.functional.normalize(normal(B, Hk, 1, d), dim=-1)
            q[i] = q[i] + u.repeat_interleave(H // Hk, 1) * offset * normal(B, H, T, 1)
            k[i] = k[i] + u * d**0.5
    return [[x.to(dtype).requires_grad_() for x in group] for group in (q, k, v)]


def grads_of(outputs, leaves, weights):
    """Gradients of Σ ⟨weights, outputs⟩ as a flat list."""
    loss = sum((o * w.to(o.dtype)).sum() for o, w in zip(outputs, weights, strict=True))
    return torch.autograd.grad(loss, leaves)


def run(config, q, k, v, mask=None, offset=None, gain=None, sink=None, seed=None):
    """The outputs of a block, layer by layer."""
    carry, outputs = Carry(config, mask=mask, offset=offset), []
    for i in range(len(q)):
        o, carry = carried_attention(
            q[i], k[i], v[i], carry, gain=gain[i] if gain else None, sink=sink[i] if sink else None,
            seed=seed[i] if seed else None, last=i == len(q) - 1,
        )  # fmt: skip
        outputs.append(o)
    return outputs


def promoted(groups):
    return [[x.detach().double().requires_grad_() for x in group] for group in groups]


def dense(config, q, k, v, **kwargs):
    return carried_attention_reference(q, k, v, config, **kwargs)


__all__ = ["CarriedConfig", "dense", "grads_of", "inputs", "promoted", "run"]
