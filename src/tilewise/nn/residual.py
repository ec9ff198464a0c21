"""Residual streams with one face: `read(l)`, `write(l, update)`, `output()`; standard, Block or Full over depth."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tilewise.depth import stream as functional
from tilewise.depth.reference import rms_norm
from tilewise.depth.schedule import Schedule
from tilewise.depth.stream import Reads, State

__all__ = ["AttnRes", "Residual", "StandardResidual", "StandardStream", "Stream"]


class _Order:
    """Reads and writes alternate and go up by one: anything else is an error, never a silently wrong sum."""

    def __init__(self, first: int, last: int) -> None:
        self.next, self.last, self.reading = first, last, True

    def read(self, sublayer: int) -> None:
        if not self.reading or sublayer != self.next:
            expected = f"read({self.next})" if self.reading else f"write({self.next}, ...)"
            raise ValueError(f"sublayer: found read({sublayer}), expected {expected}{self.hint()}")
        self.reading = False

    def write(self, sublayer: int) -> None:
        if self.reading or sublayer != self.next:
            expected = f"read({self.next})" if self.reading else f"write({self.next}, ...)"
            raise ValueError(f"sublayer: found write({sublayer}), expected {expected}{self.hint()}")
        self.reading, self.next = True, self.next + 1

    def output(self) -> None:
        if self.next != self.last or not self.reading:
            raise ValueError(f"output: found {self.next} of {self.last} sublayers written, expected all")

    def hint(self) -> str:
        return "; under activation checkpointing use stream.checkpoint(function, ...)" if self.next == self.last else ""


class Stream:
    """One forward pass of a residual stream over depth. Made by calling :class:`AttnRes`; used once.

    Attributes:
        state: tensors of the stream between two sublayers.
        complete: (number, prefix, update) → the source that a finished block becomes; the sum unless replaced.

    Example:
        >>> residual = AttnRes(64, Schedule.block(4, 2))
        >>> stream = residual(torch.randn(2, 5, 64))
        >>> for l in range(4):
        ...     stream.write(l, torch.tanh(stream.read(l)))
        >>> stream.output().shape
        torch.Size([2, 5, 64])
    """

    def __init__(self, schedule: Schedule, reads: Reads, state: State, position: int | None = None) -> None:
        self.schedule, self.reads, self.state = schedule, reads, state
        self.complete = functional.total
        self._order = _Order(reads.first if position is None else position, reads.last)

    @property
    def position(self) -> int:
        """The sublayer to be read next."""
        return self._order.next

    def read(self, sublayer: int, norm_weight: Tensor | None = None) -> Tensor:
        """Input of sublayer l: the mix h_l, or with `norm_weight` RMSNorm(h_l) * norm_weight in the same kernel.

        Raises:
            ValueError: l is not the next sublayer, or the last one has not been written.
        """
        self._order.read(sublayer)
        y, self.state = functional.read(
            self.state, self.schedule, self.reads, sublayer, norm_weight, complete=self.complete
        )
        return y

    def write(self, sublayer: int, update: Tensor) -> None:
        """Output of sublayer l, without any residual added.

        Raises:
            ValueError: l is not the sublayer that was read last, or the shape differs from the embedding's.
        """
        self._order.write(sublayer)
        self.state = functional.write(self.state, update)

    def output(self, norm_weight: Tensor | None = None) -> Tensor:
        """The output head's read over the embedding and all blocks, with the final norm if its weight is given.

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
            inner = Stream(self.schedule, self.reads, state, start)
            inner.complete = self.complete
            function(inner, *args, **kwargs)
            if not inner._order.reading:
                raise ValueError(f"function: found sublayer {inner.position} read but not written, expected both")
            return inner.state, inner.position

        self.state, self._order.next = checkpoint(run, self.state, *args, use_reentrant=False)


class AttnRes(nn.Module):
    r"""Attention Residuals (arXiv:2603.15031): the learned reads of a residual stream over depth.

    h_l = \sum_j softmax_j(<w_l, RMSNorm_{g_l}(v_j)>) v_j over the earlier blocks (Block) or outputs (Full).

    Args:
        d: width of the stream.
        schedule: :meth:`Schedule.block`, :meth:`Schedule.full_attention`, :meth:`Schedule.at`, or
            :meth:`Schedule.kimi_k3`.
        eps: epsilon of the key norm.
        output_eps: epsilon of the sublayers' input norms when `read` is given a norm weight; None means `eps`.
        span: sublayers [first, last) that this module serves; None means all. For pipeline stages.
        impl: implementation of the operators.
        device, dtype: of the parameters.

    Attributes:
        query: w, `[R, d]`, zeros at the start: every read is the mean of its sources. The last row is the output
            head's, present if the span ends with the last sublayer.
        key_weight: g, `[R, d]`, ones at the start.

    Example:
        >>> residual = AttnRes(64, Schedule.full_attention(6))
        >>> residual.query.shape
        torch.Size([7, 64])
    """

    def __init__(
        self,
        d: int,
        schedule: Schedule,
        *,
        eps: float = 1e-6,
        output_eps: float | None = None,
        span: tuple[int, int] | None = None,
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        first, last = (0, schedule.sublayers) if span is None else span
        if not 0 <= first < last <= schedule.sublayers:
            raise ValueError(f"span: found {span}, expected 0 <= first < last <= {schedule.sublayers}")
        self.d, self.schedule, self.span = d, schedule, (first, last)
        self.eps, self.output_eps, self.impl = eps, eps if output_eps is None else output_eps, impl
        rows = last - first + (last == schedule.sublayers)
        self.query = nn.Parameter(torch.zeros(rows, d, device=device, dtype=dtype))
        self.key_weight = nn.Parameter(torch.ones(rows, d, device=device, dtype=dtype))

    def reads(self) -> Reads:
        """The parameters with the constants of the reads, as the functions of `tilewise.depth.stream` take them."""
        return Reads(self.query, self.key_weight, *self.span, self.eps, self.output_eps, self.impl)

    def forward(self, embedding: Tensor | State, position: int | None = None) -> Stream:
        """A stream for one forward pass, from the embedding `[..., d]` or from the state that another stream left.

        Args:
            embedding: `[..., d]`, or `stream.state`.
            position: the sublayer to be read next; None means the first of the span.

        Raises:
            ValueError: a width other than d.
        """
        state = embedding if isinstance(embedding, tuple) else functional.begin(embedding)
        if state.sources[0].shape[-1] != self.d:
            raise ValueError(f"embedding: found width {state.sources[0].shape[-1]}, expected {self.d}")
        return Stream(self.schedule, self.reads(), state, position)

    def reset_parameters(self) -> None:
        """Queries to zero, key weights to one: every read is a mean."""
        nn.init.zeros_(self.query)
        nn.init.ones_(self.key_weight)

    def extra_repr(self) -> str:
        kind = "full" if self.schedule.full else "block"
        return f"d={self.d}, {kind}, sublayers={self.span}, starts={self.schedule.starts}"


class StandardStream:
    """The ordinary residual h += update behind the same face, so that a model is written once."""

    def __init__(self, embedding: Tensor, sublayers: int, output_eps: float) -> None:
        self.hidden, self._order = embedding, _Order(0, sublayers)
        self._norm = partial(rms_norm, eps=output_eps)

    @property
    def position(self) -> int:
        """The sublayer to be read next."""
        return self._order.next

    def read(self, sublayer: int, norm_weight: Tensor | None = None) -> Tensor:
        """The stream, or its RMSNorm times `norm_weight`."""
        self._order.read(sublayer)
        return self._normed(norm_weight)

    def write(self, sublayer: int, update: Tensor) -> None:
        """Add the output of sublayer l."""
        self._order.write(sublayer)
        self.hidden = self.hidden + update

    def output(self, norm_weight: Tensor | None = None) -> Tensor:
        """The stream after the last sublayer, with the final norm if its weight is given."""
        self._order.output()
        return self._normed(norm_weight)

    def checkpoint(self, function: Callable[..., None], *args, **kwargs) -> None:
        """As :meth:`Stream.checkpoint`."""
        start = self.position

        def run(hidden: Tensor, *args):
            inner = object.__new__(StandardStream)
            inner.hidden, inner._norm = hidden, self._norm
            inner._order = _Order(start, self._order.last)
            function(inner, *args, **kwargs)
            return inner.hidden, inner.position

        self.hidden, self._order.next = checkpoint(run, self.hidden, *args, use_reentrant=False)

    def _normed(self, weight: Tensor | None) -> Tensor:
        return self.hidden if weight is None else self._norm(self.hidden, weight).to(self.hidden.dtype)


class StandardResidual(nn.Module):
    """The ordinary residual as a module without parameters; calling it gives a :class:`StandardStream`."""

    def __init__(self, sublayers: int, output_eps: float = 1e-6) -> None:
        super().__init__()
        self.sublayers, self.output_eps = sublayers, output_eps

    def forward(self, embedding: Tensor) -> StandardStream:
        """A stream for one forward pass."""
        return StandardStream(embedding, self.sublayers, self.output_eps)


def Residual(d: int, sublayers: int, kind: str, block: int = 8, **options) -> nn.Module:
    """A residual by name.

    Args:
        d: width of the stream.
        sublayers: L; attention and MLP count one each.
        kind: `standard`, `block` or `full`.
        block: sublayers a block.
        options: further arguments of :class:`AttnRes`; `standard` takes `output_eps` alone.

    Raises:
        ValueError: another kind.
    """
    if kind == "standard":
        return StandardResidual(sublayers, options.get("output_eps") or options.get("eps", 1e-6))
    if kind == "block":
        return AttnRes(d, Schedule.block(sublayers, block), **options)
    if kind == "full":
        return AttnRes(d, Schedule.full_attention(sublayers), **options)
    raise ValueError(f"kind: found {kind!r}, expected 'standard', 'block' or 'full'")
