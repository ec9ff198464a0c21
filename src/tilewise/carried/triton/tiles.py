"""What the carried kernels share: packed tiles, summed scores, the softmax's argument and its slope."""

import triton
import triton.language as tl

from ...triton.tiles import load_rows

# Lengths, strides and scales must not make a new kernel each.
RUNTIME = [
    "B", "H", "G", "Tq", "Tk", "M", "slots", "zslots", "back", "first_plane", "first_row", "end_row",
    "scale", "bend", "drop", "inverse", "factor", "final",
]  # fmt: skip


@triton.jit
def base_of(rows, m, back, CLOSED: tl.constexpr):
    """Where tile row m starts: tile (m, n) lies in slot base + n. Computed where rows reach `back` tiles back."""
    if CLOSED:
        # Rows 0 … back hold 1, 2, … tiles, later ones back + 1; the first tile of such a row m is m − back.
        ramp = tl.minimum(m, back)
        base = ramp * (ramp + 1) // 2 + tl.maximum(m - back, 0) * back
    else:
        base = tl.load(rows + m)
    return base


@triton.jit
def start_of(rows, m, M, back, CLOSED: tl.constexpr, PART: tl.constexpr):
    """The slot of the first tile of row m, where a buffer that holds a part of the rows begins; 0 for a whole one."""
    start = 0
    if PART:
        start = base_of(rows, m, back, CLOSED) + tl.load(rows + M + m)
    return start


@triton.jit
def load_packed(z, slot, row, column, S: tl.constexpr, N: tl.constexpr, W: tl.constexpr, TMA: tl.constexpr):
    """The [N, W] part at (row, column) of the S × S tile in `slot`, a descriptor [slots · S, S] or a pointer."""
    if TMA:
        tile = z.load([slot * S + row, column])
    else:
        r = row + tl.arange(0, N)
        c = column + tl.arange(0, W)
        tile = tl.load(z + tl.cast(slot, tl.int64) * (S * S) + r[:, None] * S + c[None, :])
    return tile


@triton.jit
def store_packed(z, slot, row, column, tile, S: tl.constexpr, N: tl.constexpr, W: tl.constexpr, TMA: tl.constexpr):
    """Write the [N, W] part at (row, column) of the S × S tile in `slot`."""
    if TMA:
        z.store([slot * S + row, column], tile)
    else:
        r = row + tl.arange(0, N)
        c = column + tl.arange(0, W)
        tl.store(z + tl.cast(slot, tl.int64) * (S * S) + r[:, None] * S + c[None, :], tile)


@triton.jit
def bounds_of(bounds, t, b, i, B, Tq, BATCHED: tl.constexpr):
    """lo and hi of rows i in summed layer t: bounds is [summed, 2, 1 or B, Tq]; rows beyond Tq see nothing."""
    if BATCHED:
        at = bounds + tl.cast(2 * t * B + b, tl.int64) * Tq + i
        step = tl.cast(B, tl.int64) * Tq
    else:
        at = bounds + tl.cast(2 * t, tl.int64) * Tq + i
        step = tl.cast(Tq, tl.int64)
    lo = tl.load(at, mask=i < Tq, other=0)
    return lo, tl.load(at + step, mask=i < Tq, other=0)


@triton.jit
def visible(lo, hi, j, KEYED: tl.constexpr = False):
    """Which entries of a tile are seen: queries with bounds lo, hi; keys j. KEYED: the tile is [keys, queries]."""
    if KEYED:
        seen = (j[:, None] >= lo[None, :]) & (j[:, None] < hi[None, :])
    else:
        seen = (j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None])
    return seen


@triton.jit
def by_query(x, KEYED: tl.constexpr):
    """A number a query, shaped to meet a tile of scores."""
    if KEYED:
        y = x[None, :]
    else:
        y = x[:, None]
    return y


@triton.jit
def load_each(x, strides, b, h, first, T, D: tl.constexpr, N: tl.constexpr, W: tl.constexpr, COUNT: tl.constexpr,
              TMA: tl.constexpr):  # fmt: skip
    """Tiles of the first COUNT of four tensors; the others repeat the first."""
    t0 = load_rows(x[0], strides, b, h, first, T, D, N, W, TMA)
    t1 = t0
    t2 = t0
    t3 = t0
    if COUNT > 1:
        t1 = load_rows(x[1], strides, b, h, first, T, D, N, W, TMA)
    if COUNT > 2:
        t2 = load_rows(x[2], strides, b, h, first, T, D, N, W, TMA)
    if COUNT > 3:
        t3 = load_rows(x[3], strides, b, h, first, T, D, N, W, TMA)
    return t0, t1, t2, t3


@triton.jit
def load_shifts(shifts, bh, i, planes, Tq, COUNT: tl.constexpr, CENTRE: tl.constexpr):
    """What centring subtracts from rows i in each of four summed layers: shifts is [COUNT, planes, Tq]."""
    s0 = tl.zeros([i.shape[0]], tl.float32)
    s1 = s0
    s2 = s0
    s3 = s0
    if CENTRE:
        at = shifts + tl.cast(bh, tl.int64) * Tq + i
        step = tl.cast(planes, tl.int64) * Tq
        s0 = tl.load(at, mask=i < Tq, other=0.0)
        if COUNT > 1:
            s1 = tl.load(at + step, mask=i < Tq, other=0.0)
        if COUNT > 2:
            s2 = tl.load(at + 2 * step, mask=i < Tq, other=0.0)
        if COUNT > 3:
            s3 = tl.load(at + 3 * step, mask=i < Tq, other=0.0)
    return s0, s1, s2, s3


@triton.jit
def load_gains(gains, h, H, COUNT: tl.constexpr, GAIN: tl.constexpr):
    """The gains of head h in each of four summed layers: gains is [COUNT, H]."""
    g0 = 1.0
    g1 = 1.0
    g2 = 1.0
    g3 = 1.0
    if GAIN:
        g0 = tl.load(gains + h)
        if COUNT > 1:
            g1 = tl.load(gains + H + h)
        if COUNT > 2:
            g2 = tl.load(gains + 2 * H + h)
        if COUNT > 3:
            g3 = tl.load(gains + 3 * H + h)
    return g0, g1, g2, g3


@triton.jit
def rounded_to(u, dtype: tl.constexpr, TOP: tl.constexpr):
    """u as it reads back once stored; fp16 needs ±TOP, or it would round to infinity (TOP 0: fp32's range)."""
    if TOP > 0:
        u = tl.clamp(u, -TOP, TOP, propagate_nan=tl.PropagateNan.ALL)
    return u.to(dtype).to(tl.float32)


@triton.jit
def summed(u, q, k, gains, shifts, bounds, b, B, i, j, Tq, DTYPE: tl.constexpr, TOP: tl.constexpr,
           ENTERS: tl.constexpr, COUNT: tl.constexpr, GAIN: tl.constexpr, CENTRE: tl.constexpr, ROUND: tl.constexpr,
           UNIFORM: tl.constexpr, BATCHED: tl.constexpr, KEYED: tl.constexpr):  # fmt: skip
    """Unscaled scores of the last of COUNT layers, and the carry that entered each of four layers.

    q, k, gains and shifts are tuples, an entry a layer; u is the carry that enters the first (ENTERS). In 16-bit layers
    it is the accumulator that the next product adds to, so it costs no addition. Bit t of ROUND: layer t's sum is what
    was stored. KEYED: tiles are [keys, queries].
    """
    t0 = u
    t1 = u
    t2 = u
    t3 = u
    shift = tl.zeros([i.shape[0]], tl.float32)
    for t in tl.static_range(COUNT):
        if t == 1:
            t1 = u
        if t == 2:
            t2 = u
        if t == 3:
            t3 = u
        if GAIN and (ENTERS or t > 0):
            u = u * gains[t]
            shift = shift * gains[t]
        if KEYED:
            left = k[t]
            right = tl.trans(q[t])
        else:
            left = q[t]
            right = tl.trans(k[t])
        if (ENTERS or t > 0) and left.dtype == tl.float32:
            # Added to the carry product by product, the sum of four layers has 2.5 times the error. An addition of its
            # own would be merged into the product.
            u = tl.fma(tl.dot(left, right, input_precision="ieee"), tl.full(u.shape, 1.0, tl.float32), u)
        elif ENTERS or t > 0:
            u = tl.dot(left, right, u, input_precision="ieee")
        else:
            u = tl.dot(left, right, input_precision="ieee")
        if CENTRE:
            shift += shifts[t]
            if t == COUNT - 1 or (ROUND >> t) & 1:
                u = u - by_query(shift, KEYED)
                shift = shift * 0.0
        if (ROUND >> t) & 1:
            u = rounded_to(u, DTYPE, TOP)
        if not UNIFORM and t < COUNT - 1:
            lo, hi = bounds_of(bounds, t, b, i, B, Tq, BATCHED)
            u = tl.where(visible(lo, hi, j, KEYED), u, 0.0)
    return u, (t0, t1, t2, t3)


@triton.jit
def softmax_argument(u, scale, bend, SOFTCAP: tl.constexpr):
    """Scores in log2 units from unscaled sums u, and 1 − tanh² where there is a cap.

    scale is s·log2 e / c_i; with a cap it is 2·s·log2 e / (c_i·cap), so that exp2 gives e^{2x/cap}, and bend is
    cap·log2 e.
    """
    if SOFTCAP:
        tanh = 1.0 - 2.0 / (tl.math.exp2(u * scale) + 1.0)
        return bend * tanh, 1.0 - tanh * tanh
    return u * scale, u


@triton.jit
def shifts_of(q, mean, sq, b, h, hk, Hk, i0, Tq, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):
    """q_i · k̄ in fp32 of BM rows: what centring subtracts from them. mean is [B, Hk, D].

    Any shift of a row is right, so a mean that a later key makes infinite or NaN is 0 there: rows before it stay.
    """
    d = tl.arange(0, BD)
    tile = load_rows(q, sq, b, h, i0, Tq, D, BM, BD, False).to(tl.float32)
    k = tl.load(mean + (b * Hk + hk) * D + d, mask=d < D, other=0.0)
    k = tl.where(tl.abs(k) < float("inf"), k, 0.0)
    return tl.sum(tile * k[None, :], 1)


@triton.jit(do_not_specialize=["H", "G", "Tq"])
def row_shift(q, mean, out, sq, H, G, Tq, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr):
    """out[b, h, i] = q_i · k̄ (see :func:`shifts_of`), for kernels that meet the queries of several layers, or often."""
    i0 = tl.program_id(0) * BM
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    i = i0 + tl.arange(0, BM)
    shift = shifts_of(q, mean, sq, b, h, h // G, H // G, i0, Tq, D, BM, BD)
    tl.store(out + tl.cast(bh, tl.int64) * Tq + i, shift, mask=i < Tq)


@triton.jit(do_not_specialize=["H", "Tq", "pad", "planes"])
def row_statistics(o, do, lse, stats, so, sdo, H, Tq, pad, planes, D: tl.constexpr, BD: tl.constexpr,
                   BM: tl.constexpr):  # fmt: skip
    """stats [2, B·H, pad]: lse (+∞ beyond Tq, so that P is 0 there) and Δ = Σ_d dO · O in fp32 (0 there).

    Rows are padded so that the pass over keys loads them by descriptor: pointer loads copy a row of statistics once for
    every row of the tile.
    """
    i0 = tl.program_id(0) * BM
    bh = tl.program_id(1)
    a = load_rows(o, so, bh // H, bh % H, i0, Tq, D, BM, BD, False).to(tl.float32)
    g = load_rows(do, sdo, bh // H, bh % H, i0, Tq, D, BM, BD, False).to(tl.float32)
    i = i0 + tl.arange(0, BM)
    row = tl.load(lse + tl.cast(bh, tl.int64) * Tq + i, mask=i < Tq, other=float("inf"))
    at = stats + tl.cast(bh, tl.int64) * pad + i
    tl.store(at, row, mask=i < pad)
    tl.store(at + tl.cast(planes, tl.int64) * pad, tl.sum(a * g, 1), mask=i < pad)


@triton.jit(do_not_specialize=["H", "G", "T"])
def sum_heads(x, y, out, other, strides, others, H, G, T, D: tl.constexpr, N: tl.constexpr):
    """out[b, h, t] = Σ_g x[b, h·G + g, t] in order; and, in a second grid of such programs, other from y.

    Program (N numbers, plane b·H + h, which of the two). x and y are [B, H·G, T, D] in memory.
    """
    at = tl.program_id(0) * N + tl.arange(0, N)
    n = tl.cast(tl.program_id(1), tl.int64)
    t = at // D
    inside = t < T
    if tl.program_id(2) == 0:
        total = tl.zeros([N], tl.float32)
        for g in range(G):
            total += tl.load(x + (n * G + g) * T * D + at, mask=inside, other=0.0)
        to = (n // H) * strides[0] + (n % H) * strides[1] + t.to(tl.int64) * strides[2] + at % D
        tl.store(out + to, total.to(out.dtype.element_ty), mask=inside)
    else:
        total = tl.zeros([N], tl.float32)
        for g in range(G):
            total += tl.load(y + (n * G + g) * T * D + at, mask=inside, other=0.0)
        to = (n // H) * others[0] + (n % H) * others[1] + t.to(tl.int64) * others[2] + at % D
        tl.store(other + to, total.to(other.dtype.element_ty), mask=inside)
