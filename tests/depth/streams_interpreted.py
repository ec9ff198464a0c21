"""Streams on the Triton kernels, under the interpreter; run by test_inference_state.py in a process of its own."""

import pytest
import torch

from quick_interpreter import quicken
from tilewise.depth import InferenceState, Schedule, eager
from tilewise.depth.triton import config, launch, launch_phase1, merge, mergefew, phase1
from tilewise.nn import AttnRes

quicken()
D = 16


def pair(schedule):
    modules = [AttnRes(D, schedule, impl=impl) for impl in ("triton", "eager")]
    with torch.no_grad():
        modules[0].query.normal_()
        modules[0].key_weight.normal_(1, 0.2)
    modules[1].load_state_dict(modules[0].state_dict())
    return modules


def run(stream, sublayers, norms):
    for l in range(sublayers):
        stream.write(l, torch.tanh(stream.read(l, norms[l]) * (1 + l / 5)))
    return stream.output(norms[0])


@pytest.fixture
def started(monkeypatch):
    """(kernel, options) of each launch of phase 1; d is split into three parts or more."""
    tiles, seen = config.score_tiles, []
    monkeypatch.setattr(config, "score_tiles", lambda *shape: {**tiles(*shape), "BK": 16, "splits": 16})

    def start(kernel, grid, *args, **meta):
        seen.append((kernel, meta))
        launch.start(kernel, grid, *args, **meta)

    monkeypatch.setattr(launch_phase1, "start", start)
    return seen


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_last_program_of_a_tile_adds_the_parts(started, dtype):
    """Two tiles of tokens, three sources, two groups of queries; a second call finds its tickets at zero."""
    T, n, S, d = 21, 3, 40, 72
    v, q = [torch.randn(T, d).to(dtype) for _ in range(n)], torch.randn(S, d) / d**0.5
    tickets = launch.tickets(torch.device("cpu"))
    assert not tickets.any()
    first, again = (launch.scores(v, q, 1e-6, tickets=tickets) for _ in range(2))
    assert [(kernel, meta["PARTS"]) for kernel, meta in started] == [(phase1.scores_kernel, 8)] * 2
    assert not tickets.any()
    apart, exact = launch.scores(v, q, 1e-6), eager.scores([x.double() for x in v], q.double(), 1e-6)
    assert [kernel for kernel, _ in started[2:]] == [phase1.scores_kernel, phase1.finish_kernel]
    for a, b, c, e in zip(first, again, apart, exact, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=2e-5)


def test_too_many_tiles_for_the_tickets_or_many_tokens_take_a_kernel_of_their_own(started, monkeypatch):
    v, q = [torch.randn(21, 72).half()], torch.randn(40, 72)
    launch.scores(v, q, 1e-6, tickets=torch.zeros(3, dtype=torch.int32))
    monkeypatch.setattr(config, "last_adds", lambda T: False)
    launch.scores(v, q, 1e-6, tickets=launch.tickets(torch.device("cpu")))
    assert [kernel for kernel, _ in started] == [phase1.scores_kernel, phase1.finish_kernel] * 2


def test_merges_of_bf16_sources_take_queries_of_16_bits():
    q = torch.tensor([[1.0, -3.0e-5, 70000.0, -1.0e9]])
    narrow = launch.merge_queries(q, torch.bfloat16)
    assert narrow.dtype == torch.float16
    wanted = torch.tensor([[1.0, -3.0e-5, 65504.0, -65504.0]])
    torch.testing.assert_close(narrow.float(), wanted, rtol=2**-11, atol=3e-8)
    for dtype in (torch.float16, torch.float32):
        assert launch.merge_queries(q, dtype) is q
    assert eager.merge_queries(q, torch.bfloat16) is q


@pytest.mark.parametrize("sources", [0, 3])
def test_a_merge_with_a_query_of_16_bits_is_that_of_the_same_numbers(sources):
    u, p, o1, *v = (torch.randn(3, 24).half() for _ in range(3 + sources))
    lse, s, q, w = torch.randn(3), torch.randn(sources, 3), torch.randn(24).half(), torch.randn(24).half()
    if sources:
        got, want = (launch.phase2_from_scores(u, p, v, s, x, w, 1e-6, 1e-6) for x in (q, q.float()))
    else:
        got, want = (launch.phase2_fwd(u, p, o1, lse, x, w, 1e-6, 1e-6) for x in (q, q.float()))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("direct", [config.DIRECT, 0])
def test_dependents_are_what_follows_scores_and_weighted_sums(started, direct, monkeypatch):
    """The interpreter has no such launches: what a dependent computes, and which kernels are dependents."""
    for module in (merge, mergefew, phase1):
        monkeypatch.setattr(module, "gdc_wait", lambda: None)
    monkeypatch.setattr(phase1, "gdc_launch_dependents", lambda: None)
    monkeypatch.setattr(config, "DIRECT", direct)
    monkeypatch.setattr(config, "chained", lambda T: True)
    after = []
    monkeypatch.setattr(config, "dependent", lambda x: after.append(x) or {})
    launch._merge_plan.cache_clear()
    schedule = Schedule.block(8, 2, one_pass_sources=0)
    norms = torch.randn(8, D).unbind(0)
    states = [InferenceState(schedule, m.reads(), max_tokens=3, overlap_tokens=0) for m in pair(schedule)]
    x = torch.randn(3, D)
    torch.testing.assert_close(*[run(state(x), 8, norms) for state in states], rtol=1e-5, atol=1e-5)
    launch._merge_plan.cache_clear()
    assert any(after)
    assert not all(after)
    combined = [meta for kernel, meta in started if kernel is phase1.combine_kernel]
    assert [meta["AFTER"] for meta in combined] == [True] * len(combined)
    assert bool(combined) == (direct == 0)


@pytest.mark.parametrize("direct", [config.DIRECT, 0])
@pytest.mark.parametrize(
    ("schedule", "overlap"),
    [
        (Schedule.block(6, 2), 0),
        (Schedule.at(6, (0, 1, 2, 5), one_pass_sources=0), 64),
        (Schedule.block(7, 5, one_pass_sources=1, max_queries=2), 64),
        (Schedule.full_attention(5, 3), 0),
    ],
)
def test_inference(schedule, overlap, direct, monkeypatch):
    monkeypatch.setattr(config, "DIRECT", direct)
    norms = torch.randn(schedule.sublayers, D).unbind(0)
    states = [InferenceState(schedule, m.reads(), max_tokens=3, overlap_tokens=overlap) for m in pair(schedule)]
    for x in (torch.randn(3, D), torch.randn(1, 1, D)):
        outputs = [run(state(x), schedule.sublayers, norms) for state in states]
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_shared_training():
    schedule, norms = Schedule.block(5, 2), torch.randn(5, D).unbind(0)
    x, results = torch.randn(3, D, requires_grad=True), []
    for module in pair(schedule):
        out = run(module(x, norms=norms), 5, norms)
        results.append((out, *torch.autograd.grad(out.sin().sum(), [x, module.query, module.key_weight])))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
