"""Other projects' kernels, called as their own models call them; the user installs them (``tools/peers.txt``)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..terms import lower
from ..testing import Case, Sizes

__all__ = ["PEERS"]


def flashdeberta(case: Case, sizes: Sizes, x: dict[str, Tensor]) -> Callable[[], Tensor]:
    """flashdeberta's ``flash_attention_with_disentangled``, with every length full."""
    from flashdeberta.ops.flash_attention import flash_attention_with_disentangled

    buckets, reach = _deberta_map(case, sizes, x)
    lengths = torch.full((sizes.B,), sizes.Tk, dtype=torch.int32, device=x["q"].device)

    def run() -> Tensor:
        return flash_attention_with_disentangled(
            x["q"], x["k"], x["v"], lengths, x["pos_key"][None], x["pos_query"][None], False, case.scale(sizes.d),
            buckets, reach,
        )  # fmt: skip

    return run


def disentangled_flash(case: Case, sizes: Sizes, x: dict[str, Tensor]) -> Callable[[], Tensor]:
    """disentangled-flash's ``training_attention`` with the winners of its shipped H200 profile.

    The profile is bound to newer compilers than it may meet here, where its own policy would fall back to a heuristic;
    its configurations are taken all the same, since they were found on this GPU.
    """
    from disentangled_flash.position import SharedPositionPlanCache, pad_position_table
    from disentangled_flash.training._kernels import training_attention
    from disentangled_flash.tuning import WorkloadKey, load_bundled_profiles

    buckets, reach = _deberta_map(case, sizes, x)
    plans = SharedPositionPlanCache(
        position_buckets=buckets, max_relative_positions=reach, position_embedding_size=x["pos_key"].shape[1] // 2
    )
    plan = plans.compact(sizes.Tq, x["q"].device)
    whole = plan.active_slots.numel() == x["pos_key"].shape[1]
    profiles = load_bundled_profiles()

    def winner(phase: str):
        workload = WorkloadKey(
            sequence_length=sizes.Tq, head_dim=sizes.d, batch_heads=sizes.B * sizes.H,
            active_slots=plan.active_slots.numel(), dtype=str(x["q"].dtype).removeprefix("torch."), has_c2p=True,
            has_p2c=True, fp32_precision="strict", layout="padded", uses_padding_mask=False, phase=phase,
        )  # fmt: skip
        found = (entry.config for profile in profiles for entry in profile.entries if entry.workload == workload)
        return next(found, None)

    configs = {
        "forward_config": winner("training_forward"),
        "dq_config": winner("backward_dq"),
        "dkv_config": winner("backward_dkv"),
    }
    mask = torch.ones(sizes.B, sizes.Tk, dtype=torch.bool, device=x["q"].device)

    def table(name: str) -> Tensor:
        return pad_position_table(x[name] if whole else x[name][:, plan.active_slots])

    def run() -> Tensor:
        merged = training_attention(
            x["q"], x["k"], x["v"], table("pos_key"), table("pos_query"), plan.delta_to_local, mask,
            score_scale=case.scale(sizes.d), has_padding=False, strict_fp32=True, gradient_band=plan.gradient_band,
            **configs,
        )  # fmt: skip
        return merged.unflatten(-1, (sizes.H, sizes.d_v)).transpose(1, 2)

    return run


def _deberta_map(case: Case, sizes: Sizes, x: dict[str, Tensor]) -> tuple[int, int]:
    """(position_buckets, max_relative_positions) of the case."""
    _, ports = lower(x["q"], case.build(x, sizes))
    return ports[0].rows.params


PEERS = {"flashdeberta": flashdeberta, "disentangled-flash": disentangled_flash}
