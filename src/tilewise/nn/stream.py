"""Streams for one forward pass, over depth and standard, with one face: `read`, `write`, `output`, `checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tilewise.depth import stream as functional
from tilewise.depth.checks import check_int, check_norms, check_stream, check_update, check_vector
from tilewise.depth.reference import rms_norm
from tilewise.depth.schedule import Schedule
from tilewise.depth.stream import Reads, State

from .order import Order

__all__ = ["StandardStream", "Stream"]


class Stream:
    """One forward pass of a residual stream over depth. Made by calling :class:`AttnRes`; used once.

    Attributes:
        state: tensors of the stream between two sublayers.
        complete: (number, prefix, update) → the source that a finished block becomes; the sum unless replaced.

    Example:
        >>> import torch
        >>> from tilewise.nn import AttnRes
        >>> residual = AttnRes(64, Schedule.block(4, 2))
        >>> stream = residual(torch.randn(2, 5, 64))
        >>> for l in range(4):
        ...     stream.write(l, torch.tanh(stream.read(l)))
        >>> stream.output().shape
        torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        schedule: Schedule,
        reads: Reads,
        state: State,
        position: int | None = None,
        norms: Sequence[Tensor] | None = None,
    ) -> None:
        self.schedule, self.reads, self.state = schedule, reads, state
        self._norms = None if norms is None else tuple(norms)
        self.complete = functional.total
        self._order = Order(_position(schedule, reads, state, position), reads.last)

    @property
    def position(self) -> int:
        """The sublayer to be read next."""
        return self._order.next

    def read(self, sublayer: int, norm_weight: Tensor | None = None) -> Tensor:
        """Input of sublayer l: the mix h_l, or with `norm_weight` RMSNorm(h_l) * norm_weight in the same kernel.

        Norms given at the start of the stream hold without `norm_weight`, which may repeat them. The tensor is the
        caller's own: a sublayer may work on it in place.

        Raises:
            ValueError: l is not the next sublayer, the last one has not been written, or the weight is another one than
                at the start.
        """
        self._order.read(sublayer)
        like = self.state.sources[0]
        weight = functional.chosen_norm(self._norms, sublayer, norm_weight, like.shape[-1], like.device)
        y, self.state = functional.read(self.state, self.schedule, self.reads, sublayer, weight, complete=self.complete)
        return y

    def write(self, sublayer: int, update: Tensor) -> None:
        """Output of sublayer l, without any residual added. It is kept, not copied: leave it as it is.

        Raises:
            TypeError: no tensor of a float dtype.
            ValueError: l is not the sublayer that was read last, or the shape differs from the embedding's.
        """
        self._order.check_write(sublayer)
        self.state = functional.write(self.state, update)
        self._order.write(sublayer)

    def output(self, norm_weight: Tensor | None = None) -> Tensor:
        """The output head's read over the embedding and all blocks, with the final norm if its weight is given.

        May be called again, with other weights too; nothing is read or written after it.

        Raises:
            ValueError: sublayers remain.
        """
        self._order.output()
        return functional.output(self.state, self.reads, norm_weight)

    def checkpoint(self, function: Callable[..., None], *args, **kwargs) -> None:
        """Run `function(stream, *args, **kwargs)`, which reads and writes some sublayers, and recompute it backward.

        The function gets a stream of its own that starts from this one's state, so that running it twice is harmless.
        Only the state between calls is kept: per call the waiting update, the prefix and what phase 1 left.
        """

        start = self.position

        def run(state: State, *args):
            inner = Stream(self.schedule, self.reads, state, start, self._norms)
            inner.complete = self.complete
            function(inner, *args, **kwargs)
            if not inner._order.reading:
                raise ValueError(f"function: found sublayer {inner.position} read but not written, expected both")
            return inner.state, inner.position

        self.state, self._order.next = checkpoint(run, self.state, *args, use_reentrant=False)


def _position(schedule: Schedule, reads: Reads, state: State, position: int | None) -> int:
    """The sublayer that is read next, which state, reads and what the caller says have to agree on."""
    known, half = divmod(2 * (reads.first if position is None else position) if state.steps is None else state.steps, 2)
    if half:
        raise ValueError(f"state: found sublayer {known} read but not written, expected both")
    if position is not None:
        check_int("position", position, 0)
    if position not in (None, known):
        raise ValueError(f"position: found {position}, expected {known}, the sublayer that the state stands before")
    check_int("position", known, reads.first, reads.last)
    sources = 1 if known == 0 else known if schedule.full else schedule.visit(known - 1).sources
    if len(state.sources) != sources:
        raise ValueError(
            f"position: found {known} with a state of {len(state.sources)} sources, expected a state of {sources}"
        )
    return known


class StandardStream:
    """The ordinary residual h += update behind the same face, so that a model is written once."""

    def __init__(
        self, embedding: Tensor, sublayers: int, output_eps: float, norms: Sequence[Tensor] | None = None
    ) -> None:
        check_stream("embedding", embedding)
        check_norms(norms, sublayers, embedding.shape[-1], embedding.device)
        self.hidden, self._order = embedding, Order(0, sublayers)
        self._norms = None if norms is None else tuple(norms)
        self._norm = partial(rms_norm, eps=output_eps)

    @property
    def position(self) -> int:
        """The sublayer to be read next."""
        return self._order.next

    def read(self, sublayer: int, norm_weight: Tensor | None = None) -> Tensor:
        """A copy of the stream, or its RMSNorm times `norm_weight`."""
        self._order.read(sublayer)
        d, device = self.hidden.shape[-1], self.hidden.device
        return self._normed(functional.chosen_norm(self._norms, sublayer, norm_weight, d, device))

    def write(self, sublayer: int, update: Tensor) -> None:
        """Add the output of sublayer l."""
        self._order.check_write(sublayer)
        check_update(update, self.hidden.shape, self.hidden.device)
        self.hidden = self.hidden + update
        self._order.write(sublayer)

    def output(self, norm_weight: Tensor | None = None) -> Tensor:
        """The stream after the last sublayer, with the final norm if its weight is given."""
        self._order.output()
        check_vector("norm_weight", norm_weight, self.hidden.shape[-1], self.hidden.device)
        return self._normed(norm_weight)

    def checkpoint(self, function: Callable[..., None], *args, **kwargs) -> None:
        """As :meth:`Stream.checkpoint`."""
        start = self.position

        def run(hidden: Tensor, *args):
            inner = object.__new__(StandardStream)
            inner.hidden, inner._norm, inner._norms = hidden, self._norm, self._norms
            inner._order = Order(start, self._order.last)
            function(inner, *args, **kwargs)
            return inner.hidden, inner.position

        self.hidden, self._order.next = checkpoint(run, self.hidden, *args, use_reentrant=False)

    def _normed(self, weight: Tensor | None) -> Tensor:
        # Without a norm a copy: a sublayer that works in place on its input would change the stream.
        return self.hidden.clone() if weight is None else self._norm(self.hidden, weight).to(self.hidden.dtype)
