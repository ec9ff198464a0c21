"""torch.library contracts of the depth operators: schema, implementation, fake. Tensors in the caller's shape.

Every op takes `impl` (auto | triton | eager) and picks the backend when it runs: `auto` is Triton on a CUDA device that
can run it. `q` is always the folded query w * g in the statistics' dtype. An output that a call does not have (a
prefix that is no sum, the gradient of an absent norm weight) is an empty tensor, because a schema has fixed outputs.
"""

from __future__ import annotations

import os
from types import ModuleType

import torch
from torch import Tensor

from tilewise.depth import eager
from tilewise.depth.checks import check_eps, check_impl
from tilewise.depth.reference import fold_queries

__all__ = ["backend", "check_call", "fold", "narrowed", "owned", "triton_reasons"]

MAX_WIDTH = 16384
_lib = torch.library.Library("tilewise", "FRAGMENT")


def triton_reasons(x: Tensor) -> list[str]:
    """Why the Triton kernels cannot take tensors like `x` `[..., d]`; empty if they can."""
    reasons = []
    if x.device.type != "cuda" and not (x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        reasons.append(f"device {x.device}, the kernels need cuda")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(f"dtype {x.dtype}, the kernels take float16, bfloat16 and float32")
    if x.shape[-1] % 8 or x.shape[-1] > MAX_WIDTH:
        reasons.append(f"d = {x.shape[-1]}, the kernels take multiples of 8 up to {MAX_WIDTH}")
    return reasons


def check_call(impl: str, x: Tensor, **epsilons: float | None) -> None:
    """Raise ValueError if `impl` is unknown, is `triton` and cannot take tensors like `x`, or an epsilon is wrong."""
    check_impl(impl)
    for name, eps in epsilons.items():
        if eps is not None or name == "eps":
            check_eps(name, eps)
    if impl == "triton" and (reasons := triton_reasons(x)):
        raise ValueError(f"impl: 'triton' cannot run this call: {'; '.join(reasons)}; impl='eager' or 'auto' can")


def fold(query: Tensor, key_weight: Tensor | None, dtype: torch.dtype, own: bool = False) -> Tensor:
    """w * g in the dtype of the statistics of sources of `dtype`.

    `own`: never the caller's query itself, for functions that score 16-bit sources. What the kernels derive from a
    query is remembered with it, and neither a write through `.data` nor a captured graph would be noticed.
    """
    if own and key_weight is None and query.dtype == torch.float32 and dtype.itemsize == 2:
        query = query.clone()
    # The kernels read queries by rows.
    q = fold_queries(query, key_weight, dtype)
    return q.to(torch.float64 if dtype == torch.float64 else torch.float32).contiguous()


def narrowed(weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The weight of a norm as the operators take it: in fp64 beside sources in fp64 only."""
    wide = weight is not None and weight.dtype == torch.float64 and dtype != torch.float64
    return weight.float() if wide else weight


def backend(impl: str, x: Tensor) -> ModuleType:
    """The module that runs the call: `tilewise.depth.triton.launch` or `tilewise.depth.eager`."""
    if impl == "triton" or (impl == "auto" and x.device.type == "cuda" and not triton_reasons(x)):
        from tilewise.depth.triton import launch

        return launch
    return eager


def _flat(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.reshape(-1, x.shape[-1])


def _flats(xs: list[Tensor]) -> list[Tensor]:
    return [x.reshape(-1, x.shape[-1]) for x in xs]


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def owned(x: Tensor, shape: torch.Size) -> Tensor:
    """A fresh contiguous result in another shape, which autograd takes for no view: its owner may work in place."""
    x = x.contiguous()
    return x if x.shape == shape else torch.ops.aten._unsafe_view(x, shape)


def _shaped(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else owned(x, like.shape)


def _stat(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _define(schema: str, run, fake) -> None:
    name = schema.split("(")[0]
    _lib.define(schema)
    _lib.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{name}", fake, lib=_lib)


def _mix(sources, update, prefix, q, w, eps, output_eps, impl):
    like = sources[0] if sources else prefix if update is None else update
    p, y = backend(impl, like).mix_fwd(_flats(sources), _flat(update), _flat(prefix), q, w, eps, output_eps)
    summed = update is not None and prefix is not None
    return _shaped(p if summed else None, like), owned(y, like.shape)


def _mix_fake(sources, update, prefix, q, w, eps, output_eps, impl):
    like = sources[0] if sources else prefix if update is None else update
    p = like.new_empty(like.shape if update is not None and prefix is not None else 0)
    return p, like.new_empty(like.shape)


def _mix_bwd(dy, dp, sources, p, q, w, eps, output_eps, impl):
    run = backend(impl, dy).mix_bwd
    grads, dprefix, dq, dw = run(_flat(dy), _flat(dp), _flats(sources), _flat(p), q, w, eps, output_eps)
    grads = [owned(g, v.shape) for g, v in zip(grads, sources, strict=True)]
    return grads, _shaped(dprefix, dy), dq, _or_empty(dw, q)


def _mix_bwd_fake(dy, dp, sources, p, q, w, eps, output_eps, impl):
    dprefix = dy.new_empty(0 if p is None else dy.shape)
    dw = torch.empty_like(q) if w is not None else q.new_empty(0)
    return [v.new_empty(v.shape) for v in sources], dprefix, torch.empty_like(q), dw


def _scores(sources, q, eps, impl):
    s, r = backend(impl, sources[0]).scores(_flats(sources), q, eps)
    tokens = sources[0].shape[:-1]
    return s.reshape(*s.shape[:2], *tokens), r.reshape(len(sources), *tokens)


def _scores_fake(sources, q, eps, impl):
    tokens, dtype = sources[0].shape[:-1], _stat(sources[0])
    n = len(sources)
    return q.new_empty((q.shape[0], n, *tokens), dtype=dtype), q.new_empty((n, *tokens), dtype=dtype)


def _complete(update, prefix, q, eps, impl):
    b, s, r = backend(impl, update).complete(_flat(update), _flat(prefix), q, eps)
    tokens = update.shape[:-1]
    return owned(b, update.shape), s.reshape(len(q), *tokens), r.reshape(tokens)


def _complete_fake(update, prefix, q, eps, impl):
    tokens, dtype = update.shape[:-1], _stat(update)
    s = q.new_empty((q.shape[0], *tokens), dtype=dtype)
    return update.new_empty(update.shape), s, q.new_empty(tokens, dtype=dtype)


def _combine(sources, s, impl):
    o1, lse = backend(impl, sources[0]).combine(_flats(sources), s.flatten(2) if s.ndim > 2 else s[..., None])
    shape = sources[0].shape
    return owned(o1, torch.Size((len(s), *shape))), owned(lse, torch.Size((len(s), *shape[:-1])))


def _combine_fake(sources, s, impl):
    shape = sources[0].shape
    return sources[0].new_empty((s.shape[0], *shape)), s.new_empty((s.shape[0], *shape[:-1]))


def _phase1_bwd(do1, dlse, sources, q, s, lse, r, impl):
    T = r.shape[1:].numel()
    flat = [None if x is None else x.reshape(*x.shape[:k], T) for x, k in ((dlse, 1), (s, 2), (lse, 1), (r, 1))]
    do = [x.reshape(-1, x.shape[-1]) for x in do1.unbind(0)]
    grads, dq = backend(impl, do1).phase1_bwd(do, flat[0], _flats(sources), q, *flat[1:])
    return [owned(g, v.shape) for g, v in zip(grads, sources, strict=True)], dq


def _phase1_bwd_fake(do1, dlse, sources, q, s, lse, r, impl):
    return [v.new_empty(v.shape) for v in sources], torch.empty_like(q)


def _phase2(update, prefix, o1, lse, q, w, eps, output_eps, impl):
    lse = None if lse is None else lse.reshape(-1)
    run = backend(impl, o1).phase2_fwd
    p, y = run(_flat(update), _flat(prefix), _flat(o1), lse, q, w, eps, output_eps)
    return _shaped(p if prefix is not None else None, o1), owned(y, o1.shape)


def _phase2_fake(update, prefix, o1, lse, q, w, eps, output_eps, impl):
    return o1.new_empty(0 if prefix is None else o1.shape), o1.new_empty(o1.shape)


def _phase2_bwd(dy, dp, p, o1, lse, q, w, eps, output_eps, impl):
    flat_lse = None if lse is None else lse.reshape(-1)
    run = backend(impl, dy).phase2_bwd
    dprefix, do, dlse, dq, dw = run(_flat(dy), _flat(dp), _flat(p), _flat(o1), flat_lse, q, w, eps, output_eps)
    dlse = dy.new_empty(0, dtype=_stat(dy)) if dlse is None else dlse.reshape(dy.shape[:-1])
    stat = dy.new_empty(0, dtype=_stat(dy))
    return _shaped(dprefix, dy), owned(do, dy.shape), dlse, _or_empty(dq, stat), _or_empty(dw, stat)


def _phase2_bwd_fake(dy, dp, p, o1, lse, q, w, eps, output_eps, impl):
    d, stat = dy.shape[-1], _stat(dy)
    dprefix = dy.new_empty(0 if p is None else dy.shape)
    dlse = dy.new_empty(0 if p is None else dy.shape[:-1], dtype=stat)
    dq = dy.new_empty(0 if p is None else d, dtype=stat)
    return dprefix, dy.new_empty(dy.shape), dlse, dq, dy.new_empty(0 if w is None else d, dtype=stat)


def _serve(prefix, delta, blocks, q, g, w, num_blocks, block_write_idx, eps, output_eps, impl):
    run = backend(impl, prefix).serve_
    return run(prefix, delta, blocks, q, g, w, num_blocks, block_write_idx, eps, output_eps)


def _serve_fake(prefix, delta, blocks, q, g, w, num_blocks, block_write_idx, eps, output_eps, impl):
    return prefix.new_empty(prefix.shape)


_NORM = "float eps, float output_eps, str impl"
_define(
    f"depth_mix(Tensor[] sources, Tensor? update, Tensor? prefix, Tensor q, Tensor? w, {_NORM}) -> (Tensor, Tensor)",
    _mix,
    _mix_fake,
)
_define(
    f"depth_mix_bwd(Tensor dy, Tensor? dp, Tensor[] sources, Tensor? p, Tensor q, Tensor? w, {_NORM})"
    " -> (Tensor[], Tensor, Tensor, Tensor)",
    _mix_bwd,
    _mix_bwd_fake,
)
_define("depth_scores(Tensor[] sources, Tensor q, float eps, str impl) -> (Tensor, Tensor)", _scores, _scores_fake)
_define(
    "depth_complete(Tensor update, Tensor prefix, Tensor q, float eps, str impl) -> (Tensor, Tensor, Tensor)",
    _complete,
    _complete_fake,
)
_define("depth_combine(Tensor[] sources, Tensor s, str impl) -> (Tensor, Tensor)", _combine, _combine_fake)
_define(
    "depth_phase1_bwd(Tensor do1, Tensor? dlse, Tensor[] sources, Tensor q, Tensor s, Tensor lse, Tensor r, str impl)"
    " -> (Tensor[], Tensor)",
    _phase1_bwd,
    _phase1_bwd_fake,
)
_define(
    f"depth_phase2(Tensor? update, Tensor? prefix, Tensor o1, Tensor? lse, Tensor? q, Tensor? w, {_NORM})"
    " -> (Tensor, Tensor)",
    _phase2,
    _phase2_fake,
)
_define(
    f"depth_phase2_bwd(Tensor dy, Tensor? dp, Tensor? p, Tensor o1, Tensor? lse, Tensor? q, Tensor? w, {_NORM})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _phase2_bwd,
    _phase2_bwd_fake,
)
_define(
    "depth_serve_(Tensor(a!) prefix, Tensor? delta, Tensor(b!) blocks, Tensor q, Tensor? g, Tensor? w,"
    " int num_blocks,"
    f" int block_write_idx, {_NORM}) -> Tensor",
    _serve,
    _serve_fake,
)
