"""Reads and writes of a stream alternate and go up by one; norms given at the start are the norms of the reads."""

from __future__ import annotations

from tilewise.depth.checks import check_kind

__all__ = ["Order"]


class Order:
    """The position of a stream; anything out of turn is an error, never a silently wrong sum."""

    def __init__(self, first: int, last: int) -> None:
        self.next, self.last, self.reading = first, last, True

    def read(self, sublayer: int) -> None:
        check_kind("sublayer", sublayer, int, "an integer")
        if not self.reading or sublayer != self.next or self.next == self.last:
            raise ValueError(f"sublayer: found read({sublayer}), expected {self.expected()}{self.hint()}")
        self.reading = False

    def write(self, sublayer: int) -> None:
        self.check_write(sublayer)
        self.reading, self.next = True, self.next + 1

    def check_write(self, sublayer: int) -> None:
        """As :meth:`write`, without taking the turn: a write that is refused for another reason may be repeated."""
        check_kind("sublayer", sublayer, int, "an integer")
        if self.reading or sublayer != self.next:
            raise ValueError(f"sublayer: found write({sublayer}), expected {self.expected()}{self.hint()}")

    def output(self) -> None:
        if self.next != self.last or not self.reading:
            raise ValueError(f"output: found {self.next} of {self.last} sublayers written, expected all")

    def expected(self) -> str:
        if self.reading and self.next == self.last:
            return f"output(): all sublayers below {self.last} are written"
        return f"read({self.next})" if self.reading else f"write({self.next}, ...)"

    def hint(self) -> str:
        return "; under activation checkpointing use stream.checkpoint(function, ...)" if self.next == self.last else ""
