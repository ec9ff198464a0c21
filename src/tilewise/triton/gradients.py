"""The backward pass on the host: two passes of the tile loops, then the gradients of tables and left factors."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..call import Call
from . import config
from .biases import content_of, rows_of_heads
from .buffers import is_long, spaced, spaced_like
from .cached import cached
from .cancel import cancel
from .config import Tiles, backward_tiles, fold_tiles, projection_tiles
from .core_gradients import grad_key, grad_query
from .fold import collect, collect_scalars, reduce
from .launch import cdiv, launch, next_power_of_2
from .masks import BLOCK
from .passes import fold_rows, prepare_rows, project_scores, shifted, store_probabilities, terms_of
from .plan import Buffer, Layout, Source, fitted, padded
from .terms import Geometry, Store, column_rows

__all__ = ["backward"]


def backward(
    call: Call, do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, need: list[bool], grads: list[Tensor],
    kept: Tensor | None = None,
):  # fmt: skip
    """See :func:`tilewise.triton.backward`."""
    if not any(need):
        return
    layout = Layout(call, kept)
    if config.SKEW_IN_REGISTERS and kept is None and call.options.skew != "memory":
        if layout.limits.hopper:
            from . import linear_backward

            if not linear_backward.unsuited(layout):
                return linear_backward.backward(call, do, dlse, o, lse, need, grads)
    _Backward(layout, do, dlse, o, lse, need, grads).run()


class _Backward:
    """One backward call: what is wanted, the buffers that outlive a launch, and the steps for a share of the heads."""

    def __init__(self, layout: Layout, do, dlse, o, lse, need, grads):
        self.L = L = layout
        # dO as products read it.
        self.lse, self.o = lse, Source(o)
        self.g = L.factor(Source(do))
        self.dlse = dlse
        self.need_q, self.need_k, self.need_v = need[:3]
        self.dq, self.dk, self.dv = grads[:3]
        rest = iter(zip(need[3:], grads[3:], strict=True))
        self.table, self.left, self.content, self.bias = {}, {}, {}, {}
        for n, port in enumerate(L.ports):
            for name in port.names:
                wanted, grad = next(rest)
                if wanted:
                    getattr(self, name)[n] = grad
        kind = lambda *kinds: [n for n, p in enumerate(L.ports) if p.kind in kinds]  # noqa: E731
        wanted = lambda n: n in self.table or n in self.left  # noqa: E731
        self.own = [n for n in kind("query") if L.ports[n].left is None]
        # Whose gradients come from dS by queries (and by keys), and who shares in dQ or dK.
        # Biases' gradients need the two parts of dQ apart; dQ is rounded alike whether or not they are wanted.
        self.apart = any(p.biased for p in L.ports) and bool(self.need_q or self.content or self.bias)
        self.by_query = [
            n for n in kind("scalar", "query") if wanted(n) or n in self.bias or (n in self.own and self.need_q)
        ]
        self.by_key = [n for n in kind("key") if n in self.table or self.need_k]
        self.by_value = [n for n in L.values if n in self.table]
        self.qtables, self.ktables, self.vtables = L.shifting("key"), L.shifting("query"), L.shifting("value")
        self.parts_q = any(n in self.table for n in kind("key")) and bool(self.qtables)
        self.parts_k = any(n in self.table for n in self.own) and bool(self.ktables)
        self.cross = bool(self.qtables) and bool(self.ktables) and (self.parts_q or self.parts_k)
        self.sums = self._sums()
        self.tiles_q, self.tiles_k = self._tiles(False), self._tiles(True)
        # Where no gradient comes from dS by keys, the pass over queries may decide its band on larger blocks.
        self.block = (max(BLOCK, self.tiles_q.queries), BLOCK) if L.kind == "scalar" else (BLOCK, BLOCK)
        self.shape = projection_tiles(max(L.BD, L.BV), L.bytes, L.Tk, L.kind, L.limits.gpu)
        self.fold_shape = fold_tiles(max(L.BD, L.BV), L.bytes, L.Tk, L.limits.gpu)

    def _tiles(self, keyed: bool) -> Tiles:
        L = self.L
        tiles = backward_tiles(max(L.BD, L.BV), L.bytes, L.Tk, L.kind, keyed, L.limits)
        # A mask, or products that keep both operands in registers, spill 176 to 700 bytes where a tile has 128 rows.
        if L.kind == "scalar" and (L.masked() or not L.limits.descriptors):
            tiles = replace(tiles, queries=min(tiles.queries, BLOCK))
        return tiles

    def _sums(self) -> str:
        """Which sums of dS over a saturated side the end rows need: none, one a block of queries, or one a query."""
        L = self.L
        ended = [n for n in self.by_query if L.sides and max(L.ends[n]) >= 0 and n not in self.own]
        if any(L.ports[n].left is not None for n in ended):
            return "row"
        return "block" if ended or self.cross else "none"

    def run(self):
        L = self.L
        new = lambda *shape: torch.empty(*shape, dtype=torch.float32, device=L.device)  # noqa: E731
        B, H = L.B, L.H
        qx, kx, vx = (
            shifted(L, x, bool(t)) for x, t in zip(L.factors, (self.qtables, self.ktables, self.vtables), strict=True)
        )
        self.qx, self.kx, self.vx = qx, kx, vx
        self.stats = new(4, B * H, -(-L.Tq // 128) * 128)
        self.tma = L.limits.descriptors and all(s.describable for s in (*L.factors, self.g))
        self.blocks_q = cdiv(L.Tq, self.tiles_q.queries)
        self.blocks_k = cdiv(L.Tk, self.tiles_k.keys)
        self.sum_buffer = new(2, B, H, {"none": 0, "block": self.blocks_q, "row": L.Tq}[self.sums])
        self.query_parts = new(B, H, self.blocks_q, 2, L.d) if self.parts_q else None
        self.key_parts = new(B, H, self.blocks_k, 2, L.d) if self.parts_k else None
        self.value_parts = new(B, H, self.blocks_k, 2, L.dv) if self.vtables else None
        self.dq32 = new(B, H, L.Tq, L.d) if self.apart or (self.own and self.need_q) else None
        self.dp32 = new(B, H, L.Tq, L.d) if self.apart and (self.need_q or self.bias) else None
        self.dk32 = new(B, L.Hk, L.Tk, L.d) if self.by_key and self.need_k else None
        # A table that the heads share: its gradient by head first, then one sum in the heads' order.
        self.by_head = {n: new(H, *grad.shape[1:]) for n, grad in self.table.items() if grad.shape[0] == 1}

        buffers = len(L.projected) + len(L.values) - (self.in_place() is not None)
        buffers += bool(self.by_query) + bool(self.by_key) + bool(self.by_value)
        head = max(L.geometry(False, self.block).head, L.geometry(True, (BLOCK, BLOCK)).head)
        heads = L.heads_at_once(buffers * B * head * L.bytes)
        self.shares = [(h0, min(heads, H - h0)) for h0 in range(0, H, heads)]
        for h0, share in self.shares:
            self._share(h0, share)
        for n, grads in self.by_head.items():
            self.table[n].copy_(grads.sum(0, keepdim=True))

    def _join(self):
        """The biases' gradients from the two parts of dQ, and dQ, their sum."""
        tau = self.L.call.scale
        for grads, part in ((self.content, self.dq32), (self.bias, self.dp32)):
            for grad in grads.values():
                total = part.sum((0, 2)).mul_(tau)
                grad.copy_(total if grad.shape[0] > 1 else total.sum(0, keepdim=True))
        if self.need_q:
            self.dq.copy_(self.dq32.add_(self.dp32).mul_(tau))

    def in_place(self) -> int | None:
        """The port whose projection becomes dS by query: each tile of it is last read where that of dS is written.

        None where the projection is read again: kept ones belong to the caller, P is made after both passes.
        """
        if not self.by_query or self.by_value or self.L.keeping is not None:
            return None
        return next((n for n in self.L.projected if self.L.ports[n].kind == "query"), None)

    def _share(self, h0: int, heads: int):
        """Every step for query heads h0 … h0 + heads − 1 of all batches."""
        L = self.L
        made = project_scores(L, self.block, h0, heads, self.shape, made_before=L.keeping is not None)
        if h0 == 0:
            self._prepare(made)
        values = {}
        for n in L.values:
            values[n] = L.buffer(L.geometry(False, (BLOCK, BLOCK)), heads, L.dtype)
            L.project(n, self.g, 1, values[n], 1.0, h0, heads, (BLOCK, BLOCK), self.shape)
        dz_q, port = None, self.in_place()
        if port is not None:
            # The pass over keys, which comes first, has read all of it by then.
            dz_q = Buffer(made[port].memory.view(L.dtype), made[port].geometry, made[port].n)
        elif self.by_query:
            dz_q = L.buffer(L.geometry(False, self.block), heads, L.dtype)
        dz_k = L.buffer(L.geometry(True, (BLOCK, BLOCK)), heads, L.dtype) if self.by_key else None
        if self.need_k or self.need_v or dz_k or self.parts_k or self.by_value:
            self._key_pass(made, values, dz_k, h0, heads)
        if self.need_q or self.apart or dz_q or self.parts_q or self.sums != "none":
            self._query_pass(made, values, dz_q, h0, heads)
        keys = [n for n in L.score if L.ports[n].kind == "key"]
        for ports, dz, acc, out in ((self.own, dz_q, self.dq32, self.dq), (keys, dz_k, self.dk32, self.dk)):
            if self.apart and ports is self.own:
                if self.dp32 is not None:
                    fold_rows(L, ports[0], dz, None, None, self.dp32, 1.0, h0, heads, 1, self.fold_shape)
            elif acc is not None:
                for n in ports:
                    to, scale = (out, L.call.scale) if n == ports[-1] else (acc, 1.0)
                    fold_rows(L, n, dz, acc, None, to, scale, h0, heads, L.G if ports is keys else 1, self.fold_shape)
        for n, grad in self.left.items():
            scalar = L.ports[n].kind == "scalar"
            sums = self.sum_buffer if self.sums == "row" and L.sides and max(L.ends[n]) >= 0 else None
            out = spaced_like(grad).unsqueeze(-1) if scalar else grad
            fold_rows(L, n, dz_q, None, sums, out, 1.0 if scalar else L.call.scale, h0, heads, 1, self.fold_shape)
            if scalar:
                grad[:, h0 : h0 + heads].copy_(out[:, h0 : h0 + heads, :, 0])
        P = None
        if self.by_value:
            P = store_probabilities(L, made, self.lse, self.tiles_q, h0, heads, self.tma)
        if h0 + heads == L.H:
            if self.apart:
                self._join()
            # What only the passes read makes room for the tables' gradients.
            self.qx = self.kx = self.vx = self.dq32 = self.dp32 = self.dk32 = None
        del made, values
        sources = {"scalar": dz_q, "query": dz_q, "key": dz_k, "value": P}
        for n in self.table:
            self._table(n, sources[L.ports[n].kind], h0, heads)

    def _prepare(self, made: dict):
        L = self.L
        # What the shifted factors do not carry: scalars, and queries' own left factors.
        loose = {n: m for n, m in made.items() if n not in self.own and L.ports[n].kind != "key"} if L.sides else {}
        functions, terms, _ = terms_of(L, loose, self.tiles_q, False)
        # Δ of dO as products read it: of TF32's unrounded dO it would not be the sum of P·dP, and dS would not cancel.
        prepare_rows(
            L, self.qx, self.kx, self.vx, (self.g, self.o, self.lse, self.dlse, self.stats), self.qtables,
            self.ktables, self.vtables, functions, terms,
        )  # fmt: skip
        scalar = all(p.kind == "scalar" for p in L.ports)
        if scalar and self.table and L.bytes == 4:
            dlse = None if self.dlse is None else spaced(self.dlse)
            cancel(L, *L.factors, self.g, self.stats, dlse, self.tiles_q, made, self.tma)

    def _shared_args(self, made: dict, values: dict, dz: Buffer | None, tiles: Tiles, keyed: bool):
        """The middle of both passes' argument lists: terms, values and where dS goes."""
        L = self.L
        functions, terms, zs = terms_of(L, made, tiles, self.tma)
        vfunctions, vterms, ys = terms_of(L, values, tiles, self.tma, 2)
        store, z = Store(L.anchor, 0, 0, 0, 0), None
        if dz is not None:
            store = L.storing(dz)
            z = dz.descriptor(*((tiles.keys, tiles.queries) if keyed else (tiles.queries, tiles.keys)), self.tma)
        bands = tuple(f[0] for f in functions), tuple(f[0] for f in vfunctions)
        return bands, (terms, *zs, vterms, *ys, store, z)

    def _meta(self, bands, tiles: Tiles):
        L = self.L
        return dict(
            D=L.d, DV=L.dv, BD=L.BD, BV=L.BV, BM=tiles.queries, BN=tiles.keys, UNIT=BLOCK, BANDS=bands[0],
            VALUES=bands[1], BAND=bool(L.ports), SIDES=L.sides, SHIFT_Q=bool(self.qtables), SHIFT_K=bool(self.ktables),
            SHIFT_V=bool(self.vtables), RANGED=L.mask.ranged, ELEMENTWISE=L.mask.elementwise,
            DROPOUT=L.call.dropout_p > 0.0, PREC=L.precision, TMA=self.tma, STAGES=tiles.stages,
            BAND_STAGES=tiles.band_stages, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip

    def _sizes(self, h0: int, heads: int):
        L = self.L
        return (
            L.inverse, L.drop, L.H, L.G, h0, heads, L.B, L.Tq, L.Tk, L.call.offset, L.lo, L.hi, L.mask.left,
            L.mask.right, L.mask.batch,
        )  # fmt: skip

    def _tiles_of(self, tiles: Tiles):
        """q, k, v, dO and the shifted q, k, v, as rows of these tiles."""
        L = self.L
        m, n = tiles.queries, tiles.keys
        q, k, v = L.factors
        sources = ((q, m, L.BD), (k, n, L.BD), (v, n, L.BV), (self.g, m, L.BV), (self.qx, m, L.BD),
                   (self.kx, n, L.BD), (self.vx, n, L.BV))  # fmt: skip
        return [x(rows, width, self.tma) for x, rows, width in sources], [x.strides for x, _, _ in sources]

    def _statistics(self, tiles: Tiles):
        """The prepared statistics, their descriptor, and the length of their padded rows."""
        rows, length = self.stats.shape[0] * self.stats.shape[1], self.stats.shape[2]
        z = TensorDescriptor(self.stats, [rows, length], [length, 1], [1, tiles.queries]) if self.tma else None
        return self.stats, z, length

    def _query_pass(self, made, values, dz, h0, heads):
        L, tiles = self.L, self.tiles_q
        bands, middle = self._shared_args(made, values, dz, tiles, False)
        rows, strides = self._tiles_of(tiles)
        out, tau = (self.dq32, 1.0) if self.dq32 is not None else (self.dq, L.call.scale)
        if not self.need_q and out is not self.dq32:
            out = torch.empty(L.B, L.H, L.Tq, L.d, dtype=L.dtype, device=L.device)
        launch(
            grad_query, (self.blocks_q * L.B * heads,), *rows, out, *self._statistics(tiles), *middle, self.sum_buffer,
            L.anchor if self.query_parts is None else self.query_parts, L.mask.rule, L.mask.queries, L.seed, *strides,
            out.stride()[:3], L.c, tau, *self._sizes(h0, heads), STORE=dz is not None, SUMS=self.sums,
            PARTS=self.parts_q, MASKED=L.masked(max(BLOCK, tiles.keys)), **self._meta(bands, tiles),
        )  # fmt: skip

    def _key_pass(self, made, values, dz, h0, heads):
        L, tiles = self.L, self.tiles_k
        bands, middle = self._shared_args(made, values, dz, tiles, True)
        rows, strides = self._tiles_of(tiles)
        dk, tau = (self.dk32, 1.0) if self.dk32 is not None else (self.dk, L.call.scale)
        spare = lambda d: torch.empty(L.B, L.Hk, L.Tk, d, dtype=L.dtype, device=L.device)  # noqa: E731
        dk = dk if self.need_k else spare(L.d)
        dv = self.dv if self.need_v else spare(L.dv)
        parts = [L.anchor if p is None else p for p in (self.key_parts, self.value_parts)]
        biased = content_of(L) is not None
        u, step = rows_of_heads(L, "content") if biased else (L.anchor, 0)
        launch(
            grad_key, (self.blocks_k * L.B * (heads // L.G),), *rows, dk, dv, *self._statistics(tiles), *middle, *parts,
            u, L.mask.rule, L.mask.keys, L.seed, *strides, dk.stride()[:3], dv.stride()[:3], step, L.c, tau,
            *self._sizes(h0, heads), STORE=dz is not None, PARTS=self.parts_k, BIASED=biased, SHARED=L.G > 1,
            MASKED=L.masked(), **self._meta(bands, tiles),
        )  # fmt: skip

    def _table(self, n: int, dz: Buffer, h0: int, heads: int):
        """The gradient of port n's table, from the buffer of dS (or P) that its kind reads."""
        L, g, port = self.L, dz.geometry, self.L.ports[n]
        grad = self.by_head.get(n, self.table[n])
        scalar = port.kind == "scalar"
        biased = port.bias is not None
        v, step = rows_of_heads(L, "bias") if biased else (L.anchor, 0)
        x = {"scalar": L.lefts[n], "query": L.left_factor(n), "key": L.factors[1], "value": self.g}[port.kind]
        group = L.G if port.kind == "key" else 1
        width = 1 if scalar else grad.shape[2]
        offset, ahead, behind = L.band_args(g)
        if scalar:
            length = g.last - g.first + 8
            partial = torch.empty(heads, 8, length, dtype=torch.float32, device=L.device)
            # Distances of tiles from their rows, in blocks, whose diagonals have the columns from g.first to g.last.
            near, far = (g.first - g.shift) // BLOCK, (g.last - 1 - g.shift) // BLOCK + 1
            launch(
                collect_scalars, (far - near + 1, heads * 4), dz.memory, L.anchor if x is None else x.x, partial,
                L.ranges(False), (0, 0, 0) if x is None else x.strides, g.head, g.stride, h0, heads, L.B, g.rows,
                g.others, offset, ahead, behind, g.shift, g.first, length - 8, L.mask.batch, length, near,
                WM=g.tile[0], SIZE=BLOCK, RANGED=L.mask.ranged, GATED=x is not None, STAGES=4 if L.bytes == 2 else 2,
                num_warps=4,
            )  # fmt: skip
        else:
            TM, CB, warps, stages, pack = fitted(self.fold_shape, g.rows, L.B)
            length = -(-(g.last - g.first + 8) // CB) * CB
            partial = torch.empty(heads, 8, length, width, dtype=torch.float32, device=L.device)
            launch(
                collect, (length // CB, heads * 8), dz.memory, x.x, v, partial, L.ranges(g.keyed), x.strides, step,
                g.head, g.stride, L.H, group, h0, heads, L.B, g.rows, g.others, offset, ahead, behind, g.shift, g.first,
                length, L.mask.batch, D=width, BD=padded(width), WM=BLOCK, WN=BLOCK, TM=TM, PACK=pack, CB=CB,
                SIZE=BLOCK, RANGED=L.mask.ranged, BIASED=biased, PREC=L.precision, STAGES=stages, num_warps=warps,
            )  # fmt: skip
        order, starts = _by_row(port.rows, g, grad.shape[1], L.device)
        left, right = L.ends[n] if L.sides else (-1, -1)
        distinct = [row for row in dict.fromkeys((left, right)) if row >= 0]
        bounds = (distinct[0], distinct[-1]) if distinct else (-1, -1)
        parts, blocks, crossed = self._end_parts(n) if distinct and not scalar else (L.anchor, 1, ())
        gate = x if scalar else None
        # Lanes for a usual row's columns × 8 residues, and for as many as an end row has.
        usual = 8 * min(8, max(2, next_power_of_2(cdiv(g.last - g.first, grad.shape[1]))))
        launches = [(grad.shape[1], False, 256 if scalar else usual)]
        if distinct:
            launches.append((len(distinct), True, 1024 if scalar else 128))
        for count, ends, lanes in launches:
            launch(
                reduce, (count, heads), partial, order, starts, parts, self.sum_buffer, crossed,
                L.anchor if gate is None else gate.x, grad, (*grad.stride(), 1)[:3],
                (0, 0, 0) if gate is None else gate.strides, left, right, *bounds,
                1.0 if port.kind in ("scalar", "value") else L.call.scale, L.H, h0, L.B,
                length, max(1, self.sum_buffer.shape[-1]), blocks, D=width, BD=padded(width), N=lanes, SCALAR=scalar,
                GATED=gate is not None, ENDS=ends, PARTS=ends and not scalar, CROSS=ends and bool(crossed),
                LONG=8 * length >= 2**31 or is_long(grad), num_warps=4 if scalar else max(1, lanes // 16),
            )  # fmt: skip

    def _end_parts(self, n: int):
        """(sums over the saturated sides as vectors, how many a head, tables whose ends the other factor had added)."""
        L, port = self.L, self.L.ports[n]
        if port.kind == "key":
            return self.query_parts, self.blocks_q, self.ktables
        if port.kind == "value":
            return self.value_parts, self.blocks_k, ()
        if n in self.own:
            return self.key_parts, self.blocks_k, self.qtables
        # A left factor of its own: Σ_i sums_i · left_i, cumulated over the sides as the passes do it.
        left = L.lefts[n].x.to(torch.float32)
        return (self.sum_buffer[..., None, :] @ left).squeeze(-2).cumsum(0).permute(1, 2, 0, 3).contiguous(), 1, ()


@cached(128)
def _by_row(rows, geometry: Geometry, R: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Columns (from geometry.first) in the order of their table rows, and where each of the R rows starts (int32)."""
    row = column_rows(rows, geometry, geometry.first, geometry.last, device)
    ordered, order = torch.sort(row, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(R + 1, dtype=torch.int32, device=device))
    return order.to(torch.int32), starts.to(torch.int32)
