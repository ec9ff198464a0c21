"""A model cut at a block boundary into two pipeline stages, each in its own process: bitwise the whole model.

The carry never crosses the cut, so what travels is the residual stream. Two micro-batches go forward before either goes
back (GPipe), so two carries of a block are alive at once.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from carried_cases import CarriedConfig
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from tilewise.carried.llama import CarriedLlama, LlamaOptions

PARTS, T, WIDTH, VOCABULARY = 2, 37, 32, 61


def model_of(plan):
    torch.manual_seed(0)
    carried = CarriedConfig(impl="blocked", tile=16, plan=plan, scaling="gain")
    return CarriedLlama(LlamaOptions(vocabulary=VOCABULARY, width=WIDTH, layers=8, hidden=48, carried=carried))


def text():
    return torch.randint(VOCABULARY, (2 * PARTS, T + 1), generator=torch.Generator().manual_seed(1))


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Stage(nn.Module):
    """One block, with the embedding before the first and the head after the last."""

    def __init__(self, model, rank):
        super().__init__()
        self.embedding = model.embedding if rank == 0 else None
        self.block = model.blocks[rank]
        self.norm, self.head = (model.norm, model.head) if rank == 1 else (None, None)

    def forward(self, x):
        x = x if self.embedding is None else self.embedding(x)
        x = self.block(x, positions=torch.arange(x.shape[1]))
        return x if self.head is None else self.head(self.norm(x))


def work(rank, store, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    tokens = text()
    for plan in ("stored", "mixed", "recompute"):
        model = model_of(plan)
        stage = Stage(model, rank)
        x = tokens[:2, :-1] if rank == 0 else torch.empty(2, T, WIDTH, requires_grad=True)
        out = torch.empty(2, T, WIDTH if rank == 0 else VOCABULARY, requires_grad=True)
        piped = PipelineStage(stage, rank, 2, torch.device("cpu"), input_args=(x,), output_args=(out,))
        schedule = ScheduleGPipe(piped, PARTS, loss_fn=loss_of, scale_grads=False)
        losses = []
        schedule.step(*([tokens[:, :-1]] if rank == 0 else []), target=tokens[:, 1:] if rank else None,
                      losses=losses if rank else None)  # fmt: skip
        whole = model_of(plan)
        expected = []
        for part in tokens.chunk(PARTS):
            expected.append(whole.loss(part))
            expected[-1].backward()
        if rank:
            assert torch.equal(torch.stack(losses), torch.stack(expected)), plan
        names = [name for name, _ in whole.named_parameters()]
        grads = {id(p): p.grad for p in stage.parameters()}
        compared = 0
        for name, p, q in zip(names, model.parameters(), whole.parameters(), strict=True):
            if id(p) in grads:
                assert torch.equal(grads[id(p)], q.grad), (plan, name)
                compared += 1
        results.put((plan, rank, compared))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(work, (folder + "/store", results), nprocs=2)
        found = sorted(results.get() for _ in range(6))
        total = len(list(model_of("stored").parameters()))
        for plan in ("mixed", "recompute", "stored"):
            assert sum(n for p, _, n in found if p == plan) == total
            print(plan)
        sys.stdout.flush()
