"""Inference: a preallocated bank of sources for prefill, chunked prefill and decode, and phase 1 on a side stream."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tilewise.depth import stream as functional
from tilewise.depth.functional import mix_norm, phase1
from tilewise.depth.schedule import Schedule
from tilewise.depth.stream import Reads, State

__all__ = ["InferenceState", "InferenceStream"]


class InferenceState:
    """The memory of a residual stream over depth at inference: one bank `[slots, max_tokens, d]`, used again each step.

    Residual streams of different tokens never meet, so nothing is kept from step to step: prefill runs in chunks of any
    size, decode with one or several tokens a sequence, all through the same bank. Addresses are fixed, so a step can be
    captured in a CUDA graph.

    Args:
        schedule: the plan.
        reads: :meth:`tilewise.nn.AttnRes.reads` of the trained module.
        max_tokens: tokens of the largest step (batch included).
        device, dtype: of the stream; None means those of the queries.
        overlap_tokens: in steps of at most this many tokens, a two-phase block's first sublayer is read in one pass and
            phase 1 of the others runs beside it: on CUDA on a stream of its own. It costs one more read of the bank, so
            it pays where launches are the cost (decode), not where bytes are (prefill). 0 turns it off.

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
        if max_tokens < 1:
            raise ValueError(f"max_tokens: found {max_tokens}, expected at least 1")
        if (reads.first, reads.last) != (0, schedule.sublayers):
            raise ValueError(
                f"reads: found sublayers {reads.first} to {reads.last}, expected 0 to {schedule.sublayers}"
            )
        self.schedule = schedule
        self.reads = reads._replace(query=reads.query.detach(), key_weight=reads.key_weight.detach())
        self.max_tokens, self.overlap_tokens = max_tokens, overlap_tokens
        device = reads.query.device if device is None else torch.device(device)
        dtype = reads.query.dtype if dtype is None else dtype
        slots = schedule.sublayers if schedule.full else len(schedule.starts)
        self.bank = torch.zeros(slots, max_tokens, reads.query.shape[-1], device=device, dtype=dtype)
        self.side = torch.cuda.Stream(device) if device.type == "cuda" and overlap_tokens else None
        self.steps = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the bank on this device."""
        return self.bank.nbytes

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Slices of at most `max_tokens` tokens that cover a prompt: chunked prefill."""
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
    def __call__(self, embedding: Tensor) -> InferenceStream:
        """Begin a step. Every earlier step's stream becomes invalid: its sources are overwritten.

        Args:
            embedding: `[..., d]`, in the bank's dtype.

        Raises:
            ValueError: more tokens than the bank holds, or another dtype or device.
        """
        if embedding.dtype != self.bank.dtype or embedding.device != self.bank.device:
            raise ValueError(
                f"embedding: found {embedding.dtype} on {embedding.device}, expected {self.bank.dtype} on "
                f"{self.bank.device}"
            )
        stored = self.store(0, embedding)
        self.steps += 1
        return InferenceStream(self, stored, self.steps)

    def store(self, number: int, value: Tensor) -> Tensor:
        """Copy a source into its slot, unless it lies there already."""
        slot = self.slot(number, value.shape)
        if slot.data_ptr() != value.data_ptr():
            slot.copy_(value)
        return slot

    def complete(self, number: int, prefix: Tensor | None, update: Tensor | None) -> Tensor:
        """prefix + update, written into slot `number`."""
        if prefix is None or update is None:
            return self.store(number, prefix if update is None else update)
        return torch.add(prefix, update, out=self.slot(number, update.shape))


class InferenceStream:
    """One step of inference with the face of :class:`tilewise.nn.Stream`; made by calling :class:`InferenceState`."""

    def __init__(self, owner: InferenceState, embedding: Tensor, step: int) -> None:
        self._owner, self._step = owner, step
        self._state = functional.begin(embedding)
        self._pending: torch.cuda.Event | None = None
        tokens = embedding.shape[:-1].numel()
        self._overlap = tokens <= owner.overlap_tokens and not owner.schedule.full
        self.position = 0

    @torch.no_grad()
    def read(self, sublayer: int, norm_weight: Tensor | None = None) -> Tensor:
        """Input of sublayer l; with `norm_weight` after its RMSNorm.

        Raises:
            ValueError: l is not the next sublayer, or a later step has begun.
        """
        owner, state = self._owner, self._state
        self._check(f"read({sublayer})", sublayer == self.position and (sublayer == 0 or state.update is not None))
        self.position += 1
        visit = owner.schedule.visit(sublayer)
        if self._overlap and visit.first and not visit.one_pass and visit.end > sublayer + 1:
            return self._fork(sublayer, owner.schedule.phase1_end(sublayer + 1), norm_weight)
        if self._pending is not None:
            torch.cuda.current_stream().wait_event(self._pending)
            self._pending = None
        y, self._state = functional.read(
            state, owner.schedule, owner.reads, sublayer, norm_weight, complete=owner.complete
        )
        return y

    @torch.no_grad()
    def write(self, sublayer: int, update: Tensor) -> None:
        """Output of sublayer l, without any residual added.

        Raises:
            ValueError: l is not the sublayer read last, a later step has begun, or the shape differs.
        """
        self._check(f"write({sublayer})", sublayer == self.position - 1 and self._state.update is None)
        self._state = functional.write(self._state, update)

    @torch.no_grad()
    def output(self, norm_weight: Tensor | None = None) -> Tensor:
        """The output head's read over the embedding and all blocks.

        Raises:
            ValueError: sublayers remain, or a later step has begun.
        """
        complete = self.position == self._owner.schedule.sublayers and self._state.update is not None
        self._check("output()", complete)
        return functional.output(self._state, self._owner.reads, norm_weight)

    def _check(self, call: str, legal: bool) -> None:
        if self._step != self._owner.steps:
            raise ValueError(f"stream: found {call} on step {self._step}, expected the newest, {self._owner.steps}")
        if not legal:
            done = self.position - (self._state.update is None and self.position > 0)
            raise ValueError(f"sublayer: found {call} after {done} written and {self.position} read sublayers")

    def _fork(self, sublayer: int, end: int, norm_weight: Tensor | None) -> Tensor:
        owner, state, reads = self._owner, self._state, self._owner.reads
        sources = state.sources
        if sublayer:
            sources = (*sources, owner.complete(len(sources), state.prefix, state.update))
        rest = reads.rows(sublayer + 1, end)
        if owner.side is None:
            o1, lse = phase1(sources, *rest, eps=reads.eps, impl=reads.impl)
        else:
            # o1 is allocated and freed on the side stream; it is reused only after this wait, so after its last reader.
            owner.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(owner.side):
                o1, lse = phase1(sources, *rest, eps=reads.eps, impl=reads.impl)
            self._pending = owner.side.record_event()
        q, g = reads.row(sublayer)
        y = mix_norm(sources, q, g, norm_weight, eps=reads.eps, output_eps=reads.output_eps, impl=reads.impl)
        self._state = State(sources, o1=o1.unbind(0), lse=lse.unbind(0))
        return y
