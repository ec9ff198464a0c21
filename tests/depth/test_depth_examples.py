"""The examples run and do what they say; the training harness learns, resumes, refuses and repeats itself."""

import dataclasses
import importlib
import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tilewise.nn import DecoderConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def program(monkeypatch):
    """Import a program of examples/ or benchmarks/ by name."""

    def load(name):
        for folder in ("examples", "benchmarks"):
            monkeypatch.syspath_prepend(str(ROOT / folder))
        return importlib.import_module(name)

    return load


def test_own_model_learns(program):
    losses = program("depth_own_model").main(40)
    assert losses[-1] < 0.3 * losses[0]


def test_wrapped_hugging_face_model_learns(program):
    pytest.importorskip("transformers")
    losses = program("depth_wrap_hf").main(15)
    assert losses[-1] < 0.8 * losses[0]


def test_chunked_generation_equals_one_chunk(program):
    example = program("depth_inference")
    table = example.plans()
    assert "15.03" in table
    assert "7.52" in table
    torch.manual_seed(0)
    config = DecoderConfig(vocab=64, d=32, layers=6, heads=4, kv_heads=2, hidden=64, residual="block", block=4)
    model = example.Decoder(config).double()
    prompt = torch.randint(64, (2, 20))
    outputs = [example.generate(model, prompt, new=5, chunk=chunk) for chunk in (20, 8)]
    torch.testing.assert_close(*outputs)


@pytest.fixture
def text(tmp_path, program):
    """A text of 32 symbols, each followed by one of two: half a bit of entropy above what can be learned."""
    generator = np.random.default_rng(0)
    steps = generator.choice([3, 7], 6000)
    ids = (np.cumsum(steps) % 32).astype(np.uint16)
    ids[:5000].tofile(tmp_path / "train.bin")
    ids[5000:].tofile(tmp_path / "valid.bin")
    meta = {"vocab": 32, "valid": {"tokens": 1000, "bytes": 3000}}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    return program("train_harness").Text(tmp_path)


def test_the_training_comparison(text, tmp_path, program, capsys):
    harness, depth_train = program("train_harness"), program("depth_train")
    recipe = harness.Recipe(tokens=40 * 8 * 16, batch=8, length=16, lr=1e-2, evaluations=4, held_out=32)
    base = DecoderConfig(vocab=32, d=16, layers=2, heads=2, kv_heads=1, hidden=32)
    built = depth_train.variants(["standard", "block2", "full"], base, torch.device("cpu"), torch.float32)
    out = tmp_path / "record.json"
    record = harness.compare(built, text, recipe, [0, 1], out)
    assert json.loads(out.read_text())["runs"].keys() == built.keys()
    for runs in record["runs"].values():
        assert [r["seed"] for r in runs] == [0, 1]
        for run in runs:
            assert [tokens for tokens, _ in run["valid"]] == [k * 10 * 128 for k in (1, 2, 3, 4)]
            assert len(run["train"]) == 40
            assert run["valid"][-1][1] < 0.7 * math.log(32)
            assert math.log(2) < run["valid"][-1][1] < run["valid"][0][1]
    table = harness.summary(record).splitlines()
    assert [line.split()[0] for line in table] == ["variant", "standard", "block2", "full"]
    again = harness.train(built["block2"], text, recipe, 1)
    assert again["train"] == record["runs"]["block2"][1]["train"]

    capsys.readouterr()
    assert harness.compare(built, text, recipe, [0, 1], out)["runs"] == json.loads(out.read_text())["runs"]
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="another recipe"):
        harness.compare(built, text, harness.Recipe(tokens=1), [0], out)
    harness.compare(built, text, recipe, [2], out, seconds=-1)
    assert capsys.readouterr().out.count("no time for") == 3


def test_the_standard_baseline_is_the_carried_comparisons(text, program):
    """Same sizes; with the same initial weights the same loss at every step, so that the two tables are one."""
    harness, depth_train, carried_train = (program(n) for n in ("train_harness", "depth_train", "carried_train"))
    assert sorted(depth_train.SIZES.values()) == sorted(carried_train.SIZES.values())
    recipe = harness.Recipe(tokens=6 * 4 * 16, batch=4, length=16, lr=1e-2, evaluations=2, held_out=8)
    sizes = {"d": 32, "layers": 2, "heads": 2, "kv-heads": 1, "hidden": 48}
    base = depth_train.sized(32, sizes)
    ours = depth_train.variants(["standard"], base, torch.device("cpu"), torch.float32)["standard"]
    sizes = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "hidden": 48}
    theirs = carried_train.builders(["full-none"], 32, sizes, 128, "stored", "cpu", torch.float32)["full-none"]

    @torch.no_grad()
    def with_our_weights():
        weights = dict(ours().named_parameters())
        model = theirs()
        for name, p in model.named_parameters():
            p.copy_(_weight_of(name, weights))
        return model

    one, other = harness.train(ours, text, recipe, 0), harness.train(with_our_weights, text, recipe, 0)
    assert one["parameters"] == other["parameters"]
    assert len(one["train"]) == 6
    assert one["train"][-1] < one["train"][0] - 0.1
    assert one["train"] == pytest.approx(other["train"], abs=2e-5)
    assert [x for _, x in one["valid"]] == pytest.approx([x for _, x in other["valid"]], abs=2e-5)


def _weight_of(name, weights):
    """The weight of a `Decoder` that plays the part of a `CarriedLlama`'s parameter `name`."""
    if not name.startswith("blocks."):
        return weights[name.removesuffix(".weight") if name == "norm.weight" else name]
    _, block, _, _, part = name.split(".", 4)
    layer = f"layers.{block}."
    if part == "up.weight":
        return torch.cat([weights[f"{layer}mlp.gate.weight"], weights[f"{layer}mlp.up.weight"]])
    names = {"norm": "attention_norm", "mlp_norm": "mlp_norm", "down": "mlp.down.weight"}
    names |= {f"attention.{a}": f"attention.{a[0]}.weight" for a in ("query", "key", "value", "out")}
    return weights[layer + names[part.removesuffix(".weight")]]


def test_every_kind_of_residual_starts_as_the_standard_one(program):
    """Zero queries read means of outputs, and a norm does not see that a mean is no sum, but for its epsilon."""
    depth_train = program("depth_train")
    base = depth_train.sized(32, {"d": 16, "layers": 3, "heads": 2, "kv-heads": 1, "hidden": 24})
    tokens = torch.randint(32, (2, 9))
    losses = {}
    for eps in (1e-14, 1e-2):
        base = dataclasses.replace(base, eps=eps)
        for name, build in depth_train.variants(list(depth_train.KINDS), base, "cpu", torch.float32).items():
            torch.manual_seed(0)
            losses[name, eps] = build().double().loss(tokens).item()
    for name in depth_train.KINDS:
        assert losses[name, 1e-14] == pytest.approx(losses["standard", 1e-14], rel=1e-7)
    assert abs(losses["full", 1e-2] - losses["standard", 1e-2]) > 1e-6


def test_every_variant_sees_the_same_batches(text, program):
    recipe = program("train_harness").Recipe(tokens=512, batch=4, length=16)
    first, second, other = ([*text.batches(recipe, seed)] for seed in (0, 0, 1))
    assert len(first) == recipe.steps == 8
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0])
    held = torch.cat([*text.held_out(recipe)])
    assert held.shape == (62, 17)
    assert torch.equal(held[0], text.valid[:17].long())


def test_learning_rate(program):
    recipe = program("train_harness").Recipe(tokens=100 * 64 * 512, warmup=0.1, final=0.1, lr=1.0)
    rates = [recipe.rate(step) for step in range(recipe.steps)]
    assert (rates[0], rates[9]) == pytest.approx((0.1, 1.0))
    assert rates[-1] == pytest.approx(0.1, abs=0.01)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))


def test_text_preparation(tmp_path, program):
    prepare = program("prepare_text")
    pages = tmp_path / "usr/share/doc/anarchism/html"
    pages.mkdir(parents=True)
    (pages / "b.html").write_text("<html><head><title>x</title></head><p>One &amp; two.<br>Three</p></html>")
    (pages / "a.html").write_text("<script>no</script><p>Zero</p>")
    assert prepare.anarchism(tmp_path) == "Zero\n\nOne & two.\nThree"
    long = "".join(f"line {i}\n" for i in range(20000)) + "end"
    assert "".join(prepare.pieces(long)) == long
    assert len(prepare.pieces(long)) == 4
    tokenizer = prepare.train_tokenizer([long], 300)
    ids = prepare.encode(tokenizer, long[:1000] + "ü")
    assert tokenizer.decode(ids.tolist()) == long[:1000] + "ü"


@pytest.fixture(autouse=True)
def forget_programs():
    """Programs are imported by bare names; none stays for other tests."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in ("prepare_text", "train_harness", "carried_train") or name.startswith("depth_"):
            del sys.modules[name]
