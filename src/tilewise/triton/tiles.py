"""Tiles: how the kernels read and write rows of [B, H, T, d] tensors and of skewed [heads, T, R] buffers."""

import triton
import triton.language as tl


@triton.jit
def load_rows(x, strides, b, h, first, T, D: tl.constexpr, N: tl.constexpr, W: tl.constexpr, TMA: tl.constexpr):
    """The [N, W] tile of rows first … first + N − 1 of x[b, h], zero beyond T rows and D columns.

    x is a host-made descriptor with blocks [1, 1, N, W] (TMA) or a pointer with the strides (b, h, row).
    """
    if TMA:
        tile = tl.reshape(x.load([b, h, first, 0]), (N, W))
    else:
        row = first + tl.arange(0, N)
        d = tl.arange(0, W)
        at = x + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
        at = at + row.to(tl.int64)[:, None] * strides[2] + d[None, :]
        tile = tl.load(at, mask=(row[:, None] < T) & (d[None, :] < D), other=0.0)
    return tile


@triton.jit
def store_rows(x, strides, b, h, first, T, tile, D: tl.constexpr, N: tl.constexpr, W: tl.constexpr):
    """Write the tile to rows first … of x[b, h], as far as they exist."""
    row = first + tl.arange(0, N)
    d = tl.arange(0, W)
    at = x + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
    at = at + row.to(tl.int64)[:, None] * strides[2] + d[None, :]
    tl.store(at, tile.to(x.dtype.element_ty), mask=(row[:, None] < T) & (d[None, :] < D))


@triton.jit
def load_skewed(buffer, z, n, row, x, T, N: tl.constexpr, M: tl.constexpr, TMA: tl.constexpr):
    """The [N, M] tile whose entry (r, o) lies at n·head + (row + r)·stride + x + o: a strided tile, skewed in (i, δ).

    `buffer` describes the memory for pointers (z.z, z.head, z.stride, z.width); `z` is its descriptor where TMA.
    """
    if TMA:
        tile = tl.reshape(z.load([n, row, x]), (N, M))
    else:
        r = row + tl.arange(0, N)
        o = x + tl.arange(0, M)
        at = buffer.z + tl.cast(n, tl.int64) * buffer.head + r.to(tl.int64)[:, None] * buffer.stride + o[None, :]
        inside = (r[:, None] < T) & (o[None, :] >= 0) & (o[None, :] < buffer.width)
        tile = tl.load(at, mask=inside, other=0.0)
    return tile


@triton.jit
def store_skewed(buffer, z, n, row, x, T, tile, N: tl.constexpr, M: tl.constexpr, TMA: tl.constexpr):
    """Inverse of :func:`load_skewed`: one writer an entry, since (i, δ) ↔ (i, j) is a bijection."""
    if TMA:
        z.store([n, row, x], tl.reshape(tile, (1, N, M)))
    else:
        r = row + tl.arange(0, N)
        o = x + tl.arange(0, M)
        at = buffer.z + tl.cast(n, tl.int64) * buffer.head + r.to(tl.int64)[:, None] * buffer.stride + o[None, :]
        inside = (r[:, None] < T) & (o[None, :] >= 0) & (o[None, :] < buffer.width)
        tl.store(at, tile, mask=inside)


@triton.jit
def load_statistics(x, z, plane, n, first, heads, length, N: tl.constexpr, TMA: tl.constexpr):
    """Entries first … first + N − 1 of row (plane, n) of statistics [planes, heads, length]; length a multiple of 128.

    A descriptor moves them with one instruction, where pointer loads copy them once for every row of the tile.
    """
    if TMA:
        tile = tl.reshape(z.load([plane * heads + n, first]), (N,))
    else:
        tile = tl.load(x + tl.cast(plane * heads + n, tl.int64) * length + first + tl.arange(0, N))
    return tile
