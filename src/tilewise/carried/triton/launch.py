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
from .backward import keys_from_e, keys_gradient, queries_from_e
from .forward import attend
from .settings import backward_tiles, forward_tiles, grouped, product_tiles
from .tiles import row_shift, row_statistics, sum_heads
from .transient import Parts, parts_of

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
    if config.layers > MOST and config.plan != "stored":
        return f"layers is {config.layers}; the kernels sum up to {MOST}, any number with plan='stored'"
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

    def products(self, target: int) -> dict:
        """Constants of a product with E that gives layer `target` its gradient."""
        names = ("D", "BD", "S", "COUNT", "GAIN", "UNIFORM", "BATCHED")
        constants = {n: self.common[n] for n in names} | {"CLOSED": self.opt.back >= 0, "TMA": self.tma}
        # Nothing lies between the last layer and this one: one kernel serves all.
        alike = self.opt.uniform and self.gains is None
        return constants | ({"COUNT": 1, "TARGET": 0} if alike else {"TARGET": target})

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
    planes, M = x.B * x.H, rows.shape[1]
    shape = backward_tiles(x.common["BD"], x.bytes, opt.tile, 1 if z_is_own else len(q), (z is not None) + read_e)
    blocks = columns.shape[1] * opt.tile // shape.keys
    # Else one program a query head, whose dK and dV are summed afterwards, in fp32.
    group = G > 1 and grouped(x.B * x.Hk * blocks, device)
    if e is None:
        cut = (M, columns.shape[1], opt.back, opt.tile**2 * x.bytes, settings.TRANSIENT)
        parts = parts_of(planes, G if group else 1, *cut)
        if group and not grouped(parts.planes // G * blocks, device):
            # A part of the heads at a time leaves too few programs a launch: 64 at 8,192 tokens.
            group, parts = False, parts_of(planes, 1, *cut)
        e = torch.empty(parts.planes, parts.slots, opt.tile, opt.tile, dtype=v.dtype, device=device)
    else:
        parts = Parts(e.shape[2], planes, [(0, planes)], [(0, M)])
    whole = torch.float32 if push else v.dtype
    # Sums that other programs or launches have a share in are kept in fp32.
    done = (group or G == 1) and len(parts.rows) == 1
    empty = lambda heads, T, d, dtype: torch.empty(x.B, heads, T, d, dtype=dtype, device=device)  # noqa: E731
    dq = torch.empty(len(q) - first, x.B, x.H, x.Tq, x.d, dtype=whole, device=device)
    dk = [empty(x.H, x.Tk, x.d, torch.float32) for _ in range(last - first)]
    heads = x.Hk if group else x.H
    dk.append(empty(heads, x.Tk, x.d, whole if done else torch.float32))
    dv = empty(heads, x.Tk, x.dv, v.dtype if done else torch.float32)
    # The first summed layer takes a carry only if one was stored.
    taking = [t for t in range(first, last + 1) if gain and not z_is_own and (t > 0 or z is not None)]
    dg = torch.zeros(len(parts.rows), len(q), x.B, x.H, blocks, dtype=torch.float32, device=device) if taking else None

    stats = _statistics(x, O, do, lse)
    for planes_of in parts.heads:
        for n, rows_of in enumerate(parts.rows):
            _keys(x, do, stats, z, z_is_own, e, read_e, dk[-1], dv, None if dg is None else dg[n], columns, shape,
                  planes_of, rows_of, parts, group, sum(1 << t for t in taking))  # fmt: skip
            for t in range(first, last + 1):
                if t < last:
                    _keys_product(x, e, t, dk[t - first], columns, shape, planes_of, rows_of, parts)
                _queries_product(x, e, t, dq[t - first], planes_of, rows_of, parts)
    if gain and write_e:
        e.mul_(gain[-1].to(e.dtype).view(1, -1, 1, 1, 1))
    dgain = torch.zeros(len(gain[first:]), x.H, dtype=torch.float32, device=device)
    for t in taking:
        dgain[t - first] = opt.scale * dg[:, t].sum((0, 1, 3))
    dk = torch.stack([_joined(t, x.Hk, whole) for t in dk]) if len(dk) > 1 else _joined(dk[0], x.Hk, whole)[None]
    dsink = lse.new_zeros(0)
    if sink is not None:
        share = (sink.float()[:, None] * LOG2E - lse).exp2().masked_fill(torch.isinf(lse), 0.0)
        delta = stats[1, :, : x.Tq].view(x.B, x.H, x.Tq)
        dsink = -(share * delta).sum((0, 2))
    return dq, dk, _joined(dv, x.Hk, v.dtype), dgain, dsink


def _statistics(x: _Layer, O: Tensor, do: Source, lse: Tensor) -> Tensor:
    """lse and Δ [2, B·H, Tq rounded up to 128]."""
    pad = cdiv(x.Tq, 128) * 128
    stats = torch.empty(2, x.B * x.H, pad, dtype=torch.float32, device=O.device)
    launch(
        row_statistics, (pad // 64, x.B * x.H), O, O.stride()[:3], do.x, do.strides, lse, stats, x.H, x.Tq, pad,
        x.B * x.H, D=x.dv, BD=x.common["BV"], BM=64,
    )  # fmt: skip
    return stats


def _keys(
    x: _Layer, do: Source, stats: Tensor, z: Tensor | None, z_is_own: bool, e: Tensor, read_e: bool, dk: Tensor,
    dv: Tensor, dg: Tensor | None, columns: Tensor, shape: settings.Shape, planes: tuple[int, int],
    rows: tuple[int, int], parts: Parts, group: bool, learned: int,
) -> None:  # fmt: skip
    """The pass over keys: E, dV and the last layer's dK."""
    opt, width, pad = x.opt, x.common["BV"], stats.shape[-1]
    stat = TensorDescriptor(stats, [2 * x.B * x.H, pad], [pad, 1], [1, shape.queries]) if x.tma else stats
    zslots = 1 if z is None else z.shape[2]
    G = x.H // x.Hk if group else 1
    numbers = x.numbers | {"factor": 1.0 / opt.divisor}
    said = 0 if opt.window < 2 or x.Tq % opt.tile else 1 if opt.window >= x.Tq else opt.window
    launch(
        keys_gradient, (columns.shape[1] * opt.tile // shape.keys, (planes[1] - planes[0]) // G),
        *x.four(x.q, shape.queries), *x.four(x.k, shape.keys), x.v(shape.keys, width, x.tma),
        do(shape.queries, width, x.tma), stats, stat, x.packed(z, shape.queries, shape.keys),
        x.packed(e, shape.queries, shape.keys), dk, dv, dg, x.gains, x.shifts, x.bounds, x.rows, columns, x.seed,
        *x.strides, do.strides, dk.stride()[:3], dv.stride()[:3], pad, *x.sizes, zslots, parts.slots, max(opt.back, 0),
        planes[0], *rows, *(numbers[name] for name in ("scale", "bend", "factor", "drop", "inverse")),
        opt.scale, **x.common, BM=shape.queries, BN=shape.keys, OWN=z_is_own, ENTERS=z is not None and not z_is_own,
        LEARNED=learned, READS_E=read_e, CLOSED=opt.back >= 0, ETYPE=_TYPES[e.dtype], GROUPED=group,
        SAID=said, PART=len(parts.rows) > 1, ADDS=rows[0] > 0, TMA=x.tma, STAGES=shape.stages, num_warps=shape.warps,
    )  # fmt: skip


def _queries_product(x: _Layer, e: Tensor, target: int, dq: Tensor, planes, rows, parts: Parts) -> None:
    """dQ of a summed layer from E."""
    opt, k, BD = x.opt, x.k[target], x.common["BD"]
    shape = product_tiles(BD, x.bytes, opt.tile)
    end = min(rows[1] * opt.tile, x.Tq)
    launch(
        queries_from_e, (cdiv(end - rows[0] * opt.tile, shape.queries), planes[1] - planes[0]),
        x.packed(e, shape.queries, shape.keys), k(shape.keys, BD, x.tma), dq, x.gains, x.bounds, x.rows, k.strides,
        dq.stride()[:3], *x.sizes, parts.slots, max(opt.back, 0), planes[0], rows[0], opt.scale, **x.products(target),
        PART=len(parts.rows) > 1, BM=shape.queries, BN=shape.keys, STAGES=shape.stages, num_warps=shape.warps,
    )  # fmt: skip


def _keys_product(x: _Layer, e: Tensor, target: int, dk: Tensor, columns: Tensor, keys: settings.Shape, planes, rows,
                  parts: Parts) -> None:  # fmt: skip
    """dK of a summed layer other than the last from E."""
    opt, q, BD = x.opt, x.q[target], x.common["BD"]
    shape = product_tiles(BD, x.bytes, opt.tile, keyed=True)
    # Queries beyond the last were written as zeros as far as the pass over keys steps, and no further.
    shape = shape._replace(queries=min(shape.queries, keys.queries))
    launch(
        keys_from_e, (columns.shape[1] * opt.tile // shape.keys, planes[1] - planes[0]),
        x.packed(e, shape.queries, shape.keys), q(shape.queries, BD, x.tma), dk, x.gains, x.bounds, x.rows, columns,
        q.strides, dk.stride()[:3], *x.sizes, parts.slots, max(opt.back, 0), planes[0], *rows, opt.scale,
        **x.products(target), PART=len(parts.rows) > 1, ADDS=rows[0] > 0, BM=shape.queries, BN=shape.keys,
        STAGES=shape.stages, num_warps=shape.warps,
    )  # fmt: skip


def _alike(tensors: list[Tensor]) -> list[Source]:
    """Sources of one layout: kernels take one set of strides for all summed layers."""
    sources = [Source(x) for x in tensors]
    if len({x.strides for x in sources}) > 1:
        sources = [Source(x.contiguous()) for x in tensors]
    return sources


def _joined(x: Tensor, Hk: int, dtype: torch.dtype) -> Tensor:
    """Sum over the query heads of a key head: x [B, H, T, d] to [B, Hk, T, d]; as it is where that is done."""
    B, H, T, d = x.shape
    if H == Hk:
        return x.to(dtype)
    out = torch.empty(B, Hk, T, d, dtype=dtype, device=x.device)
    launch(sum_heads, (cdiv(T * d, 2048), B * Hk), x, out, H // Hk, T * d, N=2048)
    return out
