"""The residual stream as pure functions over an immutable state: begin, read, write, output, for Block and Full.

The state is a NamedTuple of tensors, so it passes through activation checkpointing, FSDP2 and pipeline stages as any
nested tuple does. :class:`tilewise.nn.Stream` is the mutable face of these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.depth.checks import check_kind, check_matrix, check_stream, check_update, check_vector
from tilewise.depth.functional import (
    mix_norm,
    mix_update,
    phase1,
    phase1_from_scores,
    phase2,
    phase2_first,
    scores,
)
from tilewise.depth.schedule import Schedule, Visit

__all__ = ["Reads", "State", "begin", "check_reads", "chosen_norm", "finish", "output", "read", "total", "write"]


class State(NamedTuple):
    """A residual stream between two sublayers.

    Attributes:
        sources: complete sources b_0 .. b_{n-1} (Block) or the embedding and every output but the last (Full).
        prefix: partial sum of the running block without `update`, or None.
        update: output of the last sublayer, not yet added, or None.
        o1, lse: phase 1 of the sublayers that remain in the group, by sublayer; empty in one-pass groups.
        scores: Full only: for each source born in this group, its scores `[queries, ...]` against the group's later
            sublayers.
        steps: reads and writes so far, two a sublayer; None where that is not known (a state put together by hand).
    """

    sources: tuple[Tensor, ...]
    prefix: Tensor | None = None
    update: Tensor | None = None
    o1: tuple[Tensor, ...] = ()
    lse: tuple[Tensor, ...] = ()
    scores: tuple[Tensor, ...] = ()
    steps: int | None = None


class Reads(NamedTuple):
    """The learned part of the reads of sublayers first .. first + R - 1, and how to compute them.

    Attributes:
        query: w, `[R, d]`; row R - 1 is the output head's if the stream ends here.
        key_weight: g, `[R, d]`.
        first: the sublayer of row 0.
        last: one past the last sublayer read from these rows (a pipeline stage may end inside a block).
        eps: epsilon of the key norm.
        output_eps: epsilon of the sublayers' input norms.
        impl: implementation of the operators.
        single: (rows of w, rows of g), if they are taken apart already: see :meth:`apart`.
        schedule: the plan that the rows were made for, if it is known.
    """

    query: Tensor
    key_weight: Tensor
    first: int
    last: int
    eps: float = 1e-6
    output_eps: float = 1e-6
    impl: str = "auto"
    single: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None
    schedule: Schedule | None = None

    def apart(self) -> Reads:
        """The same with all rows taken apart at once: the backward of R single rows would fill R gradients `[R, d]`."""
        return self._replace(single=(self.query.unbind(0), self.key_weight.unbind(0)))

    def rows(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """(w, g) of sublayers [start, end)."""
        return self.query[start - self.first : end - self.first], self.key_weight[start - self.first : end - self.first]

    def row(self, sublayer: int) -> tuple[Tensor, Tensor]:
        """(w, g) of one sublayer."""
        query, key_weight = (self.query, self.key_weight) if self.single is None else self.single
        return query[sublayer - self.first], key_weight[sublayer - self.first]


def check_reads(reads: Reads, schedule: Schedule, d: int | None = None, device: torch.device | None = None) -> None:
    """Check reads that a caller gives: of sublayers of the schedule, with a row for each; None: as the query's.

    Raises:
        TypeError: no reads, or parameters that are no tensors of floats.
        ValueError: sublayers outside the schedule, or parameters of another shape or device.
    """
    check_kind("reads", reads, Reads, "the reads of a module; pass module.reads()")
    first, last, L = reads.first, reads.last, schedule.sublayers
    if not 0 <= first < last <= L:
        raise ValueError(f"reads: found sublayers {first} to {last}, expected 0 <= first < last <= {L}")
    shape, _, own = check_stream("reads.query", reads.query)
    d, device = shape[-1] if d is None else d, own if device is None else device
    for name, x in (("reads.query", reads.query), ("reads.key_weight", reads.key_weight)):
        check_matrix(name, x, d, device, last - first + (last == L), optional=False)


def chosen_norm(
    norms: Sequence[Tensor] | None, sublayer: int, weight: Tensor | None, d: int, device: torch.device
) -> Tensor | None:
    """The norm weight of a read: the one given at the start of the stream, which the read may repeat, or its own.

    Raises:
        TypeError: a weight that is no tensor of floats.
        ValueError: another tensor than was given at the start, or one that is not `[d]` on `device`.
    """
    if weight is not None and (norms is None or weight is not norms[sublayer]):
        check_vector("norm_weight", weight, d, device)
    if norms is None:
        return weight
    if weight is not None and weight is not norms[sublayer]:
        raise ValueError(
            f"norm_weight: found another tensor than norms[{sublayer}], expected the same one (a layer that is a unit "
            "of FSDP2 has other tensors inside than outside: make attention and MLP modules the units)"
        )
    return norms[sublayer]


def begin(embedding: Tensor) -> State:
    """The stream before the first sublayer: b_0 is the embedding.

    Raises:
        TypeError: an embedding that is no tensor of a float dtype.
        ValueError: an embedding that is not `[..., d]`.
    """
    check_stream("embedding", embedding)
    return State((embedding,), steps=0)


def write(state: State, update: Tensor) -> State:
    """Take the output of the sublayer that was read last. The sum with the prefix is left to the next read.

    Raises:
        TypeError: no state, or an update that is no tensor of a float dtype.
        ValueError: an update that is waiting already, or of another shape than the stream.
    """
    check_kind("state", state, State, "the state of a stream")
    if state.update is not None or (state.steps is not None and not state.steps % 2):
        raise ValueError("update: found a second write before a read, expected read and write to alternate")
    like = state.sources[0]
    check_update(update, like.shape, like.device)
    return state._replace(update=update.to(like.dtype), steps=None if state.steps is None else state.steps + 1)


def total(number: int, prefix: Tensor | None, update: Tensor | None) -> Tensor:
    """prefix + update, where either may be absent: source `number`, once its block is complete."""
    del number
    return prefix if update is None else update if prefix is None else prefix + update


def finish(state: State) -> State:
    """The same stream with the waiting update added to the prefix: what travels between pipeline stages.

    Raises:
        TypeError: no state.
    """
    check_kind("state", state, State, "the state of a stream")
    return state._replace(prefix=total(len(state.sources), state.prefix, state.update), update=None)


def read(
    state: State,
    schedule: Schedule,
    reads: Reads,
    sublayer: int,
    norm_weight: Tensor | None,
    *,
    complete: Callable[[int, Tensor | None, Tensor | None], Tensor] = total,
) -> tuple[Tensor, State]:
    """h_l, or RMSNorm(h_l) * norm_weight, and the new state.

    Args:
        state: the stream after sublayer l - 1.
        schedule: the plan.
        reads: queries and key-norm weights.
        sublayer: l.
        norm_weight: weight `[d]` of the sublayer's input norm, or None for h_l itself.
        complete: (number, prefix, update) → the source that a finished block becomes; inference stores it in a bank.

    Returns:
        (input of sublayer l, state).

    Raises:
        TypeError: no state, schedule or reads.
        ValueError: l is not the sublayer that the state stands before, or nothing was written since the read of l - 1.
        IndexError: l outside [0, L).
    """
    check_kind("state", state, State, "the state of a stream")
    check_kind("schedule", schedule, Schedule, "a Schedule")
    check_kind("reads", reads, Reads, "the reads of a module; pass module.reads()")
    visit = schedule.visit(sublayer)
    if state.steps is not None and state.steps != 2 * sublayer:
        expected = f"{'write' if state.steps % 2 else 'read'}({state.steps // 2})"
        raise ValueError(f"sublayer: found read({sublayer}), expected {expected}, where the state stands")
    y, state = _read(state, schedule, visit, reads, norm_weight, complete)
    return y, state._replace(steps=2 * sublayer + 1)


def _read(state: State, schedule: Schedule, visit: Visit, reads: Reads, norm_weight: Tensor | None, complete):
    sublayer = visit.sublayer
    if sublayer and state.update is None and state.prefix is None:
        raise ValueError(f"sublayer: found a read of {sublayer} before the write of {sublayer - 1}")
    if sublayer == 0:
        y = phase2_first(state.sources[0], norm_weight, output_eps=reads.output_eps, impl=reads.impl)
        return y, state
    if schedule.full:
        return _read_full(state, visit, reads, norm_weight, complete)
    if visit.first:
        state = State((*state.sources, complete(len(state.sources), state.prefix, state.update)))
    if visit.one_pass:
        return _one_pass(state, reads, sublayer, norm_weight)
    if not state.o1:
        q, g = reads.rows(sublayer, min(schedule.phase1_end(sublayer), reads.last))
        o1, lse = phase1(state.sources, q, g, eps=reads.eps, impl=reads.impl)
        state = state._replace(o1=o1.unbind(0), lse=lse.unbind(0))
    return _merge(state, reads, sublayer, norm_weight)


def _one_pass(state: State, reads: Reads, sublayer: int, norm_weight: Tensor | None):
    q, g = reads.row(sublayer)
    options = {"eps": reads.eps, "output_eps": reads.output_eps, "impl": reads.impl}
    if state.update is None and state.prefix is None:
        return mix_norm(state.sources, q, g, norm_weight, **options), state
    update, prefix = (state.update, state.prefix) if state.update is not None else (state.prefix, None)
    p, y = mix_update(update, prefix, state.sources, q, g, norm_weight, **options)
    return y, state._replace(prefix=p, update=None)


def _merge(state: State, reads: Reads, sublayer: int, norm_weight: Tensor | None):
    o1, lse = state.o1[0], state.lse[0]
    rest = state._replace(o1=state.o1[1:], lse=state.lse[1:])
    if state.update is None and state.prefix is None:
        return phase2_first(o1, norm_weight, output_eps=reads.output_eps, impl=reads.impl), rest
    update, prefix = (state.update, state.prefix) if state.update is not None else (state.prefix, None)
    q, g = reads.row(sublayer)
    options = {"eps": reads.eps, "output_eps": reads.output_eps, "impl": reads.impl}
    p, y = phase2(update, prefix, o1, lse, q, g, norm_weight, **options)
    return y, rest._replace(prefix=p, update=None)


def _read_full(state: State, visit: Visit, reads: Reads, norm_weight: Tensor | None, complete):
    l, end = visit.sublayer, min(visit.end, reads.last)
    born = complete(len(state.sources), state.prefix, state.update)
    state = state._replace(sources=(*state.sources, born), prefix=None, update=None)
    if visit.one_pass:
        q, g = reads.row(l)
        options = {"eps": reads.eps, "output_eps": reads.output_eps, "impl": reads.impl}
        return mix_norm(state.sources, q, g, norm_weight, **options), state
    q, g = reads.rows(l, end)
    if not state.o1:
        # A group that opens here, or a stage that starts inside one: everything so far is one phase 1.
        o1, lse = phase1(state.sources, q, g, eps=reads.eps, impl=reads.impl)
        state = state._replace(o1=o1.unbind(0), lse=lse.unbind(0), scores=())
    else:
        s = scores([born], q, g, eps=reads.eps, impl=reads.impl)
        state = state._replace(scores=(*state.scores, s[:, 0]))
    o1, lse, own = state.o1[0], state.lse[0], state.scores
    h = o1
    if own:
        # (o1, lse) is a source like any other: value o1, score lse. One softmax over it and the group's own sources.
        s = torch.stack([lse, *(x[x.shape[0] - q.shape[0]] for x in own)])[None]
        h = phase1_from_scores([o1, *state.sources[-len(own) :]], s, impl=reads.impl)[0][0]
    state = state._replace(o1=state.o1[1:], lse=state.lse[1:])
    if not state.o1:
        state = state._replace(scores=())
    # Without a norm a row of phase 1's outputs is copied too: the caller may work in place on what a read returns.
    mixed = own and norm_weight is None
    y = h if mixed else phase2_first(h, norm_weight, output_eps=reads.output_eps, impl=reads.impl)
    return y, state


def output(state: State, reads: Reads, norm_weight: Tensor | None) -> Tensor:
    """The output head's read: over the embedding and all blocks, the last one included, with the last row of `reads`.

    Args:
        state: the stream after the last sublayer.
        reads: their last row holds the output query.
        norm_weight: weight of the model's final norm, or None.

    Raises:
        TypeError: no state or reads, or a weight that is no tensor of floats.
        ValueError: sublayers remain, or the weight is not `[d]`.
    """
    check_kind("state", state, State, "the state of a stream")
    check_kind("reads", reads, Reads, "the reads of a module; pass module.reads()")
    if state.steps is not None and state.steps != 2 * reads.last:
        raise ValueError(f"output: found {state.steps // 2} of {reads.last} sublayers written, expected all")
    like = state.sources[0]
    check_vector("norm_weight", norm_weight, like.shape[-1], like.device)
    query, key_weight = reads.row(reads.last)
    options = {"eps": reads.eps, "output_eps": reads.output_eps, "impl": reads.impl}
    if state.update is None and state.prefix is None:
        return mix_norm(state.sources, query, key_weight, norm_weight, **options)
    update, prefix = (state.update, state.prefix) if state.update is not None else (state.prefix, None)
    return mix_update(update, prefix, state.sources, query, key_weight, norm_weight, **options)[1]
