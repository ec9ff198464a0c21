"""One step of inference: its reads and writes over the bank of a state, and phase 1 on a side stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilewise.depth import stream as functional
from tilewise.depth.checks import check_update, check_vector
from tilewise.depth.ops import narrowed, owned
from tilewise.depth.schedule import Visit

if TYPE_CHECKING:
    from tilewise.depth.state import InferenceState

__all__ = ["InferenceStream", "same_memory"]


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape are the same memory in the same order."""
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


class InferenceStream:
    """One step of inference with the face of :class:`tilewise.nn.Stream`; made by calling :class:`InferenceState`."""

    def __init__(
        self, owner: InferenceState, embedding: Tensor, step: int, norms: Sequence[Tensor] | None = None
    ) -> None:
        self._owner, self._step, self._norms = owner, step, None if norms is None else tuple(norms)
        self._shape, self._tokens = embedding.shape, embedding.shape[:-1].numel()
        self._prefix: Tensor | None = None
        self._update: Tensor | None = None
        self._scored = 0
        self._rows = range(0)
        self._pending: torch.cuda.Event | None = None
        self.position = 0

    def __getstate__(self) -> dict[str, object]:
        # What the side stream is still writing is copied after it.
        self._wait()
        return vars(self)

    @torch.no_grad()
    def read(self, sublayer: int, norm_weight: Tensor | None = None) -> Tensor:
        """Input of sublayer l; with `norm_weight` after its RMSNorm. The caller's own: no part of the bank.

        Raises:
            TypeError: a weight that is no tensor.
            ValueError: l is not the next sublayer, a later step has begun, or the weight is not `[d]`, or another one
                than at the start.
        """
        self._check(
            f"read({sublayer})",
            isinstance(sublayer, int)
            and sublayer == self.position < self._owner.schedule.sublayers
            and (sublayer == 0 or self._update is not None),
        )
        bank = self._owner.bank
        norm_weight = functional.chosen_norm(self._norms, sublayer, norm_weight, bank.shape[-1], bank.device)
        norm_weight = narrowed(norm_weight, bank.dtype)
        self.position += 1
        if sublayer == 0:
            y = self._first(self._slot(0), norm_weight)
        elif self._owner.schedule.full:
            y = self._full(self._owner.schedule.visit(sublayer), norm_weight)
        else:
            y = self._block(sublayer, norm_weight)
        self._update = None
        return owned(y, self._shape)

    @torch.no_grad()
    def write(self, sublayer: int, update: Tensor) -> None:
        """Output of sublayer l, without any residual added. Kept, not copied: leave it as it is.

        Raises:
            TypeError: no tensor of a float dtype.
            ValueError: l is not the sublayer read last, a later step has begun, or the shape differs.
        """
        self._check(f"write({sublayer})", sublayer == self.position - 1 and self._update is None)
        check_update(update, self._shape, self._owner.bank.device)
        self._update = update.to(self._owner.bank.dtype).reshape(self._tokens, self._shape[-1])

    @torch.no_grad()
    def output(self, norm_weight: Tensor | None = None) -> Tensor:
        """The output head's read over the embedding and all blocks. May be called again, with other weights too.

        Raises:
            TypeError: a weight that is no tensor.
            ValueError: sublayers remain, a later step has begun, or the weight is not `[d]`.
        """
        self._check("output()", self.position == self._owner.schedule.sublayers and self._update is not None)
        owner, row = self._owner, len(self._owner.q) - 1
        check_vector("norm_weight", norm_weight, owner.bank.shape[-1], owner.bank.device)
        norm_weight = narrowed(norm_weight, owner.bank.dtype)
        if owner.schedule.full:
            self._keep(row)
            return owned(self._read(row, None, range(row), None, norm_weight), self._shape)
        prefix = self._prefix
        y = self._block(row, norm_weight)
        # The update is still waiting: a second call adds it again.
        self._prefix = prefix
        return owned(y, self._shape)

    def checkpoint(self, function: Callable[..., None], *args, **kwargs) -> None:
        """Refused: inference keeps no activations, so there is nothing to recompute.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "checkpoint: found a stream of an InferenceState, which records no gradients; read and write its sublayers "
            "directly (recompute=False), or train with AttnRes"
        )

    def _slot(self, number: int) -> Tensor:
        return self._owner.bank[number, : self._tokens]

    def _slots(self, count: int) -> list[Tensor]:
        return [self._slot(number) for number in range(count)]

    def _first(self, o1: Tensor, weight: Tensor | None) -> Tensor:
        eps = self._owner.reads.output_eps
        return self._owner.run.phase2_fwd(None, None, o1, None, None, weight, eps, eps)[1]

    def _block(self, l: int, weight: Tensor | None) -> Tensor:
        """Read l over the sources of the block that l - 1 belongs to, and that block's sum up to l - 1.

        For the first sublayer of the next block, and for the output, that sum is the finished block, which the same
        kernel writes into its slot. So a block's phase 1 serves its sublayers but the first, and the one that follows.
        """
        owner = self._owner
        block = owner.schedule.visit(l - 1)
        closes = l == block.end < owner.schedule.sublayers
        new = self._slot(block.sources) if closes else None
        if closes and self._prefix is None:
            new.copy_(self._update)
        if block.one_pass:
            own, end = (self._update, self._prefix), (owner.q[l], weight, owner.reads.eps, owner.reads.output_eps)
            self._prefix, y = owner.run.mix_fwd(self._slots(block.sources), *own, *end, new=new)
        else:
            y = self._two_phase(l, block, new, weight)
        if closes:
            self._prefix = None
            self._ahead(l)
        return y

    def _two_phase(self, l: int, block: Visit, new: Tensor | None, weight: Tensor | None) -> Tensor:
        """Read l from what phase 1 left or, where that is cheaper, from its n sources and their scores."""
        owner, reads, n = self._owner, self._owner.reads, block.sources
        queries = min(block.end + 1 - l, owner.schedule.max_queries or block.end)
        if owner.run.direct(self._tokens, n, queries if l not in self._rows else 0):
            self._score(n, l)
            phase1, merge = (self._slots(n), owner.scores[l, :n, : self._tokens]), owner.run.phase2_from_scores
        elif n == 1:
            # The softmax over one source is 1: o1 is the source, lse its score.
            self._score(n, l)
            phase1, merge = (self._slot(0), owner.scores[l, 0, : self._tokens]), owner.run.phase2_fwd
        else:
            if l not in self._rows:
                self._phase1(range(l, l + queries), n)
            else:
                self._wait()
            o1, lse = self._buffers(range(l, l + 1))
            phase1, merge = (o1[0], lse[0]), owner.run.phase2_fwd
        own = self._update, self._prefix
        self._prefix, y = merge(*own, *phase1, owner.merge_q[l], weight, reads.eps, reads.output_eps, new=new)
        return y

    def _wait(self) -> None:
        if self._pending is not None:
            torch.cuda.current_stream(self._owner.bank.device).wait_event(self._pending)
            self._pending = None

    def _phase1(self, rows: range, n: int) -> None:
        self._score(n, rows.start)
        self._rows = rows
        self._combine(n)

    def _ahead(self, l: int) -> None:
        """In small steps, phase 1 of the block that begins with l on a stream of its own, beside sublayer l."""
        owner = self._owner
        block, max_queries = owner.schedule.visit(l), owner.schedule.max_queries
        queries = min(block.end - l, max_queries or block.end)
        skip = self._tokens > owner.overlap_tokens or block.one_pass
        if skip or owner.side is None or owner.run.direct(self._tokens, block.sources, queries):
            return
        # Waiting for the main stream also keeps o1's last reader ahead of the new writes.
        owner.side.wait_stream(torch.cuda.current_stream(owner.bank.device))
        with torch.cuda.stream(owner.side):
            self._phase1(range(l + 1, l + 1 + queries), block.sources)
        self._pending = owner.side.record_event()

    def _score(self, count: int, l: int) -> None:
        """The scores of sources below `count` against sublayers from l on, as far as they are not known yet."""
        if self._scored < count:
            owner, new = self._owner, slice(self._scored, count)
            sources = [self._slot(number) for number in range(self._scored, count)]
            owner.run.scores(sources, owner.later[l], owner.reads.eps, out=owner.scores[l:, new, : self._tokens])
            self._scored = count

    def _buffers(self, rows: range) -> tuple[Tensor, Tensor]:
        """o1 `[rows, T, d]` and lse `[rows, T]` of sublayers `rows`, which lie within the present phase 1."""
        owner, T = self._owner, self._tokens
        d, start = owner.bank.shape[-1], rows.start - self._rows.start
        o1 = owner.o1[start * T * d : (start + len(rows)) * T * d].view(len(rows), T, d)
        return o1, owner.lse[start * T : (start + len(rows)) * T].view(len(rows), T)

    def _combine(self, n: int) -> None:
        """Phase 1 of the present rows over n sources, from their scores."""
        owner, (o1, lse) = self._owner, self._buffers(self._rows)
        scores = owner.scores[self._rows.start : self._rows.stop, :n, : self._tokens]
        owner.run.combine(self._slots(n), scores, out=o1, lse=lse)

    def _full(self, visit: Visit, weight: Tensor | None) -> Tensor:
        """Full: the update is scored against all later queries, then one kernel a row reads what the sublayer mixes."""
        owner, l = self._owner, visit.sublayer
        self._keep(l)
        if visit.one_pass or visit.start == 0:
            return self._read(l, None, range(l), self._slot(l), weight)
        if visit.first:
            owner.store(l, self._update)
            self._rows = range(l, visit.end)
            self._combine(l + 1)
            return self._first(self._buffers(range(l, l + 1))[0][0], weight)
        return self._read(l, range(l, l + 1), range(visit.start + 1, l), self._slot(l), weight)

    def _keep(self, l: int) -> None:
        """Scores of the update, source number l, against queries l and later."""
        owner = self._owner
        self._score(1, 1)
        owner.run.scores(
            [self._update], owner.later[l], owner.reads.eps, out=owner.scores[l:, l : l + 1, : self._tokens]
        )

    def _read(self, l: int, rows: range | None, slots: range, slot: Tensor | None, weight: Tensor | None) -> Tensor:
        """Read l over o1 of phase 1, if it has a row there, these slots, and the update, which is kept in `slot`."""
        owner = self._owner
        o1, lse = (None, None) if rows is None else (x[0] for x in self._buffers(rows))
        slot = None if slot is None or same_memory(slot, self._update) else slot
        scores = owner.scores[l, slots.start : slots.stop + 1, : self._tokens]
        sources = [self._slot(number) for number in slots]
        return owner.run.read(o1, lse, sources, self._update, scores, weight, owner.reads.output_eps, slot=slot)

    def _check(self, call: str, legal: bool) -> None:
        if self._step != self._owner.steps:
            raise ValueError(f"stream: found {call} on step {self._step}, expected the newest, {self._owner.steps}")
        if not legal:
            half, last = self._update is None and self.position > 0, self._owner.schedule.sublayers
            found = f"{call} after {self.position - half} written and {self.position} read sublayers"
            end = f"output(): all {last} are written" if self.position == last else f"read({self.position})"
            expected = f"write({self.position - 1}, ...)" if half else end
            raise ValueError(f"sublayer: found {found}, expected {expected}")
