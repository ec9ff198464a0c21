"""The contract of serving engines: one launch, in place on the prefix and the block bank."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.depth import reference
from tilewise.depth.checks import check_eps, check_int, check_same, check_stream, check_vector
from tilewise.depth.ops import check_call, narrowed

__all__ = ["fused_attn_res"]


def fused_attn_res(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Tensor,
    norm_weight: Tensor | None,
    qk_weight: Tensor,
    output_norm_weight: Tensor | None,
    num_blocks: int,
    block_write_idx: int,
    eps: float,
    output_norm_eps: float,
    *,
    impl="auto",
) -> Tensor:
    """The contract of serving engines in one launch: prefix add, block write, mix over the bank and the prefix, norm.

    In place: `prefix += delta` (if delta is given), `blocks[:, block_write_idx] = prefix` (if the index is not
    negative). Then y = RMSNorm(mix([blocks[:, 0], .., blocks[:, num_blocks - 1], prefix])) * output_norm_weight. For
    inference: no gradient.

    Args:
        prefix: `[T, D]`, updated in place; rows may have any stride.
        delta: `[T, D]`, or None.
        blocks: bank `[T, NB, D]` with any token and block strides; the last axis is contiguous.
        norm_weight: weight of the key RMSNorm, `[D]`, or None.
        qk_weight: pseudo-query, `[D]`.
        output_norm_weight: `[D]`, or None for no output norm.
        num_blocks: completed blocks to read, 0 to NB. With 0 the mix is the prefix itself.
        block_write_idx: row of the bank that receives the prefix, not one of the `num_blocks` that are read; or -1.
        eps: epsilon of the key norm.
        output_norm_eps: epsilon of the output norm.
        impl: as in :func:`mix`.

    Returns:
        `[T, D]` in the dtype of `prefix`.

    Raises:
        TypeError, ValueError: a shape, dtype, device or index that does not fit.
        RuntimeError: called on tensors that require a gradient while gradients are recorded.

    Example:
        >>> import torch
        >>> from tilewise.depth import fused_attn_res
        >>> p, bank = torch.randn(3, 64), torch.randn(3, 9, 64)
        >>> one = torch.ones(64)
        >>> fused_attn_res(p, torch.randn(3, 64), bank, one, torch.zeros(64), one, 2, -1, 1e-5, 1e-5).shape
        torch.Size([3, 64])
    """
    shape, dtype, device = check_stream("prefix", prefix)
    check_stream("blocks", blocks)
    if prefix.ndim != 2 or blocks.ndim != 3:
        raise ValueError(
            f"prefix, blocks: found {tuple(prefix.shape)} and {tuple(blocks.shape)}, expected [T, D] and [T, NB, D]"
        )
    check_call(impl, prefix, eps=eps)
    check_eps("output_norm_eps", output_norm_eps)
    if delta is not None:
        check_same("delta", delta, shape, dtype, device)
    check_same("blocks", blocks, torch.Size((shape[0], blocks.shape[1], shape[1])), dtype, device)
    check_vector("qk_weight", qk_weight, shape[-1], device, optional=False)
    for name, x in (("norm_weight", norm_weight), ("output_norm_weight", output_norm_weight)):
        check_vector(name, x, shape[-1], device)
    check_int("num_blocks", num_blocks, 0, blocks.shape[1])
    check_int("block_write_idx", block_write_idx, -1, blocks.shape[1] - 1, " (-1: no write)")
    if 0 <= block_write_idx < num_blocks:
        raise ValueError(
            f"block_write_idx: found {block_write_idx} with num_blocks = {num_blocks}; the block that is written is "
            f"the prefix, which is a source already: expected -1 or {num_blocks} to {blocks.shape[1] - 1}"
        )
    leaves = (prefix, delta, blocks, norm_weight, qk_weight, output_norm_weight)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves):
        raise RuntimeError(
            "fused_attn_res works in place and records no gradient; call it under torch.no_grad(), or use mix_update"
        )
    if impl == "reference":
        return reference.fused_attn_res(*leaves, num_blocks, block_write_idx, eps, output_norm_eps)
    # Not folded here: that would be three launches a call, and a captured graph would not see weights that change.
    weights = (narrowed(x, dtype) for x in (qk_weight, norm_weight, output_norm_weight))
    return torch.ops.tilewise.depth_serve_(
        prefix, delta, blocks, *weights, num_blocks, block_write_idx, eps, output_norm_eps, impl
    )
