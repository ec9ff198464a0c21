"""patch() and unpatch(): what they change, what they leave alone, and what they refuse."""

import importlib.util

import pytest
import torch
import transformers
from tiny import CASES
from torch import nn
from transformers.models.t5.modeling_t5 import T5Attention

import tilewise
from tilewise.models import PatchError, Report


def snapshot(model):
    """Everything of the modules that patching could disturb."""
    return {
        path: (type(module), id(getattr(module, "config", None)), sorted(module.__dict__))
        for path, module in model.named_modules()
    }


def encoder():
    return transformers.T5EncoderModel(CASES["T5"]().config()).eval()


IDS = torch.arange(2, 40)[None]


@pytest.mark.parametrize("family", CASES)
def test_unpatch_restores_everything(family):
    case = CASES[family]()
    model = case.build()
    before, keys = snapshot(model), list(model.state_dict())
    with torch.no_grad():
        outputs = model(**case.arguments()).logits
        report = tilewise.patch(model)
        assert snapshot(model) != before
        assert list(model.state_dict()) == keys
        assert tilewise.unpatch(model) == sum(row.implementation != "transformers" for row in report.rows)
        assert snapshot(model) == before
        assert torch.equal(model(**case.arguments()).logits, outputs)
    assert tilewise.unpatch(model) == 0


def test_the_report_names_every_layer():
    report = tilewise.patch(CASES["T5"]().build())
    assert isinstance(report, Report)
    assert [(row.path, row.cls, row.mechanism, row.implementation) for row in report.rows] == [
        ("encoder.block.0.layer.0.SelfAttention", "T5Attention", "T5 bias", "blocked"),
        ("encoder.block.1.layer.0.SelfAttention", "T5Attention", "T5 bias (shared)", "blocked"),
        ("decoder.block.0.layer.0.SelfAttention", "T5Attention", "T5 bias", "blocked"),
        ("decoder.block.0.layer.1.EncDecAttention", "T5Attention", "no bias (cross-attention)", "blocked"),
        ("decoder.block.1.layer.0.SelfAttention", "T5Attention", "T5 bias (shared)", "blocked"),
        ("decoder.block.1.layer.1.EncDecAttention", "T5Attention", "no bias (cross-attention)", "blocked"),
    ]
    assert all("cpu" in reason for row in report.rows for reason in row.reasons)


def test_the_report_prints_with_and_without_rich(monkeypatch):
    report = tilewise.patch(CASES["T5"]().build())
    table = str(report)
    assert "decoder.block.*.layer.1.EncDecAttention" in table
    assert "━" in table
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "rich" else find(name, *rest))
    plain = str(report).splitlines()
    assert plain[0].split()[:2] == ["module", "layers"]
    assert len(plain) == 1 + len(report.table())
    assert "━" not in "".join(plain)


def test_udop_keeps_its_encoder_and_says_why():
    report = tilewise.patch(CASES["UDOP"]().build())
    left = [row for row in report.rows if row.implementation == "transformers"]
    assert [row.path for row in left] == [f"encoder.block.{i}.layer.0.SelfAttention" for i in (0, 1)]
    assert all("boxes" in row.reasons[0] for row in left)
    with pytest.raises(PatchError, match=r"encoder\.block\.0\.layer\.0\.SelfAttention: its bias depends on .* boxes"):
        tilewise.patch(transformers.UdopEncoderModel(CASES["UDOP"]().config()))


def test_a_model_without_known_layers_is_refused_with_the_families():
    with pytest.raises(PatchError, match=r"Sequential has no attention layer .* families supported: T5, mT5, UMT5"):
        tilewise.patch(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("name", "constructor"),
    [("Deberta", "DeBERTaV1"), ("SEWD", "DeBERTa"), ("MPNet", "MPNet"), ("Bloom", "ALiBi")],
)
def test_models_whose_terms_have_a_constructor_are_told_which(name, constructor):
    with torch.device("meta"):
        settings = getattr(transformers, f"{name}Config")()
        settings.relative_attention, settings.num_hidden_layers = True, 1
        model = getattr(transformers, f"{name}Model")(settings)
    with pytest.raises(
        PatchError, match=rf"families supported: .*DeBERTa v2 and v3.*\. .*tilewise\.{constructor}, for"
    ):
        tilewise.patch(model)


class Scaled(T5Attention):
    """What a user's own variant may look like."""


def refused(model, message):
    before = snapshot(model)
    with pytest.raises(PatchError, match=message):
        tilewise.patch(model)
    assert snapshot(model) == before


def test_a_subclass_is_refused_and_nothing_is_patched():
    model = encoder()
    model.encoder.block[1].layer[0].SelfAttention.__class__ = Scaled
    refused(
        model, r"nothing was patched.*encoder\.block\.1\.layer\.0\.SelfAttention: its class Scaled derives from T5Att"
    )


def test_a_reason_of_many_layers_is_said_once():
    model = encoder()
    for block in model.encoder.block:
        block.layer[0].SelfAttention.__class__ = Scaled
    with pytest.raises(
        PatchError, match=r"block\.0\.layer.*a subclass may compute.* \(the same of 1 more\)$"
    ) as refusal:
        tilewise.patch(model)
    assert "block.1" not in str(refusal.value)


def test_a_table_that_does_not_fit_is_refused_and_nothing_is_patched():
    model = encoder()
    model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias = nn.Embedding(16, 4)
    refused(model, r"SelfAttention \(T5Attention\): relative_attention_bias has 16 rows; expected 32")
    model = encoder()
    model.encoder.block[0].layer[0].SelfAttention.relative_attention_max_distance = 3
    refused(model, "max_distance")


def test_a_failure_on_the_way_undoes_what_was_done(monkeypatch):
    model = encoder()
    before = snapshot(model)
    made = tilewise.models.patching._patched_class
    calls = []

    def failing(*args):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("no more")
        return made(*args)

    monkeypatch.setattr(tilewise.models.patching, "_patched_class", failing)
    with pytest.raises(RuntimeError, match="no more"):
        tilewise.patch(model)
    assert len(calls) >= 2
    assert snapshot(model) == before


def test_an_implementation_that_cannot_run_is_refused():
    model = encoder()
    before = snapshot(model)
    with pytest.raises(PatchError, match=r"impl='triton' cannot run encoder\.block\.0.*cpu.*impl='auto' runs it"):
        tilewise.patch(model, impl="triton")
    with pytest.raises(ValueError, match="impl is 'fast'; expected 'auto', 'triton', 'blocked', 'reference'"):
        tilewise.patch(model, impl="fast")
    assert snapshot(model) == before


def test_patching_again_changes_the_implementation():
    model = encoder()
    tilewise.patch(model)
    before = model(IDS).last_hidden_state
    assert {row.implementation for row in tilewise.patch(model, impl="reference").rows} == {"reference"}
    torch.testing.assert_close(model(IDS).last_hidden_state, before)
    assert tilewise.unpatch(model) == 2
    assert type(model.encoder.block[0].layer[0].SelfAttention) is T5Attention


def test_a_model_that_shares_the_configuration_is_not_touched():
    config = CASES["T5"]().config()
    patched, other = (transformers.T5EncoderModel(config).eval() for _ in range(2))
    assert patched.encoder.config is other.encoder.config
    before, outputs = snapshot(other), other(IDS).last_hidden_state
    tilewise.patch(patched)
    assert config._attn_implementation == "sdpa"
    assert snapshot(other) == before
    assert torch.equal(other(IDS).last_hidden_state, outputs)


def test_no_class_or_function_of_transformers_is_changed():
    methods = dict(vars(T5Attention))
    tilewise.patch(encoder())
    assert dict(vars(T5Attention)) == methods


def test_attention_weights_are_refused_with_the_way_to_get_them():
    model = encoder()
    tilewise.patch(model)
    with pytest.raises(ValueError, match=r"output_attentions is True; expected False.*tilewise\.unpatch\(model\)"):
        model(IDS, output_attentions=True)
    tilewise.unpatch(model)
    model.set_attn_implementation("eager")
    assert model(IDS, output_attentions=True).attentions[0].shape == (1, 4, 38, 38)


def test_another_attention_implementation_makes_the_layers_transformers_again():
    model, plain = encoder(), encoder()
    plain.load_state_dict(model.state_dict())
    plain.encoder.set_attn_implementation("eager")
    tilewise.patch(model)
    # Through the stack: transformers 5.17 does not hand the name down to stacks of the same configuration class.
    model.encoder.set_attn_implementation("eager")
    assert torch.equal(model(IDS).last_hidden_state, plain(IDS).last_hidden_state)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_what_only_the_reference_can_do_is_refused():
    model = encoder()
    model.set_attn_implementation("eager")
    tilewise.patch(model)
    with pytest.raises(RuntimeError, match=r"expected torch\.export or torch\.compile"):
        torch.jit.trace(model, (IDS,), strict=False, check_trace=False)
    embeddings = torch.randn(1, 9, 32, requires_grad=True)

    def penalty():
        output = model(inputs_embeds=embeddings).last_hidden_state
        (gradient,) = torch.autograd.grad(output[..., 0].sum(), embeddings, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), embeddings)[0]

    first = torch.func.grad(lambda x: model(inputs_embeds=x).last_hidden_state[..., 0].sum())
    for call in (penalty, lambda: first(embeddings)):
        with pytest.raises(RuntimeError, match="impl='reference'"):
            call()
    tilewise.unpatch(model)
    wanted = penalty(), first(embeddings)
    tilewise.patch(model, impl="reference")
    torch.testing.assert_close((penalty(), first(embeddings)), wanted, rtol=1e-3, atol=1e-6)


def test_hooks_of_accelerate():
    accelerate = pytest.importorskip("accelerate")
    model = encoder()
    wanted = model(IDS).last_hidden_state
    accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    tilewise.patch(model)
    torch.testing.assert_close(model(IDS).last_hidden_state, wanted)
    with pytest.raises(ValueError, match="output_attentions is True"):
        model(IDS, output_attentions=True)
    tilewise.unpatch(model)
    assert torch.equal(model(IDS).last_hidden_state, wanted)


def test_the_name_without_patching_is_refused():
    tilewise.patch(encoder())
    model = encoder()
    model.set_attn_implementation("tilewise")
    with pytest.raises(ValueError, match=r"T5Attention that was not patched; .* call tilewise\.patch\(model\)"):
        model(IDS)


def test_a_dense_bias_from_outside_is_refused():
    layer = encoder()
    tilewise.patch(layer)
    attention = layer.encoder.block[0].layer[0].SelfAttention
    with pytest.raises(ValueError, match=r"position_bias has shape \(1, 4, 38, 38\); expected None"):
        attention(torch.randn(1, 38, 32), position_bias=torch.zeros(1, 4, 38, 38))


def test_weights_are_interchangeable_through_a_saved_checkpoint(tmp_path):
    model = encoder()
    tilewise.patch(model)
    wanted = model(IDS).last_hidden_state
    model.save_pretrained(tmp_path)
    loaded = transformers.T5EncoderModel.from_pretrained(tmp_path).eval()
    assert type(loaded.encoder.block[0].layer[0].SelfAttention) is T5Attention
    torch.testing.assert_close(loaded(IDS).last_hidden_state, wanted, rtol=1e-4, atol=1e-5)
    tilewise.patch(loaded)
    assert torch.equal(loaded(IDS).last_hidden_state, wanted)


def derived(module):
    """As torch's fully_shard does."""
    module.__class__ = type(f"FSDP{type(module).__name__}", (type(module),), {})


def test_a_class_that_was_derived_afterwards_is_not_lost():
    model = encoder()
    wanted = model(IDS).last_hidden_state
    tilewise.patch(model)
    layer = model.encoder.block[1].layer[0].SelfAttention
    derived(model.encoder)
    tilewise.unpatch(model)
    assert type(model.encoder).__name__ == "FSDPT5Stack"
    assert torch.equal(model(IDS).last_hidden_state, wanted)
    tilewise.patch(model)
    derived(layer)
    before = snapshot(model)
    for undo in (tilewise.unpatch, tilewise.patch):
        with pytest.raises(
            PatchError, match=r"block\.1\..* is a FSDPTilewiseT5Attention, .* expected unpatch\(model\) be"
        ):
            undo(model)
        assert snapshot(model) == before
    torch.testing.assert_close(model(IDS).last_hidden_state, wanted)


def test_a_part_of_a_model_can_be_patched():
    model = CASES["T5"]().build()
    before = snapshot(model.decoder)
    report = tilewise.patch(model.encoder)
    assert [row.path for row in report.rows] == [f"block.{i}.layer.0.SelfAttention" for i in (0, 1)]
    assert snapshot(model.decoder) == before


def test_part_of_a_stack_is_refused_since_its_layers_share_the_bias():
    model = CASES["T5"]().build()
    before = snapshot(model)
    for part in (model.encoder.block[0], model.decoder.block[0].layer[0].SelfAttention, model.encoder.block):
        with pytest.raises(PatchError, match="the stack that it belongs to is not part of"):
            tilewise.patch(part)
    assert snapshot(model) == before


@pytest.mark.parametrize("model", [None, "t5-small", T5Attention], ids=["None", "name", "class"])
def test_what_is_not_a_model_is_refused(model):
    with pytest.raises(TypeError, match="expected a loaded model"):
        tilewise.patch(model)
