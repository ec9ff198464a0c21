"""Which sources travel between pipeline stages when every rank keeps those that it has seen, and how many bytes."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.depth.checks import check_int, check_kind
from tilewise.depth.schedule import Schedule

__all__ = ["PipelinePlan", "paper_cached", "paper_naive"]


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        check_int(name, value, 1)


def paper_naive(ranks: int, virtual: int, blocks_per_stage: int) -> int:
    """Blocks sent a token without caching: C(C − 1) / 2 · N_p for C = P · V stages (arXiv:2603.15031, section 4.1)."""
    _check_sizes(ranks=ranks, virtual=virtual, blocks_per_stage=blocks_per_stage)
    stages = ranks * virtual
    return stages * (stages - 1) // 2 * blocks_per_stage


def paper_cached(ranks: int, virtual: int, blocks_per_stage: int) -> int:
    """Blocks sent a token with cross-stage caching: P(P − 1) / 2 · N_p + (V − 1) P² · N_p (the same section).

    Example:
        >>> paper_naive(4, 2, 1), paper_cached(4, 2, 1)
        (28, 22)
    """
    _check_sizes(ranks=ranks, virtual=virtual, blocks_per_stage=blocks_per_stage)
    return ranks * (ranks - 1) // 2 * blocks_per_stage + (virtual - 1) * ranks**2 * blocks_per_stage


@dataclass(frozen=True)
class PipelinePlan:
    """Stages of a residual stream over ranks: stage c serves sublayers [bounds[c], bounds[c + 1]) on rank c mod P.

    Stage boundaries need not align with blocks. Between stages travel the running prefix and the sources that the next
    stage reads and its rank has never seen. A rank has seen what its earlier stages received and what they completed.

    Attributes:
        schedule: the plan of the whole stream.
        bounds: C + 1 sublayers, from 0 to L.
        ranks: P.

    Raises:
        TypeError: no Schedule, or a number that is no integer.
        ValueError: bounds that are unordered or do not cover the stream, or P < 1.

    Example:
        >>> plan = PipelinePlan.even(Schedule.block(16, 2), ranks=2, virtual=2)
        >>> plan.bounds, [plan.received(c) for c in range(4)]
        ((0, 4, 8, 12, 16), [range(0, 0), range(0, 2), range(3, 4), range(5, 6)])
    """

    schedule: Schedule
    bounds: tuple[int, ...]
    ranks: int

    def __post_init__(self) -> None:
        check_kind("schedule", self.schedule, Schedule, "a Schedule")
        check_kind("bounds", self.bounds, tuple, "a tuple of integers")
        for c, bound in enumerate(self.bounds):
            check_int(f"bounds[{c}]", bound, 0)
        check_int("ranks", self.ranks, 1)
        increasing = all(a < b for a, b in zip(self.bounds, self.bounds[1:], strict=False))
        if len(self.bounds) < 2 or not increasing or (self.bounds[0], self.bounds[-1]) != (0, self.schedule.sublayers):
            raise ValueError(f"bounds: found {self.bounds}, expected 0 < .. < {self.schedule.sublayers}, increasing")

    @classmethod
    def even(cls, schedule: Schedule, ranks: int, virtual: int = 1, *, multiple: int = 2) -> PipelinePlan:
        """P · V stages of nearly equal size, in multiples of `multiple` sublayers (2: whole decoder layers).

        Raises:
            ValueError: fewer units than stages.
        """
        check_kind("schedule", schedule, Schedule, "a Schedule")
        _check_sizes(ranks=ranks, virtual=virtual, multiple=multiple)
        units, stages = schedule.sublayers // multiple, ranks * virtual
        if schedule.sublayers % multiple or units < stages:
            raise ValueError(
                f"schedule: found {schedule.sublayers} sublayers, expected a multiple of {multiple} and at least "
                f"{stages * multiple} for {stages} stages"
            )
        return cls(schedule, tuple(units * c // stages * multiple for c in range(stages + 1)), ranks)

    @property
    def stages(self) -> int:
        """C."""
        return len(self.bounds) - 1

    def rank(self, stage: int) -> int:
        """The rank of a stage: the stages go round."""
        self._check_stage(stage)
        return stage % self.ranks

    def read_by(self, stage: int) -> int:
        """Sources, embedding included, that the last sublayer of a stage reads as complete."""
        self._check_stage(stage)
        last = self.bounds[stage + 1] - 1
        return last + 1 if self.schedule.full else self.schedule.visit(last).sources

    def cached(self, stage: int) -> int:
        """Sources that the stage's rank has seen before the stage receives anything."""
        self._check_stage(stage)
        earlier = stage - self.ranks
        return 0 if earlier < 0 else self.schedule.complete_before(self.bounds[earlier + 1])

    def received(self, stage: int) -> range:
        """Numbers of the sources that a stage receives beside the prefix."""
        self._check_stage(stage)
        if stage == 0:
            return range(0)
        wanted = self.read_by(stage - 1)
        return range(min(self.cached(stage), wanted), wanted)

    def kept(self, stage: int) -> bool:
        """A later stage on the same rank will want this stage's sources."""
        self._check_stage(stage)
        return stage + self.ranks < self.stages

    def vectors(self, *, naive: bool = False) -> list[int]:
        """Vectors of length d a token sent to each stage 1 .. C − 1, the prefix counted; `naive`: without caching."""
        return [1 + (self.read_by(c - 1) if naive else len(self.received(c))) for c in range(1, self.stages)]

    def bytes(self, tokens: int, d: int, itemsize: int, *, naive: bool = False) -> int:
        """Bytes sent in one direction for `tokens` tokens; backward sends the same."""
        check_int("tokens", tokens, 0)
        _check_sizes(d=d, itemsize=itemsize)
        return sum(self.vectors(naive=naive)) * tokens * d * itemsize

    def _check_stage(self, stage: int) -> None:
        check_int("stage", stage, 0, self.stages - 1)

    def own_blocks_and_embedding(self) -> tuple[int, int]:
        """What separates :func:`paper_cached` from :meth:`vectors` where stages align with blocks: (saved, added).

        The paper's count sends a rank the blocks that its own earlier stage made; here they are in its cache:
        (V − 1) P · N_p saved. It does not count the embedding: P − 1 added.
        """
        complete = self.schedule.complete_before
        saved = sum(complete(self.bounds[c + 1]) - complete(self.bounds[c]) for c in range(self.stages - self.ranks))
        return saved, min(self.ranks, self.stages) - 1
