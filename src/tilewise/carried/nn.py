"""Layers for one's own model: attention that carries its scores, and the block that starts and ends the carry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..mask import Mask
from .arguments import (
    check_base,
    check_flag,
    check_hidden,
    check_integer,
    check_positions,
    check_rotary_width,
    require,
)
from .config import CarriedConfig
from .layout import TileLayout
from .policy import Decision
from .shared_keys import SharedKeyCarry, shared_key_attention
from .state import Carry, carried_attention

__all__ = ["Angles", "CarriedAttention", "CarriedBlock", "rotary", "rotate"]


def rotary(positions: Tensor, d: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """cos and sin [T or B, T, d/2] in fp32 of rotary position encoding (Su et al. 2021, arXiv 2104.09864).

    Raises:
        TypeError: positions that are no tensor of integers (or, for interpolated ones, of fp32 or fp64).
        ValueError: positions that are not [T] or [B, T], an odd width, or a base that is not positive and finite.
    """
    check_positions(positions)
    check_rotary_width("d", d)
    check_base("base", base)
    frequency = base ** (-torch.arange(0, d, 2, dtype=torch.float32, device=positions.device) / d)
    angle = positions[..., None].to(torch.float32) * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of the last dimension of x [B, H, T, d] into each other, with what :func:`rotary` returned.

    Raises:
        TypeError: no tensors.
        ValueError: angles of another width or number of tokens.
    """
    for name, t in (("x", x), ("cos", cos), ("sin", sin)):
        require(name, t, Tensor)
    if x.dim() != 4:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected [B, H, T, d]")
    for name, t in (("cos", cos), ("sin", sin)):
        if not _fits(t.shape[:-1], x.shape[0], x.shape[2]) or 2 * t.shape[-1] != x.shape[3]:
            B, _, T, d = x.shape
            raise ValueError(f"{name} has shape {tuple(t.shape)}; expected [{T}, {d / 2:g}] or [{B}, {T}, {d / 2:g}]")
    cos, sin = (t if t.dim() == 2 else t[:, None] for t in (cos, sin))
    return _turned(x, cos, sin)


def _fits(shape: tuple[int, ...], B: int, T: int) -> bool:
    """Whether positions of this shape are those of B sequences of T tokens: [T], [1, T] or [B, T]."""
    return len(shape) in (1, 2) and shape[-1] == T and (len(shape) == 1 or shape[0] in (1, B))


class Angles:
    """Rotary angles of all layers of a forward pass, made once: a layer would start eight kernels for its own.

    A plain class for the reason that :class:`Carry` is one: frameworks that cast floating arguments to 16 bits leave
    it alone.

    Args:
        positions: integers [T] or [B, T].
        d: head width.
        base: of the frequencies.

    Attributes:
        cos, sin: [T or B, T, 1, d/2] in fp32, for rows by token.
        of: (d, base), which a layer's have to equal.

    Raises:
        ValueError, TypeError: as :func:`rotary`.

    Example:
        >>> attention = CarriedAttention(32, 4)
        >>> x, at = torch.randn(1, 10, 32), torch.arange(10)
        >>> here, there = (attention(x, Carry(), p)[0] for p in (at, Angles(at, 8)))
        >>> torch.equal(here, there)
        True
    """

    def __init__(self, positions: Tensor, d: int, base: float = 10000.0) -> None:
        self.cos, self.sin = (t.unsqueeze(-2) for t in rotary(positions, d, base))
        self.of = (d, base)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class CarriedAttention(nn.Module):
    """Grouped-query attention of one layer of a block: projections, rotary positions, carried scores, output gate.

    Args:
        width: of the residual stream.
        heads, kv_heads: query heads H and key-value heads Hk.
        head_width: d; default width / heads.
        config: the block's options; without them the layer takes a carry of any that have neither gains nor a sink.
        layer: index of this layer in its block.
        gated: multiply O with sigmoid(W_g x) before the output projection, element by element (gated attention, Qiu et
            al. 2025, arXiv 2505.06708).
        qk_norm: RMS norm of every head's queries and keys.
        rotary_base: base of the rotary frequencies, or None for no position encoding here.
        shared_keys: take keys and values from the block's first layer, so that the carry folds into the queries.

    Inputs of forward:
        x: [B, T, width]. carry: :class:`Carry` (:class:`SharedKeyCarry` with `shared_keys`). positions: integers [T] or
        [B, T], default 0 …, or their :class:`Angles`, made once for many layers. memory: the hidden state that keys and
        values are projected from; default x. shared: (K, V) of the block's first layer, with `shared_keys` and
        layer > 0.

    Scores are dropped (`config.dropout_p`) only while the module is in training, as in :class:`torch.nn.Dropout`.

    Returns:
        The layer's output [B, T, width], the next carry, and this layer's (K, V).

    Raises:
        ValueError, TypeError: an argument of another type, shape or range, named with what was found and expected; a
            carry that was made with options under which this layer would compute something else.
    """

    def __init__(
        self, width: int, heads: int, kv_heads: int | None = None, head_width: int | None = None, *,
        config: CarriedConfig | None = None, layer: int = 0, gated: bool = False, qk_norm: bool = False,
        rotary_base: float | None = 10000.0, shared_keys: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        told = config is not None
        config = config if told else CarriedConfig()
        require("config", config, CarriedConfig)
        for name, value in (("width", width), ("heads", heads), ("kv_heads", kv_heads), ("head_width", head_width)):
            if value is not None or name in ("width", "heads"):
                check_integer(name, value)
        for name, value in (("gated", gated), ("qk_norm", qk_norm), ("shared_keys", shared_keys)):
            check_flag(name, value)
        check_integer("layer", layer, None)
        if rotary_base is not None:
            check_base("rotary_base", rotary_base, ", or None for no position encoding here")
        if head_width is None and width % heads:
            raise ValueError(f"width is {width}; expected a multiple of heads = {heads}, or a head_width")
        kv_heads, head_width = kv_heads or heads, head_width or width // heads
        if heads % kv_heads:
            raise ValueError(f"kv_heads is {kv_heads}; expected a divisor of heads = {heads}")
        if rotary_base is not None and head_width % 2:
            raise ValueError(f"head_width is {head_width}; expected an even number, or rotary_base=None")
        if not 0 <= layer < config.layers:
            raise ValueError(f"layer is {layer}; expected 0 to {config.layers - 1}, an index within its block")
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, head_width
        self.width = width
        self.config, self.shared_keys, self.rotary_base = config, shared_keys, rotary_base
        self._told = told
        self.query = nn.Linear(width, heads * head_width, bias=False)
        owner = not shared_keys or layer == 0
        self.key = nn.Linear(width, kv_heads * head_width, bias=False) if owner else None
        self.value = nn.Linear(width, kv_heads * head_width, bias=False) if owner else None
        self.out = nn.Linear(heads * head_width, width, bias=False)
        self.gate = nn.Linear(width, heads * head_width, bias=False) if gated else None
        self.query_norm = nn.RMSNorm(head_width) if qk_norm else None
        self.key_norm = nn.RMSNorm(head_width) if qk_norm and owner else None
        self.gain = nn.Parameter(torch.ones(heads)) if self.config.scaling == "gain" and layer > 0 else None
        self.sink = nn.Parameter(torch.zeros(heads)) if self.config.sink else None

    def project(
        self, x: Tensor, positions: Tensor | Angles | None = None, memory: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Q, K, V as attention takes them; K and V are None where the layer has none of its own."""
        check_hidden("x", x, self.width)
        if memory is not None:
            check_hidden("memory", memory, self.width)
            if memory.shape[0] != x.shape[0] or (self.rotary_base is not None and memory.shape[1] != x.shape[1]):
                T = "Tk" if self.rotary_base is None else x.shape[1]
                raise ValueError(
                    f"memory has shape {tuple(memory.shape)}; expected [{x.shape[0]}, {T}, {self.width}] to fit x"
                )
        angles = None
        if self.rotary_base is not None:
            positions = torch.arange(x.shape[1], device=x.device) if positions is None else positions
            needed = (self.head_width, self.rotary_base)
            angles = positions if isinstance(positions, Angles) else Angles(positions, *needed)
            if angles.of != needed:
                raise ValueError(f"positions are angles of (d, base) = {angles.of}; expected {needed}, this layer's")
            B, T, _ = x.shape
            found = tuple(angles.cos.shape[:-2])
            if found != (T,) and not _fits(found, B, T):
                raise ValueError(f"positions has shape {found}; expected [{T}] or [{B}, {T}] to fit x {tuple(x.shape)}")
            if angles.cos.device != x.device:
                raise ValueError(f"positions is on {angles.cos.device}; expected {x.device}, where x is")
        q = self._split(self.query, x, self.heads, self.query_norm, angles)
        if self.key is None:
            return q, None, None
        source = x if memory is None else memory
        k = self._split(self.key, source, self.kv_heads, self.key_norm, angles)
        return q, k, self._split(self.value, source, self.kv_heads)

    def _split(
        self, linear: nn.Linear, x: Tensor, heads: int, norm: nn.Module | None = None, angles: Angles | None = None,
    ) -> Tensor:  # fmt: skip
        y = linear(x).view(*x.shape[:2], heads, self.head_width)
        y = y if norm is None else norm(y)
        # By token in memory all the way: neither Q, K nor their gradients are copied for the projections.
        y = y if angles is None else _turned(y, angles.cos, angles.sin)
        return y.transpose(1, 2)

    def merge(self, O: Tensor, x: Tensor) -> Tensor:
        """The layer's output from O [B, H, T, d]."""
        check_hidden("x", x, self.width)
        require("O", O, Tensor)
        expected = (x.shape[0], self.heads, x.shape[1], self.head_width)
        if tuple(O.shape) != expected:
            raise ValueError(f"O has shape {tuple(O.shape)}; expected {expected} to fit x {tuple(x.shape)}")
        return self._merged(O, x)

    def _merged(self, O: Tensor, x: Tensor) -> Tensor:
        y = O.transpose(1, 2).reshape(*x.shape[:2], self.heads * self.head_width)
        return self.out(y if self.gate is None else y * torch.sigmoid(self.gate(x)))

    def forward(
        self, x: Tensor, carry: Carry | SharedKeyCarry, positions: Tensor | Angles | None = None, *,
        memory: Tensor | None = None, shared: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Carry | SharedKeyCarry, tuple[Tensor, Tensor]]:  # fmt: skip
        q, k, v = self.project(x, positions, memory)
        self._check(carry, shared)
        if self.shared_keys:
            if k is None:
                k, v = shared
            O, carry = shared_key_attention(q, k, v, carry, gain=self.gain, sink=self.sink, training=self.training)
        else:
            O, carry = carried_attention(q, k, v, carry, gain=self.gain, sink=self.sink, training=self.training)
        return self._merged(O, x), carry, (k, v)

    def _check(self, carry: Carry | SharedKeyCarry, shared: tuple[Tensor, Tensor] | None) -> None:
        """The carry says what is computed, where the layer has been told the same; and no keys are passed over."""
        # Another kind is the attention's to refuse, which a benchmark may have put its own in place of.
        known = isinstance(carry, SharedKeyCarry if self.shared_keys else Carry)
        if known and self._told and carry.config is not self.config:
            self._check_same_function(carry.config, carry.index)
        if self.key is not None:
            if shared is not None:
                raise ValueError("shared is given; expected None: this layer has keys and values of its own")
            if known and self.shared_keys and carry.index > 0:
                raise ValueError(
                    f"carry stands before layer {carry.index}; expected the start of a block: this layer has the keys "
                    "that all share. Nearest legal call: CarriedAttention(…, layer=i, shared_keys=True) for layer i"
                )
        elif shared is None:
            raise ValueError("shared is None; expected (K, V) of the block's first layer")
        elif not isinstance(shared, tuple | list) or len(shared) != 2:
            raise TypeError(f"shared is a {type(shared).__name__}; expected (K, V) of the block's first layer")

    def _check_same_function(self, found: CarriedConfig, layer: int) -> None:
        """Another block's options give layer `layer` the same equation: how it is computed may differ, and the length.

        Not compared are `detach` where no gradient is recorded, and dropout, which is often annealed.
        """
        expected, usual = self.config, self.head_width**-0.5
        for name in _FUNCTION:
            mine, theirs = getattr(expected, name), getattr(found, name)
            same = mine == theirs
            if name == "scale":
                same = (usual if mine is None else mine) == (usual if theirs is None else theirs)
            elif name == "detach":
                same = same or not torch.is_grad_enabled()
            if not same:
                raise ValueError(
                    f"carry was made with {name} = {theirs!r}; expected {mine!r}, as the layer's config says"
                )
        if layer < expected.layers and found.window(layer) != expected.window(layer):
            raise ValueError(
                f"carry was made with window = {found.window(layer)} for layer {layer}; expected "
                f"{expected.window(layer)}, as the layer's config says"
            )


_FUNCTION = ("scaling", "detach", "causal", "scale", "softcap", "sink")


class CarriedBlock(nn.Module):
    """Layers among which scores are carried; the carry starts and ends inside, so a block is the unit to checkpoint,
    to wrap in FSDP, to cut a pipeline at and to compile.

    Args:
        layers: modules called as ``layer(x, carry, **kwargs)`` that return (x, carry, …).
        config: the block's options; `config.layers` at least the number of layers (a last block may be shorter).
        checkpointed: keep only the block's input and form the rest again in the backward pass.
        start: makes the carry of a forward pass from (config, mask, layout); default :class:`Carry`.

    Raises:
        ValueError, TypeError: an argument of another type, or another number of layers, named.

    Example:
        >>> config = CarriedConfig(layers=2, tile=16)
        >>> block = CarriedBlock([CarriedAttention(32, 4, 2, config=config, layer=i) for i in range(2)], config)
        >>> block(torch.randn(1, 10, 32)).shape
        torch.Size([1, 10, 32])
    """

    def __init__(
        self, layers: Iterable[nn.Module], config: CarriedConfig, *, checkpointed: bool = False,
        start: Callable[[CarriedConfig, Mask | None, TileLayout | None], Carry | SharedKeyCarry] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        require("config", config, CarriedConfig)
        check_flag("checkpointed", checkpointed)
        if start is not None and not callable(start):
            raise TypeError(f"start is a {type(start).__name__}; expected a function of (config, mask, layout)")
        self.layers = nn.ModuleList(layers)
        if not 0 < len(self.layers) <= config.layers:
            raise ValueError(f"the block has {len(self.layers)} layers; expected 1 to config.layers = {config.layers}")
        self.config, self.checkpointed = _shortened(config, len(self.layers)), checkpointed
        self.start = start or _start

    def forward(self, x: Tensor, *, mask: Mask | None = None, layout: TileLayout | None = None, **kwargs) -> Tensor:
        if self.checkpointed and torch.is_grad_enabled():
            # The plan is picked once: when the block runs again other memory is free.
            kept = None if torch.compiler.is_compiling() else []
            return checkpoint(self._run, x, mask, layout, kept, use_reentrant=False, **kwargs)
        return self._run(x, mask, layout, **kwargs)

    def _run(
        self, x: Tensor, mask: Mask | None, layout: TileLayout | None, kept: list[Decision] | None = None, **kwargs
    ) -> Tensor:
        carry = self._begin(mask, layout, kept)
        for layer in self.layers:
            x, carry, *_ = layer(x, carry, **kwargs)
        return x

    def _begin(
        self, mask: Mask | None, layout: TileLayout | None, kept: list[Decision] | None
    ) -> Carry | SharedKeyCarry:
        carry = self.start(self.config, mask, layout)
        if isinstance(carry, Carry):
            carry._kept = kept
        return carry


def _start(config: CarriedConfig, mask: Mask | None, layout: TileLayout | None) -> Carry:
    # A function with a name, as pickle wants it.
    return Carry(config, mask, layout=layout)


def _shortened(config: CarriedConfig, layers: int) -> CarriedConfig:
    """The options of a block of fewer layers, whose last one then hands nothing on."""
    windows = config.windows[:layers] if isinstance(config.windows, tuple) else config.windows
    return dataclasses.replace(config, layers=layers, windows=windows)
