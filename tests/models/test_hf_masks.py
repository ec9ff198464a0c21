"""The linear mask is transformers' own mask, for every rule, offset and padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import CASES
from transformers import T5EncoderModel
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_overlay,
)

import tilewise
from tilewise.models.hf import linear_mask


def matrix(mask, B, Tq, Tk):
    """The mask as attention applies it, the last query at the last key, [B, 1, Tq, Tk]."""
    mask.check(B, 1, Tq, Tk)
    return mask.allowed(Tq, Tk, Tk - Tq).expand(B, 1, Tq, Tk)


@given(data=st.data())
def test_it_shows_what_transformers_mask_shows(data):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    B, Tq, q_offset = draw(1, 3), draw(1, 9), draw(0, 7)
    kv_offset = draw(0, q_offset)
    Tk = q_offset - kv_offset + Tq + draw(0, 5)
    seen = data.draw(st.sampled_from([None, kv_offset + Tk, max(q_offset + Tq, kv_offset + 1), kv_offset + Tk + 2]))
    padding = None
    if seen is not None:
        bits = data.draw(st.lists(st.booleans(), min_size=B * seen, max_size=B * seen))
        padding = torch.tensor(bits).view(B, seen)
    rule = data.draw(
        st.sampled_from(
            [
                causal_mask_function,
                bidirectional_mask_function,
                and_masks(causal_mask_function, sliding_window_overlay(3)),
            ]
        )
    )
    offset = data.draw(st.sampled_from([q_offset, torch.tensor(q_offset)]))
    arguments = dict(
        q_length=Tq, kv_length=Tk, q_offset=offset, kv_offset=kv_offset, mask_function=rule, attention_mask=padding
    )
    wanted = sdpa_mask(B, **arguments, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    got = linear_mask(B, **arguments, allow_is_causal_skip=True, allow_is_bidirectional_skip=True)
    assert torch.equal(matrix(got, B, Tq, Tk), wanted)


def test_the_usual_rules_make_no_matrix():
    for offset in (0, 5, torch.tensor(5)):
        for rule in (causal_mask_function, bidirectional_mask_function):
            mask = linear_mask(2, 64, 80, offset, 0, rule, torch.ones(2, 80, dtype=torch.bool))
            assert mask.dense is None
            assert mask.keys is None


@pytest.fixture
def models():
    model = T5EncoderModel(CASES["T5"]().config()).eval()
    patched = T5EncoderModel(model.config).eval()
    patched.load_state_dict(model.state_dict())
    tilewise.patch(patched)
    return model, patched


IDS = torch.randint(2, 99, (2, 30), generator=torch.Generator().manual_seed(1))
SEEN = torch.rand(2, 1, 30, 30, generator=torch.Generator().manual_seed(2)) < 0.7
LOW = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    "mask",
    [
        SEEN, torch.where(SEEN, 0.0, LOW), torch.where(SEEN[:, :, :1], 0.0, LOW), SEEN[:1, :, :1], SEEN[:1],
        SEEN[:, :, :4].transpose(1, 2), SEEN[:1, :, :4].transpose(1, 2), SEEN[..., :1],
    ],
    ids=["bool", "additive", "additive row", "one row for the batch", "one matrix for the batch", "one row a head",
         "one row a head for the batch", "one number a query"],
)  # fmt: skip
def test_a_mask_made_by_the_caller(models, mask):
    wanted, got = (m(input_ids=IDS, attention_mask=mask).last_hidden_state for m in models)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_a_mask_that_adds_numbers_is_refused(models):
    with pytest.raises(ValueError, match="attention_mask adds numbers to the scores; expected a boolean mask"):
        models[1](input_ids=IDS, attention_mask=torch.randn(2, 1, 30, 30))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (SEEN[:, 0], r"\(2, 30, 30\); expected \[B, Tk\] or \[B, 1 or H, 1 or Tq, Tk\]"),
        (torch.ones(2, 30, 30, dtype=torch.bool), r"\(2, 30, 30\); expected \[B, Tk\] or"),
        (SEEN[0, :, 0], r"\(1, 30\); expected \[2, 30\]"),
        (SEEN[:, 0, 0, :20], r"\(2, 20\); expected \[2, 30\]"),
        (SEEN[..., :20], r"\(2, 1, 30, 20\); expected \[2, 30\], or a matrix \[1 or 2, 1 or 4, 1 or 30, 30\]"),
        (SEEN.expand(-1, 3, -1, -1), r"\(2, 3, 30, 30\); expected"),
    ],
)
def test_a_mask_of_another_shape_is_refused_by_name(models, mask, expected):
    with pytest.raises(ValueError, match=f"attention_mask has shape {expected}"):
        models[1](input_ids=IDS, attention_mask=mask)


def test_a_mask_of_another_shape_is_refused_by_the_layer(models):
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 30, 30\); expected \[2, 30\], or a matrix"):
        models[1].encoder.block[0].layer[0].SelfAttention(torch.randn(2, 30, 32), mask=SEEN[:, 0])


def test_rows_without_keys_are_transformers_uniform_rows(models):
    padding = torch.ones(2, 30, dtype=torch.long)
    padding[1] = 0
    wanted, got = (m(input_ids=IDS, attention_mask=padding).last_hidden_state for m in models)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert not torch.allclose(got[1, 0], models[1](input_ids=IDS).last_hidden_state[1, 0], atol=1e-3)
