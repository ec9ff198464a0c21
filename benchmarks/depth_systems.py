"""The systems that `depth_table.py` compares: one stack of sublayers with a trivial update, driven by each in turn."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from depth_passes import EPS, Inference, plain, train, update
from torch.utils.checkpoint import checkpoint

from tilewise.depth import InferenceState, Schedule
from tilewise.nn import AttnRes

BF16 = torch.bfloat16


class Work(NamedTuple):
    """Tokens, width, sublayers, sublayers a block, and whether gradients are taken."""

    tokens: int
    d: int
    layers: int
    S: int
    train: bool


WORKS = {
    "prefill": Work(8192, 7168, 128, 16, False),
    "decode": Work(128, 7168, 128, 16, False),
    "training": Work(8192, 2048, 64, 8, True),
}
DECODE_PLANS = ((0, 4), (0, 3), (0, 2), (0, 1), (2, 0), (4, 0))
"""(sources read in one pass, sources a merge reads itself): the decode step is timed with each."""


class Inputs(NamedTuple):
    """x `[T, d]`, queries and output norm weights `[L + 1, d]`, the gradient of the result; all bf16, from one seed."""

    x: torch.Tensor
    Q: torch.Tensor
    W: torch.Tensor
    dy: torch.Tensor


def inputs(work: Work, tokens: int | None = None) -> Inputs:
    """The same data in every process."""
    g = torch.Generator("cuda").manual_seed(work.d + work.tokens)
    T, rows, d = work.tokens if tokens is None else tokens, work.layers + 1, work.d
    x, dy = (torch.randn(T, d, device="cuda", generator=g).to(BF16) for _ in range(2))
    Q = (torch.randn(rows, d, device="cuda", generator=g) * 0.02).to(BF16)
    W = (1 + 0.1 * torch.randn(rows, d, device="cuda", generator=g)).to(BF16)
    return Inputs(x, Q, W, dy)


def drive(x, work, read, compact=False):
    """Block Attention Residuals by a function read(l, sources) that returns the normalised input of sublayer l.

    `compact` recomputes each block in the backward, for oracles that would not fit.
    """

    def block(first, *sources):
        part = None
        for l in range(first, first + work.S):
            u = update(read(l, [*sources] if part is None else [*sources, part]))
            part = u if part is None else part + u
        return part

    sources = [x]
    for first in range(0, work.layers, work.S):
        part = checkpoint(block, first, *sources, use_reentrant=False) if compact else block(first, *sources)
        sources.append(part)
    return read(work.layers, sources)


def dense(x, Q, W, work, standard=False, compact=False):
    """The stack from the equations in the dtype of x: fp64 as the oracle, bf16 as the yardstick of its rounding."""
    d, stat = work.d, torch.float64 if x.dtype == torch.float64 else torch.float32
    if standard:
        h, y = x, F.rms_norm(x, (d,), W[0], EPS)
        for l in range(work.layers):
            h = h + update(y)
            y = F.rms_norm(h, (d,), W[l + 1], EPS)
        return y

    def read(l, sources):
        v = torch.stack(sources)
        p = (F.rms_norm(v, (d,), None, EPS) * Q[l]).sum(-1, dtype=stat).softmax(0)
        return F.rms_norm((p[..., None].to(v.dtype) * v).sum(0), (d,), W[l], EPS)

    return drive(x, work, read, compact)


def peer(name, work, data):
    """read(l, sources) of a peer's operator; Q and W as lists of leaves, as their users would hold them."""
    d, Q, W = work.d, data.Q.unbind(0), data.W.unbind(0)
    if work.train:
        Q, W = ([t.clone().requires_grad_() for t in ts] for ts in (Q, W))
    one = torch.ones(d, device="cuda", dtype=BF16)
    if name == "fla-core":
        from fla.ops.attnres import fused_attnres

        return Q, W, lambda l, v: fused_attnres(Q[l], v, one, output_rms_weight=W[l], rms_eps=EPS)
    if name == "liger-kernel":
        from liger_kernel.ops.attn_res import LigerAttnResFunction

        return (
            Q,
            W,
            lambda l, v: F.rms_norm(LigerAttnResFunction.apply(torch.stack(v), Q[l], one, EPS), (d,), W[l], EPS),
        )
    if name == "fast-attnres":
        from attnres import attnres

        return Q, W, lambda l, v: F.rms_norm(attnres(v, Q[l], eps=EPS), (d,), W[l], EPS)
    raise ValueError(f"name: found {name!r}, expected one of {', '.join(PEERS)}")


def flash(work, data):
    """flash-attn-res: two phases over a bank, its autograd function for training."""
    d, layers, S = work.d, work.layers, work.S
    if work.train:
        from flash_attn_res.experimental.autograd import BlockAttentionResiduals

        class Sublayer(torch.nn.Module):
            def __init__(self, w):
                super().__init__()
                self.w = torch.nn.Parameter(w)

            def forward(self, h):
                return update(F.rms_norm(h, (d,), self.w, EPS))

        sublayers = [Sublayer(w) for w in data.W[:layers].clone().unbind(0)]
        Q, last = data.Q.clone().requires_grad_(), data.W[layers]
        weights = [p for m in sublayers for p in m.parameters()]

        def forward(x):
            y = BlockAttentionResiduals.apply(x[None], Q, sublayers, S, EPS, *weights)[0]
            return F.rms_norm(y, (d,), last, EPS)

        return Q, weights, forward
    from flash_attn_res.ops.phase_1 import phase_1_batched_attention_triton_op as phase1
    from flash_attn_res.ops.phase_2 import phase_2_online_softmax_merge_triton_op as phase2

    bank = torch.empty(layers // S + 1, 1, work.tokens, d, device="cuda", dtype=BF16)
    Q, W = data.Q, data.W

    def forward(x):
        bank[0, 0].copy_(x)
        for b in range(layers // S):
            o, lse = phase1(bank[: b + 1], Q[b * S : (b + 1) * S], EPS)
            part = None
            for i in range(S):
                h = o[i] if part is None else phase2(part, Q[b * S + i], o[i], lse[i], EPS)
                u = update(F.rms_norm(h, (d,), W[b * S + i], EPS))
                part = u if part is None else part + u
            bank[b + 1].copy_(part)
        return F.rms_norm(phase1(bank, Q[layers:], EPS)[0][0, 0], (d,), W[layers], EPS)

    return None, None, forward


class Step(NamedTuple):
    """run() gives y, or trains and gives (dx, dQ); `variant` tells apart several ways of one system."""

    variant: str
    run: object


def _trainer(forward, x, leaves, queries, dy):
    def run():
        for t in (x, *leaves):
            t.grad = None
        forward(x).backward(dy)
        return x.grad, queries()

    return run


def _peer_step(name, work, data):
    if name == "flash-attn-res":
        Q, weights, forward = flash(work, data)
        queries, leaves = (lambda: Q.grad), () if Q is None else (Q, *weights)
    else:
        Q, W, read = peer(name, work, data)
        queries, leaves = (lambda: torch.stack([q.grad for q in Q])), (*Q, *W)

        def forward(x):
            return drive(x, work, read)

    if not work.train:
        return [Step("", lambda: forward(data.x))]
    return [Step("", _trainer(forward, data.x.clone().requires_grad_(), leaves, queries, data.dy))]


def _liger_plain(work, data):
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    W = data.W.unbind(0)
    if work.train:
        W = [w.clone().requires_grad_() for w in W]

    def forward(x):
        h, y = x, F.rms_norm(x, (work.d,), W[0], EPS)
        for l in range(work.layers):
            y, h = LigerFusedAddRMSNormFunction.apply(update(y), h, W[l + 1], EPS, 0.0, "llama", False)
        return y

    if not work.train:
        return [Step("", lambda: forward(data.x))]
    return [Step("", _trainer(forward, data.x.clone().requires_grad_(), W, lambda: None, data.dy))]


def _kernels(work, data):
    x, Q, W, dy = data
    if work.train:
        run = train(x, Q, W, work.layers, work.S, dy)
        return [Step("", lambda: [t.grad for t in run()[:2]])]
    plans = ((0, 0),) if work.tokens > 1024 else DECODE_PLANS
    return [Step(f"one pass {h}, direct {n}", Inference(x, Q.float(), W, work.layers, work.S, h, n)) for h, n in plans]


def _streams(work, data):
    """What a user calls: AttnRes in training, InferenceState at inference."""
    x, Q, W, dy = data
    found = []
    plans = ((0, 0), (2, 0), (0, work.tokens)) if work.tokens <= 1024 else ((0, 0),)
    for one_pass, overlap in plans:
        schedule = Schedule.block(work.layers, work.S, one_pass_sources=one_pass)
        module = AttnRes(work.d, schedule, eps=EPS, device="cuda", dtype=BF16)
        with torch.no_grad():
            module.query.copy_(Q)
        norms = [w.clone().requires_grad_() for w in W] if work.train else W.unbind(0)

        def forward(x, make, norms=norms):
            stream = make(x, norms=norms[:-1])
            for l in range(work.layers):
                stream.write(l, update(stream.read(l)))
            return stream.output(norms[-1])

        if work.train:
            leaf = x.clone().requires_grad_()
            leaves = [*module.parameters(), *norms]
            run = _trainer(lambda x, m=module: forward(x, m), leaf, leaves, lambda m=module: m.query.grad, dy)
        else:
            state = InferenceState(schedule, module.reads(), work.tokens, overlap_tokens=overlap)
            run = lambda s=state: forward(x, s)  # noqa: E731
        found.append(Step(f"one pass {one_pass}{', overlapped' if overlap else ''}", run))
    return found


PEERS = ("liger-kernel", "fla-core", "flash-attn-res", "fast-attnres")
SYSTEMS = ("tilewise", "plain", "tilewise stream", "plain liger-kernel", *PEERS)


def steps(name: str, work: Work, data: Inputs) -> list[Step]:
    """How a system does a work; empty if it has nothing for it."""
    if name == "plain":
        return [] if work.train else [Step("", plain(data.x, data.W, work.layers))]
    if name == "plain liger-kernel":
        return _liger_plain(work, data)
    if name == "tilewise":
        return _kernels(work, data)
    return _streams(work, data) if name == "tilewise stream" else _peer_step(name, work, data)
