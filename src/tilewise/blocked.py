"""The exact path for any device: tiles of S = QKᵀ + terms in linear memory, forward and backward, bitwise repeatable.

Forward keeps the running maximum and sum of each row; backward recomputes P from lse:
Δ = rowsum(dO ∘ O) − dlse, dS = P ∘ (dO·Vᵀ − Δ), dQ = τ dS·K, dK = τ dSᵀ·Q, dV = Pᵀ·dO.
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor

from .band import skew, skew_of_keys
from .call import Call
from .mask import UNBOUNDED
from .tiles import Block, Plan, Tile

__all__ = ["backward", "forward"]

FUSED_ROWS = 768
"""Rows of a call to the fused kernel under a window: its fastest split begins there, and more see more hidden keys."""

LARGEST = 1e4
"""The largest lse that the fused kernel serves: half a rounding of it is 5e-4 of P."""


def _exact_products(function):
    """Under autocast the products of fp32 tiles would be taken in bf16: an error of 0.2 % of a score."""

    @functools.wraps(function)
    def run(call: Call, *args) -> None:
        device = call.q.device.type
        known = torch.amp.is_autocast_available(device)
        with torch.autocast(device, enabled=False) if known else contextlib.nullcontext():
            function(call, *args)

    return run


@_exact_products
def forward(call: Call, o: Tensor, lse: Tensor) -> None:
    """Fill o [B, H, Tq, d_v] and lse [B, H, Tq]."""
    plan = Plan(call)
    if _fusable(plan) and _fused(plan, o, lse):
        return
    for b, key_heads in plan.planes():
        for block in plan.blocks(b, key_heads):
            O, row_lse = _rows(plan, block)
            o[b, block.heads, block.rows] = O.flip(1).to(o.dtype)
            lse[b, block.heads, block.rows] = row_lse[..., 0].flip(1)


def _rows(plan: Plan, block: Block) -> tuple[Tensor, Tensor]:
    """O [heads, n, d_v] and lse [heads, n, 1] of a block."""
    call, lowest = plan.call, torch.finfo(plan.dtype).min
    O = block.q.new_zeros(*block.q.shape[:2], call.v.shape[-1])
    total = block.q.new_zeros(*block.q.shape[:2], 1)
    largest = torch.full_like(total, lowest)
    for tile in plan.tiles(block):
        seen = None if tile.whole else plan.seen(block, tile)
        S = plan.scores(block, tile, None, seen)
        above = torch.maximum(largest, S.amax(-1, keepdim=True))
        P = S.sub_(above).clamp_(min=plan.floor).exp_()
        if seen is not None:
            P.mul_(seen)
        shrink = largest.sub_(above).exp_()
        total.mul_(shrink).add_(P.sum(-1, keepdim=True))
        largest = above
        if call.dropout_p > 0.0:
            P.mul_(plan.kept(block, tile))
        O.mul_(shrink)
        plan.by_group(O).baddbmm_(plan.by_group(P), plan.v[block.b, block.key_heads, tile.keys])
        if plan.terms.values:
            D, columns = plan.by_offset(P, tile)
            for factor in plan.terms.values:
                O.add_(factor.back(D, block.heads, columns))
    empty = largest == lowest
    total.masked_fill_(empty, 1.0)
    return O.div_(total).masked_fill_(empty, 0.0), (largest + total.log()).masked_fill_(empty, float("-inf"))


def _fusable(plan: Plan) -> bool:
    """Whether PyTorch's fused CPU kernel computes the call: its additive mask may be any strided view, so that a scalar
    term costs one vector, and it errs as dense PyTorch does. One key range a batch entry, no dropout, fp32 arithmetic.
    """
    call, terms = plan.call, plan.terms
    return (
        plan.device.type == "cpu" and plan.dtype == torch.float32 and call.dropout_p == 0.0 and plan.group == 1
        and call.v.shape[3] == call.q.shape[3] and not (terms.queries or terms.keys or terms.values)
        and plan.key_ranges() is not None
        # The fused kernel turns NaN scores into zeros and a row whose scores are all −∞ into one that sees keys; tiles
        # do neither. A sum costs one pass over q or k.
        and all(bool(x.detach().sum().isfinite()) for x in (call.q, call.k))
        and (terms.bias is None or bool((terms.bias > float("-inf")).all()))
    )  # fmt: skip


def _by_rows(x: Tensor) -> Tensor:
    """x with rows that PyTorch's fused kernel can read: it takes the last stride for 1 and does not ask."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _fused(plan: Plan, o: Tensor, lse: Tensor) -> bool:
    """Forward of a call that is fusable. The window is a part of the vector, since it too depends on δ alone.

    False, and nothing of worth in o and lse, if scores are so large that the backward, which makes tiles of them, would
    not find them again: the kernel multiplies by τ after the product, so its scores are others by a rounding.
    """
    call, mask = plan.call, plan.call.mask
    B, H, Tq, _ = call.q.shape
    bias, ranges = plan.terms.all_offsets(), plan.key_ranges()
    q, k, v = (_by_rows(x) for x in (call.q, plan.k, plan.v))
    bounded = mask.left < UNBOUNDED or mask.right < UNBOUNDED
    n = min(Tq, FUSED_ROWS) if bounded else Tq
    entries = [slice(0, B)] if len(set(ranges)) == 1 else [slice(b, b + 1) for b in range(B)]
    for entry in entries:
        for i0 in range(0, Tq, n):
            rows = slice(i0, min(i0 + n, Tq))
            lo, hi = plan.window(i0, rows.stop, *ranges[entry.start])
            if hi <= lo:
                o[entry, :, rows], lse[entry, :, rows] = 0.0, float("-inf")
                continue
            view = None
            if bias is not None:
                strides = (0, bias.stride(0) if len(bias) > 1 else 0, 1, 1)
                view = bias.as_strided((1, H, rows.stop - i0, hi - lo), strides, Tq - rows.stop + lo)
            O, row_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _by_rows(q[entry, :, rows].flip(2).to(plan.dtype)), k[entry, :, lo:hi], v[entry, :, lo:hi],
                attn_mask=view, scale=call.scale,
            )  # fmt: skip
            least, most = torch.aminmax(row_lse)
            if not (-LARGEST <= least.item() and most.item() <= LARGEST):
                return False
            O, row_lse = O.flip(2), row_lse.flip(2)
            if bounded:
                at = torch.arange(i0, rows.stop) + call.offset
                empty = (at - mask.left >= hi) | (at + mask.right < lo)
                O, row_lse = O.masked_fill(empty[:, None], 0.0), row_lse.masked_fill(empty, float("-inf"))
            o[entry, :, rows], lse[entry, :, rows] = O.to(o.dtype), row_lse
    return True


@_exact_products
def backward(
    call: Call, do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, need: list[bool], grads: list[Tensor]
) -> None:
    """Fill the gradients of q, k, v and of each of the call's tensors where `need` says so."""
    plan = Plan(call)
    terms = plan.terms
    dq, dk, dv = (grad if wanted else None for grad, wanted in zip(grads[:3], need[:3], strict=True))
    rest = [grad if wanted else None for grad, wanted in zip(grads[3:], need[3:], strict=True)]
    outputs = iter(rest)
    tables, lefts = {}, {}
    for factor in terms.factors:
        tables[factor] = next(outputs)
        lefts[factor] = next(outputs) if factor.port.left is not None else None
    terms.zero_gradients([tables[factor] is not None for factor in terms.factors])

    for b, key_heads in plan.planes():
        dK = plan.k.new_zeros(*plan.k[b, key_heads].shape) if dk is not None else None
        dV = plan.v.new_zeros(*plan.v[b, key_heads].shape) if dv is not None else None
        for block in plan.blocks(b, key_heads):
            dQ = torch.zeros_like(block.q) if dq is not None else None
            dlefts = [
                dQ if factor.port.left is None else None if lefts[factor] is None else torch.zeros_like(left)
                for factor, left in zip(terms.queries, block.lefts, strict=True)
            ]
            _rows_backward(plan, block, do, dlse, o, lse, dQ, dlefts, dK, dV)
            if dQ is not None:
                dq[b, block.heads, block.rows] = dQ.mul_(call.scale).flip(1).to(dq.dtype)
            for factor, dleft in zip(terms.queries, dlefts, strict=True):
                if lefts[factor] is not None:
                    out = lefts[factor][b, block.heads, block.rows]
                    out.copy_(dleft.mul_(factor.scale).flip(1).view(out.shape))
        if dK is not None:
            dk[b, key_heads] = dK.to(dk.dtype)
        if dV is not None:
            dv[b, key_heads] = dV.to(dv.dtype)
    for factor, out in tables.items():
        if out is not None:
            terms.fold(factor, out)


def _rows_backward(
    plan: Plan, block: Block, do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, dQ: Tensor | None,
    dlefts: list[Tensor | None], dK: Tensor | None, dV: Tensor | None,
) -> None:  # fmt: skip
    """Add a block's part to the gradients: dQ and dlefts [heads, n, ·] of its rows, dK and dV of its planes' keys."""
    call, terms, b, heads = plan.call, plan.terms, block.b, block.heads
    row_lse = plan.take(lse, b, heads, block.rows)[..., None]
    empty = row_lse == float("-inf")
    dO = plan.take(do, b, heads, block.rows).masked_fill_(empty, 0.0)
    # Finite, so that S − lse is far below the floor and never NaN.
    row_lse.masked_fill_(empty, torch.finfo(plan.dtype).max / 4)
    tiles, total, delta = [], torch.zeros_like(row_lse), torch.zeros_like(row_lse)
    for tile in plan.tiles(block):
        seen = None if tile.whole else plan.seen(block, tile)
        P = plan.scores(block, tile, row_lse, seen, name=f"P{len(tiles)}").clamp_(min=plan.floor).exp_()
        if seen is not None:
            P.mul_(seen)
        dP = plan.product(f"dP{len(tiles)}", dO, plan.v[b, block.key_heads, tile.keys].mT)
        if terms.values:
            G = plan.projected(terms.values, [dO] * len(terms.values), heads, plan.columns(tile))
            dP.add_(G if tile.at is not None else skew(G, dP.shape[2]))
        kept = plan.kept(block, tile) if call.dropout_p > 0.0 else None
        if kept is not None:
            dP.mul_(kept)
        total.add_(P.sum(-1, keepdim=True))
        delta.add_(torch.mul(P, dP, out=plan.work("S", *P.shape)).sum(-1, keepdim=True))
        tiles.append((tile, P, dP, kept))
    total.masked_fill_(empty, 1.0)
    delta.div_(total)
    if dlse is not None:
        delta.sub_(plan.take(dlse, b, heads, block.rows)[..., None].masked_fill(empty, 0.0))
    for tile, P, dP, kept in tiles:
        P.div_(total)
        dropped = P if kept is None else P * kept
        keys, k = tile.keys, plan.k[b, block.key_heads, tile.keys]
        if dV is not None:
            dV[:, keys].add_(torch.bmm(plan.by_group(dropped).mT, plan.by_group(dO)))
        if any(factor.dE is not None for factor in terms.values):
            D, columns = plan.by_offset(dropped, tile)
            for factor in terms.values:
                if factor.dE is not None:
                    factor.accumulate(D, dO, heads, columns)
        dS = dP.sub_(delta).mul_(P)
        if dQ is not None:
            plan.by_group(dQ).baddbmm_(plan.by_group(dS), k)
        if dK is not None:
            q, _ = plan.shifted(block, tile.at)
            dK[:, keys].add_(torch.bmm(plan.by_group(dS).mT, plan.by_group(q)))
        if terms.queries or terms.dbias is not None:
            D, columns = plan.by_offset(dS, tile)
            if terms.dbias is not None:
                terms.dbias[heads, columns].add_(D.sum(1))
            for factor, left, dleft in zip(terms.queries, block.lefts, dlefts, strict=True):
                if factor.dE is not None:
                    factor.accumulate(D, left, heads, columns)
                if dleft is not None:
                    dleft.add_(factor.back(D, heads, columns))
        if terms.keys:
            _keys_backward(plan, block, tile, dS, k, dK)


def _keys_backward(plan: Plan, block: Block, tile: Tile, dS: Tensor, k: Tensor, dK: Tensor | None) -> None:
    """What the on-key terms of a tile add to their tables' gradients and, in the band, to dK (elsewhere q has it)."""
    left = plan.repeated(k) * plan.call.scale
    if tile.at is None:
        D = plan.work("D", dS.shape[0], dS.shape[2], tile.columns.stop - tile.columns.start).zero_()
        skew_of_keys(D, dS.shape[1]).copy_(dS)
    else:
        D = dS.sum(1)[..., None]
    for factor in plan.terms.keys:
        if factor.dE is not None:
            factor.accumulate(D, left, block.heads, plan.columns(tile))
        if dK is not None and tile.at is None:
            dk = factor.back(D, block.heads, tile.columns).mul_(plan.call.scale)
            dK[:, tile.keys].add_(dk.view(dK.shape[0], plan.group, *dk.shape[1:]).sum(1))
