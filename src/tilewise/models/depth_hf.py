"""Attention Residuals in place of the residual stream of a Hugging Face decoder: one call to wrap, one to unwrap."""

from __future__ import annotations

import copy
import copyreg
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.depth import Schedule
from tilewise.depth.checks import check_kind
from tilewise.nn import AttnRes

__all__ = ["unwrap_residuals", "wrap_residuals"]

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
NAME = "attn_res"


def wrap_residuals(model: nn.Module, schedule: Schedule | int | str, *, impl: str = "auto") -> AttnRes:
    """Replace every residual connection of a decoder by reads over depth; the sublayers and their weights stay.

    Works on decoders whose layers compute h += self_attn(input_layernorm(h)); h +=
    mlp(post_attention_layernorm(h)): Llama, Mistral, Qwen2, Qwen3 and others. That is checked by running each
    layer's own code on stand-ins. The new parameters start as plain means, which is another function than the
    pre-trained residual sum: train after wrapping. Gradient checkpointing (not reentrant), generation with a cache,
    FSDP2 and pickling of the whole model work as before. The parameters are saved with the model as
    `attn_res.query` and `attn_res.key_weight`. A norm that is RMSNorm(h) * weight runs inside the read, so forward
    hooks on it are not called; any other norm runs by itself.

    Args:
        model: a decoder or a model with a head on it, in place.
        schedule: the plan over 2 · layers sublayers; a block size in sublayers; or "full".
        impl: implementation of the operators.

    Returns:
        The new module, also found as `attn_res` beside the model's `layers`.

    Raises:
        TypeError: no model.
        ValueError: no decoder of this form, one whose layers share a module, one that is wrapped already, or a schedule
            of another length.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        ...                      num_attention_heads=4, num_key_value_heads=2)
        >>> model = LlamaForCausalLM(config)
        >>> wrap_residuals(model, 4).query.shape
        torch.Size([9, 32])
        >>> unwrap_residuals(model)
    """
    base = _decoder(model)
    if hasattr(base, NAME):
        raise ValueError("model: found residuals that are wrapped already; call unwrap_residuals(model) first")
    layers, count = list(base.layers), 2 * len(base.layers)
    for index, layer in enumerate(layers):
        if layer in layers[:index]:
            raise ValueError(f"model.layers[{index}]: found a layer that stands before it already, expected each once")
        if reason := _why_not(layer):
            raise ValueError(f"model.layers[{index}]: found {type(layer).__name__}, {reason}")
    if isinstance(schedule, int) and not isinstance(schedule, bool):
        schedule = Schedule.block(count, schedule)
    elif schedule == "full":
        schedule = Schedule.full_attention(count)
    elif not isinstance(schedule, Schedule):
        raise ValueError(f"schedule: found {schedule!r}, expected a Schedule, a block size or 'full'")
    if schedule.sublayers != count:
        raise ValueError(f"schedule: found {schedule.sublayers} sublayers, expected {count}, two a decoder layer")
    weight = base.norm.weight
    eps = getattr(base.norm, "variance_epsilon", None) or getattr(base.norm, "eps", None) or 1e-6
    residual = AttnRes(weight.shape[-1], schedule, eps=eps, impl=impl, device=weight.device, dtype=weight.dtype)
    # All that may fail comes before the first change.
    fused = [[_is_rms_norm(norm, eps) for norm in (x.input_layernorm, x.post_attention_layernorm)] for x in layers]
    last = _is_rms_norm(base.norm, eps)
    base.add_module(NAME, residual)
    for index, layer in enumerate(layers):
        # A tuple keeps the shared module out of the layer's own parameters, and follows copy.deepcopy.
        layer.__dict__["_depth"] = (residual, index, base.config, fused[index])
        layer.__class__ = _layer_class(type(layer))
    base.norm.__dict__["_depth"] = (residual, len(layers), last)
    base.norm.__class__ = _norm_class(type(base.norm))
    return residual


def unwrap_residuals(model: nn.Module) -> None:
    """Give the decoder its own residual connections back; the parameters of the reads are dropped.

    Raises:
        TypeError: no model.
        ValueError: the model is not wrapped.
    """
    base = _decoder(model)
    if not hasattr(base, NAME):
        raise ValueError("model: found no wrapped residuals, expected a model that wrap_residuals was called on")
    for module in (*base.layers, base.norm):
        module.__class__ = type(module)._original
        del module.__dict__["_depth"]
    delattr(base, NAME)


def _decoder(model: nn.Module) -> Any:
    check_kind("model", model, nn.Module, "a model of transformers")
    found = [m for m in model.modules() if isinstance(getattr(m, "layers", None), nn.ModuleList) and hasattr(m, "norm")]
    if len(found) != 1:
        raise ValueError(f"model: found {len(found)} modules with `layers` and `norm`, expected one decoder")
    return found[0]


class _Stub(nn.Module):
    """A sublayer or norm that is easy to tell from any other: x ↦ sin(a x)."""

    def __init__(self, a: float, paired: bool) -> None:
        super().__init__()
        self.a, self.paired = a, paired

    def forward(self, hidden_states: Tensor, *args, **kwargs):
        y = torch.sin(self.a * hidden_states)
        return (y, None) if self.paired else y


def _why_not(layer: nn.Module) -> str:
    """Why the layer's code is not the two plain residual sums; empty if it is."""
    if missing := [name for name in PARTS if not hasattr(layer, name)]:
        return f"which has no {', '.join(missing)}"
    for name, child in layer._modules.items():
        # The probe below is of a layer that drops nothing.
        if name not in PARTS and isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0.0:
            return f"which drops entries of what it adds ({name}, p = {child.p}); a stream adds them whole"
    probe = copy.copy(layer)
    stubs = {name: _Stub(0.3 + 0.2 * i, name == "self_attn") for i, name in enumerate(PARTS)}
    probe._modules = {**layer._modules, **stubs}
    probe.train(False)
    x = torch.linspace(-2, 2, 12, dtype=torch.float64).view(1, 3, 4)
    norm, attend, norm2, mlp = (lambda v, a=stub.a: torch.sin(a * v) for stub in stubs.values())
    h = x + attend(norm(x))
    expected = h + mlp(norm2(h))
    try:
        got = type(layer).forward(probe, x)
    except Exception as error:
        return f"whose forward cannot be checked on stand-ins ({type(error).__name__}: {error})"
    got = got[0] if isinstance(got, tuple) else got
    if got.shape != expected.shape or not torch.allclose(got, expected, rtol=1e-12, atol=1e-12):
        return f"expected h += self_attn({PARTS[0]}(h)); h += mlp({PARTS[2]}(h))"
    return ""


@torch.no_grad()
def _is_rms_norm(norm: nn.Module, eps: float) -> bool:
    """Whether the module is RMSNorm(h) * weight with this eps, so that the read's kernel can apply it."""
    own = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weighted = isinstance(getattr(norm, "weight", None), Tensor) and norm.weight.ndim == 1
    if own != eps or not weighted or isinstance(norm, nn.LayerNorm):
        return False
    probe, weight = copy.copy(norm), torch.linspace(0.5, 1.5, 8)
    probe._parameters = {**norm._parameters, "weight": nn.Parameter(weight)}
    x = torch.linspace(-1, 2, 16).view(2, 8)
    wanted = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    return torch.allclose(type(norm).forward(probe, x), wanted, rtol=1e-5, atol=1e-6)


def _reduce(module: nn.Module) -> tuple:
    cls = type(module)
    # A class that others derive from it, as FSDP2 does, is not for this module to restore.
    ours = cls is _class(cls._kind, cls._original)
    make = (_empty, (cls._kind, cls._original)) if ours else (copyreg.__newobj__, (cls,))
    return *make, module.__dict__


def _class(kind: str, original: type) -> type:
    return {"layer": _layer_class, "norm": _norm_class}[kind](original)


def _empty(kind: str, original: type) -> nn.Module:
    """A wrapped layer or norm without its state: unpickling makes the class anew, in whatever process."""
    cls = _class(kind, original)
    return cls.__new__(cls)


@cache
def _layer_class(cls: type) -> type:
    class AttnResLayer(cls):
        _original, _kind, __reduce__ = cls, "layer", _reduce

        def forward(self, hidden_states, **kwargs):
            residual, index, config, fused = self._depth
            if kwargs.get("output_hidden_states") or getattr(config, "output_hidden_states", False):
                raise ValueError(
                    "output_hidden_states: found True, expected False: a stream over depth has no single hidden state"
                )
            if self.training and getattr(self, "gradient_checkpointing", False):
                keywords = getattr(self._gradient_checkpointing_func, "keywords", {})
                if keywords.get("use_reentrant"):
                    raise ValueError("use_reentrant: found True, expected False: the stream is a tuple of tensors")
            stream = residual(hidden_states, 2 * index)
            norm = self.input_layernorm
            x = stream.read(2 * index, norm.weight) if fused[0] else norm(stream.read(2 * index))
            attended = self.self_attn(hidden_states=x, **kwargs)
            stream.write(2 * index, attended[0] if isinstance(attended, tuple) else attended)
            norm = self.post_attention_layernorm
            x = stream.read(2 * index + 1, norm.weight) if fused[1] else norm(stream.read(2 * index + 1))
            update = self.mlp(x)
            stream.write(2 * index + 1, update[0] if isinstance(update, tuple) else update)
            return stream.state

    AttnResLayer.__name__ = AttnResLayer.__qualname__ = f"AttnRes{cls.__name__}"
    return AttnResLayer


@cache
def _norm_class(cls: type) -> type:
    class AttnResNorm(cls):
        _original, _kind, __reduce__ = cls, "norm", _reduce

        def forward(self, hidden_states):
            residual, layers, fused = self._depth
            stream = residual(hidden_states, 2 * layers)
            return stream.output(self.weight) if fused else super().forward(stream.output())

    AttnResNorm.__name__ = AttnResNorm.__qualname__ = f"AttnRes{cls.__name__}"
    return AttnResNorm
