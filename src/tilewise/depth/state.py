"""Inference: a preallocated bank of sources for prefill, chunked prefill and decode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tilewise.depth import stream as functional
from tilewise.depth.checks import FLOATS, check_int, check_kind, check_norms, check_stream
from tilewise.depth.ops import backend, check_call
from tilewise.depth.reference import fold_queries
from tilewise.depth.schedule import Schedule
from tilewise.depth.steps import InferenceStream, same_memory
from tilewise.depth.stream import Reads

__all__ = ["InferenceState", "InferenceStream"]


class InferenceState:
    """The memory of a residual stream over depth at inference: one bank `[slots, max_tokens, d]`, used again each step.

    Residual streams of different tokens never meet, so nothing is kept from step to step: prefill runs in chunks of any
    size, decode with one or several tokens a sequence, all through the same bank. Addresses are fixed, so a step can be
    captured in a CUDA graph. A source is scored once, against all later queries, so that phase 1 reads the sources
    once. A state, and a step that is under way, can be copied (``copy.deepcopy``) and pickled; a copy has a bank of its
    own, and goes on where the step stood.

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
        statistics = torch.float64 if dtype == torch.float64 else torch.float32
        self.folded = fold_queries(self.reads.query, self.reads.key_weight, dtype).to(device, statistics).contiguous()
        visits = [schedule.visit(l) for l in range(schedule.sublayers)]
        two_phase = [v.sublayer for v in visits if not (v.one_pass or (schedule.full and v.start == 0))]
        rows = max((schedule.phase1_end(l) - l for l in two_phase), default=0)
        self.o1 = torch.zeros(rows * max_tokens * d, device=device, dtype=dtype)
        self.lse = torch.zeros(rows * max_tokens, device=device, dtype=statistics)
        # Full: every read takes its scores from here, the last output has no slot.
        columns = schedule.max_sources if schedule.full else slots if rows else 0
        shape = (schedule.sublayers + 1 if columns else 0, columns, max_tokens)
        self.scores = torch.zeros(shape, device=device, dtype=statistics)
        self.steps = 0
        self._derive()

    def _derive(self) -> None:
        """Make what is neither copied nor pickled: it belongs to these very queries, or to this device."""
        folded, dtype, device = self.folded, self.bank.dtype, self.bank.device
        self.run = backend("eager" if self.reads.impl == "reference" else self.reads.impl, self.bank)
        self.q = folded.unbind(0)
        self.run.prepare(folded, dtype)
        self.merge_q = self.run.merge_queries(folded, dtype).unbind(0)
        # The same tensors every step: the kernels remember what they derive from a query.
        self.later = {start: folded[start:] for start in range(self.schedule.sublayers + 1)}
        self.side = torch.cuda.Stream(device) if device.type == "cuda" and self.overlap_tokens else None

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name not in _DERIVED}

    @torch.inference_mode(False)
    @torch.no_grad()
    def __setstate__(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            # Copied in inference mode: as for a state that is made there.
            setattr(self, name, value.clone() if isinstance(value, Tensor) and value.is_inference() else value)
        check_call(self.reads.impl, self.bank)
        self._derive()

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
            TypeError: a number that is no integer.
            ValueError: no slot of the bank, a shape without dimensions, or more tokens than the bank holds.
        """
        check_int("number", number, 0, self.bank.shape[0] - 1)
        if not len(shape):
            raise ValueError(f"shape: found {tuple(shape)}, expected [..., {self.bank.shape[-1]}]")
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
        if not same_memory(slot, value):
            # A part of the slot's own memory in another layout would be read and written at once.
            shared = slot.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
            slot.copy_(value.clone() if shared else value)
        return slot


_DERIVED = ("run", "q", "merge_q", "later", "side")
