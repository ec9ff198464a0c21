"""The oracle of the relative set: dense attention in fp64, block by block, and the verdict on a result.

It shares no formula with the implementations: tables are expanded to one row an offset, and the product with them is
turned into scores by its strides (element (i, j) of the scores sits on a line of slope −1), without a gather.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..terms import Port, lower
from ..testing import Case, Sizes
from .cells import Truth

__all__ = ["dense_attention", "gate", "truth", "verdict"]


def verdict(got: Tensor, exact: Tensor, low_error: float, *, factor: float = 2.0) -> dict:
    """The rule of :func:`tilewise.testing.error_budget`, on the tensors' own device and from a stored low error.

    Returns:
        ``error``, ``allowed``, ``relative`` (L2), ``published`` and ``budget`` (whether each rule is met).
    """
    if got.shape != exact.shape:
        raise ValueError(f"got has shape {tuple(got.shape)}; expected {tuple(exact.shape)}")
    unit = torch.finfo(got.dtype).eps
    difference = (got.detach().double() - exact.double()).abs()
    size = exact.abs().double()
    # A NaN fails both rules: every comparison with it is False.
    error = difference.max().item()
    allowed = factor * low_error + 2 * unit * size.max().item()
    relative = (difference.norm() / size.norm().clamp_min(torch.finfo(torch.float64).tiny)).item()
    elementwise = bool((difference <= (0.05 * size).clamp(min=0.03)).all())
    return {
        "error": error,
        "allowed": allowed,
        "relative": relative,
        "published": elementwise or relative <= 8 * unit,
        "budget": error <= allowed,
    }


def gate(got: Tensor, exact: Tensor, low_error: float, strict: bool) -> dict:
    """:func:`verdict` with ``ok``: the published rule is met and, if `strict`, the budget too."""
    found = verdict(got, exact, low_error)
    return found | {"ok": found["published"] and (found["budget"] or not strict)}


def truth(case: Case, sizes: Sizes, inputs: dict[str, Tensor], upstream: Tensor) -> Truth:
    """Output and gradients in fp64, and how far dense PyTorch in the inputs' dtype is from them."""
    exact = dense_attention(case, sizes, {name: x.double() for name, x in inputs.items()}, upstream.double())
    low = dense_attention(case, sizes, inputs, upstream)
    error = {name: (low[name].double() - exact[name]).abs().max().item() for name in exact}
    # Half-precision results are far coarser than fp32; an fp32 result would be charged for the rounding of its truth.
    kept = torch.float32 if upstream.dtype.itemsize == 2 else torch.float64
    return Truth({name: x.to(kept) for name, x in exact.items()}, error)


def dense_attention(
    case: Case, sizes: Sizes, inputs: dict[str, Tensor], upstream: Tensor, block: int = 2**27
) -> dict[str, Tensor]:
    """O and the gradient of every input, in the inputs' dtype, with at most `block` scores in memory at a time.

    Gradients of tables and sums over blocks are accumulated in fp32 (fp64 for fp64 inputs) and rounded once.

    Args:
        case: its terms are scalar, query-side, key-side and value-side ones.
        sizes: Tq = Tk and Hk = H.
        inputs: by name, as :meth:`tilewise.testing.Case.inputs` gives them.
        upstream: dO.
        block: scores a block.
    """
    x = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    content, ports = lower(x["q"], case.build(x, sizes))
    outer = [content, x["k"], x["v"]] + [t for port in ports for t in port.tensors]
    N, H = sizes.Tq, sizes.H
    wide = torch.promote_types(upstream.dtype, torch.float32)
    rows = [port.rows.span(-(N - 1), N - 1).to(upstream.device, torch.int64) for port in ports]
    o = torch.empty_like(inputs["v"])
    # The gradient of each lowered tensor: tables first by offset, in ascending order.
    lowered = [torch.zeros(t.shape, dtype=wide, device=t.device) for t in outer]
    by_offset = [port.table.new_zeros((H, 2 * N - 1, *port.table.shape[2:]), dtype=wide) for port in ports]

    heads = max(1, min(H, block // (N * N)))
    batch = max(1, block // (heads * N * N)) if heads == H else 1
    count = min(N, max(1, block // (heads * N)))
    for b in range(0, sizes.B, batch):
        for h in range(0, H, heads):
            for i in range(0, N, count):
                part = (slice(b, b + batch), slice(h, h + heads), slice(i, i + count))
                o[part] = _block(part, N, case.scale(sizes.d), outer, ports, rows, upstream, lowered, by_offset)

    place = 3
    for port, row, gradient in zip(ports, rows, by_offset, strict=True):
        if port.table.shape[0] == 1:
            gradient = gradient.sum(0, keepdim=True)
        seen = row >= 0
        lowered[place].index_add_(1, row[seen], gradient[:, seen])
        place += len(port.tensors)
    grads = torch.autograd.grad(
        outer, list(x.values()), [g.to(t.dtype) for g, t in zip(lowered, outer, strict=True)], allow_unused=False
    )
    return {"o": o} | {f"d{name}": g for name, g in zip(x, grads, strict=True)}


def _block(
    part: tuple[slice, slice, slice], N: int, scale: float, outer: list[Tensor], ports: list[Port], rows: list[Tensor],
    upstream: Tensor, lowered: list[Tensor], by_offset: list[Tensor],
) -> Tensor:  # fmt: skip
    """O of queries i0 … i1 − 1 of some heads, adding their gradients to `lowered` and `by_offset`."""
    bs, hs, qs = part
    i0, i1 = qs.start, min(qs.stop, N)
    R = i1 - i0
    # Offsets that these queries meet: i0 − (N − 1) … i1 − 1, in ascending order; the index of −(N − 1) is 0.
    window = slice(i0, N - 1 + i1)

    def leaf(tensor: Tensor, at: tuple) -> Tensor:
        return tensor.detach()[at].requires_grad_()

    q, k, v = leaf(outer[0], part), leaf(outer[1], (bs, hs)), leaf(outer[2], (bs, hs))
    S = q @ k.mT
    biases, values, wanted = [], [], [q, k, v]
    targets = [(lowered[0], part), (lowered[1], (bs, hs)), (lowered[2], (bs, hs))]
    place = 3
    for port, row, gradient in zip(ports, rows, by_offset, strict=True):
        of = slice(None) if port.table.shape[0] == 1 else hs
        seen = (row[window] >= 0).to(port.table.dtype)
        table = port.table.detach()[of][:, row[window].clamp(min=0)]
        table = (table * (seen if table.dim() == 2 else seen[:, None])).expand(q.shape[1], *table.shape[1:])
        table = table.contiguous().requires_grad_()
        wanted.append(table)
        targets.append((gradient, (hs, window)))
        left = None
        if port.left is not None:
            left = leaf(outer[place + 1], part)
            wanted.append(left)
            targets.append((lowered[place + 1], part))
        place += len(port.tensors)
        match port.kind:
            case "query":
                S = S + _by_key((q if left is None else left) @ table.flip(1).mT, R)
            case "key":
                S = S + _by_query(k @ table.mT, R).mT
            case "scalar":
                bias = _by_key(table.flip(1)[:, None].expand(-1, R, -1).contiguous(), R)
                biases.append(bias if left is None else bias * left[..., None])
            case "value":
                values.append(table.flip(1))
    S = S * scale
    for bias in biases:
        S = S + bias
    P = S.softmax(-1)
    o = P @ v
    for table in values:
        o = o + _by_offset(P) @ table
    for (target, at), g in zip(targets, torch.autograd.grad(o, wanted, upstream[part]), strict=True):
        target[at] += g
    return o.detach()


def _by_key(Z: Tensor, R: int) -> Tensor:
    """[…, R, N + R − 1] by descending offset ↦ […, R, N] by key: out[r, j] = Z[r, R − 1 − r + j]."""
    W = Z.shape[-1]
    if R == 1:
        return Z
    return Z.flatten(-2)[..., R - 1 : R - 1 + R * (W - 1)].unflatten(-1, (R, W - 1))[..., : W - R + 1]


def _by_offset(P: Tensor) -> Tensor:
    """[…, R, N] by key ↦ […, R, N + R − 1] by descending offset: out[r, R − 1 − r + j] = P[r, j], else 0."""
    R, N = P.shape[-2:]
    if R == 1:
        return P
    return pad(pad(P, (0, R - 2)).flatten(-2), (R - 1, 1)).unflatten(-1, (R, N + R - 1))


def _by_query(Z: Tensor, R: int) -> Tensor:
    """[…, N, N + R − 1] by ascending offset ↦ […, N, R] by query: out[j, r] = Z[j, N − 1 − j + r]."""
    N, W = Z.shape[-2:]
    if N == 1:
        return Z
    return Z.flatten(-2)[..., N - 1 : N - 1 + N * (W - 1)].unflatten(-1, (N, W - 1))[..., :R]
