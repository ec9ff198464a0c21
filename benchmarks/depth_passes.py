"""Whole passes of the residual machinery over a stack of sublayers with a trivial update, for `depth_kernels.py`."""

import torch

from tilewise.bench.plain_residual import add_rms_norm_
from tilewise.depth import BlockReads, SharedSource, mix_norm_shared
from tilewise.depth.triton import launch

EPS = 1e-6
DECODE_PLANS = ((0, 4), (0, 3), (0, 2), (0, 1), (2, 0), (4, 0))
"""(sources read in one pass, sources a merge reads itself): the decode step is timed with each."""


def update(y):
    return y * 0.7


def update_only(x, layers):
    def run():
        y = x
        for _ in range(layers):
            y = update(y)
        return y

    return run


def plain(x, W, layers):
    h, y = torch.empty_like(x), torch.empty_like(x)

    def run():
        h.copy_(x)
        u = update(torch.nn.functional.rms_norm(x, x.shape[1:], W[0], EPS))
        for l in range(layers):
            add_rms_norm_(u, h, W[l + 1], y, EPS)
            u = update(y)
        return y

    return run


class Inference:
    """Prefill or decode: one-pass while at most `hybrid` blocks are complete, then two phases with scores ahead.

    `direct`: two phases read up to so many sources without phase 1 (`launch.phase2_from_scores`).
    """

    def __init__(self, x, Q, W, layers, S, hybrid, direct=0):
        self.x, self.W, self.layers, self.S, self.hybrid, self.direct = x, W, layers, S, hybrid, direct
        (T, d), N = x.shape, layers // S
        self.bank = torch.empty((N + 1, T, d), dtype=x.dtype, device=x.device)
        self.scores = torch.empty((layers + 1, N + 1, T), dtype=torch.float32, device=x.device)
        self.o1 = torch.empty((S, T, d), dtype=x.dtype, device=x.device)
        self.lse = torch.empty((S, T), dtype=torch.float32, device=x.device)
        self.q = list(Q.unbind(0))
        # Sublayer 0 reads the embedding alone and needs no score: 128 later queries are one tile, 129 are two.
        self.later = [Q[max(b * S, 1) :] for b in range(N)]

    def merge(self, n, l, o1, u, p):
        """(p, y) of read l over n sources and the prefix; o1 is the block's row of phase 1."""
        q, w = self.q[l], self.W[l]
        if n <= self.direct:
            return launch.phase2_from_scores(u, p, self.bank[:n].unbind(0), self.scores[l, :n], q, w, EPS, EPS)
        if n == 1:
            # Over one source the softmax is 1: o1 is the source itself.
            return launch.phase2_fwd(u, p, self.bank[0], self.scores[l, 0], q, w, EPS, EPS)
        return launch.phase2_fwd(u, p, self.o1[o1], self.lse[o1], q, w, EPS, EPS)

    def __call__(self):
        S, bank, N = self.S, self.bank, self.layers // self.S
        bank[0].copy_(self.x)
        u = p = None
        for l in range(self.layers):
            b, i = divmod(l, S)
            n, q, w = b + 1, self.q[l], self.W[l]
            if n <= self.hybrid:
                if i == 0 and b == 0:
                    y = launch.mix_fwd([bank[0]], None, None, q, w, EPS, EPS)[1]
                elif i == 0:
                    y = launch.mix_fwd(bank[: n - 1].unbind(0), u, p, q, w, EPS, EPS, new=bank[b])[1]
                else:
                    p, y = launch.mix_fwd(bank[:n].unbind(0), u, p, q, w, EPS, EPS)
            elif i == 0:
                first = max(b * S, 1)
                if n == self.hybrid + 1 and b:
                    launch.scores(bank[:b].unbind(0), self.later[b], EPS, out=self.scores[first:, :b])
                if b:
                    launch.complete(u, p, self.later[b], EPS, block=bank[b], out=self.scores[first:, b])
                else:
                    launch.scores([bank[0]], self.later[0], EPS, out=self.scores[first:, :1])
                if n > max(1, self.direct):
                    launch.combine(bank[:n].unbind(0), self.scores[b * S : b * S + S, :n], self.o1, self.lse)
                y = (
                    self.merge(n, l, 0, None, None)[1]
                    if b
                    else launch.phase2_fwd(None, None, bank[0], None, None, w, EPS, EPS)[1]
                )
            else:
                p, y = self.merge(n, l, i, u, p)
            if i == 0:
                p = None
            u = update(y)
        if N <= self.hybrid:
            return launch.mix_fwd(bank[:N].unbind(0), u, p, self.q[-1], self.W[-1], EPS, EPS, new=bank[N])[1]
        if N > max(1, self.direct):
            launch.combine(bank[:N].unbind(0), self.scores[self.layers :, :N], self.o1[:1], self.lse[:1])
        return self.merge(N, self.layers, 0, u, p)[1]


def naive(x, Q, W, layers, S):
    """The same pass in fp64, from the equations."""

    def rms(v):
        return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + EPS)

    x, Q, W = x.double(), Q.double(), W.double()
    blocks, p = [x], None
    for l in range(layers + 1):
        v = torch.stack(blocks if p is None else [*blocks, p])
        h = ((rms(v) @ Q[l]).softmax(0)[..., None] * v).sum(0)
        y = rms(h) * W[l]
        if l < layers:
            u = y * 0.7
            p = u if p is None else p + u
            if (l + 1) % S == 0:
                blocks, p = [*blocks, p], None
    return y


def train_forward(x, Q, W, layers, S, save_o1=False):
    sources, queries, weights = [SharedSource(x)], Q.split(S), W.split(S)
    for b in range(layers // S):
        reads = BlockReads(sources, queries[b], None, weights[b], eps=EPS, save_o1=save_o1)
        u, p = update(reads.first()), None
        for i in range(1, S):
            p, y = reads.merge(i, u, p)
            u = update(y)
        sources.append(SharedSource(p + u))
    return mix_norm_shared(sources, queries[-1][0], None, weights[-1][0], eps=EPS)


def train(x, Q, W, layers, S, dy, save_o1=False):
    leaves = [t.detach().clone().requires_grad_() for t in (x, Q, W)]

    def run():
        for t in leaves:
            t.grad = None
        train_forward(*leaves, layers, S, save_o1).backward(dy)
        return leaves

    return run


def update_only_train(x, layers):
    def run():
        y = x
        for _ in range(2 * layers):
            y = update(y)
        return y

    return run
