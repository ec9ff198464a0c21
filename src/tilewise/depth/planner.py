"""What a residual stream over depth costs in memory at inference, per device, before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewise.depth.checks import FLOATS, check_int, check_kind
from tilewise.depth.schedule import Schedule

__all__ = ["MemoryPlan", "memory_table", "plan_memory"]


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per device of one step.

    Attributes:
        tokens: tokens of the prompt or step.
        resident: tokens that one device holds at a time, after chunking and sharding.
        sources: slots of the bank.
        bank: completed blocks, or outputs for Full.
        phase1: normalised outputs and lse of the largest two-phase group, and the table of scores; these two in fp32,
            or in fp64 for a stream in fp64.
        running: prefix, update and normalised input of the sublayer at work.
        shards, chunk: as asked for.
    """

    tokens: int
    resident: int
    sources: int
    bank: int
    phase1: int
    running: int
    shards: int
    chunk: int | None

    @property
    def total(self) -> int:
        """All three, in bytes."""
        return self.bank + self.phase1 + self.running

    def row(self) -> dict[str, str]:
        """The plan as one row of a table; GB is 10⁹ bytes."""
        gb = {
            name: f"{value / 1e9:.2f}"
            for name, value in (
                ("bank GB", self.bank),
                ("phase 1 GB", self.phase1),
                ("running GB", self.running),
                ("total GB", self.total),
            )
        }
        chunk = "-" if self.chunk is None else str(self.chunk)
        head = {"tokens": str(self.tokens), "sources": str(self.sources), "chunk": chunk, "devices": str(self.shards)}
        return head | gb


def plan_memory(
    tokens: int,
    d: int,
    schedule: Schedule | None = None,
    *,
    blocks: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    shards: int = 1,
    chunk: int | None = None,
) -> MemoryPlan:
    """Memory per device of a step of `tokens` tokens.

    The bank holds what :class:`tilewise.depth.InferenceState` allocates: the embedding and every block but the last,
    which stays the running prefix (K3: 8 slots). Sharded along the sequence, each token's sources live on one device.

    Args:
        tokens: tokens, batch included.
        d: width.
        schedule: the plan; gives the slots and the queries of the largest phase 1.
        blocks: slots, instead of a schedule: the bank alone is counted.
        dtype: of the stream.
        shards: devices that share the tokens.
        chunk: tokens of a prefill chunk, over all devices.

    Raises:
        TypeError: a size that is no integer, a schedule that is none, or a dtype that is no float.
        ValueError: neither or both of schedule and blocks, or a size below 1.

    Example:
        >>> plan = plan_memory(131072, 7168, blocks=8)
        >>> round(plan.bank / 1e9, 1), round(plan_memory(131072, 7168, blocks=8, shards=8).bank / 1e9, 1)
        (15.0, 1.9)
    """
    if (schedule is None) == (blocks is None):
        raise ValueError("schedule, blocks: expected exactly one of them")
    for name, value in (("tokens", tokens), ("d", d), ("blocks", blocks), ("shards", shards), ("chunk", chunk)):
        if value is not None or name in ("tokens", "d", "shards"):
            check_int(name, value, 1)
    check_kind("schedule", schedule, (Schedule, type(None)), "a Schedule")
    if dtype not in FLOATS:
        raise TypeError(f"dtype: found {dtype!r}, expected one of {', '.join(map(str, FLOATS))}")
    step = tokens if chunk is None else min(tokens, chunk)
    resident = -(-step // shards)
    vector = d * dtype.itemsize
    if schedule is None:
        return MemoryPlan(tokens, resident, blocks, blocks * resident * vector, 0, 0, shards, chunk)
    slots = schedule.sublayers if schedule.full else len(schedule.starts)
    direct = [schedule.visit(start).one_pass or (schedule.full and start == 0) for start in schedule.starts]
    starts = [start for start, alone in zip(schedule.starts, direct, strict=True) if not alone]
    queries = max((schedule.phase1_end(start) - start for start in starts), default=0)
    columns = schedule.max_sources if schedule.full else slots if queries else 0
    scores = (schedule.sublayers + 1) * columns
    wide = 8 if dtype == torch.float64 else 4
    statistics = resident * (queries * (vector + wide) + wide * scores)
    return MemoryPlan(
        tokens, resident, slots, slots * resident * vector, statistics, 3 * resident * vector, shards, chunk
    )


def memory_table(plans: Sequence[MemoryPlan]) -> str:
    """The plans as an aligned text table.

    Raises:
        TypeError: no list of plans.

    Example:
        >>> print(memory_table([plan_memory(1024, 64, blocks=8)]))
        tokens  sources  chunk  devices  bank GB  phase 1 GB  running GB  total GB
          1024        8      -        1     0.00        0.00        0.00      0.00
    """
    check_kind("plans", plans, (list, tuple), "a list or tuple of MemoryPlan")
    for n, plan in enumerate(plans):
        check_kind(f"plans[{n}]", plan, MemoryPlan, "a MemoryPlan")
    rows = [plan.row() for plan in plans]
    if not rows:
        return ""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    lines = ["  ".join(name.rjust(width) for name, width in widths.items())]
    lines += ["  ".join(row[name].rjust(width) for name, width in widths.items()) for row in rows]
    return "\n".join(lines)
