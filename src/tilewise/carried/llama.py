"""A small Llama-style language model whose attention carries its scores within blocks of layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..mask import Mask
from .arguments import check_base, check_flag, check_integer, check_tokens, require
from .cache import KeyValueCache
from .config import CarriedConfig
from .inference import carried_decode
from .layout import TileLayout
from .nn import Angles, CarriedAttention, CarriedBlock
from .policy import Decision
from .shared_keys import SharedKeyCarry, fold_queries, shared_key_attention
from .state import Carry, carried_attention

__all__ = ["CarriedLlama", "KeyValueCache", "LlamaOptions"]


@dataclass(frozen=True)
class LlamaOptions:
    """Sizes and variants of :class:`CarriedLlama`.

    Attributes:
        vocabulary, width, layers, heads, kv_heads, hidden: sizes; `hidden` is the SwiGLU's.
        carried: options of a block; ``layers=1`` in it is the model without carry.
        gated, qk_norm: see :class:`CarriedAttention`.
        keys: ``own``; ``hidden`` (every layer projects its keys and values from the hidden state that enters its
            group of layers, as SwiftKV's SingleInputKV); ``shared`` (the block's first layer's keys and values serve
            all of its layers, and the carry folds into the queries).
        group: layers in a group of ``hidden``; default those of a block. One of the two divides the other, so that
            layers may take keys from an earlier hidden state with no carry, or with one of another length.
        rotary_base: base of the rotary frequencies.

    Raises:
        ValueError, TypeError: an option outside its range or of another type, named with the value found.
    """

    vocabulary: int = 256
    width: int = 64
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 192
    carried: CarriedConfig = field(default_factory=CarriedConfig)
    gated: bool = False
    qk_norm: bool = False
    keys: str = "own"
    group: int | None = None
    rotary_base: float = 10000.0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "kv_heads", "hidden"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected an integer from 1 on")
        require("carried", self.carried, CarriedConfig)
        for name in ("gated", "qk_norm"):
            check_flag(name, getattr(self, name))
        check_base("rotary_base", self.rotary_base)
        if self.keys not in ("own", "hidden", "shared"):
            raise ValueError(f"keys is {self.keys!r}; expected own, hidden or shared")
        if self.group is not None:
            if self.keys != "hidden":
                raise ValueError(f"group is {self.group} but keys is {self.keys!r}; expected keys='hidden'")
            check_integer("group", self.group, none=", or None for the layers of a block")
            small, large = sorted((self.group, self.carried.layers))
            if large % small:
                raise ValueError(
                    f"group is {self.group}; expected a divisor or a multiple of carried.layers = {self.carried.layers}"
                )

    def refreshes(self, layer: int) -> bool:
        """Whether keys and values of layer `layer` of the model, and of the next ones, come from what enters it."""
        return self.keys == "hidden" and layer % (self.group or self.carried.layers) == 0


class DecoderLayer(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, options: LlamaOptions, layer: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(options.width)
        self.attention = CarriedAttention(
            options.width, options.heads, options.kv_heads, config=options.carried, layer=layer, gated=options.gated,
            qk_norm=options.qk_norm, rotary_base=options.rotary_base, shared_keys=options.keys == "shared",
        )  # fmt: skip
        self.mlp_norm = nn.RMSNorm(options.width)
        self.up = nn.Linear(options.width, 2 * options.hidden, bias=False)
        self.down = nn.Linear(options.hidden, options.width, bias=False)

    def feed_forward(self, x: Tensor) -> Tensor:
        a, b = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(a) * b)

    def forward(self, x, carry, *, positions, memory=None, shared=None):
        memory = None if memory is None else self.norm(memory)
        y, carry, kv = self.attention(self.norm(x), carry, positions, memory=memory, shared=shared)
        return self.feed_forward(x + y), carry, kv


def _start_shared(config: CarriedConfig, mask: Mask | None, layout: TileLayout | None) -> SharedKeyCarry:
    return SharedKeyCarry(config, mask, layout=layout)


class LlamaBlock(CarriedBlock):
    """The layers of one block, and what they take from its first."""

    def __init__(self, options: LlamaOptions, first: int, layers: int, checkpointed: bool) -> None:
        start = _start_shared if options.keys == "shared" else None
        super().__init__(
            [DecoderLayer(options, i) for i in range(layers)], options.carried, checkpointed=checkpointed, start=start
        )
        self.options, self.first, self.keys = options, first, options.keys

    def _run(
        self, x: Tensor, mask: Mask | None, layout: TileLayout | None, kept: list[Decision] | None = None, *,
        memory: Tensor | None = None, **kwargs,
    ) -> Tensor:  # fmt: skip
        carry, shared = self._begin(mask, layout, kept), None
        for i, layer in enumerate(self.layers):
            memory = x if self.options.refreshes(self.first + i) else memory
            x, carry, kv = layer(x, carry, memory=memory, shared=shared, **kwargs)
            shared = kv if self.keys == "shared" else None
        return x

    def step(self, x: Tensor, cache: KeyValueCache, positions: Angles, memory: Tensor | None) -> Tensor:
        """New tokens x against the cache; nothing is dropped."""
        first = self.first
        shared, few = self.keys == "shared", x.shape[1] <= KeyValueCache.FEW
        carry = SharedKeyCarry(self.config) if shared else Carry(self.config)
        row = folded = None
        for i, layer in enumerate(self.layers):
            memory = x if self.options.refreshes(first + i) else memory
            h, attention = layer.norm(x), layer.attention
            q, k, v = attention.project(h, positions, None if memory is None else layer.norm(memory))
            k, v = cache.append(first + i, k, v) if k is not None else cache.entry(first)
            gain, sink = attention.gain, attention.sink
            if few and shared:
                folded = fold_queries(q, folded, gain)
                plain = self.config.plain(i, q.shape[-1])
                O, _ = carried_decode(folded.to(q.dtype) if i else q, k, v, None, 0, plain, sink=sink)
            elif few:
                O, row = carried_decode(q, k, v, row, i, self.config, gain=gain, sink=sink)
            else:
                attend = shared_key_attention if shared else carried_attention
                O, carry = attend(q, k, v, carry, gain=gain, sink=sink, training=False)
            x = layer.feed_forward(x + attention.merge(O, h))
        return x


class CarriedLlama(nn.Module):
    """Tokens to logits. The carry lives inside blocks: checkpoint, shard, compile or cut the model between them.

    Args:
        options: sizes and variants.
        checkpointed: activation checkpointing of whole blocks.

    Raises:
        TypeError: an argument of another type.

    Example:
        >>> model = CarriedLlama(LlamaOptions(layers=4, carried=CarriedConfig(layers=2)))
        >>> tokens = torch.randint(256, (2, 17))
        >>> model(tokens).shape, model.loss(tokens).shape
        (torch.Size([2, 17, 256]), torch.Size([]))
    """

    def __init__(self, options: LlamaOptions | None = None, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.options = options = LlamaOptions() if options is None else options
        require("options", options, LlamaOptions)
        per = options.carried.layers
        self.embedding = nn.Embedding(options.vocabulary, options.width)
        self.blocks = nn.ModuleList(
            LlamaBlock(options, i, min(per, options.layers - i), checkpointed) for i in range(0, options.layers, per)
        )
        self.norm = nn.RMSNorm(options.width)
        self.head = nn.Linear(options.width, options.vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                ends = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * options.layers) ** 0.5 if ends else 0.02)

    def forward(
        self, tokens: Tensor, *, mask: Mask | None = None, layout: TileLayout | None = None,
        cache: KeyValueCache | None = None, positions: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Logits [B, T, vocabulary] of tokens [B, T].

        Args:
            mask: documents or lengths (training). layout: made from it for all blocks; by default here. A layout's own
            mask holds where `mask` is not given.
            cache: for inference: the tokens follow those in the cache; equal lengths, no mask and no layout.
            positions: [T] or [B, T], default 0 … (after the cache's tokens).

        Attention drops scores (`carried.dropout_p`) in training and without a cache only.

        Raises:
            ValueError, TypeError: tokens that are no numbers [B, T] of the vocabulary (numbers are read on the CPU
                only), or an argument of another type or size, named.
        """
        check_tokens(tokens, 1, "", self.options.vocabulary)
        if cache is not None:
            require("cache", cache, KeyValueCache)
            if mask is not None:
                raise ValueError("mask is given with a cache; expected sequences of equal length and no mask")
            if layout is not None:
                raise ValueError("layout is given with a cache; expected None: a step makes its own")
        if layout is not None:
            require("layout", layout, TileLayout)
            if layout.offset:
                raise ValueError(
                    f"layout was made for offset = {layout.offset}; expected 0: queries and keys are alike"
                )
            # Blocks that make a layout of their own, as a shorter last one does, have it from the mask.
            mask = layout.mask if mask is None else mask
        past = 0 if cache is None else cache.length
        if positions is None:
            positions = torch.arange(past, past + tokens.shape[1], device=tokens.device)
        first = self.blocks[0].layers[0].attention
        angles = Angles(positions, first.head_width, first.rotary_base)
        x, memory, per = self.embedding(tokens), None, self.options.carried.layers
        if layout is None and cache is None and self.options.keys != "shared" and len(self.blocks[0].layers) == per:
            # A hundred small operations: without this every block makes its own.
            layout = TileLayout(self.options.carried, *(tokens.shape[1:] * 2), mask, device=tokens.device)
        for block in self.blocks:
            memory = x if self.options.refreshes(block.first) else memory
            if cache is None:
                whole = len(block.layers) == per
                x = block(x, mask=mask, layout=layout if whole else None, positions=angles, memory=memory)
            else:
                x = block.step(x, cache, angles, memory)
        if cache is not None:
            cache.advance()
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor, **kwargs) -> Tensor:
        """Mean cross-entropy of every token after the first, in nats; tokens [B, T], T at least 2."""
        check_tokens(tokens, 2, ": one to predict", self.options.vocabulary)
        logits = self(tokens[:, :-1], **kwargs)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, *, chunk: int | None = None) -> Tensor:
        """`count` greedy tokens after tokens [B, T]; the prompt is read in chunks of `chunk` tokens."""
        check_tokens(tokens, 1, "", self.options.vocabulary)
        count = check_integer("count", count, 0)
        if chunk is not None:
            chunk = check_integer("chunk", chunk, none=", or None for the whole prompt at once")
        cache = KeyValueCache(tokens.shape[1] + count)
        for part in tokens.split(chunk or tokens.shape[1], 1):
            logits = self(part, cache=cache)
        new = []
        for _ in range(count):
            new.append(logits[:, -1:].argmax(-1))
            if len(new) < count:
                logits = self(new[-1], cache=cache)
        return torch.cat(new, 1) if new else tokens[:, :0]
