"""The training stream whose reads share their gradients: one fp32 gradient a source, one phase-1 backward a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilewise.depth.checks import check_update, check_vector
from tilewise.depth.ops import backend, check_call, fold, narrowed
from tilewise.depth.schedule import Schedule
from tilewise.depth.shared import BlockReads, SharedSource, mix_norm_shared, reads_of_folded
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
        save_o1: keep what phase 1 returns until the backward instead of recomputing it.
    """

    def __init__(
        self, schedule: Schedule, reads: Reads, embedding: Tensor, norms: Sequence[Tensor], save_o1: bool = False
    ) -> None:
        self.schedule, self.reads, self._save_o1 = schedule, reads, save_o1
        self._norms, self._order = tuple(norms), Order(0, schedule.sublayers)
        self._sources = [SharedSource(embedding)]
        self._shape, self._dtype, self._device = embedding.shape, embedding.dtype, embedding.device
        check_call(reads.impl, embedding)
        self._run = backend("eager" if reads.impl == "reference" else reads.impl, embedding)
        # All queries are folded and split at once: a block's own would be twelve launches, forward and backward.
        folded = fold(reads.query, reads.key_weight, embedding.dtype)
        flat, ends = folded.detach(), (*schedule.starts[1:], schedule.sublayers)
        sizes = [b - a for a, b in zip(schedule.starts, ends, strict=True)] + [1]
        self._run.prepare(flat, embedding.dtype)
        self._folded, self._queries, self._flat = flat, folded.split(sizes), flat.split(sizes)
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
        chosen_norm(self._norms, sublayer, norm_weight, self._shape[-1], self._device)
        visit = self.schedule.visit(sublayer)
        if visit.first:
            if sublayer:
                self._sources.append(SharedSource(total(len(self._sources), self._prefix, self._update)))
                self._prefix = self._update = None
            n, reads = len(self._sources) - 1, self.reads
            norms = narrowed(torch.stack(self._norms[visit.start : visit.end]), self._dtype)
            self._block = reads_of_folded(
                self._sources, self._queries[n], self._flat[n], norms, self._run, self._shape, reads.eps,
                reads.output_eps, visit.end == self.schedule.sublayers, self._save_o1,
            )  # fmt: skip
            return self._block.first()
        self._prefix, y = self._block._merge(sublayer - visit.start, self._update, self._prefix)
        self._update = None
        return y

    def write(self, sublayer: int, update: Tensor) -> None:
        """Output of sublayer l, without any residual added. It is kept, not copied: leave it as it is.

        Raises:
            TypeError: no tensor of a float dtype.
            ValueError: l is not the sublayer that was read last, or the shape differs from the embedding's.
        """
        if self._plain is not None:
            self._plain.write(sublayer, update)
            return
        self._order.check_write(sublayer)
        check_update(update, self._shape, self._device)
        self._update = update.to(self._dtype)
        self._order.write(sublayer)

    def output(self, norm_weight: Tensor | None = None) -> Tensor:
        """The output head's read over the embedding and all blocks, with the final norm if its weight is given.

        May be called again, with other weights too.

        Raises:
            ValueError: sublayers remain.
        """
        if self._plain is not None:
            return self._plain.output(norm_weight)
        self._order.output()
        check_vector("norm_weight", norm_weight, self._shape[-1], self._device)
        last = SharedSource(total(len(self._sources), self._prefix, self._update))
        reads = self.reads
        return mix_norm_shared(
            [*self._sources, last],
            self._queries[-1][0],
            None,
            norm_weight,
            eps=reads.eps,
            output_eps=reads.output_eps,
            impl=reads.impl,
        )

    def checkpoint(self, function: Callable[..., None], *args, **kwargs) -> None:
        """As :meth:`Stream.checkpoint`; from here on the pass is a plain stream."""
        if self._plain is None:
            steps = 2 * self._order.next + (not self._order.reading)
            state = State(tuple(source.value for source in self._sources), self._prefix, self._update, steps=steps)
            self._plain = Stream(self.schedule, self.reads, state, self._order.next, self._norms)
        self._plain.checkpoint(function, *args, **kwargs)
