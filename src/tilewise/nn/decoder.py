"""A small Llama-style decoder (RMSNorm, RoPE, SwiGLU, grouped queries) whose residual is standard, Block or Full."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.depth.checks import FLOATS, check_eps, check_int, check_kind
from tilewise.depth.reference import wide
from tilewise.mask import unreadable

from .residual import Residual
from .stream import StandardStream, Stream

__all__ = ["Attend", "Decoder", "DecoderConfig", "KVCache", "rope"]

Attend = Callable[[int, Tensor, Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a :class:`Decoder`.

    Attributes:
        vocab: tokens.
        d: width.
        layers: decoder layers; the residual counts 2 · layers sublayers.
        heads, kv_heads: query heads and key/value heads; d is a multiple of `heads`.
        hidden: width of the SwiGLU.
        residual: `standard`, `block` or `full`.
        block: sublayers a block.
        rope_theta: base of the rotary embedding.
        eps: epsilon of every RMSNorm.
        tied: the output projection is the embedding.

    Raises:
        TypeError: a field of another type.
        ValueError: a number out of its range, heads that do not divide the width, or another kind of residual.
    """

    vocab: int
    d: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    residual: str = "standard"
    block: int = 8
    rope_theta: float = 10000.0
    eps: float = 1e-6
    tied: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab", "d", "layers", "heads", "kv_heads", "hidden", "block"):
            check_int(name, getattr(self, name), 1)
        check_eps("eps", self.eps)
        _check_theta("rope_theta", self.rope_theta)
        check_kind("tied", self.tied, bool, "True or False")
        if self.residual not in ("standard", "block", "full"):
            raise ValueError(f"residual: found {self.residual!r}, expected 'standard', 'block' or 'full'")
        if self.d % self.heads or (self.d // self.heads) % 2:
            raise ValueError(f"d, heads: found {self.d}, {self.heads}, expected an even d / heads")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: found {self.kv_heads}, expected a divisor of heads = {self.heads}")


def _check_theta(name: str, theta: float) -> None:
    """Others give angles that are NaN, or all the same."""
    if not isinstance(theta, (int, float)) or isinstance(theta, bool):
        raise TypeError(f"{name}: found {theta!r}, expected a number > 0")
    if not 0 < theta < math.inf:
        raise ValueError(f"{name}: found {theta}, expected a finite number > 0")


class KVCache:
    """Keys and values of all layers, preallocated: `[layers, B, kv_heads, length, head width]`.

    Args:
        config: the model's sizes.
        batch, length: sequences, and tokens of each that fit.
        device, dtype: of the cache.

    Raises:
        TypeError: no configuration, a size that is no integer, or a dtype that is no float.
        ValueError: a size below 1.
    """

    def __init__(self, config: DecoderConfig, batch: int, length: int, device=None, dtype=None) -> None:
        check_kind("config", config, DecoderConfig, "a DecoderConfig")
        check_int("batch", batch, 1)
        check_int("length", length, 1)
        if dtype is not None and dtype not in FLOATS:
            raise TypeError(f"dtype: found {dtype!r}, expected one of {', '.join(map(str, FLOATS))}")
        shape = (config.layers, batch, config.kv_heads, length, config.d // config.heads)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self._length = self._written = 0

    @property
    def length(self) -> int:
        """Tokens that the next call takes as done. May be set back, never beyond what is written.

        Raises:
            TypeError: set to what is no integer.
            ValueError: set to less than 0, or to more than the tokens written.
        """
        return self._length

    @length.setter
    def length(self, value: int) -> None:
        check_int("length", value, 0, self._written, ", the tokens written so far")
        self._length = value

    def advance(self, tokens: int) -> None:
        """Take `tokens` more as done: all layers have stored them.

        Raises:
            TypeError: no integer.
            ValueError: less than 0, or more than there is room for.
        """
        check_int("tokens", tokens, 0, self.keys.shape[3] - self._length, ", the room that is left")
        self._length += tokens
        self._written = self._length

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append to one layer and return its keys and values so far; `length` moves when the whole step is done.

        Raises:
            TypeError: a layer that is no integer, or keys and values that are no tensors.
            ValueError: no such layer, or the cache is full, or of another shape, dtype or device than keys and values.
        """
        check_int("layer", layer, 0, self.keys.shape[0] - 1)
        for name, x in (("k", k), ("v", v)):
            check_kind(name, x, Tensor, "a tensor [B, kv_heads, T, head width]")
        if k.ndim != 4:
            raise ValueError(f"k: found {tuple(k.shape)}, expected [B, kv_heads, T, head width]")
        end = self.length + k.shape[2]
        if end > self.keys.shape[3]:
            raise ValueError(f"cache: found {end} tokens, expected at most {self.keys.shape[3]}")
        own = self.keys[layer]
        legal = (*own.shape[:2], k.shape[2], own.shape[3])
        for name, x in (("k", k), ("v", v)):
            # Autocast's products are narrower than the cache, and attention takes both.
            same = x.dtype == own.dtype or torch.is_autocast_enabled(x.device.type)
            if x.shape != legal or not same or x.device != own.device:
                raise ValueError(
                    f"cache: found {name} {tuple(x.shape)} {x.dtype} on {x.device}, expected {legal} {own.dtype} on "
                    f"{own.device}, as the cache was made"
                )
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


def rope(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """(cos, sin) `[T, width / 2]` in fp32.

    Raises:
        TypeError: no tensor of positions, or a width or base that is no number.
        ValueError: positions that are not `[T]`, an odd width, or a base that is not positive and finite.
    """
    check_kind("positions", positions, Tensor, "a tensor [T]")
    if positions.ndim != 1:
        raise ValueError(f"positions: found {tuple(positions.shape)}, expected [T]")
    check_int("width", width, 2)
    if width % 2:
        raise ValueError(f"width: found {width}, expected an even number")
    _check_theta("theta", theta)
    frequency = theta ** (-torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    angle = positions[:, None] * frequency
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = wide(x).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def causal_attention() -> Attend:
    """The default attention of a :class:`Decoder`, without state between layers; a function by name pickles."""
    return causal


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor, offset: int) -> Tensor:
    """Causal softmax attention; query i sees keys up to i + offset."""
    del layer
    if not offset:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    i = torch.arange(q.shape[2], device=q.device)[:, None] + offset
    mask = i >= torch.arange(k.shape[2], device=q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class Attention(nn.Module):
    """From a normalised input to an update; heads may be a part of the model's under tensor parallelism."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.width = config.d // config.heads
        self.q = nn.Linear(config.d, config.heads * self.width, bias=False)
        self.k = nn.Linear(config.d, config.kv_heads * self.width, bias=False)
        self.v = nn.Linear(config.d, config.kv_heads * self.width, bias=False)
        self.o = nn.Linear(config.heads * self.width, config.d, bias=False)

    def forward(self, x: Tensor, layer: int, angles: tuple[Tensor, Tensor], attend: Attend, cache: KVCache | None):
        q, k, v = (f(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = _rotate(q, *angles), _rotate(k, *angles)
        offset = 0
        if cache is not None:
            offset = cache.length
            k, v = cache.store(layer, k, v)
        return self.o(attend(layer, q, k, v, offset).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU, from a normalised input to an update."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.d, config.hidden, bias=False)
        self.up = nn.Linear(config.d, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Two sublayers on a stream. The norms' weights live here, outside the modules that FSDP shards one by one."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.attention_norm = nn.Parameter(torch.ones(config.d))
        self.mlp_norm = nn.Parameter(torch.ones(config.d))
        self.attention, self.mlp = Attention(config), MLP(config)

    def forward(self, stream: Stream | StandardStream, angles, attend: Attend, cache: KVCache | None = None) -> None:
        l = 2 * self.index
        x = stream.read(l, self.attention_norm)
        stream.write(l, self.attention(x, self.index, angles, attend, cache))
        stream.write(l + 1, self.mlp(stream.read(l + 1, self.mlp_norm)))


class Decoder(nn.Module):
    """A Llama-style language model over a residual stream.

    Args:
        config: sizes and the kind of residual.
        attention: called once a forward pass; returns the function (layer, q, k, v, offset) → o that attends. It may
            keep state from layer to layer. The default is causal `scaled_dot_product_attention`. A model that is
            pickled whole (`torch.save(model)`, spawned processes) needs a function by name here, no lambda.

    Example:
        >>> model = Decoder(DecoderConfig(vocab=256, d=64, layers=2, heads=4, kv_heads=2, hidden=128, residual="block"))
        >>> model(torch.randint(256, (2, 16))).shape
        torch.Size([2, 16, 256])
    """

    def __init__(self, config: DecoderConfig, attention: Callable[[], Attend] = causal_attention) -> None:
        super().__init__()
        check_kind("config", config, DecoderConfig, "a DecoderConfig")
        check_kind("attention", attention, Callable, "a function that returns the function that attends")
        self.config, self.attention = config, attention
        self.embedding = nn.Embedding(config.vocab, config.d)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.residual = Residual(config.d, 2 * config.layers, config.residual, config.block, eps=config.eps)
        self.norm = nn.Parameter(torch.ones(config.d))
        self.head = nn.Linear(config.d, config.vocab, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2 and not name.startswith("residual."):
                scale = (2 * config.layers) ** -0.5 if name.endswith(("o.weight", "down.weight")) else 1.0
                nn.init.normal_(p, std=0.02 * scale)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        *,
        residual: Callable[..., Stream] | None = None,
        recompute: bool = False,
    ) -> Tensor:
        """Logits `[B, T, vocab]`.

        Args:
            tokens: `[B, T]`.
            cache: keys and values of earlier tokens; this call appends its own. Any number of tokens a call.
            residual: called with (embedding, norms=weights of all input norms), makes the stream instead of the model's
                own residual: an :class:`tilewise.depth.InferenceState`, a
                :class:`tilewise.depth.parallel.SequenceSharded`.
            recompute: activation checkpointing, one decoder layer at a time; for training, so without a cache.

        Raises:
            TypeError: tokens that are no integers, or a cache that is none.
            ValueError: tokens that are not `[B, T]` or, where they are on the CPU, outside the vocabulary, a cache of
                another batch or number of layers, or `recompute` with a cache, which a second run of a layer would
                write again.
        """
        check_kind("tokens", tokens, Tensor, "a tensor [B, T] of integers")
        if tokens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"tokens: found {tokens.dtype}, expected torch.int64 or torch.int32")
        if tokens.ndim != 2:
            raise ValueError(f"tokens: found {tuple(tokens.shape)}, expected [B, T]")
        self._check_numbers(tokens)
        check_kind("recompute", recompute, bool, "True or False")
        if residual is not None and not callable(residual):
            raise TypeError(f"residual: found {type(residual).__name__}, expected what makes a stream, or None")
        check_kind("cache", cache, (KVCache, type(None)), "a KVCache or None")
        if cache is not None and recompute:
            raise ValueError("recompute: found True with a cache, expected one of the two; pass recompute=False")
        if cache is not None and tokens.shape[0] != cache.keys.shape[1]:
            raise ValueError(
                f"tokens: found {tokens.shape[0]} sequences, expected {cache.keys.shape[1]}, the cache's batch"
            )
        if cache is not None and cache.keys.shape[0] != len(self.layers):
            raise ValueError(f"cache: found {cache.keys.shape[0]} layers, expected {len(self.layers)}")
        start = 0 if cache is None else cache.length
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        angles = rope(positions, self.config.d // self.config.heads, self.config.rope_theta)
        attend = self.attention()
        norms = [weight for layer in self.layers for weight in (layer.attention_norm, layer.mlp_norm)]
        stream = (residual or self.residual)(self.embedding(tokens), norms=norms)
        for layer in self.layers:
            if recompute:
                stream.checkpoint(layer, angles, attend)
            else:
                layer(stream, angles, attend, cache)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return self.head(stream.output(self.norm))

    def _check_numbers(self, tokens: Tensor) -> None:
        # Reading a GPU's numbers would stall its stream.
        if type(tokens) is not Tensor or tokens.device.type != "cpu" or unreadable():
            return
        if tokens.numel():
            low, high = (int(x) for x in torch.aminmax(tokens))
            if low < 0 or high >= self.config.vocab:
                raise ValueError(f"tokens: found {low} to {high}, expected 0 to {self.config.vocab - 1}")

    def loss(self, tokens: Tensor, **options) -> Tensor:
        """Mean next-token cross entropy of `[B, T + 1]` tokens, in nats.

        Raises:
            TypeError, ValueError: as the model's call; fewer than two tokens, of which none is predicted.
        """
        check_kind("tokens", tokens, Tensor, "a tensor [B, T + 1] of integers")
        if tokens.ndim != 2 or tokens.shape[0] == 0 or tokens.shape[1] < 2:
            raise ValueError(f"tokens: found {tuple(tokens.shape)}, expected [B, T + 1] with T >= 1: one to predict")
        self._check_numbers(tokens)
        logits = self(tokens[:, :-1], **options)
        return F.cross_entropy(wide(logits.flatten(0, 1)), tokens[:, 1:].flatten())
