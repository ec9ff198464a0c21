"""Carried attention on any device, one row of tiles at a time: O(N · tile) memory beside the packed carry."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dropout import keep
from .config import Options
from .layout import by_token

__all__ = ["backward", "forward"]


def forward(
    q: list[Tensor], k: list[Tensor], v: Tensor, gain: list[Tensor], centre: list[Tensor], bounds: Tensor, rows: Tensor,
    z_in: Tensor | None, z_out: Tensor | None, accumulate: bool, sink: Tensor | None, seed: Tensor | None, opt: Options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O [B, H, Tq, d_v] and lse [B, H, Tq] (fp32 or fp64; +∞ for rows that see no key, so that exp(S − lse) = 0).

    The scores of the last entry of `q`, `k` are those of this layer; entries before it are layers summed again. The
    carry that enters the first entry is read from `z_in`, or from `z_out` if `accumulate`; what leaves the last is
    written to `z_out`. Carries are ΣQKᵀ without the scale. With `centre` (for each layer [B, Hk, d], the mean of its
    keys) K less its mean takes the place of K: every row is shifted by a number, which the softmax does not see.
    `bounds` is int32 [n, 2, 1 or B, Tq]: which keys a row sees in the last n layers. O is [B, Tq, H, d_v] in memory, as
    projections take it.
    """
    B, H, Tq, _ = q[-1].shape
    real = _compute_dtype(v)
    v_all = v.to(real)
    O, lse = by_token(v, B, H, Tq, v.shape[-1]), v.new_empty(B, H, Tq, dtype=real)
    source = z_out if accumulate else z_in
    for m, plan in enumerate(rows.t().tolist()):
        row = _Row(m, plan, Tq, v.shape[2], bounds, opt)
        if row.empty:
            O[:, :, row.rows] = 0
            lse[:, :, row.rows] = torch.inf if sink is None else sink.to(real)[:, None]
            continue
        entering = None if source is None else row.read(source, row.before, real)
        U, _ = _accumulate(row, q, k, gain, centre, entering, real, opt)
        if z_out is not None:
            row.write(z_out, U.masked_fill(~row.seen[-1], 0.0))
        S = _scores(U, opt)[0].masked_fill(~row.seen[-1], -torch.inf)
        top = S.amax(-1, keepdim=True)
        if sink is not None:
            top = torch.maximum(top, sink.to(real)[:, None, None])
        top = top.masked_fill(top == -torch.inf, 0.0)
        P = (S - top).exp_()
        total = P.sum(-1, keepdim=True)
        if sink is not None:
            total = total + (sink.to(real)[:, None, None] - top).exp()
        if opt.dropout_p > 0.0:
            P = P * row.kept(seed, B, H, opt.dropout_p, real)
        O[:, :, row.rows] = (_grouped(P, v_all[:, :, row.columns]) / total.masked_fill(total == 0.0, 1.0)).to(O.dtype)
        lse[:, :, row.rows] = torch.where(total > 0.0, top + total.log(), torch.inf)[..., 0]
    return O, lse


def backward(
    dO: Tensor, q: list[Tensor], k: list[Tensor], v: Tensor, O: Tensor, lse: Tensor, gain: list[Tensor],
    centre: list[Tensor], bounds: Tensor, rows: Tensor, columns: Tensor, z: Tensor | None, z_is_own: bool,
    e: Tensor | None, read_e: bool, write_e: bool, push: bool, sink: Tensor | None, seed: Tensor | None, opt: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """dQ, dK, dV, dβ [n, H] and dsink [H]; the last two are None without gains, without a sink.

    If `push`, dQ and dK [n, …] of every summed layer, in fp32 (fp64 for fp64): other layers' are added to them; else
    those of the last. Gradients are [B, T, heads, d] in memory. dβ is of as many layers.

    `z` holds this layer's own scores if `z_is_own`, else the carry that enters the first summed layer. `e` is the
    gradient of the carry: read (E_{i+1}, what the next layer asks of this layer's scores) and overwritten by what this
    layer asks of the carry it took. Nothing is added in an order that depends on timing: two runs are bitwise equal.
    """
    B, H, Tq, _ = q[-1].shape
    real = _compute_dtype(v)
    first = 0 if push else len(q) - 1
    dq = torch.zeros(len(q) - first, *q[-1].shape, dtype=real, device=v.device)
    dk = torch.zeros(len(q) - first, *k[-1].shape, dtype=real, device=v.device)
    dv = torch.zeros(v.shape, dtype=real, device=v.device)
    dgain = torch.zeros(len(gain[first:]), H, dtype=real, device=v.device)
    delta = (dO.to(real) * O.to(real)).sum(-1)
    v_all = v.to(real)
    for m, plan in enumerate(rows.t().tolist()):
        row = _Row(m, plan, Tq, v.shape[2], bounds, opt)
        if row.empty:
            continue
        taken: list[Tensor | None] = [None] * len(q)
        if z_is_own:
            U = row.read(z, row.own, real)
        else:
            entering = None if z is None else row.read(z, row.before, real)
            U, taken = _accumulate(row, q, k, gain, centre, entering, real, opt)
        S, slope = _scores(U, opt)
        P = (S - lse[:, :, row.rows, None]).exp_().masked_fill_(~row.seen[-1], 0.0)
        G = dO[:, :, row.rows].to(real)
        dP = _grouped(G, v_all[:, :, row.columns].mT)
        kept = row.kept(seed, B, H, opt.dropout_p, real) if opt.dropout_p > 0.0 else None
        dv[:, :, row.columns] += _reduced(P if kept is None else P * kept, G, v.shape[1])
        if kept is not None:
            dP = dP * kept
        E = P * (dP - delta[:, :, row.rows, None]) * slope
        if read_e:
            E = E + row.read(e, row.after, real).masked_fill(~row.seen[-1], 0.0)
        for j in range(len(q) - 1, first - 1, -1):
            dq[j - first][:, :, row.rows] += opt.scale * _grouped(E, _keys(k[j], centre, j, row, real))
            dk[j - first][:, :, row.columns] += opt.scale * _reduced(E, q[j][:, :, row.rows].to(real), v.shape[1])
            if gain and taken[j] is not None:
                dgain[j - first] += opt.scale * (E * taken[j]).sum((0, 2, 3))
            if gain and (j > 0 or write_e):
                E = E * gain[j].to(real)[:, None, None]
            if j > 0 and not opt.uniform:
                E = E.masked_fill(~row.seen[j - 1], 0.0)
        if write_e:
            row.write(e, E)
    dsink = None
    if sink is not None:
        share = (sink.to(real)[:, None] - lse).exp().masked_fill(torch.isinf(lse), 0.0)
        dsink = -(share * delta).sum((0, 2))
    if not push:
        dq, dk = dq[0], dk[0]
    kept = real if push else v.dtype
    return _by_token(dq, kept), _by_token(dk, kept), _by_token(dv, v.dtype), dgain if gain else None, dsink


class _Row:
    """One row of tiles: its queries, the keys its live tiles span, and its place in packed buffers."""

    def __init__(self, m: int, plan: list[int], Tq: int, Tk: int, bounds: Tensor, opt: Options) -> None:
        self.tile, self.base = opt.tile, plan[0]
        self.own, self.before, self.after = tuple(plan[1:3]), tuple(plan[3:5]), tuple(plan[5:7])
        self.empty = self.own[0] >= self.own[1]
        self.rows = slice(m * self.tile, min((m + 1) * self.tile, Tq))
        self.columns = slice(self.own[0] * self.tile, min(self.own[1] * self.tile, Tk))
        if not self.empty:
            j = torch.arange(self.columns.start, self.columns.stop, device=bounds.device)
            self.seen = [
                ((j >= a[:, self.rows, None]) & (j < b[:, self.rows, None]))[:, None] for a, b in bounds.unbind()
            ]

    def _part(self, span: tuple[int, int]) -> tuple[int, int]:
        """The tiles of `span` that this row also visits."""
        first, end = max(span[0], self.own[0]), min(span[1], self.own[1])
        return first, max(first, end)

    def read(self, packed: Tensor, span: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """[B, H, rows, columns]; zero for tiles outside `span`, which are never read."""
        first, end = self._part(span)
        B, H = packed.shape[:2]
        tiles = packed[:, :, self.base + first : self.base + end].to(dtype)
        flat = tiles.permute(0, 1, 3, 2, 4).reshape(B, H, self.tile, -1)[:, :, : self.rows.stop - self.rows.start]
        left = (first - self.own[0]) * self.tile
        width = self.columns.stop - self.columns.start
        flat = flat[..., : max(width - left, 0)]
        return torch.nn.functional.pad(flat, (left, width - left - flat.shape[-1]))

    def write(self, packed: Tensor, values: Tensor) -> None:
        """Round (saturated) and store the tiles this row visits; what lies beyond the last query or key is zero."""
        B, H = packed.shape[:2]
        count = self.own[1] - self.own[0]
        full = torch.nn.functional.pad(
            _saturate(values, packed.dtype), (0, count * self.tile - values.shape[-1], 0, self.tile - values.shape[-2])
        )
        tiles = full.view(B, H, self.tile, count, self.tile).transpose(2, 3)
        packed[:, :, self.base + self.own[0] : self.base + self.own[1]] = tiles

    def kept(self, seed: Tensor, B: int, H: int, p: float, dtype: torch.dtype) -> Tensor:
        """What dropout multiplies P with: 0 or 1/(1 − p)."""
        device = seed.device
        planes, rows = torch.arange(B * H, device=device), torch.arange(self.rows.start, self.rows.stop, device=device)
        mask = keep(seed, planes, rows, (self.columns.start, self.columns.stop), p)
        return mask.view(B, H, mask.shape[1], mask.shape[2]).to(dtype) / (1.0 - p)


def _accumulate(
    row: _Row, q: list[Tensor], k: list[Tensor], gain: list[Tensor], centre: list[Tensor],
    entering: Tensor | None, real: torch.dtype, opt: Options,
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    """The unscaled scores of the last layer, and the carry that entered each."""
    taken: list[Tensor | None] = []
    carry, U = entering, None
    for j, (Q, K) in enumerate(zip(q, k, strict=True)):
        taken.append(carry)
        U = _grouped(Q[:, :, row.rows].to(real), _keys(K, centre, j, row, real).mT)
        if carry is not None:
            U = U + (gain[j].to(real)[:, None, None] * carry if gain else carry)
        if opt.rounded[j]:
            U = _saturate(U, opt.carry_dtype).to(real)
        carry = U if opt.uniform or j == len(q) - 1 else U.masked_fill(~row.seen[j], 0.0)
    return U, taken


def _keys(K: Tensor, centre: list[Tensor], j: int, row: _Row, real: torch.dtype) -> Tensor:
    """The keys of a row, less their mean if scores are centred: E's rows sum to zero, so dQ is the same.

    Any shift of a row is right, so a mean that a later key makes infinite or NaN is 0 there: rows before it stay.
    """
    K = K[:, :, row.columns].to(real)
    return K - centre[j].to(real).nan_to_num(0.0, 0.0, 0.0)[:, :, None] if centre else K


def _scores(U: Tensor, opt: Options) -> tuple[Tensor, Tensor | float]:
    """The scores that the softmax sees, and their slope in units of the scale: dS/dU = scale · slope."""
    S = U * (opt.scale / opt.divisor)
    if opt.softcap == 0.0:
        return S, 1.0 / opt.divisor
    bend = torch.tanh(S / opt.softcap)
    return opt.softcap * bend, (1.0 - bend * bend) / opt.divisor


def _grouped(x: Tensor, y: Tensor) -> Tensor:
    """x [B, H, R, C] @ y [B, Hk, C, D] with query heads grouped over key heads."""
    B, H, R, C = x.shape
    return (x.reshape(B, y.shape[1], -1, C) @ y).view(B, H, R, y.shape[-1])


def _reduced(x: Tensor, y: Tensor, Hk: int) -> Tensor:
    """Σ over the query heads of a key head of xᵀ y: x [B, H, R, C], y [B, H, R, D] to [B, Hk, C, D]."""
    B, _, _, C = x.shape
    return x.reshape(B, Hk, -1, C).mT @ y.reshape(B, Hk, -1, y.shape[-1])


def _by_token(x: Tensor, dtype: torch.dtype) -> Tensor:
    return by_token(x, *x.shape, dtype=dtype).copy_(x)


def _saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    top = torch.finfo(dtype).max
    return x.clamp(-top, top).to(dtype)


def _compute_dtype(v: Tensor) -> torch.dtype:
    return torch.float64 if v.dtype == torch.float64 else torch.float32
