"""Streams on a CUDA device: budgets against fp64, the side stream, a decode step in a CUDA graph."""

import depth_naive as naive
import pytest
import torch
from device_cases import captured, reads

from tilewise.depth import InferenceState, Schedule
from tilewise.nn import AttnRes
from tilewise.testing import assert_within_budget

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SCHEDULES = {
    "block": Schedule.block(24, 5),
    "boundaries": Schedule.at(24, (0, 1, 2, 9, 16), one_pass_sources=0, max_queries=3),
    "full": Schedule.full_attention(24),
}


def make(schedule, d, dtype):
    module = AttnRes(d, schedule, device="cuda", dtype=dtype)
    with torch.no_grad():
        module.query.normal_(std=0.5)
        module.key_weight.normal_(1, 0.2)
    return module


def exact(schedule, module, x, updates, norms):
    """Reads in fp64 from the equations, each normed."""
    x, updates, norms = (t.double() for t in (x, updates, norms))
    query, key = module.query.double(), module.key_weight.double()
    functions = [lambda h, u=u: u for u in updates]
    how = (naive.full, ()) if schedule.full else (naive.block, (schedule.starts,))
    inputs, out = how[0](x, functions, query, key, *how[1])
    return [naive.rms(h) * w for h, w in zip([*inputs, out], norms, strict=True)]


def low(schedule, module, x, updates, norms):
    """The same in the storage dtype, dense."""
    functions = [lambda h, u=u: u for u in updates]
    how = (naive.full, ()) if schedule.full else (naive.block, (schedule.starts,))
    inputs, out = how[0](x, functions, module.query, module.key_weight, *how[1])
    return [(naive.rms(h.float()) * w.float()).to(x.dtype) for h, w in zip([*inputs, out], norms, strict=True)]


@pytest.mark.parametrize("overlap", [0, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", SCHEDULES)
def test_inference_within_budget(name, dtype, overlap):
    schedule, d = SCHEDULES[name], 2304
    module = make(schedule, d, dtype)
    norms = torch.rand(25, d, device="cuda").add(0.5).to(dtype)
    state = InferenceState(schedule, module.reads(), max_tokens=1024, overlap_tokens=overlap)
    for tokens in (1024, 1, 7):
        x = torch.randn(tokens, d, device="cuda").to(dtype)
        updates = torch.randn(24, tokens, d, device="cuda").to(dtype)
        with torch.no_grad():
            found = reads(state(x), updates, norms)
            oracle, dense = exact(schedule, module, x, updates, norms), low(schedule, module, x, updates, norms)
        # In fp32 a token's error is that of one score, so a single read's largest errors are two draws of one variable.
        assert_within_budget(f"reads of {tokens}", *(torch.stack(values) for values in (found, dense, oracle)))


def test_a_decode_step_in_a_cuda_graph():
    schedule, d = Schedule.block(24, 5), 1024
    module, norms = make(schedule, d, torch.bfloat16), torch.ones(25, d, device="cuda", dtype=torch.bfloat16)
    state = InferenceState(schedule, module.reads(), max_tokens=8)
    x = torch.randn(8, d, device="cuda", dtype=torch.bfloat16)

    @torch.no_grad()
    def step():
        stream = state(x)
        for l in range(24):
            stream.write(l, torch.sin(stream.read(l, norms[l])))
        return stream.output(norms[24])

    replay, found = captured(step)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        replay()
        torch.testing.assert_close(found, step(), rtol=0, atol=0)
