"""Where a pass goes on: states between sublayers, caches between steps; a position that is not theirs is refused."""

import pytest
import torch

from tilewise.depth import InferenceState, Schedule
from tilewise.depth import stream as functional
from tilewise.depth.stream import State
from tilewise.nn import AttnRes, Decoder, DecoderConfig, StandardResidual
from tilewise.nn.decoder import KVCache

D, L = 8, 6
SCHEDULES = {
    "block": Schedule.block(L, 2),
    "block, two phases": Schedule.block(L, 3, one_pass_sources=0),
    "full": Schedule.full_attention(L),
    "full, two phases": Schedule.full_attention(L, 3, one_pass_sources=0),
}


def module(name):
    residual = AttnRes(D, SCHEDULES[name], dtype=torch.float64)
    torch.nn.init.normal_(residual.query)
    return residual


def go(stream, last):
    while stream.position < last:
        l = stream.position
        stream.write(l, torch.sin((l + 1) * stream.read(l)))
    return stream


@pytest.mark.parametrize("name", SCHEDULES)
@torch.no_grad()
def test_a_state_goes_on_where_it_stands_and_nowhere_else(name):
    residual, x = module(name), torch.randn(3, D, dtype=torch.float64)
    expected = go(residual(x), L).output()
    for at in range(L + 1):
        state = go(residual(x), at).state
        for position in (None, at):
            got = go(residual(state, position), L).output()
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
        for wrong in {*range(-1, L + 2)} - {at}:
            with pytest.raises(ValueError, match=f"position: found {wrong}, expected (at least 0|{at}, the sublayer)"):
                residual(state, wrong)
    for wrong in (1.0, "1", True):
        with pytest.raises(TypeError, match=f"position: found {wrong!r}, expected an integer"):
            residual(state, wrong)


@pytest.mark.parametrize("name", SCHEDULES)
@torch.no_grad()
def test_a_state_put_together_by_hand_has_the_sources_of_its_position(name):
    residual, x = module(name), torch.randn(3, D, dtype=torch.float64)
    expected = go(residual(x), L).output()
    for at in range(L + 1):
        state = functional.finish(go(residual(x), at).state) if at else go(residual(x), 0).state
        bare = State(state.sources, prefix=state.prefix)
        torch.testing.assert_close(go(residual(bare, at), L).output(), expected, rtol=1e-12, atol=1e-12)
        for wrong in range(L + 1):
            # Within a block the state does not say how many sublayers the prefix is the sum of.
            if len(go(residual(x), wrong).state.sources) != len(bare.sources):
                with pytest.raises(ValueError, match=f"position: found {wrong} with a state of {len(bare.sources)} s"):
                    residual(bare, wrong)


@pytest.mark.parametrize("name", SCHEDULES)
@torch.no_grad()
def test_a_state_between_a_read_and_its_write_is_no_place_to_go_on(name):
    residual, x = module(name), torch.randn(3, D, dtype=torch.float64)
    for at in range(L):
        stream = go(residual(x), at)
        stream.read(at)
        with pytest.raises(ValueError, match=f"state: found sublayer {at} read but not written, expected both"):
            residual(stream.state)
        with pytest.raises(ValueError, match=f"state: found sublayer {at} read but not written, expected both"):
            stream.checkpoint(go, L)


@pytest.mark.parametrize("name", SCHEDULES)
@torch.no_grad()
def test_the_functions_of_a_stream_keep_their_order(name):
    residual, x = module(name), torch.randn(3, D, dtype=torch.float64)
    schedule, reads = residual.schedule, residual.reads()
    state = functional.begin(x)
    for l in range(L):
        for wrong in {*range(L)} - {l}:
            with pytest.raises(ValueError, match=rf"found read\({wrong}\), expected read\({l}\)"):
                functional.read(state, schedule, reads, wrong, None)
        with pytest.raises(ValueError, match="update: found a second write before a read"):
            functional.write(state, x)
        with pytest.raises(ValueError, match=f"output: found {l} of {L} sublayers written"):
            functional.output(state, reads, None)
        y, state = functional.read(state, schedule, reads, l, None)
        with pytest.raises(ValueError, match=rf"found read\({l}\), expected write\({l}\)"):
            functional.read(state, schedule, reads, l, None)
        state = functional.write(state, torch.sin((l + 1) * y))
    torch.testing.assert_close(functional.output(state, reads, None), go(residual(x), L).output(), rtol=0, atol=0)


def test_a_shared_pass_hands_over_at_its_own_position_and_between_sublayers_only():
    residual, x = module("block"), torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    stream = residual(x, norms=torch.ones(L, D, dtype=torch.float64).unbind(0))
    go(stream, 3).read(3)
    with pytest.raises(ValueError, match="state: found sublayer 3 read but not written, expected both"):
        stream.checkpoint(go, L)


def test_a_state_may_be_taken_up_with_norms():
    residual, x = module("block"), torch.randn(3, D, dtype=torch.float64)
    norms = torch.rand(L, D, dtype=torch.float64).unbind(0)
    expected = go(residual(x, norms=norms), L).output()
    for at in (0, 1, 2, 5):
        with torch.no_grad():
            state = go(residual(x, norms=norms), at).state
        torch.testing.assert_close(go(residual(state, norms=norms), L).output(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
@torch.no_grad()
def test_a_step_of_inference_says_what_it_expects(name):
    residual, x = module(name), torch.randn(3, D, dtype=torch.float64)
    stream = InferenceState(residual.schedule, residual.reads(), max_tokens=3)(x)
    for l in range(L):
        for wrong in {*range(L)} - {l}:
            with pytest.raises(ValueError, match=rf"found read\({wrong}\).*, expected read\({l}\)"):
                stream.read(wrong)
        y = stream.read(l)
        for call in (lambda l=l: stream.read(l), lambda l=l: stream.read(l + 1), lambda l=l: stream.write(l + 1, x)):
            with pytest.raises(ValueError, match=rf"expected write\({l}, ...\)"):
                call()
        stream.write(l, torch.sin((l + 1) * y))
    with pytest.raises(ValueError, match=r"expected output\(\)"):
        stream.read(0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_norms_of_a_pass_are_those_of_its_start(name):
    """A list that changes meanwhile changes no pass, of whatever kind."""
    residual, x = module(name), torch.randn(3, D, dtype=torch.float64)
    state = InferenceState(residual.schedule, residual.reads(), max_tokens=3)
    for make in (residual, StandardResidual(L), state):
        for context in (torch.enable_grad(), torch.no_grad()):
            outputs = []
            for change in (False, True):
                norms = [torch.full((D,), 1.0 + l, dtype=torch.float64) for l in range(L)]
                with context:
                    stream = make(x, norms=norms)
                    go(stream, 1)
                    if change:
                        norms[:] = norms[::-1]
                    outputs.append(go(stream, L).output())
            torch.testing.assert_close(*outputs, rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [0.0, None, "0", torch.tensor(0)])
def test_a_sublayer_is_an_integer_and_a_refusal_takes_no_turn(wrong):
    residual, x = module("block"), torch.randn(3, D, dtype=torch.float64)
    norms = torch.ones(L, D, dtype=torch.float64).unbind(0)
    state = InferenceState(residual.schedule, residual.reads(), max_tokens=3)
    for make in (residual, StandardResidual(L), state):
        for given in (None, norms):
            stream = make(x, norms=given)
            with pytest.raises((TypeError, ValueError), match="sublayer: found"):
                stream.read(wrong)
            stream.read(0)
            if make is not state:
                with pytest.raises(TypeError, match=r"sublayer: found .*, expected an integer"):
                    stream.write(wrong, x)
            stream.write(0, x)


def decoder(**changes):
    sizes = dict(vocab=32, d=16, layers=2, heads=2, kv_heads=1, hidden=8, residual="block", block=3)
    return Decoder(DecoderConfig(**(sizes | changes)))


@torch.no_grad()
def test_a_cache_is_set_back_but_never_beyond_what_is_written():
    model, tokens = decoder(), torch.randint(32, (2, 6))
    cache, whole = KVCache(model.config, 2, 8), model(tokens)
    model(tokens[:, :4], cache)
    with pytest.raises(ValueError, match="length: found 5, expected 0 to 4, the tokens written so far"):
        cache.length = 5
    model(torch.randint(32, (2, 2)), cache)
    cache.length = 4
    torch.testing.assert_close(model(tokens[:, 4:], cache), whole[:, 4:])
    assert cache.length == 6
    cache.length = 4
    model(tokens[:, 4:5], cache)
    # What lies behind belongs to another continuation.
    for wrong, error in ((6, ValueError), (-1, ValueError), (1.0, TypeError), (None, TypeError)):
        with pytest.raises(error, match=f"length: found {wrong}, expected"):
            cache.length = wrong


@torch.no_grad()
def test_a_cache_of_another_model_is_refused():
    model, tokens = decoder(), torch.randint(32, (2, 4))
    for changes, message in (
        ({"layers": 3}, "cache: found 3 layers, expected 2"),
        ({"kv_heads": 2}, r"cache: found k \(2, 1, 4, 8\) .*, expected \(2, 2, 4, 8\)"),
        ({"heads": 4}, r"cache: found k .*, expected \(2, 1, 4, 4\)"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens, KVCache(decoder(**changes).config, 2, 8))
    narrow = KVCache(model.config, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"cache: found k .* torch\.float32 on cpu, expected .* torch\.bfloat16"):
        model(tokens, narrow)
    assert narrow.length == 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(tokens, KVCache(model.config, 2, 8)).shape == (2, 4, 32)
