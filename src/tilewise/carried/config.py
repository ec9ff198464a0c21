"""What a block of layers carries and how: the options of carried attention, checked once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..mask import Mask

__all__ = ["CarriedConfig", "Options"]

SCALINGS = ("sum", "mean", "gain")
PLANS = ("auto", "recompute", "stored", "mixed")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
IMPLS = ("auto", "triton", "blocked", "reference")


@dataclass(frozen=True)
class CarriedConfig:
    """Options of a block of layers whose attention scores accumulate.

    With R_i = s Q_i K_iᵀ (s the scale, position encodings already applied to Q and K) and M_i the mask of layer i,

        Z_i = R_i + β_i C_{i−1}        C_i = Z_i where M_i, else 0        C_{−1} = 0
        P_i = softmax(cap(Z_i / c_i) where M_i, else −∞)        O_i = dropout(P_i) V_i

    β_i = 1 and c_i = 1 for ``sum``, c_i = i + 1 for ``mean``, β_i a gain per head for ``gain``; cap(x) is
    ``softcap · tanh(x / softcap)``. Only scores are carried: softcap, sink, mask and dropout act inside a layer.

    Attributes:
        layers: layers in a block. The first takes no carry, the last one hands none on.
        scaling: ``sum`` (RealFormer's default), ``mean`` (its running mean: the sum is carried, and divided only before
            the softmax) or ``gain`` (every layer but the first takes a tensor [H]).
        detach: stop the gradient at the carry: layer i does not train the queries and keys of the layers before it.
        causal: keys at or before the query only.
        windows: how many keys back a query sees, itself included (and as many ahead without `causal`); one number for
            all layers, or one entry a layer, None for no window. Where windows differ, a layer hands on zero outside
            its own window.
        scale: s; default 1/√d.
        softcap: bound on the scores before the softmax, or None.
        sink: whether layers are given a sink's scores.
        dropout_p: probability of dropping an entry of P in training.
        plan: ``recompute`` (no N² memory; a layer forms the scores of all layers before it again), ``stored`` (the
            scores of every layer but the last are kept), ``mixed`` (one score tensor a block is kept, the rest
            formed again) or ``auto`` (see :func:`tilewise.carried.choose_plan`).
        blocks: blocks whose saved scores are alive at once (1 if whole blocks are checkpointed); for ``auto``.
        impl: ``triton``, ``blocked`` (any device), ``reference`` (dense) or ``auto``. A name never falls back.
        tile: side of a stored tile in tokens.
        carry_dtype: what Z is stored in; default fp16 for 16-bit inputs (bf16 would cost 3 to 26 times attention's own
            error), else the dtype of the inputs. Saturated at the largest finite value.
        centre: where scores are stored, subtract q·k̄ from every row, k̄ the mean of the layer's keys that some query
            sees (0 where it is not finite). The softmax does not see it, and fp16 then spends its digits on
            differences: keys with a large common part would otherwise cost three times attention's own error. Not used
            with softcap, sink or windows that differ.
        grad_dtype: what the gradient E of the carry is stored in; default the dtype of the inputs. It is the operand of
            the products that give dQ and dK, as dS is in every fused attention. fp16 needs the loss scaling that fp16
            training has anyway; bf16 keeps its relative error down to the smallest losses.

    Raises:
        ValueError, TypeError: an option outside its range or of another type, named with the value found.

    Source: He et al. 2021, "RealFormer: Transformer Likes Residual Attention".

    Example:
        >>> CarriedConfig(layers=4, windows=(128, 128, 128, None)).mask(3).left == 2**30
        True
    """

    layers: int = 4
    scaling: str = "sum"
    detach: bool = False
    causal: bool = True
    windows: int | tuple[int | None, ...] | None = None
    scale: float | None = None
    softcap: float | None = None
    sink: bool = False
    dropout_p: float = 0.0
    plan: str = "auto"
    blocks: int = 1
    impl: str = "auto"
    tile: int = 128
    centre: bool = True
    carry_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, value, legal in (
            ("scaling", self.scaling, SCALINGS),
            ("plan", self.plan, PLANS),
            ("impl", self.impl, IMPLS),
        ):
            if value not in legal:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(legal)}")
        for name in ("detach", "causal", "sink", "centre"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; expected True or False")
        for name in ("layers", "blocks", "tile"):
            value = getattr(self, name)
            if not _integer(value):
                raise TypeError(f"{name} is {value!r}; expected an integer")
            if value < 1 and name != "tile":
                raise ValueError(f"{name} is {value}; expected at least 1")
        if self.tile < 16 or self.tile & (self.tile - 1):
            raise ValueError(f"tile is {self.tile}; expected a power of two from 16 on")
        for name, none in (("dropout_p", ""), ("scale", ", or None for 1/√d"), ("softcap", ", or None for no cap")):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and not isinstance(value, bool)) and not (none and value is None):
                raise TypeError(f"{name} is {value!r}; expected a number{none}")
            if none and value is not None and not 0.0 < value < math.inf:
                raise ValueError(f"{name} is {value}; expected a positive, finite number{none}")
        if not 0.0 <= self.dropout_p < 1.0:
            raise ValueError(f"dropout_p is {self.dropout_p}; expected 0 ≤ dropout_p < 1")
        for name in ("carry_dtype", "grad_dtype"):
            value = getattr(self, name)
            if value is not None and value not in DTYPES:
                raise ValueError(f"{name} is {value!r}; expected fp16, bf16, fp32 or fp64, or None")
        self._check_windows()
        if self.impl == "reference" and self.plan not in ("auto", "recompute"):
            raise ValueError(f"impl='reference' has no plan {self.plan!r}; nearest legal call: plan='recompute'")

    def _check_windows(self) -> None:
        windows = self.windows
        if windows is not None and not isinstance(windows, tuple) and not _integer(windows):
            near = f"; nearest legal call: windows={tuple(windows)}" if isinstance(windows, list) else ""
            raise TypeError(f"windows is {windows!r}; expected an integer, a tuple of them, or None{near}")
        if isinstance(windows, tuple) and len(windows) != self.layers:
            raise ValueError(
                f"windows has {len(windows)} entries; expected layers = {self.layers} of them, or one number"
            )
        for window in windows if isinstance(windows, tuple) else (windows,):
            if window is not None and not _integer(window):
                raise TypeError(f"windows holds {window!r}; expected integers, or None")
            if window is not None and window < 1:
                raise ValueError(f"windows holds {window}; expected numbers from 1 on (1 sees itself only), or None")

    def _check_layer(self, layer: int) -> None:
        if not _integer(layer):
            raise TypeError(f"layer is {layer!r}; expected an integer")
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer is {layer}; expected 0 to {self.layers - 1}, an index within its block")

    def window(self, layer: int) -> int | None:
        """The window of a layer, or None."""
        self._check_layer(layer)
        return self.windows[layer] if isinstance(self.windows, tuple) else self.windows

    @property
    def uniform(self) -> bool:
        """True if all layers see the same keys."""
        return not isinstance(self.windows, tuple) or len(set(self.windows)) == 1

    @property
    def centred(self) -> bool:
        """True if stored scores are centred: only where a shift of a row changes nothing."""
        return self.centre and self.softcap is None and not self.sink and self.uniform

    def mask(self, layer: int, base: Mask | None = None) -> Mask:
        """The mask of a layer: `base` and causality and the layer's window."""
        mask = Mask() if base is None else base
        if self.causal:
            mask = mask & Mask.causal()
        window = self.window(layer)
        if window is not None:
            mask = mask & Mask.window(window - 1, 0 if self.causal else window - 1)
        return mask

    def plain(self, layer: int, d: int) -> CarriedConfig:
        """Options of a layer alone that gives softmax(cap(s QKᵀ / c_i)) with the layer's c_i and window: no carry."""
        scale = (d**-0.5 if self.scale is None else self.scale) / self.divisor(layer)
        return replace(self, layers=1, scaling="sum", windows=self.window(layer), scale=scale, plan="auto")

    def divisor(self, layer: int) -> int:
        """c_i: what the accumulated scores are divided by before the softmax."""
        self._check_layer(layer)
        return layer + 1 if self.scaling == "mean" else 1


def _integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Options(NamedTuple):
    """The numbers of one layer's call.

    Attributes:
        scale: s.
        divisor: c_i.
        softcap: the cap, or 0 for none.
        dropout_p: probability of dropping an entry of P.
        tile: side of a packed tile.
        uniform: whether all layers see the same keys.
        back: see :class:`tilewise.carried.layout.TileLayout`.
        rounded: for each summed layer, whether its accumulated scores pass through `carry_dtype`.
        carry_dtype: dtype of the stored scores.
        plain: whether the mask is causality and nothing else.
        window: see :class:`tilewise.carried.layout.LayerTiles`.
    """

    scale: float
    divisor: int
    softcap: float
    dropout_p: float
    tile: int
    uniform: bool
    back: int
    rounded: tuple[bool, ...]
    carry_dtype: torch.dtype
    plain: bool = False
    window: int = 0

    @classmethod
    def of(cls, values: Sequence) -> Options:
        """Options that can be the key of a table, from values as an operator takes them."""
        options = cls(*values)
        return options._replace(rounded=tuple(options.rounded))
