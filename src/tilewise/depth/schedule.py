"""Where blocks begin, which sources a sublayer reads, and in which way: the static plan of a residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt

from tilewise.depth.checks import check_int, check_kind

__all__ = ["Schedule", "Visit", "layers_from_sublayers", "sublayers_from_layers"]


def sublayers_from_layers(layers: int, per_layer: int = 2) -> int:
    """Block size in sublayers from a block size in decoder layers (attention and MLP are one sublayer each).

    Kimi K3's `attn_res_block_size` and Megatron's `--attn-res-block-layers` count decoder layers; the paper, fla and
    this package count sublayers.

    Raises:
        TypeError: a size that is no integer.
        ValueError: a size that is not positive.

    Example:
        >>> sublayers_from_layers(12)
        24
    """
    check_int("layers", layers, 1)
    check_int("per_layer", per_layer, 1)
    return layers * per_layer


def layers_from_sublayers(sublayers: int, per_layer: int = 2) -> int:
    """Block size in decoder layers from a block size in sublayers.

    Raises:
        TypeError: a size that is no integer.
        ValueError: the size is no multiple of `per_layer`: such a boundary falls inside a decoder layer.

    Example:
        >>> layers_from_sublayers(24)
        12
    """
    check_int("per_layer", per_layer, 1)
    check_int("sublayers", sublayers, 1)
    if sublayers % per_layer:
        lower = max(per_layer, sublayers - sublayers % per_layer)
        raise ValueError(
            f"sublayers: found {sublayers}, expected a positive multiple of {per_layer}; nearest is {lower}"
        )
    return sublayers // per_layer


@dataclass(frozen=True)
class Visit:
    """What one sublayer reads.

    Attributes:
        sublayer: l, from 0.
        start, end: the sublayers [start, end) of its group: a block, or for Full a group that shares one phase 1.
        sources: sources complete when the group begins (embedding included).
        one_pass: read everything in one pass instead of phase 1 and phase 2.
    """

    sublayer: int
    start: int
    end: int
    sources: int
    one_pass: bool

    @property
    def first(self) -> bool:
        """The sublayer opens its group."""
        return self.sublayer == self.start


@dataclass(frozen=True)
class Schedule:
    """The static plan of a residual stream of L sublayers.

    Block (equations 5 and 6 of arXiv:2603.15031): sublayer i of block n reads b_0 .. b_{n-1} and, from its second
    sublayer on, the partial sum of its own block. Full (equations 2 to 4): every sublayer reads the embedding and every
    earlier sublayer's output; `starts` then only groups the sublayers that share a phase 1, and the result does not
    depend on it.

    Attributes:
        sublayers: L.
        starts: first sublayer of each block or group; strictly increasing, the first is 0. Any boundary is legal, also
            one between the attention and the MLP of a decoder layer.
        full: Full instead of Block.
        one_pass_sources: groups that begin with at most this many complete sources (embedding included) are read in
            one pass; all later ones in two phases. One pass moves n + 4 vectors a sublayer, two phases 6 + n/S: equal
            near n = 2.
        max_queries: Block only: sublayers that share one phase 1 at most; None means the whole block. Less memory for
            its outputs (`[queries, T, d]`), one more read of the sources for each further call.

    Raises:
        TypeError: a number that is no integer.
        ValueError: starts that are empty, unordered or out of range, or a size that is negative.

    Example:
        >>> Schedule.block(10, 4).starts
        (0, 4, 8)
        >>> Schedule.full_attention(128).max_sources
        129
    """

    sublayers: int
    starts: tuple[int, ...]
    full: bool = False
    one_pass_sources: int = 2
    max_queries: int | None = None

    def __post_init__(self) -> None:
        check_int("sublayers", self.sublayers, 1)
        check_int("one_pass_sources", self.one_pass_sources, 0, meaning=" (0: never one pass)")
        check_kind("full", self.full, bool, "True or False")
        check_kind("starts", self.starts, tuple, "a tuple of integers; Schedule.at takes any sequence")
        for n, start in enumerate(self.starts):
            check_int(f"starts[{n}]", start, 0)
        if self.max_queries is not None:
            check_int("max_queries", self.max_queries, 1)
        if not self.starts or self.starts[0] != 0:
            raise ValueError(f"starts: found {self.starts}, expected the first block to start at sublayer 0")
        if any(a >= b for a, b in zip(self.starts, self.starts[1:], strict=False)):
            raise ValueError(
                f"starts: found {self.starts}, expected strictly increasing; nearest legal is "
                f"{tuple(sorted(set(self.starts)))}"
            )
        if self.starts[-1] >= self.sublayers:
            raise ValueError(f"starts: found {self.starts[-1]}, expected less than sublayers = {self.sublayers}")
        if self.max_queries is not None and self.full:
            raise ValueError(f"max_queries: found {self.max_queries}, expected None for Full")
        # A read asks for its visit: 4 us of the host if it were worked out each time.
        object.__setattr__(self, "_visits", tuple(self._visit(l) for l in range(self.sublayers)))

    @classmethod
    def block(cls, sublayers: int, size: int, *, one_pass_sources: int = 2, max_queries: int | None = None) -> Schedule:
        """Blocks of `size` sublayers; the last one takes what remains.

        Raises:
            ValueError: a size below 1.
        """
        check_int("sublayers", sublayers, 1)
        check_int("size", size, 1)
        return cls(sublayers, tuple(range(0, sublayers, size)), False, one_pass_sources, max_queries)

    @classmethod
    def at(
        cls, sublayers: int, starts: Sequence[int], *, one_pass_sources: int = 2, max_queries: int | None = None
    ) -> Schedule:
        """Blocks that start at the sublayers named, in any uneven division."""
        check_kind("starts", starts, Sequence, "a sequence of integers")
        return cls(sublayers, tuple(starts), False, one_pass_sources, max_queries)

    @classmethod
    def full_attention(cls, sublayers: int, group: int | None = None, *, one_pass_sources: int = 1) -> Schedule:
        """Full Attention Residuals, read in groups of `group` sublayers.

        With groups of about sqrt(L) a sublayer reads O(sqrt(L)) vectors of length d instead of O(L).

        Args:
            sublayers: L.
            group: sublayers that share a phase 1; None means round(sqrt(L)).
            one_pass_sources: the first group holds the embedding alone, so one pass over the group is the cheaper way.
        """
        check_int("sublayers", sublayers, 1)
        if group is not None:
            check_int("group", group, 1)
        size = max(1, isqrt(4 * sublayers) + 1 >> 1) if group is None else group
        return cls(sublayers, tuple(range(0, sublayers, size)), True, one_pass_sources)

    @classmethod
    def kimi_k3(cls, layers: int = 93, attn_res_block_size: int = 12, *, one_pass_sources: int = 2) -> Schedule:
        """Kimi K3's convention: both arguments count decoder layers; the released model has 9 sources.

        Example:
            >>> Schedule.kimi_k3().max_sources
            9
        """
        check_int("attn_res_block_size", attn_res_block_size, 1)
        size = sublayers_from_layers(attn_res_block_size)
        return cls.block(sublayers_from_layers(layers), size, one_pass_sources=one_pass_sources)

    @property
    def max_sources(self) -> int:
        """Sources of the output read: the embedding and every block (Block), or every sublayer's output (Full)."""
        return 1 + (self.sublayers if self.full else len(self.starts))

    def visit(self, sublayer: int) -> Visit:
        """What sublayer l reads.

        Raises:
            TypeError: l is no integer.
            IndexError: l outside [0, L).
        """
        check_kind("sublayer", sublayer, int, "an integer")
        if not 0 <= sublayer < self.sublayers:
            raise IndexError(f"sublayer: found {sublayer}, expected 0 to {self.sublayers - 1}")
        return self._visits[sublayer]

    def _visit(self, sublayer: int) -> Visit:
        n = sum(1 for s in self.starts if s <= sublayer) - 1
        start = self.starts[n]
        end = self.starts[n + 1] if n + 1 < len(self.starts) else self.sublayers
        sources = start + 1 if self.full else n + 1
        return Visit(sublayer, start, end, sources, sources <= self.one_pass_sources)

    def phase1_end(self, sublayer: int) -> int:
        """One past the last sublayer whose phase 1 is computed together with sublayer l's."""
        end = self.visit(sublayer).end
        return end if self.max_queries is None else min(end, sublayer + self.max_queries)

    def complete_before(self, sublayer: int) -> int:
        """Sources that exist, embedding included, once the sublayers before l have run; l may be L."""
        check_int("sublayer", sublayer, 0, self.sublayers)
        if self.full:
            return sublayer + 1
        return 1 + sum(1 for s in (*self.starts[1:], self.sublayers) if s <= sublayer)

    def vectors_moved(self) -> tuple[float, float]:
        """Vectors of length d (read, written) by all residual operators of a forward pass, output read included.

        Counted as the operators are defined: one-pass reads its sources, the prefix and the update and writes prefix
        and input; phase 1 reads its sources once and writes one vector a query; phase 2 reads update, prefix and o1.
        A block of several sublayers is completed by the read that follows it (:class:`tilewise.depth.InferenceState`;
        the output read for the last block): that reads prefix and update instead of their sum, and writes the sum.
        For Full a sublayer's output is read once for its scores and then once by each later sublayer of its group.
        """
        read = written = 0
        for l in range(self.sublayers):
            v = self.visit(l)
            i = l - v.start
            if not v.one_pass and i % (self.max_queries or self.sublayers) == 0:
                read += v.sources
                written += min(v.end - l, self.max_queries or self.sublayers)
            if self.full:
                read += v.sources + i if v.one_pass else 1 + i + bool(i)
                written += 1
            elif v.one_pass:
                read += v.sources + (min(i, 2) if i else 0)
                written += 1 + (i > 1)
            else:
                read += 1 + min(i, 2)
                written += 1 + (i > 1)
            closes = not self.full and l == v.end - 1 > v.start
            read, written = read + closes, written + closes
        return read + self.max_sources, written + 1
