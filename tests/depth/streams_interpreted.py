"""Streams on the Triton kernels, under the interpreter; run by test_inference_state.py in a process of its own."""

import pytest
import torch

from quick_interpreter import quicken
from tilewise.depth import InferenceState, Schedule
from tilewise.depth.triton import config
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
