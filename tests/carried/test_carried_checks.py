"""What calls, options and modules refuse, and in which words; dropout in training only; pickling; layouts given."""

import copy
import io
import math
import pickle
import re

import pytest
import torch
from carried_cases import CarriedConfig

from tilewise.carried import Carry, SharedKeyCarry, TileLayout, carried_attention, carried_decode, shared_key_attention
from tilewise.carried.llama import CarriedLlama, KeyValueCache, LlamaOptions
from tilewise.carried.nn import CarriedAttention, CarriedBlock
from tilewise.mask import Mask

PLANS = ("stored", "mixed", "recompute")


def refuses(message, call):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call()


def tensors(H=4, Hk=2, T=10, Tk=10, d=8, dtype=torch.float32, device="cpu"):
    return [torch.randn(1, h, n, d, dtype=dtype, device=device) for h, n in ((H, T), (Hk, Tk), (Hk, Tk))]


OPTIONS = [
    (
        {"windows": [1, 2, 3, 4]},
        "windows is [1, 2, 3, 4]; expected an integer, a tuple of them, or None; nearest legal",
    ),
    ({"windows": 2.5}, "windows is 2.5; expected an integer"),
    ({"windows": (1, 2, 3, "x")}, "windows holds 'x'; expected integers"),
    ({"windows": ()}, "windows has 0 entries"),
    ({"layers": 2.5}, "layers is 2.5; expected an integer"),
    ({"layers": "4"}, "layers is '4'; expected an integer"),
    ({"layers": True}, "layers is True; expected an integer"),
    ({"blocks": 1.0}, "blocks is 1.0; expected an integer"),
    ({"tile": 16.0}, "tile is 16.0; expected an integer"),
    ({"scale": math.nan}, "scale is nan; expected a positive, finite number, or None for 1/√d"),
    ({"scale": math.inf}, "scale is inf; expected a positive, finite number"),
    ({"scale": "1"}, "scale is '1'; expected a number, or None"),
    ({"softcap": math.nan}, "softcap is nan; expected a positive, finite number, or None for no cap"),
    ({"softcap": math.inf}, "softcap is inf"),
    ({"dropout_p": math.nan}, "dropout_p is nan; expected 0"),
    ({"dropout_p": None}, "dropout_p is None; expected a number"),
    ({"sink": torch.zeros(4)}, "sink is tensor([0., 0., 0., 0.]); expected True or False"),
    ({"causal": None}, "causal is None; expected True or False"),
    ({"carry_dtype": torch.int8}, "carry_dtype is torch.int8; expected fp16, bf16, fp32 or fp64, or None"),
    ({"carry_dtype": "fp16"}, "carry_dtype is 'fp16'"),
    ({"grad_dtype": torch.float8_e4m3fn}, "grad_dtype is torch.float8_e4m3fn"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options(options, message):
    refuses(message, lambda: CarriedConfig(**options))


@pytest.mark.parametrize("impl", ["blocked", "reference"])
def test_calls(impl):
    q, k, v = tensors()
    make = lambda **x: Carry(CarriedConfig(impl=impl, tile=16, **x))  # noqa: E731
    attend = carried_attention
    refuses("q is None; expected a tensor", lambda: attend(None, k, v, make()))
    refuses("v is a int; expected a tensor", lambda: attend(q, k, 3, make()))
    refuses("carry is None; expected a Carry; nearest legal call: Carry(config)", lambda: attend(q, k, v, None))
    refuses("carry is a CarriedConfig; expected a Carry", lambda: attend(q, k, v, CarriedConfig()))
    refuses("carry is a SharedKeyCarry", lambda: attend(q, k, v, SharedKeyCarry(CarriedConfig())))
    refuses("carry is a Carry; expected a SharedKeyCarry", lambda: shared_key_attention(q, k, v, make()))
    refuses("config is a Mask; expected a CarriedConfig; nearest legal call", lambda: Carry(Mask.causal()))
    refuses("mask is a Tensor; expected a Mask", lambda: Carry(CarriedConfig(), torch.ones(10, 10)))
    refuses("offset is 1.5; expected an integer", lambda: Carry(CarriedConfig(), offset=1.5))
    refuses("layout is a int; expected a TileLayout", lambda: Carry(CarriedConfig(), layout=3))
    refuses("expected no empty dimension", lambda: attend(q[:, :0], k, v, make()))
    gained = make(scaling="gain")
    refuses("gain is a float; expected a tensor", lambda: attend(q, k, v, gained, gain=1.0))
    refuses("gain is torch.int64; expected a floating", lambda: attend(q, k, v, gained, gain=torch.ones(4).long()))
    refuses("gain is on meta; expected cpu", lambda: attend(q, k, v, gained, gain=torch.ones(4, device="meta")))
    refuses("sink is None; expected a tensor [4], since config.sink", lambda: attend(q, k, v, make(sink=True)))
    refuses("sink is a float; expected a tensor", lambda: attend(q, k, v, make(sink=True), sink=0.0))
    dropped = make(dropout_p=0.5)
    refuses("seed is a int; expected a tensor; nearest legal call", lambda: attend(q, k, v, dropped, seed=5))
    refuses("seed is torch.int64 of shape (2,)", lambda: attend(q, k, v, dropped, seed=torch.tensor([1, 2])))
    refuses("seed is torch.float32 of shape (1,)", lambda: attend(q, k, v, dropped, seed=torch.tensor([1.5])))
    refuses("seed is on meta", lambda: attend(q, k, v, dropped, seed=torch.ones(1, dtype=torch.int64, device="meta")))


@pytest.mark.parametrize("plan", [*PLANS, "reference"])
def test_layers_of_one_block_are_alike(plan):
    """One rule for all plans: another number of key heads used to fail in the backward pass of one."""
    options = {"impl": "reference"} if plan == "reference" else {"plan": plan}
    _, carry = carried_attention(*tensors(), Carry(CarriedConfig(tile=16, **options)))
    then = lambda **x: carried_attention(*tensors(**x), carry)  # noqa: E731
    refuses("k has 4 heads; expected 2, as in the layers before", lambda: then(Hk=4))
    refuses("q has shape (1, 4, 10, 16); expected (1, 4, 10, 8), as in the layers before", lambda: then(d=16))
    refuses("q has shape (1, 8, 10, 8); expected (1, 4, 10, 8)", lambda: then(H=8))
    refuses("q is torch.float16; expected torch.float32, as in the layers before", lambda: then(dtype=torch.float16))
    refuses("q is torch.float64; expected torch.float32", lambda: then(dtype=torch.float64))
    q, k, v = tensors()
    assert carried_attention(q, k, v[..., :5], carry)[0].shape == (1, 4, 10, 5)


STEPS = [
    ({"offset": torch.tensor([1, 2, 3])}, "offset has shape (3,); expected [1], one position a sequence"),
    ({"offset": torch.tensor([1.0])}, "offset is torch.float32; expected torch.int32 or torch.int64"),
    ({"offset": torch.tensor([10])}, "offset is [10]; expected 0 to 9"),
    ({"offset": torch.tensor([-1])}, "offset is [-1]; expected 0 to 9"),
    ({"offset": 10}, "offset is 10; expected 0 to 9: 1 new tokens lie in a cache of 10"),
    ({"offset": -1}, "offset is -1; expected 0 to 9"),
    ({"offset": 1.5}, "offset is 1.5; expected an integer"),
    ({"row": torch.zeros(1, 4, 1, 10)}, "row is given for layer 0; expected None"),
    ({"layer": 1}, "row is None; expected [1, 4, 1, 10] for layer 1, what the layer before returned"),
    ({"layer": 1, "row": torch.zeros(1, 4, 1, 9)}, "row has shape (1, 4, 1, 9); expected (1, 4, 1, 10)"),
    ({"layer": 1, "row": torch.zeros(1, 4, 1, 10).int()}, "row is torch.int32; expected fp16"),
    ({"layer": 1, "row": torch.zeros(1, 4, 1, 10, device="meta")}, "row is on meta; expected cpu"),
    ({"layer": 2}, "layer is 2; expected 0 to 1, since config.layers is 2"),
    ({"layer": -1}, "layer is -1; expected 0 to 1"),
    ({"layer": 0.0}, "layer is a float; expected a int"),
    ({"gain": torch.ones(4)}, "gain is given but scaling is 'sum'; nearest legal call: scaling='gain'"),
    ({"sink": torch.ones(4)}, "sink is given but config.sink is False"),
    ({"config": CarriedConfig(layers=2, sink=True)}, "sink is None; expected a tensor [4]"),
    ({"config": CarriedConfig(layers=2, sink=True), "sink": torch.ones(1)}, "sink has shape (1,); expected [4]"),
    ({"config": CarriedConfig(layers=2, scaling="gain"), "gain": torch.ones(1)}, "gain has shape (1,); expected [4]"),
    ({"config": CarriedConfig(layers=2, scaling="gain"), "layer": 1, "row": torch.zeros(1, 4, 1, 10)}, "gain is None"),
    ({"config": Mask()}, "config is a Mask; expected a CarriedConfig"),
    ({"mask": torch.ones(1, 10)}, "mask is a Tensor; expected a Mask"),
    ({"mask": Mask.lengths([1, 2, 3])}, "mask.bounds has shape (3, 1, 2); expected [1, 1, 2]"),
    ({"mask": Mask.lengths([11])}, "mask.bounds reach from 0 to 11; expected 0 to Tk = 10"),
    ({"mask": Mask.lengths([9]), "offset": torch.tensor([3])}, "mask has bounds and offset is a tensor"),
    ({"row_dtype": torch.int32}, "row_dtype is torch.int32; expected fp16"),
    ({"q": None}, "q is None; expected a tensor"),
    ({"q": torch.zeros(4, 1, 8)}, "q has shape (4, 1, 8); expected four dimensions"),
    ({"q": torch.zeros(1, 4, 0, 8)}, "expected no empty dimension"),
    ({"k": torch.zeros(1, 2, 0, 8), "v": torch.zeros(1, 2, 0, 8)}, "expected no empty dimension"),
    ({"q": torch.zeros(1, 4, 1, 8).int()}, "q is torch.int32; expected fp16"),
    ({"k": torch.zeros(1, 2, 10, 8).half()}, "k is torch.float16; expected"),
    ({"k": torch.zeros(1, 2, 10, 9)}, "k has shape (1, 2, 10, 9); expected [1, Hk, Tk, 8]"),
    ({"k": torch.zeros(1, 3, 10, 8), "v": torch.zeros(1, 3, 10, 8)}, "k has 3 heads; expected a divisor of q's 4"),
    ({"v": torch.zeros(1, 2, 9, 8)}, "v has shape (1, 2, 9, 8); expected [1, 2, 10, d_v]"),
]


@pytest.mark.parametrize(("change", "message"), STEPS)
def test_decoding_steps(change, message):
    q, k, v = tensors(T=1)
    given = {"q": q, "k": k, "v": v, "row": None, "layer": 0, "config": CarriedConfig(layers=2)} | change
    refuses(message, lambda: carried_decode(**given))


BASE = CarriedConfig(layers=2, tile=16)
LENGTHS = Mask.lengths([5])
LAYOUTS = [
    (CarriedConfig(layers=2, tile=32), None, {}, "layout was made for tile = 32; expected 16"),
    (CarriedConfig(layers=2, tile=16, causal=False), None, {}, "layout was made for causal = False; expected True"),
    (CarriedConfig(layers=1, tile=16), None, {}, "layout was made for layers = 1; expected 2"),
    (CarriedConfig(layers=3, tile=16, windows=(3, 4, 5)), None, {}, "layout was made for layers = 3; expected 2"),
    (CarriedConfig(layers=2, tile=16, windows=3), None, {}, "layout was made for windows = 3; expected None"),
    (CarriedConfig(layers=2, tile=16, windows=(3, 4)), None, {}, "layout was made for windows = (3, 4); expected None"),
    (BASE, None, {"mask": LENGTHS}, "layout was made for no mask; expected the carry's mask"),
    (BASE, LENGTHS, {"mask": Mask.lengths([6])}, "layout was made for another mask; expected the carry's mask"),
    (BASE, LENGTHS, {"mask": Mask.window(3)}, "layout was made for another mask"),
    (BASE, None, {"offset": 3}, "layout was made for offset = 0; expected 3, the carry's"),
]


@pytest.mark.parametrize(("config", "mask", "given", "message"), LAYOUTS)
def test_a_layout_of_other_options_is_refused(config, mask, given, message):
    refuses(message, lambda: Carry(BASE, layout=TileLayout(config, 20, 20, mask), **given))


@pytest.mark.parametrize("impl", ["blocked", "reference"])
def test_a_layout_of_the_same_options_is_taken_with_its_mask(impl):
    q, k, v = tensors(T=20, Tk=20)
    config = CarriedConfig(layers=2, tile=16, impl=impl)
    expected, _ = carried_attention(q, k, v, Carry(config, LENGTHS))
    layout = TileLayout(config, 20, 20, LENGTHS)
    longer = TileLayout(CarriedConfig(layers=5, tile=16), 20, 20, Mask.lengths([5]))
    for carry in (Carry(config, LENGTHS, layout=layout), Carry(config, layout=layout), Carry(config, layout=longer),
                  Carry(config, Mask.lengths([5]), layout=layout)):  # fmt: skip
        assert torch.equal(carried_attention(q, k, v, carry)[0], expected)
    two = TileLayout(config, 20, 20, Mask.lengths([5, 7]))
    refuses("q has batch 1; expected 2", lambda: carried_attention(q, k, v, Carry(config, layout=two)))


@pytest.mark.parametrize("impl", ["blocked", "reference"])
def test_decisions_stay_readable(impl):
    carry = Carry(CarriedConfig(layers=2, tile=16, impl=impl))
    for index in (1, 0, 1, 0):
        _, carry = carried_attention(*tensors(), carry)
        assert carry.index == index
        assert carry.decision.impl == impl


@pytest.mark.parametrize("keys", ["own", "shared"])
@pytest.mark.parametrize("impl", ["blocked", "reference"])
def test_dropout_in_training_only(keys, impl):
    """And decoding, which drops nothing, then equals the whole pass."""
    torch.manual_seed(0)
    config = CarriedConfig(layers=2, dropout_p=0.5, tile=16, impl=impl)
    model = CarriedLlama(LlamaOptions(layers=2, carried=config, keys=keys)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0 if p.dim() == 2 else 1.0)
    tokens = torch.randint(256, (1, 24))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    with torch.no_grad():
        whole = model(tokens)
        assert torch.equal(model(tokens), whole)
        for size in (1, 12):
            cache = KeyValueCache(24)
            parts = [model(part, cache=cache) for part in tokens.split(size, 1)]
            torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)


def test_a_layer_in_evaluation_leaves_the_next_one_in_training():
    config = CarriedConfig(layers=2, dropout_p=0.5, tile=16)
    layers = [CarriedAttention(16, 2, config=config, layer=i) for i in range(2)]
    layers[0].eval()
    x, outputs = torch.randn(1, 9, 16), []
    for _ in range(2):
        carry = Carry(config)
        for layer in layers:
            y, carry, _ = layer(x, carry)
            outputs.append(y)
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[1], outputs[3])


@pytest.mark.parametrize("keys", ["own", "hidden", "shared"])
def test_models_can_be_pickled_saved_and_copied(keys):
    model = CarriedLlama(LlamaOptions(layers=4, carried=CarriedConfig(layers=2, tile=16), keys=keys))
    tokens, buffer = torch.randint(256, (1, 9)), io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    others = (pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False), copy.deepcopy(model))
    for other in others:
        assert torch.equal(other(tokens), model(tokens))


def test_blocks_can_be_pickled():
    config = CarriedConfig(layers=1, tile=16)
    block = CarriedBlock([CarriedAttention(16, 2, config=config)], config)
    x = torch.randn(1, 9, 16)
    assert torch.equal(pickle.loads(pickle.dumps(block))(x), block(x))


def test_modules_and_models():
    refuses("width is 33; expected a multiple of heads = 4, or a head_width", lambda: CarriedAttention(33, 4))
    refuses("width is 32; expected a multiple of heads = 5", lambda: CarriedAttention(32, 5))
    refuses("heads is 0; expected at least 1", lambda: CarriedAttention(32, 0))
    refuses("head_width is 7; expected an even number", lambda: CarriedAttention(32, 4, head_width=7))
    two = CarriedConfig(layers=2)
    refuses("layer is 7; expected 0 to 1", lambda: CarriedAttention(32, 4, config=two, layer=7))
    refuses("layers is 0; expected an integer from 1 on", lambda: LlamaOptions(layers=0))
    refuses("heads is 2.0; expected an integer from 1 on", lambda: LlamaOptions(heads=2.0))
    model = CarriedLlama(LlamaOptions(layers=2, carried=two))
    one = torch.zeros(1, 1, dtype=torch.int64)
    refuses("tokens has shape (1, 0); expected [B, T] with T at least 1", lambda: model(one[:, :0]))
    refuses("tokens has shape (1,); expected [B, T]", lambda: model(one[0]))
    refuses("tokens has shape (1, 1); expected [B, T] with T at least 2", lambda: model.loss(one))
    refuses("chunk is 0; expected at least 1, or None", lambda: model.generate(one, 2, chunk=0))
    refuses("count is -1; expected at least 0", lambda: model.generate(one, -1))
    refuses("tokens has shape (1, 0)", lambda: model.generate(one[:, :0], 1))
    assert model.generate(one, 0).shape == (1, 0)
