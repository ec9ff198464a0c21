"""One autograd.Function an operator, over the contracts of `ops`; backwards are explicit formulas.

A forward over any number of sources takes `(ctx, *args)`: without gradients Dynamo (torch 2.13) calls it without `ctx`
if there are as many arguments as its signature has parameters, which `(ctx, a, b, *sources)` has for two sources.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.depth import ops  # noqa: F401  (registers torch.ops.tilewise.depth_*)
from tilewise.depth.eager import exact_products
from tilewise.depth.reference import wide
from tilewise.once import once

__all__ = ["Combine", "Complete", "Mix", "Phase1", "Phase2", "Scores"]

_op = torch.ops.tilewise


def _if(there: bool, x: Tensor) -> Tensor | None:
    """An output that a contract may lack; an empty tensor alone does not say so: there may be no tokens."""
    return x if there else None


class Mix(torch.autograd.Function):
    """(p, y) = mix over the sources and p = prefix + update; p is None without an update."""

    @staticmethod
    def forward(ctx, *args):
        eps, output_eps, impl, update, prefix, q, w, *sources = args
        summed, y = _op.depth_mix(list(sources), update, prefix, q, w, eps, output_eps, impl)
        p = None if update is None else update if prefix is None else summed
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(p, q, w, *sources)
        ctx.args = eps, output_eps, impl
        ctx.prefixed = prefix is not None
        return p, y

    @staticmethod
    @once
    def backward(ctx, dp, dy):
        p, q, w, *sources = ctx.saved_tensors
        if dy is None:
            if dp is None:
                return (None,) * (7 + len(sources))
            dy = torch.zeros_like(p)
        grads, dprefix, dq, dw = _op.depth_mix_bwd(dy.contiguous(), dp, sources, p, q, w, *ctx.args)
        dprefix, dw = _if(p is not None, dprefix), _if(w is not None, dw)
        return None, None, None, dprefix, dprefix if ctx.prefixed else None, dq, _like(dw, w), *grads


class Phase1(torch.autograd.Function):
    """(o1, lse); saves scores, lse and rstd (fp32 scalars), never o1."""

    @staticmethod
    def forward(ctx, *args):
        eps, impl, q, *sources = args
        s, r = _op.depth_scores(list(sources), q, eps, impl)
        o1, lse = _op.depth_combine(list(sources), s, impl)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, s, lse, r, *sources)
        ctx.impl = impl
        return o1, lse

    @staticmethod
    @once
    def backward(ctx, do1, dlse):
        q, s, lse, r, *sources = ctx.saved_tensors
        if do1 is None and dlse is None:
            return (None,) * (3 + len(sources))
        if do1 is None:
            do1 = sources[0].new_zeros((q.shape[0], *sources[0].shape))
        dlse = None if dlse is None else dlse.contiguous()
        grads, dq = _op.depth_phase1_bwd(do1.contiguous(), dlse, sources, q, s, lse, r, ctx.impl)
        return None, None, dq, *grads


class Phase2(torch.autograd.Function):
    """(p, y) of the merge; without an update, the block's first sublayer."""

    @staticmethod
    def forward(ctx, eps, output_eps, impl, update, prefix, o1, lse, q, w):
        summed, y = _op.depth_phase2(update, prefix, o1, lse, q, w, eps, output_eps, impl)
        p = None if update is None else update if prefix is None else summed
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(p, o1, lse, q, w)
        ctx.args = eps, output_eps, impl
        ctx.prefixed = prefix is not None
        return p, y

    @staticmethod
    @once
    def backward(ctx, dp, dy):
        p, o1, lse, q, w = ctx.saved_tensors
        if dy is None and dp is None:
            return (None,) * 9
        dy = torch.zeros_like(o1) if dy is None else dy.contiguous()
        dprefix, do, dlse, dq, dw = _op.depth_phase2_bwd(dy, dp, p, o1, lse, q, w, *ctx.args)
        dprefix, dlse, dq = (_if(p is not None, x) for x in (dprefix, dlse, dq))
        dw = _if(w is not None, dw)
        return None, None, None, dprefix, dprefix if ctx.prefixed else None, do, dlse, dq, _like(dw, w)


class Scores(torch.autograd.Function):
    """Scores alone, for queries that come later; the backward is plain PyTorch, source by source."""

    @staticmethod
    def forward(ctx, *args):
        eps, impl, q, *sources = args
        s, r = _op.depth_scores(list(sources), q, eps, impl)
        ctx.save_for_backward(q, s, r, *sources)
        return s

    @staticmethod
    @once
    def backward(ctx, ds):
        q, s, r, *sources = ctx.saved_tensors
        dq, grads = _scores_bwd(ds, q, s, r, sources)
        return None, None, dq, *grads


class Complete(torch.autograd.Function):
    """(b, s): b = prefix + update and its scores against later queries."""

    @staticmethod
    def forward(ctx, eps, impl, q, update, prefix):
        b, s, r = _op.depth_complete(update, prefix, q, eps, impl)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, s, r, b)
        return b, s

    @staticmethod
    @once
    def backward(ctx, db, ds):
        q, s, r, b = ctx.saved_tensors
        if ds is None:
            return None, None, None, db, db
        dq, (grad,) = _scores_bwd(ds[:, None], q, s[:, None], r[None], [b])
        if db is not None:
            grad = (wide(db) + wide(grad)).to(b.dtype)
        return None, None, dq, grad, grad


class Combine(torch.autograd.Function):
    """(o1, lse) from scores; the backward is plain PyTorch, source by source."""

    @staticmethod
    def forward(ctx, *args):
        impl, s, *sources = args
        o1, lse = _op.depth_combine(list(sources), s, impl)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(s, *sources)
        return o1, lse

    @staticmethod
    @once
    def backward(ctx, do1, dlse):
        s, *sources = ctx.saved_tensors
        if do1 is None and dlse is None:
            return (None,) * (2 + len(sources))
        a = s.softmax(1)
        if do1 is None:
            return None, a * dlse[:, None], *([None] * len(sources))
        do = wide(do1)
        inner = torch.stack([(do * wide(v)).sum(-1) for v in sources], 1)
        ds = a * (inner - (a * inner).sum(1, keepdim=True) + (0 if dlse is None else dlse[:, None]))
        grads = [(a[:, j, ..., None] * do).sum(0).to(v.dtype) for j, v in enumerate(sources)]
        return None, ds, *grads


@exact_products
def _scores_bwd(ds, q, s, r, sources):
    dq, grads = torch.zeros_like(q), []
    for j, v in enumerate(sources):
        v_ = wide(v).reshape(-1, v.shape[-1])
        dr = (ds[:, j] * r[j]).reshape(len(ds), v_.shape[0])
        dq = dq + dr @ v_
        shrink = ((ds[:, j] * s[:, j]).sum(0) * r[j].square() / v.shape[-1]).reshape(-1)
        grads.append((dr.mT @ q - shrink[:, None] * v_).to(v.dtype).reshape(v.shape))
    return dq, grads


def _like(dw: Tensor | None, w: Tensor | None) -> Tensor | None:
    return None if dw is None else dw.to(w.dtype)
