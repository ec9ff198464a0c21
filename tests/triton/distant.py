"""Tables whose entries lie further apart than 32 bits count, in a sparse file: only its pages in use are there."""

import mmap
import tempfile
from dataclasses import replace

import torch

from tilewise.call import Call

__all__ = ["apart", "placed"]

REACH = 3 * 2**30
"""Elements from the first row (or head) of a table to its last: more than an int32 holds, each step less."""


def placed(table: torch.Tensor, axis: int) -> torch.Tensor:
    """A copy of the table with its entries along an axis REACH apart."""
    steps = list(table.contiguous().stride())
    if table.shape[axis] > 1:
        steps[axis] = REACH // (table.shape[axis] - 1) // 16 * 16
    last = sum((n - 1) * step for n, step in zip(table.shape, steps, strict=True))
    size = (last + 1) * table.element_size()
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        memory = mmap.mmap(file.fileno(), size)
    return torch.frombuffer(memory, dtype=table.dtype).as_strided(table.shape, steps).copy_(table)


def apart(call: Call, axis: int) -> Call:
    """The call with the rows (axis 1) or heads (axis 0) of its tables REACH apart.

    Raises:
        ValueError: a table has too few of them for steps that an int32 holds.
    """
    counts = [port.table.shape[axis] for port in call.ports]
    if max(counts) < 3 or 2 in counts:
        raise ValueError(f"tables have {counts} entries along {axis}; expected one of 3 or more, none of 2")
    return replace(call, ports=tuple(replace(p, table=placed(p.table, axis)) for p in call.ports))
