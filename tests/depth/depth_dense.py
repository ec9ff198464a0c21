"""What PyTorch computes when sources are stacked and everything stays in their dtype: the measure of error budgets."""

import torch
from torch.nn.functional import rms_norm


def _fold(w, g, dtype):
    return (w if g is None else w * g).to(dtype)


def _norm(h, w, eps):
    return h if w is None else rms_norm(h, h.shape[-1:], w.to(h.dtype), eps)


def phase1(v, w, g=None, *, eps=1e-6):
    v = torch.stack(list(v))
    s = torch.einsum("n...d,sd->sn...", rms_norm(v, v.shape[-1:], None, eps), _fold(w, g, v.dtype))
    return torch.einsum("sn...,n...d->s...d", s.softmax(1), v), s.logsumexp(1)


def mix(v, w, g=None, *, eps=1e-6):
    return phase1(v, w[None], None if g is None else g[None], eps=eps)[0][0]


def mix_norm(v, w, g=None, o=None, *, eps=1e-6, output_eps=None):
    return _norm(mix(v, w, g, eps=eps), o, eps if output_eps is None else output_eps)


def mix_update(u, p, v, w, g=None, o=None, *, eps=1e-6, output_eps=None):
    p = u if p is None else p + u
    return p, mix_norm([*v, p], w, g, o, eps=eps, output_eps=output_eps)


def phase2(u, p, o1, lse, w, g=None, o=None, *, eps=1e-6, output_eps=None):
    p = u if p is None else p + u
    s = rms_norm(p, p.shape[-1:], None, eps) @ _fold(w, g, p.dtype)
    h = o1 + torch.sigmoid(s - lse.to(p.dtype))[..., None] * (p - o1)
    return p, _norm(h, o, eps if output_eps is None else output_eps)


def phase2_first(o1, o=None, *, output_eps=1e-6):
    return _norm(o1, o, output_eps)
