"""The operators of carried attention as PyTorch sees them, and the autograd node that links the layers of a block."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from . import blocked
from .config import Options

__all__ = ["LayerCall", "attend", "gradient_edge"]

_OPTIONS = (
    "float scale, int divisor, float softcap, float dropout_p, int tile, bool uniform, int back, bool[] rounded, "
    "ScalarType carry_dtype, bool plain, int window, str impl"
)
_LIBRARY = torch.library.Library("tilewise", "FRAGMENT")
_LIBRARY.define(
    "carried_forward(Tensor[] q, Tensor[] k, Tensor v, Tensor[] gain, Tensor[] centre, Tensor[] lo, Tensor[] hi, "
    "Tensor rows, Tensor? z_in, Tensor(a!)? z_out, bool accumulate, Tensor? sink, Tensor? seed, "
    f"{_OPTIONS}) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "carried_backward(Tensor dO, Tensor[] q, Tensor[] k, Tensor v, Tensor O, Tensor lse, Tensor[] gain, "
    "Tensor[] centre, Tensor[] lo, Tensor[] hi, Tensor rows, Tensor columns, Tensor? z, bool z_is_own, Tensor(a!)? e, "
    "bool read_e, bool write_e, bool push, Tensor? sink, Tensor? seed, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_NUMBERS = len(Options._fields)


def _kernels(impl: str) -> ModuleType:
    if impl == "triton":
        from .triton import launch

        return launch
    return blocked


def _forward(*args):
    *tensors, impl = args
    # Autocast would round the fp32 products inside.
    with torch.autocast(args[2].device.type, enabled=False):
        return _kernels(impl).forward(*tensors[:-_NUMBERS], Options(*tensors[-_NUMBERS:]))


def _backward(*args):
    *tensors, impl = args
    with torch.autocast(args[0].device.type, enabled=False):
        return _kernels(impl).backward(*tensors[:-_NUMBERS], Options(*tensors[-_NUMBERS:]))


_LIBRARY.impl("carried_forward", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("carried_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("tilewise::carried_forward")
def _forward_fake(q, k, v, *_):
    B, H, Tq, _ = q[-1].shape
    real = torch.float64 if v.dtype == torch.float64 else torch.float32
    return v.new_empty(B, H, Tq, v.shape[-1]), v.new_empty(B, H, Tq, dtype=real)


@torch.library.register_fake("tilewise::carried_backward")
def _backward_fake(
    dO, q, k, v, O, lse, gain, centre, lo, hi, rows, columns, z, z_is_own, e, read_e, write_e, push, sink, *_
):  # fmt: skip
    n, H = len(q) if push else 1, q[-1].shape[1]
    real = torch.float64 if v.dtype == torch.float64 else torch.float32
    dgain = v.new_empty(n if gain else 0, H, dtype=real)
    dsink = v.new_empty(0 if sink is None else H, dtype=real)
    dq, dk = (x.new_empty(n, *x.shape, dtype=real if push else x.dtype) for x in (q[-1], k[-1]))
    return dq, dk, v.new_empty(v.shape), dgain, dsink


class LayerCall(NamedTuple):
    """How one layer's scores are formed, forward and backward; plain numbers only.

    Attributes:
        options: see :class:`tilewise.carried.config.Options`.
        impl: ``blocked`` or ``triton``.
        forward, backward: how many of the last entries of q, k are summed in each pass.
        accumulate: the written buffer also holds the carry that enters.
        saved: the scores the backward reads: ``none``, ``entering`` (z_in) or ``own`` (z_out).
        push: gradients of every summed layer come from this layer (nothing is chained), through their edges.
        links: whether a next layer may send back the gradient of this layer's scores.
        grad_dtype: dtype of that gradient.
    """

    options: Options
    impl: str
    forward: int
    backward: int
    accumulate: bool
    saved: str
    push: bool
    links: bool
    grad_dtype: torch.dtype


def attend(
    call: LayerCall, q: Sequence[Tensor], k: Sequence[Tensor], v: Tensor, gain: Sequence[Tensor],
    centre: Sequence[Tensor], lo: Sequence[Tensor], hi: Sequence[Tensor], rows: Tensor, columns: Tensor,
    z_in: Tensor | None, z_out: Tensor | None, token: Tensor | None, sink: Tensor | None, seed: Tensor | None,
    shape: tuple[int, ...], edges: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """O of one layer, and the token whose gradient is E: the edge by which the layers' backward passes are ordered.

    The token is a tensor of the packed buffer's shape that holds no memory. Its gradient is the packed E_{i+1}, so it
    has autograd's own lifetime: a layer whose output was not used sends nothing, two forwards before a backward do not
    meet, and every backward starts from its own. `edges` are :func:`gradient_edge` of all of q, then of all of k, where
    gradients are pushed.
    """
    return _Layer.apply(
        tuple(call.options), call.impl, call.forward, call.backward, call.accumulate, call.saved, call.push, call.links,
        call.grad_dtype, tuple(shape), (len(q), len(gain), len(centre), len(lo), len(edges)),
        token, v, sink, seed, rows, columns, z_in, z_out, *q, *k, *gain, *centre, *lo, *hi, *edges,
    )  # fmt: skip


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, options, impl, n_forward, n_backward, accumulate, saved, push, links, grad_dtype, shape, counts,
        token, v, sink, seed, rows, columns, z_in, z_out, *tensors,
    ):  # fmt: skip
        n, n_gain, n_centre, n_bounds, _ = counts
        q, k, gain, centre, lo, hi = _split(tensors, n, n, n_gain, n_centre, n_bounds, n_bounds)
        O, lse = torch.ops.tilewise.carried_forward.default(
            *(_last(x, n_forward) for x in (q, k)), v, *(_last(x, n_forward) for x in (gain, centre, lo, hi)),
            rows, z_in,
            z_out, accumulate, sink, seed, *_options(options, n_forward), impl,
        )  # fmt: skip
        z = {"none": None, "entering": z_in, "own": z_out}[saved]
        kept = [x for group in (q, k, gain, centre, lo, hi) for x in _last(group, n_backward)]
        ctx.save_for_backward(v, O, lse, rows, columns, z, sink, seed, *kept)
        ctx.counts = tuple(len(_last(group, n_backward)) for group in (q, k, gain, centre, lo, hi))
        ctx.call = (options, impl, n_backward, saved, push, grad_dtype, shape, counts)
        ctx.chained = token is not None
        ctx.set_materialize_grads(False)
        return O, v.new_empty(1, dtype=grad_dtype).expand(shape) if links else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dO, e):
        options, impl, n_backward, saved, push, grad_dtype, shape, (n, n_gain, n_centre, n_bounds, n_edges) = ctx.call
        v, O, lse, rows, columns, z, sink, seed, *rest = ctx.saved_tensors
        q, k, gain, centre, lo, hi = _split(rest, *ctx.counts)
        read_e, write_e = e is not None, ctx.chained
        if dO is None:
            dO = torch.zeros_like(O)
        if read_e:
            e = e.contiguous()
        elif write_e:
            e = torch.empty(shape, dtype=grad_dtype, device=v.device)
        dq, dk, dv, dgain, dsink = torch.ops.tilewise.carried_backward.default(
            dO, q, k, v, O, lse, gain, centre, lo, hi, rows, columns, z, saved == "own", e, read_e,
            write_e, push, sink, seed, *_options(options, n_backward), impl,
        )  # fmt: skip
        fill = lambda grads, count: [None] * (count - len(grads)) + list(grads)  # noqa: E731
        dgain = [g.to(b.dtype) for g, b in zip(dgain, gain[len(gain) - len(dgain) :], strict=True)]
        own = [*fill(dq, n), *fill(dk, n)]
        through = own if n_edges else []
        return (
            *(None,) * 11, e if write_e else None, dv, None if sink is None else dsink.to(sink.dtype), *(None,) * 5,
            *([None] * (2 * n) if n_edges else own), *fill(dgain, n_gain), *(None,) * (n_centre + 2 * n_bounds),
            *through,
        )  # fmt: skip


class _Edge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.dtype = x.dtype
        return x.new_empty(1, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32).expand(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient.to(ctx.dtype)


def gradient_edge(x: Tensor) -> Tensor:
    """A tensor of x's shape that holds no memory; its gradient, summed over its uses in fp32 or fp64, is x's.

    Autograd would add what several layers ask of one tensor in the tensor's dtype: in bf16 the kernels' dQ and dK of a
    block's first layer then have 1.4 times plain attention's error, with edges as much as it.
    """
    return _Edge.apply(x)


def _last(group: Sequence[Tensor], count: int) -> list[Tensor]:
    return list(group[-count:])


def _options(options: tuple, count: int) -> tuple:
    opt = Options(*options)
    return tuple(opt._replace(rounded=list(opt.rounded[-count:])))


def _split(tensors: Sequence[Tensor], *counts: int) -> list[list[Tensor]]:
    groups, start = [], 0
    for count in counts:
        groups.append(list(tensors[start : start + count]))
        start += count
    return groups
