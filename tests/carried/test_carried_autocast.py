"""Inside autocast: the oracle and a carried row are not lowered, fp64 stays, decoding equals the whole pass."""

import pytest
import torch

from tilewise.carried import CarriedConfig, Carry, carried_attention, carried_attention_reference, carried_decode
from tilewise.carried.llama import CarriedLlama, KeyValueCache, LlamaOptions


def inside(enabled=True):
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


def tensors(T, dtype=torch.float32, Tk=10):
    return [torch.randn(1, h, n, 8, dtype=dtype) for h, n in ((4, T), (2, Tk), (2, Tk))]


def test_the_oracle_in_fp32_is_not_lowered():
    q, k, v = ([x.requires_grad_() for x in parts] for parts in zip(*(tensors(10) for _ in range(2)), strict=True))
    found = []
    for enabled in (True, False):
        with inside(enabled):
            outputs = carried_attention_reference(q, k, v, CarriedConfig(layers=2))
            grads = torch.autograd.grad(sum(o.square().sum() for o in outputs), [*q, *k, *v])
        found.append([*outputs, *grads])
    for a, b in zip(*found, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_of_scores_is_that_of_the_cast_inputs(dtype):
    q, k, v = tensors(1, dtype)
    config = CarriedConfig(layers=2)
    O, row = carried_decode(*(x.bfloat16() for x in (q, k, v)), None, 0, config)
    with inside():
        found = carried_decode(q, k, v, None, 0, config)
        after = carried_decode(q, k, v, row, 1, config)[0]
    assert found[1].dtype == torch.float32
    assert torch.equal(found[0], O)
    assert torch.equal(found[1], row)
    assert torch.equal(after, carried_decode(*(x.bfloat16() for x in (q, k, v)), row, 1, config)[0])


def test_inputs_of_several_dtypes_decode_as_they_attend():
    """Norms may return fp32 inside autocast, projections bf16."""
    q, k, v = tensors(10)
    with inside():
        whole, _ = carried_attention(q, k, v.bfloat16(), Carry(CarriedConfig(layers=1)))
        step, _ = carried_decode(q, k, v.bfloat16(), None, 0, CarriedConfig(layers=1))
    torch.testing.assert_close(step, whole, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("impl", ["blocked", "reference"])
def test_fp64_stays(impl):
    q, k, v = tensors(10, torch.float64)
    carry = Carry(CarriedConfig(layers=1, impl=impl))
    expected, _ = carried_attention(q, k, v, carry)
    with inside():
        assert torch.equal(carried_attention(q, k, v, carry)[0], expected)
        step, _ = carried_decode(q, k, v, None, 0, CarriedConfig(layers=1))
    torch.testing.assert_close(step, expected, rtol=1e-12, atol=1e-12)


def test_integers_are_no_inputs():
    with inside(), pytest.raises(TypeError, match=r"q is torch\.int64; expected fp16"):
        carried_attention(*(x.long() for x in tensors(10)), Carry())


@pytest.mark.parametrize("keys", ["own", "shared"])
@torch.no_grad()
def test_a_cache_made_outside_takes_tokens_inside(keys):
    """One made inside is in bf16, and refuses the fp32 keys of a step outside rather than round them."""
    model = CarriedLlama(LlamaOptions(layers=2, carried=CarriedConfig(layers=2, tile=16), keys=keys))
    tokens, cache, narrow = torch.randint(256, (2, 14)), KeyValueCache(14), KeyValueCache(14)
    model(tokens[:, :10], cache=cache)
    with inside():
        last = [model(tokens[:, n : n + 1], cache=cache).float() for n in range(10, 14)]
        model(tokens[:, :10], cache=narrow)
    torch.testing.assert_close(torch.cat(last, 1), model(tokens)[:, 10:], rtol=2e-2, atol=2e-2)
    with pytest.raises(TypeError, match=r"k is torch\.float32; expected torch\.bfloat16, as in the cache"):
        model(tokens[:, 10:11], cache=narrow)
