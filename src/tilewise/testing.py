"""Error budgets (how far a result may be from the truth, judged against PyTorch's own error in the same dtype), and the
table of mechanisms and masks that tests and benchmarks run through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import mechanisms as m
from . import terms as t
from .mask import Mask
from .rows import explicit

__all__ = ["CASES", "MASKS", "Budget", "Case", "Sizes", "assert_within_budget", "error_budget"]


@dataclass(frozen=True)
class Budget:
    """The verdict on one tensor. `error` and `allowed` are maximum absolute errors against the fp64 oracle.

    `relative` is ‖got − exact‖₂ / ‖exact‖₂. `ok` needs `error <= allowed` and the published rule: every element
    within 5 % or 0.03 of the oracle, or `relative` within 8 rounding units of the dtype.
    """

    name: str
    error: float
    allowed: float
    relative: float
    published: bool

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed and self.published


def error_budget(name: str, got: Tensor, low: Tensor, exact: Tensor, *, factor: float = 2.0) -> Budget:
    """Compare `got` with the fp64 oracle `exact`, allowing `factor` times the error of `low`, plus rounding.

    `low` is what dense PyTorch computes in the dtype under test, from the same inputs: inputs are made in that dtype
    and then promoted for the oracle, so their own quantisation counts for neither side. The rounding term is two
    rounding units at the tensor's largest magnitude: what a correct result may lose when it is stored.

    Raises:
        AssertionError: the shapes differ.
    """
    assert got.shape == exact.shape == low.shape, f"{name}: shapes {got.shape}, {low.shape}, {exact.shape} differ"
    if got.numel() == 0:
        return Budget(name, 0.0, 0.0, 0.0, True)
    unit = torch.finfo(got.dtype).eps
    # Where the oracle is: copied to the processor, 16 tensors of a 3B model's block at 1,000 tokens take it 1 s.
    exact = exact.detach().double()
    got, low = (x.detach().to(exact.device, torch.float64) for x in (got, low))
    difference = (got - exact).abs()
    # A NaN must never pass: NaN comparisons are False, so `error <= allowed` fails by itself.
    error = difference.max().item()
    allowed = factor * (low - exact).abs().max().item() + 2 * unit * exact.abs().max().item()
    relative = ((got - exact).norm() / exact.norm().clamp_min(torch.finfo(torch.float64).tiny)).item()
    elementwise = bool((difference <= torch.clamp(0.05 * exact.abs(), min=0.03)).all())
    return Budget(name, error, allowed, relative, elementwise or relative <= 8 * unit)


def assert_within_budget(name: str, got: Tensor, low: Tensor, exact: Tensor, *, factor: float = 2.0) -> None:
    """Raise AssertionError with both errors when `got` misses its budget (see :func:`error_budget`)."""
    budget = error_budget(name, got, low, exact, factor=factor)
    assert budget.ok, (
        f"{budget.name}: max error {budget.error:.3e}, allowed {budget.allowed:.3e}; relative {budget.relative:.3e}, "
        f"published rule {'met' if budget.published else 'missed'}"
    )


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call: [B, H, Tq, d] queries, [B, Hk, Tk, d] keys, [B, Hk, Tk, d_v] values.

    `offset` None means Tk − Tq, as in :func:`tilewise.attention`. `published` gives the tables the sizes of the models
    that the mechanism comes from; otherwise they are small, so that short sequences meet saturated offsets too.
    """

    B: int = 2
    H: int = 2
    Hk: int = 2
    Tq: int = 63
    Tk: int = 63
    d: int = 16
    d_v: int = 16
    offset: int | None = None
    published: bool = False

    @property
    def reach(self) -> int:
        """The largest |i + offset − j|, which an identity map must cover."""
        offset = self.Tk - self.Tq if self.offset is None else self.offset
        return max(self.Tq - 1 + offset, self.Tk - 1 - offset, 0)

    def either(self, small: int, published: int) -> int:
        """`published` for tables of a model's own size, else `small`."""
        return published if self.published else small


@dataclass(frozen=True)
class Case:
    """A mechanism: which tensors it learns or takes besides q, k and v, and the terms that it makes of them.

    Attributes:
        shapes: sizes ↦ shape of each extra tensor by name.
        build: (tensors by name, sizes) ↦ terms.
        scale: d ↦ τ.

    Example:
        >>> case, sizes = CASES["t5"], Sizes(Tq=9, Tk=9)
        >>> x = case.inputs(sizes, torch.float32)
        >>> {name: tuple(tensor.shape) for name, tensor in x.items()}["weight"]
        (32, 2)
        >>> o = tilewise.attention(x["q"], x["k"], x["v"], **case.arguments(x, sizes))
    """

    name: str
    shapes: Callable[[Sizes], dict[str, tuple[int, ...]]]
    build: Callable[[dict[str, Tensor], Sizes], tuple[t.Term, ...]]
    scale: Callable[[int], float] = lambda d: d**-0.5

    def inputs(
        self, sizes: Sizes, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> dict[str, Tensor]:
        """q, k, v and the extra tensors, normal, drawn on the CPU in fp64 and then rounded: the same on every device.

        q is drawn so that τ·q·k has unit variance whatever τ is; tables have half a unit of standard deviation.
        """
        s = sizes
        generator = torch.Generator().manual_seed(seed)
        shapes = {"q": (s.B, s.H, s.Tq, s.d), "k": (s.B, s.Hk, s.Tk, s.d), "v": (s.B, s.Hk, s.Tk, s.d_v)}
        deviation = {"q": s.d**-0.5 / self.scale(s.d), "k": 1.0, "v": 1.0}
        return {
            name: (torch.randn(shape, generator=generator, dtype=torch.float64) * deviation.get(name, 0.5)).to(
                device, dtype
            )
            for name, shape in (shapes | self.shapes(s)).items()
        }

    def arguments(self, inputs: dict[str, Tensor], sizes: Sizes) -> dict:
        """The keyword arguments `terms`, `scale` and `offset` of :func:`tilewise.attention` for these tensors."""
        return {"terms": self.build(inputs, sizes), "scale": self.scale(sizes.d), "offset": sizes.offset}


def _back_and_forth(s: Sizes):
    """Rows that rise, fall, vanish and repeat: not monotone, shared by δ and −δ, nothing at +3, a hole at 0."""
    return explicit([4, 0, 3, 2, 1, 2, -1, 2, 1, -1, 3, 5, 5, 0], first=-6)


def _txl(x: dict[str, Tensor], s: Sizes) -> tuple[t.Term, ...]:
    return m.TransformerXL(x["positions"], x["u"], x["v_bias"])


def _everything(x: dict[str, Tensor], s: Sizes) -> tuple[t.Term, ...]:
    return (
        m.T5(x["weight"]),
        *m.Shaw(x["shaw_keys"], x["shaw_values"], left=6, right=3),
        *_txl(x, s),
        *m.DeBERTa(x["pos_key"], x["pos_query"], position_buckets=16, max_relative_positions=32),
        m.Inkling(x["proj"], x["left"]),
        t.Scalar(x["shared"], _back_and_forth(s), gate=x["gate"]),
    )


def _deberta_scale(d: int) -> float:
    return (3 * d) ** -0.5


def _deberta(x: dict[str, Tensor], s: Sizes) -> tuple[t.Term, ...]:
    span = s.either(16, 256)
    return m.DeBERTa(x["pos_key"], x["pos_query"], position_buckets=span, max_relative_positions=2 * span)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("none", lambda s: {}, lambda x, s: ()),
        Case("t5", lambda s: {"weight": (32, s.H)}, lambda x, s: (m.T5(x["weight"]),), lambda d: 1.0),
        Case(
            "t5_causal",
            lambda s: {"weight": (32, s.H)},
            lambda x, s: (m.T5(x["weight"], bidirectional=False),),
            lambda d: 1.0,
        ),
        Case("mpnet", lambda s: {"weight": (32, s.H)}, lambda x, s: (m.MPNet(x["weight"]),)),
        Case("alibi", lambda s: {"slopes": (s.H,)}, lambda x, s: (m.ALiBi(x["slopes"].abs(), s.reach),)),
        Case(
            "shaw",
            lambda s: {"keys": (s.either(9, 129), s.d), "values": (s.either(9, 129), s.d_v)},
            lambda x, s: m.Shaw(x["keys"], x["values"], left=s.either(5, 64), right=s.either(3, 64)),
        ),
        Case(
            "wav2vec2_bert",
            lambda s: {"keys": (s.either(9, 73), s.d)},
            lambda x, s: m.Shaw(x["keys"], left=s.either(7, 64), right=s.either(1, 8)),
        ),
        Case(
            "vits",
            lambda s: {"keys": (1, 9, s.d), "values": (1, 9, s.d_v)},
            lambda x, s: m.VITS(x["keys"], x["values"], window=4),
        ),
        Case(
            "txl",
            lambda s: {"positions": (s.H, 2 * s.reach + 1, s.d), "u": (s.H, s.d), "v_bias": (s.H, s.d)},
            _txl,
        ),
        Case(
            "deberta",
            lambda s: {n: (s.H, s.either(32, 512), s.d) for n in ("pos_key", "pos_query")},
            _deberta,
            _deberta_scale,
        ),
        Case(
            "deberta_v1",
            lambda s: {n: (s.H, s.either(24, 1024), s.d) for n in ("pos_key", "pos_query")},
            lambda x, s: m.DeBERTaV1(x["pos_key"], x["pos_query"], max_relative_positions=s.either(12, 512)),
            _deberta_scale,
        ),
        Case(
            "wavlm",
            lambda s: {"weight": (s.either(32, 320), s.H), "gate": (s.B, s.H, s.Tq)},
            lambda x, s: (m.WavLM(x["weight"], x["gate"], max_distance=s.either(48, 800)),),
        ),
        Case(
            "inkling",
            lambda s: {"proj": (s.either(20, 1024), 16), "left": (s.B, s.H, s.Tq, 16)},
            lambda x, s: (m.Inkling(x["proj"], x["left"]),),
        ),
        Case(
            "explicit",
            lambda s: {"bias": (s.H, 6), "keys": (s.H, 6, s.d), "queries": (6, s.d), "values": (s.H, 6, s.d_v)},
            lambda x, s: (
                t.Scalar(x["bias"], _back_and_forth(s)),
                t.OnQuery(x["keys"], _back_and_forth(s)),
                t.OnKey(x["queries"], _back_and_forth(s)),
                t.OnValue(x["values"], _back_and_forth(s)),
            ),
        ),
        Case(
            "everything",
            lambda s: {
                "weight": (32, s.H), "shaw_keys": (10, s.d), "shaw_values": (10, s.d_v),
                "positions": (s.H, 2 * s.reach + 1, s.d), "u": (s.H, s.d), "v_bias": (s.H, s.d),
                "pos_key": (s.H, 32, s.d), "pos_query": (s.H, 32, s.d), "proj": (20, 16),
                "left": (s.B, s.H, s.Tq, 16), "shared": (6,), "gate": (s.B, s.H, s.Tq),
            },
            _everything,
        ),
    )
}  # fmt: skip
"""Every mechanism that has a constructor, a map that is not monotone, and all kinds of term at once."""


def _padding(s: Sizes, device: torch.device | str, side: str) -> Mask:
    """Batch b keeps fewer keys than batch b − 1, at the end (``left``), at the start, or every third one not."""
    j = torch.arange(s.Tk, device=device)[None]
    b = torch.arange(s.B, device=device)[:, None]
    cut = (b * s.Tk) // (2 * s.B) + s.Tk // 8
    return Mask.padding({"left": j >= cut, "right": j < s.Tk - cut, "holes": (j + b) % 3 != 1}[side])


def _packed(s: Sizes, device: torch.device | str) -> Mask:
    """Three documents along the keys; query i sees the document of key i, queries beyond the last see nothing."""
    ends = [0, s.Tk // 3, s.Tk // 2, s.Tk - s.Tk // 8]
    whole = Mask.packed(torch.tensor(ends, dtype=torch.int32, device=device), total=max(s.Tq, s.Tk))
    return Mask(bounds=whole.bounds[:, : s.Tq].contiguous())


def _intervals(s: Sizes, device: torch.device | str) -> Mask:
    """Chunks of 16 tokens that see their own and the two before."""
    chunk = torch.arange(s.Tq, device=device) // 16
    return Mask.intervals(((chunk - 2) * 16).clamp(0, s.Tk), ((chunk + 1) * 16).clamp(0, s.Tk))


def _dense(s: Sizes, device: torch.device | str) -> Mask:
    """Random entries, other ones for each batch and head, with a row that sees nothing."""
    seen = torch.rand((s.B, s.H, s.Tq, s.Tk), generator=torch.Generator().manual_seed(1)) < 0.7
    seen[:, :, s.Tq // 2] = False
    return Mask.full(seen.to(device))


MASKS: dict[str, Callable[[Sizes, torch.device | str], Mask]] = {
    "none": lambda s, device: Mask(),
    "causal": lambda s, device: Mask.causal(),
    "window": lambda s, device: Mask.window(17, 5),
    "left_padding": lambda s, device: _padding(s, device, "left"),
    "right_padding": lambda s, device: _padding(s, device, "right"),
    "lengths": lambda s, device: Mask.lengths([s.Tk - b * s.Tk // (2 * s.B) for b in range(s.B)]),
    "holes": lambda s, device: _padding(s, device, "holes"),
    "packed": _packed,
    "intervals": _intervals,
    "dense": _dense,
    "causal_padding": lambda s, device: Mask.causal() & _padding(s, device, "left"),
}
"""Every part of a mask, and causal with left padding, where the first queries see no key; (sizes, device) ↦ mask."""
