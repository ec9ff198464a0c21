"""The mechanisms by their own names: what a model's tables mean, as terms (:mod:`tilewise.terms`).

Each returns what goes into ``attention(..., terms=...)``, with the table in the layout in which its model stores it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import as_integer, clipped, deberta_buckets, identity, t5_buckets, windowed
from .terms import OnKey, OnQuery, OnValue, QueryBias, Scalar, Term, require_dim

__all__ = ["T5", "VITS", "ALiBi", "DeBERTa", "DeBERTaV1", "Inkling", "MPNet", "Shaw", "TransformerXL", "WavLM"]


def T5(weight: Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> Scalar:
    """T5's bias from its embedding ``relative_attention_bias.weight`` [num_buckets, H]. T5's scale is 1.0.

    Source: Raffel et al. 2020 (arXiv 1910.10683); transformers' ``T5Attention``. UMT5 and mT5 have the same form.

    Example:
        >>> T5(torch.zeros(32, 6)).table.shape
        torch.Size([6, 32])
    """
    require_dim("weight", weight, 2, "[num_buckets, H]")
    return Scalar(weight.t(), t5_buckets(weight.shape[0], max_distance, bidirectional))


def MPNet(weight: Tensor, *, max_distance: int = 128) -> Scalar:
    """MPNet's bias: T5's bidirectional buckets, added after the scale 1/√d. Source: Song et al. 2020 (2004.09297).

    Example:
        >>> MPNet(torch.zeros(32, 12)).table.shape
        torch.Size([12, 32])
    """
    return T5(weight, bidirectional=True, max_distance=max_distance)


def ALiBi(slopes: Tensor, reach: int) -> Scalar:
    """−slope_h · |i − j|, for offsets up to `reach` (the larger length − 1). Source: Press et al. 2022 (2108.12409).

    The table stays in the slopes' dtype: give them in fp32, since fp16 distances lose units beyond 2,048.

    Example:
        >>> ALiBi(torch.tensor([0.5]), reach=2).table.tolist()
        [[-1.0, -0.5, -0.0, -0.5, -1.0]]
    """
    require_dim("slopes", slopes, 1, "[H]")
    reach = as_integer("reach", reach)
    if reach < 0:
        raise ValueError(f"reach is {reach}; expected a number ≥ 0")
    distance = torch.arange(-reach, reach + 1, device=slopes.device).abs().to(slopes.dtype)
    return Scalar(-slopes[:, None] * distance, identity(reach))


def Shaw(keys: Tensor, values: Tensor | None = None, *, left: int, right: int) -> tuple[Term, ...]:
    """Shaw's clipped rows: a_ij = keys[clip(j − i, −left, right) + left], and `values` likewise on the output side.

    Source: Shaw et al. 2018 (arXiv 1803.02155). Wav2Vec2-BERT and SeamlessM4T v2: left = 64, right = 8.

    Args:
        keys: [left + right + 1, d] or [H, left + right + 1, d]; row 0 is j − i ≤ −left.
        values: the same shape with d_v, or None.

    Raises:
        ValueError: a table with another number of rows.

    Example:
        >>> [type(t).__name__ for t in Shaw(torch.zeros(9, 64), torch.zeros(9, 64), left=4, right=4)]
        ['OnQuery', 'OnValue']
    """
    left, right = as_integer("left", left), as_integer("right", right)
    if left + right < 0:
        raise ValueError(f"left is {left} and right {right}; expected left + right ≥ 0")
    for name, table in (("keys", keys), *(() if values is None else (("values", values),))):
        _check_rows(name, table, left + right + 1, f"left + right + 1 with left = {left} and right = {right}")
    rows = clipped(-right, left, descending=True)
    return (OnQuery(keys, rows), *(() if values is None else (OnValue(values, rows),)))


def VITS(keys: Tensor, values: Tensor, *, window: int) -> tuple[Term, ...]:
    """VITS' window: as Shaw within |j − i| ≤ window, and nothing (not the clipped row) beyond.

    Source: Kim et al. 2021 (arXiv 2106.06103); ``emb_rel_k`` and ``emb_rel_v`` [1 or H, 2·window + 1, d].

    Example:
        >>> [type(t).__name__ for t in VITS(torch.zeros(1, 9, 64), torch.zeros(1, 9, 64), window=4)]
        ['OnQuery', 'OnValue']
    """
    window = as_integer("window", window)
    if window < 0:
        raise ValueError(f"window is {window}; expected a number ≥ 0")
    for name, table in (("keys", keys), ("values", values)):
        _check_rows(name, table, 2 * window + 1, f"2·window + 1 with window = {window}")
    rows = windowed(-window, window, descending=True)
    return OnQuery(keys, rows), OnValue(values, rows)


def TransformerXL(table: Tensor, u: Tensor, v: Tensor, *, descending: bool = True) -> tuple[Term, ...]:
    """Transformer-XL: S_ij = τ · ((q_i + u_h)·k_j + (q_i + v_h)·table[h, φ(i − j)]), one row an offset.

    Source: Dai et al. 2019 (arXiv 1901.02860); NeMo's ``RelPositionMultiHeadAttention``, whose `table` is
    ``linear_pos(pos_emb)`` per head.

    Args:
        table: [H, 2·reach + 1, d] or [2·reach + 1, d], from offset +reach down to −reach (`descending`, as the
            Conformers store it) or upwards. reach ≥ the largest offset met.
        u, v: [H, d], the content and position biases.

    Raises:
        ValueError: an even number of rows.

    Example:
        >>> [type(t).__name__ for t in TransformerXL(torch.zeros(2, 7, 8), torch.zeros(2, 8), torch.zeros(2, 8))]
        ['QueryBias', 'OnQuery']
    """
    for name, value in (("table", table), ("u", u), ("v", v)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; expected a tensor")
    require_dim("u", u, 2, "[H, d]")
    require_dim("v", v, 2, "[H, d]")
    rows = table.shape[-2] if table.dim() >= 2 else 0
    if rows % 2 != 1:
        raise ValueError(f"table has {rows} rows; expected an odd number, 2·reach + 1")
    return QueryBias(u), OnQuery(table, identity((rows - 1) // 2, descending), bias=v)


def DeBERTa(
    pos_key: Tensor | None, pos_query: Tensor | None, *, position_buckets: int, max_relative_positions: int
) -> tuple[Term, ...]:
    """DeBERTa v2/v3: c2p = q_i·pos_key[slot], p2c = k_j·pos_query[slot]; either may be None.

    The model's scale is 1/√(d · (1 + number of these terms)). Source: He et al. 2021 (arXiv 2006.03654, 2111.09543);
    transformers' ``deberta_v2``. Tables are [H, 2·span, d], span = position_buckets (256 in v3) or, where that is ≤ 0,
    max_relative_positions.

    Example:
        >>> t = torch.zeros(12, 512, 64)
        >>> [type(x).__name__ for x in DeBERTa(t, t, position_buckets=256, max_relative_positions=512)]
        ['OnQuery', 'OnKey']
    """
    rows = deberta_buckets(position_buckets, max_relative_positions)
    span = "position_buckets" if position_buckets > 0 else "max_relative_positions"
    for name, table in (("pos_key", pos_key), ("pos_query", pos_query)):
        if table is not None:
            _check_rows(name, table, rows.size, f"2·{span} with {span} = {rows.size // 2}")
    c2p = () if pos_key is None else (OnQuery(pos_key, rows),)
    p2c = () if pos_query is None else (OnKey(pos_query, rows),)
    return c2p + p2c


def DeBERTaV1(
    pos_key: Tensor | None, pos_query: Tensor | None, *, max_relative_positions: int = 512
) -> tuple[Term, ...]:
    """DeBERTa v1: as v2 without buckets, tables [H, 2·max_relative_positions, d].

    Source: transformers' ``deberta``.

    Example:
        >>> t = torch.zeros(12, 1024, 64)
        >>> [type(x).__name__ for x in DeBERTaV1(t, t)]
        ['OnQuery', 'OnKey']
    """
    return DeBERTa(pos_key, pos_query, position_buckets=-1, max_relative_positions=max_relative_positions)


def WavLM(weight: Tensor, gate: Tensor, *, max_distance: int = 800) -> Scalar:
    """WavLM's gated bias: gate[b, h, i] · weight[bucket, h]; weight is [320, H] (arXiv 2110.13900).

    Example:
        >>> WavLM(torch.zeros(320, 12), torch.ones(2, 12, 50)).gate.shape
        torch.Size([2, 12, 50])
    """
    require_dim("weight", weight, 2, "[num_buckets, H]")
    require_dim("gate", gate, 3, "[B, H, Tq]")
    return Scalar(weight.t(), t5_buckets(weight.shape[0], max_distance), gate=gate)


def Inkling(table: Tensor, left: Tensor) -> OnQuery:
    """Inkling's causal window: left_i · table[i − j] for 0 ≤ i − j < R, nothing elsewhere; table is [R, d'].

    Source: transformers' ``inkling``; `left` [B, H, Tq, d'] is the model's own projection (d' = 16 there).

    Example:
        >>> Inkling(torch.zeros(100, 16), torch.zeros(1, 4, 50, 16)).rows.size
        100
    """
    if not isinstance(table, Tensor):
        raise TypeError(f"table is a {type(table).__name__}; expected a tensor [R, d']")
    if table.dim() < 2 or table.shape[-2] < 1:
        raise ValueError(f"table has shape {tuple(table.shape)}; expected [R, d'] with at least one row")
    if not isinstance(left, Tensor):
        raise TypeError(f"left is a {type(left).__name__}; expected a tensor [B, H, Tq, d']")
    return OnQuery(table, windowed(0, table.shape[-2] - 1), left=left)


def _check_rows(name: str, table: Tensor, rows: int, why: str) -> None:
    """A mechanism's table has one row for each of its map's: more would be cut off silently, fewer read beyond."""
    if not isinstance(table, Tensor):
        raise TypeError(f"{name} is a {type(table).__name__}; expected a tensor [H, {rows}, d] or [{rows}, d]")
    if table.dim() not in (2, 3) or table.shape[-2] != rows:
        shape = tuple(table.shape)
        raise ValueError(f"{name} has shape {shape}; expected [H, {rows}, d] or [{rows}, d], rows = {why}")
