"""The systems of the carried set: every plan of carried attention, the carry as one writes it in PyTorch, and attention
without a carry, in a block of layers and in a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..carried import CarriedConfig, Carry, TileLayout, carried_attention, choose_plan
from ..carried import nn as modules
from ..carried.llama import CarriedLlama, LlamaOptions
from .cells import Cell

__all__ = ["CEILINGS", "PER_BLOCK", "SYSTEMS", "Shape", "attend_of", "attention", "block", "config_of", "decision",
           "layers_of", "model_of", "substituted", "without_carry"]  # fmt: skip

PER_BLOCK = 4
"""Layers among which scores are carried."""

_PLANS = {
    "tilewise": "auto",
    "tilewise-recompute": "recompute",
    "tilewise-stored": "stored",
    "tilewise-mixed": "mixed",
}
CEILINGS = ("no-carry", "plain", "plain-flash", "plain-flex")
"""Without a carry: our kernels, PyTorch's attention (cuDNN, with a window flash), its flash and its FlexAttention."""
SYSTEMS = (*_PLANS, "eager", *CEILINGS)

Attend = Callable[..., tuple[Tensor, object]]


class Shape(NamedTuple):
    """Tokens T of one sequence, window (None: none), layers, query and key heads, their width, SwiGLU, vocabulary."""

    tokens: int
    window: int | None
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int

    @classmethod
    def of(cls, cell: Cell) -> Shape:
        return cls(**{**cell.size, "window": cell.size["window"] or None})


def config_of(system: str, shape: Shape, impl: str = "auto") -> CarriedConfig:
    """Options of the blocks of a model that keeps all of its blocks' scores until the backward pass."""
    if system not in _PLANS:
        return CarriedConfig(layers=1 if system in CEILINGS else PER_BLOCK, windows=shape.window, impl=impl)
    blocks = -(-shape.layers // PER_BLOCK)
    return CarriedConfig(layers=PER_BLOCK, plan=_PLANS[system], windows=shape.window, blocks=blocks, impl=impl)


def decision(config: CarriedConfig, shape: Shape, dtype: torch.dtype, device: torch.device) -> str:
    """What an automatic plan picks at this moment, and why."""
    layout = TileLayout(config, shape.tokens, shape.tokens, device=device)
    impl = "triton" if device.type == "cuda" else "blocked"
    return str(choose_plan(config, layout, 1, shape.heads, dtype=dtype, device=device, impl=impl))


class _DenseCarry(Carry):
    """The accumulated scores of the layer before, dense."""

    def __init__(self, z: Tensor, config: CarriedConfig) -> None:
        super().__init__(config)
        self.z = z


def eager(shape: Shape, dtype: torch.dtype, device: torch.device | str) -> Attend:
    """The carry as one writes it in PyTorch: dense scores in the storage dtype, added to the next layer's."""
    T = shape.tokens
    seen = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    seen = seen if shape.window is None else seen.triu(1 - shape.window)
    bias = torch.zeros(T, T, dtype=dtype, device=device).masked_fill(~seen, float("-inf"))

    def attend(q: Tensor, k: Tensor, v: Tensor, carry: Carry, **_) -> tuple[Tensor, Carry]:
        groups = q.shape[1] // k.shape[1]
        z = q @ k.repeat_interleave(groups, 1).mT * q.shape[-1] ** -0.5
        if isinstance(carry, _DenseCarry):  # a block starts with a carry of its own
            z = z + carry.z
        return (z + bias).softmax(-1) @ v.repeat_interleave(groups, 1), _DenseCarry(z, carry.config)

    return attend


def _flash_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """PyTorch's flash kernel with a window, which scaled_dot_product_attention does not pass on."""
    T = q.shape[2]
    o = torch.ops.aten._flash_attention_forward(
        *(t.transpose(1, 2) for t in (q, k, v)), None, None, T, T, 0.0, True, False,
        window_size_left=window - 1, window_size_right=0,
    )  # fmt: skip
    return o[0].transpose(1, 2)


def fused(shape: Shape, device: torch.device | str, backend: SDPBackend) -> Attend:
    """PyTorch's attention in place of ours; the carry is passed through untouched."""
    cuda, T = torch.device(device).type == "cuda", shape.tokens
    mask = None
    if not cuda and shape.window is not None:
        mask = torch.ones(T, T, dtype=torch.bool, device=device).tril().triu(1 - shape.window)

    def attend(q: Tensor, k: Tensor, v: Tensor, carry: object, **_) -> tuple[Tensor, object]:
        if not cuda:
            o = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
            return o, carry
        if shape.window is not None:
            return _flash_window(q, k, v, shape.window), carry
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), carry

    return attend


@cache
def _flex(compiled: bool) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if compiled else flex_attention


def flex(shape: Shape, device: torch.device | str) -> Attend:
    """FlexAttention in place of ours, its block mask made beforehand; without Inductor on the CPU, forward only."""
    from torch.nn.attention.flex_attention import create_block_mask

    T, window = shape.tokens, shape.window or shape.tokens

    def seen(b, h, i, j):
        return (i >= j) & (i - j < window)

    mask = create_block_mask(seen, None, None, T, T, device=str(device))
    run = _flex(torch.device(device).type == "cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor, carry: object, **_) -> tuple[Tensor, object]:
        return run(q, k, v, block_mask=mask, enable_gqa=True), carry

    return attend


def without_carry(shape: Shape, layout: TileLayout) -> Attend:
    """Our kernels without a carry in a model whose blocks have one, which is passed through untouched."""
    config = config_of("no-carry", shape)

    def attend(q: Tensor, k: Tensor, v: Tensor, carry: object, **options) -> tuple[Tensor, object]:
        return carried_attention(q, k, v, Carry(config, layout=layout), **options)[0], carry

    return attend


def attend_of(system: str, shape: Shape, dtype: torch.dtype, device: torch.device | str) -> Attend:
    """(q, k, v, carry) ↦ (O, next carry) of a system."""
    if system == "eager":
        return eager(shape, dtype, device)
    if system in ("plain", "plain-flash"):
        backend = SDPBackend.CUDNN_ATTENTION if system == "plain" else SDPBackend.FLASH_ATTENTION
        return fused(shape, device, backend)
    if system == "plain-flex":
        return flex(shape, device)
    return carried_attention


def layers_of(x: dict[str, Tensor]) -> list[tuple[Tensor, ...]]:
    """q, k, v of each layer from ``q0``, ``k0``, ``v0``, …"""
    return [tuple(x[f"{name}{i}"] for name in "qkv") for i in range(len(x) // 3)]


def attention(
    attend: Attend, config: CarriedConfig, x: dict[str, Tensor], layout: TileLayout | None = None
) -> list[Tensor]:
    """O of each layer."""
    carry, outputs = Carry(config, layout=layout), []
    for i, qkv in enumerate(layers_of(x)):
        carry = Carry(config, layout=layout) if i % PER_BLOCK == 0 else carry
        o, carry = attend(*qkv, carry)
        outputs.append(o)
    return outputs


def block(system: str, shape: Shape, x: dict[str, Tensor]) -> Callable[[], list[Tensor]]:
    """Attention alone: () ↦ O of each layer."""
    q = x["q0"]
    attend, config = attend_of(system, shape, q.dtype, q.device), config_of(system, shape)
    layout = TileLayout(config, shape.tokens, shape.tokens, device=q.device)
    return lambda: attention(attend, config, x, layout)


@contextmanager
def substituted(attend: Attend) -> Iterator[None]:
    """The model's attention replaced."""
    own = modules.carried_attention
    modules.carried_attention = attend
    try:
        yield
    finally:
        modules.carried_attention = own


def model_of(system: str, shape: Shape, dtype: torch.dtype, device: str, seed: int) -> CarriedLlama:
    """The model with a system's blocks; equal seeds give equal weights, whatever the system."""
    torch.manual_seed(seed)
    options = LlamaOptions(
        vocabulary=shape.vocabulary, width=shape.heads * shape.head_dim, layers=shape.layers, heads=shape.heads,
        kv_heads=shape.kv_heads, hidden=shape.hidden, carried=config_of(system, shape),
    )  # fmt: skip
    kept = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return CarriedLlama(options)
    finally:
        torch.set_default_dtype(kept)
