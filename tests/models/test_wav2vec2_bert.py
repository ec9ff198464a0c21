"""A patched Wav2Vec2-BERT gives transformers' outputs and gradients; its other kinds of positions stay as they are."""

import copy
import pickle

import pytest
import torch
import transformers
from test_deberta import assert_results_within_budget
from test_patching import snapshot
from test_t5_outputs import assert_close, checkpoint, matrices_of, results
from torch import nn

import tilewise
from tilewise.models import PatchError
from tilewise.testing import assert_within_budget

B, N, LAYERS = 3, 130, 2
COMMON = {
    "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 48, "layerdrop": 0.0,
    "feature_projection_input_dim": 16, "position_embeddings_type": "relative_key", "conv_depthwise_kernel_size": 7,
    "left_max_position_embeddings": 20, "right_max_position_embeddings": 6, "apply_spec_augment": False,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "feat_proj_dropout": 0.0, "activation_dropout": 0.0,
    "conformer_conv_dropout": 0.0, "num_labels": 5, "classifier_proj_size": 24,
}  # fmt: skip


def build(cls="ForSequenceClassification", dtype=torch.float32, attention="eager", **changes):
    torch.manual_seed(1)
    config = transformers.Wav2Vec2BertConfig(**{**COMMON, **changes})
    config._attn_implementation = attention
    model = getattr(transformers, f"Wav2Vec2Bert{cls}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.18)
    return model.to(dtype)


def inputs(dtype=torch.float32, labels=True):
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(B, N, dtype=torch.long)
    mask[1, N - 40 :], mask[2, N // 2 :] = 0, 0
    made = {"input_features": torch.randn(B, N, 16, generator=generator).to(dtype), "attention_mask": mask}
    return {**made, "labels": torch.tensor([0, 3, 4])} if labels else made


def test_logits_loss_and_every_gradient_are_within_the_budget():
    exact = results(build(dtype=torch.float64), inputs(torch.float64))
    low = results(build(), inputs())
    model = build()
    report = tilewise.patch(model)
    assert [(row.path, row.cls, row.mechanism, row.implementation) for row in report.rows] == [
        (f"wav2vec2_bert.encoder.layers.{i}.self_attn", "Wav2Vec2BertSelfAttention", "Shaw keys, 20 back, 6 ahead",
         "blocked")
        for i in range(LAYERS)
    ]  # fmt: skip
    got = results(model, inputs())
    assert any("distance_embedding" in name for name in got)
    assert_results_within_budget(got, low, exact, no_gradient=("linear_k.bias",))


def test_bfloat16_is_within_the_budget():
    rounded, exact = build("Model", torch.bfloat16), build("Model", torch.float64)
    exact.load_state_dict(rounded.state_dict())
    hidden = lambda model, dtype: model(**inputs(dtype, labels=False)).last_hidden_state  # noqa: E731
    with torch.no_grad():
        wanted = exact(**{n: x.double() if x.is_floating_point() else x for n, x in
                          inputs(torch.bfloat16, labels=False).items()}).last_hidden_state  # fmt: skip
        low = hidden(rounded, torch.bfloat16)
        tilewise.patch(rounded)
        assert_within_budget("hidden", hidden(rounded, torch.bfloat16), low, wanted)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_unpatch_restores_everything_and_other_models_are_not_touched(attention):
    model = build(attention=attention)
    other = type(model)(model.config)
    assert other.wav2vec2_bert.encoder.config is model.wav2vec2_bert.encoder.config
    with torch.no_grad():
        # The first call leaves a mark of transformers' own on the model.
        wanted = model(**inputs()).logits
        before, others, keys = snapshot(model), snapshot(other), list(model.state_dict())
        tilewise.patch(model)
        assert list(model.state_dict()) == keys
        assert snapshot(other) == others
        assert model.config._attn_implementation == attention
        torch.testing.assert_close(model(**inputs()).logits, wanted, rtol=0, atol=1e-5)
        assert tilewise.unpatch(model) == LAYERS
        assert snapshot(model) == before
        assert torch.equal(model(**inputs()).logits, wanted)


def test_an_adapter_stays_and_is_named():
    model = build("Model", add_adapter=True, output_hidden_size=32, num_adapter_layers=1)
    wanted = model(**inputs(labels=False)).last_hidden_state
    report = tilewise.patch(model)
    assert [row.implementation for row in report.rows] == ["blocked"] * LAYERS + ["transformers"]
    assert report.rows[-1].path == "adapter.layers.0.self_attn"
    assert "no relative positions (an adapter's layer" in report.rows[-1].reasons[0]
    torch.testing.assert_close(model(**inputs(labels=False)).last_hidden_state, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["relative", "rotary"])
def test_other_kinds_of_positions_stay_as_they_are(kind):
    model = build(position_embeddings_type=kind)
    before = snapshot(model)
    with pytest.raises(PatchError, match=f"layers.0.self_attn: position_embeddings_type is '{kind}'; expected 'rel"):
        tilewise.patch(model)
    assert snapshot(model) == before


def test_dropout_repeats_with_the_seed_and_under_checkpointing():
    model = build(attention_dropout=0.2).train()
    for layer in model.wav2vec2_bert.encoder.layers:
        # The same setting drops the layer's output: without that, only the weights are left to drop.
        layer.self_attn_dropout.p = 0.0
    tilewise.patch(model)

    def seeded(seed):
        torch.manual_seed(seed)
        return results(model, inputs())

    first, again, other = seeded(5), seeded(5), seeded(6)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["logits"], other["logits"])
    calls = []
    for layer in model.wav2vec2_bert.encoder.layers:
        layer.self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    checkpoint(model, reentrant=False)
    assert_close(seeded(5), first)
    assert len(calls) == 2 * LAYERS


def test_forward_and_backward_compile_without_a_graph_break():
    model = build(num_hidden_layers=1)
    tilewise.patch(model)
    wanted = results(model, inputs())
    got = results(torch.compile(model, fullgraph=True, backend="aot_eager"), inputs())
    assert_close({name.removeprefix("_orig_mod."): value for name, value in got.items()}, wanted)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_nothing_in_a_training_step_has_the_square_of_the_length(attention):
    n = 120
    assert matrices_of(build(attention=attention), inputs(), n), "transformers made no matrix: the test cannot fail"
    model = build(attention=attention)
    tilewise.patch(model)
    assert matrices_of(model, inputs(), n) == set()


def test_a_copy_a_pickle_and_a_checkpoint(tmp_path):
    model = build()
    tilewise.patch(model)
    # A model that has run holds hooks of transformers' own that cannot be pickled.
    others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    wanted = results(model, inputs())["logits"]
    for other in others:
        layer = other.wav2vec2_bert.encoder.layers[0].self_attn
        assert type(layer) is type(model.wav2vec2_bert.encoder.layers[0].self_attn)
        assert torch.equal(results(other, inputs())["logits"], wanted)
        assert tilewise.unpatch(other) == LAYERS
        assert type(layer).__name__ == "Wav2Vec2BertSelfAttention"
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(results(loaded, inputs())["logits"], wanted, rtol=0, atol=1e-5)


def test_weights_that_are_loaded_for_each_call():
    accelerate = pytest.importorskip("accelerate")
    model = build("Model")
    with torch.no_grad():
        wanted = model(**inputs(labels=False)).last_hidden_state
        accelerate.cpu_offload(model, execution_device="cpu")
        tilewise.patch(model)
        got = model(**inputs(labels=False)).last_hidden_state
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_what_a_patched_layer_cannot_give_or_take_is_refused():
    model = build()
    layer = model.wav2vec2_bert.encoder.layers[0].self_attn
    with pytest.raises(PatchError, match=r"the stack that it belongs to \(a Wav2Vec2BertEncoder\) is not part"):
        tilewise.patch(layer)
    layer.distance_embedding = nn.Embedding(9, 8)
    with pytest.raises(PatchError, match="distance_embedding has 9 rows; expected 27"):
        tilewise.patch(model)
    model = build()
    tilewise.patch(model)
    with pytest.raises(ValueError, match="output_attentions is True; expected False"):
        model(**inputs(), output_attentions=True)
    x, bias = torch.randn(1, 4, 9, 8), torch.zeros(1, 4, 9, 9)
    layer = model.wav2vec2_bert.encoder.layers[0].self_attn
    with pytest.raises(ValueError, match=r"position_bias has shape \(1, 4, 9, 9\); expected None"):
        tilewise.models.hf.attention_forward(layer, x, x, x, None, position_bias=bias)


def test_another_attention_implementation_makes_the_layers_transformers_again():
    model = build()
    wanted = model(**inputs()).logits
    tilewise.patch(model)
    encoder = model.wav2vec2_bert.encoder
    model.set_attn_implementation("sdpa")
    assert encoder.config._attn_implementation == "tilewise", "the name reaches the layers: the documentation denies it"
    for config in {id(m.config): m.config for m in (encoder, *(layer.self_attn for layer in encoder.layers))}.values():
        config._attn_implementation = "eager"
    assert torch.equal(model(**inputs()).logits, wanted)


def copied(model):
    return [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]


@pytest.mark.parametrize("which", [0, 1, 2], ids=["the model", "a copy", "a pickle"])
def test_settings_that_change_afterwards_are_heeded(which):
    model = build("Model")
    tilewise.patch(model)
    model = copied(model)[which]
    model.config.layerdrop = 1.0
    plain = build("Model", layerdrop=1.0)
    arguments = inputs(labels=False)
    got, wanted = model.train()(**arguments), plain.train()(**arguments)
    assert torch.equal(got.last_hidden_state, wanted.last_hidden_state), "layers ran that layerdrop = 1 leaves out"
    model.eval().config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions is True; expected False"):
        model(**arguments)
    assert model.encoder.config is model.encoder.layers[0].self_attn.config
    assert model.config._attn_implementation == "eager"


def test_a_copy_of_a_stacks_configuration_is_one_of_its_own():
    model = build("Model")
    tilewise.patch(model)
    for other in (copy.copy(model.encoder.config), copy.deepcopy(model.encoder.config)):
        other.layerdrop = 0.5
        assert other._attn_implementation == "tilewise"
        assert model.config.layerdrop == 0.0
    assert model.encoder.config.to_diff_dict() == model.config.to_diff_dict()
