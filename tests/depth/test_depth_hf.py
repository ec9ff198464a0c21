"""Hugging Face decoders with their residuals wrapped: equal to the definition, reversible, trainable, generating."""

import copy
import io
import pickle
import subprocess
import sys

import depth_naive as naive
import pytest
import torch
from torch import nn

from tilewise.depth import Schedule
from tilewise.models.depth_hf import unwrap_residuals, wrap_residuals

transformers = pytest.importorskip("transformers")

SIZES = dict(
    vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, attention_dropout=0.0, pad_token_id=None,
)  # fmt: skip
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 4}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": None}),
}


def make(family):
    config, cls, more = FAMILIES[family]
    model = cls(config(**SIZES, **more)).double().eval()
    for name, p in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(p, 1.0, 0.2)
    return model


def normed(norm, h):
    """In h's own dtype; transformers' RMSNorm computes in fp32."""
    return naive.rms(h, norm.variance_epsilon) * norm.weight if hasattr(norm, "variance_epsilon") else norm(h)


def recompute(model, reentrant):
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def by_hand(model, tokens, starts):
    """The wrapped model from its own parts and equations 2 to 6."""
    base = model.model
    x = base.embed_tokens(tokens)
    positions = torch.arange(tokens.shape[1])[None]
    rotary = base.rotary_emb(x, position_ids=positions)
    functions = []
    for layer in base.layers:

        def attend(h, layer=layer):
            h = normed(layer.input_layernorm, h)
            return layer.self_attn(hidden_states=h, position_embeddings=rotary, attention_mask=None)[0]

        functions += [attend, lambda h, layer=layer: layer.mlp(normed(layer.post_attention_layernorm, h))]
    query, key = base.attn_res.query, base.attn_res.key_weight
    eps = base.attn_res.eps
    stream = (x, functions, query, key)
    out = (naive.full(*stream, eps) if starts is None else naive.block(*stream, starts, eps))[1]
    return model.lm_head(naive.rms(out, eps) * base.norm.weight)


@pytest.mark.parametrize(
    ("schedule", "starts"), [(2, (0, 2, 4)), ("full", None), (Schedule.at(6, (0, 1, 4)), (0, 1, 4))]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_definition(family, schedule, starts):
    model, tokens = make(family), torch.randint(48, (2, 9))
    residual = wrap_residuals(model, schedule)
    nn.init.normal_(residual.query)
    torch.testing.assert_close(model(tokens).logits, by_hand(model, tokens, starts), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_unwrapping_restores_everything(family):
    model, tokens = make(family), torch.randint(48, (2, 9))
    before, keys, classes = model(tokens).logits, list(model.state_dict()), [type(m) for m in model.modules()]
    wrap_residuals(model, 2)
    assert set(model.state_dict()) - set(keys) == {"model.attn_res.query", "model.attn_res.key_weight"}
    assert not torch.allclose(model(tokens).logits, before)
    unwrap_residuals(model)
    assert (list(model.state_dict()), [type(m) for m in model.modules()]) == (keys, classes)
    torch.testing.assert_close(model(tokens).logits, before, rtol=0, atol=0)


def test_generation_with_a_cache_equals_the_whole_sequence():
    model, tokens = make("llama"), torch.randint(48, (1, 5))
    nn.init.normal_(wrap_residuals(model, 2).query)
    out = model.generate(tokens, max_new_tokens=6, do_sample=False)
    for n in range(5, 11):
        assert model(out[:, :n]).logits[0, -1].argmax() == out[0, n]


def test_training_with_gradient_checkpointing():
    model, tokens = make("llama").train(), torch.randint(48, (2, 9))
    nn.init.normal_(wrap_residuals(model, 2).query)
    model(tokens, labels=tokens).loss.backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    recompute(model, False)
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, plain[name], rtol=1e-12, atol=1e-12, msg=name)
    recompute(model, True)
    with pytest.raises(ValueError, match="use_reentrant: found True"):
        model(tokens, labels=tokens, use_cache=False)


def test_a_copy_has_its_own_reads():
    model, tokens = make("llama"), torch.randint(48, (2, 9))
    wrap_residuals(model, 2)
    before, other = model(tokens).logits, copy.deepcopy(model)
    nn.init.normal_(other.model.attn_res.query)
    assert not torch.allclose(other(tokens).logits, before)
    torch.testing.assert_close(model(tokens).logits, before, rtol=0, atol=0)


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    return io.BytesIO(file.getvalue())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrapped_model_is_pickled_whole(family):
    model, tokens = make(family), torch.randint(48, (2, 9))
    before = model(tokens).logits
    nn.init.normal_(wrap_residuals(model, 2).query)
    expected = model(tokens).logits
    ways = (
        lambda: pickle.loads(pickle.dumps(model)),
        lambda: torch.load(saved(model), weights_only=False),
        lambda: copy.deepcopy(model),
        lambda: pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(model)))),
    )
    for way in ways:
        other = way()
        torch.testing.assert_close(other(tokens).logits, expected, rtol=0, atol=0)
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        # The layers read through the copy's own module, and see the copy's own configuration.
        assert all(layer._depth[0] is other.model.attn_res for layer in other.model.layers)
        with pytest.raises(ValueError, match="no single hidden state"):
            other(tokens, output_hidden_states=True)
        unwrap_residuals(other)
        torch.testing.assert_close(other(tokens).logits, before, rtol=0, atol=0)
    torch.testing.assert_close(model(tokens).logits, expected, rtol=0, atol=0)


def test_a_pickled_model_is_loaded_by_another_process(tmp_path):
    model, tokens = make("llama"), torch.randint(48, (2, 9))
    nn.init.normal_(wrap_residuals(model, "full").query)
    torch.save((model, tokens, model(tokens).logits.detach()), tmp_path / "model.pt")
    code = "import sys, torch; model, tokens, logits = torch.load(sys.argv[1], weights_only=False)"
    code += "; torch.testing.assert_close(model(tokens).logits, logits, rtol=0, atol=0)"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "model.pt"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_other_decoders_are_refused_and_left_alone():
    gemma = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, head_dim=4))
    granite = transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZES, residual_multiplier=0.5))
    for model in (gemma, granite):
        with pytest.raises(ValueError, match=r"model.layers\[0\]: found"):
            wrap_residuals(model, 2)
        assert not hasattr(model.model, "attn_res")
    with pytest.raises(ValueError, match="found 0 modules"):
        wrap_residuals(nn.Linear(2, 2), 2)


def test_norms_that_are_no_rms_norm_run_by_themselves():
    model, tokens = make("llama"), torch.randint(48, (2, 9))
    for layer in model.model.layers:
        layer.input_layernorm = nn.LayerNorm(16, dtype=torch.float64)
    nn.init.normal_(wrap_residuals(model, 2).query)
    torch.testing.assert_close(model(tokens).logits, by_hand(model, tokens, (0, 2, 4)), rtol=1e-9, atol=1e-9)


def test_a_model_with_layer_norms_throughout():
    sizes = {k: v for k, v in SIZES.items() if k not in ("rms_norm_eps",)}
    model = transformers.StableLmForCausalLM(transformers.StableLmConfig(**sizes)).eval()
    tokens = torch.randint(48, (2, 9))
    wrap_residuals(model, 2)
    assert model(tokens).logits.isfinite().all()
    unwrap_residuals(model)


def test_layers_that_drop_entries_of_their_sums_are_refused_and_left_alone():
    config = transformers.Phi3Config(**SIZES, resid_pdrop=0.5)
    model = transformers.Phi3ForCausalLM(config)
    with pytest.raises(ValueError, match=r"which drops entries of what it adds \(resid_attn_dropout, p = 0.5\)"):
        wrap_residuals(model, 2)
    assert not hasattr(model.model, "attn_res")
    wrap_residuals(transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES)), 2)


def test_misuse_raises():
    model = make("llama")
    with pytest.raises(ValueError, match="expected a model that wrap_residuals"):
        unwrap_residuals(model)
    with pytest.raises(ValueError, match="found 8 sublayers, expected 6"):
        wrap_residuals(model, Schedule.block(8, 2))
    with pytest.raises(ValueError, match="a block size or 'full'"):
        wrap_residuals(model, "block")
    for wrong in (None, True, 1.5, [2], ("full",)):
        with pytest.raises(ValueError, match=r"schedule: found .*, expected a Schedule, a block size or 'full'"):
            wrap_residuals(model, wrong)
    for call in (lambda m: wrap_residuals(m, 2), unwrap_residuals):
        for wrong in (None, "llama", model.state_dict()):
            with pytest.raises(TypeError, match=r"model: found .*, expected a model"):
                call(wrong)
    twice = make("llama")
    twice.model.layers[2] = twice.model.layers[0]
    with pytest.raises(ValueError, match=r"model.layers\[2\]: found a layer that stands before it already"):
        wrap_residuals(twice, 2)
    assert not hasattr(twice.model, "attn_res")
    wrap_residuals(model, 2)
    with pytest.raises(ValueError, match="wrapped already"):
        wrap_residuals(model, 2)
    with pytest.raises(ValueError, match="no single hidden state"):
        model(torch.zeros(1, 2, dtype=torch.long), output_hidden_states=True)
