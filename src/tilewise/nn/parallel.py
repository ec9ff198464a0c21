"""The reference decoder over several devices: tensor-parallel slices, pipeline stages."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewise.depth.checks import check_int, check_kind
from tilewise.depth.parallel import DepthStage, PipelinePlan, SourceCache
from tilewise.depth.parallel.tensor import chosen_group

from .decoder import Decoder, rope
from .residual import AttnRes

__all__ = ["decoder_stage", "tensor_parallel"]

COLUMNS, ROWS = ("q", "k", "v", "gate", "up"), ("o", "down")


@torch.no_grad()
def tensor_parallel(model: Decoder, group: dist.ProcessGroup | None = None) -> Decoder:
    """Keep this rank's heads and hidden units of every sublayer, in place: q, k, v, gate, up by rows of their weights,
    o and down by columns. What o and down return then is a part of a sum; run the model with
    `residual=SequenceSharded(model.residual, group)`, which adds the parts up. Embedding, norms, reads and head stay
    whole on every rank.

    Raises:
        TypeError: no Decoder.
        ValueError: no group, or kv_heads or hidden is no multiple of the group's size.
    """
    check_kind("model", model, Decoder, "a Decoder")
    group = chosen_group(group)
    ranks, rank, config = group.size(), group.rank(), model.config
    for name in ("kv_heads", "hidden"):
        if getattr(config, name) % ranks:
            raise ValueError(f"{name}: found {getattr(config, name)}, expected a multiple of {ranks} ranks")
    for layer in model.layers:
        for module in (layer.attention, layer.mlp):
            for name, linear in module.named_children():
                dim = 0 if name in COLUMNS else 1
                linear.weight = nn.Parameter(linear.weight.chunk(ranks, dim)[rank].clone())
    return model


class _Body(nn.Module):
    def __init__(self, model: Decoder, first: int, last: int) -> None:
        super().__init__()
        self.config, self.attention = model.config, model.attention
        self.layers = nn.ModuleList(model.layers[first:last])

    def forward(self, stream) -> None:
        x = stream.state.sources[0]
        positions = torch.arange(x.shape[1], device=x.device)
        angles = rope(positions, self.config.d // self.config.heads, self.config.rope_theta)
        attend = self.attention()
        for layer in self.layers:
            layer(stream, angles, attend)


class _Head(nn.Module):
    def __init__(self, norm: nn.Parameter, head: nn.Linear) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, stream) -> Tensor:
        return self.head(stream.output(self.norm))


@torch.no_grad()
def decoder_stage(model: Decoder, plan: PipelinePlan, index: int, cache: SourceCache) -> DepthStage:
    """Stage `index` of a decoder; takes its layers, and on the first and last stage the embedding and the head.

    Args:
        model: the whole model, with untied embeddings; its other parts are not referenced.
        plan: bounds between decoder layers.
        index: the stage.
        cache: the rank's.

    Raises:
        TypeError: no Decoder, plan or cache.
        ValueError: a standard residual, tied embeddings, another schedule, or a bound inside a decoder layer.
    """
    check_kind("model", model, Decoder, "a Decoder")
    check_kind("plan", plan, PipelinePlan, "a PipelinePlan")
    check_int("index", index, 0, plan.stages - 1)
    if not isinstance(model.residual, AttnRes) or model.residual.schedule != plan.schedule:
        raise ValueError("plan: found another schedule than the model's residual has, expected the same")
    if model.config.tied:
        raise ValueError("tied: found True, expected False: the embedding and the head lie on different stages")
    first, last = plan.bounds[index : index + 2]
    if first % 2 or last % 2:
        raise ValueError(f"plan: found bounds {first}, {last}, expected even ones, between decoder layers")
    whole, end = model.residual, index == plan.stages - 1
    options = {"eps": whole.eps, "output_eps": whole.output_eps, "impl": whole.impl}
    factory = {"device": whole.query.device, "dtype": whole.query.dtype}
    residual = AttnRes(whole.d, plan.schedule, span=(first, last), **options, **factory)
    residual.query.copy_(whole.query[first : last + end])
    residual.key_weight.copy_(whole.key_weight[first : last + end])
    return DepthStage(
        plan,
        index,
        residual,
        _Body(model, first // 2, last // 2),
        cache,
        embed=model.embedding if index == 0 else None,
        head=_Head(model.norm, model.head) if end else None,
    )
