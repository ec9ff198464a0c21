"""A patched DeBERTa v2 or v3 gives transformers' outputs, padded rows included, in every head, dtype and mode."""

import copy
import pickle

import pytest
import torch
import transformers
from test_patching import snapshot
from test_t5_outputs import assert_close, assert_gradients_within_budget, checkpoint, matrices_of, results
from tiny_deberta import CONFIGS, LAYERS, B, N, build, inputs, tokens
from torch import nn
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Encoder, DisentangledSelfAttention

import tilewise
from tilewise.models import PatchError
from tilewise.testing import assert_within_budget


def hidden(model, **arguments):
    """The hidden states before and after every layer, of padded tokens too."""
    with torch.no_grad():
        return torch.stack(model(**arguments, output_hidden_states=True).hidden_states)


def assert_results_within_budget(got, low, exact, no_gradient):
    """Logits, loss and gradients. What adds the same to all scores of a row may have none, to which no error is
    relative: where exact is 0, the names must end with one of `no_gradient`."""
    assert got.keys() == exact.keys()
    assert_within_budget("logits", got["logits"], low["logits"], exact["logits"])
    assert_within_budget("loss", got["loss"], low["loss"], exact["loss"])
    largest = max(x.norm() for x in exact.values())
    zero = [name for name, x in exact.items() if x.norm() < 1e-12 * largest]
    assert all(name.endswith(no_gradient) for name in zero)
    assert all(float(got[name].norm()) < 1e-6 * largest for name in zero)
    kept = [{name: x for name, x in results.items() if name not in zero} for results in (got, low, exact)]
    assert_gradients_within_budget(*kept)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_loss_and_every_gradient_are_within_the_budget(name):
    exact = results(build("ForMaskedLM", torch.float64, **CONFIGS[name]), tokens())
    low = results(build("ForMaskedLM", **CONFIGS[name]), tokens())
    model = build("ForMaskedLM", **CONFIGS[name])
    tilewise.patch(model)
    got = results(model, tokens())
    assert any("rel_embeddings" in name for name in got)
    assert_results_within_budget(got, low, exact, no_gradient=("key_proj.bias", "encoder.LayerNorm.bias"))


def test_bfloat16_is_within_the_budget():
    rounded = build(dtype=torch.bfloat16)
    exact = build(dtype=torch.float64)
    exact.load_state_dict(rounded.state_dict())
    wanted, low = hidden(exact, **inputs()), hidden(rounded, **inputs())
    tilewise.patch(rounded)
    assert_within_budget("hidden", hidden(rounded, **inputs()), low, wanted)


def test_autocast_runs_attention_in_the_lower_precision():
    model = build()
    with torch.autocast("cpu", torch.bfloat16):
        low = hidden(model, **inputs())
        tilewise.patch(model)
        got = hidden(model, **inputs())
    assert_within_budget("hidden", got, low, hidden(build(dtype=torch.float64), **inputs()))


HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
         "ForMultipleChoice")  # fmt: skip


@pytest.mark.parametrize("head", HEADS)
def test_every_head_gives_the_same_outputs_and_is_restored(head):
    model = build(head)
    before, keys = snapshot(model), list(model.state_dict())
    arguments = inputs()
    if head == "ForMultipleChoice":
        arguments = {name: x[None] for name, x in arguments.items()}
    call = lambda: model(**arguments).to_tuple()  # noqa: E731
    with torch.no_grad():
        wanted = call()
        report = tilewise.patch(model)
        prefix = "" if head == "Model" else "deberta."
        assert [(row.path, row.cls, row.mechanism, row.implementation) for row in report.rows] == [
            (f"{prefix}encoder.layer.{i}.attention.self", "DisentangledSelfAttention", "DeBERTa c2p + p2c", "blocked")
            for i in range(LAYERS)
        ]
        assert list(model.state_dict()) == keys
        for got, value in zip(call(), wanted, strict=True):
            torch.testing.assert_close(got, value, rtol=0, atol=1e-5)
        assert tilewise.unpatch(model) == LAYERS
        assert snapshot(model) == before
        assert all(torch.equal(got, value) for got, value in zip(call(), wanted, strict=True))
    assert tilewise.unpatch(model) == 0


def test_a_table_with_more_rows_is_cut_as_transformers_cuts_it():
    model = build()
    layer, table = model.encoder.layer[0].attention.self, torch.randn(50, 32)
    x, mask = torch.randn(2, 40, 32), torch.ones(2, 1, 1, 40)
    with torch.no_grad():
        wanted = layer(x, mask, rel_embeddings=table)[0]
        tilewise.patch(model)
        torch.testing.assert_close(layer(x, mask, rel_embeddings=table)[0], wanted, rtol=0, atol=1e-5)


def test_queries_of_their_own():
    model = build()
    x, queries = torch.randn(2, B, N, 32, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        call = lambda: model.encoder(x, inputs()["attention_mask"], query_states=queries).last_hidden_state  # noqa: E731
        wanted = call()
        tilewise.patch(model)
        torch.testing.assert_close(call(), wanted, rtol=0, atol=1e-5)


def seeded(model, seed):
    torch.manual_seed(seed)
    return results(model, tokens())


def test_the_table_is_dropped_as_transformers_drops_it():
    """Without dropout of the weights, both draw the same numbers in the same order."""
    model = build("ForMaskedLM", hidden_dropout_prob=0.3).train()
    wanted = seeded(model, 5)
    assert not torch.allclose(seeded(model, 6)["logits"], wanted["logits"], atol=1e-2)
    tilewise.patch(model)
    assert_close(seeded(model, 5), wanted)


def test_dropout_of_the_weights_repeats_with_the_seed_and_under_checkpointing():
    model = build("ForMaskedLM", attention_probs_dropout_prob=0.2).train()
    tilewise.patch(model)
    first, again, other = seeded(model, 5), seeded(model, 5), seeded(model, 6)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.allclose(first["logits"], other["logits"], atol=1e-3)
    checkpoint(model, reentrant=False)
    assert_close(seeded(model, 5), first)
    model.eval()
    assert torch.equal(results(model, tokens())["logits"], results(model, tokens())["logits"])


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant):
    # transformers' own code cannot send a gradient through the norm of the table twice, as reentrant checkpoints do.
    model = build("ForMaskedLM", norm_rel_ebd="none").train()
    tilewise.patch(model)
    wanted = results(model, tokens())
    checkpoint(model, reentrant)
    if reentrant:
        model.enable_input_require_grads()
    calls = []
    for layer in model.deberta.encoder.layer:
        layer.attention.self.register_forward_pre_hook(lambda *_: calls.append(1))
    assert_close(results(model, tokens()), wanted)
    assert len(calls) == 2 * LAYERS, "the layers were not run again in the backward pass"


def test_forward_and_backward_compile_without_a_graph_break():
    model = build("ForMaskedLM", num_hidden_layers=1)
    tilewise.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for n in (N, 90):
        arguments = {name: x[:, :n].contiguous() for name, x in tokens().items()}
        wanted = results(model, arguments)
        got = results(compiled, arguments)
        assert_close({name.removeprefix("_orig_mod."): value for name, value in got.items()}, wanted)


def test_nothing_in_a_training_step_has_the_square_of_the_length():
    n = 120
    assert matrices_of(build("ForMaskedLM"), tokens(), n), "transformers itself made no matrix: the test cannot fail"
    model = build("ForMaskedLM")
    tilewise.patch(model)
    assert matrices_of(model, tokens(), n) == set()


def test_the_table_is_projected_once_a_layer():
    model = build(share_att_key=False)
    tilewise.patch(model)
    shapes = []
    for layer in model.encoder.layer:
        for projection in (layer.attention.self.pos_key_proj, layer.attention.self.pos_query_proj):
            projection.register_forward_hook(lambda *call: shapes.append(tuple(call[-1].shape)))
    hidden(model, **inputs())
    assert shapes == [(32, 32)] * 2 * LAYERS


def test_lora_adapters_train_alike():
    peft = pytest.importorskip("peft")

    def adapted():
        torch.manual_seed(3)
        # The projections are the table's, too: a gradient of the adapter has two sources.
        config = peft.LoraConfig(r=4, target_modules=["query_proj", "key_proj"], init_lora_weights=False)
        return peft.get_peft_model(build("ForMaskedLM"), config)

    wanted = results(adapted(), tokens())
    model = adapted()
    assert tilewise.patch(model).rows[0].path == "base_model.model.deberta.encoder.layer.0.attention.self"
    assert any("lora_A" in name for name in wanted)
    assert_close(results(model, tokens()), wanted)
    assert tilewise.unpatch(model) == LAYERS


@pytest.mark.parametrize("share", [True, False])
def test_adapters_draw_the_numbers_that_they_draw_in_transformers(share):
    peft = pytest.importorskip("peft")
    names = ["query_proj", "key_proj", "value_proj", "pos_key_proj", "pos_query_proj"][: 3 if share else 5]
    config = peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False, lora_dropout=0.3)
    torch.manual_seed(3)
    model = peft.get_peft_model(build("ForMaskedLM", share_att_key=share), config).train()
    wanted = seeded(model, 5)
    tilewise.patch(model)
    assert_close(seeded(model, 5), wanted)


def hooked(model):
    accelerate = pytest.importorskip("accelerate")
    devices = {"embeddings": "cpu", "encoder": "cpu"}
    return accelerate.dispatch_model(model, devices, main_device="cpu", force_hooks=True)


@pytest.mark.parametrize("first", ["hooks", "patch"])
def test_hooks_of_accelerate_before_and_after(first):
    model = build()
    wanted = hidden(model, **inputs())
    for step in (hooked, tilewise.patch) if first == "hooks" else (tilewise.patch, hooked):
        step(model)
    assert "_old_forward" in vars(model.encoder.layer[0].attention.self)
    assert "_old_forward" in vars(model.encoder)
    torch.testing.assert_close(hidden(model, **inputs()), wanted, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="output_attentions is True; expected False"):
        model(**inputs(), output_attentions=True)
    assert tilewise.unpatch(model) == LAYERS
    assert torch.equal(hidden(model, **inputs()), wanted)
    tilewise.patch(model)
    pytest.importorskip("accelerate").hooks.remove_hook_from_module(model, recurse=True)
    torch.testing.assert_close(hidden(model, **inputs()), wanted, rtol=0, atol=1e-5)
    assert tilewise.unpatch(model) == LAYERS
    assert torch.equal(hidden(model, **inputs()), wanted)


def test_a_copy_a_pickle_and_a_checkpoint(tmp_path):
    model = build("ForMaskedLM")
    tilewise.patch(model)
    layer, encoder = type(model.deberta.encoder.layer[0].attention.self), type(model.deberta.encoder)
    wanted = results(model, tokens())["logits"]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.deberta.encoder) is encoder
        assert type(other.deberta.encoder.layer[0].attention.self) is layer
        assert torch.equal(results(other, tokens())["logits"], wanted)
        assert tilewise.unpatch(other) == LAYERS
        assert type(other.deberta.encoder) is DebertaV2Encoder
    model.save_pretrained(tmp_path)
    loaded = transformers.DebertaV2ForMaskedLM.from_pretrained(tmp_path).eval()
    assert type(loaded.deberta.encoder.layer[0].attention.self) is DisentangledSelfAttention
    torch.testing.assert_close(results(loaded, tokens())["logits"], wanted, rtol=0, atol=1e-5)


def test_patching_again_changes_the_implementation(monkeypatch):
    model = build()
    before = snapshot(model)
    asked = []
    attention = tilewise.models.deberta.attention
    monkeypatch.setattr(
        tilewise.models.deberta, "attention", lambda *args, impl, **rest: asked.append(impl) or attention(*args, **rest)
    )
    tilewise.patch(model)
    blocked = hidden(model, **inputs())
    assert {row.implementation for row in tilewise.patch(model, impl="reference").rows} == {"reference"}
    hidden(model, **inputs())
    assert asked == ["auto"] * LAYERS + ["reference"] * LAYERS
    monkeypatch.undo()
    assert {type(x).__name__ for x in (model.encoder, model.encoder.layer[0].attention.self)} == {
        "TilewiseDebertaV2Encoder", "TilewiseDisentangledSelfAttention",
    }  # fmt: skip
    torch.testing.assert_close(hidden(model, **inputs()), blocked, rtol=0, atol=1e-5)
    assert tilewise.unpatch(model) == LAYERS
    assert snapshot(model) == before


def test_the_encoder_alone_can_be_patched_and_a_layer_cannot():
    model = build()
    wanted, before = hidden(model, **inputs()), snapshot(model)
    for part in (model.encoder.layer[0], model.encoder.layer[0].attention.self, model.encoder.layer):
        with pytest.raises(PatchError, match=r"the stack that it belongs to \(a DebertaV2Encoder\) is not part"):
            tilewise.patch(part)
    assert snapshot(model) == before
    tilewise.patch(model.encoder)
    torch.testing.assert_close(hidden(model, **inputs()), wanted, rtol=0, atol=1e-5)


class OtherEncoder(DebertaV2Encoder):
    """What a user's own variant may look like."""


def test_a_subclass_of_the_encoder_is_refused():
    model = build()
    model.encoder.__class__ = OtherEncoder
    before = snapshot(model)
    with pytest.raises(
        PatchError, match="its stack encoder is a OtherEncoder, which derives from DebertaV2Encoder; exp"
    ):
        tilewise.patch(model)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("changes", "reason", "mechanism"),
    [
        ({"relative_attention": False}, r"no relative positions \(relative_attention is False\)", "no relative term"),
        ({"pos_att_type": ["c2p", "p2p"]}, "pos_att_type has 'p2p'", "DeBERTa c2p + p2p"),
        ({"pos_att_type": []}, r"no relative term \(pos_att_type is \[\]\)", "no relative term"),
    ],
)
def test_layers_of_another_mechanism_stay_and_are_named(changes, reason, mechanism):
    other = build(**changes)
    before = snapshot(other)
    with pytest.raises(PatchError, match=rf"encoder\.layer\.0\.attention\.self: .*{reason}"):
        tilewise.patch(other)
    both = nn.ModuleList([build(), other])
    report = tilewise.patch(both)
    assert [row.implementation for row in report.rows] == ["blocked"] * LAYERS + ["transformers"] * LAYERS
    assert report.rows[-1].mechanism == mechanism
    assert snapshot(other) == before


def test_one_layer_of_another_mechanism_in_an_encoder_is_refused():
    model = build()
    model.encoder.layer[1].attention.self.pos_att_type = ["c2p", "p2p"]
    before = snapshot(model)
    with pytest.raises(PatchError, match=r"because encoder\.layer\.1\.attention\.self stays as it is .* all layers of"):
        tilewise.patch(model)
    assert snapshot(model) == before


def test_a_table_dropout_or_forward_that_does_not_fit_is_refused():
    with pytest.raises(PatchError, match=r"encoder\.layer\.0\.attention\.self .*position_buckets is 2; expected"):
        tilewise.patch(build(position_buckets=2))
    model = build()
    model.encoder.layer[0].attention.self.dropout = nn.AlphaDropout(0.1)
    with pytest.raises(PatchError, match=r"dropout is a AlphaDropout; expected torch\.nn\.Dropout"):
        tilewise.patch(model)
    for name in ("forward", "transpose_for_scores", "disentangled_attention_bias"):
        model = build()
        setattr(model.encoder.layer[1].attention.self, name, lambda *_: 0.0)
        with pytest.raises(
            PatchError, match=rf"layer\.1\.attention\.self .*its {name} was replaced on the module itself"
        ):
            tilewise.patch(model)


@pytest.mark.parametrize("how", ["argument", "configuration"])
def test_attention_weights_are_refused_with_the_way_to_get_them(how):
    model = build()
    tilewise.patch(model)
    arguments = {"output_attentions": True} if how == "argument" else {}
    model.config.output_attentions = how == "configuration"
    with pytest.raises(ValueError, match=r"output_attentions is True; expected False.*tilewise\.unpatch\(model\)"):
        model(**inputs(), **arguments)
    tilewise.unpatch(model)
    assert model(**inputs(), **arguments).attentions[0].shape == (B, 4, N, N)


def test_what_a_patched_layer_cannot_take_is_refused():
    model = build()
    tilewise.patch(model)
    x, mask = torch.randn(2, 40, 32), torch.ones(2, 40)
    table, layer = model.encoder.get_rel_embedding(), model.encoder.layer[0].attention.self
    with pytest.raises(ValueError, match=r"relative_pos has shape \(1, 40, 40\); expected None"):
        model.encoder(x, mask, relative_pos=torch.zeros(1, 40, 40, dtype=torch.long))
    with pytest.raises(ValueError, match="query_states has 7 tokens; expected 40"):
        model.encoder(x, mask, query_states=x[:, :7])
    with pytest.raises(
        ValueError, match=r"attention_mask has shape \(2, 40\); expected .* \[1 or 2, 1 or 4, 1 or 40, 40\]"
    ):
        layer(x, mask, rel_embeddings=table)
    with pytest.raises(ValueError, match="rel_embeddings is None"):
        layer(x, mask[:, None, None])
