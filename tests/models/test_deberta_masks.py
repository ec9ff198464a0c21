"""The masks of a patched DeBERTa v2 or v3: padding of any pattern, matrices of the caller's, and sizes it refuses."""

import pytest
import torch
from test_deberta import hidden
from tiny_deberta import build, tokens

import tilewise


def padding(pattern):
    mask = torch.ones(2, 40, dtype=torch.long)
    if pattern == "right":
        mask[1, 25:] = 0
    elif pattern == "left":
        mask[0, :9], mask[1, :25] = 0, 0
    elif pattern == "holes":
        mask[:, 5:9], mask[1, ::3] = 0, 0
    elif pattern == "an empty example":
        mask[1] = 0
    return mask


@pytest.mark.parametrize("pattern", ["none", "right", "left", "holes", "an empty example"])
@pytest.mark.parametrize("form", ["[B, N]", "[1, N]", "[B, 1, 1, N]", "float"])
def test_padded_rows_are_transformers_too(pattern, form):
    model, mask = build(), padding(pattern)
    mask = {"[B, N]": mask, "[1, N]": mask[1:], "[B, 1, 1, N]": mask[:, None, None], "float": mask.float()}[form]
    if form == "[B, 1, 1, N]":
        model.encoder.conv = None
    arguments = {"input_ids": tokens()["input_ids"][:2, :40], "attention_mask": mask}
    wanted = hidden(model, **arguments)
    tilewise.patch(model)
    torch.testing.assert_close(hidden(model, **arguments), wanted, rtol=0, atol=1e-5)


def test_the_mask_of_the_encoder_is_the_outer_product_in_linear_memory():
    plain, patched = build().encoder, build()
    tilewise.patch(patched)
    for pattern in ("none", "right", "left", "holes", "an empty example"):
        mask = padding(pattern)
        got = patched.encoder.get_attention_mask(mask)
        assert got.dense is None
        assert (got.keys is not None) == (pattern == "holes")
        assert (got.bounds is None) == (pattern == "none")
        wanted = plain.get_attention_mask(mask).bool()
        assert torch.equal(got.allowed(40, 40).expand_as(wanted), wanted)


@pytest.mark.parametrize(
    "shape",
    [(2, 40, 40), (2, 1, 40, 40), (2, 4, 40, 40), (1, 40, 40), (2, 1, 40), (2, 40, 1), (2, 4, 1, 40), (1, 4, 1, 40),
     (1, 1, 40, 1)],
)  # fmt: skip
def test_a_matrix_of_the_caller_is_honoured(shape):
    model = build(conv_kernel_size=0)
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.6
    if shape[-2] == 40:
        seen[..., 7, :] = False
    x = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        wanted = model.encoder(x, seen).last_hidden_state
        tilewise.patch(model)
        torch.testing.assert_close(model.encoder(x, seen).last_hidden_state, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("value", [0, 1], ids=["with padding", "all real"])
@pytest.mark.parametrize("shape", [(2, 39), (2, 50), (3, 40), (40,)])
def test_a_mask_of_another_size_is_refused_whatever_it_hides(shape, value):
    model = build()
    tilewise.patch(model)
    mask = torch.ones(shape)
    mask[..., -1] = value
    with pytest.raises(ValueError, match=rf"attention_mask has shape \({shape[0]},.*; expected \[2 or 1, 40\]"):
        model.encoder(torch.randn(2, 40, 32), mask)


def test_dropout_spares_the_equal_weights_of_a_padded_query_alone():
    model = build(attention_probs_dropout_prob=0.3, num_hidden_layers=1)
    tilewise.patch(model)
    encoder = model.train().encoder
    layer, table = encoder.layer[0].attention.self, encoder.get_rel_embedding()
    mask = torch.ones(50, 12)
    mask[:, 8:] = 0
    x = torch.randn(1, 12, 32).expand(50, -1, -1)
    with torch.no_grad():
        output = layer(x, encoder.get_attention_mask(mask), rel_embeddings=table)[0]
        torch.testing.assert_close(output[:, 8:], layer.value_proj(x).mean(1, keepdim=True).expand(-1, 4, -1))
    assert (output[:, :8].std(0) > 1e-3).all()
