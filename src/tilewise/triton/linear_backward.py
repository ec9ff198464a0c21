"""Backward of query and key terms on Hopper in linear memory, on the host: two passes, and the tables' gradients.

A table's gradient sums diagonals of dS, which neither pass owns. Forming it in a third pass over the tiles costs
five products for each tile of dG (a program that owns two tiles of offsets meets three tiles of scores: 1.5 S, 1.5 dP,
one G, one dGᵀ·left) and three skews: by the products' measured rate above 2 ms on an H200 at 8,192 tokens of 16,384 and
12 heads. Writing dG once and reading it once moves 2 · 8 KiB a tile, 6.4 GB for a map without ends; the write hides
behind products, the read takes about 1.1 ms. So dG is stored, of as many row blocks at once as fit :data:`BUDGET`; each
launch of a pass is followed by one that adds what it stored to the offsets' sums (:mod:`.band_tables`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..call import Call
from .band_keys import key_pass
from .band_queries import query_pass
from .band_tables import Diagonals
from .biases import add_up, rows_of_heads
from .hopper import dtype_of, expanded, misfits, rows_layout, tiles_of, unfitting
from .launch import cdiv, launch
from .plan import Facts, Layout, Source
from .skew import TILE
from .terms import Skewed, skewed_band, skewed_edge

__all__ = ["backward", "unplanned", "unsuited"]

BUDGET = 540 << 20
"""Bytes of dG at once: at 8,192 keys without saturated tiles, twice as many query blocks as an H200 runs at once (two
on each of 132 SMs) need 532 MiB. In larger shares the passes end together less often: with 320 MiB Transformer-XL's
backward took 7.45 ms there, 7.09 with these. With 1 GiB it took 6.81 and 7.09 ms in two runs, and with these 7.26 and
7.08."""

LARGEST = 4 << 30
"""Bytes of dG of one wave of row blocks, where :data:`BUDGET` is less: from 17 thousand keys on, in which bytes grow
with the keys, to 124 thousand. With 64 of 264 row blocks at once a pair took 0.153 ns at 65,536 tokens, 0.054 at
16,384."""

QUERIES_ALONE: tuple[int, int | None] = (2, None)
KEYS_ALONE: tuple[int, int | None] = (2, None)
"""Of calls where q alone is projected, at width 64: each pass's stages of tiles, and registers a thread (None: as many
as the compiler likes). With both terms, or with a left factor of its own, two programs of more than two stages do not
fit an SM. Three stages took 3.38 ms for 3.16 at 8,192 tokens (Shaw). Below the registers that a pass needs, ptxas runs
all its products one after the other: 3.92 ms with (2, 168) over keys."""

PORTABLE_FROM: int | None = 70
"""Saturated tiles a block of queries from which calls that project q alone take the portable kernels; None: never. A
call that forces ``skew`` is not asked. Shaw took 0.953 ms for 1.085 with 29 such tiles, 3.192 for 3.014 with 125."""

BANDED = True
"""Whether the passes take other maps than the identity, and an OnKey beside the OnQuery."""

WIDTHS = (64,)
"""Widths that the passes take. At 128 a thread keeps 8 … 368 bytes in local memory, and one program fills an SM."""

MOST_ROWS = 65535
"""Rows of a table at most, but for an identity's: :func:`.band_tables.sum_rows` has them on a grid's second axis, which
CUDA lets be no longer."""

WAVE = 264
"""Row blocks that run at once at width 64; a launch takes a multiple where it can."""


def unplanned(F: Facts) -> list[str]:
    """Why a call must take the portable kernels, as far as its terms and sizes tell."""
    if sorted(p.kind for p in F.ports) not in (["query"], ["key", "query"]):
        return ["the terms are not one OnQuery, or one OnQuery and one OnKey"]
    if not BANDED and [p.rows.kind for p in F.ports] != ["identity"]:
        return ["the terms are not one identity-mapped OnQuery, and BANDED is False"]
    reasons = unfitting(F)
    rows = max((p.rows.size for p in F.ports if p.rows.kind != "identity"), default=0)
    if rows > MOST_ROWS:
        reasons.append(f"a table has {rows} rows; it takes at most {MOST_ROWS} where the map is no identity")
    if any(p.left is not None for p in F.ports) and F.sides:
        reasons.append("a left factor of its own meets saturated tiles")
    if PORTABLE_FROM is not None and len(F.ports) == 1 and F.call.options.skew == "auto":
        if saturated_tiles(F) >= PORTABLE_FROM:
            reasons.append(f"{saturated_tiles(F)} tiles a block are saturated, and PORTABLE_FROM is {PORTABLE_FROM}")
    return reasons + ([] if F.d in WIDTHS else [f"the width is {F.d}; it takes {' or '.join(map(str, WIDTHS))}"])


def saturated_tiles(F: Facts) -> int:
    """About how many tiles of a block of queries in the middle hold saturated offsets alone, as far as windows tell."""
    if not F.sides:
        return 0
    left, right = (min(end, F.Tk) for end in (F.call.mask.left, F.call.mask.right))
    seen = min(F.Tk, left + right + 1)
    return max(0, cdiv(seen, TILE) - cdiv(F.hi - F.lo, TILE) - 1)


def unsuited(L: Layout) -> list[str]:
    """Why the call must take the portable kernels; empty where these run it."""
    return unplanned(L) or misfits(L)


def backward(
    call: Call, do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, need: list[bool], grads: list[Tensor]
) -> None:
    """Write the gradients that `need` asks for, of a call that :func:`unsuited` has nothing against."""
    if any(need):
        _Backward(call, do, dlse, o, lse, need, grads).run()


class _Backward:
    """One backward call: what its launches share."""

    def __init__(self, call, do, dlse, o, lse, need, grads):
        self.L = L = Layout(call)
        self.need, self.grads = need, grads
        self.query = next(n for n, p in enumerate(L.ports) if p.kind == "query")
        self.key = next((n for n, p in enumerate(L.ports) if p.kind == "key"), None)
        self.own = L.ports[self.query].left is None
        # Where a port's tensors are among the gradients.
        places = [3 + sum(len(p.tensors) for p in L.ports[:n]) for n in range(len(L.ports))]
        self.table = {n: grads[at] for n, at in enumerate(places) if need[at]}
        at = {name: places[self.query] + n for n, name in enumerate(L.ports[self.query].names)}
        self.left = at.get("left")
        self.biased = L.ports[self.query].biased
        # By which of a program's two sums each bias gets its gradient.
        wanted = {name for name, position in at.items() if need[position]}
        self.biases = {n: grads[at[name]] for n, name in enumerate(("content", "bias")) if name in wanted}
        rows = [rows_of_heads(L, name) if self.biased else (L.anchor, 0) for name in ("content", "bias")]
        self.rows, self.steps = zip(*rows, strict=True)
        g = Source(do)
        if not g.describable:
            g = Source(do.clone(memory_format=torch.contiguous_format))
        self.stats = torch.empty(4, L.B * L.H, -(-L.Tq // 128) * 128, dtype=torch.float32, device=L.device)
        x = self._prepare(g, o, lse, dlse)
        table, self.origin_a = expanded(L, self.query, True)
        a, self.heads_a = tiles_of(table), table.shape[0]
        c_rows, self.origin_c, self.heads_c = a, 0, 0
        if self.key is not None:
            table, self.origin_c = expanded(L, self.key, False)
            c_rows, self.heads_c = tiles_of(table), table.shape[0]
        q = tiles_of(L.q)
        left = q if self.own else tiles_of(L.lefts[self.query])
        self.tensors = q, left, tiles_of(x), tiles_of(L.k), tiles_of(L.v), a, c_rows, tiles_of(g)
        self.square = gl.NVMMASharedLayout.get_default_for([TILE, TILE], dtype_of(L.dtype))
        self.memory = None

    def _prepare(self, g: Source, o: Tensor, lse: Tensor, dlse: Tensor | None) -> Source:
        """Δ, the three lse of each row, and the queries shifted by C's end rows, which are returned."""
        from .passes import prepare_rows, shifted

        L, n = self.L, self.query
        tables = L.shifting("key")
        x = shifted(L, L.q, bool(tables))
        functions, terms = (), ()
        if L.sides and max(L.ends[n]) >= 0:
            left = L.lefts[n]
            term = Skewed(L.anchor, 0, 0, 0, 0, L.edge(n), left.x, *left.strides, L.c, gl.constexpr(L.d),
                          gl.constexpr(L.d), gl.constexpr(False))  # fmt: skip
            functions, terms = ((skewed_band, skewed_edge),), (term,)
        prepare_rows(L, x, None, L.v, (g, Source(o), lse, dlse, self.stats), tables, (), (), functions, terms)
        self.shifted = bool(tables)
        return x

    def run(self) -> None:
        L = self.L
        from_keys = self.key is not None and self.key in self.table
        if self.need[1] or self.need[2] or from_keys:
            self._keys()
        parts = None
        from_queries = self.need[0] or self.biases or (self.left and self.need[self.left]) or self.query in self.table
        if from_queries or (from_keys and L.sides):
            parts = self._queries()
        if from_keys:
            self.diagonals_c.finish(self.sums_c, None if parts is None else parts[:, :, 1], self.table[self.key])

    def _room(self, position: int | None, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """(what a kernel writes, what it must be copied to): descriptors need q's dtype and strides of 16 bytes."""
        grad = self.grads[position] if self.need[position] else None
        if grad is not None and grad.dtype == self.L.dtype and Source(grad).x is grad and Source(grad).describable:
            return grad, None
        return torch.empty(like.shape, dtype=self.L.dtype, device=self.L.device), grad

    def _meta(self, alone: tuple[int, int | None]) -> dict:
        L = self.L
        stages, registers = alone if self.own and self.key is None and L.d == 64 else (2, None)
        return dict(
            D=L.d, DTYPE=dtype_of(L.dtype), OWN=self.own, BIASED=self.biased, KEY=self.key is not None, SIDES=L.sides,
            SHIFTED=self.shifted, RANGED=L.mask.ranged, MASKED=L.masked(TILE) or L.mask.elementwise,
            STAGES=stages, ROWS=rows_layout(L.d, L.dtype), SQUARE=self.square, num_warps=4,
            **({"maxnreg": registers} if registers else {}),
        )  # fmt: skip

    def _sizes(self, base: int):
        L = self.L
        return (self.heads_a, self.heads_c, L.Tq, L.Tk, self.stats.shape[2], L.call.offset, L.lo, L.hi, self.origin_a,
                self.origin_c, base, *self.steps, L.mask.left, L.mask.right, L.mask.batch)  # fmt: skip

    def _shares(self, total: int, columns: int, group: int) -> int:
        """Row blocks of one launch: as many as fit, in even shares of whole waves."""
        one = TILE * columns * TILE * group * self.L.bytes
        most = BUDGET // one
        most = most // WAVE * WAVE if most > WAVE else max(1, most, min(WAVE, LARGEST // one))
        share = cdiv(total, cdiv(total, most))
        return min(total, most, cdiv(share, WAVE) * WAVE if most >= WAVE else share)

    def _buffer(self, rows: int, columns: int) -> tuple[Tensor, TensorDescriptor]:
        """dG of so many rows, in the memory of the pass before where that is enough."""
        count = rows * columns * TILE
        if self.memory is None or self.memory.numel() < count:
            self.memory = None
            self.memory = torch.empty(count, dtype=self.L.dtype, device=self.L.device)
        dg = self.memory[:count].view(rows, columns * TILE)
        return dg, TensorDescriptor(dg, list(dg.shape), [dg.shape[1], 1], [TILE, TILE], self.square)

    def _keys(self) -> None:
        L = self.L
        dk, to_k = self._room(1, L.call.k)
        dv, to_v = self._room(2, L.call.v)
        total = L.Hk * L.B * cdiv(L.Tk, TILE)
        share, described, base, diagonals = total, self.tensors[0], 0, None
        if self.key is not None:
            diagonals = Diagonals.of(L, self.key)
            share, base = self._shares(total, diagonals.columns, L.G), diagonals.base
            diagonals = self.diagonals_c = diagonals.within(share)
            dh, described = self._buffer(share * L.G * TILE, diagonals.columns)
            self.sums_c = diagonals.room()
        for f0 in range(0, total, share):
            f1 = min(total, f0 + share)
            launch(
                key_pass, (f1 - f0,), *self.tensors, tiles_of(Source(dk)), tiles_of(Source(dv)), described,
                *self.rows, self.stats, L.mask.rule, L.mask.keys, L.c, L.call.scale, f0, L.B, L.H, L.Hk, L.G,
                *self._sizes(base), SHARED=L.G > 1, **self._meta(KEYS_ALONE),
            )  # fmt: skip
            if diagonals is not None and self.key in self.table:
                diagonals.add(dh, self.sums_c, f0, f1)
        for written, grad in ((dk, to_k), (dv, to_v)):
            if grad is not None:
                grad.copy_(written)

    def _queries(self) -> Tensor | None:
        """The pass over queries and A's gradient; returns what the sides add to end rows [H, ·, A and C, 2, d]."""
        L, n = self.L, self.query
        dq, to_q = self._room(0, L.call.q)
        dw, to_w = (dq, None) if self.own else self._room(self.left, L.call.q)
        blocks = cdiv(L.Tq, TILE)
        total = L.H * L.B * blocks
        diagonals = Diagonals.of(L, n)
        share = self._shares(total, diagonals.columns, 1)
        diagonals = diagonals.within(share)
        dg, described = self._buffer(share * TILE, diagonals.columns)
        sums = diagonals.room()
        parts = L.anchor
        if L.sides:
            width = 1 if self.key is None else 2
            parts = torch.empty(L.H, L.B * blocks, width, 2, L.d, dtype=torch.float32, device=L.device)
        elif self.biased:
            parts = torch.empty(L.H, L.B * blocks, 2, L.d, dtype=torch.float32, device=L.device)
        sizes = self._sizes(diagonals.base)
        ends = L.tables[n]
        for f0 in range(0, total, share):
            f1 = min(total, f0 + share)
            launch(
                query_pass, (f1 - f0,), *self.tensors, tiles_of(Source(dq)), tiles_of(Source(dw)), described, ends,
                parts, *self.rows, self.stats, L.mask.rule, L.mask.queries, L.c, L.call.scale, f0, L.B, L.H, L.G,
                *sizes[:10], *L.ends[n], L.head_stride(n), ends.stride(1), *sizes[10:], **self._meta(QUERIES_ALONE),
            )  # fmt: skip
            if n in self.table:
                diagonals.add(dg, sums, f0, f1)
        for which, grad in self.biases.items():
            add_up(parts[:, :, which], grad, L.call.scale)
        for written, grad in ((dq, to_q), (dw, to_w)):
            if grad is not None:
                grad.copy_(written)
        if n in self.table:
            diagonals.finish(sums, parts[:, :, 0] if L.sides else None, self.table[n])
        return parts if L.sides else None
