"""The precision study: the error of a block against fp64 as a multiple of plain attention's own error."""

import torch
from carried_cases import dense, grads_of, inputs, promoted, run

LIMIT = {"recompute": 1.3, "stored": 2.0, "mixed": 2.0}
# Spread of the scores of one layer, and of a shift common to a row of scores (a component that all keys share).
STUDY = [(1, 0), (2, 0), (3, 0), (1, 10), (2, 20)]


def bf16(x):
    return x.to(torch.bfloat16).double()


def relative(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


def plain_attention(q, k, v, G):
    """What fused attention does in bf16 with exact scores: P and dS rounded before their products, results rounded."""
    q, k, v, G = ([x.detach().double() for x in group] for group in (q, k, v, G))
    heads, scale, N = q[0].shape[1] // k[0].shape[1], q[0].shape[3] ** -0.5, q[0].shape[2]
    seen = torch.ones(N, N, dtype=torch.bool, device=q[0].device).tril()

    def wide(x):
        return x.repeat_interleave(heads, 1)

    def reduced(x):
        return x.view(x.shape[0], -1, heads, *x.shape[2:]).sum(2)

    Z, O, dS, dV = 0.0, [], [], []
    for i in range(len(q)):
        Z = Z + scale * q[i] @ wide(k[i]).mT
        P = Z.masked_fill(~seen, -torch.inf).softmax(-1)
        O.append(bf16(bf16(P) @ wide(v[i])))
        dS.append(P * (G[i] @ wide(v[i]).mT - (G[i] * O[i]).sum(-1, keepdim=True)))
        dV.append(bf16(reduced(bf16(P).mT @ G[i])))
    E, dQ, dK = 0.0, [], []
    for i in reversed(range(len(q))):
        E = E + dS[i]
        dQ.insert(0, bf16(scale * bf16(E) @ wide(k[i])))
        dK.insert(0, bf16(reduced(scale * bf16(E).mT @ q[i])))
    return [*O, *dQ, *dK, *dV]


def measure(config, std, offset, **sizes):
    """Relative error of O, dQ, dK, dV of every layer as a multiple of plain attention's."""
    q, k, v = inputs(**{"T": 256, "d": 128} | sizes, dtype=torch.bfloat16, std=std, offset=offset)
    G = [torch.randn_like(x) for x in q]
    wide = promoted((q, k, v))
    exact = dense(config, *wide)
    exact = [*exact, *grads_of(exact, [x for group in wide for x in group], G)]
    plain = plain_attention(q, k, v, G)
    got = run(config, q, k, v)
    got = [*got, *grads_of(got, [*q, *k, *v], G)]
    return [relative(a, c) / relative(b, c) for a, b, c in zip(got, plain, exact, strict=True)]
