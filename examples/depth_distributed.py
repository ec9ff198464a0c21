"""One model, three ways over several processes: tensor parallel, pipeline parallel, FSDP2.

torchrun --nproc-per-node 2 examples/depth_distributed.py --how tensor|pipeline|fsdp
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from tilewise.depth.parallel import DepthPipelineStage, PipelinePlan, SequenceSharded, SourceCache
from tilewise.nn import Decoder, DecoderConfig
from tilewise.nn.parallel import decoder_stage, tensor_parallel


def tensor(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Heads and hidden units split over the ranks, sources over the sequence."""
    residual = SequenceSharded(tensor_parallel(model).residual)
    loss = model.loss(tokens, residual=residual)
    loss.backward()
    return loss.detach()


def pipeline(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Two stages a rank, interleaved; only sources that a rank has never seen travel."""
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), tokens.device
    plan = PipelinePlan.even(model.residual.schedule, ranks, virtual=2)
    cache = SourceCache()
    stages = [DepthPipelineStage(decoder_stage(model, plan, c, cache), device) for c in range(rank, plan.stages, ranks)]
    loss_fn = lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten())  # noqa: E731
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=loss_fn)
    losses: list[torch.Tensor] = []
    last = plan.rank(plan.stages - 1) == rank
    more = {"target": tokens[:, 1:], "losses": losses} if last else {}
    schedule.step(*((tokens[:, :-1],) if rank == 0 else ()), **more)
    loss = torch.stack(losses).mean().detach() if last else torch.zeros((), device=device)
    dist.all_reduce(loss)
    return loss


def fsdp(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Parameters sharded sublayer by sublayer, activations recomputed."""
    for layer in model.layers:
        fully_shard(layer.attention)
        fully_shard(layer.mlp)
    fully_shard(model)
    loss = model.loss(tokens, recompute=True)
    loss.backward()
    return loss.detach()


def main() -> None:
    """One forward and backward pass; every rank prints the loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--how", choices=("tensor", "pipeline", "fsdp"), default="tensor")
    how = {"tensor": tensor, "pipeline": pipeline, "fsdp": fsdp}[parser.parse_args().how]
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    sizes = dict(vocab=64, d=64, layers=8, heads=8, kv_heads=8, hidden=128, tied=False)
    model = Decoder(DecoderConfig(residual="block", block=4, **sizes)).to(device)
    tokens = torch.randint(64, (4, 33)).to(device)
    print(f"rank {dist.get_rank()}: loss {how(model, tokens).item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
