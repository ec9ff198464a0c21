"""The kernels behind the operators: what they can run, their tiles, and the launches of one layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.backends.cuda import SDPAParams
from triton.tools.tensor_descriptor import TensorDescriptor

from ...triton.launch import launch
from ...triton.masks import dropping
from ...triton.plan import Source, padded
from ..config import CarriedConfig, Options
from . import settings
from .backward import keys_gradient, queries_again, queries_from_e
from .forward import attend
from .settings import again_tiles, backward_tiles, forward_tiles, product_tiles
from .tiles import row_delta, row_shift

__all__ = ["backward", "forward", "refusal"]

LOG2E = 1.4426950408889634
MOST = 4
"""Layers whose scores one kernel sums."""

_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def refusal(q: Tensor, k: Tensor, v: Tensor, config: CarriedConfig) -> str | None:
    """Why the kernels cannot run a call, or None."""
    if q.device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"q is on {q.device.type}; the kernels run on cuda"
    if q.dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        return "q is torch.bfloat16, whose bits Triton's interpreter multiplies as integers; nearest legal call: fp16"
    if q.dtype not in _TYPES:
        return f"q is {q.dtype}; the kernels take fp16, bf16 and fp32"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"head widths are {q.shape[-1]} and {v.shape[-1]}; the kernels take up to 256"
    if config.layers > MOST:
        return f"layers is {config.layers}; the kernels sum up to {MOST}"
    for name, dtype in (("carry_dtype", config.carry_dtype), ("grad_dtype", config.grad_dtype)):
        if dtype is not None and dtype not in _TYPES:
            return f"{name} is {dtype}; the kernels store fp16, bf16 and fp32"
    if (
        q.shape[0] * q.shape[1] * (-(-q.shape[2] // config.tile) * -(-k.shape[2] // config.tile) + 1) * config.tile
        >= 2**31
    ):
        return "rows of packed tiles are counted in 32 bits; nearest legal call: plan='recompute' with impl='blocked'"
    return None


class _Layer:
    """One layer's call laid out for the kernels."""

    def __init__(
        self, q: list[Tensor], k: list[Tensor], v: Tensor, gain: list[Tensor], centre: list[Tensor], lo: list[Tensor],
        hi: list[Tensor], rows: Tensor, sink: Tensor | None, seed: Tensor | None, opt: Options,
    ) -> None:  # fmt: skip
        self.opt, self.rows, self.seed, self.sink = opt, rows, seed, sink
        self.q, self.k, self.v = _alike(q), _alike(k), Source(v)
        self.B, self.H, self.Tq, self.d = q[-1].shape
        self.Hk, self.Tk, self.dv = v.shape[1:]
        self.bytes = v.element_size()
        self.tma = self.bytes < 4 and all(x.describable for x in (*self.q, *self.k, self.v))
        pairs = [x for pair in zip(lo, hi, strict=True) for x in pair]
        self.bounds = torch.stack(pairs).view(len(lo), 2, *lo[0].shape)
        self.gains = torch.stack(gain).float().contiguous() if gain else None
        self.shifts = self._shifts(centre) if centre else None
        cap = opt.softcap
        scale = opt.scale * LOG2E / opt.divisor
        self.numbers = {"scale": 2.0 * scale / cap if cap else scale, "bend": cap * LOG2E}
        self.numbers |= {"drop": dropping(opt.dropout_p), "inverse": 1.0 / (1.0 - opt.dropout_p)}
        self.sizes = (self.B, self.H, self.H // self.Hk, self.Tq, self.Tk, rows.shape[1])
        self.strides = (self.q[0].strides, self.k[0].strides, self.v.strides)
        top = 65504.0 if opt.carry_dtype == torch.float16 else 0.0
        self.common = {
            "D": self.d, "DV": self.dv, "BD": padded(self.d), "BV": padded(self.dv), "S": opt.tile,
            "DTYPE": _TYPES[opt.carry_dtype], "TOP": top, "COUNT": len(q), "GAIN": bool(gain), "CENTRE": bool(centre),
            "ROUND": sum(bool(r) << t for t, r in enumerate(opt.rounded)), "UNIFORM": opt.uniform,
            "BATCHED": self.bounds.shape[2] > 1, "SOFTCAP": cap > 0.0, "DROPOUT": opt.dropout_p > 0.0,
        }  # fmt: skip

    def _shifts(self, centre: list[Tensor]) -> Tensor:
        out = torch.empty(len(centre), self.B, self.H, self.Tq, dtype=torch.float32, device=self.v.x.device)
        for t, mean in enumerate(centre):
            launch(
                row_shift, (cdiv(self.Tq, 64), self.B * self.H), self.q[t].x, self.q[t].strides,
                mean.float().contiguous(), out[t], self.B, self.H, self.H // self.Hk, self.Tq, D=self.d,
                BD=padded(self.d), BM=64,
            )  # fmt: skip
        return out

    def four(self, sources: list[Source], rows: int) -> list:
        """Arguments for four tensors of rows, the last repeated."""
        made = [x(rows, padded(self.d), self.tma) for x in sources]
        return made + made[-1:] * (MOST - len(made))

    def packed(self, z: Tensor | None, rows: int, columns: int):
        """A packed buffer as an argument; None stays None."""
        if z is None or not self.tma:
            return z
        S = self.opt.tile
        return TensorDescriptor(z, [z.numel() // S, S], [S, 1], [rows, columns])


def forward(
    q: list[Tensor], k: list[Tensor], v: Tensor, gain: list[Tensor], centre: list[Tensor], lo: list[Tensor],
    hi: list[Tensor], rows: Tensor, z_in: Tensor | None, z_out: Tensor | None, accumulate: bool, sink: Tensor | None,
    seed: Tensor | None, opt: Options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :func:`tilewise.carried.blocked.forward`; lse is in log2 units, so that nothing is rounded twice."""
    entering = z_out if accumulate else z_in
    if len(q) == 1 and entering is None and z_out is None and sink is None and _plain_causal(q[0], k[0], v, opt):
        O, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q[0], k[0], v, None, True, 0.0, True, False, scale=opt.scale / opt.divisor
        )
        return O.contiguous(), lse.view(O.shape[:3]) * LOG2E
    x = _Layer(q, k, v, gain, centre, lo, hi, rows, sink, seed, opt)
    shape = forward_tiles(x.common["BD"], x.bytes, opt.tile, len(q), (entering is not None) + (z_out is not None))
    O = v.new_empty(x.B, x.H, x.Tq, x.dv)
    lse = torch.empty(x.B, x.H, x.Tq, dtype=torch.float32, device=v.device)
    slots = next((t.shape[2] for t in (z_out, entering) if t is not None), 1)
    launch(
        attend, (cdiv(x.Tq, shape.queries), x.B * x.H), *x.four(x.q, shape.queries), *x.four(x.k, shape.keys),
        x.v(shape.keys, x.common["BV"], x.tma), O, lse, x.packed(entering, shape.queries, shape.keys),
        x.packed(z_out, shape.queries, shape.keys), x.gains, x.shifts, x.bounds, rows, sink, seed, *x.strides,
        O.stride()[:3], *x.sizes, slots, max(opt.back, 0), *x.numbers.values(), **x.common, BM=shape.queries,
        BN=shape.keys, ENTERS=entering is not None, WRITES=z_out is not None, CLOSED=opt.back >= 0,
        SINK=sink is not None, TMA=x.tma, STAGES=shape.stages, num_warps=shape.warps,
    )  # fmt: skip
    return O, lse


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉. Triton's own serves kernels too and costs the host ten times as much."""
    return -(-a // b)


def _plain_causal(q: Tensor, k: Tensor, v: Tensor, opt: Options) -> bool:
    """Whether a layer is causal attention and nothing else, which cuDNN gives with its lse."""
    if not settings.CUDNN or not opt.plain or opt.softcap or opt.dropout_p or not q.is_cuda:
        return False
    return torch.backends.cuda.can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, True, True))


def backward(
    dO: Tensor, q: list[Tensor], k: list[Tensor], v: Tensor, O: Tensor, lse: Tensor, gain: list[Tensor],
    centre: list[Tensor], lo: list[Tensor], hi: list[Tensor], rows: Tensor, columns: Tensor, z: Tensor | None,
    z_is_own: bool, e: Tensor | None, read_e: bool, write_e: bool, push: bool, sink: Tensor | None, seed: Tensor | None,
    opt: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See :func:`tilewise.carried.blocked.backward`. Where E is stored, dQ is its product with K."""
    x = _Layer(q, k, v, gain, [] if z_is_own else centre, lo, hi, rows, sink, seed, opt)
    do, device, G = Source(dO), v.device, x.H // x.Hk
    x.tma = x.tma and do.describable
    last, first = len(q) - 1, 0 if push else len(q) - 1
    width = x.common["BV"]
    delta = torch.empty(x.B, x.H, x.Tq, dtype=torch.float32, device=device)
    launch(
        row_delta, (cdiv(x.Tq, 64), x.B * x.H), O, O.stride()[:3], do.x, do.strides, delta, x.H, x.Tq, D=x.dv,
        BD=width, BM=64,
    )  # fmt: skip

    # Query heads of a key head are summed afterwards, in fp32: one program a query head fills the GPU at batch 1.
    part = torch.float32 if G > 1 else v.dtype
    whole = torch.float32 if push else v.dtype
    dq = torch.empty(len(q) - first, x.B, x.H, x.Tq, x.d, dtype=whole, device=device)
    dk = torch.empty(len(q) - first, x.B, x.H, x.Tk, x.d, dtype=torch.float32 if push else part, device=device)
    dv = torch.empty(x.B, x.H, x.Tk, x.dv, dtype=part, device=device)
    dgain = torch.zeros(len(gain[first:]), x.H, dtype=torch.float32, device=device)
    stored = e is not None
    slots = next((t.shape[2] for t in (e, z) if t is not None), 1)
    back, closed = max(opt.back, 0), opt.back >= 0
    numbers = x.numbers | {"factor": 1.0 / opt.divisor}
    ending = [numbers[name] for name in ("scale", "bend", "factor", "drop", "inverse")] + [opt.scale]
    source = {"OWN": z_is_own, "ENTERS": z is not None and not z_is_own, "CLOSED": closed, "TMA": x.tma}
    packed = (z is not None) + read_e + stored
    shape = backward_tiles(x.common["BD"], x.bytes, opt.tile, 1 if z_is_own else len(q), packed)
    blocks = columns.shape[1] * opt.tile // shape.keys
    for t in range(first, last + 1):
        # The first summed layer takes a carry only if one was stored.
        learned = bool(gain) and not z_is_own and (t > 0 or z is not None)
        dg = torch.empty(x.B, x.H, blocks, dtype=torch.float32, device=device) if learned else None
        launch(
            keys_gradient, (blocks, x.B * x.H), *x.four(x.q, shape.queries), *x.four(x.k, shape.keys),
            x.v(shape.keys, width, x.tma), do(shape.queries, width, x.tma), lse, delta,
            x.packed(z, shape.queries, shape.keys), x.packed(e, shape.queries, shape.keys), dk[t - first], dv, dg,
            x.gains, x.shifts, x.bounds, rows, columns, seed, *x.strides, do.strides, dk.stride()[1:4], dv.stride()[:3],
            *x.sizes, slots, back, *ending, **x.common, **source, BM=shape.queries, BN=shape.keys, TARGET=t,
            LEARNED=learned, READS_E=read_e, STORES_E=stored, ETYPE=_TYPES[e.dtype] if stored else tl.float32,
            VALUES=t == last, STAGES=shape.stages, num_warps=shape.warps,
        )  # fmt: skip
        if learned:
            dgain[t - first] = opt.scale * dg.sum((0, 2))
        if not stored:
            small = again_tiles(x.common["BD"], x.bytes, opt.tile, len(q), packed)
            launch(
                queries_again, (cdiv(x.Tq, small.queries), x.B * x.H), *x.four(x.q, small.queries),
                *x.four(x.k, small.keys), x.v(small.keys, width, x.tma), do(small.queries, width, x.tma), lse, delta,
                x.packed(z, small.queries, small.keys), dq[t - first], x.gains, x.shifts, x.bounds, rows, seed,
                *x.strides, do.strides, dq.stride()[1:4], *x.sizes, slots, back, *ending, **x.common, **source,
                BM=small.queries, BN=small.keys, TARGET=t, STAGES=small.stages, num_warps=small.warps,
            )  # fmt: skip
    if stored:
        small = product_tiles(x.common["BD"], x.bytes, opt.tile)
        launch(
            queries_from_e, (cdiv(x.Tq, small.queries), x.B * x.H), x.packed(e, small.queries, small.keys),
            x.k[-1](small.keys, x.common["BD"], x.tma), dq[0], rows, x.k[-1].strides, dq.stride()[1:4], x.H, G, x.Tq,
            x.Tk, rows.shape[1], slots, back, opt.scale, D=x.d, BD=x.common["BD"], BM=small.queries, BN=small.keys,
            S=opt.tile, CLOSED=closed, TMA=x.tma, STAGES=small.stages, num_warps=small.warps,
        )  # fmt: skip
        if gain and write_e:
            e.mul_(gain[-1].to(e.dtype).view(1, -1, 1, 1, 1))
    dsink = delta.new_zeros(0)
    if sink is not None:
        share = (sink.float()[:, None] * LOG2E - lse).exp2().masked_fill(torch.isinf(lse), 0.0)
        dsink = -(share * delta).sum((0, 2))
    return dq, _joined(dk, x.Hk, whole), _joined(dv[None], x.Hk, v.dtype)[0], dgain, dsink


def _alike(tensors: list[Tensor]) -> list[Source]:
    """Sources of one layout: kernels take one set of strides for all summed layers."""
    sources = [Source(x) for x in tensors]
    if len({x.strides for x in sources}) > 1:
        sources = [Source(x.contiguous()) for x in tensors]
    return sources


def _joined(x: Tensor, Hk: int, dtype: torch.dtype) -> Tensor:
    """Sum over the query heads of a key head: x [n, B, H, T, d] to [n, B, Hk, T, d]."""
    n, B, H, T, d = x.shape
    return x if H == Hk else x.view(n, B, Hk, H // Hk, T, d).sum(3).to(dtype)
