"""The training stream whose reads share their gradients: one fp32 gradient a source, one phase-1 backward a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilewise.depth.schedule import Schedule
from tilewise.depth.shared import BlockReads, SharedSource, mix_norm_shared
from tilewise.depth.stream import Reads, State, chosen_norm, total

from .order import Order
from .stream import Stream

__all__ = ["SharedStream"]


class SharedStream:
    """One eager training pass of a Block schedule; made by calling :class:`AttnRes` with `norms`.

    Every block is read in two phases. Under :meth:`checkpoint` the pass goes on as a plain :class:`Stream`.

    Args:
        schedule: a Block schedule.
        reads: of all sublayers and the output head.
        embedding: `[..., d]`.
        norms: the weights of the sublayers' input norms.
    """

    def __init__(self, schedule: Schedule, reads: Reads, embedding: Tensor, norms: Sequence[Tensor]) -> None:
        self.schedule, self.reads = schedule, reads
        self._norms, self._order = norms, Order(0, schedule.sublayers)
        self._sources = [SharedSource(embedding)]
        self._shape, self._dtype = embedding.shape, embedding.dtype
        self._prefix: Tensor | None = None
        self._update: Tensor | None = None
        self._block: BlockReads | None = None
        self._plain: Stream | None = None

    @property
    def position(self) -> int:
        """The sublayer to be read next."""
        return self._order.next if self._plain is None else self._plain.position

    def read(self, sublayer: int, norm_weight: Tensor | None = None) -> Tensor:
        """RMSNorm of h_l times the weight given at the start; `norm_weight` may repeat that weight.

        Raises:
            ValueError: l is not the next sublayer, or another weight than at the start.
        """
        if self._plain is not None:
            return self._plain.read(sublayer, norm_weight)
        self._order.read(sublayer)
        chosen_norm(self._norms, sublayer, norm_weight)
        visit = self.schedule.visit(sublayer)
        if visit.first:
            if sublayer:
                self._sources.append(SharedSource(total(len(self._sources), self._prefix, self._update)))
                self._prefix = self._update = None
            rows = slice(visit.start, visit.end)
            self._block = BlockReads(
                self._sources,
                self.reads.query[rows],
                self.reads.key_weight[rows],
                torch.stack(tuple(self._norms[rows])),
                eps=self.reads.eps,
                output_eps=self.reads.output_eps,
                impl=self.reads.impl,
            )
            return self._block.first()
        self._prefix, y = self._block.merge(sublayer - visit.start, self._update, self._prefix)
        self._update = None
        return y

    def write(self, sublayer: int, update: Tensor) -> None:
        """Output of sublayer l, without any residual added.

        Raises:
            ValueError: l is not the sublayer that was read last, or the shape differs from the embedding's.
        """
        if self._plain is not None:
            self._plain.write(sublayer, update)
            return
        self._order.write(sublayer)
        if update.shape != self._shape:
            raise ValueError(f"update: found shape {tuple(update.shape)}, expected {tuple(self._shape)}")
        self._update = update.to(self._dtype)

    def output(self, norm_weight: Tensor | None = None) -> Tensor:
        """The output head's read over the embedding and all blocks, with the final norm if its weight is given.

        Raises:
            ValueError: sublayers remain.
        """
        if self._plain is not None:
            return self._plain.output(norm_weight)
        self._order.output()
        last = SharedSource(total(len(self._sources), self._prefix, self._update))
        reads = self.reads
        return mix_norm_shared(
            [*self._sources, last],
            reads.query[-1],
            reads.key_weight[-1],
            norm_weight,
            eps=reads.eps,
            output_eps=reads.output_eps,
            impl=reads.impl,
        )

    def checkpoint(self, function: Callable[..., None], *args, **kwargs) -> None:
        """As :meth:`Stream.checkpoint`; from here on the pass is a plain stream."""
        if self._plain is None:
            state = State(tuple(source.value for source in self._sources), self._prefix, self._update)
            self._plain = Stream(self.schedule, self.reads, state, self._order.next, self._norms)
        self._plain.checkpoint(function, *args, **kwargs)
