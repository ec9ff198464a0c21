"""The forward pass on the host: shifted tiles, projections, the tile loops, and the fold of value-side terms."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import Call, Unsupported
from . import config
from .biases import content_band, content_edge, content_of
from .buffers import is_long, spaced
from .config import Tiles, backward_tiles, fold_tiles, projection_tiles
from .core import attend, probabilities
from .fold import fold
from .launch import cdiv, launch
from .masks import BLOCK
from .plan import MOST, Buffer, Layout, Source, fitted, padded
from .project import prepare

__all__ = [
    "fold_rows", "forward", "in_shared_memory", "prepare_rows", "project_scores", "shifted", "store_probabilities",
    "terms_of",
]  # fmt: skip


def forward(call: Call, o: Tensor, lse: Tensor, kept: Tensor | None = None) -> None:
    """See :func:`tilewise.triton.forward`."""
    L = Layout(call, kept)
    if config.OVERLAPPED and L.limits.hopper and call.options.skew == "auto":
        from . import overlapped

        if not overlapped.unsuited(L):
            if L.Tk >= config.SPECIALISED.get(L.d, L.Tk + 1):
                from . import specialised

                return specialised.forward(L, o, lse)
            return overlapped.forward(L, o, lse)
    if kept is None and (call.options.skew == "shared" or (call.options.skew == "auto" and L.limits.hopper)):
        reasons = in_shared_memory(L)
        if not reasons:
            from . import band

            return band.forward(L, o, lse)
        if call.options.skew == "shared":
            raise Unsupported(f"options.skew='shared' cannot run this call: {'; '.join(reasons)}; 'memory' runs it")
    tiles = L.forward_tiles()
    q, k, v = L.factors
    qtables, vtables = L.shifting("key"), L.shifting("value")
    qx = shifted(L, q, bool(qtables))
    vx = shifted(L, v, bool(vtables))
    if qtables or vtables:
        prepare_rows(L, qx, None, vx, None, qtables, (), vtables)
    tma = L.limits.descriptors and all(s.describable for s in (q, k, v))
    # Value-side terms add their band afterwards: until then O stays in fp32.
    out = torch.empty(L.B, L.H, L.Tq, L.dv, dtype=torch.float32, device=L.device) if L.values else o
    per_head = sum(L.B * L.projection(n, L.block_of(tiles)).head for n in L.projected)
    heads = L.heads_at_once(per_head * L.zdtype.itemsize)
    shape = projection_tiles(max(L.BD, L.BV), L.bytes, L.Tk, L.kind, L.limits.gpu)
    for h0 in range(0, L.H, heads):
        share = min(heads, L.H - h0)
        made = project_scores(L, L.block_of(tiles), h0, share, shape)
        functions, terms, zs = terms_of(L, made, tiles, tma)
        launch(
            attend, (cdiv(L.Tq, tiles.queries) * L.B * share,), q(tiles.queries, L.BD, tma), k(tiles.keys, L.BD, tma),
            v(tiles.keys, L.BV, tma), qx(tiles.queries, L.BD, tma), vx(tiles.keys, L.BV, tma), out, lse, terms, *zs,
            L.mask.rule, L.mask.queries, L.seed, q.strides, k.strides, v.strides, qx.strides, vx.strides,
            out.stride()[:3], L.c, L.inverse, L.drop, L.H, L.G, h0, share, L.B, L.Tq, L.Tk, call.offset, L.lo, L.hi,
            L.mask.left, L.mask.right, L.mask.batch, D=L.d, DV=L.dv, BD=L.BD, BV=L.BV, BM=tiles.queries, BN=tiles.keys,
            UNIT=BLOCK, BANDS=tuple(f[0] for f in functions), EDGES=tuple(f[1] for f in functions) if L.sides else (),
            BAND=bool(L.ports), SIDES=L.sides, SHIFT_Q=bool(qtables), SHIFT_V=bool(vtables), RANGED=L.mask.ranged,
            MASKED=L.masked(L.block_of(tiles)[1]), ELEMENTWISE=L.mask.elementwise, DROPOUT=call.dropout_p > 0.0,
            EXACT=L.bytes == 4, NEGATIVE=call.scale < 0.0, SCALAR=L.kind == "scalar", PREC=L.precision, TMA=tma,
            STAGES=tiles.stages, BAND_STAGES=tiles.band_stages, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    if L.values:
        _fold_values(L, out, o, lse, shape, tma)


def in_shared_memory(L: Layout) -> list[str]:
    """Why no Hopper kernel makes the projections of a call in its loops; empty where one does (:mod:`.band`)."""
    if not config.SKEW_IN_REGISTERS:
        return ["config.SKEW_IN_REGISTERS is False"]
    from . import band

    return band.unsuited(L)


def shifted(L: Layout, x: Source, wanted: bool) -> Source:
    """Room for x + each end's rows, [2·B, H, T, d]; x itself where nothing shifts it."""
    if not wanted:
        return x
    T, d = x.x.shape[2:]
    return Source(torch.empty(2 * L.B, L.H, T, d, dtype=L.dtype, device=L.device))


def prepare_rows(L, qx, kx, vx, grads, qtables, ktables, vtables, functions=(), terms=()) -> None:
    """Launch :func:`.project.prepare`. grads: (do, o, lse, dlse, stats), or None before the forward pass."""
    do, o, lse, dlse, stats = grads or (L.q, L.q, L.anchor, None, L.anchor)
    pad = stats.shape[-1] if grads else cdiv(L.Tq, 128) * 128
    dlse = None if dlse is None else spaced(dlse)
    keyed = bool(ktables or vtables)
    blocks = cdiv(max(pad, L.Tk), 64)
    launch(
        prepare, (blocks * L.B * L.H, 2 if keyed else 1), L.q.x, L.k.x, L.v.x, do.x, o.x, lse,
        L.anchor if dlse is None else dlse, qx.x, (kx or qx).x, vx.x, stats, pad, terms, qtables, ktables, vtables,
        L.q.strides, L.k.strides, L.v.strides, do.strides, o.strides, (0, 0, 0) if dlse is None else dlse.stride(), L.c,
        L.H, L.G, L.B, L.Tq, L.Tk, D=L.d, DV=L.dv, BD=L.BD, BV=L.BV, N=64, EDGES=tuple(f[1] for f in functions),
        SIDES=L.sides, SHIFT_Q=bool(qtables), SHIFT_K=bool(ktables), SHIFT_V=bool(vtables), GRADS=grads is not None,
        DLSE=dlse is not None, PREC=L.precision, num_warps=4,
    )  # fmt: skip


def project_scores(L: Layout, block: tuple[int, int], h0: int, heads: int, shape, made_before: bool = False) -> dict:
    """By port, what the score terms' tiles are read from: a skewed projection of heads h0 …, or a Toeplitz slab.

    `block` is the (queries, keys) block on which bands are decided. Kept projections lie in blocks of the forward's
    tiles; `made_before`: they hold their values already.
    """
    content = content_of(L)
    made = {} if content is None else {"content": content}
    for n in L.score:
        port = L.ports[n]
        if port.kind == "scalar":
            made[n] = L.slab(n, block)
            continue
        if L.keeping is None:
            made[n] = L.buffer(L.projection(n, block), heads, L.zdtype)
        else:
            made[n] = L.share_of_kept(n, L.block_of(L.forward_tiles()), h0, heads)
        if not made_before:
            x, group = (L.factors[1], L.G) if port.kind == "key" else (L.left_factor(n), 1)
            L.project(n, x, group, made[n], L.c, h0, heads, made[n].geometry.tile, shape)
    return made


def terms_of(L: Layout, made: dict, tiles: Tiles, tma: bool, most: int = MOST):
    """(device functions, fields, `most` descriptors) of what :func:`project_scores` made, for these tiles."""
    functions, terms, zs = [], [], []
    for n, source in made.items():
        if n == "content":
            functions.append((content_band, content_edge))
            terms.append(source)
            zs.append(None)
            continue
        make = L.toeplitz_term if L.ports[n].kind == "scalar" else L.skewed_term
        function, term, z = make(n, source, tiles, tma)
        functions.append(function)
        terms.append(term)
        zs.append(z)
    return tuple(functions), tuple(terms), tuple(zs) + (None,) * (most - len(zs))


def store_probabilities(L: Layout, made: dict, lse: Tensor, tiles: Tiles, h0: int, heads: int, tma: bool) -> Buffer:
    """P of the band, as dropout leaves it, in a skewed buffer of q's dtype."""
    out = L.buffer(L.geometry(False, (BLOCK, BLOCK)), heads, L.dtype)
    functions, terms, zs = terms_of(L, made, tiles, tma)
    q, k, _ = L.factors
    launch(
        probabilities, (cdiv(L.Tq, tiles.queries) * L.B * heads,), q(tiles.queries, L.BD, tma),
        k(tiles.keys, L.BD, tma), lse, terms, *zs, L.storing(out), out.descriptor(tiles.queries, tiles.keys, tma),
        L.mask.rule, L.mask.queries, L.seed, q.strides, k.strides, L.c, L.inverse, L.drop, L.H, L.G, h0, heads, L.B,
        L.Tq, L.Tk, L.call.offset, L.lo, L.hi, L.mask.left, L.mask.right, L.mask.batch, D=L.d, BD=L.BD,
        BM=tiles.queries, BN=tiles.keys, UNIT=BLOCK, BANDS=tuple(f[0] for f in functions), SIDES=L.sides,
        RANGED=L.mask.ranged, MASKED=L.masked(), DROPOUT=L.call.dropout_p > 0.0, PREC=L.precision, TMA=tma,
        STAGES=tiles.stages,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def fold_rows(L, n, buffer, acc, sums, out, scale, h0, heads, group, shape) -> None:
    """out = scale · (acc + buffer · table of port n + sums · its end rows), by rows of the buffer's geometry."""
    g, at, table = buffer.geometry, L.lookup(n, buffer.geometry), L.tables[n]
    scalar = table.dim() == 2
    TM, CB, warps, stages, pack = fitted(shape, g.rows, L.B)
    offset, ahead, behind = L.band_args(g)
    width = at.table.shape[2]
    left, right = L.ends[n]
    launch(
        fold, (8 * cdiv(g.rows, 8 * TM // pack) * cdiv(L.B, pack) * (heads // group),), buffer.memory, at.table,
        out if acc is None else acc, L.anchor if sums is None else sums, out, L.ranges(g.keyed), *at.args,
        L.head_stride(n), table.stride(1), table, (0, 0, 0) if acc is None else acc.stride()[:3], out.stride()[:3],
        left, right, scale, g.head, g.stride, L.H, group, h0, heads, L.B, g.rows, g.others, offset, ahead, behind,
        g.shift, g.first, g.span, L.mask.batch, D=width, BD=padded(width), WM=g.tile[0], WN=g.tile[1],
        TM=TM, PACK=pack, CB=CB, SIZE=BLOCK, RANGED=L.mask.ranged, ACC=acc is not None, SUMS=sums is not None,
        SCALAR=scalar, LONG=is_long(at.table), PREC=L.precision, STAGES=stages, num_warps=warps,
    )  # fmt: skip


def _fold_values(L: Layout, out: Tensor, o: Tensor, lse: Tensor, shape, tma: bool) -> None:
    g = L.geometry(False, (BLOCK, BLOCK))
    tiles = backward_tiles(max(L.BD, L.BV), L.bytes, L.Tk, L.kind, False, L.limits)
    fold_shape = fold_tiles(max(L.BD, L.BV), L.bytes, L.Tk, L.limits.gpu)
    buffers = 1 + sum(L.ports[n].kind != "scalar" for n in L.score)
    heads = L.heads_at_once(buffers * L.B * g.head * L.bytes)
    for h0 in range(0, L.H, heads):
        share = min(heads, L.H - h0)
        made = project_scores(L, (BLOCK, BLOCK), h0, share, shape, made_before=L.keeping is not None)
        P = store_probabilities(L, made, lse, tiles, h0, share, tma)
        for n in L.values:
            last = n == L.values[-1]
            fold_rows(L, n, P, out, None, o if last else out, 1.0, h0, share, 1, fold_shape)
