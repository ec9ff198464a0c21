"""The operators of carried attention as PyTorch sees them, and the autograd node that links the layers of a block."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ..once import once
from . import blocked
from .config import Options
from .layout import by_token

__all__ = ["LayerCall", "attend", "gradient_edge"]

_OPTIONS = (
    "float scale, int divisor, float softcap, float dropout_p, int tile, bool uniform, int back, bool[] rounded, "
    "ScalarType carry_dtype, bool plain, int window, str impl"
)
_LIBRARY = torch.library.Library("tilewise", "FRAGMENT")
_LIBRARY.define(
    "carried_forward(Tensor[] q, Tensor[] k, Tensor v, Tensor[] gain, Tensor[] centre, Tensor bounds, Tensor rows, "
    " Tensor? z_in, Tensor(a!)? z_out, bool accumulate, Tensor? sink, Tensor? seed, "
    f"{_OPTIONS}) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "carried_backward(Tensor dO, Tensor[] q, Tensor[] k, Tensor v, Tensor O, Tensor lse, Tensor[] gain, "
    "Tensor[] centre, Tensor bounds, Tensor rows, Tensor columns, Tensor? z, bool z_is_own, Tensor(a!)? e, "
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
    return run_forward(impl, tensors[:-_NUMBERS], Options.of(tensors[-_NUMBERS:]))


def _backward(*args):
    *tensors, impl = args
    *made, dgain, dsink = run_backward(impl, tensors[:-_NUMBERS], Options.of(tensors[-_NUMBERS:]))
    # Operators return tensors: empty ones where there is no gain or sink.
    H, lse = made[0].shape[-3], tensors[5]
    return (*made, lse.new_empty(0, H) if dgain is None else dgain, lse.new_empty(0) if dsink is None else dsink)


def run_forward(impl: str, args: Sequence, options: Options) -> tuple[Tensor, Tensor]:
    """The operator's own work."""
    host = _kernels(impl).forward
    kind = args[2].device.type
    if not torch.is_autocast_enabled(kind):
        return host(*args, options)
    # Autocast would round the fp32 products inside.
    with torch.autocast(kind, enabled=False):
        return host(*args, options)


def run_backward(
    impl: str, args: Sequence, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The operator's own work, with None where it has an empty tensor to return."""
    host = _kernels(impl).backward
    kind = args[0].device.type
    if not torch.is_autocast_enabled(kind):
        return host(*args, options)
    with torch.autocast(kind, enabled=False):
        return host(*args, options)


_LIBRARY.impl("carried_forward", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("carried_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("tilewise::carried_forward")
def _forward_fake(q, k, v, *_):
    B, H, Tq, _ = q[-1].shape
    real = torch.float64 if v.dtype == torch.float64 else torch.float32
    return by_token(v, B, H, Tq, v.shape[-1]), v.new_empty(B, H, Tq, dtype=real)


@torch.library.register_fake("tilewise::carried_backward")
def _backward_fake(
    dO, q, k, v, O, lse, gain, centre, bounds, rows, columns, z, z_is_own, e, read_e, write_e, push, sink, *_
):  # fmt: skip
    n, H = len(q) if push else 1, q[-1].shape[1]
    real = torch.float64 if v.dtype == torch.float64 else torch.float32
    dgain = v.new_empty(n if gain else 0, H, dtype=real)
    dsink = v.new_empty(0 if sink is None else H, dtype=real)
    dq, dk = (by_token(x, n, *x.shape, dtype=real) if push else by_token(x, *x.shape) for x in (q[-1], k[-1]))
    return dq, dk, by_token(v, *v.shape), dgain, dsink


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

    def options_of(self, count: int) -> Options:
        """The options where the last `count` layers are summed."""
        options = self.options if isinstance(self.options, Options) else Options(*self.options)
        return options if count == len(options.rounded) else options._replace(rounded=options.rounded[-count:])


def attend(
    call: LayerCall, q: Sequence[Tensor], k: Sequence[Tensor], v: Tensor, gain: Sequence[Tensor],
    centre: Sequence[Tensor], bounds: Tensor, rows: Tensor, columns: Tensor, z_in: Tensor | None, z_out: Tensor | None,
    token: Tensor | None, sink: Tensor | None, seed: Tensor | None, shape: tuple[int, ...],
    edges: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """O of one layer, and the token whose gradient is E: the edge by which the layers' backward passes are ordered.

    The token is a tensor of the packed buffer's shape that holds no memory. Its gradient is the packed E_{i+1}, so it
    has autograd's own lifetime: a layer whose output was not used sends nothing, two forwards before a backward do not
    meet, and every backward starts from its own. `edges` are :func:`gradient_edge` of all of q, then of all of k, where
    gradients are pushed.
    """
    plain, constants = _untraced(v), (bounds, rows, columns, z_in, z_out, seed, *centre)
    given = (tuple(shape), (len(q), len(gain), len(edges)))
    if plain:
        # What gets no gradient autograd need not look at, 0.6 us a tensor.
        return _Layer.apply((call, *given, constants), token, v, sink, *q, *k, *gain, *edges)
    # Dynamo takes no object of ours as an argument, and no tensor in a tuple.
    call = (*call._replace(options=tuple(call.options)),)
    return _Layer.apply((call, *given, None), token, v, sink, *q, *k, *gain, *edges, *constants)


def _untraced(x: Tensor) -> bool:
    """Whether nothing looks at operators: then their work is done without the dispatcher, which is slow in Python."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch.jit.is_tracing()
        or type(x) not in _PLAIN
        or x.is_meta
    )


_PLAIN = (Tensor, torch.nn.Parameter)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given, token, v, sink, *tensors):
        call, shape, counts, constants = given
        n, n_gain, n_edges = counts
        q, k, gain, _, rest = _split(tensors, n, n, n_gain, n_edges)
        plain = constants is not None
        if not plain:
            call, constants = LayerCall(*call), rest
        bounds, rows, columns, z_in, z_out, seed, *centre = constants
        m = call.forward
        args = (q[-m:], k[-m:], v, gain[-m:], centre[-m:], _last(bounds, m), rows, z_in, z_out, call.accumulate, sink,
                seed)  # fmt: skip
        if plain:
            O, lse = run_forward(call.impl, args, call.options_of(m))
        else:
            O, lse = torch.ops.tilewise.carried_forward.default(*args, *_listed(call.options_of(m)), call.impl)
        m = call.backward
        z = z_in if call.saved == "entering" else z_out if call.saved == "own" else None
        kept = (q[-m:], k[-m:], gain[-m:], centre[-m:])
        ctx.save_for_backward(
            v, O, lse, _last(bounds, m), rows, columns, z, sink, seed, *kept[0], *kept[1], *kept[2], *kept[3]
        )  # fmt: skip
        others = 0 if plain else len(rest)
        ctx.given = (call if plain else tuple(call), plain, shape, counts, [len(x) for x in kept], token is not None,
                     others)  # fmt: skip
        ctx.set_materialize_grads(False)
        return O, v.new_empty(1, dtype=call.grad_dtype).expand(shape) if call.links else None

    @staticmethod
    @once
    def backward(ctx, dO, e):
        call, plain, shape, (n, n_gain, n_edges), counts, write_e, others = ctx.given
        call = call if plain else LayerCall(*call)
        v, O, lse, bounds, rows, columns, z, sink, seed, *rest = ctx.saved_tensors
        q, k, gain, centre, _ = _split(rest, *counts)
        if dO is None:
            dO = torch.zeros_like(O)
        read_e = e is not None
        if read_e:
            e = e.contiguous()
        elif write_e:
            e = torch.empty(shape, dtype=call.grad_dtype, device=v.device)
        args = (dO, q, k, v, O, lse, gain, centre, bounds, rows, columns, z, call.saved == "own", e, read_e, write_e,
                call.push, sink, seed)  # fmt: skip
        m = call.backward
        if plain and _untraced(v):
            dq, dk, dv, dgain, dsink = run_backward(call.impl, args, call.options_of(m))
        else:
            numbers = _listed(call.options_of(m))
            dq, dk, dv, dgain, dsink = torch.ops.tilewise.carried_backward.default(*args, *numbers, call.impl)
        gains = []
        if gain:
            gains = [g.to(b.dtype) for g, b in zip(dgain, gain[len(gain) - len(dgain) :], strict=True)]
        each = (dq.unbind(), dk.unbind()) if call.push else ((dq,), (dk,))
        own = [*_filled(each[0], n), *_filled(each[1], n)]
        return (
            None, e if write_e else None, dv, None if sink is None else dsink.to(sink.dtype),
            *([None] * (2 * n) if n_edges else own), *_filled(gains, n_gain), *(own if n_edges else ()),
            *(None,) * others,
        )  # fmt: skip


def _filled(grads: Sequence[Tensor], count: int) -> list[Tensor | None]:
    """The gradients of the last ones of `count` tensors."""
    return [None] * (count - len(grads)) + list(grads)


class _Edge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.dtype = x.dtype
        return x.new_empty(1, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32).expand(x.shape)

    @staticmethod
    @once
    def backward(ctx, gradient):
        return gradient.to(ctx.dtype)


def gradient_edge(x: Tensor) -> Tensor:
    """A tensor of x's shape that holds no memory; its gradient, summed over its uses in fp32 or fp64, is x's.

    Autograd would add what several layers ask of one tensor in the tensor's dtype: in bf16 the kernels' dQ and dK of a
    block's first layer then have 1.4 times plain attention's error, with edges as much as it.
    """
    return _Edge.apply(x)


def _last(bounds: Tensor, count: int) -> Tensor:
    return bounds if bounds.shape[0] <= count else bounds[-count:]


def _listed(options: Options) -> tuple:
    """Options as the operators take them."""
    return tuple(options._replace(rounded=list(options.rounded)))


def _split(tensors: Sequence[Tensor], *counts: int) -> list[list[Tensor]]:
    """Groups of `counts` tensors, and what is left."""
    groups, start = [], 0
    for count in counts:
        groups.append(list(tensors[start : start + count]))
        start += count
    groups.append(list(tensors[start:]))
    return groups
