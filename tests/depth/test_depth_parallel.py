"""Several processes against one: tensor parallel, pipeline parallel, FSDP2, over gloo; and the traffic formulas."""

import queue
import time

import parallel_cases
import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from tilewise.depth import Schedule
from tilewise.depth.parallel import DepthStage, PipelinePlan, SourceCache, paper_cached, paper_naive
from tilewise.nn import AttnRes, Decoder, DecoderConfig
from tilewise.nn.parallel import decoder_stage


@pytest.fixture(scope="module", params=[2, 4])
def outcome(request, tmp_path_factory):
    """Case → rank → error, from one start of the processes for all cases."""
    ranks, context = request.param, mp.get_context("spawn")
    results = context.Queue()
    store = tmp_path_factory.mktemp("store") / "file"
    processes = [
        context.Process(target=parallel_cases.worker, args=(rank, ranks, str(store), results)) for rank in range(ranks)
    ]
    for p in processes:
        p.start()
    found, failed, deadline = {case.__name__: {} for case in parallel_cases.CASES}, False, time.monotonic() + 240
    missing = ranks * len(parallel_cases.CASES)
    while missing and time.monotonic() < deadline:
        try:
            case, rank, error = results.get(timeout=1)
        except queue.Empty:
            if failed or not any(p.is_alive() for p in processes):
                break
            continue
        found[case][rank] = error
        missing, failed = missing - 1, failed or error is not None
    for p in processes:
        p.join(5)
        if p.is_alive():
            p.terminate()
            p.join()
    return ranks, found


@pytest.mark.parametrize("case", [case.__name__ for case in parallel_cases.CASES])
def test_processes_agree_with_one(outcome, case):
    ranks, found = outcome
    errors = [f"rank {rank}:\n{error}" for rank, error in sorted(found[case].items()) if error]
    assert not errors, "\n".join(errors)
    assert sorted(found[case]) == list(range(ranks)), f"finished on ranks {sorted(found[case])} of {ranks}"


@pytest.mark.parametrize(("ranks", "virtual", "blocks"), [(4, 2, 1), (8, 4, 1), (2, 3, 2), (5, 1, 3), (3, 4, 2)])
def test_bytes_follow_the_papers_formula(ranks, virtual, blocks):
    """Aligned stages: the paper's count, less the blocks that a rank made itself, plus the embedding."""
    stages = ranks * virtual
    schedule = Schedule.block(2 * blocks * stages, 2)
    plan = PipelinePlan.even(schedule, ranks, virtual)
    saved, embedding = plan.own_blocks_and_embedding()
    assert (saved, embedding) == ((virtual - 1) * ranks * blocks, ranks - 1)
    assert sum(plan.vectors()) == paper_cached(ranks, virtual, blocks) - saved + embedding
    assert sum(plan.vectors(naive=True)) == paper_naive(ranks, virtual, blocks) + stages - 1
    assert plan.bytes(10, 7168, 2) == sum(plan.vectors()) * 10 * 7168 * 2


def test_published_counts():
    assert (paper_naive(4, 2, 1), paper_cached(4, 2, 1)) == (28, 22)
    assert (paper_naive(8, 4, 1), paper_cached(8, 4, 1)) == (496, 220)


def test_a_plan_that_is_not_aligned():
    plan = PipelinePlan(Schedule.block(12, 5), (0, 4, 6, 10, 12), 2)
    assert [list(plan.received(c)) for c in range(4)] == [[], [0], [1], []]
    assert [plan.cached(c) for c in range(4)] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PipelinePlan(Schedule.block(8, 2), (0, 4), 1), "expected 0 < .. < 8"),
        (lambda: PipelinePlan(Schedule.block(8, 2), (0, 4, 4, 8), 1), "increasing"),
        (lambda: PipelinePlan(Schedule.block(8, 2), (0, 8), 0), "ranks: found 0"),
        (lambda: PipelinePlan.even(Schedule.block(8, 2), 8), "at least 16 for 8 stages"),
    ],
)
def test_bad_plans_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_stages_raise():
    schedule = Schedule.block(8, 2)
    plan = PipelinePlan(schedule, (0, 4, 8), 2)
    with pytest.raises(ValueError, match="found span"):
        DepthStage(plan, 0, AttnRes(8, schedule, span=(4, 8)), nn.Identity(), SourceCache())
    with pytest.raises(ValueError, match="embed on the first stage"):
        DepthStage(plan, 0, AttnRes(8, schedule, span=(0, 4)), nn.Identity(), SourceCache())
    config = DecoderConfig(vocab=8, d=8, layers=4, heads=2, kv_heads=2, hidden=8, residual="block", block=2)
    with pytest.raises(ValueError, match="tied: found True"):
        decoder_stage(Decoder(config), plan, 0, SourceCache())
    with pytest.raises(ValueError, match="another schedule"):
        decoder_stage(Decoder(config), PipelinePlan(Schedule.block(8, 4), (0, 4, 8), 2), 0, SourceCache())


def test_a_lost_deposit_is_an_error():
    cache = SourceCache()
    x = torch.ones(2)
    cache.keep(0, 3, x)
    cache.leaf(0, 3).sum().backward()
    with pytest.raises(RuntimeError, match=r"sources \[3\] of micro-batch 0"):
        cache.release(0)
    assert cache.take(0, 3).tolist() == [1, 1]
    cache.release(0)
    assert cache.nbytes == 0
