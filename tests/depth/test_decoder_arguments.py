"""Arguments of the decoder and of its cache that do not belong there: an error that names them, never a number."""

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from refusals import refused
from tilewise import nn as modules
from tilewise.nn.decoder import rope

SIZES = dict(vocab=8, d=16, layers=2, heads=2, kv_heads=1, hidden=8)
NO_INT = [1.5, "2", [1], torch.tensor(1), 1j]
NO_TENSOR = [None, 1, "x", [1.0]]
THETAS = ["1e4", None, True, [1e4], torch.tensor(1e4), 0.0, -1.0, math.nan, math.inf]


def x(*shape, **options):
    return torch.ones(shape, **options)


def config(**options):
    return modules.DecoderConfig(**(SIZES | options))


def model(call="forward"):
    return getattr(modules.Decoder(config()), call)


def cache():
    return modules.KVCache(config(), batch=2, length=4)


TOKENS = [None, 1, [1, 2], x(1, 2), x(2).long(), x(1, 1, 2).long(), x(1, 2).long() * 8, -x(1, 2).long()]
KEYS = [*NO_TENSOR, x(1, 1, 8), x(1, 1, 1, 8), x(2, 2, 1, 8), x(2, 1, 1, 1), x(2, 1, 1, 8).double()]
CASES = {
    "DecoderConfig": (config, {}, {
        "rope_theta": THETAS, "tied": [None, 1, "no"], "residual": [None, 1, "blocks", ["block"]],
        "block": [0, None, 1.5],
    }),
    "Decoder": (modules.Decoder, dict(config=config()), {"config": [None, 1, SIZES], "attention": [None, 1, "causal"]}),
    "Decoder.forward": (lambda **a: model()(**(dict(tokens=x(1, 2).long()) | a)), {}, {
        "tokens": TOKENS, "recompute": [None, 1, "no"], "residual": [1, "block"],
    }),
    "Decoder.loss": (lambda **a: model("loss")(**a), dict(tokens=x(1, 2).long()), {
        "tokens": [*TOKENS, x(1, 1).long(), x(1, 0).long(), x(0, 2).long()]
    }),
    "KVCache.advance": (lambda **a: cache().advance(**a), dict(tokens=4), {"tokens": [*NO_INT, None, True, -1, 5]}),
    "KVCache.store": (lambda **a: cache().store(**a), dict(layer=1, k=x(2, 1, 1, 8), v=x(2, 1, 1, 8)), {
        "layer": [*NO_INT, None, True, -1, 2], "k": KEYS, "v": [*KEYS, x(2, 1, 2, 8)]
    }),
    "rope": (rope, dict(positions=torch.arange(3), width=8, theta=1e4), {
        "positions": [*NO_TENSOR, torch.tensor(1), x(2, 3)], "width": [*NO_INT, None, True, 0, -2, 7], "theta": THETAS,
    }),
}  # fmt: skip
ARGUMENTS = [(name, argument) for name, (_, _, bad) in CASES.items() for argument in bad]


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_what_does_not_belong_there_is_named(name, argument):
    for value, text in refused(CASES[name], argument):
        assert argument in (text.split(": found ")[0], *text.split()[:3]), f"{value!r}: {text}"
        assert "expected" in text, f"{value!r}: {text}"


@pytest.mark.parametrize("name", [name for name, (_, good, _) in CASES.items() if good])
def test_what_belongs_there_is_taken(name):
    call, good, _ = CASES[name]
    call(**good)


def test_a_cache_that_was_set_back_takes_the_room_behind():
    kept = cache()
    kept.advance(4)
    kept.length = 1
    kept.advance(3)
    with pytest.raises(ValueError, match="tokens: found 1, expected 0 to 0, the room that is left"):
        kept.advance(1)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@torch.no_grad()
def test_batches_of_vmap_and_graphs_of_make_fx_have_no_numbers_to_read():
    standard, tokens = modules.Decoder(config(residual="standard")), torch.randint(8, (3, 2, 5))
    each = torch.stack([standard(part) for part in tokens])
    torch.testing.assert_close(torch.func.vmap(standard)(tokens), each)
    torch.testing.assert_close(make_fx(standard)(tokens[0])(tokens[1]), each[1])
