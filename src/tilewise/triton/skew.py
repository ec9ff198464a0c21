"""The skew of a 64 × 64 tile without leaving its registers, and what else the Hopper kernels (Gluon) share.

A projection on a table's rows, G[r, c] = left_r·table_c, belongs to tile entry (r, j) where c = j − r + const: row r of
two neighbouring G tiles [last | here] is shifted by r. In the fragment of a Hopper product the four threads of a quad
hold a row, so the shift never leaves a quad: r = 16·warp + 8·s + ρ moves whole chunks of 8 columns by 2·warp + s, which
is the same for all threads of a warp (a select of registers for each of the two bits of `warp`, none for s), and ρ
columns by shuffles in the quad. The way back (dS to dG) is the mirror image. Neither needs shared memory or a barrier.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

__all__ = [
    "TILE", "add_biases", "barrier", "carried", "left_shift", "products", "right_shift", "skew", "skew_carried",
    "to_half", "unskew", "visible",
]  # fmt: skip

TILE = 64
"""Rows and columns of a tile."""

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""All threads of the program; Triton renamed it after 3.6."""

_HEAD = """{
.reg .u32 thread, lane, quad, row, half, odd, sum, from0, from1, pick, a, b; .reg .pred warp1, warp2, p, q, o;
mov.u32 thread, %tid.x; and.b32 a, thread, 32; setp.ne.u32 warp1, a, 0; and.b32 a, thread, 64; setp.ne.u32 warp2, a, 0;
and.b32 lane, thread, 31; and.b32 quad, lane, 3; shr.u32 row, lane, 2; shr.u32 half, row, 1; and.b32 odd, row, 1;
setp.eq.u32 o, odd, 1;
"""


def _shuffle(out: int, chosen: tuple[str, str]) -> str:
    """Register `out` of the result: of the chunks `chosen`, a thread sends the second where its receiver wraps."""
    return (
        f"selp.b32 a, {chosen[0]}, {chosen[1]}, p; selp.b32 b, {chosen[0]}, {chosen[1]}, q; "
        "shfl.sync.idx.b32 a, a, from0, 0x1c1f, 0xffffffff; shfl.sync.idx.b32 b, b, from1, 0x1c1f, 0xffffffff; "
        f"prmt.b32 ${out}, a, b, pick;\n"
    )


def _select(body: list[str], source: dict[int, str], wanted: range, step: int, bit: str, name: str) -> dict[int, str]:
    """Chunks `wanted` of the source moved by `step` chunks in warps that have `bit` set."""
    out = {}
    for m in wanted:
        out[m] = f"{name}{m}"
        body.append(f".reg .b32 {out[m]}; selp.b32 {out[m]}, {source[m + step]}, {source[m]}, {bit};\n")
    return out


def right_shift(step: int = 1) -> str:
    """PTX: outputs 0 … 15, entry (r, j) = [last | here][r, 64 + j − r]; inputs 16 … 31 are here, from 32 on last.

    Register 2n + s of a tile holds columns 8n + 2·(lane mod 4) + {0, 1} of row 16·warp + 8·s + lane / 4, two halves.
    `step`: the distance of the registers of last, 2 where it was :func:`carried`.
    """
    body = [
        _HEAD,
        "add.u32 sum, quad, half; setp.lt.u32 p, sum, 4; setp.lt.u32 q, sum, 3; sub.u32 from0, quad, half; "
        "sub.u32 from1, from0, 1; selp.b32 pick, 0x1076, 0x3210, o;\n",
    ]
    for s in range(2):
        window = {n: f"${32 + step * (2 * n + s)}" if n < 8 else f"${2 * n + s}" for n in range(16)}
        fours = _select(body, window, range(5 - s, 16 - s), -4, "warp2", f"f{s}_")
        twos = _select(body, fours, range(7 - s, 16 - s), -2, "warp1", f"t{s}_")
        body += [_shuffle(2 * n + s, (twos[8 + n - s], twos[7 + n - s])) for n in range(8)]
    return "".join(body) + "}"


def left_shift() -> str:
    """PTX: outputs 0 … 15, entry (r, c) = [before | now][r, c + r]; inputs 16 … 31 are now, 32, 34 … 62 before."""
    body = [
        _HEAD,
        "setp.ge.u32 p, quad, half; setp.gt.u32 q, quad, half; add.u32 from0, quad, half; add.u32 from1, from0, 1; "
        "selp.b32 pick, 0x5432, 0x3210, o;\n",
    ]
    for s in range(2):
        window = {n: f"${32 + 2 * (2 * n + s)}" if n < 8 else f"${2 * n + s}" for n in range(16)}
        fours = _select(body, window, range(s, 11 + s), 4, "warp2", f"f{s}_")
        twos = _select(body, fours, range(s, 9 + s), 2, "warp1", f"t{s}_")
        body += [_shuffle(2 * n + s, (twos[n + s], twos[n + s + 1])) for n in range(8)]
    return "".join(body) + "}"


_RIGHT = gl.constexpr(right_shift())
_RIGHT_CARRIED = gl.constexpr(right_shift(2))
_LEFT_CARRIED = gl.constexpr(left_shift())
_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 32))
_CARRIED = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 48))


@gluon.jit
def skew(last, here):
    """Entry (r, j) = [last | here][r, 64 + j − r], for 16-bit [64, 64] tiles in the layout of a Hopper product."""
    return gl.inline_asm_elementwise(_RIGHT, _CONSTRAINTS, [here, last], here.dtype, False, 32)


@gluon.jit
def carried(x):
    """A 16-bit tile as a loop should carry it to its next step, in int32: two columns in the even one, the odd one 0.

    The compiler gives each 16-bit value that a loop carries a register of its own and packs them anew in every step;
    of these, it drops the zeros.
    """
    return gl.inline_asm_elementwise("{mov.b32 $0, $2; mov.b32 $1, 0;}", "=r,=r,r", [x], gl.int32, True, 2)


@gluon.jit
def skew_carried(last, here):
    """:func:`skew` of a tile that was :func:`carried`."""
    return gl.inline_asm_elementwise(_RIGHT_CARRIED, _CARRIED, [here, last], here.dtype, False, 32)


@gluon.jit
def unskew(before, now):
    """Entry (r, c) = [before | now][r, c + r]: of tiles that neighbour in j, the G tile that both have a part of.

    `before` was :func:`carried`.
    """
    return gl.inline_asm_elementwise(_LEFT_CARRIED, _CARRIED, [now, before], now.dtype, False, 32)


@gluon.jit
def to_half(x):
    """fp16, saturated at ±65504."""
    return gl.inline_asm_elementwise("cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, True, 2)


@gluon.jit
def add_biases(q, w, u, v, D: gl.constexpr):
    """q += u and w = q + v for 64 rows in shared memory, rounded once; the products that follow may read them."""
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    d = gl.arange(0, D, gl.SliceLayout(0, blocked))
    content = gl.load(u + d).to(gl.float32)
    position = gl.load(v + d).to(gl.float32)
    x = q.load(blocked).to(gl.float32)
    w.store((x + position[None, :]).to(q.dtype))
    q.store((x + content[None, :]).to(q.dtype))
    fence_async_shared()
    barrier()


@gluon.jit
def products(rows, row, D: gl.constexpr, ROW: gl.constexpr):
    """rows_i · row for 64 rows in shared memory and one in device memory, in fp32."""
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    value = gl.load(row + gl.arange(0, D, gl.SliceLayout(0, blocked))).to(gl.float32)
    return gl.convert_layout(gl.sum(rows.load(blocked).to(gl.float32) * value[None, :], 1), ROW)


@gluon.jit
def visible(rule, b, i, j, Tq, Tk, offset, left, right):
    """Whether query i may see key j, for index tensors that broadcast to a tile; no key lies beyond Tk."""
    seen = (i >= 0) & (j < Tk)
    if rule.WINDOW:
        delta = i + offset - j
        seen = seen & (delta <= left) & (delta >= -right)
    if rule.BOUNDS:
        at = rule.bounds + b.to(gl.int64) * rule.bounds_batch + i * rule.bounds_row
        seen = seen & (j >= gl.load(at, mask=i < Tq, other=0)) & (j < gl.load(at + 1, mask=i < Tq, other=0))
    if rule.KEYS:
        seen = seen & (gl.load(rule.keys + b.to(gl.int64) * Tk + j, mask=j < Tk, other=0) != 0)
    return seen
