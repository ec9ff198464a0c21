"""Row maps: which row of a learned table an offset δ = i − j (query position minus key position) picks.

A map is a small immutable value with a name, so that it travels through an operator's string argument and two equal
maps share every cached expansion. Rows are computed on the CPU in fp64 whatever the default dtype or device: under a
bf16 default the same logarithms move thousands of bucket boundaries.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index

import torch
from torch import Tensor

__all__ = [
    "NO_ROW",
    "RowMap",
    "clipped",
    "compact",
    "deberta_buckets",
    "explicit",
    "identity",
    "t5_buckets",
    "windowed",
]

NO_ROW = -1
"""The row of an offset for which the term adds 0."""

_EXPLICIT: dict[str, tuple[int, Tensor, int]] = {}
"""Digest ↦ (first offset, rows, size). The size is a number: under fake tensors no value of `rows` can be read."""


@dataclass(frozen=True)
class RowMap:
    """δ ↦ row, made by the functions of this module.

    Attributes:
        kind: the family's name (``identity``, ``clipped``, ``windowed``, ``t5``, ``deberta``, ``explicit``).
        params: the family's integers (for ``explicit``, the digest of its rows).
        size: how many rows a table for this map has; rows run over 0 … size − 1, or :data:`NO_ROW`.

    Example:
        >>> clipped(-2, 2)(torch.arange(-4, 5)).tolist()
        [0, 0, 0, 1, 2, 3, 4, 4, 4]
    """

    kind: str
    params: tuple[int | str, ...]
    size: int

    def __call__(self, delta: Tensor) -> Tensor:
        """Rows of integer offsets, as an int32 tensor of the same shape on the CPU.

        Raises:
            ValueError: an ``identity`` map is asked for an offset beyond its reach.
        """
        return _FAMILIES[self.kind](delta.to("cpu", torch.int64), *self.params).to(torch.int32)

    def span(self, first: int, last: int) -> Tensor:
        """Rows of the offsets first, first + 1, …, last (int32, CPU)."""
        return _span(self, first, last)

    def __reduce__(self):
        # An explicit map's rows are held by this module: another process needs them sent along.
        if self.kind == "explicit":
            first, rows, _ = _listed(self.params[0])
            return explicit, (rows.tolist(), first)
        return RowMap, (self.kind, self.params, self.size)

    @property
    def saturation(self) -> tuple[int, int] | None:
        """(lo, hi): every offset ≤ lo has lo's row, every offset ≥ hi has hi's row; None where no such ends exist."""
        # An identity map's reach may be a compiler's symbol, which has no hash.
        return None if self.kind == "identity" else _saturation(self)

    @property
    def spec(self) -> str:
        """The map as text; :func:`parse` gives it back.

        An identity map's reach is left to its table's rows: they grow with the sequence, and text that did would be
        compiled anew for every length.
        """
        params = self.params[1:] if self.kind == "identity" else self.params
        return ":".join([self.kind, *[f"{n}" for n in params]])


def parse(spec: str, table_rows: int) -> RowMap:
    """The map that :attr:`RowMap.spec` describes, for a table of so many rows."""
    kind, *params = spec.split(":")
    if kind == "identity":
        return identity((table_rows - 1) // 2, bool(int(params[0])))
    if kind == "explicit":
        return RowMap("explicit", (params[0],), _listed(params[0])[2])
    make = {
        "clipped": clipped,
        "windowed": windowed,
        "t5": t5_buckets,
        "deberta": deberta_buckets,
    }
    return make[kind](*map(int, params))


def identity(reach: int, descending: bool = False) -> RowMap:
    """Every offset has a row of its own: row = δ + reach, or reach − δ with `descending`; 2·reach + 1 rows.

    Transformer-XL and the Conformers store their position table from the largest offset to the smallest
    (``descending=True``, reach = T − 1).

    Example:
        >>> identity(3, descending=True)(torch.tensor([3, 0, -3])).tolist()
        [0, 3, 6]
    """
    try:
        reach = as_tokens("reach", reach)
    except TypeError:
        _require(False, "reach", reach, "an integer ≥ 0")
    _require(reach >= 0, "reach", reach, "an integer ≥ 0")
    return RowMap("identity", (reach, _flag("descending", descending)), 2 * reach + 1)


def clipped(left: int, right: int, descending: bool = False) -> RowMap:
    """The offset clamped to [left, right]: row = clamp(δ) − left, or right − clamp(δ) with `descending`.

    Shaw et al. 2018 (arXiv 1803.02155) with left = −right; Wav2Vec2-BERT and SeamlessM4T v2 use δ in [−8, 64],
    descending.

    Example:
        >>> clipped(-8, 64, descending=True).size
        73
    """
    return RowMap("clipped", *_bounded(left, right, descending))


def windowed(left: int, right: int, descending: bool = False) -> RowMap:
    """As :func:`clipped` inside [left, right]; no row outside (the term adds 0 there). VITS: left = −4, right = 4.

    Example:
        >>> windowed(-1, 1)(torch.arange(-2, 3)).tolist()
        [-1, 0, 1, 2, -1]
    """
    return RowMap("windowed", *_bounded(left, right, descending))


def t5_buckets(num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> RowMap:
    """T5's buckets: exact near the diagonal, logarithmic up to max_distance, one bucket beyond.

    Bidirectional (encoders) spends half of the buckets on each side; otherwise (decoders) keys ahead of the query share
    bucket 0. Source: ``T5Attention._relative_position_bucket`` of transformers; equal to it for every offset, in fp32,
    where PyTorch's logarithm is rounded to the nearest. On processors where it is not, buckets that end at a whole
    distance can end one token elsewhere there (34 buckets up to 27; none with the numbers of published models).

    Raises:
        ValueError: too few buckets, or a max_distance that leaves no room for the logarithmic half.

    Example:
        >>> t5_buckets()(torch.tensor([0, 7, 8, 91, 5000, -1, -5000])).tolist()
        [0, 7, 8, 15, 15, 17, 31]
    """
    num_buckets, max_distance = as_integer("num_buckets", num_buckets), as_integer("max_distance", max_distance)
    bidirectional = _flag("bidirectional", bidirectional)
    exact = (num_buckets // 2 if bidirectional else num_buckets) // 2
    _require(exact >= 1, "num_buckets", num_buckets, "at least 4 (bidirectional) or 2")
    _require(max_distance > exact, "max_distance", max_distance, f"more than the {exact} exact buckets")
    return RowMap("t5", (num_buckets, max_distance, bidirectional), num_buckets)


def deberta_buckets(position_buckets: int, max_relative_positions: int) -> RowMap:
    """DeBERTa's slots: clamp(bucket(δ) + span, 0, 2·span − 1); with position_buckets ≤ 0 the bucket is δ itself.

    span = position_buckets, or max_relative_positions where there are no buckets (DeBERTa v1 and v2 without buckets).
    With 256 and 512 (v3) the map saturates at δ ≤ −512 and δ ≥ 506. Source: ``make_log_bucket_position`` of
    transformers' deberta_v2, whose fp32 results these are.

    Example:
        >>> deberta_buckets(256, 512)(torch.tensor([-512, -511, 0, 505, 506])).tolist()
        [0, 1, 256, 510, 511]
    """
    position_buckets = as_integer("position_buckets", position_buckets)
    max_relative_positions = as_integer("max_relative_positions", max_relative_positions)
    span = position_buckets if position_buckets > 0 else max_relative_positions
    _require(span >= 1, "max_relative_positions", max_relative_positions, "a number ≥ 1")
    if position_buckets > 0:
        _require(position_buckets >= 4, "position_buckets", position_buckets, "at least 4")
        _require(
            max_relative_positions - 1 > position_buckets // 2,
            "max_relative_positions",
            max_relative_positions,
            f"more than position_buckets // 2 + 1 = {position_buckets // 2 + 1}",
        )
    return RowMap("deberta", (position_buckets, max_relative_positions), 2 * span)


def explicit(rows: Sequence[int] | Tensor, first: int) -> RowMap:
    """Any map: rows[n] is the row of the offset first + n; the first and last entry hold for all offsets beyond.

    Entries are rows ≥ 0 or :data:`NO_ROW`; they need not be monotone, and δ and −δ may share a row. Reads the values:
    inside a compiled function, make it outside.

    Example:
        >>> explicit([1, 0, 1], first=-1)(torch.arange(-3, 4)).tolist()
        [1, 1, 1, 0, 1, 1, 1]
    """
    first = as_integer("first", first)
    given = torch.as_tensor(rows, device="cpu")
    _require(given.dim() == 1 and given.numel() > 0, "rows", tuple(given.shape), "a non-empty list of rows")
    _require(not given.dtype.is_floating_point, "rows", f"a list of {given.dtype}", "integers")
    least, most = int(given.min()), int(given.max())
    _require(least >= NO_ROW, "rows", least, "rows ≥ 0, or -1 for no row")
    _require(most < 2**31 - 1, "rows", most, "rows below 2³¹ − 1")
    table = given.to(torch.int32).clone()
    digest = hashlib.sha256(f"{first}:".encode() + table.numpy().tobytes()).hexdigest()[:32]
    _EXPLICIT[digest] = (first, table, most + 1)
    return RowMap("explicit", (digest,), most + 1)


def compact(table: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """Merge equal neighbouring rows of an expanded table: (representatives, run of each row).

    Borzoi's 8,191 relation rows, for example, are 31 runs. ``representatives.index_select(dim, runs)`` is `table`.

    Returns:
        The table with one row a run, and an int32 CPU vector that maps each old row to its run.

    Example:
        >>> kept, runs = compact(torch.tensor([[1.0], [1.0], [2.0]]))
        >>> kept.flatten().tolist(), runs.tolist()
        ([1.0, 2.0], [0, 0, 1])
    """
    moved = table.movedim(dim, 0)
    _require(moved.shape[0] > 0, "table", tuple(table.shape), f"at least one row along dim {dim}")
    rows = moved.reshape(moved.shape[0], -1)
    new = torch.ones(rows.shape[0], dtype=torch.bool, device=table.device)
    new[1:] = (rows[1:] != rows[:-1]).any(1)
    runs = (new.cumsum(0) - 1).to("cpu", torch.int32)
    return moved[new].movedim(0, dim).contiguous(), runs


def _require(condition: bool, name: str, found: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {found}; expected {expected}")


def as_integer(name: str, value: object) -> int:
    """The value as an int; TypeError with the argument's name if it is none."""
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; expected an integer") from None


def as_tokens(name: str, value: object) -> int | torch.SymInt:
    """The value as a number of tokens: an int, or a compiler's symbol for one. A tensor is refused, not read."""
    if isinstance(value, (int, torch.SymInt)):
        return value
    if isinstance(value, Tensor):
        raise TypeError(f"{name} is {value!r}; expected an integer")
    return as_integer(name, value)


def _flag(name: str, value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; expected True or False")
    return int(value)


def _bounded(left: int, right: int, descending: bool) -> tuple[tuple[int, int, int], int]:
    """Parameters and size of a map with a row for each offset from `left` to `right`."""
    left, right = as_integer("left", left), as_integer("right", right)
    _require(left <= right, "left", left, f"a number ≤ right = {right}")
    return (left, right, _flag("descending", descending)), right - left + 1


def _identity(delta: Tensor, reach: int, descending: int) -> Tensor:
    far = int(delta.abs().max()) if delta.numel() else 0
    _require(
        far <= reach, "reach", reach, f"at least {far}, the largest offset met: the table needs {2 * far + 1} rows"
    )
    return reach - delta if descending else delta + reach


def _clipped(delta: Tensor, left: int, right: int, descending: int) -> Tensor:
    inside = delta.clamp(left, right)
    return right - inside if descending else inside - left


def _windowed(delta: Tensor, left: int, right: int, descending: int) -> Tensor:
    return torch.where((delta >= left) & (delta <= right), _clipped(delta, left, right, descending), NO_ROW)


def _log(x: Tensor) -> Tensor:
    """fp32, rounded once: where a bucket ends at a whole distance, fp64 all through ends it one token elsewhere."""
    return x.double().log().float()


def _t5(delta: Tensor, num_buckets: int, max_distance: int, bidirectional: int) -> Tensor:
    if bidirectional:
        num_buckets //= 2
        side, distance = torch.where(delta < 0, num_buckets, 0), delta.abs()
    else:
        side, distance = torch.zeros_like(delta), delta.clamp(min=0)
    exact = num_buckets // 2
    ratio = _log(distance.float().clamp(min=1) / exact) / math.log(max_distance / exact)
    far = (exact + (ratio * (num_buckets - exact)).to(torch.int64)).clamp(max=num_buckets - 1)
    return side + torch.where(distance < exact, distance, far)


def _deberta(delta: Tensor, position_buckets: int, max_relative_positions: int) -> Tensor:
    if position_buckets <= 0:
        return (delta + max_relative_positions).clamp(0, 2 * max_relative_positions - 1)
    middle = position_buckets // 2
    distance = torch.where(delta.abs() < middle, middle - 1, delta.abs())
    reach = torch.tensor((max_relative_positions - 1) / middle, dtype=torch.float32)
    steps = _log(distance.float() / middle) / _log(reach) * (middle - 1)
    far = (torch.ceil(steps).to(torch.int64) + middle) * delta.sign()
    return (torch.where(distance <= middle, delta, far) + position_buckets).clamp(0, 2 * position_buckets - 1)


def _listed(digest: str) -> tuple[int, Tensor, int]:
    """What `explicit` was given, in this process."""
    found = _EXPLICIT.get(digest)
    if found is None:
        raise RuntimeError(
            f"the rows of explicit map {digest} are not known here: a program that was exported with it names them "
            "only; make the same map, tilewise.explicit(rows, first), before it runs"
        )
    return found


def _explicit(delta: Tensor, digest: str) -> Tensor:
    first, rows, _ = _listed(digest)
    return rows[(delta - first).clamp(0, rows.numel() - 1)]


_FAMILIES = {
    "identity": _identity, "clipped": _clipped, "windowed": _windowed,
    "t5": _t5, "deberta": _deberta, "explicit": _explicit,
}  # fmt: skip


@lru_cache(maxsize=256)
def _span(rows: RowMap, first: int, last: int) -> Tensor:
    return rows(torch.arange(first, last + 1, device="cpu"))


@lru_cache(maxsize=256)
def _saturation(rows: RowMap) -> tuple[int, int] | None:
    match rows.kind:
        case "clipped":
            left, right, _ = rows.params
            return (left, right) if left < right else (0, 0)
        case "windowed":
            left, right, _ = rows.params
            return left - 1, right + 1
        case "explicit":
            first, listed, _ = _listed(rows.params[0])
            changes = (listed[1:] != listed[:-1]).nonzero().flatten()
            return (first + int(changes[0]), first + int(changes[-1]) + 1) if changes.numel() else (0, 0)
    # Buckets never fall with the distance, so the first offset that has the last row is found by halving, from the
    # farthest offset that attention() takes: an odd number of DeBERTa's buckets has its last one beyond the distance.
    far = 2**62
    return -_settles(rows, -1, far), _settles(rows, 1, far)


def _settles(rows: RowMap, sign: int, far: int) -> int:
    """The smallest distance on one side from which on the row is the one of `far`."""
    at = lambda distance: int(rows(torch.tensor(sign * distance, device="cpu")))  # noqa: E731
    low, high, last = 0, far, at(far)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if at(middle) == last else (middle + 1, high)
    return low
