"""What the processes of test_depth_parallel.py run; every comparison is against one process's whole model, in fp64."""

import copy
import os
import traceback

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from tilewise.depth import InferenceState, Schedule
from tilewise.depth.parallel import (
    DepthPipelineStage,
    PipelinePlan,
    SequenceSharded,
    SourceCache,
    paper_cached,
    paper_naive,
)
from tilewise.nn import Decoder, DecoderConfig
from tilewise.nn.decoder import rope
from tilewise.nn.parallel import decoder_stage, tensor_parallel

EXACT = dict(rtol=1e-10, atol=1e-12)


def model(residual="block", layers=4, block=3, schedule=None, tied=False):
    torch.manual_seed(3)
    sizes = dict(vocab=24, d=16, layers=layers, heads=8, kv_heads=4, hidden=16, tied=tied)
    decoder = Decoder(DecoderConfig(residual=residual, block=block, **sizes)).double()
    if schedule is not None:
        decoder.residual.schedule = schedule
    with torch.no_grad():
        for p in (decoder.residual.query, decoder.residual.key_weight, decoder.norm):
            p.normal_(1, 0.5)
    return decoder


def tokens(batch, length):
    return torch.randint(24, (batch, length), generator=torch.Generator().manual_seed(5))


def assert_grads(decoder, whole, cut=lambda name, grad: grad):
    for (name, p), (_, q) in zip(decoder.named_parameters(), whole.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, cut(name, q.grad), msg=lambda m, n=name: f"{n}: {m}", **EXACT)


def sliced(name, grad, ranks, rank):
    """What a tensor-parallel rank has of a parameter of the whole model."""
    part = name.split(".")[-2] if name.startswith("layers") and name.endswith("weight") else ""
    return grad.chunk(ranks, 0 if part in ("q", "k", "v", "gate", "up") else 1)[rank] if part else grad


def tensor_parallel_equals_one_process(rank, ranks):
    """Uneven tokens, fewer tokens than ranks, Block and Full, with and without recomputation: loss and gradients."""

    for kind, (batch, length), recompute in (
        ("block", (1, 8), False),
        ("block", (3, 4), True),
        ("full", (1, 2), False),
        ("block", (1, 4), False),
    ):
        whole = model(kind)
        sharded = tensor_parallel(copy.deepcopy(whole))
        x = tokens(batch, length)
        expected = whole.loss(x)
        expected.backward()
        got = sharded.loss(x, residual=SequenceSharded(sharded.residual), recompute=recompute)
        got.backward()
        torch.testing.assert_close(got, expected, **EXACT)
        assert_grads(sharded, whole, lambda name, grad: sliced(name, grad, ranks, rank))


def replicated_sublayers_with_a_sharded_bank(rank, ranks):
    """partial=False: every rank computes whole sublayers, only the sources are sharded."""
    whole = model()
    sharded, x = copy.deepcopy(whole), tokens(1, 6)
    whole.loss(x).backward()
    sharded.loss(x, residual=SequenceSharded(sharded.residual, partial=False)).backward()
    assert_grads(sharded, whole)


def sharded_inference(rank, ranks):
    """Inference with a bank of 1 / P of the tokens on each rank."""
    whole = model()
    sharded, x = tensor_parallel(copy.deepcopy(whole)), tokens(1, 7)
    rows = -(-7 // ranks)
    state = InferenceState(sharded.residual.schedule, sharded.residual.reads(), max_tokens=rows)
    with torch.no_grad():
        got = sharded(x, residual=SequenceSharded(state))
        torch.testing.assert_close(got, whole(x), **EXACT)
    assert state.bank.nbytes == len(whole.residual.schedule.starts) * rows * 16 * 8


def uneven_tokens_at_epsilon_zero(rank, ranks):
    """A row of zeros has no RMSNorm at epsilon 0, so the rows that fill up the last ranks may not be read."""
    for impl, kind in (("eager", "block"), ("eager", "full"), ("reference", "block")):
        whole = model(kind)
        whole.residual.eps = whole.residual.output_eps = 0.0
        whole.residual.impl = impl
        sharded, x = tensor_parallel(copy.deepcopy(whole)), tokens(1, 6)
        whole.loss(x).backward()
        sharded.loss(x, residual=SequenceSharded(sharded.residual)).backward()
        torch.testing.assert_close(sharded.residual.query.grad, whole.residual.query.grad, **EXACT)
        torch.testing.assert_close(sharded.norm.grad, whole.norm.grad, **EXACT)
        assert all(p.grad.isfinite().all() for p in sharded.parameters())


def second_derivatives_of_sharded_reads(rank, ranks):
    """A penalty on first gradients, with the operators whose gradients can be differentiated again."""
    residual, generator = model(layers=2, block=2).residual, torch.Generator().manual_seed(7)
    residual.impl = "reference"
    x = torch.randn(5, 16, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(16, 16, dtype=torch.float64, generator=generator).requires_grad_()
    leaves, results = [x, weight, residual.query, residual.key_weight], []
    for make in (residual, SequenceSharded(residual, partial=False)):
        stream = make(x)
        for l in range(4):
            stream.write(l, torch.tanh(stream.read(l) @ weight))
        first = torch.autograd.grad(stream.output().square().sum(), leaves, create_graph=True)
        penalty = sum(g.sin().sum() for g in first)
        results.append((*first, *torch.autograd.grad(penalty, leaves)))
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected, **EXACT)


class Recomputed(torch.nn.Module):
    """A stage's body with every decoder layer under `stream.checkpoint`; counts the layers' runs."""

    def __init__(self, body):
        super().__init__()
        self.layers, self._whole, self.runs = body.layers, [body], 0

    def run(self, stream, layer, *args):
        self.runs += 1
        layer(stream, *args)

    def forward(self, stream):
        body = self._whole[0]
        positions = torch.arange(stream.state.sources[0].shape[1])
        angles = rope(positions, body.config.d // body.config.heads, body.config.rope_theta)
        attend = body.attention()
        for layer in self.layers:
            stream.checkpoint(self.run, layer, angles, attend)


def run_pipeline(
    rank, ranks, virtual, schedule_class, whole, plan, *, steps=1, recompute=False, group=None, prepare=None, x=None
):
    microbatches = 4
    cache = SourceCache()
    modules = [decoder_stage(copy.deepcopy(whole), plan, c, cache) for c in range(rank, plan.stages, ranks)]
    if recompute:
        for m in modules:
            m.body = Recomputed(m.body)
    for m in modules if prepare else ():
        prepare(m)
    stages = [DepthPipelineStage(m, torch.device("cpu"), group=group) for m in modules]

    def loss(logits, target):
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    pipeline = schedule_class(stages if virtual > 1 else stages[0], microbatches, loss_fn=loss)
    x = tokens(microbatches, 6) if x is None else x
    for _ in range(steps):
        for m in modules:
            m.zero_grad()
            m.body.runs = 0
        losses = []
        inputs = (x[:, :-1],) if rank == 0 else ()
        more = {"target": x[:, 1:], "losses": losses} if plan.rank(plan.stages - 1) == rank else {}
        pipeline.step(*inputs, **more)
    return cache, modules, stages, x


def expected_grads(module, whole, plan):
    """The whole model's gradients of a stage's parameters, by their names on the stage."""
    first, last = plan.bounds[module.index : module.index + 2]
    end = last + (module.index == plan.stages - 1)
    grads = {f"residual.{n}": getattr(whole.residual, n).grad[first:end] for n in ("query", "key_weight")}
    for i, layer in enumerate(whole.layers[first // 2 : last // 2]):
        grads |= {f"body.layers.{i}.{name}": p.grad for name, p in layer.named_parameters()}
    if module.embed is not None:
        grads["embed.weight"] = whole.embedding.weight.grad
    if module.head is not None:
        grads |= {"head.norm": whole.norm.grad, "head.head.weight": whole.head.weight.grad}
    return grads


def pipeline_equals_one_process(rank, ranks, virtual, schedule_class, schedule, layers, bounds=None, recompute=False):
    """Gradients of every stage, and the bytes sent by every rank, counted from the send operations."""
    kind = "full" if schedule.full else "block"
    whole = model(kind, layers=layers, schedule=schedule)
    plan = PipelinePlan(schedule, bounds, ranks) if bounds else PipelinePlan.even(schedule, ranks, virtual)
    cache, modules, stages, x = run_pipeline(
        rank, ranks, virtual, schedule_class, whole, plan, steps=2, recompute=recompute
    )
    whole.loss(x).backward()
    for module in modules:
        expected = expected_grads(module, whole, plan)
        assert expected.keys() == {name for name, _ in module.named_parameters()}
        for name, grad in expected.items():
            got = module.get_parameter(name).grad
            torch.testing.assert_close(got, grad, msg=lambda m, n=name, i=module.index: f"{n} {i}: {m}", **EXACT)
    if recompute:
        # In the second step, which infers no shapes: four micro-batches forward, and once more in the backward.
        assert [m.body.runs for m in modules] == [2 * 4 * len(m.body.layers) for m in modules]
    assert cache.nbytes == 0
    sent = torch.tensor([sum(s.sent_forward for s in stages), sum(s.sent_backward for s in stages)])
    dist.all_reduce(sent)
    once = plan.bytes(tokens=x.shape[0] * (x.shape[1] - 1), d=16, itemsize=8)
    assert sent.tolist() == [2 * once, 2 * once], (sent, once)
    return plan


def pipelines(rank, ranks):
    """GPipe, 1F1B and interleaved 1F1B; blocks aligned with stages, inside stages and across them; Full."""
    if ranks == 4:
        plan = pipeline_equals_one_process(rank, 4, 2, ScheduleInterleaved1F1B, Schedule.block(16, 2), 8)
        saved, embedding = plan.own_blocks_and_embedding()
        assert sum(plan.vectors()) == paper_cached(4, 2, 1) - saved + embedding
        assert sum(plan.vectors(naive=True)) == paper_naive(4, 2, 1) + plan.stages - 1
        pipeline_equals_one_process(rank, 4, 1, Schedule1F1B, Schedule.block(8, 3), 4)
        pipeline_equals_one_process(rank, 4, 2, ScheduleInterleaved1F1B, Schedule.block(16, 3), 8, recompute=True)
        return
    uneven = Schedule.at(12, (0, 1, 5, 6), one_pass_sources=0)
    pipeline_equals_one_process(rank, 2, 1, ScheduleGPipe, uneven, 6, (0, 8, 12))
    pipeline_equals_one_process(rank, 2, 3, ScheduleInterleaved1F1B, Schedule.block(12, 5, one_pass_sources=1), 6)
    pipeline_equals_one_process(rank, 2, 2, ScheduleInterleaved1F1B, Schedule.full_attention(8, 3), 4)
    pipeline_equals_one_process(rank, 2, 1, Schedule1F1B, Schedule.block(8, 3), 4, recompute=True)
    pipeline_equals_one_process(rank, 2, 1, Schedule1F1B, Schedule.full_attention(8, 3), 4, recompute=True)


def pipeline_evaluation_leaves_nothing_cached(rank, ranks):
    whole = model(layers=8, schedule=Schedule.block(16, 3))
    plan = PipelinePlan.even(whole.residual.schedule, ranks, 2)
    cache = SourceCache()
    modules = [decoder_stage(copy.deepcopy(whole), plan, c, cache) for c in range(rank, plan.stages, ranks)]
    stages = [DepthPipelineStage(m, torch.device("cpu")) for m in modules]
    pipeline = ScheduleInterleaved1F1B(stages, 4, loss_fn=None)
    x = tokens(4, 5)
    with torch.no_grad():
        out = pipeline.step(*((x,) if rank == 0 else ()))
        if plan.rank(plan.stages - 1) == rank:
            torch.testing.assert_close(out, whole(x), **EXACT)
    assert cache.nbytes == 0


def fsdp2_with_recomputation(rank, ranks):
    """FSDP2 around every sublayer and the root, with activation checkpointing: gradients of the mean over ranks."""
    whole, batch = model(tied=True), tokens(2 * ranks, 6)
    sharded = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in sharded.layers:
        fully_shard(layer.attention, mesh=mesh)
        fully_shard(layer.mlp, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for recompute in (False, True):
        whole.zero_grad()
        sharded.zero_grad()
        whole.loss(batch).backward()
        sharded.loss(batch[2 * rank : 2 * rank + 2], recompute=recompute).backward()
        for (name, p), (_, q) in zip(sharded.named_parameters(), whole.named_parameters(), strict=True):
            grad = p.grad.full_tensor()
            torch.testing.assert_close(grad, q.grad, msg=lambda m, n=name: f"{n}: {m}", **EXACT)


def fsdp2_around_tensor_parallel(rank, ranks):
    """A mesh of 2 × 2: FSDP2 over the data ranks of slices that tensor parallelism made, Block and Full."""
    if ranks != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    group, batch = mesh["tensor"].get_group(), tokens(4, 6)
    row, column = mesh.get_coordinate()
    for kind, recompute in (("block", True), ("full", False)):
        whole = model(kind)
        sharded = tensor_parallel(copy.deepcopy(whole), group)
        for layer in sharded.layers:
            fully_shard(layer.attention, mesh=mesh["data"])
            fully_shard(layer.mlp, mesh=mesh["data"])
        fully_shard(sharded, mesh=mesh["data"])
        whole.loss(batch).backward()
        mine, residual = batch[2 * row : 2 * row + 2], SequenceSharded(sharded.residual, group)
        sharded.loss(mine, residual=residual, recompute=recompute).backward()
        for (name, p), (_, q) in zip(sharded.named_parameters(), whole.named_parameters(), strict=True):
            expected = sliced(name, q.grad, 2, column)
            torch.testing.assert_close(p.grad.full_tensor(), expected, msg=lambda m, n=name: f"{n}: {m}", **EXACT)


def fsdp2_around_pipeline_parallel(rank, ranks):
    """A mesh of 2 × 2: every stage sharded over its data ranks; two stages a rank, with and without recomputation."""
    if ranks != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    row, column = mesh.get_coordinate()
    schedule, batch = Schedule.block(8, 3), tokens(8, 6)
    for recompute in (False, True):
        whole = model(layers=4, schedule=schedule)
        plan = PipelinePlan.even(schedule, 2, 2)

        def shard(module):
            for layer in module.body.layers:
                fully_shard(layer.attention, mesh=mesh["data"])
                fully_shard(layer.mlp, mesh=mesh["data"])
            fully_shard(module, mesh=mesh["data"])

        options = dict(recompute=recompute, group=mesh["pipe"].get_group(), prepare=shard)
        mine = batch[4 * row : 4 * row + 4]
        cache, modules, *_ = run_pipeline(column, 2, 2, ScheduleInterleaved1F1B, whole, plan, x=mine, **options)
        whole.loss(batch).backward()
        assert cache.nbytes == 0
        for module in modules:
            expected = expected_grads(module, whole, plan)
            found = {name: p.grad.full_tensor() for name, p in module.named_parameters()}
            assert found.keys() == expected.keys()
            for name, grad in expected.items():
                torch.testing.assert_close(found[name], grad, msg=lambda m, n=name: f"{n}: {m}", **EXACT)


def hugging_face_decoder_under_fsdp2(rank, ranks):
    """A wrapped Llama whose layers exchange the stream's state, sharded layer by layer, with recomputation too."""
    if ranks > 2:
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    from tilewise.models.depth_hf import wrap_residuals

    torch.manual_seed(3)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4)
    whole = LlamaForCausalLM(LlamaConfig(vocab_size=24, num_key_value_heads=2, **sizes)).double().train()
    torch.nn.init.normal_(wrap_residuals(whole, 2).query)
    sharded, batch = copy.deepcopy(whole), tokens(2 * ranks, 6)
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    mine = batch[2 * rank : 2 * rank + 2]
    for recompute in (False, True):
        if recompute:
            getattr(sharded, "activation_checkpointing_enable", sharded.gradient_checkpointing_enable)()
        whole.zero_grad()
        sharded.zero_grad()
        whole(batch, labels=batch, use_cache=False).loss.backward()
        sharded(mine, labels=mine, use_cache=False).loss.backward()
        for (name, p), (_, q) in zip(sharded.named_parameters(), whole.named_parameters(), strict=True):
            # The loss and the rotation of transformers are fp32 whatever the model is.
            grad = p.grad.full_tensor()
            torch.testing.assert_close(grad, q.grad, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


CASES = (
    tensor_parallel_equals_one_process,
    replicated_sublayers_with_a_sharded_bank,
    sharded_inference,
    uneven_tokens_at_epsilon_zero,
    second_derivatives_of_sharded_reads,
    pipelines,
    pipeline_evaluation_leaves_nothing_cached,
    fsdp2_with_recomputation,
    fsdp2_around_tensor_parallel,
    fsdp2_around_pipeline_parallel,
    hugging_face_decoder_under_fsdp2,
)


def worker(rank, ranks, store, results):
    """Run every case; put (case, rank, error) into the queue. A failure ends the run, since ranks would part ways."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for case in CASES:
        try:
            case(rank, ranks)
        except Exception:
            results.put((case.__name__, rank, traceback.format_exc()))
            results.close()
            results.join_thread()
            os._exit(1)
        results.put((case.__name__, rank, None))
    dist.destroy_process_group()
