"""The trained T5 of the demo: a patched model gives transformers' logits, tokens, loss and gradients on real text."""

import pytest
import torch
from test_t5_outputs import assert_gradients_within_budget, results

import tilewise
from tilewise.demo.model import PREFIX, load_model, load_tokenizer
from tilewise.testing import assert_within_budget

TEXTS = (
    "The tests fail on import. I will look at the traceback first, then install the missing dependency, and run the "
    "unit tests again to see whether the error is gone.",
    "Refactor the parser: split the tokenizer from the grammar, keep the public functions, and add a changelog entry.",
    "A beam of the Sun's Light let into a dark Room through a very small hole makes the Shadows of things larger than "
    "they ought to be if the Rays went on by the Bodies in straight Lines. " * 8,
)
TITLES = ("Fix failing import test", "Split tokenizer from grammar", "Observe shadows in sunlight")


@pytest.fixture(scope="module")
def model():
    return load_model()


@pytest.fixture(scope="module")
def batch():
    tokenizer = load_tokenizer()

    def padded(texts):
        rows = [tokenizer.encode(text).ids for text in texts]
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        return ids

    ids, titles = padded(PREFIX + text for text in TEXTS), padded(TITLES)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": titles.masked_fill(titles == 0, -100)}


@pytest.fixture
def patched(model):
    report = tilewise.patch(model)
    assert {row.implementation for row in report.rows} == {"blocked"}
    yield model
    tilewise.unpatch(model)


def test_it_was_trained_with_its_bias(model, batch):
    with torch.no_grad():
        loss = model(**batch).loss
        tables = [p for name, p in model.named_parameters() if "relative_attention_bias" in name]
        kept = [p.clone() for p in tables]
        for p in tables:
            p.zero_()
        without = model(**batch).loss
        for p, value in zip(tables, kept, strict=True):
            p.copy_(value)
    assert loss + 1 < without


def test_logits_loss_and_gradients(model, batch):
    wanted = results(model, batch)
    tilewise.patch(model)
    got = results(model, batch)
    tilewise.unpatch(model)
    assert float((got["logits"] - wanted["logits"]).abs().max()) < 1e-4
    exact = results(model.double(), batch)
    model.float()
    assert_within_budget("logits", got["logits"], wanted["logits"], exact["logits"])
    assert_within_budget("loss", got["loss"], wanted["loss"], exact["loss"])
    assert_gradients_within_budget(got, wanted, exact)


@pytest.mark.parametrize("how", [{}, {"num_beams": 4}], ids=["greedy", "beam"])
def test_generated_tokens(model, batch, how):
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    generate = lambda: model.generate(**inputs, max_new_tokens=16, do_sample=False, **how)  # noqa: E731
    wanted = generate()
    tilewise.patch(model)
    got = generate()
    tilewise.unpatch(model)
    assert torch.equal(got, wanted)


def test_padding_does_not_matter(patched, batch):
    with torch.no_grad():
        together = patched.encoder(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        for row, mask, hidden in zip(batch["input_ids"], batch["attention_mask"], together, strict=True):
            n = int(mask.sum())
            alone = patched.encoder(row[None, :n]).last_hidden_state[0]
            torch.testing.assert_close(hidden[:n], alone, rtol=1e-3, atol=1e-4)
            left = patched.encoder(row.roll(-n)[None], attention_mask=mask.roll(-n)[None]).last_hidden_state[0]
            torch.testing.assert_close(left[-n:], alone, rtol=1e-3, atol=1e-4)
