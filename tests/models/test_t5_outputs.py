"""A patched model of the T5 family gives transformers' outputs: logits, loss, every gradient, generated tokens."""

import copy
import inspect
import pickle

import pytest
import torch
import transformers
from tiny import CASES, SHAPE
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import EncoderDecoderCache, StaticCache

import tilewise
from tilewise.testing import assert_within_budget


def results(model, arguments):
    """Logits, loss and the gradient of every parameter that has one."""
    model.zero_grad()
    output = model(**arguments)
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": output.logits.detach(), "loss": output.loss.detach(), **gradients}


def assert_gradients_within_budget(got, low, exact):
    """Each gradient's relative L2 error is at most twice the worst that dense transformers has on any of this model.

    Not per tensor: through a whole network the error of one small tensor is a matter of luck, and among a hundred of
    them some of transformers' own are four times those of another of its runs.
    """
    relative = lambda x, name: float((x[name].double() - exact[name]).norm() / exact[name].norm())  # noqa: E731
    names = [name for name in exact if name not in ("logits", "loss")]
    allowed = 2 * max(relative(low, name) for name in names)
    assert allowed < 1e-4
    errors = {name: relative(got, name) for name in names}
    # Negated, so that a NaN fails.
    assert not {name: error for name, error in errors.items() if not error <= allowed}


def assert_close(got, wanted):
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=2e-3, atol=1e-5 * float(value.abs().max()) + 1e-6)


def checkpoint(model, reentrant):
    """transformers 5.24 has a new name for it; 5.17 knows the old one alone."""
    kwargs = {"use_reentrant": reentrant}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


@pytest.mark.parametrize("family", CASES)
def test_logits_loss_and_every_gradient_are_within_the_budget(family):
    case = CASES[family]()
    # Of transformers' dense paths the eager one: UMT5's decoder looks ahead under 5.17's sdpa.
    exact = results(case.build(torch.float64, "eager"), case.arguments(torch.float64))
    low = results(case.build(attention="eager"), case.arguments())
    model = case.build()
    tilewise.patch(model)
    got = results(model, case.arguments())
    assert got.keys() == exact.keys()
    assert any("relative_attention_bias" in name for name in got)
    assert_within_budget("logits", got["logits"], low["logits"], exact["logits"])
    assert_within_budget("loss", got["loss"], low["loss"], exact["loss"])
    assert_gradients_within_budget(got, low, exact)


@pytest.mark.parametrize("family", ["T5", "UMT5"])
def test_bfloat16_is_within_the_budget(family):
    case = CASES[family]()
    rounded = case.build(torch.bfloat16, "eager")
    exact = rounded.__class__(rounded.config).eval().double()
    exact.load_state_dict(rounded.state_dict())
    with torch.no_grad():
        wanted = exact(**case.arguments()).logits
        low = rounded(**case.arguments()).logits
        tilewise.patch(rounded)
        assert_within_budget("logits", rounded(**case.arguments()).logits, low, wanted)


@pytest.mark.parametrize("family", ["T5", "UMT5", "Pix2Struct", "UDOP"])
@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=["greedy", "beam", "static cache"]
)
def test_generate_gives_the_same_tokens(family, how):
    case = CASES[family]()
    model = case.build()
    inputs = {name: x for name, x in case.inputs.items() if name != "labels"}
    generate = lambda: model.generate(**inputs, max_new_tokens=12, do_sample=False, **how)  # noqa: E731
    wanted = generate()
    tilewise.patch(model)
    assert torch.equal(generate(), wanted)


def with_cache(model, cache):
    """The argument has a new name since transformers 5.18."""
    new = "cache" in inspect.signature(inspect.unwrap(type(model.decoder).forward)).parameters
    return {"cache" if new else "past_key_values": cache}


def decode_in_two_steps(model, case, cache, M=9, split=5):
    """Logits of M decoder tokens read in two calls, the second of M − split queries on top of the cache."""
    encoded = model.get_encoder()(
        input_ids=case.inputs["input_ids"], attention_mask=case.inputs["attention_mask"]
    ).last_hidden_state
    tokens, outputs = case.inputs["labels"][:, :M], []
    for part in (slice(0, split), slice(split, M)):
        output = model.decoder(
            input_ids=tokens[:, part], encoder_hidden_states=encoded,
            encoder_attention_mask=case.inputs["attention_mask"], use_cache=True, **with_cache(model, cache),
        )  # fmt: skip
        outputs.append(output.last_hidden_state)
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("family", ["T5", "UMT5"])
def test_several_queries_on_a_static_cache_whose_position_is_a_tensor(family):
    case = CASES[family]()
    model = case.build(attention="eager")

    def cache():
        config = model.config.get_text_config(decoder=True)
        lengths = {"max_cache_len": 16}, {"max_cache_len": SHAPE[1]}
        return EncoderDecoderCache(*(StaticCache(config=config, **length) for length in lengths))

    with torch.no_grad():
        wanted = decode_in_two_steps(model, case, cache())
        tilewise.patch(model)
        got_cache = cache()
        got = decode_in_two_steps(model, case, got_cache)
    assert isinstance(got_cache.self_attention_cache.get_seq_length(), torch.Tensor)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["T5", "UMT5"])
def test_gradient_checkpointing_gives_the_same_gradients(family, reentrant):
    case = CASES[family]()
    model = case.build().train()
    tilewise.patch(model)
    wanted = results(model, case.arguments())
    checkpoint(model, reentrant)
    if reentrant:
        model.enable_input_require_grads()
    calls = count_calls(model)
    assert_close(results(model, case.arguments()), wanted)
    assert len(calls) == 2 * len(model.encoder.block), "the encoder's layers were not run again in the backward pass"


def count_calls(model):
    calls = []
    for block in model.encoder.block:
        block.layer[0].SelfAttention.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def test_dropout_repeats_with_the_seed_and_under_checkpointing():
    case = CASES["T5"]()
    config = case.config()
    config.dropout_rate = 0.1
    torch.manual_seed(1)
    model = case.model(config).train()
    tilewise.patch(model)

    def seeded(seed):
        torch.manual_seed(seed)
        return results(model, case.arguments())

    first = seeded(5)
    again, other = seeded(5), seeded(6)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["logits"], other["logits"])
    # T5 drops in the same places outside attention whatever runs attention: only its own mask makes these differ.
    for layer in model.modules():
        if type(layer).__name__ == "TilewiseT5Attention":
            layer.dropout = 0.0
    assert not torch.equal(seeded(5)["logits"], first["logits"])
    for layer in model.modules():
        if type(layer).__name__ == "TilewiseT5Attention":
            layer.dropout = 0.1
    checkpoint(model, reentrant=False)
    assert_close(seeded(5), first)


def encoder_results(model, arguments):
    model.zero_grad()
    hidden = model(**arguments).last_hidden_state
    hidden.square().mean().backward()
    return {"hidden": hidden.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def test_forward_and_backward_compile_without_a_graph_break():
    case = CASES["T5"]()
    model = transformers.T5EncoderModel(case.config()).eval()
    tilewise.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for n in (SHAPE[1], 90):
        arguments = {name: case.inputs[name][:, :n] for name in ("input_ids", "attention_mask")}
        wanted = encoder_results(model, arguments)
        got = encoder_results(compiled, arguments)
        assert_close({name.removeprefix("_orig_mod."): value for name, value in got.items()}, wanted)


def test_training_step_of_encoder_and_decoder_compiles():
    case = CASES["UMT5"]()
    model = case.build()
    tilewise.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(**case.arguments()).logits, model(**case.arguments()).logits)


def test_a_decoding_step_on_a_static_cache_compiles_without_a_graph_break():
    case = CASES["T5"]()
    model = case.build()
    tilewise.patch(model)
    config = model.config.get_text_config(decoder=True)
    encoded = model.encoder(**{n: case.inputs[n] for n in ("input_ids", "attention_mask")}).last_hidden_state.detach()

    def decode(decoder):
        cache = EncoderDecoderCache(*(StaticCache(config=config, max_cache_len=n) for n in (8, SHAPE[1])))
        with torch.no_grad():
            return torch.cat([
                decoder(input_ids=case.inputs["labels"][:, t : t + 1], encoder_hidden_states=encoded,
                        encoder_attention_mask=case.inputs["attention_mask"],
                        **with_cache(model, cache)).last_hidden_state
                for t in range(5)
            ], 1)  # fmt: skip

    wanted = decode(model.decoder)
    torch.testing.assert_close(decode(torch.compile(model.decoder, backend="aot_eager")), wanted)


def test_autocast_runs_attention_in_the_lower_precision():
    case = CASES["T5"]()
    model = case.build()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        low = model(**case.arguments()).logits
        tilewise.patch(model)
        got = model(**case.arguments()).logits
    with torch.no_grad():
        exact = case.build(torch.float64)(**case.arguments(torch.float64)).logits
    assert_within_budget("logits", got, low, exact)


def test_lora_adapters_train_alike():
    peft = pytest.importorskip("peft")
    case = CASES["T5"]()

    def adapted():
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, target_modules=["q", "v"], lora_dropout=0.0, init_lora_weights=False)
        return peft.get_peft_model(case.build(), config)

    wanted = results(adapted(), case.arguments())
    model = adapted()
    report = tilewise.patch(model)
    assert report.rows[0].path == "base_model.model.encoder.block.0.layer.0.SelfAttention"
    got = results(model, case.arguments())
    assert any("lora_A" in name for name in wanted)
    assert_close(got, wanted)
    assert tilewise.unpatch(model) == len(report.rows)


def test_a_copy_and_a_pickle_of_a_patched_model_are_patched():
    case = CASES["T5"]()
    model = case.build()
    tilewise.patch(model)
    wanted = results(model, case.arguments())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.encoder.block[0].layer[0].SelfAttention) is type(
            model.encoder.block[0].layer[0].SelfAttention
        )
        assert torch.equal(results(other, case.arguments())["logits"], wanted["logits"])
        assert tilewise.unpatch(other) == 6
        assert type(model.encoder.block[0].layer[0].SelfAttention).__name__ == "TilewiseT5Attention"


class Matrices(TorchDispatchMode):
    """Records every operator's output whose last two sizes are both at least `n`."""

    def __init__(self, n):
        super().__init__()
        self.n, self.found = n, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.dim() >= 2 and min(x.shape[-2:]) >= self.n:
                self.found.add((str(func), tuple(x.shape)))
        return out


def matrices_of(model, arguments, n):
    with Matrices(n) as seen:
        model(**arguments).loss.backward()
    return seen.found


@pytest.mark.parametrize("family", ["T5", "UMT5", "Pix2Struct"])
def test_nothing_in_a_training_step_has_the_square_of_the_length(family):
    case = CASES[family]()
    arguments = case.arguments()
    # The tokens written are as many as those read, and more than any width of the model.
    arguments["labels"] = torch.randint(2, 99, SHAPE[:2])
    n = 110
    if family == "Pix2Struct":
        # Its image encoder is not of the family and keeps its own matrices: run it outside the count.
        patches, mask = arguments.pop("flattened_patches"), arguments["attention_mask"]
        plain = case.build()
        encoded = plain.encoder(patches, attention_mask=mask).last_hidden_state.detach()
        arguments["encoder_outputs"] = (encoded,)
    assert matrices_of(case.build(), arguments, n), "transformers itself made no matrix: the test cannot fail"
    model = case.build()
    tilewise.patch(model)
    assert matrices_of(model, arguments, n) == set()
