"""The carry between the layers of a block, and the function that runs one layer with it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..mask import Mask
from .arguments import check_flag, require
from .checks import (
    autocast,
    check_batch,
    check_heads,
    check_inputs,
    check_layout,
    check_like,
    check_recorded,
    check_seed,
    like_of,
)
from .config import CarriedConfig, Options
from .layout import TileLayout
from .ops import LayerCall, attend, gradient_edge
from .policy import Decision, carry_dtypes, choose_plan
from .reference import carried_layer_reference

__all__ = ["Carry", "carried_attention"]

_DENSE = Decision("recompute", "reference", "the dense reference keeps whole score matrices", 0, 0)


class Carry:
    """What a layer hands to the next one of its block; opaque, never changed, one per layer and forward pass.

    A plain class on purpose: frameworks that cast or move every floating tensor of a module's arguments (FSDP2's mixed
    precision among them) walk into tuples, dicts and dataclasses, and would turn fp16 scores into bf16.

    Args:
        config: the block's options.
        mask: documents, lengths or intervals of this batch (:class:`tilewise.mask.Mask`).
        offset: position of the first query among the keys; default Tk − Tq.
        layout: a :class:`TileLayout` made beforehand, to share it among blocks and steps; made from the first layer's
            shapes otherwise. It was made for these options (tile, causality, windows, layers), and for `mask` if one is
            given; without, its own mask counts.

    Attributes:
        index: the layer that comes next, from 0.
        decision: the plan and its reason (:class:`Decision`) of the layer before, of whichever block; None before the
            first layer of all.

    Raises:
        ValueError, TypeError: an argument of another type, or a layout made for other options, named.

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
        check_batch(self.config, mask, offset)
        if layout is not None:
            check_layout(layout, self.config, mask, offset)
            mask, offset = layout.mask, layout.offset
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
        self._like: tuple | None = None
        self._decided = False
        self._kept: list[Decision] | None = None
        self._recorded = True
        self._spent = False

    def _next(self, last: bool) -> Carry:
        carry = Carry(self.config, self.mask, self.offset)
        carry.layout = self.layout
        if not last:
            carry.index = self.index + 1
            carry._recorded = torch.is_grad_enabled()
        return carry


def carried_attention(
    q: Tensor, k: Tensor, v: Tensor, carry: Carry, *, gain: Tensor | None = None, sink: Tensor | None = None,
    seed: Tensor | None = None, last: bool = False, training: bool = True,
) -> tuple[Tensor, Carry]:  # fmt: skip
    """One layer: O_i and the carry for the next layer, by the equation of :class:`CarriedConfig`.

    Args:
        q: [B, H, Tq, d], position encoding and norm applied. k: [B, Hk, Tk, d]. v: [B, Hk, Tk, d_v]; Hk divides H.
            fp16, bf16, fp32 or fp64, all of one dtype (under autocast they are cast to its dtype, but for fp64).
        carry: a new :class:`Carry` for the first layer of a block, then what the layer before returned.
        gain: β_i [H], for ``scaling="gain"``; the first layer of a block ignores it.
        sink: [H], scores of a sink that has no value.
        seed: int64 tensor of one element for dropout; drawn from PyTorch's generator by default.
        last: end the block here, before `config.layers` (a model's last block may be shorter).
        training: False leaves P as it is, whatever `config.dropout_p` says; modules give their own `training`.

    Returns:
        O [B, H, Tq, d_v] and the next carry; after the last layer of a block that is a new carry for the next block,
        with the same layout, so one may write a single loop over all layers of a model.

    Raises:
        ValueError, TypeError: shapes, dtypes or options that do not fit, named with what was found and expected.
        RuntimeError: the carry's scores have been overwritten since (a layer run twice under ``plan="mixed"``), or it
            was made where no gradients are recorded and this layer wants some.

    Rows that see no key give 0 with zero gradient. Bitwise equal from run to run. In a tile (`config.tile` tokens) that
    a row reads, a value that is not finite spoils the row even where the mask hides it, and such a key its gradient;
    fill padding with finite numbers. Tiles that the mask hides from all rows are not read.
    """
    require("carry", carry, Carry, "Carry(config)")
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(name, x, Tensor)
    config = carry.config
    check_flag("last", last)
    check_flag("training", training)
    q, k, v = autocast(q, k, v)
    _check(q, k, v, carry, gain, sink, seed)
    check_recorded(carry, q, k)
    last = last or carry.index == config.layers - 1
    dropout_p = config.dropout_p if training else 0.0
    if config.scaling != "gain" or carry.index == 0:
        gain = None
    if dropout_p > 0.0 and seed is None:
        seed = torch.randint(2**62, (1,), device=q.device)
    following = carry._next(last)
    following._like = None if last else like_of(q, k)
    if config.impl == "reference":
        following.decision = carry.decision = _DENSE
        config = config if dropout_p else replace(config, dropout_p=0.0)
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
    if not carry._decided:
        kept = [] if carry._kept is None else carry._kept
        if not kept:
            impl, why = _implementation(config, q, k, v)
            training = torch.is_grad_enabled()
            kept.append(choose_plan(config, layout, B, H, dtype=q.dtype, device=q.device, training=training, impl=impl,
                                    refusal=why))  # fmt: skip
        carry.decision, carry._decided = kept[0], True
    following.decision, following._decided = carry.decision, not last

    queries, keys = [*carry._queries, q], [*carry._keys, k]
    gains = [] if config.scaling != "gain" else [*carry._gains, gain if gain is not None else q.new_ones(H)]
    centres = []
    if config.centred and carry.decision.plan != "recompute" and not last:
        centres = [*carry._centres, layout.mean(k.detach())]
    z_in, z_out, call = _step(carry, layout, gains, q, last, dropout_p)
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
            if gains:
                # Copies: FSDP2 frees a layer's parameters once it has run.
                mine = gains[-1].detach() if config.detach or plan == "mixed" else gains[-1]
                following._gains = [*carry._gains, mine.clone()]
        following._z, following._token = z_out, token
        following._version = _version(z_out)
    return O, following


def _step(
    carry: Carry, layout: TileLayout, gains: list[Tensor], q: Tensor, last: bool, dropout_p: float
) -> tuple[Tensor | None, Tensor | None, LayerCall]:
    """The buffers a layer reads and writes, and how its scores are formed."""
    i, decision = carry.index, carry.decision
    compiling = torch.compiler.is_compiling()
    if _version(carry._z) != carry._version or carry._spent:
        raise RuntimeError(
            f"the scores carried into layer {i} have been overwritten: with plan='mixed' the layers of a block share "
            "one buffer, so a layer runs once per forward pass. Checkpoint whole blocks, or use plan='stored' or "
            "'recompute'"
        )
    # dβ_i = ⟨E_i, Z_{i−1}⟩ needs the carry that entered, which this layer's own scores no longer show.
    learned = bool(gains) and i > 0 and gains[-1].requires_grad and torch.is_grad_enabled()
    facts = (layout.uniform, layout.back, layout.plain, layout.layers[i].window)
    made = (_call if compiling else _known_call)(
        carry.config,
        facts,
        i,
        decision.plan,
        decision.impl,
        q.shape[-1],
        q.dtype,
        last,
        learned,
        dropout_p,
        compiling,
    )
    call, reads, writes = made
    z_out = None
    if call.accumulate:
        z_out = carry._z
        if z_out.is_inference():
            # Writes to such a tensor are not counted.
            carry._spent = True
        else:
            torch.autograd.graph.increment_version(z_out)
    elif writes:
        z_out = layout.buffer(*q.shape[:2], call.options.carry_dtype, q.device)
    return carry._z if reads else None, z_out, call


def _call(
    config: CarriedConfig, facts: tuple[bool, int, bool, int], i: int, plan: str, impl: str, d: int, dtype: torch.dtype,
    last: bool, learned: bool, dropout_p: float, compiling: bool,
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
        softcap=config.softcap or 0.0, dropout_p=dropout_p, tile=config.tile, uniform=uniform, back=back,
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


def _implementation(config: CarriedConfig, q: Tensor, k: Tensor, v: Tensor) -> tuple[str, str | None]:
    """What runs a block, and why the kernels do not, or no plan but ``stored``."""
    if config.impl == "blocked":
        return "blocked", None
    if config.impl == "auto" and q.device.type != "cuda":
        return "blocked", f"q is on {q.device.type}"
    from .triton.launch import refusal

    why = refusal(q, k, v, config)
    if why is None or (config.plan == "auto" and refusal(q, k, v, config, "stored") is None):
        return "triton", why
    if config.impl == "triton":
        raise ValueError(f"impl='triton' cannot run this call: {why}; nearest legal call: impl='blocked'")
    return "blocked", why


def _check(
    q: Tensor, k: Tensor, v: Tensor, carry: Carry, gain: Tensor | None, sink: Tensor | None, seed: Tensor | None
) -> None:
    check_inputs(q, k, v)
    B, H, Tq, _ = q.shape
    Tk = k.shape[2]
    config, layout = carry.config, carry.layout
    if layout is not None and (layout.Tq, layout.Tk) != (Tq, Tk):
        raise ValueError(
            f"q has {Tq} queries and k has {Tk} keys; expected {layout.Tq} and {layout.Tk}, for which the carry's "
            "layout was made: all layers of a block have the same tokens"
        )
    if carry.mask is not None and layout is None:
        carry.mask.check(B, H, Tq, Tk)
    if layout is not None and layout.bounds.device != q.device:
        raise ValueError(f"the carry's layout is on {layout.bounds.device}; expected {q.device}, where q is")
    if layout is not None and layout.bounds.shape[2] not in (1, B):
        raise ValueError(f"q has batch {B}; expected {layout.bounds.shape[2]}, that of the layout's mask")
    check_like(carry._like, q, k)
    check_heads(config, carry.index, gain, sink, q)
    check_seed(seed, q)
