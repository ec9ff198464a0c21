"""Tensor parallelism with the sources sharded along the sequence: reduce-scatter, reads on the shard, all-gather.

The all-reduce after a row-parallel sublayer is split in two, and everything that belongs to the residual stream happens
between the halves, on 1 / P of the tokens: the same bytes on the wire, 1 / P of the bank and of its traffic. A token's
sources live on exactly one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.depth.checks import check_kind, check_norms, check_stream, check_update, check_vector
from tilewise.depth.state import InferenceState
from tilewise.depth.stream import chosen_norm

__all__ = ["SequenceSharded", "ShardedStream", "gather_tokens", "scatter_partial", "shared_parameter", "slice_tokens"]

# Names since torch 2.13; the older ones are deprecated there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def chosen_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the default one.

    Raises:
        TypeError: no process group.
        ValueError: None, and there is no default group.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("group: found None and no default group, expected one; call dist.init_process_group first")
    check_kind("group", group, dist.ProcessGroup, "a process group")
    return group


def _share(tokens: int, group: dist.ProcessGroup) -> tuple[int, slice]:
    """(rows that travel a rank, this rank's own tokens): the last ranks may hold fewer rows, or none.

    What travels is padded, what is read never is: a row of zeros has no RMSNorm at epsilon 0.
    """
    rows = -(-tokens // group.size())
    first = min(group.rank() * rows, tokens)
    return rows, slice(first, min(first + rows, tokens))


def _padded(x: Tensor, rows: int) -> Tensor:
    return x.contiguous() if rows == x.shape[0] else torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[0]))


def _gather(shard: Tensor, tokens: int, group: dist.ProcessGroup) -> Tensor:
    rows, _ = _share(tokens, group)
    full = shard.new_empty(rows * group.size(), shard.shape[1])
    _all_gather(full, _padded(shard, rows), group=group)
    # No view: a Function's output that is one may not be changed in place.
    return torch.ops.aten._unsafe_view(full[:tokens], (tokens, full.shape[1]))


def _scatter(full: Tensor, group: dist.ProcessGroup) -> Tensor:
    rows, own = _share(full.shape[0], group)
    shard = full.new_empty(rows, full.shape[1])
    _reduce_scatter(shard, _padded(full, rows * group.size()), group=group)
    return shard if own.stop - own.start == rows else shard[: own.stop - own.start].clone()


def _slice(full: Tensor, group: dist.ProcessGroup) -> Tensor:
    return full[_share(full.shape[0], group)[1]].clone(memory_format=torch.contiguous_format)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, tokens, group, partial):
        ctx.group, ctx.partial = group, partial
        return _gather(shard, tokens, group)

    @staticmethod
    def backward(ctx, grad):
        return _Scatter.apply(grad, ctx.group, ctx.partial), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, full, group, partial):
        ctx.group, ctx.tokens, ctx.partial = group, full.shape[0], partial
        return (_scatter if partial else _slice)(full, group)

    @staticmethod
    def backward(ctx, grad):
        return _Gather.apply(grad, ctx.tokens, ctx.group, ctx.partial), None, None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter, group):
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, grad):
        return _Total.apply(grad, ctx.group), None


class _Total(torch.autograd.Function):
    """The sum over the ranks, of which every rank goes on alike."""

    @staticmethod
    def forward(ctx, part, group):
        # In fp32: the sum of P bf16 partial sums would be rounded P - 1 times.
        dtype = torch.float32 if part.dtype in (torch.float16, torch.bfloat16) else part.dtype
        total = part.to(dtype, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.to(part.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def gather_tokens(shard: Tensor, tokens: int, group: dist.ProcessGroup, *, partial: bool = True) -> Tensor:
    """All tokens `[T, d]` from every rank's shard, `[ceil(T / P), d]` but for what the last ranks lack.

    Args:
        shard: this rank's rows.
        tokens: T.
        group: the tensor-parallel group.
        partial: what follows is split over the ranks (column-parallel), so the gradients of the ranks are parts of a
            sum: backward is a reduce-scatter. Otherwise every rank computes the same, and backward takes a slice.

    Raises:
        ValueError: another number of rows than this rank's.
    """
    own = _share(tokens, group)[1]
    rows = own.stop - own.start
    if shard.ndim != 2 or shard.shape[0] != rows:
        raise ValueError(f"shard: found {tuple(shard.shape)}, expected [{rows}, d]: rows {own.start} to {own.stop}")
    return _Gather.apply(shard, tokens, group, partial)


def scatter_partial(full: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows, at most ceil(T / P), of the sum over ranks of `full` `[T, d]`; backward is an all-gather."""
    return _Scatter.apply(full, group, True)


def slice_tokens(full: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of a tensor that every rank holds alike; backward is an all-gather."""
    return _Scatter.apply(full, group, False)


def shared_parameter(parameter: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A parameter that every rank holds alike and uses on its own tokens; backward sums over the ranks."""
    return _Shared.apply(parameter, group)


class SequenceSharded:
    """Makes streams whose sources, prefix and reads are sharded along the sequence over a tensor-parallel group.

    Used in place of the residual module: `stream = SequenceSharded(residual, group)(embedding)`; then as always.
    `read` returns the normalised input of all tokens on every rank, for column-parallel layers; `write` takes this
    rank's partial output of a row-parallel layer, before any all-reduce.

    Args:
        residual: an :class:`tilewise.nn.AttnRes` or an :class:`tilewise.depth.InferenceState` (made for
            ceil(max tokens / P) tokens), alike on all ranks.
        group: the tensor-parallel process group; None means the default group.
        partial: sublayers are split over the ranks. False: every rank computes whole sublayers alike.

    Example:
        >>> from tilewise.depth import Schedule
        >>> from tilewise.nn import AttnRes
        >>> if not dist.is_initialized():
        ...     dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> stream = SequenceSharded(AttnRes(8, Schedule.block(2, 1)))(torch.randn(1, 3, 8))
        >>> stream.read(0).shape
        torch.Size([1, 3, 8])
    """

    def __init__(
        self, residual: Callable[..., object], group: dist.ProcessGroup | None = None, *, partial: bool = True
    ) -> None:
        if not (hasattr(residual, "reads") and hasattr(residual, "schedule")):
            raise TypeError(f"residual: found {type(residual).__name__}, expected an AttnRes or an InferenceState")
        check_kind("partial", partial, bool, "True or False")
        self.residual, self.partial, self.group = residual, partial, chosen_group(group)

    def __call__(self, embedding: Tensor, *, norms: Sequence[Tensor] | None = None) -> ShardedStream:
        """Begin with an embedding `[..., d]` that every rank holds alike.

        Args:
            embedding: `[..., d]`.
            norms: the weights of all input norms, if they are known now; see :meth:`tilewise.nn.AttnRes.forward`.

        Raises:
            TypeError, ValueError: as :meth:`tilewise.nn.AttnRes.forward`, or :class:`tilewise.depth.InferenceState`.
        """
        check_stream("embedding", embedding)
        check_norms(norms, self.residual.schedule.sublayers, embedding.shape[-1], embedding.device)
        where = embedding.shape, embedding.device
        shard = slice_tokens(embedding.reshape(-1, embedding.shape[-1]), self.group)
        if isinstance(self.residual, InferenceState):
            return ShardedStream(self.residual(shard), *where, self.group, self.partial, norms, norms)
        reads = self.residual.reads()
        reads = reads._replace(
            query=shared_parameter(reads.query, self.group), key_weight=shared_parameter(reads.key_weight, self.group)
        )
        shared = None if norms is None else [shared_parameter(weight, self.group) for weight in norms]
        inner = self.residual(shard, norms=shared, reads=reads)
        return ShardedStream(inner, *where, self.group, self.partial, norms, shared)


class ShardedStream:
    """One pass with the face of :class:`tilewise.nn.Stream`; made by :class:`SequenceSharded`.

    Attributes:
        local: the stream of this rank's tokens.
    """

    def __init__(
        self,
        local,
        shape: torch.Size,
        device: torch.device,
        group: dist.ProcessGroup,
        partial: bool,
        norms: Sequence[Tensor] | None = None,
        shared: Sequence[Tensor] | None = None,
    ) -> None:
        self.local, self._shape, self._group, self._partial = local, shape, group, partial
        self._norms, self._shared = (None if x is None else tuple(x) for x in (norms, shared))
        self._tokens, self._device = shape[:-1].numel(), device

    def read(self, sublayer: int, norm_weight: Tensor | None = None) -> Tensor:
        """Input of sublayer l for all tokens: read on the shard, then all-gather."""
        y = self.local.read(sublayer, self._norm(sublayer, norm_weight))
        return gather_tokens(y, self._tokens, self._group, partial=self._partial).view(self._shape)

    def write(self, sublayer: int, update: Tensor) -> None:
        """This rank's part of the output of sublayer l for all tokens: reduce-scatter.

        Raises:
            TypeError: no tensor of a float dtype.
            ValueError: another shape than the embedding's.
        """
        check_update(update, self._shape, self._device)
        flat = update.reshape(self._tokens, self._shape[-1])
        scatter = scatter_partial if self._partial else slice_tokens
        self.local.write(sublayer, scatter(flat, self._group))

    def output(self, norm_weight: Tensor | None = None, *, partial: bool = False) -> Tensor:
        """The output head's read for all tokens.

        Args:
            norm_weight: weight of the final norm, or None.
            partial: the head is split over the ranks (vocabulary-parallel) rather than computed alike by all.
        """
        y = self.local.output(self._weight(norm_weight))
        return gather_tokens(y, self._tokens, self._group, partial=partial).view(self._shape)

    def checkpoint(self, function: Callable[..., None], *args, **kwargs) -> None:
        """As :meth:`tilewise.nn.Stream.checkpoint`; the collectives inside are repeated in the backward."""

        def run(local, *args):
            options = (self._shape, self._device, self._group, self._partial, self._norms, self._shared)
            function(ShardedStream(local, *options), *args, **kwargs)

        self.local.checkpoint(run, *args)

    def _norm(self, sublayer: int, weight: Tensor | None) -> Tensor | None:
        chosen_norm(self._norms, sublayer, weight, self._shape[-1], self._device)
        return self._weight(weight) if self._norms is None else self._shared[sublayer]

    def _weight(self, weight: Tensor | None) -> Tensor | None:
        check_vector("norm_weight", weight, self._shape[-1], self._device)
        return weight if weight is None or not weight.requires_grad else shared_parameter(weight, self._group)
