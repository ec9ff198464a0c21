"""Every differentiable operator of `tilewise.depth` as a call of one set of tensors: outputs and gradients three times.

On any device; used by the tests on a GPU, by a small run of theirs without one, and by `benchmarks/depth_checks.py`.
"""

import depth_dense as dense
import torch

from tilewise import depth
from tilewise.depth import reference as R


def tensors(n, S, T, d, dtype, device, correlation=0.0):
    """v, w, g, o, u, p: sources with this correlation, queries that make scores of about 2, weights near one."""

    def normal(*shape):
        return torch.randn(*shape, device=device)

    base, c = normal(T, d), correlation
    v = [(c * base + (1 - c * c) ** 0.5 * normal(T, d)).to(dtype) for _ in range(n)]
    w, g = (2 * normal(S, d) / d**0.5).to(dtype), (1 + 0.2 * normal(S, d)).to(dtype)
    o = (1 + 0.2 * normal(d)).to(dtype)
    return v, w, g, o, normal(T, d).to(dtype), normal(T, d).to(dtype)


def calls(v, w, g, o, u, p):
    """Name → (function of (module, leaves, options), leaves, how many of the last leaves are sources)."""
    kw, n = {"output_eps": 1e-5}, len(v)
    o1, lse = R.phase1(v, w, g)
    merged = [u, p, o1[0], lse[0], w[0], g[0], o]
    return {
        "mix": (lambda f, x, k: f.mix(x[2:], x[0], x[1], **k), [w[0], g[0], *v], n),
        "mix_update": (
            lambda f, x, k: f.mix_update(x[0], x[1], x[5:], *x[2:5], **kw, **k), [u, p, w[0], g[0], o, *v], n
        ),
        "phase1": (lambda f, x, k: f.phase1(x[2:], x[0], x[1], **k), [w, g, *v], n),
        "phase2": (lambda f, x, k: f.phase2(*x, **kw, **k), merged, 0),
        "phase2 second": (lambda f, x, k: f.phase2(*x, **kw, **k), [u, None, *merged[2:]], 0),
        "phase2_first": (lambda f, x, k: f.phase2_first(*x, **k), [o1[0], o], 0),
    }  # fmt: skip


def results(call, leaves, sources, impl):
    """(got, dense in the same dtype, oracle in fp64) for every output, then for the gradient of every leaf.

    Gradients of sources are one tensor: of 129 that are judged apart, the largest errors of some are far above dense
    PyTorch's in the same source by chance alone.
    """
    dtype, device = leaves[0].dtype, leaves[0].device

    def run(f, xs, **kw):
        xs = [None if x is None else x.detach().clone().requires_grad_() for x in xs]
        outs = call(f, xs, kw)
        outs = outs if isinstance(outs, tuple) else (outs,)
        torch.manual_seed(1)
        seeds = [torch.randn(x.shape, device=device).to(dtype).to(x.dtype) for x in outs]
        live = [x for x in xs if x is not None]
        grads = torch.autograd.grad(outs, live, seeds, allow_unused=True)
        found = [*outs, *(torch.zeros_like(x) if g is None else g for x, g in zip(live, grads, strict=True))]
        return [*found[: len(found) - sources], *([torch.stack(found[-sources:])] if sources else [])]

    got = run(depth, leaves, impl=impl)
    low = run(dense, leaves)
    exact = run(R, [None if x is None else x.double() for x in leaves])
    # A gradient in fp32 of a function of bf16 data is judged by bf16's rounding unit.
    return [(a.to(dtype), b, c) for a, b, c in zip(got, low, exact, strict=True)]


def inference_results(v, w, g, o, u, p, impl):
    """Name → the same three, of what has no gradient: scores taken ahead, and the serving contract."""
    kw, n = {"impl": impl}, len(v)
    b, s = depth.complete(u, p, w, g, **kw)
    every = torch.cat([depth.scores(v, w, g, **kw), s[:, None]], 1)
    got = depth.phase1_from_scores([*v, b], every, **kw)
    low, exact = dense.phase1([*v, b], w, g), R.phase1([x.double() for x in (*v, b)], w.double(), g.double())
    served = []
    for f, kind, options in ((depth, u.dtype, kw), (R, u.dtype, {}), (R, torch.float64, {})):
        prefix, bank = p.to(kind, copy=True), torch.stack([*v, u], 1).to(kind)
        weights = (x.to(kind) for x in (g[0], w[0], o))
        served.append(f.fused_attn_res(prefix, u.to(kind), bank, *weights, n, n, 1e-5, 1e-6, **options))
    return {"ahead o1": (got[0], low[0], exact[0]), "ahead lse": (got[1], low[1], exact[1]), "serve": tuple(served)}
