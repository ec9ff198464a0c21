"""What the launches of a layer depend on beside its tensors, and what follows from it: worked out once, since a layer's
kernels take the GPU some hundred microseconds."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...triton.direct import Prepared
from ...triton.launch import cdiv
from ...triton.masks import dropping
from ...triton.plan import limits_of, padded
from ..config import Options
from ..layout import room
from . import settings
from .backward import keys_from_e, keys_gradient, queries_from_e
from .forward import attend
from .settings import MOST, backward_tiles, forward_tiles, grouped, product_tiles
from .tiles import row_shift, row_statistics, sum_heads
from .transient import Parts, parts_of

__all__ = ["TYPES", "Backward", "Facts", "Forward", "backward_of", "forward_of", "strides_of"]

LOG2E = 1.4426950408889634
PLANES = 65535
"""Programs that a CUDA grid takes in its second dimension, which is that of batch · heads."""

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


class Facts(NamedTuple):
    """Of one layer's call.

    Attributes:
        opt: the layer's numbers.
        count: summed layers.
        q, k, v: shapes.
        q_strides, k_strides, v_strides: of all summed layers alike.
        dtype, device: of the inputs.
        aligned: whether they all begin at multiples of 16 bytes, as descriptors want.
        gain, centre, batched: whether there are gains, shifts, bounds a sequence.
        rows, columns: tile rows and columns.
        slots: tiles of a plane in the packed buffers that the kernels read or write scores in; 1 without.
        tuned: :func:`tilewise.carried.triton.settings.tuned`.
    """

    opt: Options
    count: int
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    q_strides: tuple[int, ...]
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool
    gain: bool
    centre: bool
    batched: bool
    rows: int
    columns: int
    slots: int
    tuned: tuple


def strides_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The first three strides; a dimension of one entry may have any, so that one is taken which descriptors accept."""
    return tuple(s if n > 1 else 128 for s, n in zip(strides[:3], shape[:3], strict=True))


class Block:
    """Makes descriptors with one shape, strides and block, or hands on the tensor where there are none."""

    __slots__ = ("block", "fields", "shape", "strides", "used")

    def __init__(self, used: bool, shape: list[int], strides: list[int], block: list[int]) -> None:
        self.used, self.shape, self.strides, self.block, self.fields = used, shape, strides, block, None

    def __call__(self, x: Tensor | None):
        if x is None or not self.used:
            return x
        if self.fields is None:
            # Triton looks at every number of a descriptor; they are the same ones from now on.
            made = TensorDescriptor(x, self.shape, self.strides, self.block)
            self.fields = vars(made) | {"base": None}
            return made
        if x.data_ptr() % 16:
            raise ValueError(f"a packed buffer begins at {x.data_ptr():#x}; expected a multiple of 16")
        made = object.__new__(TensorDescriptor)
        vars(made).update(self.fields)
        made.base = x
        return made


class _Layer:
    """What both passes need."""

    def __init__(self, x: Facts) -> None:
        self.facts, opt = x, x.opt
        self.B, self.H, self.Tq, self.d = x.q
        self.Hk, self.Tk, self.dv = x.v[1:]
        self.G, self.planes = self.H // self.Hk, self.B * self.H
        self.BD, self.BV, self.bytes = padded(self.d), padded(self.dv), x.dtype.itemsize
        self.strides = tuple(strides_of(*pair) for pair in ((x.q, x.q_strides), (x.k, x.k_strides), (x.v, x.v_strides)))
        limits = limits_of(x.device)
        self.dropout, self.shared = opt.dropout_p > 0.0, limits.shared
        self.tma = limits.descriptors and self.bytes < 4 and x.aligned and self._describable(*self.strides)
        self.closed, self.back = opt.back >= 0, max(opt.back, 0)
        cap = opt.softcap
        scale = opt.scale * LOG2E / opt.divisor
        self.numbers = (2.0 * scale / cap if cap else scale, cap * LOG2E)
        self.dropping = (dropping(opt.dropout_p), 1.0 / (1.0 - opt.dropout_p))
        self.sizes = (self.B, self.H, self.G, self.Tq, self.Tk, x.rows)
        top = 65504.0 if opt.carry_dtype == torch.float16 else 0.0
        self.common = {
            "D": self.d, "DV": self.dv, "BD": self.BD, "BV": self.BV, "S": opt.tile, "DTYPE": TYPES[opt.carry_dtype],
            "TOP": top, "COUNT": x.count, "GAIN": x.gain, "CENTRE": x.centre,
            "ROUND": sum(bool(r) << t for t, r in enumerate(opt.rounded)), "UNIFORM": opt.uniform,
            "BATCHED": x.batched, "SOFTCAP": cap > 0.0, "DROPOUT": self.dropout,
        }  # fmt: skip
        self.shift = Prepared(
            row_shift, (cdiv(self.Tq, 64), self.planes), (self.strides[0], self.H, self.G, self.Tq),
            {"D": self.d, "BD": self.BD, "BM": 64},
        )  # fmt: skip

    def _describable(self, *strides: tuple[int, ...]) -> bool:
        return all(s * self.bytes % 16 == 0 for each in strides for s in each)

    def queries(self, rows: int) -> Block:
        return self._inputs(self.facts.q, self.strides[0], rows, self.BD)

    def keys(self, rows: int) -> Block:
        return self._inputs(self.facts.k, self.strides[1], rows, self.BD)

    def values(self, rows: int) -> Block:
        return self._inputs(self.facts.v, self.strides[2], rows, self.BV)

    def _inputs(self, shape: tuple[int, ...], strides: tuple[int, ...], rows: int, width: int) -> Block:
        return Block(self.tma, list(shape), [*strides, 1], [1, 1, rows, width])

    def packed(self, tiles: int, rows: int, columns: int) -> Block:
        """For a buffer of so many tiles."""
        S = self.facts.opt.tile
        return Block(self.tma, [tiles * S, S], [S, 1], [rows, columns])

    def shifts(self, q: list[Tensor], centre: list[Tensor]) -> Tensor:
        """What centring subtracts from the rows of every summed layer."""
        out = torch.empty(len(centre), self.B, self.H, self.Tq, dtype=torch.float32, device=self.facts.device)
        for x, mean, each in zip(q, centre, [out] if len(centre) == 1 else out.unbind(), strict=True):
            self.shift(x, mean.float().contiguous(), each)
        return out


def four(block: Block, tensors: list[Tensor]) -> list:
    """Arguments for the tensors of up to four summed layers."""
    return [*map(block, tensors), *(None,) * (MOST - len(tensors))]


class Forward(_Layer):
    """The forward pass of a layer: `enters` and `writes` say which packed scores there are.

    Attributes:
        room: shape and strides of O.
        forms: whether the kernel forms what centring subtracts, from k̄, instead of loading it.
    """

    def __init__(self, x: Facts, enters: bool, writes: bool, sink: bool) -> None:
        super().__init__(x)
        shape = forward_tiles(max(self.BD, self.BV), self.bytes, x.opt.tile, x.count, enters + writes,
                              dropout=self.dropout, shared=self.shared)  # fmt: skip
        self.q, self.k, self.v = self.queries(shape.queries), self.keys(shape.keys), self.values(shape.keys)
        self.z = self.packed(self.planes * x.slots, shape.queries, shape.keys)
        self.forms = x.centre and x.count == 1
        meta = self.common | {
            "BM": shape.queries, "BN": shape.keys, "ENTERS": enters, "WRITES": writes, "CLOSED": self.closed,
            "FORMS": self.forms, "SINK": sink, "TMA": self.tma, "STAGES": shape.stages, "num_warps": shape.warps,
        }  # fmt: skip
        numbers = (*self.strides, by_token(self.H, self.Tq, self.dv), *self.sizes, x.slots, self.back, *self.numbers,
                   *self.dropping)  # fmt: skip
        self.room = room(self.B, self.H, self.Tq, self.dv)
        self.attend = Prepared(attend, (cdiv(self.Tq, shape.queries), self.planes), numbers, meta)


class Backward(_Layer):
    """The backward pass of a layer.

    Args:
        x: facts; `slots` is that of the scores that are read.
        o_strides, do_strides, do_aligned: of O and dO.
        own, enters: whether the scores that are read are the layer's own, or those that entered it.
        e: tiles of a plane in a buffer of E that outlives this pass, or 0, and its dtype.
        read_e: whether E is read.
        push: whether every summed layer gets its gradients here.

    Attributes:
        first: the first summed layer that gets gradients.
        parts: how E is cut.
        whole: whether the pass over keys writes dK and dV as they are returned; else fp32 of `heads` heads.
        taking: layers whose gains get gradients.
        rooms: shape and strides of dQ, dK and dV, and the dtype of each.
        steps: of each part, its part of the rows, the pass over keys, and (layer, dQ, dK or None) of every layer.
    """

    def __init__(
        self, x: Facts, o_strides: tuple[int, ...], do_strides: tuple[int, ...], do_aligned: bool, own: bool,
        enters: bool, e: tuple[int, torch.dtype], read_e: bool, push: bool,
    ) -> None:  # fmt: skip
        super().__init__(x)
        opt, last = x.opt, x.count - 1
        self.first = 0 if push else last
        self.shape = shape = backward_tiles(max(self.BD, self.BV), self.bytes, opt.tile, 1 if own else x.count,
                                            (own or enters) + read_e, dropout=self.dropout,
                                            shared=self.shared)  # fmt: skip
        self.blocks = x.columns * opt.tile // shape.keys
        # Else one program a query head, whose dK and dV are summed afterwards, in fp32.
        self.group = self.G > 1 and grouped(self.B * self.Hk * self.blocks, x.device)
        self.parts = Parts(e[0], self.planes, [(0, self.planes)], [(0, x.rows)]) if e[0] else self._cut()
        # Sums that other programs or launches have a share in are kept in fp32.
        self.whole = (self.group or self.G == 1) and len(self.parts.rows) == 1
        self.heads = self.Hk if self.group else self.H
        stack, kind = ((last + 1,), torch.float32) if push else ((), x.dtype)
        self.rooms = (
            (room(*stack, self.B, self.H, self.Tq, self.d), kind),
            (room(*stack, self.B, self.Hk, self.Tk, self.d), kind),
            (room(self.B, self.Hk, self.Tk, self.dv), x.dtype),
        )  # fmt: skip
        # The first summed layer takes a carry only if one was stored.
        self.taking = [t for t in range(self.first, last + 1) if x.gain and not own and (t > 0 or enters)]
        self.pad = cdiv(self.Tq, 128) * 128

        rows = (*x.q[:3], self.dv)
        self.do_strides = strides_of(rows, do_strides)
        self.tma = self.tma and do_aligned and self._describable(self.do_strides)
        self.statistics = Prepared(
            row_statistics, (self.pad // 64, self.planes),
            (strides_of(rows, o_strides), self.do_strides, self.H, self.Tq, self.pad, self.planes),
            {"D": self.dv, "BD": self.BV, "BM": 64},
        )  # fmt: skip
        self.q, self.k, self.v = self.queries(shape.queries), self.keys(shape.keys), self.values(shape.keys)
        self.do = self._inputs(rows, self.do_strides, shape.queries, self.BV)
        self.stat = Block(self.tma, [2 * self.planes, self.pad], [self.pad, 1], [1, shape.queries])
        self.z = self.packed(self.planes * x.slots, shape.queries, shape.keys)
        self.e = self._of_e(shape)

        self.product = product_tiles(self.BD, self.bytes, opt.tile, shared=self.shared)
        self.product_e, self.product_k = self._of_e(self.product), self.keys(self.product.keys)
        # Queries beyond the last were written as zeros as far as the pass over keys steps, and no further.
        keyed = product_tiles(self.BD, self.bytes, opt.tile, keyed=True, shared=self.shared)
        self.keyed = keyed = keyed._replace(queries=min(keyed.queries, shape.queries))
        self.keyed_e, self.keyed_q = self._of_e(keyed), self.queries(keyed.queries)

        said = 0 if opt.window < 2 or self.Tq % opt.tile else 1 if opt.window >= self.Tq else opt.window
        self.meta = self.common | {
            "BM": shape.queries, "BN": shape.keys, "OWN": own, "ENTERS": enters,
            "LEARNED": sum(1 << t for t in self.taking), "READS_E": read_e,
            "CLOSED": self.closed, "ETYPE": TYPES[e[1]], "GROUPED": self.group, "SAID": said,
            "PART": len(self.parts.rows) > 1, "TMA": self.tma, "STAGES": shape.stages, "num_warps": shape.warps,
        }  # fmt: skip
        self.steps = [
            (n, self._keys(planes, rows), [self._products(t, planes, rows) for t in range(self.first, last + 1)])
            for planes in self.parts.heads
            for n, rows in enumerate(self.parts.rows)
        ]
        self.sums = {d: self._sum(d) for d in (self.d, self.dv)}

    def _cut(self) -> Parts:
        """Parts of an E that nothing outside this pass reads."""
        x = self.facts
        cut = (x.rows, x.columns, x.opt.back, x.opt.tile**2 * self.bytes, settings.TRANSIENT)
        parts = parts_of(self.planes, self.G if self.group else 1, *cut)
        if self.group and not grouped(parts.planes // self.G * self.blocks, x.device):
            # A part of the heads at a time leaves too few programs a launch: 64 at 8,192 tokens.
            self.group, parts = False, parts_of(self.planes, 1, *cut)
        return parts

    def _of_e(self, shape: settings.Shape) -> Block:
        return self.packed(self.parts.planes * self.parts.slots, shape.queries, shape.keys)

    def _keys(self, planes: tuple[int, int], rows: tuple[int, int]) -> Prepared:
        """The pass over keys: E, dV and the last layer's dK."""
        order = by_token if self.whole else by_head
        numbers = (
            *self.strides, self.do_strides, order(self.heads, self.Tk, self.d), order(self.heads, self.Tk, self.dv),
            self.pad, *self.sizes, self.facts.slots, self.parts.slots, self.back, planes[0], *rows, *self.numbers,
            1.0 / self.facts.opt.divisor, *self.dropping, self.facts.opt.scale,
        )  # fmt: skip
        grid = (self.blocks, (planes[1] - planes[0]) // (self.G if self.group else 1))
        return Prepared(keys_gradient, grid, numbers, self.meta | {"ADDS": rows[0] > 0})

    def _products(self, t: int, planes: tuple[int, int], rows: tuple[int, int]) -> tuple:
        """What gives layer t its gradients from E: dQ, and dK if it is not the last."""
        x, count = self.facts, planes[1] - planes[0]
        # Nothing lies between the last layer and this one: one kernel serves all.
        alike = x.opt.uniform and not x.gain
        meta = {name: self.common[name] for name in ("D", "BD", "S", "COUNT", "GAIN", "UNIFORM", "BATCHED")}
        meta |= {"CLOSED": self.closed, "TMA": self.tma, "PART": len(self.parts.rows) > 1}
        meta |= {"COUNT": 1, "TARGET": 0} if alike else {"TARGET": t}
        first, place = (*self.sizes, self.parts.slots, self.back, planes[0]), self.strides

        def tiles(s: settings.Shape) -> dict:
            return {"BM": s.queries, "BN": s.keys, "STAGES": s.stages, "num_warps": s.warps}

        blocks = cdiv(min(rows[1] * x.opt.tile, self.Tq) - rows[0] * x.opt.tile, self.product.queries)
        queries = Prepared(
            queries_from_e, (blocks, count),
            (place[1], by_token(self.H, self.Tq, self.d), *first, rows[0], x.opt.scale), meta | tiles(self.product),
        )  # fmt: skip
        if t == x.count - 1:
            return t, queries, None
        order = by_token if self.G == 1 else by_head
        keys = Prepared(
            keys_from_e, (x.columns * x.opt.tile // self.keyed.keys, count),
            (place[0], order(self.H, self.Tk, self.d), *first, *rows, x.opt.scale),
            meta | tiles(self.keyed) | {"ADDS": rows[0] > 0},
        )  # fmt: skip
        return t, queries, keys

    def _sum(self, d: int) -> tuple[Prepared, Prepared]:
        """Query heads of a key head added: of one tensor of width d, and of two."""
        to = by_token(self.Hk, self.Tk, d)
        numbers, grid = (to, to, self.Hk, self.G, self.Tk), (cdiv(self.Tk * d, 2048), self.B * self.Hk)
        return tuple(Prepared(sum_heads, (*grid, n), numbers, {"D": d, "N": 2048}) for n in (1, 2))


def by_token(heads: int, T: int, d: int) -> tuple[int, int, int]:
    """Strides (sequence, head, token) of [B, T, heads, d] in memory."""
    return T * heads * d, d, heads * d


def by_head(heads: int, T: int, d: int) -> tuple[int, int, int]:
    """Strides (sequence, head, token) of [B, heads, T, d] in memory."""
    return heads * T * d, T * d, d


forward_of = lru_cache(maxsize=1024)(Forward)
backward_of = lru_cache(maxsize=1024)(Backward)
