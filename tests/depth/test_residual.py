"""Modules: the stream in somebody's own Transformer, Kimi K3's names, checkpointing, torch.compile, training."""

import subprocess
import sys

import depth_naive as naive
import pytest
import torch
from torch import nn

from tilewise.depth import InferenceState, Schedule, eager
from tilewise.nn import (
    AttnRes,
    Decoder,
    DecoderConfig,
    Residual,
    StandardResidual,
    attn_res_from_config,
    kimi_k3_state_dict,
    load_kimi_k3,
)

KINDS = ("standard", "block", "full")


def small(kind, **changes):
    sizes = dict(vocab=32, d=16, layers=4, heads=4, kv_heads=2, hidden=24, residual=kind, block=3)
    return Decoder(DecoderConfig(**(sizes | changes)))


def moved(model):
    """Queries away from zero, so that the reads differ from plain means."""
    if model.config.residual != "standard":
        nn.init.normal_(model.residual.query)
    return model


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_a_few_lines_in_your_own_model():
    sublayers = nn.ModuleList(nn.Sequential(nn.RMSNorm(8, 1e-6), nn.Linear(8, 8)) for _ in range(6)).double()
    residual = AttnRes(8, Schedule.block(6, 2)).double()
    nn.init.normal_(residual.query)
    x = torch.randn(2, 3, 8, dtype=torch.float64)

    stream = residual(x)
    for l, f in enumerate(sublayers):
        stream.write(l, f(stream.read(l)))
    got = stream.output()

    expected = naive.block(x, sublayers, residual.query, residual.key_weight, (0, 2, 4))[1]
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_decoder_learns(kind):
    model = small(kind)
    tokens = torch.randint(32, (4, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = model.loss(tokens).item()
    for _ in range(15):
        optimizer.zero_grad()
        model.loss(tokens).backward()
        optimizer.step()
    assert model.loss(tokens).item() < 0.6 * first
    if kind != "standard":
        assert (model.residual.query[2:] != 0).any(1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_changes_nothing(kind):
    model, tokens = moved(small(kind)).double(), torch.randint(32, (2, 9))
    plain = gradients(model, model.loss(tokens))
    again = gradients(model, model.loss(tokens, recompute=True))
    # Without recomputation the reads of a block share their gradients, which are then added up in another order.
    for name, grad in plain.items():
        torch.testing.assert_close(again[name], grad, rtol=1e-10, atol=1e-13, msg=name)


def test_o1_is_kept_or_computed_again_by_choice(monkeypatch):
    model, tokens = moved(small("block")).double(), torch.randint(32, (2, 9))
    calls, combine = [], eager.combine

    def counted(*args, **kwargs):
        calls.append(args)
        return combine(*args, **kwargs)

    monkeypatch.setattr(eager, "combine", counted)
    grads, counts = [], []
    for kept in (False, True):
        model.residual.save_o1 = kept
        loss = model.loss(tokens)
        forward = len(calls)
        grads.append(gradients(model, loss))
        counts.append((forward, len(calls) - forward))
        calls.clear()
    # The first block reads one source, which is o1 itself.
    blocks = len(model.residual.schedule.starts)
    assert counts[0][0] == counts[1][0] == blocks - 1
    assert counts[0][1] >= blocks - 1
    assert counts[1][1] == 0
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-12, atol=1e-14, msg=name)


def test_two_checkpointed_passes_before_one_backward():
    model = moved(small("block")).double()
    a, b = torch.randint(32, (2, 2, 9))
    separate = [gradients(model, model.loss(t)) for t in (a, b)]
    together = gradients(model, model.loss(a, recompute=True) + model.loss(b, recompute=True))
    for name, grad in together.items():
        torch.testing.assert_close(grad, separate[0][name] + separate[1][name], rtol=1e-12, atol=1e-12, msg=name)


def test_checkpoint_around_a_mutable_stream_is_refused():
    """torch.utils.checkpoint around code that moves the stream would recompute the wrong reads: it raises instead."""
    residual, x = AttnRes(8, Schedule.block(2, 1)), torch.randn(3, 8, requires_grad=True)
    stream = residual(x)

    def layer(y):
        for l in range(2):
            stream.write(l, torch.tanh(stream.read(l) + y))
        return stream.output()

    out = torch.utils.checkpoint.checkpoint(layer, torch.zeros(8, requires_grad=True), use_reentrant=False)
    with pytest.raises(ValueError, match=r"stream\.checkpoint"):
        out.sum().backward()


@pytest.mark.parametrize("kind", ["block", "full"])
def test_compiles_without_a_graph_break(kind):
    model, tokens = moved(small(kind, layers=2)).double(), torch.randint(32, (2, 9))
    plain = gradients(model, model.loss(tokens))
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    got = gradients(model, compiled(tokens))
    for name, grad in plain.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-12, atol=1e-12, msg=name)


def test_wrong_order_raises():
    for residual in (AttnRes(8, Schedule.block(2, 1)), StandardResidual(2)):
        stream = residual(torch.zeros(3, 8))
        with pytest.raises(ValueError, match=r"found write\(0\), expected read\(0\)"):
            stream.write(0, torch.zeros(3, 8))
        with pytest.raises(ValueError, match=r"found read\(1\), expected read\(0\)"):
            stream.read(1)
        stream.read(0)
        with pytest.raises(ValueError, match=r"found read\(0\), expected write\(0, ...\)"):
            stream.read(0)
        stream.write(0, torch.zeros(3, 8))
        with pytest.raises(ValueError, match="found 1 of 2 sublayers written"):
            stream.output()
    stream = AttnRes(8, Schedule.block(2, 1))(torch.zeros(3, 8))
    stream.read(0)
    with pytest.raises(ValueError, match=r"found shape \(3, 1\), expected \(3, 8\)"):
        stream.write(0, torch.zeros(3, 1))
    with pytest.raises(ValueError, match="found width 4, expected 8"):
        AttnRes(8, Schedule.block(2, 1))(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="expected 'standard', 'block' or 'full'"):
        Residual(8, 4, "blocks")
    with pytest.raises(ValueError, match="span"):
        AttnRes(8, Schedule.block(4, 2), span=(2, 2))


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", ["standard", "block", "full"])
def test_a_refused_write_can_be_repeated(kind, given):
    norms = list(torch.ones(4, 16)) if given else None
    module = Residual(16, 4, kind, 2)
    whole, tried = (module(torch.ones(3, 16), norms=norms) for _ in range(2))
    for l in range(4):
        update = torch.tanh(whole.read(l))
        whole.write(l, update)
        tried.read(l)
        for wrong in (update[:1], None):
            with pytest.raises((ValueError, TypeError), match="update: found"):
                tried.write(l, wrong)
        tried.write(l, update)
    torch.testing.assert_close(tried.output(), whole.output(), rtol=0, atol=0)


def test_autocast_does_not_touch_the_reads():
    for options in ({}, {"norms": torch.ones(4, 8).unbind(0)}):
        residual, x = AttnRes(8, Schedule.block(4, 1)), torch.randn(3, 8)
        nn.init.normal_(residual.query)
        outputs = []
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                stream = residual(x, **options)
                for l in range(4):
                    stream.write(l, torch.sin(stream.read(l)))
                outputs.append(stream.output())
        torch.testing.assert_close(*outputs, rtol=0, atol=0)


def test_shared_reads_take_the_norms_that_were_given():
    residual, norms = AttnRes(8, Schedule.block(4, 2)), torch.ones(4, 8).unbind(0)
    with pytest.raises(ValueError, match="found 3 weights, expected 4"):
        residual(torch.zeros(3, 8), norms=norms[:3])
    stream = residual(torch.zeros(3, 8), norms=norms)
    assert type(stream).__name__ == "SharedStream"
    with pytest.raises(ValueError, match=r"norms\[0\], expected the same one"):
        stream.read(0, torch.ones(8))
    stream = residual(torch.zeros(3, 8), norms=norms)
    stream.read(0, norms[0])
    with pytest.raises(ValueError, match=r"found read\(0\), expected write\(0, ...\)"):
        stream.read(0)
    with pytest.raises(ValueError, match=r"found shape \(3, 1\)"):
        stream.write(0, torch.zeros(3, 1))
    with torch.no_grad():
        assert type(residual(torch.zeros(3, 8), norms=norms)).__name__ == "Stream"
    full = AttnRes(8, Schedule.full_attention(4))
    assert type(full(torch.zeros(3, 8), norms=norms)).__name__ == "Stream"


def test_norms_given_at_the_start_hold_in_every_kind_of_stream():
    block, full = AttnRes(8, Schedule.block(5, 2)), AttnRes(8, Schedule.full_attention(5))
    norms, x = torch.randn(5, 8).unbind(0), torch.randn(3, 8)
    for residual in (block, full):
        nn.init.normal_(residual.query)
    states = [InferenceState(r.schedule, r.reads(), max_tokens=3) for r in (block, full)]
    for make in (block, full, StandardResidual(5), *states):
        for context in (torch.no_grad(), torch.enable_grad()):
            outputs = []
            for early in (True, False):
                with context:
                    stream = make(x, norms=norms) if early else make(x)
                    for l in range(5):
                        stream.write(l, torch.sin(stream.read(l) if early else stream.read(l, norms[l])))
                    outputs.append(stream.output())
            torch.testing.assert_close(*outputs)
        with pytest.raises(ValueError, match=r"norms\[0\], expected the same one"):
            make(x, norms=norms).read(0, torch.ones(8))


def test_shared_reads_hand_over_to_a_plain_stream_inside_a_block():
    residual = AttnRes(8, Schedule.block(7, 3)).double()
    nn.init.normal_(residual.query)
    norms = torch.randn(7, 8, dtype=torch.float64).unbind(0)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)

    def part(stream, last):
        while stream.position < last:
            l = stream.position
            stream.write(l, torch.sin(stream.read(l, norms[l])))

    results = []
    for switch in (7, 0, 4):
        stream = residual(x, norms=norms)
        part(stream, switch)
        if switch < 7:
            stream.checkpoint(part, 6)
        part(stream, 7)
        out = stream.output()
        results.append((out, *torch.autograd.grad(out.sin().sum(), [x, residual.query, residual.key_weight])))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_autocast_keeps_the_stream_in_the_embedding_dtype():
    model, tokens = small("block"), torch.randint(32, (2, 9))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(tokens)
    loss.backward()
    reference = model.loss(tokens)
    assert abs(loss.item() - reference.item()) < 0.02
    assert model.residual.query.grad.dtype == torch.float32


def test_zero_initialised_and_reset():
    module = AttnRes(8, Schedule.block(4, 2), dtype=torch.bfloat16)
    assert module.query.dtype == torch.bfloat16
    assert not module.query.any()
    assert (module.key_weight == 1).all()
    nn.init.normal_(module.query)
    module.reset_parameters()
    assert not module.query.any()


def test_kimi_k3_parameters_go_in_and_out():
    config = {"hidden_size": 8, "num_hidden_layers": 7, "attn_res_block_size": 3, "rms_norm_eps": 1e-5}
    source, target = attn_res_from_config(config), attn_res_from_config(config)
    assert (source.eps, source.schedule.max_sources) == (1e-5, 4)
    nn.init.normal_(source.query)
    nn.init.normal_(source.key_weight)
    names = kimi_k3_state_dict(source, "language_model.model.")
    assert names["language_model.model.layers.6.mlp_res_proj.weight"].shape == (1, 8)
    assert names["language_model.model.output_attn_res_norm.weight"].shape == (8,)
    assert len(names) == 2 * (14 + 1)
    load_kimi_k3(target, names | {"language_model.model.norm.weight": torch.ones(8)})
    torch.testing.assert_close(target.query, source.query, rtol=0, atol=0)
    torch.testing.assert_close(target.key_weight, source.key_weight, rtol=0, atol=0)
    part = AttnRes(8, source.schedule, span=(5, 9))
    load_kimi_k3(part, names)
    torch.testing.assert_close(part.query, source.query[5:9], rtol=0, atol=0)


def test_kimi_k3_errors_name_the_parameter():
    module = AttnRes(8, Schedule.kimi_k3(4, 2))
    names = kimi_k3_state_dict(module)
    with pytest.raises(ValueError, match="no Attention Residuals parameters"):
        load_kimi_k3(module, {"model.norm.weight": torch.ones(8)})
    with pytest.raises(ValueError, match=r"found no model.layers.2.mlp_res_norm.weight \(8,\) \(1 missing\)"):
        load_kimi_k3(module, {k: v for k, v in names.items() if k != "model.layers.2.mlp_res_norm.weight"})
    with pytest.raises(ValueError, match=r"found \(8,\), expected \(1, 8\)"):
        load_kimi_k3(module, names | {"model.layers.0.mlp_res_proj.weight": torch.ones(8)})
    with pytest.raises(ValueError, match="found no attn_res_block_size"):
        attn_res_from_config({"hidden_size": 8, "num_hidden_layers": 4, "rms_norm_eps": 1e-5})
    with pytest.raises(ValueError, match="nearest is 2"):
        kimi_k3_state_dict(AttnRes(8, Schedule.block(8, 3)))


def test_kimi_k3_parameters_of_another_model_are_refused_and_change_nothing():
    module, larger = AttnRes(8, Schedule.kimi_k3(4, 2)), kimi_k3_state_dict(AttnRes(8, Schedule.kimi_k3(5, 2)))
    names = kimi_k3_state_dict(module)
    for extra, value in (
        ("layers.3.self_attention_res_proj.bias", torch.ones(1)),
        ("layers.4.mlp_res_norm.weight", torch.ones(8)),
        ("output_attn_res_gate.weight", torch.ones(8)),
    ):
        with pytest.raises(ValueError, match=rf"found model.{extra} \({len(value)},\), expected no such parameter"):
            load_kimi_k3(module, names | {f"model.{extra}": value})
    with pytest.raises(ValueError, match=r"found model.layers.4.self_attention_res_proj.weight \(1, 8\), .* 4 decoder"):
        load_kimi_k3(module, larger)
    for name, shape in (("layers.0.mlp_res_norm.weight", (16,)), ("output_attn_res_proj.weight", (9, 8))):
        with pytest.raises(ValueError, match=rf"model.{name}'\]: found \({shape[0]}, ?8?\), expected \((1, 8|8,)\)"):
            load_kimi_k3(module, names | {f"model.{name}": torch.ones(shape)})
    with pytest.raises(TypeError, match=r"found torch\.int64, expected a tensor of floats"):
        load_kimi_k3(module, names | {"model.layers.0.mlp_res_norm.weight": torch.ones(8, dtype=torch.int64)})
    assert not module.query.any()
    assert (module.key_weight == 1).all()
    # A stage takes its own layers of the whole model's parameters, and refuses those of a larger model too.
    stage = AttnRes(8, module.schedule, span=(2, 6))
    load_kimi_k3(stage, names)
    with pytest.raises(ValueError, match="expected no such parameter"):
        load_kimi_k3(stage, larger)


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("hidden_size", "8", TypeError, "config.hidden_size: found '8', expected an integer"),
        ("num_hidden_layers", 0, ValueError, "config.num_hidden_layers: found 0, expected at least 1"),
        ("attn_res_block_size", 2.0, TypeError, "config.attn_res_block_size: found 2.0"),
        ("rms_norm_eps", "1e-5", TypeError, "config.rms_norm_eps: found '1e-5', expected a finite number"),
    ],
)
def test_a_kimi_k3_configuration_is_checked(field, value, error, message):
    config = {"hidden_size": 8, "num_hidden_layers": 4, "attn_res_block_size": 2, "rms_norm_eps": 1e-5}
    with pytest.raises(error, match=message):
        attn_res_from_config(config | {field: value})


def test_importing_the_modules_needs_neither_triton_nor_transformers():
    code = "import sys, tilewise; before = set(sys.modules); import tilewise.nn, tilewise.depth; new = set(sys.modules)"
    code += "; assert 'transformers' not in new; assert 'triton' not in new - before"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_residual_that_is_a_unit_of_fsdp2_is_refused():
    """It returns no tensors, by which FSDP2 would know when to gather its parameters again: the backward crashed."""
    residual = AttnRes(8, Schedule.block(4, 2))
    residual.__class__ = type("FSDPAttnRes", (type("FSDPModule", (), {}), AttnRes), {})
    with pytest.raises(RuntimeError, match="is a unit of FSDP2; expected to belong to its model's"):
        residual(torch.randn(3, 8))
