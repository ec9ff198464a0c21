"""Decoding: a few queries a sequence against the key-value cache, with a row of carried scores beside it.

The queries of all heads of a key head are one tile, so that K and V are read once. Where programs are few, the keys are
split over several, whose results a second kernel joins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...mask import UNBOUNDED, Mask
from ...triton.launch import launch
from ...triton.plan import Source, limits_of, padded
from ..config import CarriedConfig
from .settings import KEYS, decode_step, multiprocessors
from .tiles import softmax_argument, visible

__all__ = ["decode", "refusal"]

LOG2E = 1.4426950408889634
ROWS = 128
"""Query rows (queries · heads of a key head) that one program takes."""
SPLITS = 32
"""Splits whose results are joined at a time."""

_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_RUNTIME = ["B", "H", "G", "Tq", "Tk", "offset", "left", "right", "length", "scale", "bend", "splits"]


@triton.jit
def _cache_rows(x, strides, b, h, first, T, D: tl.constexpr, N: tl.constexpr, W: tl.constexpr):
    """Rows first … of x[b, h], 0 beyond T."""
    row = first + tl.arange(0, N)
    d = tl.arange(0, W)
    at = x + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
    at = at + row.to(tl.int64)[:, None] * strides[2] + d[None, :]
    return tl.load(at, mask=(row[:, None] < T) & (d[None, :] < D), other=0.0)


@triton.jit(do_not_specialize=_RUNTIME)
def decode_keys(q, k, v, o, m_out, l_out, z_in, z_out, gains, sink, offsets, bounds, sq, sk, sv, B, H, G, Tq, Tk,
                offset, left, right, length, scale, bend, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr,
                BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ENTERS: tl.constexpr, WRITES: tl.constexpr,
                GAIN: tl.constexpr, SOFTCAP: tl.constexpr, SINK: tl.constexpr, BOUNDED: tl.constexpr,
                BATCHED: tl.constexpr, OFFSETS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Unnormalised O [splits, B·H·Tq, d_v], and its maximum and sum in log2 units: program (split, batch · key heads).

    Row r of a program is query r mod Tq of head hk·G + r div Tq. Keys [split · length, …) of the cache; the scores are
    read from z_in and written to z_out, [B, H, Tq, Tk], 0 where not seen.
    """
    split = tl.program_id(0)
    n = tl.program_id(1)
    heads = H // G
    b = n // heads
    hk = n % heads
    r = tl.arange(0, BM)
    inside = r < G * Tq
    h = hk * G + tl.minimum(r // Tq, G - 1)
    t = r % Tq
    d = tl.arange(0, BD)
    at = q + tl.cast(b, tl.int64) * sq[0] + h.to(tl.int64)[:, None] * sq[1] + t.to(tl.int64)[:, None] * sq[2]
    tile = tl.load(at + d[None, :], mask=inside[:, None] & (d[None, :] < D), other=0.0)
    position = t + offset
    if OFFSETS:
        position = t + tl.load(offsets + b).to(tl.int32)
    lo = tl.maximum(position - left, 0)
    hi = tl.minimum(position + right + 1, Tk)
    if BOUNDED:
        which = t
        if BATCHED:
            which = b * Tq + t
        lo = tl.maximum(lo, tl.load(bounds + 2 * which))
        hi = tl.minimum(hi, tl.load(bounds + 2 * which + 1))
    hi = tl.where(inside, hi, lo)
    row = (tl.cast(b, tl.int64) * H + h) * Tq + t

    gain = tl.zeros([BM], tl.float32) + 1.0
    if GAIN:
        gain = tl.load(gains + h).to(tl.float32)
    acc = tl.zeros([BM, BV], tl.float32)
    l = tl.zeros([BM], tl.float32)
    # Finite, so that rows whose first keys are masked do not meet −∞ − (−∞).
    m = tl.full([BM], -3.0e38, tl.float32)
    if SINK:
        if split == 0:
            logit = tl.load(sink + h).to(tl.float32) * 1.4426950408889634
            m = tl.maximum(m, logit)
            l = tl.math.exp2(logit - m)
    begin = split * length
    end = tl.minimum(begin + length, Tk)
    some = hi > lo
    first = tl.min(tl.where(some, lo, Tk), 0)
    last = tl.max(tl.where(some, hi, 0), 0)
    a = tl.minimum(tl.maximum(first // BN * BN, begin), end)
    e = tl.maximum(tl.minimum(last, end), a)
    if WRITES:
        empty = tl.zeros([BM, BN], z_out.dtype.element_ty)
        for j0 in range(begin, a, BN):
            j = j0 + tl.arange(0, BN)
            tl.store(z_out + row[:, None] * Tk + j[None, :], empty, mask=inside[:, None] & (j[None, :] < Tk))
    for j0 in tl.range(a, e, BN, num_stages=STAGES):
        j = j0 + tl.arange(0, BN)
        kt = _cache_rows(k, sk, b, hk, j0, Tk, D, BN, BD)
        stored = inside[:, None] & (j[None, :] < Tk)
        u = tl.dot(tile, tl.trans(kt), input_precision="ieee")
        if ENTERS:
            entered = tl.load(z_in + row[:, None] * Tk + j[None, :], mask=stored, other=0.0).to(tl.float32)
            if tile.dtype == tl.float32:
                # Not u + …, which Triton merges into the product: every product would round at the sum's size.
                u = tl.fma(tl.broadcast_to(gain[:, None], u.shape), entered, u)
            else:
                # With a multiply-add Triton 3.6 moves an fp16 row's sums to another layout: 255 registers for 181.
                u += gain[:, None] * entered
        seen = visible(lo, hi, j)
        if WRITES:
            z = tl.where(seen, u, 0.0)
            if z_out.dtype.element_ty == tl.float16:
                z = tl.clamp(z, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
            z = z.to(z_out.dtype.element_ty)
            tl.store(z_out + row[:, None] * Tk + j[None, :], z, mask=stored)
            u = z.to(tl.float32)
        s, _ = softmax_argument(u, scale, bend, SOFTCAP)
        s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - new[:, None])
        shrink = tl.math.exp2(m - new)
        l = l * shrink + tl.sum(p, 1)
        m = new
        vt = _cache_rows(v, sv, b, hk, j0, Tk, DV, BN, BV)
        acc = tl.dot(p.to(vt.dtype), vt, acc * shrink[:, None], input_precision="ieee")
    if WRITES:
        empty = tl.zeros([BM, BN], z_out.dtype.element_ty)
        for j0 in range(a + (e - a + BN - 1) // BN * BN, end, BN):
            j = j0 + tl.arange(0, BN)
            tl.store(z_out + row[:, None] * Tk + j[None, :], empty, mask=inside[:, None] & (j[None, :] < Tk))
    c = tl.arange(0, BV)
    place = tl.cast(split, tl.int64) * B * H * Tq + row
    tl.store(o + place[:, None] * DV + c[None, :], acc, mask=inside[:, None] & (c[None, :] < DV))
    tl.store(m_out + place, m, mask=inside)
    tl.store(l_out + place, l, mask=inside)


@triton.jit(do_not_specialize=["rows", "splits"])
def join_splits(o, m, l, out, rows, splits, DV: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr):
    """O of one row from what every split found, 0 if the row sees no key. Splits are summed BN at a time, in order.

    One after the other, 0.8 µs each, they took longer than the keys (66 splits, 53 µs on an H200).
    """
    r = tl.program_id(0)
    n = tl.arange(0, BN)
    c = tl.arange(0, BV)
    top = -3.0e38
    for a in range(0, splits, BN):
        place = (a + n).to(tl.int64) * rows + r
        top = tl.maximum(top, tl.max(tl.load(m + place, mask=a + n < splits, other=-3.0e38), 0))
    total = 0.0
    acc = tl.zeros([BV], tl.float32)
    for a in range(0, splits, BN):
        inside = a + n < splits
        place = (a + n).to(tl.int64) * rows + r
        share = tl.math.exp2(tl.load(m + place, mask=inside, other=-3.0e38) - top)
        total += tl.sum(share * tl.load(l + place, mask=inside, other=0.0), 0)
        tile = tl.load(o + place[:, None] * DV + c[None, :], mask=inside[:, None] & (c[None, :] < DV), other=0.0)
        acc += tl.sum(share[:, None] * tile, 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + tl.cast(r, tl.int64) * DV + c, acc.to(out.dtype.element_ty), mask=c < DV)


def refusal(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, row_dtype: torch.dtype | None) -> str | None:
    """Why the kernel cannot run a step, or None."""
    if q.device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"q is on {q.device.type}; the kernels run on cuda"
    if q.dtype not in _TYPES:
        return f"q is {q.dtype}; the kernels take fp16, bf16 and fp32"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"head widths are {q.shape[-1]} and {v.shape[-1]}; the kernels take up to 256"
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    if rows > ROWS:
        return f"a key head serves {rows} query rows; the kernel takes up to {ROWS}: carried_attention takes more"
    if _step_of(q, k, v) is None:
        return (
            f"a program has {limits_of(q.device).shared} bytes of shared memory, too few for {rows} query rows of "
            f"{q.dtype}, {max(q.shape[-1], v.shape[-1])} wide"
        )
    if k.shape[0] * k.shape[1] > 65535:
        return f"batch · key heads is {k.shape[0] * k.shape[1]}; the kernel takes up to 65535, as a CUDA grid does"
    if row_dtype is not None and row_dtype not in _TYPES:
        return f"row_dtype is {row_dtype}; the kernels store fp16, bf16 and fp32"
    if mask is not None and (mask.keys is not None or mask.dense is not None):
        return f"mask has {'keys' if mask.keys is not None else 'dense'}; the kernel takes one interval of keys a row"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return "gradients are wanted and the kernel has none"
    return None


def _rows(q: Tensor, k: Tensor) -> int:
    """Query rows of a program."""
    return max(16, padded(q.shape[1] // k.shape[1] * q.shape[2]))


def _step_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int] | None:
    width = padded(max(q.shape[-1], v.shape[-1]))
    return decode_step(_rows(q, k), width, q.element_size(), limits_of(q.device).shared)


def decode(
    q: Tensor, k: Tensor, v: Tensor, row: Tensor | None, layer: int, config: CarriedConfig, *, mask: Mask | None,
    offset: int | Tensor | None, gain: Tensor | None, sink: Tensor | None, row_dtype: torch.dtype | None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See :func:`tilewise.carried.carried_decode`. `splits` of the keys: enough programs for the device by default."""
    B, H, Tq, d = q.shape
    Hk, Tk, dv = v.shape[1:]
    shape = config.mask(layer, mask)
    keys, stages = _step_of(q, k, v)
    writes = layer < config.layers - 1
    if splits is None:
        splits = max(1, min(2 * multiprocessors(q.device) // (B * Hk), Tk // (4 * KEYS)))
    length = cdiv(cdiv(Tk, splits), KEYS) * KEYS
    splits = cdiv(Tk, length)
    z = torch.empty(B, H, Tq, Tk, dtype=row_dtype or torch.float32, device=q.device) if writes else None
    rows = B * H * Tq
    o = torch.empty(splits, rows, dv, dtype=torch.float32, device=q.device)
    m, l = torch.empty(2, splits, rows, dtype=torch.float32, device=q.device)
    out = torch.empty(B, H, Tq, dv, dtype=q.dtype, device=q.device)
    bounds = None if shape.bounds is None else shape.bounds.to(q.device).expand(-1, Tq, -1).contiguous()
    cap = config.softcap or 0.0
    scale = (d**-0.5 if config.scale is None else config.scale) * LOG2E / config.divisor(layer)
    per = isinstance(offset, Tensor)
    position = 0 if per else Tk - Tq if offset is None else offset
    sources = [Source(x) for x in (q, k, v)]
    launch(
        decode_keys, (splits, B * Hk), *(x.x for x in sources), o, m, l, None if row is None else row.contiguous(), z,
        gain if config.scaling == "gain" and row is not None else None, sink,
        offset.to(q.device).contiguous() if per else None, bounds, *(x.strides for x in sources), B, H, H // Hk, Tq, Tk,
        position, min(shape.left, UNBOUNDED), min(shape.right, Tk), length, 2.0 * scale / cap if cap else scale,
        cap * LOG2E, D=d, DV=dv, BD=padded(d), BV=padded(dv), BM=_rows(q, k), BN=keys,
        ENTERS=row is not None, WRITES=writes, GAIN=config.scaling == "gain" and row is not None, SOFTCAP=cap > 0.0,
        SINK=sink is not None, BOUNDED=bounds is not None, BATCHED=bounds is not None and bounds.shape[0] > 1,
        OFFSETS=per, STAGES=stages, num_warps=4,
    )  # fmt: skip
    launch(join_splits, (rows, 1), o, m, l, out, rows, splits, DV=dv, BV=padded(dv), BN=SPLITS, num_warps=4)
    return out, z


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉. Triton's own serves kernels too and costs the host ten times as much."""
    return -(-a // b)
