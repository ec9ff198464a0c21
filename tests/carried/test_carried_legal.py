"""What argument checks must let through: transforms of torch.func, make_fx, NumPy's numbers, options without effect."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import func, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tilewise.carried import CarriedConfig, Carry, TileLayout, carried_attention_reference, decode_cost
from tilewise.carried.llama import CarriedLlama, KeyValueCache, LlamaOptions
from tilewise.carried.nn import CarriedAttention, rotary

TWO = CarriedConfig(layers=2, tile=16)
REFERENCE = replace(TWO, impl="reference")
KEYS = pytest.mark.parametrize("keys", ["own", "hidden", "shared"])


def model(keys="own", config=TWO):
    return CarriedLlama(LlamaOptions(64, 32, 3, 4, 2, hidden=8, keys=keys, carried=config))


@KEYS
def test_gradients_of_every_sequence_by_vmap(keys):
    whole, tokens = model(keys, REFERENCE), torch.randint(64, (3, 9))
    parameters = dict(whole.named_parameters())

    def loss(parameters, tokens):
        return func.functional_call(_Loss(whole), {f"model.{n}": p for n, p in parameters.items()}, (tokens[None],))

    found = func.vmap(func.grad(loss), (None, 0))(parameters, tokens)
    for b in range(3):
        expected = torch.autograd.grad(whole.loss(tokens[b : b + 1]), list(parameters.values()))
        for got, wanted in zip(found.values(), expected, strict=True):
            torch.testing.assert_close(got[b], wanted, rtol=1e-4, atol=1e-6)


class _Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model.loss(tokens)


@KEYS
@torch.no_grad()
def test_a_graph_by_make_fx_takes_other_tokens(keys):
    whole, tokens = model(keys), torch.randint(64, (2, 2, 9))
    torch.testing.assert_close(make_fx(whole)(tokens[0])(tokens[1]), whole(tokens[1]))


@torch.no_grad()
def test_numbers_of_numpy_are_numbers():
    tokens, n = torch.randint(64, (1, 9)), np.int64
    layer = CarriedAttention(n(32), n(4), n(2), config=TWO, rotary_base=np.float32(1e4))
    x = torch.randn(1, 9, 32)
    layout = TileLayout(TWO, n(9), n(9), offset=n(0))
    assert torch.equal(layer(x, Carry(TWO, layout=layout))[0], layer(x, Carry(TWO))[0])
    torch.testing.assert_close(rotary(torch.arange(5), n(8), np.float32(1e4)), rotary(torch.arange(5), 8))
    whole = model()
    assert torch.equal(whole.generate(tokens, n(3), chunk=n(4)), whole.generate(tokens, 3, chunk=4))
    torch.testing.assert_close(whole(tokens, cache=KeyValueCache(n(9))), whole(tokens))
    assert decode_cost(TWO, n(4), n(2), n(8)) == decode_cost(TWO, 4, 2, 8)
    for wrong, error in ((np.bool_(True), TypeError), (np.float64(9), TypeError), (n(0), ValueError)):
        with pytest.raises(error, match="capacity is"):
            KeyValueCache(wrong)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_positions_without_a_sign(dtype):
    at = torch.arange(3, 9)
    for found, expected in zip(rotary(at.to(dtype), 8), rotary(at, 8), strict=True):
        assert torch.equal(found, expected)


def test_options_that_do_not_enter_need_not_agree():
    """Dropout, `detach` without gradients, the usual scale written out, and all where the layer was given none."""
    x = torch.randn(2, 9, 32)
    layer = CarriedAttention(32, 4, 2, config=TWO)
    expected = layer(x, Carry(TWO))[0]
    torch.testing.assert_close(layer(x, Carry(replace(TWO, scale=8**-0.5)))[0], expected)
    dropped, detached = replace(TWO, dropout_p=0.5), replace(TWO, detach=True)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, Carry(detached))[0], expected)
    with pytest.raises(ValueError, match="detach"):
        layer(x, Carry(detached))
    assert not torch.equal(layer(x, Carry(dropped))[0], expected)
    torch.testing.assert_close(layer.eval()(x, Carry(dropped))[0], expected)
    full = replace(TWO, causal=False)
    untold, told = CarriedAttention(32, 4, 2), CarriedAttention(32, 4, 2, config=full)
    told.load_state_dict(untold.state_dict())
    torch.testing.assert_close(untold(x, Carry(full))[0], told(x, Carry(full))[0])


def test_the_oracle_takes_parameter_lists():
    config = CarriedConfig(layers=2, scaling="gain", sink=True)
    x = [torch.randn(1, 2, 5, 8) for _ in range(2)]
    gain, sink = ([torch.randn(2) for _ in range(2)] for _ in range(2))
    found = carried_attention_reference(x, x, x, config, gain=nn.ParameterList(gain), sink=nn.ParameterList(sink))
    for a, b in zip(found, carried_attention_reference(x, x, x, config, gain=gain, sink=sink), strict=True):
        assert torch.equal(a, b)
