"""Every public argument of carried attention with what does not belong there: an error that names it, no number."""

import math
import re

import pytest
import torch
from torch import nn

from refusals import refused
from tilewise import carried
from tilewise.carried import CarriedConfig, Carry, SharedKeyCarry, TileLayout
from tilewise.carried import llama as models
from tilewise.carried import nn as modules
from tilewise.carried.policy import choose_plan
from tilewise.carried.shared_keys import fold_queries
from tilewise.mask import Mask

B, H, HK, T, D, L, WIDTH = 2, 4, 2, 10, 8, 2, 32
TWO = CarriedConfig(layers=L, tile=16)
GAINED = CarriedConfig(layers=L, tile=16, scaling="gain")
SUNK = CarriedConfig(layers=L, tile=16, sink=True)
DROPPED = CarriedConfig(layers=L, tile=16, dropout_p=0.5)


def x(*shape, **options):
    return torch.ones(shape, **options)


Q, K, V = x(B, H, T, D), x(B, HK, T, D), x(B, HK, T, D)
NO_TENSOR = [1.0, "x", [1.0], nn.Linear(2, 2)]
NO_FLOAT = [torch.int64, torch.bool, torch.complex64]


def tensors(*shape, optional=False, rest=()):
    """What is no float tensor of `shape`."""
    bad = [*NO_TENSOR, *(x(*shape, dtype=dtype) for dtype in NO_FLOAT), torch.tensor(1.0), *rest]
    return bad if optional else [*bad, None]


QS = tensors(B, H, T, D, rest=[x(B, T, D), x(1, B, H, T, D), x(B, 3, T, D), x(B, H, 0, D), x(B, H, T, D).half()])
KS = tensors(B, HK, T, D, rest=[
    x(B, T, D), x(B, 3, T, D), x(B, HK, T, D + 1), x(B, HK, T, 1), x(1, HK, T, D), x(3, HK, T, D), x(B, HK, 0, D),
    x(B, 0, T, D), K.double(), K.to("meta"),
])  # fmt: skip
VS = tensors(B, HK, T, D, rest=[
    x(B, T, D), x(B, 1, T, D), x(B, HK, 1, D), x(B, HK, T + 1, D), x(1, HK, T, D), x(B, HK, T, 0), V.double(),
    V.to("meta"),
])  # fmt: skip
HEADS = tensors(H, optional=True, rest=[x(1), x(H + 1), x(H, 1), x(H, device="meta")])
SEEDS = [1, "x", [5], torch.tensor([1.0]), torch.tensor([1, 2]), torch.ones(1, dtype=torch.int64, device="meta")]
FLAG = [None, 1, "no", 0.0]
NO_INT = [1.5, "2", [1], torch.tensor(1), 1j, True]
INT, INT_ = [*NO_INT, None, 0, -1], [*NO_INT, 0, -1]
CONFIGS = [1, {}, (), False, "sum", Mask()]
MASKS = [1, x(T, T).bool(), "causal"]
WRONG_MASKS = [
    Mask.lengths([5] * 3), Mask.lengths([T + 1]), Mask.intervals(torch.zeros(9).int(), torch.ones(9).int()),
]  # fmt: skip
OFFSETS = [1.5, "2", [1], torch.tensor(1), True]
LAYOUTS = [1, {}, TWO, TileLayout(CarriedConfig(layers=L, tile=32), T, T)]
BASES = ["1e4", 0.0, -1.0, math.nan, math.inf, True, [1e4], torch.tensor(1e4)]
POSITIONS = [
    1, [0] * T, torch.tensor(3), x(T).bool(), x(T).half(), x(T).bfloat16(), x(T, dtype=torch.complex64), x(1, 1, T),
]  # fmt: skip
WRONG_POSITIONS = [torch.arange(1), torch.arange(T + 1), torch.arange(T)[:, None], torch.zeros(3, T).int(),
                   torch.arange(T, device="meta")]  # fmt: skip
HIDDEN = [
    1, "x", [1.0], x(T, WIDTH), x(B, T, WIDTH + 1), x(B, T, 1), x(1, B, T, WIDTH), x(B, T, WIDTH).long(),
]  # fmt: skip
TOKENS = [
    None, 1, [1, 2], x(B, T), x(B, T).bool(), x(T).long(), x(1, B, T).long(), x(B, 0).long(), x(B, T).long() * 256,
    -x(B, T).long(),
]  # fmt: skip


def attend(config=TWO, **given):
    carry = given.pop("carry", None) or Carry(config)
    return carried.carried_attention(*(given.pop(n, t) for n, t in (("q", Q), ("k", K), ("v", V))), carry, **given)


def second(config, **given):
    """The second layer of a block."""
    extra = {"sink": x(H)} if config.sink else {}
    return attend(carry=attend(config, **extra)[1], **given)


def share(**given):
    carry = given.pop("carry", None) or SharedKeyCarry(TWO)
    return carried.shared_key_attention(
        *(given.pop(n, t) for n, t in (("q", Q), ("k", K), ("v", V))), carry, **given
    )  # fmt: skip


def decode(**given):
    step = dict(q=x(B, H, 1, D), k=K, v=V, row=None, layer=0, config=TWO)
    return carried.carried_decode(**(step | given))


def oracle(**given):
    block = dict(q=[Q] * L, k=[K] * L, v=[V] * L, config=TWO)
    return carried.carried_attention_reference(**(block | given))


def layers(bad):
    """A block's list in which the second layer's is wrong, and what is no such list."""
    return [*([Q, one] for one in bad), None, 1, Q, [], [Q], [Q] * 3]


def attention(**options):
    return modules.CarriedAttention(WIDTH, H, HK, **({"config": TWO} | options))


def forward(layer=None, **given):
    layer = layer or attention()
    carry = given.pop("carry", None) or (SharedKeyCarry if layer.shared_keys else Carry)(layer.config)
    return layer(given.pop("x", x(B, T, WIDTH)), carry, **given)


def sharer(**given):
    """The second layer of a block that shares its keys, after the first."""
    _, carry, kv = forward(attention(shared_keys=True))
    return forward(attention(layer=1, shared_keys=True), **({"carry": carry, "shared": kv} | given))


def model(**options):
    return models.CarriedLlama(models.LlamaOptions(layers=3, width=WIDTH, hidden=8, carried=TWO, **options))


def filled():
    """A cache of one layer that holds four tokens."""
    cache = models.KeyValueCache(6)
    cache.append(0, K[:, :, :4], V[:, :, :4])
    cache.advance()
    return cache


PLAN = dict(config=TWO, layout=TileLayout(TWO, T, T), B=B, H=H, dtype=torch.float32, device=torch.device("cpu"))
TURN = dict(x=Q, cos=x(T, D // 2), sin=x(T, D // 2))
ANGLES = [*NO_TENSOR, None, x(T, 1), x(1, D // 2), x(T + 1, D // 2), x(3, T, D // 2), x(T, D)]

# (call, arguments that fit, {argument: values that do not})
CASES = {
    "CarriedConfig.window": (CarriedConfig(layers=2, windows=(1, None)).window, {}, {"layer": [*NO_INT, None, -1, L]}),
    "CarriedConfig.mask": (TWO.mask, {}, {"layer": [*NO_INT, None, -1, L]}),
    "CarriedConfig.divisor": (TWO.divisor, {}, {"layer": [*NO_INT, None, -1, L]}),
    "Carry": (Carry, {}, {"config": CONFIGS, "mask": MASKS, "offset": OFFSETS, "layout": LAYOUTS}),
    "SharedKeyCarry": (SharedKeyCarry, dict(config=TWO), {
        "config": [*CONFIGS, None], "mask": MASKS, "offset": OFFSETS, "layout": LAYOUTS
    }),
    "carried_attention": (attend, {}, {
        "q": QS, "k": KS, "v": VS, "gain": HEADS, "sink": HEADS, "last": FLAG, "training": FLAG,
    }),
    "carried_attention, mask": (lambda mask: attend(carry=Carry(TWO, mask)), {}, {"mask": WRONG_MASKS}),
    "carried_attention, layout": (lambda layout: attend(carry=Carry(TWO, layout=layout)), {}, {
        "layout": [TileLayout(TWO, T, T, device="meta"), TileLayout(TWO, T + 1, T), TileLayout(TWO, T, T + 1)]
    }),
    "carried_attention, gain": (lambda **a: second(GAINED, **a), dict(gain=x(H)), {"gain": [*HEADS, None]}),
    "carried_attention, sink": (lambda **a: second(SUNK, **a), dict(sink=x(H)), {"sink": [*HEADS, None]}),
    "carried_attention, seed": (lambda **a: second(DROPPED, **a), dict(seed=torch.tensor([5])), {"seed": SEEDS}),
    "carried_attention, second layer": (lambda **a: second(TWO, **a), {}, {
        "q": [x(1, H, T, D), x(B, 2 * H, T, D), x(B, H, 1, D), Q.double(), Q.half()],
        "k": [x(B, 1, T, D), x(B, H, T, D)],
    }),
    "shared_key_attention": (share, {}, {
        "q": QS, "k": KS, "v": VS, "gain": HEADS, "sink": HEADS, "training": FLAG,
    }),
    "shared_key_attention, second layer": (lambda **a: share(**({"carry": share()[1]} | a)), {}, {
        "q": [x(1, H, T, D), x(B, 1, T, D), x(B, H, 1, D), Q.double()],
        "k": [x(B, 1, T, D), K + 1, K * math.nan],
        "v": VS,
    }),
    "fold_queries": (fold_queries, dict(q=Q, folded=Q, gain=x(H)), {
        "q": [*NO_TENSOR, None, x(B, T, D)], "folded": [*NO_TENSOR, x(1, H, T, D), x(B, H, 1, D), Q.half(), Q.long()],
        "gain": [1.0, x(1), x(H, 1), x(H + 1)],
    }),
    "carried_decode": (decode, {}, {
        "q": [*NO_TENSOR, None, x(B, 1, D), x(B, 3, 1, D), x(1, H, 1, D), x(B, H, 1, D).long(), x(B, H, 0, D)], "k": KS,
        "v": VS, "row": [x(B, H, 1, T)], "layer": [*NO_INT, None, -1, L], "config": [*CONFIGS, None],
        "mask": [*MASKS, *WRONG_MASKS],
        "offset": [1.5, "2", True, -1, T, x(B), x(3).long(), x(B, 1).long(), x(B).long() * T, -x(B).long()],
        "gain": HEADS, "sink": HEADS, "row_dtype": [1, "fp16", torch.int8, torch.float8_e4m3fn, torch.complex64],
    }),
    "carried_decode, second layer": (lambda **a: decode(**({"layer": 1, "row": x(B, H, 1, T)} | a)), {}, {
        "row": [*NO_TENSOR, None, x(B, H, T), x(1, H, 1, T), x(B, 1, 1, T), x(B, H, 1, 1), x(B, H, 1, T).long(),
                x(B, H, 1, T).bool(), x(B, H, 1, T, device="meta")]
    }),
    "carried_attention_reference": (oracle, {}, {
        "q": layers([x(B, T, D), x(1, H, T, D), Q.double(), Q.long()]), "k": layers(KS), "v": layers(VS),
        "config": [*CONFIGS, None], "mask": [*MASKS, *WRONG_MASKS], "offset": OFFSETS,
        "gain": [x(L, H), 1.0, [None], [None, x(H)]], "sink": [x(L, H), 1.0, [None], [x(H), x(H)]],
    }),
    "carried_attention_reference, gain": (lambda **a: oracle(config=GAINED, **a), dict(gain=[None, x(H)]), {
        "gain": [None, [None, None], [None, x(1)], [x(H)], [None, 1.0], [x(H)] * 3]
    }),
    "carried_attention_reference, sink": (lambda **a: oracle(config=SUNK, **a), dict(sink=[x(H)] * L), {
        "sink": [None, [None, x(H)], [x(H), x(1)], [x(H)]]
    }),
    "carried_attention_reference, seed": (
        lambda **a: oracle(config=DROPPED, **a), dict(seed=[torch.tensor([5])] * L),
        {"seed": [None, [None, None], [5, 5], [torch.tensor([5])], torch.tensor([5, 5])]},
    ),
    "TileLayout": (lambda **a: TileLayout(**(dict(config=TWO, Tq=T, Tk=T) | a)), {}, {
        "config": [*CONFIGS, None], "Tq": INT, "Tk": INT, "offset": OFFSETS,
        "mask": [*MASKS, *WRONG_MASKS[1:], Mask.padding(x(B, T)), Mask.full(x(T, T).bool())],
    }),
    "choose_plan": (lambda **a: choose_plan(**(PLAN | a)), {}, {
        "config": [*CONFIGS, None], "layout": [None, 1, TWO], "B": INT, "H": INT, "training": FLAG,
        "dtype": [None, "bf16", torch.int8], "device": [None, 0, "cpu"], "impl": [None, "auto", "cuda"],
        "free": [*NO_INT, -1],
    }),
    "decode_cost": (lambda **a: carried.decode_cost(**(dict(config=TWO, H=H, Hk=HK, d=D) | a)), {}, {
        "config": [*CONFIGS, None], "H": INT, "Hk": [*INT, 3], "d": INT, "cache_bytes": INT, "row_bytes": INT,
    }),
    "rotary": (lambda **a: modules.rotary(**(dict(positions=torch.arange(T), d=D) | a)), {}, {
        "positions": POSITIONS, "d": [*INT, 7], "base": [*BASES, None]
    }),
    "rotate": (modules.rotate, TURN, {
        "x": [*NO_TENSOR, None, x(B, T, D), x(B, H, T, D + 2)][:6], "cos": ANGLES, "sin": ANGLES
    }),
    "Angles": (lambda **a: modules.Angles(**(dict(positions=torch.arange(T), d=D) | a)), {}, {
        "positions": POSITIONS, "d": [*INT, 7], "base": [*BASES, None]
    }),
    "CarriedAttention": (lambda **a: modules.CarriedAttention(**(dict(width=WIDTH, heads=H) | a)), {}, {
        "width": [*INT, 33], "heads": [*INT, 5], "kv_heads": [*INT_, 3], "head_width": [*INT_, 7], "config": CONFIGS,
        "layer": [*NO_INT, None, -1, 4], "gated": FLAG, "qk_norm": FLAG, "shared_keys": FLAG, "rotary_base": BASES,
    }),
    "CarriedAttention.forward": (forward, {}, {
        "x": [*HIDDEN, None], "carry": [1, SharedKeyCarry(TWO), TWO], "positions": [*POSITIONS, *WRONG_POSITIONS],
        "memory": [*HIDDEN, x(1, T, WIDTH), x(B, 1, WIDTH), x(B, T + 1, WIDTH)], "shared": [(K, V), 1],
    }),
    "CarriedAttention.forward, options": (lambda **a: forward(attention(), **a), {}, {
        "carry": [Carry(CarriedConfig(layers=L, tile=16, **changes)) for changes in (
            {"scaling": "mean"}, {"detach": True}, {"causal": False}, {"windows": 3}, {"windows": (3, None)},
            {"scale": 1.0}, {"softcap": 5.0}, {"sink": True},
        )]
    }),
    "CarriedAttention.forward, sharing": (sharer, {}, {
        "carry": [Carry(TWO), 1], "shared": [1, K, (K,), (K, V, V)],
    }),
    "CarriedAttention.forward, owner": (lambda **a: forward(attention(shared_keys=True), **a), {}, {
        "carry": [share()[1]], "shared": [(K, V)]
    }),
    "CarriedAttention.merge": (attention().merge, dict(O=x(B, H, T, D), x=x(B, T, WIDTH)), {
        "O": [*NO_TENSOR, None, x(B, T, H, D), x(B, H * T, 1, D), x(1, H, T, D)], "x": [*HIDDEN, None],
    }),
    "CarriedBlock": (
        lambda **a: modules.CarriedBlock(**(dict(layers=[attention(), attention(layer=1)], config=TWO) | a)), {},
        {"layers": [[], [attention()] * 3], "config": [*CONFIGS, None], "checkpointed": FLAG, "start": [1, "x", TWO]},
    ),
    "LlamaOptions": (models.LlamaOptions, {}, {
        "vocabulary": INT, "width": INT, "layers": INT, "heads": INT, "kv_heads": INT, "hidden": INT,
        "carried": [*CONFIGS, None], "gated": FLAG, "qk_norm": FLAG, "keys": [None, 1, "none"],
        "rotary_base": [*BASES, None],
    }),
    "LlamaOptions, group": (lambda **a: models.LlamaOptions(keys="hidden", **a), {}, {"group": [*INT_, 3]}),
    "CarriedLlama": (models.CarriedLlama, {}, {"options": [*CONFIGS, TWO], "checkpointed": FLAG}),
    "CarriedLlama.forward": (lambda **a: model()(**(dict(tokens=x(B, T).long()) | a)), {}, {
        "tokens": TOKENS, "mask": [*MASKS, *WRONG_MASKS],
        "layout": [*LAYOUTS, TileLayout(TWO, T, T + 1), TileLayout(TWO, T + 1, T + 1)], "cache": [1, {}, [None]],
        "positions": [*POSITIONS, *WRONG_POSITIONS],
    }),
    "CarriedLlama.forward, cache": (
        lambda **a: model()(**(dict(tokens=x(B, T).long(), cache=models.KeyValueCache(T)) | a)), {},
        {"mask": [Mask.lengths([T])], "layout": [TileLayout(TWO, T, T)]},
    ),
    "CarriedLlama.forward, layout": (lambda **a: model(keys="shared")(x(B, T).long(), **a), {}, {"layout": LAYOUTS}),
    "CarriedLlama.loss": (lambda **a: model().loss(**a), {}, {"tokens": [*TOKENS, x(B, 1).long()]}),
    "CarriedLlama.generate": (lambda **a: model().generate(**(dict(tokens=x(B, T).long(), count=1) | a)), {}, {
        "tokens": TOKENS, "count": [*NO_INT, None, -1], "chunk": INT_,
    }),
    "KeyValueCache": (models.KeyValueCache, {}, {"capacity": INT}),
    "KeyValueCache.append": (lambda **a: filled().append(**(dict(layer=0, k=K[:, :, :1], v=V[:, :, :1]) | a)), {}, {
        "layer": [*NO_INT, None, -1, 1],
        "k": [*NO_TENSOR, None, x(B, 1, D), x(1, HK, 1, D), x(B, 1, 1, D), x(B, HK, 1, 1), x(B, HK, 1, D).half(),
              x(B, HK, 1, D, device="meta")],
        "v": [*NO_TENSOR, None, x(B, 1, D), x(1, HK, 1, D), x(B, 1, 1, D), x(B, HK, 1, 1), x(B, HK, 1, D).double(),
              x(B, HK, 2, D), x(B, HK, 1, D, device="meta")],
    }),
    "KeyValueCache.entry": (lambda layer: filled().entry(layer), {}, {"layer": [1, -1, None, "x"]}),
}  # fmt: skip
ARGUMENTS = [(name, argument) for name, (_, _, bad) in CASES.items() for argument in bad]


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_what_does_not_belong_there_is_named(name, argument):
    for _, text in refused(CASES[name], argument):
        assert re.search(rf"\b{argument}\b", text), f"{argument}: {text}"
        assert "expected" in text or "earest legal call" in text, f"{argument}: {text}"


@pytest.mark.parametrize("name", [name for name, (_, good, _) in CASES.items() if good])
def test_what_belongs_there_is_taken(name):
    call, good, _ = CASES[name]
    call(**good)


@pytest.mark.parametrize("keys", ["own", "hidden", "shared"])
@torch.no_grad()
def test_the_mask_of_a_layout_holds_in_every_block(keys):
    """In those that share keys, and in a shorter last one, whose layout is another: documents saw each other there."""
    whole, mask, tokens = model(keys=keys), Mask.packed([0, 4, T]), torch.randint(256, (1, T))
    expected = whole(tokens, mask=mask)
    assert not torch.equal(whole(tokens), expected)
    for given in ({"layout": TileLayout(TWO, T, T, mask)}, {"layout": TileLayout(TWO, T, T, mask), "mask": mask}):
        assert torch.equal(whole(tokens, **given), expected)


@torch.no_grad()
def test_keys_that_are_the_same_in_other_memory_are_shared():
    q, k, v = torch.randn(L, B, H, T, D), torch.randn(B, HK, T, D), V
    outputs = []
    for other in (k, k.clone(), k.mT.contiguous().mT, k.view(k.shape)):
        _, carry = carried.shared_key_attention(q[0], k, v, SharedKeyCarry(TWO))
        outputs.append(carried.shared_key_attention(q[1], other, v, carry)[0])
    for O in outputs[1:]:
        torch.testing.assert_close(O, outputs[0])


def test_a_cache_that_refuses_tokens_stays_as_it_was():
    cache = filled()
    before = [x.clone() for x in cache.entry(0)]
    for k, v in ((K[:, :, :1], V[:, :, :1, :4]), (K[:, :, :3], V[:, :, :3])):
        with pytest.raises(ValueError, match=r"expected|capacity"):
            cache.append(0, k, v)
    assert cache.length == 4
    assert all(torch.equal(a, b) for a, b in zip(cache.entry(0), before, strict=True))


def test_options_of_how_may_differ_from_a_layers_own():
    """And one layer may serve at every place of a block, as models of tied weights have it."""
    layer = attention()
    expected = forward(layer)[0]
    for changes in ({"plan": "recompute"}, {"tile": 32}, {"layers": 3}, {"centre": False}, {"impl": "blocked"}):
        _, carry, _ = forward(layer, carry=Carry(CarriedConfig(**({"layers": L, "tile": 16} | changes))))
        assert carry.index == 1
        forward(layer, carry=carry)
    mixed = {"carry": Carry(CarriedConfig(layers=L, tile=16, plan="recompute"))}
    torch.testing.assert_close(forward(layer, **mixed)[0], expected)


def test_positions_between_tokens_turn_by_the_angles_between():
    """Interpolated positions are fractions; one row of positions serves all sequences."""
    at = torch.arange(T)
    cos, _ = modules.rotary(at / 2, D)
    assert torch.equal(cos[::2], modules.rotary(at, D)[0][: T // 2])
    layer = attention()
    assert torch.equal(forward(layer, positions=at[None])[0], forward(layer, positions=at)[0])
