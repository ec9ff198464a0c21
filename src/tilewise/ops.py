"""Operator contracts ``tilewise::attn_fwd`` and ``tilewise::attn_bwd``, and the one autograd.Function around them.

The relative terms travel as a list of tensors and a string (:func:`tilewise.terms.spec_of`), so that two operators
serve every mechanism, map and length. The Triton kernels are compiled once for lengths that end with a block of keys
and once for those that do not (:mod:`tilewise.triton`). Implementations are imported on first use.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .call import Call, Options
from .flops import register_when_counted
from .mask import Mask
from .terms import ports_of

__all__ = ["attend"]

_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor[] tensors, Tensor? bounds, Tensor? keys, Tensor? dense, Tensor? seed, "
    "str spec, float scale, SymInt offset, SymInt left, SymInt right, float dropout_p, str options, str impl"
)
_lib = torch.library.Library("tilewise", "FRAGMENT")
_lib.define(f"attn_fwd({_CALL}) -> (Tensor, Tensor, Tensor)")
_lib.define(
    f"attn_bwd(Tensor do, Tensor? dlse, Tensor o, Tensor lse, Tensor kept, bool[] need, {_CALL}) "
    "-> (Tensor, Tensor, Tensor, Tensor[])"
)


def _call(q, k, v, tensors, bounds, keys, dense, seed, spec, scale, offset, left, right, dropout_p, options) -> Call:
    mask = Mask(int(left), int(right), bounds, keys, dense)
    return Call(q, k, v, tuple(ports_of(spec, tensors)), mask, scale, int(offset), dropout_p, seed, Options.of(options))


def _implementation(name: str):
    if name == "triton":
        from . import triton as implementation
    else:
        from . import blocked as implementation
    return implementation


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """O laid out as [B, Tq, H, d_v] in memory, so that merging the heads afterwards copies nothing, and lse."""
    B, H, Tq, _ = q.shape
    lse = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((B, Tq, H, v.shape[-1])).transpose(1, 2), q.new_empty((B, H, Tq), dtype=lse)


def _kept(call: Call, impl: str) -> Tensor:
    """Room for what the forward keeps for the backward, empty where that is nothing."""
    if impl != "triton" or call.options.projections == "recompute" or not call.ports:
        return call.q.new_empty(0)
    count, dtype = _implementation(impl).kept(call)
    return call.q.new_empty(count, dtype=dtype)


def _gradients(q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], need: list[bool]) -> list[Tensor]:
    """One buffer a gradient; an empty one where nobody asked."""
    return [_buffer(x) if wanted else x.new_empty(0) for x, wanted in zip((q, k, v, *tensors), need, strict=True)]


def _buffer(x: Tensor) -> Tensor:
    """Room for the gradient of x in its layout, but with rows that lie in one piece: the kernels write them so."""
    grad = torch.empty_like(x)
    return grad if grad.ndim == 0 or grad.stride(-1) == 1 else x.new_empty(x.shape)


def _forward(*args):
    *args, impl = args
    call = _call(*args)
    if impl != "triton" and any(port.biased for port in call.ports):
        raise ValueError(f"spec leaves biases to impl={impl!r}; expected impl='triton', or sums as lower() forms them")
    o, lse = _outputs(call.q, call.v)
    kept = _kept(call, impl)
    if o.numel():
        _implementation(impl).forward(call, o, lse, *((kept,) if kept.numel() else ()))
    return o, lse, kept


def _backward(do, dlse, o, lse, kept, need, *args):
    *args, impl = args
    call = _call(*args)
    grads = _gradients(call.q, call.k, call.v, call.tensors, need)
    if o.numel():
        _implementation(impl).backward(call, do, dlse, o, lse, need, grads, *((kept,) if kept.numel() else ()))
    else:
        for grad in grads:
            grad.zero_()
    return *grads[:3], grads[3:]


_lib.impl("attn_fwd", _forward, "CompositeExplicitAutograd")
_lib.impl("attn_bwd", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("tilewise::attn_fwd", lib=_lib)
def _(q, k, v, tensors, bounds, keys, dense, seed, spec, scale, offset, left, right, dropout_p, options, impl):
    # No mask changes a size, and the offset stays symbolic.
    call = Call(q, k, v, tuple(ports_of(spec, tensors)), Mask(), scale, offset, options=Options.of(options))
    return *_outputs(q, v), _kept(call, impl)


@torch.library.register_fake("tilewise::attn_bwd", lib=_lib)
def _(do, dlse, o, lse, kept, need, q, k, v, tensors, *rest):
    grads = _gradients(q, k, v, tensors, need)
    return *grads[:3], grads[3:]


def _batched(*args):
    raise RuntimeError(
        "tilewise.attention has no rule for batches of gradients or of calls (is_grads_batched, vectorize=True, vmap): "
        "take them one by one, or with impl='reference'"
    )


for _name in ("attn_fwd", "attn_bwd"):
    for _key in ("Batched", "FuncTorchBatched"):
        _lib.impl(_name, _batched, _key)


register_when_counted()


class _NotTwice(torch.autograd.Function):
    """A gradient that depends on the inputs, and refuses to be differentiated with respect to them."""

    @staticmethod
    def forward(ctx, grad, *inputs):
        return grad.clone()

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError(
            "tilewise.attention is differentiable once: its backward has no gradient of its own. "
            "impl='reference' can be differentiated any number of times"
        )


def _save(ctx, inputs, output) -> None:
    q, k, v, tensors, bounds, keys, dense, seed, *static = inputs
    ctx.save_for_backward(q, k, v, *output, bounds, keys, dense, seed, *tensors)
    ctx.static = tuple(static)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do: Tensor | None, dlse: Tensor | None, need: list[bool]) -> list[Tensor | None]:
    """Gradients of q, k, v and the terms' tensors; None where nobody asked."""
    q, k, v, o, lse, kept, bounds, keys, dense, seed, *tensors = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    with torch.no_grad():
        dq, dk, dv, dtensors = torch.ops.tilewise.attn_bwd(
            do, dlse, o, lse, kept, need, q, k, v, tensors, bounds, keys, dense, seed, *ctx.static
        )
    grads = [g if wanted else None for g, wanted in zip((dq, dk, dv, *dtensors), need, strict=True)]
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # torch's once_differentiable only refuses where `do` needs a gradient; elsewhere it drops terms silently.
        inputs = [do, *([] if dlse is None else [dlse]), q, k, v, *tensors]
        grads = [None if g is None else _NotTwice.apply(g, *inputs) for g in grads]
    return grads


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        # Without gradients Dynamo drops ctx if there are as many arguments as the signature has parameters.
        q, k, v, bounds, keys, dense, seed, static, *tensors = args
        output = torch.ops.tilewise.attn_fwd(q, k, v, tensors, bounds, keys, dense, seed, *static)
        _save(ctx, (q, k, v, tensors, bounds, keys, dense, seed, *static), output)
        return output[:2]

    @staticmethod
    def backward(ctx, do, dlse):
        need = [*ctx.needs_input_grad[:3], *ctx.needs_input_grad[8:]]
        grads = _differentiate(ctx, do, dlse, need)
        return *grads[:3], None, None, None, None, None, *grads[3:]


def _operator_backward(ctx, do, dlse, dkept):
    """The same for a bare call of the operator, which is what an exported program has in place of the Function."""
    wanted = ctx.needs_input_grad
    grads = _differentiate(ctx, do, dlse, [*wanted[:3], *wanted[3]])
    return *grads[:3], grads[3:], *[None] * (len(wanted) - 4)


torch.library.register_autograd("tilewise::attn_fwd", _operator_backward, setup_context=_save, lib=_lib)


def attend(call: Call, spec: str, impl: str) -> tuple[Tensor, Tensor]:
    """O and lse of a checked call by the implementation named `impl`, differentiable once in every tensor."""
    mask, options = call.mask, call.options
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v, *call.tensors))):
        options = replace(options, projections="recompute")
    static = (spec, call.scale, call.offset, mask.left, mask.right, call.dropout_p, options.spec, impl)
    # Dynamo refuses an autograd.Function that is given one tensor twice.
    q, k, v, *tensors = _distinct([call.q, call.k, call.v, *call.tensors])
    return _Attention.apply(q, k, v, mask.bounds, mask.keys, mask.dense, call.seed, static, *tensors)


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    """The same tensors, each repetition as a view of its own."""
    seen: list[Tensor] = []
    for tensor in tensors:
        seen.append(tensor.view_as(tensor) if any(tensor is other for other in seen) else tensor)
    return seen
