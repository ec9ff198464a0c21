"""What a call of carried attention has to look like; refusals name the argument, what it is and what it may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..mask import Mask, unreadable
from .arguments import require
from .config import DTYPES, CarriedConfig
from .layout import TileLayout

if TYPE_CHECKING:
    from .shared_keys import SharedKeyCarry
    from .state import Carry

__all__ = [
    "autocast",
    "check_batch",
    "check_heads",
    "check_inputs",
    "check_layout",
    "check_like",
    "check_ranks",
    "check_recorded",
    "check_same_keys",
    "check_seed",
    "check_step",
    "like_of",
]

_NAMES = "fp16, bf16, fp32 or fp64"


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Floating tensors in the dtype that autocast asks for; fp64 is never lowered, as by autocast itself."""
    device = tensors[0].device.type
    if device == "meta" or tensors[0].dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.dtype in DTYPES else x for x in tensors)


def check_batch(config: CarriedConfig, mask: Mask | None, offset: int | None) -> None:
    """What a carry starts from."""
    require("config", config, CarriedConfig, "Carry(CarriedConfig(), mask=mask)")
    if mask is not None:
        require("mask", mask, Mask, "Mask.full(allowed)")
    if offset is not None and (isinstance(offset, bool) or not isinstance(offset, int | torch.SymInt)):
        raise TypeError(f"offset is {offset!r}; expected an integer, or None for Tk − Tq")


def check_ranks(**tensors: Tensor) -> None:
    """Tensors of four dimensions, by name."""
    for name, x in tensors.items():
        _check_rank(name, x)


def _check_rank(name: str, x: Tensor) -> None:
    require(name, x, Tensor)
    if x.dim() != 4:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected four dimensions [B, heads, tokens, width]")


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Types, dtypes, devices and shapes of one layer's queries, keys and values."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_rank(name, x)
        if x.dtype != q.dtype or x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype}; expected {_NAMES}, the same as q ({q.dtype})")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}; expected {q.device}, where q is")
    B, H, Tq, d = q.shape
    Bk, Hk, Tk, dk = k.shape
    Bv, Hv, Tv, dv = v.shape
    if Bk != B or dk != d:
        raise ValueError(f"k has shape {tuple(k.shape)}; expected [{B}, Hk, Tk, {d}] to fit q {tuple(q.shape)}")
    if Hk == 0 or H % Hk:
        raise ValueError(f"k has {Hk} heads; expected a divisor of q's {H}")
    if Bv != B or Hv != Hk or Tv != Tk:
        raise ValueError(f"v has shape {tuple(v.shape)}; expected [{B}, {Hk}, {Tk}, d_v] to fit k {tuple(k.shape)}")
    if 0 in (B, H, Tq, Tk, d, dv):
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: expected no empty dimension")


def check_heads(config: CarriedConfig, layer: int, gain: Tensor | None, sink: Tensor | None, q: Tensor) -> None:
    """Gains and sinks: there if the options want them, a floating number a head, where q is."""
    H = q.shape[1]
    if config.scaling == "gain" and layer > 0 and gain is None:
        raise ValueError(f"gain is None; expected a tensor [{H}] for layer {layer}, since scaling is 'gain'")
    if config.scaling != "gain" and gain is not None:
        raise ValueError(f"gain is given but scaling is {config.scaling!r}; nearest legal call: scaling='gain'")
    if sink is not None and not config.sink:
        raise ValueError("sink is given but config.sink is False; nearest legal call: CarriedConfig(sink=True)")
    if sink is None and config.sink:
        raise ValueError(f"sink is None; expected a tensor [{H}], since config.sink is True")
    for name, x in (("gain", gain), ("sink", sink)):
        if x is None:
            continue
        require(name, x, Tensor)
        if tuple(x.shape) != (H,):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected [{H}], one number a head")
        if not x.dtype.is_floating_point:
            raise TypeError(f"{name} is {x.dtype}; expected a floating dtype")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}; expected {q.device}, where q is")


def check_seed(seed: Tensor | None, q: Tensor) -> None:
    """A seed of dropout."""
    if seed is None:
        return
    require("seed", seed, Tensor, "torch.tensor([5])")
    if seed.dtype != torch.int64 or seed.numel() != 1:
        raise ValueError(f"seed is {seed.dtype} of shape {tuple(seed.shape)}; expected torch.int64 of one element")
    if seed.device != q.device:
        raise ValueError(f"seed is on {seed.device}; expected {q.device}, where q is")


def like_of(q: Tensor, k: Tensor) -> tuple:
    """What all layers of a block have in common."""
    return tuple(q.shape), k.shape[1], q.dtype, q.device


def check_like(like: tuple | None, q: Tensor, k: Tensor) -> None:
    """A layer is like those before it, of which `like` says what they had in common."""
    if like is None:
        return
    shape, heads, dtype, device = like
    if tuple(q.shape) != shape:
        raise ValueError(f"q has shape {tuple(q.shape)}; expected {shape}, as in the layers before")
    if k.shape[1] != heads:
        raise ValueError(f"k has {k.shape[1]} heads; expected {heads}, as in the layers before")
    if q.dtype != dtype:
        raise TypeError(f"q is {q.dtype}; expected {dtype}, as in the layers before")
    if q.device != device:
        raise ValueError(f"q is on {q.device}; expected {device}, as in the layers before")


def check_same_keys(before: Tensor | None, k: Tensor) -> None:
    """Keys that layers share are the same ones; numbers are compared on the CPU, where that stalls nothing."""
    if before is None or before is k or k.device.type != "cpu" or unreadable():
        return
    if type(k) not in _PLAIN or type(before) not in _PLAIN or before.shape != k.shape:
        return
    if k.data_ptr() == before.data_ptr() and k.stride() == before.stride():
        return
    if not torch.allclose(before, k, rtol=0.0, atol=0.0, equal_nan=True):
        raise ValueError(
            "k holds other keys than in the layers before; expected the same, which the carry has been folded over. "
            "Nearest legal call for layers with keys of their own: carried_attention"
        )


_PLAIN = (Tensor, torch.nn.Parameter)


def check_recorded(carry: Carry | SharedKeyCarry, *tensors: Tensor) -> None:
    """A carry through which gradients would have to go has recorded them."""
    if carry.index == 0 or carry._recorded or carry.config.detach or not torch.is_grad_enabled():
        return
    if any(x.requires_grad for x in tensors):
        raise RuntimeError(
            f"the carry into layer {carry.index} was made where no gradients are recorded (torch.no_grad, or a "
            "reentrant checkpoint of one layer), so earlier layers would get none through it; checkpoint with "
            "use_reentrant=False or whole blocks, or use CarriedConfig(detach=True)"
        )


def check_layout(layout: TileLayout, config: CarriedConfig, mask: Mask | None, offset: int | None) -> None:
    """A layout that was made beforehand."""
    require("layout", layout, TileLayout)
    layout.check(config, mask, offset)


def check_step(
    q: Tensor, k: Tensor, v: Tensor, row: Tensor | None, layer: int, config: CarriedConfig, mask: Mask | None,
    offset: int | Tensor | None, gain: Tensor | None, sink: Tensor | None, row_dtype: torch.dtype | None,
) -> None:  # fmt: skip
    """Arguments of a decoding step."""
    require("config", config, CarriedConfig)
    check_inputs(q, k, v)
    B, H, Tq, _ = q.shape
    Tk = k.shape[2]
    require("layer", layer, int)
    if not 0 <= layer < config.layers:
        raise ValueError(f"layer is {layer}; expected 0 to {config.layers - 1}, since config.layers is {config.layers}")
    check_heads(config, layer, gain, sink, q)
    if row is None and layer > 0:
        raise ValueError(f"row is None; expected {[B, H, Tq, Tk]} for layer {layer}, what the layer before returned")
    if row is not None:
        require("row", row, Tensor)
        if layer == 0:
            raise ValueError("row is given for layer 0; expected None, since the first layer of a block takes no carry")
        if tuple(row.shape) != (B, H, Tq, Tk):
            raise ValueError(f"row has shape {tuple(row.shape)}; expected {(B, H, Tq, Tk)} to fit q and k")
        if row.dtype not in DTYPES:
            raise TypeError(f"row is {row.dtype}; expected {_NAMES}")
        if row.device != q.device:
            raise ValueError(f"row is on {row.device}; expected {q.device}, where q is")
    if row_dtype is not None and row_dtype not in DTYPES:
        raise ValueError(f"row_dtype is {row_dtype!r}; expected {_NAMES}, or None")
    if mask is not None:
        require("mask", mask, Mask)
        mask.check(B, H, Tq, Tk)
    if isinstance(offset, Tensor):
        _check_offsets(offset, mask, B, Tq, Tk)
    elif offset is not None:
        if isinstance(offset, bool) or not isinstance(offset, int | torch.SymInt):
            raise TypeError(f"offset is {offset!r}; expected an integer, an integer tensor [{B}], or None")
        if not 0 <= offset <= Tk - Tq:
            raise ValueError(f"offset is {offset}; expected 0 to {Tk - Tq}: {Tq} new tokens lie in a cache of {Tk}")


def _check_offsets(offset: Tensor, mask: Mask | None, B: int, Tq: int, Tk: int) -> None:
    if tuple(offset.shape) != (B,):
        raise ValueError(f"offset has shape {tuple(offset.shape)}; expected [{B}], one position a sequence")
    if offset.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"offset is {offset.dtype}; expected torch.int32 or torch.int64")
    if mask is not None and mask.bounds is not None:
        raise ValueError("mask has bounds and offset is a tensor; expected one of them: offset alone hides later keys")
    # Reading a GPU's numbers would stall its stream.
    if offset.device.type == "cpu" and not torch.compiler.is_compiling():
        if int(offset.min()) < 0 or int(offset.max()) > Tk - Tq:
            raise ValueError(
                f"offset is {offset.tolist()}; expected 0 to {Tk - Tq}: {Tq} new tokens lie in a cache of {Tk}"
            )
