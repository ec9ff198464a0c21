"""Host side of phase 1: scores, completion of a block, weighted sums, and their backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tilewise.depth.triton import config
from tilewise.depth.triton.many import combine_many_kernel, read_kernel
from tilewise.depth.triton.phase1 import combine_kernel, finish_kernel, scores_kernel
from tilewise.depth.triton.phase1_bwd import inner_kernel, source_grad_kernel, weights_kernel
from tilewise.depth.triton.sources import bank, row_stride, rows
from tilewise.triton.launch import launch as start

__all__ = ["combine", "complete", "merge_queries", "phase1_bwd", "prepare", "read", "scores", "split_queries"]


_SPLIT = WeakIdKeyDictionary()


def split_queries(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """fp32 queries as high + low parts in `dtype`: two dots give the score 16 (bf16) or 22 (fp16) bits of the query.

    The parts are remembered for as long as the caller keeps `q` and does not write to it, so that a decode step with
    folded queries launches nothing for them. Inside a graph capture nothing is remembered: that memory is the graph's.
    """
    if dtype == torch.float32:
        return q, q
    known = _known(q, dtype)
    if known is not None:
        return known
    high = q.to(dtype)
    parts = high, (q - high.float()).to(dtype)
    if not q.is_inference() and not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        _SPLIT[q] = (q._version, dtype), parts
    return parts


def _known(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Parts that are remembered for q, or for the tensor of which it is some rows."""
    if q.is_inference():
        return None
    found, stamp = _SPLIT.get(q), (q._version, dtype)
    if found is not None:
        return found[1] if found[0] == stamp else None
    base = q._base
    found = None if base is None else _SPLIT.get(base)
    if found is None or found[0] != stamp or q.shape[1:] != base.shape[1:] or not q.is_contiguous():
        return None
    first = (q.storage_offset() - base.storage_offset()) // q.shape[1]
    parts = tuple(x[first : first + q.shape[0]] for x in found[1])
    _SPLIT[q] = stamp, parts
    return parts


def prepare(q: Tensor, dtype: torch.dtype) -> None:
    """See :func:`tilewise.depth.eager.prepare`. q and its parts are made in the same capture, if there is one."""
    if dtype != torch.float32 and not q.is_inference():
        _SPLIT[q] = (q._version, dtype), split_queries(q, dtype)


def merge_queries(q: Tensor, dtype: torch.dtype) -> Tensor:
    """See :func:`tilewise.depth.eager.merge_queries`: fp16 beside bf16 sources, saturated at ±65504.

    Its error of 2^-12 is an eighth of the sources' own. Of the 86 KB that a row of 7,168 reads, fp32 queries are 29.
    """
    return q.clamp(-65504.0, 65504.0).half() if dtype == torch.bfloat16 and config.narrow_queries() else q


def _fits(name: str, x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, strides: bool = False) -> None:
    """Raise ValueError unless a caller's buffer has this shape and dtype and is contiguous (or along T, if strides)."""
    if x is None:
        return
    dense = x.is_contiguous() if not strides else x.stride(-1) == 1 or x.shape[-1] == 1
    if tuple(x.shape) != shape or x.dtype != dtype or not dense:
        kind = "a last stride of 1" if strides else "contiguous"
        raise ValueError(
            f"{name}: found {tuple(x.shape)} {x.dtype} with strides {x.stride()}, expected {shape} {dtype}, {kind}"
        )


def _scores(v: Sequence[Tensor] | None, add, q, eps, s, r) -> None:
    """Scores of sources `v`, or of the sum `add` = (update, prefix, block); writes s `[S, n, T]` and r `[n, T]`."""
    b = bank(v if add is None else [add[2]])
    like, T, d = b.base, b.base.shape[0], b.base.shape[1]
    S, n = s.shape[:2]
    high, low = split_queries(q, like.dtype)
    cfg = config.score_tiles(T, d, S, like.element_size())
    splits = cfg.pop("splits")
    tiles = config.cdiv(d, cfg["BK"])
    chunk = config.cdiv(tiles, splits)
    splits = config.cdiv(tiles, chunk)
    s_out, r_out, strides = s, r, (s.stride(0), s.stride(1), 0, 0)
    if splits > 1:
        s_out = torch.empty((splits, S, n, T), dtype=torch.float32, device=like.device)
        r_out = torch.empty((splits, n, T), dtype=torch.float32, device=like.device)
        strides = (n * T, T, S * n * T, n * T)
    grid = (config.cdiv(T, cfg["BT"] * cfg["SUB"]), n, config.cdiv(S, cfg["BS"]) * splits)
    start(
        scores_kernel,
        grid,
        like,
        like if b.table is None else b.table,
        *(add if add is not None else (like, like, like)),
        high,
        low,
        s_out,
        r_out,
        T,
        S,
        splits,
        chunk,
        b.stride8,
        b.row8,
        *strides,
        eps,
        TABLE=b.table is not None,
        ADD=add is not None,
        LOW=like.dtype != torch.float32,
        SPLIT=splits > 1,
        D=d,
        **cfg,
    )
    if splits > 1:
        grid = (config.cdiv(T, 128), n, S)
        strides = s.stride(0), s.stride(1)
        how = {"EXACT": like.dtype == torch.float32, "D": d, "B": 128, "num_warps": 4}
        start(finish_kernel, grid, s_out, r_out, s, r, T, n, S, splits, *strides, eps, **how)


def scores(sources, q, eps, out=None):
    """See :func:`tilewise.depth.eager.scores`. `out` `[S, n, T]` fp32 may have any strides but 1 along T."""
    T, n = sources[0].shape[0], len(sources)
    _fits("out", out, (q.shape[0], n, T), torch.float32, strides=True)
    s = torch.empty((q.shape[0], n, T), dtype=torch.float32, device=q.device) if out is None else out
    r = torch.empty((n, T), dtype=torch.float32, device=q.device)
    if T and q.shape[0]:
        _scores(sources, None, q, eps, s, r)
    return s, r


def complete(update, prefix, q, eps, block=None, out=None):
    """See :func:`tilewise.depth.eager.complete`. `block` and `out` `[S, T]` receive the results, if given."""
    update, prefix = update.contiguous(), prefix.contiguous()
    T = update.shape[0]
    _fits("block", block, tuple(update.shape), update.dtype)
    _fits("out", out, (q.shape[0], T), torch.float32, strides=True)
    block = torch.empty_like(update) if block is None else block
    s = torch.empty((q.shape[0], T), dtype=torch.float32, device=q.device) if out is None else out
    r = torch.empty((1, T), dtype=torch.float32, device=q.device)
    if q.shape[0] == 0:
        torch.add(update, prefix, out=block)
    elif T:
        if config.score_tiles(*update.shape, len(q), update.element_size())["GRAM"] == 1:
            torch.add(update, prefix, out=block)
            _scores([block], None, q, eps, s[:, None], r)
        else:
            _scores(None, (update, prefix, block), q, eps, s[:, None], r)
    return block, s, r[0]


def combine(sources, s, out=None, lse=None):
    """See :func:`tilewise.depth.eager.combine`. `out` `[S, T, d]` and `lse` `[S, T]` receive the results, if given."""
    b = bank(sources)
    like, (T, d), (S, n) = b.base, b.base.shape, s.shape[:2]
    _fits("out", out, (S, T, d), like.dtype)
    _fits("lse", lse, (S, T), torch.float32)
    o1 = torch.empty((S, T, d), dtype=like.dtype, device=like.device) if out is None else out
    lse = torch.empty((S, T), dtype=torch.float32, device=like.device) if lse is None else lse
    if T == 0 or S == 0:
        return o1, lse
    s = s if s.dtype == torch.float32 and (T == 1 or s.stride(2) == 1) else s.float().contiguous()
    where = like if b.table is None else b.table
    strides = (b.stride8, b.row8, s.stride(0), s.stride(1))
    if cfg := config.combine_many(T, d, n, S, like.element_size()):
        span = cfg.pop("span")
        grid = (T * config.cdiv(S, cfg["BS"]), config.cdiv(config.cdiv(d, cfg["BD"]), span))
        through = {"TABLE": b.table is not None}
        start(combine_many_kernel, grid, like, where, s, o1, lse, T, n, S, *strides, span, **through, D=d, **cfg)
        return o1, lse
    cfg = config.combine_tiles(T, d, n, S, like.element_size())
    span = cfg.pop("span")
    one = n <= cfg["BN"]
    grid = (config.cdiv(T, cfg["BT"]) * config.cdiv(S, cfg["BS"]), config.cdiv(config.cdiv(d, cfg["BD"]), span))
    start(
        combine_kernel,
        grid,
        like,
        where,
        s,
        o1,
        lse,
        T,
        n,
        S,
        *strides,
        span,
        TABLE=b.table is not None,
        LOW=like.dtype != torch.float32,
        ONE=one,
        D=d,
        **cfg,
    )
    return o1, lse


def read(o1, lse, sources, update, s, w, output_eps, slot=None):
    """See :func:`tilewise.depth.eager.read`."""
    like = o1 if o1 is not None else update if update is not None else sources[0]
    T, d = like.shape
    y = torch.empty((T, d), dtype=like.dtype, device=like.device)
    if T == 0:
        return y
    b = bank(sources) if sources else None
    o1, w = (None if x is None else x.contiguous() for x in (o1, w))
    update = None if update is None else rows(update)
    s = s if T == 1 or s.stride(1) == 1 else s.contiguous()
    start(
        read_kernel,
        (T,),
        y if b is None else b.base,
        y if b is None or b.table is None else b.table,
        s,
        y if o1 is None else o1,
        s if lse is None else lse.contiguous(),
        y if update is None else update,
        y if slot is None else slot,
        y if w is None else w,
        y,
        len(sources),
        0 if b is None else b.stride8,
        0 if b is None else b.row8,
        0 if update is None else row_stride(update) // 8,
        0 if slot is None else row_stride(slot) // 8,
        s.stride(0),
        output_eps,
        TABLE=b is not None and b.table is not None,
        O1=o1 is not None,
        UPDATE=update is not None,
        STORE=slot is not None,
        NORM=w is not None,
        D=d,
        **config.read(T, d, len(sources)),
    )
    return y


def _from(x: Tensor, row: int) -> Tensor:
    return x[row:] if row else x


def phase1_bwd(do1, dlse, sources, q, s, lse, r, into=None, fresh=False):
    """See :func:`tilewise.depth.eager.phase1_bwd`; `fresh` accumulators are written, not added to."""
    do1 = [x.contiguous() for x in do1]
    b, do = bank(sources), bank(do1)
    like, (T, d), (S, n) = b.base, b.base.shape, s.shape[:2]
    s, lse, r = s.contiguous(), lse.contiguous(), r.contiguous()
    size = like.element_size()
    grads = [torch.empty((T, d), dtype=like.dtype, device=like.device) for _ in sources] if into is None else into
    many = S > 16
    if many and into is None:
        acc, fresh = [torch.empty((T, d), dtype=torch.float32, device=like.device) for _ in sources], True
    else:
        acc = grads
    g = torch.empty((S, n, T), dtype=torch.float32, device=like.device)
    a = torch.empty_like(g)
    c = torch.empty((n, T), dtype=torch.float32, device=like.device)
    table = like if b.table is None else b.table
    cfg = config.inner_tiles(n, S, size)
    grid = (config.cdiv(T, cfg["BT"]), config.cdiv(n, cfg["BN"]), config.cdiv(S, cfg["BS"]))
    strides = (do.stride8, b.stride8, b.row8)
    do_table = like if do.table is None else do.table
    flags = {"TABLE": b.table is not None, "DO_TABLE": do.table is not None}
    start(inner_kernel, grid, do.base, do_table, like, table, g, T, n, S, *strides, **flags, D=d, **cfg)
    tiles = {"DLSE": dlse is not None, "BS": config.next_power_of_2(S), "BT": 32, "D": d, "num_warps": 4}
    start(weights_kernel, (config.cdiv(T, 32),), s, lse, lse if dlse is None else dlse, r, g, a, c, T, n, S, **tiles)
    out = bank(acc)
    sums = []
    known = _known(q, like.dtype)
    q_low = q.to(like.dtype) if known is None else known[0]
    for s0 in range(0, S, 16):
        m = min(16, S - s0)
        cfg = config.dv_tiles(T, d, n, m, size)
        programs = cfg.pop("programs")
        chunks = config.cdiv(n, cfg["BN"])
        part = torch.empty((chunks * programs, m, d), dtype=torch.float32, device=like.device)
        start(
            source_grad_kernel,
            (config.cdiv(d, cfg["BD"]), programs, chunks),
            do.base if do.table is not None else do1[s0],
            _from(do_table, s0),
            like,
            table,
            _from(a, s0),
            _from(g, s0),
            c,
            _from(q_low, s0),
            out.base,
            like if out.table is None else out.table,
            part,
            T,
            n,
            m,
            *strides,
            out.stride8,
            **flags,
            GRAD_TABLE=out.table is not None,
            ADD=s0 > 0 or (into is not None and not fresh),
            SHRINK=s0 == 0,
            D=d,
            **cfg,
        )
        sums.append(part.sum(0))
    if acc is not grads:
        grads = [x.to(like.dtype) for x in acc]
    return (grads if into is None else []), sums[0] if len(sums) == 1 else torch.cat(sums)
