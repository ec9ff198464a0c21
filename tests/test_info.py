"""explain(): the reasons of every implementation, and the refusals of attention() itself."""

import pytest
import torch

import tilewise


def test_a_usual_call_runs_on_the_cpu():
    q = torch.randn(1, 4, 16, 8)
    found = tilewise.explain(q, q, q, terms=tilewise.T5(torch.randn(32, 4)), mask=tilewise.Mask.causal(), offset=0)
    assert found == {"triton": ["q is on cpu; triton runs on cuda"], "blocked": [], "reference": []}


def test_forced_choices_are_reasons():
    q = torch.randn(1, 4, 16, 8)
    reasons = tilewise.explain(q, q, q, options=tilewise.Options(skew="memory"))["blocked"]
    assert reasons == ["options.skew is 'memory', a choice of impl='triton' alone"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": torch.randn(1, 3, 7, 9)}, ValueError, "v has shape"),
        ({"q": [1.0]}, TypeError, "q is a list"),
        ({"mask": torch.ones(16, 16, dtype=torch.bool)}, TypeError, r"mask is a Tensor; expected a Mask, Mask.full"),
        ({"terms": "t5"}, TypeError, "terms has a str"),
        ({"terms": tilewise.T5(torch.randn(32, 3))}, ValueError, "Scalar.table has 3 heads"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p is 1.0"),
        ({"scale": float("nan")}, ValueError, "scale is nan"),
        ({"options": "memory"}, TypeError, "options is a str"),
    ],
)
def test_what_attention_refuses_explain_refuses_too(changes, error, message):
    q = torch.randn(1, 4, 16, 8)
    arguments = {"q": q, "k": q, "v": q, **changes}
    for call in (tilewise.attention, tilewise.explain):
        with pytest.raises(error, match=message):
            call(arguments["q"], arguments["k"], arguments["v"], **{n: x for n, x in changes.items() if n not in "qkv"})


def test_the_generator_is_left_alone():
    q = torch.randn(1, 2, 4, 8)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    tilewise.explain(q, q, q, dropout_p=0.5)
    assert torch.equal(before, torch.get_rng_state())
