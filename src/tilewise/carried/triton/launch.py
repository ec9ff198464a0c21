"""The kernels behind the operators: what they can run, and the launches of one layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from torch.backends.cuda import SDPAParams

from ...triton.plan import limits_of, padded
from ..config import CarriedConfig, Options
from ..layout import by_token
from . import settings
from .prepare import LOG2E, PLANES, TYPES, Backward, Facts, backward_of, forward_of, four, strides_of

__all__ = ["backward", "forward", "refusal"]

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, asked when they were decorated: a traced graph cannot ask Triton."""


def refusal(q: Tensor, k: Tensor, v: Tensor, config: CarriedConfig, plan: str | None = None) -> str | None:
    """Why the kernels cannot run a call in a plan (default: the config's; ``auto`` stands for all), or None."""
    plan = config.plan if plan is None else plan
    if q.device.type != "cuda" and not INTERPRETED:
        return f"q is on {q.device.type}; the kernels run on cuda"
    if q.dtype == torch.bfloat16 and INTERPRETED:
        return "q is torch.bfloat16, whose bits Triton's interpreter multiplies as integers; nearest legal call: fp16"
    if q.dtype not in TYPES:
        return f"q is {q.dtype}; the kernels take fp16, bf16 and fp32"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"head widths are {q.shape[-1]} and {v.shape[-1]}; the kernels take up to 256"
    # Where a graph is traced the tiles say so, when it runs: cached functions cannot be traced.
    if not torch.compiler.is_compiling() and (why := _lacking(q, v, config, plan)) is not None:
        return why
    if config.layers > settings.MOST and plan != "stored":
        return f"layers is {config.layers}; the kernels sum up to {settings.MOST}, any number with plan='stored'"
    for name, dtype in (("carry_dtype", config.carry_dtype), ("grad_dtype", config.grad_dtype)):
        if dtype is not None and dtype not in TYPES:
            return f"{name} is {dtype}; the kernels store fp16, bf16 and fp32"
    if q.shape[0] * q.shape[1] > PLANES:
        return f"batch · heads is {q.shape[0] * q.shape[1]}; the kernels take up to {PLANES}: split the batch"
    if (
        q.shape[0] * q.shape[1] * (-(-q.shape[2] // config.tile) * -(-k.shape[2] // config.tile) + 1) * config.tile
        >= 2**31
    ):
        return "rows of packed tiles are counted in 32 bits; nearest legal call: plan='recompute' with impl='blocked'"
    return None


def _lacking(q: Tensor, v: Tensor, config: CarriedConfig, plan: str) -> str | None:
    """Why no tile is small enough for the GPU's shared memory, or None."""
    count = 1 if plan == "stored" else min(config.layers, settings.MOST)
    width, shared = padded(max(q.shape[-1], v.shape[-1])), limits_of(q.device).shared
    if not settings.lacking(width, q.element_size(), config.tile, count, shared):
        return None
    return (
        f"a program has {shared} bytes of shared memory, too few to sum the scores of {count} layer(s) of {q.dtype}, "
        f"{width} wide; plan='stored' sums one"
    )


def _facts(
    q: list[Tensor], k: list[Tensor], v: Tensor, gain: list[Tensor], centre: list[Tensor], bounds: Tensor, rows: Tensor,
    columns: int, slots: int, opt: Options,
) -> Facts:  # fmt: skip
    first, second = q[0], k[0]
    aligned = v.data_ptr() % 16 == 0
    for x in q:
        aligned = aligned and x.data_ptr() % 16 == 0
    for x in k:
        aligned = aligned and x.data_ptr() % 16 == 0
    return Facts(
        opt, len(q), first.shape, second.shape, v.shape, first.stride(), second.stride(), v.stride(), v.dtype, v.device,
        aligned, bool(gain), bool(centre), bounds.shape[2] > 1, rows.shape[1], columns, slots, settings.tuned(),
    )  # fmt: skip


def _readable(x: Tensor) -> Tensor:
    """x, or a copy of it if its rows are spread out or the same ones are read again."""
    strides = x.stride()
    if strides[3] == 1 and 0 not in strides:
        return x
    if strides[3] == 1 and all(s or n == 1 for s, n in zip(strides, x.shape, strict=True)):
        return x
    return x.contiguous()


def _alike(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors of one layout: kernels take one set of strides for all summed layers."""
    made = [_readable(x) for x in tensors]
    if len(made) > 1 and len({strides_of(x.shape, x.stride()) for x in made}) > 1:
        made = [x.contiguous() for x in made]
    return made


def forward(
    q: list[Tensor], k: list[Tensor], v: Tensor, gain: list[Tensor], centre: list[Tensor], bounds: Tensor, rows: Tensor,
    z_in: Tensor | None, z_out: Tensor | None, accumulate: bool, sink: Tensor | None, seed: Tensor | None, opt: Options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :func:`tilewise.carried.blocked.forward`; lse is in log2 units, so that nothing is rounded twice."""
    entering = z_out if accumulate else z_in
    if len(q) == 1 and entering is None and z_out is None and sink is None and _plain_causal(q[0], k[0], v, opt):
        O, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q[0], k[0], v, None, True, 0.0, True, False, scale=opt.scale / opt.divisor
        )
        return by_token(O, *O.shape).copy_(O), lse.view(O.shape[:3]) * LOG2E
    q, k, v = _alike(q), _alike(k), _readable(v)
    packed = entering if z_out is None else z_out
    slots = 1 if packed is None else packed.shape[2]
    facts = _facts(q, k, v, gain, centre, bounds, rows, 0, slots, opt)
    x = forward_of(facts, entering is not None, z_out is not None, sink is not None)
    O = v.new_empty_strided(*x.room)
    lse = torch.empty(x.B, x.H, x.Tq, dtype=torch.float32, device=v.device)
    if x.forms:
        centred = centre[0].float().contiguous(), q[0]
    else:
        centred = x.shifts(q, centre) if centre else None, None
    x.attend(
        *four(x.q, q), *four(x.k, k), x.v(v), O, lse, x.z(entering), x.z(z_out), _gains(gain), *centred, bounds, rows,
        sink, seed,
    )  # fmt: skip
    return O, lse


def _gains(gain: list[Tensor]) -> Tensor | None:
    return torch.stack(gain).float().contiguous() if gain else None


def _plain_causal(q: Tensor, k: Tensor, v: Tensor, opt: Options) -> bool:
    """Whether a layer is causal attention and nothing else, which cuDNN gives with its lse."""
    if not settings.CUDNN or not opt.plain or opt.softcap or opt.dropout_p or not q.is_cuda:
        return False
    return torch.backends.cuda.can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, True, True))


def backward(
    dO: Tensor, q: list[Tensor], k: list[Tensor], v: Tensor, O: Tensor, lse: Tensor, gain: list[Tensor],
    centre: list[Tensor], bounds: Tensor, rows: Tensor, columns: Tensor, z: Tensor | None, z_is_own: bool,
    e: Tensor | None, read_e: bool, write_e: bool, push: bool, sink: Tensor | None, seed: Tensor | None, opt: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """See :func:`tilewise.carried.blocked.backward`. Where E is stored, dQ is its product with K."""
    q, k, v, do = _alike(q), _alike(k), _readable(v), _readable(dO)
    centre = [] if z_is_own else centre
    slots = 1 if z is None else z.shape[2]
    facts = _facts(q, k, v, gain, centre, bounds, rows, columns.shape[1], slots, opt)
    kept = (0, v.dtype) if e is None else (e.shape[2], e.dtype)
    given = (O.stride(), do.stride(), do.data_ptr() % 16 == 0)
    x = backward_of(facts, *given, z_is_own, z is not None and not z_is_own, kept, read_e, push)
    if e is None:
        e = torch.empty(x.parts.planes, x.parts.slots, opt.tile, opt.tile, dtype=v.dtype, device=v.device)
    fp32 = {"dtype": torch.float32, "device": v.device}
    dq, dk, dv = (v.new_empty_strided(*room, dtype=kind) for room, kind in x.rooms)
    each_q, each_k = (dq.unbind(), dk.unbind()) if push else ((dq,), (dk,))
    made_k = [y if x.G == 1 else torch.empty(x.B, x.H, x.Tk, x.d, **fp32) for y in each_k[:-1]]
    made_k.append(each_k[-1] if x.whole else torch.empty(x.B, x.heads, x.Tk, x.d, **fp32))
    made_v = dv if x.whole else torch.empty(x.B, x.heads, x.Tk, x.dv, **fp32)
    dg = torch.zeros(len(x.parts.rows), len(q), x.B, x.H, x.blocks, **fp32) if x.taking else None
    stats = torch.empty(2, x.planes, x.pad, **fp32)
    gains, shifts = _gains(gain), x.shifts(q, centre) if centre else None

    x.statistics(O, do, lse, stats)
    tensors = (*four(x.q, q), *four(x.k, k), x.v(v), x.do(do), stats, x.stat(stats), x.z(z), x.e(e), made_k[-1], made_v)
    product_e, keyed_e = x.product_e(e), x.keyed_e(e) if len(each_k) > 1 else None
    for row, keys_gradient, products in x.steps:
        keys_gradient(*tensors, None if dg is None else dg[row], gains, shifts, bounds, rows, columns, seed)
        for t, queries_from_e, keys_from_e in products:
            if keys_from_e is not None:
                keys_from_e(keyed_e, x.keyed_q(q[t]), made_k[t - x.first], gains, bounds, rows, columns)
            queries_from_e(product_e, x.product_k(k[t]), each_q[t - x.first], gains, bounds, rows)
    _join(x, made_k, each_k, made_v, dv)
    if gain and write_e:
        e.mul_(gain[-1].to(e.dtype).view(1, -1, 1, 1, 1))
    dgain = torch.zeros(len(gain[x.first :]), x.H, **fp32) if gain else None
    for t in x.taking:
        dgain[t - x.first] = opt.scale * dg[:, t].sum((0, 1, 3))
    dsink = None
    if sink is not None:
        share = (sink.float()[:, None] * LOG2E - lse).exp2().masked_fill(torch.isinf(lse), 0.0)
        delta = stats[1, :, : x.Tq].view(x.B, x.H, x.Tq)
        dsink = -(share * delta).sum((0, 2))
    return dq, dk, dv, dgain, dsink


def _join(x: Backward, made_k: list[Tensor], dk: Sequence[Tensor], made_v: Tensor, dv: Tensor) -> None:
    """Sums over the query heads of a key head, where the kernels have not written them."""
    one, two = x.sums[x.d]
    if x.G > 1:
        for t, made in enumerate(made_k[:-1]):
            one(made, made, dk[t], dk[t])
    if x.whole:
        return
    if x.heads == x.Hk:
        dk[-1].copy_(made_k[-1])
        dv.copy_(made_v)
    elif x.d == x.dv:
        two(made_k[-1], made_v, dk[-1], dv)
    else:
        one(made_k[-1], made_k[-1], dk[-1], dk[-1])
        x.sums[x.dv][0](made_v, made_v, dv, dv)
