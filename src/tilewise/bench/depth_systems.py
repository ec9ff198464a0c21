"""The systems of the depth set in this package and in PyTorch itself; a builder takes a work and its inputs.

What is built runs the whole pass: forward() ↦ y, differentiable in `leaves` if the work trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..depth import InferenceState, Schedule, fused_attn_res
from ..nn import AttnRes
from .depth_work import EPS, Inputs, Work, dense_read, drive, update

__all__ = ["SYSTEMS", "Builder", "Built", "leaves_of", "plain", "serving"]


class Built(NamedTuple):
    """forward() ↦ y; the leaves by name; bytes that the system holds between runs."""

    forward: Callable[[], Tensor]
    leaves: dict[str, Tensor]
    held: int = 0


Builder = Callable[[Work, Inputs], Built]


def leaves_of(work: Work, data: Inputs) -> dict[str, Tensor]:
    """x, queries and norms as leaves of their own."""
    return {name: getattr(data, name).clone().requires_grad_(work.train) for name in ("x", "query", "norm")}


def schedule_of(work: Work, one_pass: int) -> Schedule:
    if not work.block:
        return Schedule.full_attention(work.sublayers)
    return Schedule.block(work.sublayers, work.block, one_pass_sources=one_pass)


def streams(work: Work, data: Inputs, *, one_pass: int = 0, overlap: bool = False) -> Built:
    """What a user calls: AttnRes in training, InferenceState at inference."""
    leaves = leaves_of(work, data)
    schedule = schedule_of(work, one_pass)
    module = AttnRes(work.d, schedule, eps=EPS, device=data.x.device, dtype=data.x.dtype)
    module.query = nn.Parameter(leaves["query"].detach(), requires_grad=work.train)
    leaves["query"] = module.query
    make, held = module, 0
    if not work.train:
        make = InferenceState(schedule, module.reads(), work.tokens, overlap_tokens=work.tokens if overlap else 0)
        held = make.nbytes

    def forward() -> Tensor:
        norms = leaves["norm"].unbind(0)
        stream = make(leaves["x"], norms=norms[:-1])
        for l in range(work.sublayers):
            stream.write(l, update(stream.read(l)))
        return stream.output(norms[-1])

    return Built(forward, leaves, held)


def serving(attn_res: Callable[..., Tensor], work: Work, data: Inputs) -> Built:
    """The contract of serving engines: one call a sublayer, in place on a prefix and on a bank `[T, NB, d]`.

    A block's last call writes the finished prefix into the bank while it reads it; the next update starts a prefix.
    """
    leaves, (T, d) = leaves_of(work, data), data.x.shape
    count = len(list(work.blocks()))
    bank = torch.zeros(T, count, d, device=data.x.device, dtype=data.x.dtype)
    one = torch.ones(d, device=data.x.device, dtype=data.x.dtype)
    query, norm = leaves["query"].unbind(0), leaves["norm"].unbind(0)

    @torch.no_grad()
    def forward() -> Tensor:
        bank[:, 0].copy_(leaves["x"])
        y = F.rms_norm(leaves["x"], (d,), norm[0], EPS)
        prefix = delta = None
        for b, block in enumerate(work.blocks()):
            for l in block:
                if l:
                    first = l == block.start
                    y = attn_res(prefix, delta, bank, one, query[l], norm[l], b if first else b + 1,
                                 b if first else -1, EPS, EPS)  # fmt: skip
                    prefix = None if first else prefix
                u = update(y)
                prefix, delta = (u, None) if prefix is None else (prefix, u)
        return attn_res(prefix, delta, bank, one, query[-1], norm[-1], count, -1, EPS, EPS)

    return Built(forward, leaves, bank.nbytes)


def one_read(make: Callable[[Work, Inputs], Callable[[Tensor, Tensor, Sequence[Tensor]], Tensor]]) -> Builder:
    """A system that reads all sources in one call: (query, norm, sources) ↦ normalised input."""

    def build(work: Work, data: Inputs) -> Built:
        leaves, call = leaves_of(work, data), make(work, data)

        def forward() -> Tensor:
            query, norm = leaves["query"].unbind(0), leaves["norm"].unbind(0)
            return drive(leaves["x"], work, lambda l, v: call(query[l], norm[l], v))

        return Built(forward, leaves)

    return build


@cache
def _compiled() -> Callable:
    """One graph for each number of sources."""
    import torch._dynamo.config

    torch._dynamo.config.recompile_limit = 512
    return torch.compile(lambda query, norm, *v: dense_read(query, norm, v), dynamic=False)


def _dense_add_norm(u: Tensor, h: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    h = h + u
    return h, F.rms_norm(h, h.shape[-1:], w, eps)


def plain(work: Work, data: Inputs, add_norm: Callable[..., tuple[Tensor, Tensor]] | None = None) -> Built:
    """The plain residual through a fused add + RMSNorm, (u, h, w, eps) ↦ (h + u, RMSNorm(h + u) · w).

    The default is a kernel of the benchmark's own, in place at inference; off a CUDA device it is two operators.
    """
    leaves = leaves_of(work, data)
    del leaves["query"]
    x, weight = leaves["x"], leaves["norm"]
    if x.is_cuda and add_norm is None:
        # Triton is there on a CUDA device only.
        from .plain_residual import add_rms_norm, add_rms_norm_

        if not work.train:
            return _in_place(work, leaves, add_rms_norm_)
        add_norm = add_rms_norm
    step = add_norm or _dense_add_norm

    def forward() -> Tensor:
        w = weight.unbind(0)
        h, y = x, F.rms_norm(x, (work.d,), w[0], EPS)
        for l in range(work.sublayers):
            h, y = step(update(y), h, w[l + 1], EPS)
        return y

    return Built(forward, leaves)


def _in_place(work: Work, leaves: dict[str, Tensor], add_norm: Callable[..., None]) -> Built:
    x, w = leaves["x"], leaves["norm"].unbind(0)
    h, y = torch.empty_like(x), torch.empty_like(x)

    def forward() -> Tensor:
        h.copy_(x)
        u = update(F.rms_norm(x, (work.d,), w[0], EPS))
        for l in range(work.sublayers):
            add_norm(u, h, w[l + 1], y, EPS)
            u = update(y) if l + 1 < work.sublayers else u
        return y

    return Built(forward, leaves, h.nbytes + y.nbytes)


SYSTEMS: dict[str, Builder] = {
    "tilewise": streams,
    "tilewise-one-pass": partial(streams, one_pass=2),
    "tilewise-overlap": partial(streams, overlap=True),
    "tilewise-serving": partial(serving, fused_attn_res),
    "plain": plain,
    "eager": one_read(lambda work, data: dense_read),
    "compile": one_read(lambda work, data: lambda query, norm, v: _compiled()(query, norm, *v)),
}
