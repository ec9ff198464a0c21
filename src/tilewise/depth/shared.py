"""Reads for training that share their gradients: one fp32 dV a source, one phase-1 backward a block, o1 recomputed.

The functional operators are pure: every reader of a source returns a dV of its own, and autograd adds them in the
storage dtype. Over a deep stack that costs traffic and accuracy (0.5 to 1.1 % in bf16 over 16 to 112 readers). Here a
:class:`SharedSource` holds one fp32 accumulator that all its readers add to, and :class:`BlockReads` runs the S reads
of a block so that their gradients meet in one batched phase-1 backward. The result is the same function and the same
gradients; for eager PyTorch (autograd's engine orders the accumulation), not for torch.compile.

What backward nodes share (`Sum`, `_Block`) never refers to a tensor of the graph: a node that reached its own output
would keep a whole step's tensors alive until a garbage collection.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from tilewise.depth.accumulators import Passes, Share, Sum, accumulators, flattened, shaped
from tilewise.depth.checks import check_kind, check_matrix, check_sources, check_stream, check_update, check_vector
from tilewise.depth.ops import backend, check_call, fold, narrowed, owned
from tilewise.depth.sources import Fixed
from tilewise.once import graph_wanted, once

__all__ = ["BlockReads", "SharedSource", "mix_norm_shared", "reads_of_folded"]


class SharedSource:
    """A source `[..., d]` whose readers add their gradients, in fp32 and in place, to one accumulator.

    The accumulator is made by the first reader of a backward pass, and rounded and released when the last one is done.

    Args:
        value: the completed block (or the embedding), any float dtype.

    Example:
        >>> import torch
        >>> from tilewise.depth import SharedSource
        >>> SharedSource(torch.randn(3, 16)).value.shape
        torch.Size([3, 16])
    """

    def __init__(self, value: Tensor) -> None:
        check_stream("value", value)
        self.sum = Sum(flattened(value.detach()))
        self.value = Share.apply(self.sum, value)


class _SharedMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sums, eps, output_eps, run, q, w, *values):
        flat = [x.flat for x in sums]
        # Flat data first, so that a change in place is named as one; the values lead to leaves, which refuse a second
        # derivative.
        ctx.save_for_backward(q, w, *flat, *values)
        ctx.sums, ctx.args, ctx.run = sums, (eps, output_eps), run
        return owned(run.mix_fwd(flat, None, None, q, w, eps, output_eps)[1], values[0].shape)

    @staticmethod
    @once
    def backward(ctx, dy):
        q, w, *saved = ctx.saved_tensors
        acc, fresh = accumulators(ctx.sums)
        if graph_wanted(ctx):
            for x in ctx.sums:
                x.passes.here().touch(q, w, dy, *saved)
        flat = saved[: len(ctx.sums)]
        dy = flattened(dy)
        _, _, dq, dw = ctx.run.mix_bwd(dy, None, flat, None, q, w, *ctx.args, into=acc, fresh=fresh)
        return None, None, None, None, dq, None if w is None else dw.to(w.dtype), *([None] * len(flat))


def _shared(sources: Sequence[SharedSource]) -> list[SharedSource]:
    check_kind("sources", sources, (list, tuple), "a list or tuple of SharedSource")
    for j, h in enumerate(sources):
        if not isinstance(h, SharedSource):
            raise TypeError(f"sources[{j}]: found {type(h).__name__}, expected SharedSource; wrap it: SharedSource(v)")
        if any(h is other for other in sources[:j]):
            raise ValueError(f"sources[{j}]: found a source that stands before it already, expected each one once")
    return list(sources)


def mix_norm_shared(
    sources: Sequence[SharedSource],
    query: Tensor,
    key_weight: Tensor | None = None,
    output_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    output_eps: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """:func:`tilewise.depth.mix_norm` over shared sources: the output read of a stack.

    Args:
        sources: :class:`SharedSource` objects.
        query, key_weight, output_weight, eps, output_eps, impl: as in :func:`tilewise.depth.mix_norm`; `reference` has
            no shared gradients and means `eager` here.

    Returns:
        y `[..., d]`.

    Raises:
        TypeError: a source is not a SharedSource.
        ValueError: a shape or device that does not fit.
    """
    holders = _shared(sources)
    values = [h.value for h in holders]
    shape, dtype, device = check_sources(values)
    check_call(impl, values[0], eps=eps, output_eps=output_eps)
    for name, x in (("query", query), ("key_weight", key_weight), ("output_weight", output_weight)):
        check_vector(name, x, shape[-1], device, optional=name != "query")
    run = backend("eager" if impl == "reference" else impl, values[0])
    output_eps = eps if output_eps is None else output_eps
    q = fold(query, key_weight, dtype)
    w = narrowed(output_weight, dtype)
    return _SharedMix.apply([h.sum for h in holders], eps, output_eps, run, q, w, *values)


class BlockReads:
    """The S reads of one block over its completed sources, forward and backward, with shared gradients.

    Args:
        sources: completed blocks, :class:`SharedSource` objects.
        queries: w `[S, d]`.
        key_weights: g `[S, d]`, or None.
        output_weights: weights of the S output norms, `[S, d]`, or None for no norm.
        eps: epsilon of the key norm.
        output_eps: epsilon of the output norms; None means `eps`.
        save_o1: keep o1 for the backward (S more tensors a block); otherwise it is recomputed from the saved scores,
            half a block at a time, which reads the sources once more.
        impl: as in :func:`tilewise.depth.mix`; `reference` has no shared gradients and means `eager` here.

    Raises:
        TypeError: a source is not a SharedSource.
        ValueError: a shape that does not fit.

    Example:
        >>> import torch
        >>> from tilewise.depth import BlockReads, SharedSource
        >>> x = SharedSource(torch.randn(5, 16))
        >>> reads = BlockReads([x], torch.zeros(2, 16), None, torch.ones(2, 16))
        >>> y0 = reads.first()
        >>> p, y1 = reads.merge(1, torch.tanh(y0), None)
        >>> y1.shape
        torch.Size([5, 16])
    """

    def __init__(
        self,
        sources: Sequence[SharedSource],
        queries: Tensor,
        key_weights: Tensor | None = None,
        output_weights: Tensor | None = None,
        *,
        eps: float = 1e-6,
        output_eps: float | None = None,
        save_o1: bool = False,
        impl: str = "auto",
    ) -> None:
        holders = _shared(sources)
        values = [h.value for h in holders]
        shape, dtype, device = check_sources(values)
        check_call(impl, values[0], eps=eps, output_eps=output_eps)
        check_matrix("queries", queries, shape[-1], device, optional=False)
        check_matrix("key_weights", key_weights, shape[-1], device, queries.shape[0])
        check_matrix("output_weights", output_weights, shape[-1], device, queries.shape[0])
        run = backend("eager" if impl == "reference" else impl, values[0])
        q = fold(queries, key_weights, dtype, own=True)
        output_eps = eps if output_eps is None else output_eps
        self._open(
            holders, q, q.detach(), narrowed(output_weights, dtype), run, shape, eps, output_eps, 0 if save_o1 else 2
        )

    def _open(self, holders, q, flat, w, run, shape, eps, output_eps, pieces) -> None:
        sums = [h.sum for h in holders]
        self._block = _Block(sums, run, shape, flat, w, eps, output_eps, pieces)
        self._ticket = _Open.apply(self._block, q, w, *[h.value for h in holders])

    def first(self) -> Tensor:
        """y of the block's first sublayer, which has no partial sum."""
        return _Read.apply(self._block, 0, None, None, self._ticket)[1]

    def merge(self, i: int, update: Tensor, prefix: Tensor | None) -> tuple[Tensor, Tensor]:
        """(p, y) of sublayer i of the block: p = prefix + update, merged with o1[i] and normed.

        Args:
            i: 1 to S - 1.
            update: output of the previous sublayer, `[..., d]`.
            prefix: the block's partial sum before it, or None for i = 1.

        Raises:
            IndexError: i is not a sublayer of this block that has a partial sum.
            TypeError: update or prefix is no tensor of the sources' dtype.
            ValueError: their shape differs from the sources', or i > 1 without a prefix.
        """
        check_kind("i", i, int, "an integer")
        if not 1 <= i < self._block.size:
            raise IndexError(f"i: found {i}, expected 1 to {self._block.size - 1}; sublayer 0 is first()")
        if prefix is None and i > 1:
            raise ValueError(f"prefix: found None for sublayer {i}, expected the block's partial sum before it")
        source = self._block.sources[0]
        for name, x in (("update", update), ("prefix", update if prefix is None else prefix)):
            check_update(x, self._block.shape, source.device, name)
            if x.dtype != source.dtype:
                raise TypeError(f"{name}: found dtype {x.dtype}, expected {source.dtype}, that of the sources")
        return self._merge(i, update, prefix)

    def _merge(self, i: int, update: Tensor, prefix: Tensor | None) -> tuple[Tensor, Tensor]:
        return _Read.apply(self._block, i, update, prefix, self._ticket)


def reads_of_folded(
    sources: Sequence[SharedSource],
    q: Tensor,
    flat: Tensor,
    output_weights: Tensor | None,
    run: ModuleType,
    shape: torch.Size,
    eps: float,
    output_eps: float,
    last: bool,
    save_o1: bool = False,
) -> BlockReads:
    """:class:`BlockReads` of arguments that are known to fit.

    Args:
        q: folded queries w * g, `[S, d]` in the statistics' dtype.
        flat: the same without a graph; rows of a tensor that `run.prepare` was given share its parts.
        run: the backend.
        shape: of the sources.
        last: this block's backward runs first, while every other prefix is alive: o1 is recomputed a third of the block
            at a time instead of a half.
        save_o1: as for :class:`BlockReads`.
    """
    reads = BlockReads.__new__(BlockReads)
    pieces = 0 if save_o1 else 3 if last else 2
    reads._open(sources, q, flat, output_weights, run, shape, eps, output_eps, pieces)
    return reads


class _Block:
    """What the reads of a block have in common: sources, folded queries, scores, o1 while it lives, gradients.

    A backward recomputes o1 in `pieces` parts of the block; 0 keeps o1.
    """

    def __init__(self, sums, run, shape, q, w, eps, output_eps, pieces) -> None:
        self.sums, self.run, self.shape = sums, run, shape
        self.q, self.w = q, None if w is None else w.detach()
        self.eps, self.output_eps, self.size = eps, output_eps, q.shape[0]
        self.save_o1, self.pieces = not pieces, max(pieces, 1)
        self.sources = Fixed(x.flat for x in sums)
        self.scores, self.rstd = run.scores(self.sources, self.q, eps)
        self.o1, self.lse = self.combine(slice(None))
        # Rows as views made once, and cheap checks in `sources`: 9.8 to 9.1 ms of host time a step of 64 reads.
        self.queries, self.log_sums = self.q.unbind(0), self.lse.unbind(0)
        self.weights = [None] * self.size if w is None else self.w.unbind(0)
        self.passes = Passes()

    def combine(self, part: slice) -> tuple[Sequence[Tensor], Tensor]:
        """(o1, lse) of these reads; the softmax over one source is 1, so that o1 is the source itself."""
        scores = self.scores[part]
        if len(self.sources) == 1:
            return [self.sources[0]] * len(scores), scores[:, 0]
        o1, lse = self.run.combine(self.sources, scores)
        return o1.unbind(0), lse

    def group(self, i: int) -> range:
        """The reads whose o1 is recomputed together with read i's."""
        step = -(-self.size // self.pieces)
        first = i // step * step
        return range(first, min(first + step, self.size))

    def merge(self, i: int, update: Tensor | None, prefix: Tensor | None) -> tuple[Tensor | None, Tensor]:
        if self.o1 is None:
            self.o1 = self.combine(slice(None))[0]
        lse = None if i == 0 else self.log_sums[i]
        p, y = self.run.phase2_fwd(
            update, prefix, self.o1[i], lse, self.queries[i], self.weights[i], self.eps, self.output_eps
        )
        if i == self.size - 1 and not self.save_o1:
            self.o1 = None
        return p, y


class _BlockGrad:
    """What the reads of a block leave for the block's phase-1 backward: do1, dlse, partial dq and dw."""

    def __init__(self, block: _Block) -> None:
        T, d = block.sources[0].shape
        like = block.q
        self.do: list[Tensor | None] = [None] * block.size
        self.o1: list[Tensor | None] = [None] * block.size
        self.done: set[int] = set()
        self.dlse = torch.empty((block.size, T), dtype=like.dtype, device=like.device)
        programs = block.run.partials(block.sources[0])
        self.parts = torch.empty((block.size, 2, programs, d), dtype=like.dtype, device=like.device)
        self.dlse_rows, self.part_rows = self.dlse.unbind(0), self.parts.unbind(0)

    def rows(self, block: _Block, i: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """(o1, places) of read i: places of do1, dlse and parts; a recomputed o1 is overwritten by its gradient."""
        if self.do[i] is None:
            group = block.group(i)
            part = slice(group.start, group.stop)
            o1 = do = block.combine(part)[0] if block.o1 is None else block.o1[part]
            # A kept o1 serves later merges and passes: of a block whose last read was not made, too.
            if block.o1 is not None or len(block.sources) == 1:
                do = torch.empty((len(group), *block.sources[0].shape), dtype=o1[0].dtype, device=o1[0].device)
            for k, row, grad in zip(group, o1, do, strict=True):
                self.o1[k], self.do[k] = row, grad
        return self.o1[i], (self.do[i], self.dlse_rows[i], self.part_rows[i])

    def again(self, block: _Block, i: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """(o1, places of its own) for a read that was made more than once."""
        o1 = block.combine(slice(i, i + 1))[0][0] if block.o1 is None else block.o1[i]
        return o1, tuple(torch.empty_like(x) for x in self.rows(block, i)[1])


class _Open(torch.autograd.Function):
    """A ticket of no elements that every read of the block holds, so that this backward comes after theirs."""

    @staticmethod
    def forward(ctx, block, q, w, *values):
        ctx.set_materialize_grads(False)
        # Saved so that a change in place is noticed, and a second derivative refused, by whatever leaf.
        ctx.save_for_backward(q, w, *block.sources, *values)
        ctx.block, ctx.sources = block, len(values)
        return q.new_empty(0)

    @staticmethod
    @once
    def backward(ctx, _):
        q, w, *saved = ctx.saved_tensors
        block = ctx.block
        kept = block.passes.here()
        grad = kept.take()
        if grad is None:
            return (None,) * (3 + ctx.sources)
        for i in range(block.size):
            if i not in grad.done:
                for x in grad.rows(block, i)[1]:
                    x.zero_()
        acc, fresh = accumulators(block.sums)
        if graph_wanted(ctx):
            ctx.others = tuple(kept.touched)
            for x in block.sums:
                x.passes.here().touch(q, w, *saved, *kept.touched)
        _, dq = block.run.phase1_bwd(
            grad.do, grad.dlse, block.sources, block.q, block.scores, block.lse, block.rstd, into=acc, fresh=fresh
        )
        sums = grad.parts.sum(2)
        dw = None if w is None else sums[:, 1].to(w.dtype)
        return None, dq.add_(sums[:, 0]), dw, *([None] * ctx.sources)


class _Read(torch.autograd.Function):
    """(p, y) of read i; its backward leaves do1, dlse, dq and dw with the block."""

    @staticmethod
    def forward(ctx, block, i, update, prefix, ticket):
        ctx.set_materialize_grads(False)
        new, y = block.merge(i, flattened(update), flattened(prefix))
        p = None if i == 0 else update if prefix is None else owned(new, block.shape)
        # p, where it is made here, leads to the ticket: one tensor less to save and to unpack.
        ctx.save_for_backward(*((p, ticket) if prefix is None else (p,)))
        ctx.block, ctx.i, ctx.prefixed = block, i, prefix is not None
        return p, owned(y, block.shape)

    @staticmethod
    @once
    def backward(ctx, dp, dy):
        saved = ctx.saved_tensors
        p, block, i = saved[0], ctx.block, ctx.i
        if dy is None:
            return None, None, dp, dp if ctx.prefixed else None, None
        kept = block.passes.here()
        if graph_wanted(ctx):
            kept.touch(*saved, dy, dp)
        grad = kept.value = kept.value or _BlockGrad(block)
        repeated = i in grad.done
        o1, places = grad.again(block, i) if repeated else grad.rows(block, i)
        do, dlse, part = places
        dprefix = block.run.phase2_bwd(
            flattened(dy), flattened(dp), flattened(p), o1, None if i == 0 else block.log_sums[i], block.queries[i],
            block.weights[i], block.eps, block.output_eps, do=do, dlse=dlse, part=part,
        )[0]  # fmt: skip
        if repeated:
            for total, x in zip(grad.rows(block, i)[1], places, strict=True):
                total.add_(x)
        grad.done.add(i)
        grad.o1[i] = None
        dprefix = shaped(dprefix, block.shape)
        return None, None, dprefix, dprefix if ctx.prefixed else None, None
