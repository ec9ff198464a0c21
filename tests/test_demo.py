"""The demo's parts: the comparison end to end at short lengths, memory, refusals, the picture."""

import io
import math
import subprocess
import sys

import pytest
import torch
from rich.console import Console

import tilewise
from tilewise.demo import experiment as module
from tilewise.demo import memory, show
from tilewise.demo.experiment import Experiment, Row, dense_bytes, run
from tilewise.demo.model import load_model
from tilewise.demo.plot import SUFFIXES, plot


@pytest.fixture(scope="module")
def short():
    """A real run of both systems in their own processes, at two short lengths."""
    ids, lengths = show.tokens_of(show.SAMPLE, (96, 300))
    said = []
    return run(ids, lengths, new_tokens=4, progress=lambda _, doing: said.append(doing)), said


def test_both_systems_run_and_agree(short):
    result, said = short
    assert result.exact
    assert [(row.n, row.system) for row in result.rows] == [
        (96, "tilewise"), (96, "transformers"), (300, "tilewise"), (300, "transformers"),
    ]  # fmt: skip
    for row in result.rows:
        assert row.seconds > row.encode_seconds > 0
        assert 2 <= len(row.tokens) <= 5
    assert all(row.max_abs_diff < 1e-4 and row.tokens_equal for row in result.rows if row.system == "tilewise")
    assert result.environment["workers"]["transformers"]["attention"] == "sdpa"
    assert result.environment["workers"]["tilewise"]["attention"] == "tilewise"
    assert "tilewise, 96 tokens" in said


def test_the_sample_is_long_enough():
    ids, lengths = show.tokens_of(show.SAMPLE, module.LENGTHS)
    assert lengths == module.LENGTHS
    assert len(ids) > 16384


def test_a_shorter_text_is_read_whole(tmp_path):
    file = tmp_path / "text"
    file.write_text("A ray of light falls on the water and is bent. " * 40)
    ids, lengths = show.tokens_of(file, (128, 512, 4096))
    assert 128 < len(ids) < 4096
    assert lengths == (128, *((512,) if len(ids) >= 512 else ()), len(ids))


def one(difference=1e-6, same=True, seconds=1.0):
    return Row(512, "tilewise", seconds, 0.5, 3.0, difference, same)


@pytest.mark.parametrize(
    ("rows", "exact"),
    [
        ([one()], True),
        ([one(), one(1e-3)], False),
        ([one(math.nan)], False),
        ([one(same=False)], False),
        ([one(), Row(1024, "tilewise", 2.0, 1.0, 5.0), Row(1024, "transformers", note="not run: memory")], True),
        ([one(), Row(1024, "tilewise", note="failed: no")], False),
        ([Row(512, "tilewise", 2.0, 1.0, 5.0), Row(512, "transformers", note="not run: memory")], None),
        ([Row(512, "tilewise", note="failed: no"), Row(512, "transformers", 2.0, 1.0, 5.0)], None),
        ([], None),
    ],
)
def test_exact_needs_every_comparison_to_hold_and_one_at_least(rows, exact):
    assert Experiment(rows).exact is exact


@pytest.mark.parametrize(("impl", "budget"), [("auto", 1e-3), ("blocked", 60.0), ("reference", float("inf"))])
def test_check_lets_a_run_through(impl, budget):
    module.check(impl, budget)


def test_the_run_itself_refuses_what_check_refuses(monkeypatch):
    monkeypatch.setattr(show, "run", lambda *args, **kwargs: pytest.fail("the run started"))
    for impl, budget, message in (("foo", 9.0, "impl is 'foo'"), ("auto", -5.0, "budget is -5 seconds")):
        with pytest.raises(ValueError, match=message):
            show.demo(show.SAMPLE, (96,), new_tokens=4, impl=impl, budget=budget, picture=None)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([one()], "Exact"),
        ([one(0.0)], "Exact"),
        ([one(1e-3)], "Not exact"),
        ([Row(512, "tilewise", 2.0, 1.0, 5.0), Row(512, "transformers", note="not run: time")], "Nothing was compared"),
    ],
)
def test_the_conclusion_and_the_title_of_the_picture_agree(monkeypatch, tmp_path, rows, said):
    titles = []
    monkeypatch.setattr("matplotlib.figure.Figure.suptitle", lambda self, text, **style: titles.append(text))
    workers = {"tilewise": {"memory_method": "m"}, "transformers": {"attention": "sdpa"}}
    console = Console(width=200, file=io.StringIO())
    result = Experiment(rows, {"workers": workers})
    show._conclude(console, result)
    plot(result, tmp_path / "p.png")
    found = [line for line in console.file.getvalue().splitlines() if line.startswith(("Exact", "Not ", "Nothing"))]
    assert len(found) == 1
    assert found[0].startswith(said)
    title = {"Exact": "same tokens", "Not exact": "NOT the same outputs"}.get(said, "nothing was compared")
    assert title in titles[0]


class Idle:
    ended = False


def test_transformers_is_not_started_without_the_memory(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 4 * 2**30)
    assert module._hindrance(Experiment(), 8192, 100.0, Idle()) == ""
    assert dense_bytes(16384) == 2 * 6 * 16384**2 * 4
    assert module._hindrance(Experiment(), 16384, 100.0, Idle()) == "not run: needs 12.0 GiB, 4.0 GiB available"


def test_transformers_is_not_started_beyond_the_time(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 2**40)
    done = Experiment([Row(4096, "transformers", 11.0, 10.0, 3.0)])
    assert module._hindrance(done, 8192, 43.0, Idle()) == ""
    assert "about 42 s expected, 41 s left" in module._hindrance(done, 8192, 41.0, Idle())
    early = Experiment([Row(128, "transformers", 11.0, 1.0, 3.0)])
    assert module._hindrance(early, 512, 1.0, Idle()) == ""


def test_a_worker_that_cannot_start_is_reported_with_its_last_words(tmp_path):
    ids, _ = show.tokens_of(show.SAMPLE, (96,))
    with pytest.raises(RuntimeError, match=r"worker process ended with status 1: .*impl='triton' cannot run"):
        run(ids, (96,), impl="triton")


def test_memory_counts_a_block_that_was_touched_and_freed():
    code = (
        "from tilewise.demo import memory\nbefore = memory.resident()\nmemory.reset_peak()\n"
        "block = bytearray(200 * 2**20)\nblock[::4096] = b'x' * len(block[::4096])\ndel block\n"
        "first = memory.peak() - before\nmemory.reset_peak()\nprint(first / 2**20, (memory.peak() - before) / 2**20)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    first, second = map(float, out.split())
    assert 195 < first < 260
    # Only Linux can forget the mark.
    assert second < 100 or sys.platform != "linux"
    assert 2**28 < memory.available() < 2**45


def test_the_table_fits_a_terminal_of_80_columns_and_shows_what_was_not_run():
    rows = [Row(16384, "transformers", note="not run: x"), Row(16384, "tilewise", 123.45, 100.0, 1234.0)]
    rows += [Row(512, "transformers", 9.0, 1.0, 90.0), one()]
    console = Console(width=80, file=io.StringIO())
    console.print(show._table(Experiment(rows)))
    text = console.file.getvalue()
    assert "…" not in text
    assert "not run" in text
    assert "30 ×" in text


def test_the_picture_has_both_systems(tmp_path):
    from matplotlib.image import imread

    rows = [Row(n, s, n / 100, n / 200, n / 10) for n in (512, 1024) for s in ("transformers", "tilewise")]
    rows += [Row(2048, "transformers", note="not run"), Row(2048, "tilewise", 9.0, 8.0, 100.0)]
    path = tmp_path / "folder" / "picture.png"
    plot(Experiment(rows), path)
    pixels = imread(path)[..., :3]
    for colour in ((0xB5, 0x56, 0x2B), (0x1F, 0x6F, 0x78)):
        near = (abs(pixels * 255 - colour) < 8).all(-1)
        assert near.sum() > 200


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".PNG"])
def test_every_suffix_offered_is_written_even_where_nothing_ran(tmp_path, suffix):
    path = tmp_path / f"p{suffix}"
    plot(Experiment([Row(512, "transformers", note="not run"), Row(512, "tilewise", note="failed")]), path)
    assert path.stat().st_size > 1000


def test_a_changed_table_is_seen():
    ids, _ = show.tokens_of(show.SAMPLE, (96,))
    ids = torch.tensor(ids[:96])[None]
    model = load_model()
    with torch.inference_mode():
        theirs = model.encoder(input_ids=ids).last_hidden_state
        tilewise.patch(model)
        before = (model.encoder(input_ids=ids).last_hidden_state - theirs).abs().max()
        # One number of one head: the key right behind the query.
        model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight[1, 0] += 1.0
        after = (model.encoder(input_ids=ids).last_hidden_state - theirs).abs().max()
    assert before <= module.TOLERANCE
    assert after > 10 * module.TOLERANCE
