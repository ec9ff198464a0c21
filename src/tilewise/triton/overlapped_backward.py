"""The backward with overlapped passes (:mod:`.overlapped_passes`) on the host: all else is the portable one."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from .buffers import Slab, Source
from .config import Tiles
from .gradients import _Backward
from .hopper import dtype_of, rows_layout, tiles_of
from .launch import cdiv, launch
from .masks import BLOCK
from .overlapped import rows_of
from .overlapped import unsuited as unsuited_forward
from .overlapped_passes import key_overlapped, query_overlapped
from .plan import Layout
from .terms import Store

__all__ = ["OverlappedPasses", "backward", "unsuited"]

REGISTERS: dict[int, int | None] = {64: 168, 128: None}
"""Width ↦ registers a thread of the pass over queries: with 168 an SM holds three of its programs."""

KEYS: dict[int, int] = {64: 64, 128: 128}
"""Width ↦ keys of a program of the pass over keys, 16 a warp. At width 128 an SM holds one, of 8 warps."""


def unsuited(L: Layout, do: Tensor) -> list[str]:
    """Why the call must take other kernels; empty where these run it."""
    reasons = unsuited_forward(L)
    return reasons if Source(do).describable else [*reasons, "dO is not laid out in multiples of 16 bytes"]


class OverlappedPasses(_Backward):
    """The backward of a call that :func:`unsuited` has nothing against."""

    def _tiles(self, keyed: bool) -> Tiles:
        return Tiles(BLOCK, BLOCK, 4, 3, 3)

    def _arguments(self, made: dict, h0: int, heads: int):
        """The slab, and both kernels' arguments from `H` to `hi` and from `head` to `shift`."""
        L = self.L
        slab = made[0] if L.ports else Slab(L.q.x, 0, 0)
        shared = L.tables[0].shape[0] if L.ports else 1
        sizes = (L.H, L.G, shared, h0, heads, L.B, L.Tq, L.Tk, self.stats.shape[2], L.call.offset, L.lo, L.hi)
        return slab, sizes, (slab.memory.stride(0), slab.width, slab.shift - L.call.offset)

    def _constants(self):
        L = self.L
        return dict(
            D=L.d, DTYPE=dtype_of(L.dtype), TERM=bool(L.ports), SIDES=bool(L.ports) and L.sides, RANGED=L.mask.ranged,
            MASKED=L.masked() or L.mask.elementwise, ROWS=rows_layout(L.d, L.dtype), num_warps=4,
        )  # fmt: skip

    def _query_pass(self, made, values, dz, h0, heads):
        L = self.L
        slab, sizes, place = self._arguments(made, h0, heads)
        out = self.dq if self.need_q else torch.empty(L.B, L.H, L.Tq, L.d, dtype=L.dtype, device=L.device)
        store = Store(L.anchor, 0, 0, 0, 0) if dz is None else L.storing(dz)
        registers = None if L.masked() or L.mask.elementwise else REGISTERS[L.d]
        launch(
            query_overlapped, (cdiv(L.Tq, BLOCK) * L.B * heads,), tiles_of(L.q), tiles_of(L.k), tiles_of(L.v),
            tiles_of(self.g), out, slab.memory, self.stats, store.z, self.sum_buffer, L.mask.rule, L.mask.queries, L.c,
            L.call.scale, 1.0 / L.call.scale, *sizes, *place, store.head, store.stride, store.width, store.shift,
            *out.stride()[:3], L.mask.left, L.mask.right, L.mask.batch, STORE=dz is not None,
            SUMS=self.sums == "block", **self._constants(), **({"maxnreg": registers} if registers else {}),
        )  # fmt: skip

    def _key_pass(self, made, values, dz, h0, heads):
        L = self.L
        slab, sizes, place = self._arguments(made, h0, heads)
        spare = lambda d: torch.empty(L.B, L.Hk, L.Tk, d, dtype=L.dtype, device=L.device)  # noqa: E731
        dk = self.dk if self.need_k else spare(L.d)
        dv = self.dv if self.need_v else spare(L.dv)
        keys = KEYS[L.d]
        layout = gl.NVMMASharedLayout.get_default_for([keys, L.d], dtype_of(L.dtype))
        k, v = rows_of(L.k, keys, L.dtype), rows_of(L.v, keys, L.dtype)
        constants = self._constants() | {"num_warps": keys // 16}
        launch(
            key_overlapped, (cdiv(L.Tk, keys) * L.B * (heads // L.G),), tiles_of(L.q), k, v, tiles_of(self.g), dk, dv,
            slab.memory, self.stats, L.mask.rule, L.mask.keys, L.c, L.call.scale, 1.0 / L.call.scale, *sizes, *place,
            *dk.stride()[:3], *dv.stride()[:3], L.mask.left, L.mask.right, L.mask.batch, SHARED=L.G > 1, ROWS_K=layout,
            **constants,
        )  # fmt: skip


def backward(L: Layout, do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, need: list[bool], grads: list[Tensor]):
    """See :func:`tilewise.triton.backward`."""
    OverlappedPasses(L, do, dlse, o, lse, need, grads).run()
