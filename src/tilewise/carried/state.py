"""The carry between the layers of a block, and the function that runs one layer with it."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..mask import Mask
from .config import CarriedConfig, Options
from .layout import TileLayout
from .ops import LayerCall, attend, gradient_edge
from .policy import Decision, carry_dtypes, choose_plan
from .reference import carried_layer_reference

__all__ = ["Carry", "carried_attention"]


class Carry:
    """What a layer hands to the next one of its block; opaque, never changed, one per layer and forward pass.

    A plain class on purpose: frameworks that cast or move every floating tensor of a module's arguments (FSDP2's mixed
    precision among them) walk into tuples, dicts and dataclasses, and would turn fp16 scores into bf16.

    Args:
        config: the block's options.
        mask: documents, lengths or intervals of this batch (:class:`tilewise.mask.Mask`).
        offset: position of the first query among the keys; default Tk − Tq.
        layout: a :class:`TileLayout` made beforehand, to share it among blocks and steps; made from the first layer's
            shapes otherwise.

    Attributes:
        index: the layer that comes next, from 0.
        decision: the plan and its reason (:class:`Decision`), from the first layer on; None before it.

    Example:
        >>> q, k, v = torch.randn(1, 4, 10, 8), torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 8)
        >>> carry = Carry(CarriedConfig(layers=2))
        >>> o, carry = carried_attention(q, k, v, carry)
        >>> carry.index
        1
    """

    def __init__(
        self, config: CarriedConfig | None = None, mask: Mask | None = None, offset: int | None = None,
        layout: TileLayout | None = None,
    ) -> None:  # fmt: skip
        self.config = CarriedConfig() if config is None else config
        self.mask, self.offset, self.layout = mask, offset, layout
        self.index = 0
        self.decision: Decision | None = None
        self._queries: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._gains: list[Tensor] = []
        self._centres: list[Tensor] = []
        self._edges: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._z: Tensor | None = None
        self._version = 0
        self._token: Tensor | None = None

    def _next(self, last: bool) -> Carry:
        carry = Carry(self.config, self.mask, self.offset, self.layout)
        if not last:
            carry.index, carry.decision = self.index + 1, self.decision
        return carry


def carried_attention(
    q: Tensor, k: Tensor, v: Tensor, carry: Carry, *, gain: Tensor | None = None, sink: Tensor | None = None,
    seed: Tensor | None = None, last: bool = False,
) -> tuple[Tensor, Carry]:  # fmt: skip
    """One layer: O_i and the carry for the next layer, by the equation of :class:`CarriedConfig`.

    Args:
        q: [B, H, Tq, d], position encoding and norm applied. k: [B, Hk, Tk, d]. v: [B, Hk, Tk, d_v]; Hk divides H.
            fp16, bf16, fp32 or fp64, all of one dtype (under autocast they are cast to its dtype).
        carry: a new :class:`Carry` for the first layer of a block, then what the layer before returned.
        gain: β_i [H], for ``scaling="gain"``; the first layer of a block ignores it.
        sink: [H], scores of a sink that has no value.
        seed: int64 tensor of one element for dropout; drawn from PyTorch's generator by default.
        last: end the block here, before `config.layers` (a model's last block may be shorter).

    Returns:
        O [B, H, Tq, d_v] and the next carry; after the last layer of a block that is a new carry for the next block,
        with the same layout, so one may write a single loop over all layers of a model.

    Raises:
        ValueError, TypeError: shapes, dtypes or options that do not fit, named with what was found and expected.
        RuntimeError: the carry's scores have been overwritten since (a layer run twice under ``plan="mixed"``).

    Rows that see no key give 0 with zero gradient. Bitwise equal from run to run.
    """
    config = carry.config
    q, k, v = _autocast(q, k, v)
    _check(q, k, v, carry, gain, sink)
    last = last or carry.index == config.layers - 1
    if config.scaling != "gain" or carry.index == 0:
        gain = None
    if config.dropout_p > 0.0 and seed is None:
        seed = torch.randint(2**62, (1,), device=q.device)
    following = carry._next(last)
    if config.impl == "reference":
        O, z = carried_layer_reference(
            q,
            k,
            v,
            carry._z,
            carry.index,
            config,
            mask=carry.mask,
            offset=carry.offset,
            gain=gain,
            sink=sink,
            seed=seed,
        )
        following._z = None if last else z
        return O, following

    B, H, Tq, _ = q.shape
    if carry.layout is None:
        carry.layout = following.layout = TileLayout(config, Tq, k.shape[2], carry.mask, carry.offset, q.device)
    layout = carry.layout
    if carry.decision is None:
        decision = choose_plan(config, layout, B, H, dtype=q.dtype, device=q.device, training=torch.is_grad_enabled(),
                               impl=_implementation(config, q, k, v))  # fmt: skip
        carry.decision = decision
        following.decision = None if last else decision

    queries, keys = [*carry._queries, q], [*carry._keys, k]
    gains = [] if config.scaling != "gain" else [*carry._gains, gain if gain is not None else q.new_ones(H)]
    centres = []
    if config.centred and carry.decision.plan != "recompute" and not last:
        centres = [*carry._centres, layout.mean(k.detach())]
    z_in, z_out, call = _step(carry, layout, gains, q, last)
    n = max(call.forward, call.backward)
    first = len(queries) - n
    # Only what is rounded needs centring: not the sum that a last layer makes of what it reads and its own scores.
    used = centres[-n:] if any(call.options.rounded) else []
    query_edges, key_edges = carry._edges
    if call.push:
        query_edges, key_edges = [*query_edges, gradient_edge(q)], [*key_edges, gradient_edge(k)]
    own = layout.layers[carry.index]
    O, token = attend(
        call, queries[first:], keys[first:], v, gains[-n:], used, layout.span(carry.index, n), own.rows, own.columns,
        z_in, z_out, carry._token, sink, seed, (B, H, layout.slots, layout.tile, layout.tile),
        [*query_edges, *key_edges],
    )  # fmt: skip
    if not last:
        plan = carry.decision.plan
        if plan != "stored":
            # Gradients come back through edges (recompute) or through the chain of E (mixed).
            following._queries, following._keys = [x.detach() for x in queries], [x.detach() for x in keys]
            following._edges = (query_edges, key_edges)
            following._centres = centres
            loose = config.detach or plan == "mixed"
            following._gains = [x.detach() for x in gains] if loose else gains
        following._z, following._token = z_out, token
        following._version = _version(z_out)
    return O, following


def _step(
    carry: Carry, layout: TileLayout, gains: list[Tensor], q: Tensor, last: bool
) -> tuple[Tensor | None, Tensor | None, LayerCall]:
    """The buffers a layer reads and writes, and how its scores are formed."""
    i, decision = carry.index, carry.decision
    compiling = torch.compiler.is_compiling()
    if _version(carry._z) != carry._version:
        raise RuntimeError(
            f"the scores carried into layer {i} have been overwritten: with plan='mixed' the layers of a block share "
            "one buffer, so a layer runs once per forward pass. Checkpoint whole blocks, or use plan='stored' or "
            "'recompute'"
        )
    # dβ_i = ⟨E_i, Z_{i−1}⟩ needs the carry that entered, which this layer's own scores no longer show.
    learned = bool(gains) and i > 0 and gains[-1].requires_grad and torch.is_grad_enabled()
    facts = (layout.uniform, layout.back, layout.plain, layout.layers[i].window)
    made = (_call if compiling else _known_call)(
        carry.config, facts, i, decision.plan, decision.impl, q.shape[-1], q.dtype, last, learned, compiling
    )
    call, reads, writes = made
    z_out = None
    if call.accumulate:
        z_out = carry._z
        if not z_out.is_inference():
            torch.autograd.graph.increment_version(z_out)
    elif writes:
        z_out = layout.buffer(*q.shape[:2], call.options.carry_dtype, q.device)
    return carry._z if reads else None, z_out, call


def _call(
    config: CarriedConfig, facts: tuple[bool, int, bool, int], i: int, plan: str, impl: str, d: int, dtype: torch.dtype,
    last: bool, learned: bool, compiling: bool,
) -> tuple[LayerCall, bool, bool]:  # fmt: skip
    """How layer i's scores are formed, and whether it reads and writes a buffer of scores that enter and leave."""
    carry_dtype, grad_dtype = carry_dtypes(config, dtype)
    reads = writes = accumulate = False
    forward = backward = i + 1
    saved = "none"
    if plan == "stored" or (plan == "mixed" and (i > 1 or i == 0)):
        forward = 1
    if plan == "stored":
        reads, writes, backward = i > 0, not last, 1
        saved = "own" if not (last or learned) else "entering" if i else "none"
    elif plan == "mixed" and i > 0:
        if last and i > 1:
            reads, backward, saved = True, 1, "entering"
        elif not last:
            accumulate = i > 1 and not compiling
            reads, writes = i > 1 and compiling, True
            if i == config.layers - 2 and not learned:
                backward, saved = 1, "own"
    n = max(forward, backward)
    rounded = [
        plan != "recompute" and (j > 0 or plan == "stored") and (not last or j < i) for j in range(i - n + 1, i + 1)
    ]
    uniform, back, plain, window = facts
    options = Options(
        scale=d**-0.5 if config.scale is None else config.scale, divisor=config.divisor(i),
        softcap=config.softcap or 0.0, dropout_p=config.dropout_p, tile=config.tile, uniform=uniform, back=back,
        rounded=tuple(rounded), carry_dtype=carry_dtype, plain=plain, window=window,
    )  # fmt: skip
    push = plan == "recompute" and not config.detach and config.layers > 1
    links = plan != "recompute" and not last and not config.detach
    call = LayerCall(options, impl, forward, backward, accumulate, saved, push, links, grad_dtype)
    return call, reads, writes


_known_call = lru_cache(maxsize=1024)(_call)


def _version(z: Tensor | None) -> int:
    """How often a buffer has been written; 0 where PyTorch does not count."""
    return 0 if z is None or torch.compiler.is_compiling() or z.is_inference() else z._version


def _implementation(config: CarriedConfig, q: Tensor, k: Tensor, v: Tensor) -> str:
    if config.impl == "blocked" or (config.impl == "auto" and q.device.type != "cuda"):
        return "blocked"
    from .triton.launch import refusal

    why = refusal(q, k, v, config)
    if why is None:
        return "triton"
    if config.impl == "triton":
        raise ValueError(f"impl='triton' cannot run this call: {why}; nearest legal call: impl='blocked'")
    return "blocked"


def _autocast(*tensors: Tensor) -> list[Tensor]:
    device = tensors[0].device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return [x.to(dtype) for x in tensors]
    return list(tensors)


def _check(q: Tensor, k: Tensor, v: Tensor, carry: Carry, gain: Tensor | None, sink: Tensor | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected four dimensions [B, heads, tokens, width]")
        if x.dtype != q.dtype or x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise TypeError(f"{name} is {x.dtype}; expected fp16, bf16, fp32 or fp64, the same as q ({q.dtype})")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}; expected {q.device}, where q is")
    B, H, Tq, d = q.shape
    Hk, Tk = k.shape[1:3]
    if k.shape[0] != B or k.shape[3] != d:
        raise ValueError(f"k has shape {tuple(k.shape)}; expected [{B}, Hk, Tk, {d}] to fit q {tuple(q.shape)}")
    if Hk == 0 or H % Hk:
        raise ValueError(f"k has {Hk} heads; expected a divisor of q's {H}")
    if tuple(v.shape[:3]) != (B, Hk, Tk):
        raise ValueError(f"v has shape {tuple(v.shape)}; expected [{B}, {Hk}, {Tk}, d_v] to fit k {tuple(k.shape)}")
    if 0 in (B, Tq, Tk, d, v.shape[3]):
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: expected no empty dimension")
    config, layout = carry.config, carry.layout
    if layout is not None and (layout.Tq, layout.Tk, layout.tile) != (Tq, Tk, config.tile):
        raise ValueError(
            f"the carry's layout is for {layout.Tq} queries, {layout.Tk} keys and tile {layout.tile}; found {Tq}, {Tk} "
            f"and tile {config.tile}: all layers of a block have the same tokens"
        )
    if carry.mask is not None and layout is None:
        carry.mask.check(B, H, Tq, Tk)
    if carry._queries and carry._queries[-1].shape != q.shape:
        raise ValueError(
            f"q has shape {tuple(q.shape)}; expected {tuple(carry._queries[-1].shape)}, as in the layers before"
        )
    if carry._z is not None and carry._z.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"q has batch and heads {tuple(q.shape[:2])}; expected {tuple(carry._z.shape[:2])}, as in the layers before"
        )
    if config.scaling == "gain" and carry.index > 0 and gain is None:
        raise ValueError(f"gain is None; expected a tensor [{H}] for layer {carry.index}, since scaling is 'gain'")
    if config.scaling != "gain" and gain is not None:
        raise ValueError(f"gain is given but scaling is {config.scaling!r}; nearest legal call: scaling='gain'")
    if sink is not None and not config.sink:
        raise ValueError("sink is given but config.sink is False; nearest legal call: CarriedConfig(sink=True)")
    for name, x in (("gain", gain), ("sink", sink)):
        if x is not None and tuple(x.shape) != (H,):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected [{H}], one number a head")
