"""Host side of the Triton kernels: the same functions as `eager`, on flat tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilewise.depth.triton import config
from tilewise.depth.triton.launch_phase1 import combine, complete, merge_queries, phase1_bwd, prepare, read, scores
from tilewise.depth.triton.merge import merge_bwd_kernel, merge_fwd_kernel
from tilewise.depth.triton.mergefew import merge_sources_kernel
from tilewise.depth.triton.mixfew import mix_few_kernel
from tilewise.depth.triton.onepass import mix_bwd_kernel, mix_fwd_kernel
from tilewise.depth.triton.sources import bank, named, row_stride, rows, table
from tilewise.triton.direct import Prepared
from tilewise.triton.launch import launch as start

__all__ = [
    "combine",
    "complete",
    "direct",
    "merge_queries",
    "mix_bwd",
    "mix_fwd",
    "partials",
    "phase1_bwd",
    "phase2_bwd",
    "phase2_from_scores",
    "phase2_fwd",
    "prepare",
    "read",
    "scores",
    "serve_",
]

GRADS = {torch.float16: triton.language.float16, torch.bfloat16: triton.language.bfloat16}


class _Named(NamedTuple):
    """Sources by name (`pointers`, `count` of them) or, if there are many, by the addresses in `table`."""

    pointers: tuple[Tensor, ...]
    table: Tensor
    stride8: int
    through: bool
    count: int
    keep: Sequence[Tensor]


def _sources(sources: Sequence[Tensor], spare: Tensor) -> _Named:
    if not sources:
        return _Named((spare,), spare, 0, False, 0, ())
    sources, stride8 = named(sources)
    if len(sources) > config.UNROLLED:
        return _Named((sources[0],), table(sources), stride8, True, 0, sources)
    return _Named(tuple(sources), spare, stride8, False, len(sources), sources)


def _mix(sources, update, prefix, new, block, q, g, w, eps, output_eps) -> Tensor:
    like = sources[0] if sources else prefix if update is None else update
    T, d = like.shape
    y = torch.empty((T, d), dtype=like.dtype, device=like.device)
    if T == 0:
        return y
    mode = 0 if update is None and prefix is None else 1 if prefix is None else 3 if update is None else 2
    q, g, w = (None if x is None else x.contiguous() for x in (q, g, w))
    update, prefix = (None if x is None else rows(x) for x in (update, prefix))
    strides = [0 if x is None else row_stride(x) // 8 for x in (update, prefix, new, block)]
    if tiles := config.mix_few(T, d, len(sources)):
        b = bank(sources)
        start(
            mix_few_kernel,
            (T,),
            b.base,
            y if b.table is None else b.table,
            y if update is None else update,
            y if prefix is None else prefix,
            q,
            q if g is None else g,
            q if w is None else w,
            y if new is None else new,
            y if block is None else block,
            y,
            b.stride8,
            b.row8,
            *strides,
            len(sources),
            eps,
            output_eps,
            TABLE=b.table is not None,
            PREFIX=mode,
            WRITE_PREFIX=new is not None,
            WRITE_BLOCK=block is not None,
            KEY=g is not None,
            NORM=w is not None,
            D=d,
            **tiles,
        )
        return y
    by = _sources(sources, y)
    start(
        mix_fwd_kernel,
        (T,),
        by.pointers,
        by.table,
        y if update is None else update,
        y if prefix is None else prefix,
        q,
        q if g is None else g,
        q if w is None else w,
        y if new is None else new,
        y if block is None else block,
        y,
        by.stride8,
        *strides,
        len(sources),
        eps,
        output_eps,
        N=by.count,
        TABLE=by.through,
        PREFIX=mode,
        WRITE_PREFIX=new is not None,
        WRITE_BLOCK=block is not None,
        KEY=g is not None,
        NORM=w is not None,
        D=d,
        BD=config.row_block(d),
        **config.mix(T, d, len(sources)),
    )
    return y


def mix_fwd(sources, update, prefix, q, w, eps, output_eps, new=None):
    """See :func:`tilewise.depth.eager.mix_fwd`."""
    new = _sum(update, prefix, new)
    y = _mix(sources, update, prefix, new, None, q, None, w, eps, output_eps)
    return (update if prefix is None else prefix if update is None else new), y


def _sum(update: Tensor | None, prefix: Tensor | None, new: Tensor | None) -> Tensor | None:
    """Where prefix + update goes: None if one of them is absent."""
    if update is None or prefix is None:
        return None
    return torch.empty(update.shape, dtype=update.dtype, device=update.device) if new is None else new


def serve_(prefix, delta, blocks, q, g, w, num_blocks, block_write_idx, eps, output_eps):
    """See :func:`tilewise.depth.eager.serve_`: one launch, in place.

    Rows that are not 16-byte aligned are copied to aligned ones and back, a launch for each tensor that has them.
    """
    block = blocks[:, block_write_idx] if block_write_idx >= 0 else None
    sources = [blocks[:, j] for j in range(num_blocks)]
    at, into = (None if x is None else rows(x) for x in (prefix, block))
    y = _mix(sources, delta, at, None if delta is None else at, into, q, g, w, eps, output_eps)
    if delta is not None and at is not prefix:
        prefix.copy_(at)
    if into is not block:
        block.copy_(into)
    return y


def mix_bwd(dy, dp, sources, p, q, w, eps, output_eps, into=None, fresh=False):
    """See :func:`tilewise.depth.eager.mix_bwd`; `fresh` accumulators are written, not added to."""
    T, d = dy.shape
    dy, q, w = rows(dy).contiguous(), q.contiguous(), None if w is None else w.contiguous()
    cfg = config.mix_bwd(T, d)
    programs = max(cfg.pop("programs"), 1)
    part = torch.empty((2, programs, d), dtype=torch.float32, device=dy.device)
    wide = dy.dtype == torch.float32 or into is not None
    grads = [torch.empty((T, d), dtype=dy.dtype, device=dy.device) for _ in sources] if into is None else into
    dprefix = None if p is None else torch.empty_like(p, memory_format=torch.contiguous_format)
    by = _sources(sources, dy)
    start(
        mix_bwd_kernel,
        (programs,),
        dy,
        dy if dp is None else dp.contiguous(),
        by.pointers,
        by.table,
        dy if p is None else p.contiguous(),
        q,
        q if w is None else w,
        tuple(grads) if grads and not by.through else (part,),
        table(grads) if by.through else dy,
        dy if p is None else dprefix,
        part,
        T,
        len(sources),
        by.stride8,
        eps,
        output_eps,
        N=by.count,
        TABLE=by.through,
        PREFIX=p is not None,
        DP=dp is not None,
        NORM=w is not None,
        ADD=into is not None and not fresh,
        GRAD=triton.language.float32 if wide else GRADS[dy.dtype],
        D=d,
        BD=config.row_block(d),
        **cfg,
    )
    dq, dw = part[0].sum(0), None if w is None else part[1].sum(0)
    return (grads if into is None else []), dprefix, dq, dw


@lru_cache(4096)
def _merge_plan(T, d, size, mode, norm, few, eps, output_eps) -> Prepared:
    """`few` is here because it decides the tile."""
    tile = {"BD": config.row_block(d), "num_warps": config.merge_warps(T, d), **config.merge_order(T, d)}
    how = {"PREFIX": mode, "NORM": norm, "ONE_REDUCTION": config.one_reduction(T, size), "EARLY": few, "D": d}
    return Prepared(merge_fwd_kernel, (T,), (eps, output_eps), {**how, **tile})


def phase2_fwd(update, prefix, o1, lse, q, w, eps, output_eps, new=None):
    """See :func:`tilewise.depth.eager.phase2_fwd`."""
    T, d = o1.shape
    o1 = o1.contiguous()
    y = torch.empty_like(o1)
    q, w = (None if x is None else x.contiguous() for x in (q, w))
    mode = 0
    if update is not None:
        update, lse, mode = update.contiguous(), lse.contiguous(), 1
        if prefix is not None:
            prefix, mode = prefix.contiguous(), 2
            new = torch.empty_like(o1) if new is None else new
    if T:
        # A pointer that is not used is y's: a variant of the kernel never sees it.
        _merge_plan(T, d, o1.element_size(), mode, w is not None, config.few(T), eps, output_eps)(
            update if mode else y, prefix if mode == 2 else y, o1, lse if mode else y, q if mode else y,
            y if w is None else w, new if mode == 2 else y, y,
        )  # fmt: skip
    return (new if mode == 2 else update), y


def direct(T: int, n: int, queries: int) -> bool:
    """Whether :func:`phase2_from_scores` over n sources beats phase 1 and :func:`phase2_fwd` for T tokens.

    `queries` that would share the phase 1: 1 never pays for one; 0 if it is there already.
    """
    return 1 <= n <= (config.UNROLLED if queries == 1 else config.DIRECT if config.few(T) else 0)


def phase2_from_scores(update, prefix, sources, s, q, w, eps, output_eps, new=None):
    """See :func:`tilewise.depth.eager.phase2_from_scores`; at most `config.UNROLLED` sources."""
    like, (T, d) = sources[0], sources[0].shape
    update, prefix, q, w = (None if x is None else x.contiguous() for x in (update, prefix, q, w))
    sources, stride8 = named(sources)
    s = s if T == 1 or s.stride(1) == 1 else s.contiguous()
    y = torch.empty((T, d), dtype=like.dtype, device=like.device)
    new = _sum(update, prefix, new)
    if T:
        start(
            merge_sources_kernel,
            (T,),
            tuple(sources),
            s,
            y if update is None else update,
            y if prefix is None else prefix,
            y if q is None else q,
            y if w is None else w,
            y if new is None else new,
            y,
            stride8,
            s.stride(0),
            eps,
            output_eps,
            N=len(sources),
            PREFIX=0 if update is None else 1 if prefix is None else 2,
            NORM=w is not None,
            ONE_REDUCTION=config.one_reduction(T, like.element_size()),
            D=d,
            BD=config.row_block(d),
            num_warps=config.sources_warps(T, d),
        )
    return (update if prefix is None else new), y


@lru_cache(4096)
def _merge_bwd_tile(T: int, d: int, size: int) -> tuple[int, dict]:
    tile = config.merge_bwd(T, d, size)
    return max(tile.pop("programs"), 1), tile


@lru_cache(4096)
def _merge_bwd_plan(T, d, size, prefix, dp, norm, zeros, eps, output_eps) -> Prepared:
    programs, tile = _merge_bwd_tile(T, d, size)
    how = {"PREFIX": prefix, "DP": dp, "NORM": norm, "ZEROS": zeros, "D": d}
    return Prepared(merge_bwd_kernel, (programs,), (T, eps, output_eps), {**how, **tile})


def partials(v: Tensor) -> int:
    """Rows of dq and dw that :func:`phase2_bwd` leaves in `part` for a tensor `[T, d]` like `v`."""
    return _merge_bwd_tile(*v.shape, v.element_size())[0]


def phase2_bwd(dy, dp, p, o1, lse, q, w, eps, output_eps, do=None, dlse=None, part=None):
    """See :func:`tilewise.depth.eager.phase2_bwd`.

    `do` may be o1 itself, `dlse` and `part` (`[2, programs, d]` fp32, dq and dw before their sum) may be rows of the
    caller's buffers; with `part` the sums are left to the caller and dq, dw are None. Without a prefix dlse and dq are
    zeros then.
    """
    T, d = dy.shape
    dy, o1 = dy.contiguous(), o1.contiguous()
    q, w = (None if x is None else x.contiguous() for x in (q, w))
    own = part is None
    if own:
        part = torch.empty((2, partials(dy), d), dtype=torch.float32, device=dy.device)
    do = torch.empty_like(o1) if do is None else do
    dprefix = None
    if p is not None:
        p, lse, dprefix = p.contiguous(), lse.contiguous(), torch.empty_like(dy)
        dlse = torch.empty(T, dtype=torch.float32, device=dy.device) if dlse is None else dlse
    zeros = p is None and not own and dlse is not None
    _merge_bwd_plan(T, d, dy.element_size(), p is not None, dp is not None, w is not None, zeros, eps, output_eps)(
        dy, dy if dp is None else dp.contiguous(), dy if p is None else p, o1, dy if p is None else lse,
        dy if p is None else q, dy if w is None else w, dy if p is None else dprefix, do,
        dy if dlse is None else dlse, part,
    )  # fmt: skip
    dq = part[0].sum(0) if own and p is not None else None
    dw = part[1].sum(0) if own and w is not None else None
    return dprefix, do, dlse, dq, dw
