"""Inference: a preallocated bank of sources for prefill, chunked prefill and decode, and phase 1 on a side stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tilewise.depth import stream as functional
from tilewise.depth.checks import FLOATS, check_int, check_kind, check_norms, check_stream, check_update, check_vector
from tilewise.depth.ops import backend, check_call, narrowed, owned
from tilewise.depth.reference import fold_queries
from tilewise.depth.schedule import Schedule, Visit
from tilewise.depth.stream import Reads

__all__ = ["InferenceState", "InferenceStream"]


class InferenceState:
    """The memory of a residual stream over depth at inference: one bank `[slots, max_tokens, d]`, used again each step.

    Residual streams of different tokens never meet, so nothing is kept from step to step: prefill runs in chunks of any
    size, decode with one or several tokens a sequence, all through the same bank. Addresses are fixed, so a step can be
    captured in a CUDA graph. A source is scored once, against all later queries, so that phase 1 reads the sources
    once.

    Args:
        schedule: the plan.
        reads: :meth:`tilewise.nn.AttnRes.reads` of the trained module; its queries are folded here, once, so that a
            later change of the parameters (a training step, a checkpoint that is loaded) needs a new state.
        max_tokens: tokens of the largest step (batch included).
        device, dtype: of the stream; None means those of the queries. A float dtype.
        overlap_tokens: in steps of at most this many tokens on CUDA, phase 1 of a block runs on a stream of its own,
            beside the block's first sublayer, whose input does not need it. 0 turns it off.

    Raises:
        TypeError: a dtype that is no float.
        ValueError: no tokens, reads of a part of the sublayers or of another schedule's blocks, or an implementation
            that cannot run.

    Attributes:
        bank: slots b_0, b_1, .. ; the last block stays the running prefix and needs none.

    Example:
        >>> from tilewise.nn import AttnRes
        >>> residual = AttnRes(64, Schedule.block(8, 2))
        >>> state = InferenceState(residual.schedule, residual.reads(), max_tokens=32)
        >>> stream = state(torch.randn(2, 3, 64))
        >>> for l in range(8):
        ...     stream.write(l, torch.tanh(stream.read(l)))
        >>> stream.output().shape
        torch.Size([2, 3, 64])
    """

    # A state made in inference mode serves steps outside it too: an inference tensor could not be written there.
    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(
        self,
        schedule: Schedule,
        reads: Reads,
        max_tokens: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        overlap_tokens: int = 512,
    ) -> None:
        check_int("max_tokens", max_tokens, 1)
        check_int("overlap_tokens", overlap_tokens, 0)
        check_kind("schedule", schedule, Schedule, "a Schedule")
        functional.check_reads(reads, schedule)
        if (reads.first, reads.last) != (0, schedule.sublayers):
            found = f"{reads.first} to {reads.last}"
            raise ValueError(f"reads: found sublayers {found}, expected 0 to {schedule.sublayers}")
        made = reads.schedule
        if made is not None and (made.full != schedule.full or (not made.full and made.starts != schedule.starts)):
            raise ValueError(f"reads: found those of {made}, expected those of {schedule}, or one with the same blocks")
        self.schedule = schedule
        self.reads = reads._replace(query=reads.query.detach(), key_weight=reads.key_weight.detach())
        self.max_tokens, self.overlap_tokens = max_tokens, overlap_tokens
        device = reads.query.device if device is None else torch.device(device)
        dtype = reads.query.dtype if dtype is None else dtype
        if dtype not in FLOATS:
            raise TypeError(f"dtype: found {dtype!r}, expected one of {', '.join(map(str, FLOATS))}")
        slots, d = schedule.sublayers if schedule.full else len(schedule.starts), reads.query.shape[-1]
        self.bank = torch.zeros(slots, max_tokens, d, device=device, dtype=dtype)
        check_call(reads.impl, self.bank)
        self.run = backend("eager" if reads.impl == "reference" else reads.impl, self.bank)
        statistics = torch.float64 if dtype == torch.float64 else torch.float32
        folded = fold_queries(self.reads.query, self.reads.key_weight, dtype).to(device, statistics).contiguous()
        self.folded, self.q = folded, folded.unbind(0)
        self.run.prepare(folded, dtype)
        self.merge_q = self.run.merge_queries(folded, dtype).unbind(0)
        # The same tensors every step: the kernels remember what they derive from a query.
        self.later = {start: folded[start:] for start in range(schedule.sublayers + 1)}
        visits = [schedule.visit(l) for l in range(schedule.sublayers)]
        two_phase = [v.sublayer for v in visits if not (v.one_pass or (schedule.full and v.start == 0))]
        rows = max((schedule.phase1_end(l) - l for l in two_phase), default=0)
        self.o1 = torch.zeros(rows * max_tokens * d, device=device, dtype=dtype)
        self.lse = torch.zeros(rows * max_tokens, device=device, dtype=statistics)
        # Full: every read takes its scores from here, the last output has no slot.
        columns = schedule.max_sources if schedule.full else slots if rows else 0
        shape = (schedule.sublayers + 1 if columns else 0, columns, max_tokens)
        self.scores = torch.zeros(shape, device=device, dtype=statistics)
        self.side = torch.cuda.Stream(device) if device.type == "cuda" and overlap_tokens else None
        self.steps = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all that is allocated on this device: the bank, and phase 1's scores, outputs and lse."""
        return sum(x.nbytes for x in (self.bank, self.scores, self.o1, self.lse))

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Slices of at most `max_tokens` tokens that cover a prompt: chunked prefill."""
        check_int("tokens", tokens, 0)
        for start in range(0, tokens, self.max_tokens):
            yield slice(start, min(start + self.max_tokens, tokens))

    def slot(self, number: int, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """Slot `number` of the bank as a tensor of `shape` `[..., d]`.

        An embedding written there (`out=`) is not copied by the step that begins with it.

        Raises:
            ValueError: more tokens than the bank holds.
        """
        tokens = torch.Size(shape[:-1]).numel()
        if tokens > self.max_tokens or shape[-1] != self.bank.shape[-1]:
            raise ValueError(
                f"embedding: found {tokens} tokens of width {shape[-1]}, expected at most {self.max_tokens} of width "
                f"{self.bank.shape[-1]}; split a prompt with state.chunks(tokens)"
            )
        return self.bank[number, :tokens].view(shape)

    @torch.no_grad()
    def __call__(self, embedding: Tensor, *, norms: Sequence[Tensor] | None = None) -> InferenceStream:
        """Begin a step. Every earlier step's stream becomes invalid: its sources are overwritten.

        Args:
            embedding: `[..., d]`, in the bank's dtype.
            norms: the weights of all input norms, if they are known now; `read(l)` then returns the normalised input.

        Raises:
            TypeError: norms that are no sequence of tensors.
            ValueError: more tokens than the bank holds, another dtype or device, or norms that are not L weights `[d]`.
        """
        check_stream("embedding", embedding)
        check_norms(norms, self.schedule.sublayers, self.bank.shape[-1], self.bank.device)
        if embedding.dtype != self.bank.dtype or embedding.device != self.bank.device:
            raise ValueError(
                f"embedding: found {embedding.dtype} on {embedding.device}, expected {self.bank.dtype} on "
                f"{self.bank.device}"
            )
        stored = self.store(0, embedding)
        self.steps += 1
        return InferenceStream(self, stored, self.steps, norms)

    def store(self, number: int, value: Tensor) -> Tensor:
        """Copy a source into its slot, unless it lies there already."""
        slot = self.slot(number, value.shape)
        if not _same(slot, value):
            # A part of the slot's own memory in another layout would be read and written at once.
            shared = slot.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
            slot.copy_(value.clone() if shared else value)
        return slot


def _same(a: Tensor, b: Tensor) -> bool:
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
            elif self._pending is not None:
                torch.cuda.current_stream(owner.bank.device).wait_event(self._pending)
                self._pending = None
            o1, lse = self._buffers(range(l, l + 1))
            phase1, merge = (o1[0], lse[0]), owner.run.phase2_fwd
        own = self._update, self._prefix
        self._prefix, y = merge(*own, *phase1, owner.merge_q[l], weight, reads.eps, reads.output_eps, new=new)
        return y

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
        slot = None if slot is None or _same(slot, self._update) else slot
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
