"""The systems of the relative set in PyTorch itself: dense, SDPA with a dense bias, FlexAttention, and Tilewise.

A builder takes (case, sizes, tensors) and returns () ↦ O. Whatever depends on the lengths alone (index matrices) is
made once by the builder; whatever depends on a tensor (biases, projections, shifts) is made inside the call and timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import attention
from ..rows import RowMap
from ..terms import Port, lower
from ..testing import Case, Sizes

__all__ = ["SYSTEMS", "Builder", "plain"]

Builder = Callable[[Case, Sizes, dict[str, Tensor]], Callable[[], Tensor]]


def _compile(function: Callable) -> Callable:
    """torch.compile, one graph a length, as many lengths as a run has."""
    import torch._dynamo.config
    import torch._functorch.config

    torch._dynamo.config.recompile_limit = 512
    # A backward with donated buffers refuses retain_graph, which timing a backward alone needs.
    torch._functorch.config.donated_buffer = False
    return torch.compile(function, dynamic=False)


def plain(backend: SDPBackend | None) -> Builder:
    """scaled_dot_product_attention without any term, by one backend (None: PyTorch's own choice)."""

    def build(case: Case, sizes: Sizes, x: dict[str, Tensor]) -> Callable[[], Tensor]:
        q, k, v, scale = x["q"], x["k"], x["v"], case.scale(sizes.d)

        def run() -> Tensor:
            if backend is None:
                return F.scaled_dot_product_attention(q, k, v, scale=scale)
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, scale=scale)

        return run

    return build


def tilewise(impl: str) -> Builder:
    """This package, by the implementation named."""

    def build(case: Case, sizes: Sizes, x: dict[str, Tensor]) -> Callable[[], Tensor]:
        return lambda: attention(x["q"], x["k"], x["v"], impl=impl, **case.arguments(x, sizes))

    return build


def _indices(ports: list[Port], N: int, device: torch.device) -> list[Tensor | None]:
    """The row of each (i, j) as libraries store it: an int64 matrix; None for identity maps, which are shifted."""
    i = torch.arange(N, device=device)
    where = i[:, None] - i + (N - 1)
    spans = [None if p.rows.kind == "identity" else p.rows.span(-(N - 1), N - 1) for p in ports]
    return [None if rows is None else rows.to(device, torch.int64)[where] for rows in spans]


def _shift(scores: Tensor, N: int) -> Tensor:
    """Transformer-XL's relative shift: [B, H, N, 2N − 1] in descending offsets ↦ [B, H, N, N] by key."""
    B, H = scores.shape[:2]
    return F.pad(scores, (1, 0)).view(B, H, 2 * N, N)[:, :, 1:].reshape(B, H, N, 2 * N - 1)[..., :N]


def _dense_terms(
    q: Tensor, k: Tensor, kinds: list[str], tables: list[Tensor], lefts: list[Tensor | None],
    indices: list[Tensor | None],
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Dense terms: (what the scale multiplies, what is added after it), each None where there is nothing."""
    inside, after = None, None
    B, H, N, _ = q.shape
    for kind, table, left, index in zip(kinds, tables, lefts, indices, strict=True):
        if kind == "scalar":
            term = table[:, index][None]
            after = term if after is None else after + term
            continue
        if kind == "key":
            term = torch.gather(k @ table.mT, -1, index.mT.expand(B, H, N, N)).mT
        elif index is None:
            term = _shift((q if left is None else left) @ table.mT, N)
        else:
            term = torch.gather((q if left is None else left) @ table.mT, -1, index.expand(B, H, N, N))
        inside = term if inside is None else inside + term
    return inside, after


def _eager(content: Tensor, k: Tensor, v: Tensor, scale: float, *terms) -> Tensor:
    inside, after = _dense_terms(content, k, *terms)
    S = content @ k.mT
    if inside is not None:
        S = S + inside
    if scale != 1.0:
        S = S * scale
    if after is not None:
        S = S + after
    return torch.softmax(S, -1) @ v


def _bias(content: Tensor, k: Tensor, scale: float, *terms) -> Tensor:
    inside, after = _dense_terms(content, k, *terms)
    inside = None if inside is None else inside * scale
    return after if inside is None else inside if after is None else inside + after


def _lowered(case: Case, sizes: Sizes, x: dict[str, Tensor]):
    """() ↦ (content, kinds, tables, lefts, indices); the indices are made once."""
    _, ports = lower(x["q"], case.build(x, sizes))
    indices = _indices(ports, sizes.Tq, x["q"].device)

    def parts() -> tuple:
        content, ports = lower(x["q"], case.build(x, sizes))
        return content, [p.kind for p in ports], [p.table for p in ports], [p.left for p in ports], indices

    return parts


def eager(case: Case, sizes: Sizes, x: dict[str, Tensor]) -> Callable[[], Tensor]:
    """Dense scores, dense terms, softmax: what the model libraries run by default."""
    parts, scale = _lowered(case, sizes, x), case.scale(sizes.d)

    def run() -> Tensor:
        content, *terms = parts()
        return _eager(content, x["k"], x["v"], scale, *terms)

    return run


@cache
def _compiled():
    return _compile(_eager)


def compiled(case: Case, sizes: Sizes, x: dict[str, Tensor]) -> Callable[[], Tensor]:
    """torch.compile of the dense formulation, one graph a length."""
    parts, scale = _lowered(case, sizes, x), case.scale(sizes.d)

    def run() -> Tensor:
        content, *terms = parts()
        return _compiled()(content, x["k"], x["v"], scale, *terms)

    return run


def sdpa_bias(case: Case, sizes: Sizes, x: dict[str, Tensor]) -> Callable[[], Tensor]:
    """scaled_dot_product_attention with the terms as a dense additive mask, built in every call.

    For Transformer-XL this is NeMo's path: (q + v)·P shifted, scaled and handed over as ``attn_mask`` beside q + u.
    """
    parts, scale = _lowered(case, sizes, x), case.scale(sizes.d)

    def run() -> Tensor:
        content, *terms = parts()
        bias = _bias(content, x["k"], scale, *terms).expand(sizes.B, -1, -1, -1)
        return F.scaled_dot_product_attention(content, x["k"], x["v"], attn_mask=bias, scale=scale)

    return run


@cache
def _flex():
    from torch.nn.attention.flex_attention import flex_attention

    return _compile(flex_attention)


def flex_dense(case: Case, sizes: Sizes, x: dict[str, Tensor]) -> Callable[[], Tensor]:
    """FlexAttention whose score_mod reads a dense bias: what it can do without a decomposition of the term."""
    parts, scale = _lowered(case, sizes, x), case.scale(sizes.d)

    def run() -> Tensor:
        content, *terms = parts()
        bias = _bias(content, x["k"], scale, *terms)
        shared = bias.shape[0] == 1

        def from_all(score, b, h, i, j):
            return score + bias[b, h, i, j]

        def from_one(score, b, h, i, j):
            return score + bias[0, h, i, j]

        return _flex()(content, x["k"], x["v"], score_mod=from_one if shared else from_all, scale=scale)

    return run


def _row_of(rows: RowMap, N: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """δ ↦ row for a score_mod: arithmetic where the map has a formula, else a lookup by offset."""
    if rows.kind == "identity":
        reach, descending = rows.params
        return (lambda delta: reach - delta) if descending else (lambda delta: delta + reach)
    if rows.kind == "clipped":
        left, right, descending = rows.params
        if descending:
            return lambda delta: right - delta.clamp(left, right)
        return lambda delta: delta.clamp(left, right) - left
    lookup = rows.span(-(N - 1), N - 1).to(device)
    return lambda delta: lookup[delta + (N - 1)]


def _flex_part(kind: str, values: Tensor, row_of: Callable, N: int) -> Callable:
    if kind == "scalar":
        return lambda b, h, i, j: values[h, i - j + (N - 1)]
    if kind == "query":
        return lambda b, h, i, j: values[b, h, i, row_of(i - j)]
    return lambda b, h, i, j: values[b, h, j, row_of(i - j)]


def _score_mod(parts: list[Callable]) -> Callable | None:
    if not parts:
        return None

    def score_mod(score, b, h, i, j):
        for part in parts:
            score = score + part(b, h, i, j)
        return score

    return score_mod


def flex(case: Case, sizes: Sizes, x: dict[str, Tensor]) -> Callable[[], Tensor]:
    """FlexAttention with our decomposition: Z = left·tableᵀ per row first, one lookup of Z a score.

    Scalar tables are expanded to one value an offset first, which spares the score_mod the row map.
    """
    _, ports = lower(x["q"], case.build(x, sizes))
    N, scale, device = sizes.Tq, case.scale(sizes.d), x["q"].device
    row_of = [_row_of(port.rows, N, device) for port in ports]
    expand = [
        port.rows.span(-(N - 1), N - 1).to(device, torch.int64) if port.kind == "scalar" else None for port in ports
    ]

    def run() -> Tensor:
        content, ports = lower(x["q"], case.build(x, sizes))
        parts = []
        for port, rows, index in zip(ports, row_of, expand, strict=True):
            if port.kind == "scalar":
                values = port.table[:, index]
            else:
                left = x["k"] if port.kind == "key" else content if port.left is None else port.left
                values = (left @ port.table.mT) * scale
            parts.append(_flex_part(port.kind, values, rows, N))
        return _flex()(content, x["k"], x["v"], score_mod=_score_mod(parts), scale=scale)

    return run


SYSTEMS: dict[str, Builder] = {
    "tilewise": tilewise("triton"),
    "tilewise-blocked": tilewise("blocked"),
    "eager": eager,
    "compile": compiled,
    "sdpa-bias": sdpa_bias,
    "nemo-sdpa": sdpa_bias,
    "flex": flex,
    "flex-dense": flex_dense,
    "cudnn": plain(SDPBackend.CUDNN_ATTENTION),
    "sdpa-flash": plain(SDPBackend.FLASH_ATTENTION),
    "sdpa": plain(None),
}
