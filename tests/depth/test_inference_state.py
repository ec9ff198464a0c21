"""Inference state: equal to the training stream in prefill, chunks and decode; memory plans."""

import copy
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_schedule import PLANS, residual

from tilewise.depth import InferenceState, Schedule, memory_table, plan_memory
from tilewise.nn import AttnRes, Decoder, DecoderConfig
from tilewise.nn.decoder import KVCache


def run(stream, functions, norm):
    for l, f in enumerate(functions):
        stream.write(l, f(stream.read(l, norm)))
    return stream.output(norm)


@pytest.mark.parametrize("overlap", [0, 512])
@pytest.mark.parametrize("name", PLANS)
def test_equals_the_training_stream(name, overlap):
    module = residual(PLANS[name], 16, torch.float64)
    state = InferenceState(module.schedule, module.reads(), max_tokens=10, overlap_tokens=overlap)
    norm = torch.randn(16, dtype=torch.float64)
    matrices = torch.randn(12, 16, 16, dtype=torch.float64) / 4
    functions = [lambda h, m=m: torch.tanh(h @ m) for m in matrices]
    bank = state.bank.data_ptr()
    for shape in ((2, 5, 16), (3, 16), (1, 1, 16), (10, 16)):
        x = torch.randn(shape, dtype=torch.float64)
        expected = run(module(x), functions, norm)
        torch.testing.assert_close(run(state(x), functions, norm), expected, rtol=1e-12, atol=1e-12)
    assert state.bank.data_ptr() == bank


def test_an_embedding_in_the_bank_is_not_copied():
    module = residual(Schedule.block(4, 2), 16, torch.float32)
    state = InferenceState(module.schedule, module.reads(), max_tokens=4)
    slot = state.slot(0, (4, 16))
    torch.index_select(torch.randn(9, 16), 0, torch.arange(4), out=slot)
    assert state.store(0, slot).data_ptr() == slot.data_ptr() == state.bank.data_ptr()


@pytest.mark.parametrize("full", [False, True])
@torch.no_grad()
def test_an_embedding_in_another_layout_of_the_bank_is_copied(full):
    """A part of the slot, or its transpose, begins at the slot's own address."""
    schedule = Schedule.full_attention(4) if full else Schedule.block(4, 2)
    module = AttnRes(16, schedule)
    torch.nn.init.normal_(module.query)
    for shape, part in (((2, 8, 16), lambda x: x[:, :4]), ((4, 8, 16), lambda x: x.transpose(0, 1))):
        x, results = torch.randn(shape), []
        for inside in (False, True):
            state = InferenceState(module.schedule, module.reads(), max_tokens=32)
            embedding = part(state.slot(0, torch.Size(shape)).copy_(x) if inside else x)
            stream = state(embedding)
            for l in range(4):
                stream.write(l, torch.tanh(stream.read(l)))
            results.append(stream.output())
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", ["block", "full"])
def test_decoder_prefill_chunks_and_decode_several_tokens(kind):
    """One forward pass over 13 tokens equals chunks of 5, 4, then decode steps of 1, 2 and 1 tokens."""
    config = DecoderConfig(vocab=32, d=16, layers=4, heads=4, kv_heads=2, hidden=24, residual=kind, block=3)
    model = Decoder(config).double()
    with torch.no_grad():
        model.residual.query.normal_()
    tokens = torch.randint(32, (2, 13))
    state = InferenceState(model.residual.schedule, model.residual.reads(), max_tokens=10)
    cache = KVCache(config, 2, 13, dtype=torch.float64)
    with torch.no_grad():
        whole = model(tokens)
        parts = [model(part, cache, residual=state) for part in tokens.split([5, 4, 1, 2, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-12)
    assert state.bank.nbytes == state.bank.shape[0] * 10 * 16 * 8
    with pytest.raises(ValueError, match="expected at most 13"), torch.no_grad():
        model(tokens[:, :1], cache, residual=state)


def test_chunks_cover_the_prompt():
    module = AttnRes(8, Schedule.block(4, 2))
    state = InferenceState(module.schedule, module.reads(), max_tokens=4)
    assert list(state.chunks(10)) == [slice(0, 4), slice(4, 8), slice(8, 10)]


def reloaded(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x)), "save": reloaded}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("name", PLANS)
def test_a_copy_goes_on_from_a_bank_of_its_own(name, copied, mode):
    module = residual(PLANS[name], 16, torch.float64)
    state = InferenceState(module.schedule, module.reads(), max_tokens=10)
    norm = torch.randn(16, dtype=torch.float64)
    functions = [lambda h, m=m: torch.tanh(h @ m) for m in torch.randn(12, 16, 16, dtype=torch.float64) / 4]
    x, y = torch.randn(2, 10, 16, dtype=torch.float64)
    expected = {key: run(state(value), functions, norm) for key, value in (("x", x), ("y", y))}
    for half in range(12):
        stream = state(x)
        for l in range(half):
            stream.write(l, functions[l](stream.read(l, norm)))
        with mode():
            other = COPIES[copied](stream)
            fresh = COPIES[copied](state)
        assert torch.equal(run(fresh(y), functions, norm), expected["y"])
        run(state(y), functions, norm)
        for l in range(half, 12):
            other.write(l, functions[l](other.read(l, norm)))
        assert torch.equal(other.output(norm), expected["x"])
    assert fresh.bank.data_ptr() != state.bank.data_ptr()
    assert not fresh.bank.is_inference()


def test_slots_that_there_are():
    state = InferenceState(Schedule.block(4, 2), AttnRes(16, Schedule.block(4, 2)).reads(), max_tokens=4)
    for number in (-1, 2):
        with pytest.raises(ValueError, match=f"number: found {number}, expected 0 to 1"):
            state.slot(number, (4, 16))
    with pytest.raises(TypeError, match=r"number: found 1\.0, expected an integer"):
        state.slot(1.0, (4, 16))
    with pytest.raises(ValueError, match=r"shape: found \(\), expected \[\.\.\., 16\]"):
        state.slot(0, ())


def test_misuse_raises():
    module = AttnRes(8, Schedule.block(4, 2))
    state = InferenceState(module.schedule, module.reads(), max_tokens=4)
    with pytest.raises(ValueError, match=r"state.chunks\(tokens\)"):
        state(torch.zeros(5, 8))
    with pytest.raises(ValueError, match=r"expected torch.float32"):
        state(torch.zeros(4, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="max_tokens: found 0"):
        InferenceState(module.schedule, module.reads(), max_tokens=0)
    old, new = state(torch.zeros(4, 8)), state(torch.zeros(2, 8))
    with pytest.raises(ValueError, match="on step 1, expected the newest, 2"):
        old.read(0)
    new.read(0)
    with pytest.raises(ValueError, match=r"read\(1\) after 0 written and 1 read"):
        new.read(1)
    with pytest.raises(ValueError, match=r"output\(\) after 0 written"):
        new.output()
    new.write(0, torch.zeros(2, 8))
    with pytest.raises(ValueError, match=r"write\(0\) after 1 written"):
        new.write(0, torch.zeros(2, 8))
    part = AttnRes(8, Schedule.block(4, 2), span=(0, 2))
    with pytest.raises(ValueError, match="expected 0 to 4"):
        InferenceState(part.schedule, part.reads(), max_tokens=4)


def test_published_memory_figures():
    k3 = Schedule.kimi_k3()
    gb = lambda **arguments: plan_memory(131072, 7168, **arguments).bank / 1e9  # noqa: E731
    assert gb(schedule=k3) == gb(blocks=8) == pytest.approx(15.03, abs=0.01)
    assert gb(schedule=k3, shards=8) == pytest.approx(1.88, abs=0.01)
    assert gb(schedule=k3, shards=8, chunk=32768) < 0.5
    full = Schedule.full_attention(128)
    assert plan_memory(32768, 7168, full).bank / 1e9 == pytest.approx(60.1, abs=0.1)
    assert plan_memory(32768, 7168, full, shards=8).bank / 1e9 == pytest.approx(7.5, abs=0.05)


def test_the_plan_is_what_the_state_allocates():
    for schedule in (
        Schedule.block(10, 4),
        Schedule.block(10, 2, max_queries=1),
        Schedule.block(10, 10),
        Schedule.full_attention(10),
        Schedule.at(10, (0, 1, 7)),
    ):
        module = AttnRes(16, schedule, dtype=torch.bfloat16)
        state = InferenceState(schedule, module.reads(), max_tokens=6)
        plan = plan_memory(6, 16, schedule)
        assert plan.bank == state.bank.nbytes
        assert plan.bank + plan.phase1 == state.nbytes


def test_plans_print_and_refuse_bad_sizes():
    table = memory_table([plan_memory(131072, 7168, Schedule.kimi_k3(), shards=n) for n in (1, 8)])
    assert [line.split()[4] for line in table.splitlines()[1:]] == ["15.03", "1.88"]
    assert len({len(line) for line in table.splitlines()}) == 1
    limited = Schedule.block(186, 24, max_queries=4)
    scores = 187 * 8 * 4 * 1000
    phase1 = [plan_memory(1000, 7168, schedule).phase1 - scores for schedule in (limited, Schedule.kimi_k3())]
    assert 6 * phase1[0] == phase1[1] == 24 * 1000 * (7168 * 2 + 4)
    with pytest.raises(ValueError, match="exactly one"):
        plan_memory(10, 8)
    with pytest.raises(ValueError, match="shards: found 0"):
        plan_memory(10, 8, blocks=2, shards=0)


def test_streams_on_the_kernels_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "streams_interpreted.py"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "14 passed" in done.stdout, done.stdout
