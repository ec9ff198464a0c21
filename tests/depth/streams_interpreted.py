"""Streams on the Triton kernels, under the interpreter; run by test_inference_state.py in a process of its own."""

import pytest
import torch

from quick_interpreter import quicken
from tilewise.depth import InferenceState, Schedule, eager
from tilewise.depth.triton import config, launch, launch_phase1, phase1
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
def test_a_kernel_of_its_own_adds_the_parts_of_scores(started, dtype):
    """Two tiles of tokens, three sources, two groups of queries."""
    T, n, S, d = 21, 3, 40, 72
    v, q = [torch.randn(T, d).to(dtype) for _ in range(n)], torch.randn(S, d) / d**0.5
    found, exact = launch.scores(v, q, 1e-6), eager.scores([x.double() for x in v], q.double(), 1e-6)
    assert [kernel for kernel, _ in started] == [phase1.scores_kernel, phase1.finish_kernel]
    for a, e in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=2e-5)


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
