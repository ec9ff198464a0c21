"""The demo's parts: the comparison end to end at short lengths, memory, refusals, the picture."""

import io
import json
import math
import os
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
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
    for rows in (done, early, Experiment()):
        for left in (0.0, -3.0):
            assert module._hindrance(rows, 8192, left, Idle()) == "not run: no time left of the budget"
    fast = Experiment([Row(2048, "transformers", 0.05, 0.04, 3.0)])
    assert "about 0.2 s expected, 0.1 s left" in module._hindrance(fast, 4096, 0.1, Idle())


@pytest.fixture
def simulated(monkeypatch):
    """run() with workers that take the seconds they are told to, on a clock of their own."""

    def simulate(loading, measuring, lengths, budget):
        clock = [0.0]

        def receive():
            clock[0] += loading
            return {"attention": "sdpa", "memory_method": "m"}

        def ask(request):
            clock[0] += measuring
            np.save(request["hidden"], np.zeros((request["n"], 2)))
            return {"encode_seconds": measuring, "generate_seconds": 0.0, "peak_mib": 1.0, "tokens": [0, 1]}

        @contextmanager
        def worker(*args):
            yield SimpleNamespace(ended=False, receive=receive, ask=ask)

        monkeypatch.setattr(memory, "available", lambda: 2**40)
        monkeypatch.setattr(module, "_worker", worker)
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
        return run(list(range(2, 9000)), lengths, budget=budget)

    return simulate


def test_the_budget_begins_when_the_models_are_loaded(simulated):
    result = simulated(loading=1000.0, measuring=10.0, lengths=(96, 128, 160), budget=60.5)
    assert [row.note for row in result.rows] == [""] * 6
    assert all(row.tokens_equal for row in result.rows if row.system == "tilewise")


@pytest.mark.parametrize("lengths", [(96, 128), (4096, 8192)])
@pytest.mark.parametrize("budget", [1e-9, 150.0])
def test_the_shortest_length_is_compared_whatever_the_budget(simulated, lengths, budget):
    result = simulated(loading=5.0, measuring=100.0, lengths=lengths, budget=budget)
    assert [row.note for row in result.rows] == ["", "", "", "not run: no time left of the budget"]
    assert result.exact


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


@pytest.mark.parametrize("spread", [1.0, 1.5, 4.0, 9.0, 11.0, 300.0])
def test_both_axes_of_the_picture_have_numbers(monkeypatch, tmp_path, spread):
    from matplotlib.figure import Figure

    labels = {}

    def read(figure, path, **_):
        figure.canvas.draw()
        for axes in figure.axes:
            low, high = axes.get_ylim()
            labels[axes.get_title()] = {
                float(label.get_text().replace(",", "")): position
                for label, position in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)
                if low <= position <= high and label.get_text()
            }

    monkeypatch.setattr(Figure, "savefig", read)
    rows = [Row(512, s, 2.1, 1.0, 41.0) for s in ("transformers", "tilewise")]
    rows += [Row(1024, s, 2.1 * spread, 1.0, 41.0 * spread) for s in ("transformers", "tilewise")]
    plot(Experiment(rows), tmp_path / "p.png")
    assert len(labels) == 2
    for ticks in labels.values():
        assert len(ticks) >= 2, "an axis with one number or none has no scale"
        assert all(said == pytest.approx(position) for said, position in ticks.items())


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


@pytest.fixture
def unmeasured(monkeypatch):
    """show.demo() without the measuring: run() returns these rows."""

    def use(rows):
        workers = {"tilewise": {"memory_method": "m [/x]"}, "transformers": {"attention": "sdpa"}}
        monkeypatch.setattr(show, "run", lambda *args, **kwargs: Experiment(rows, {"workers": workers}))
        monkeypatch.setenv("COLUMNS", "300")

    return use


OPTIONS = {"new_tokens": 4, "impl": "auto", "budget": 9.0}


def test_what_comes_from_outside_is_printed_as_it_is(monkeypatch, unmeasured, capsys, tmp_path):
    unmeasured([Row(512, "transformers", note="failed: no [/x] :smile:"), Row(512, "tilewise", 2.0, 1.0, 5.0)])
    real = show.load_tokenizer()
    title = "[/title] of a [bold]ray[/bold] :sun:"
    monkeypatch.setattr(show, "load_tokenizer", lambda: SimpleNamespace(encode=real.encode, decode=lambda ids: title))
    machine = show.environment()
    machine["devices"][0]["name"] = "CPU [/8] :gear:"
    monkeypatch.setattr(show, "environment", lambda: machine)
    file, picture, figures = (
        tmp_path / name for name in ("[bold]n:smile:.txt", "d[/x].png", "f" * 200 + "/j[b]" + "j" * 200)
    )
    figures.parent.mkdir()
    file.write_text("A ray of light falls on the water and is bent. " * 40)
    show.demo(file, (96,), picture=picture, figures=figures, **OPTIONS)
    said = capsys.readouterr().out
    assert "first tokens of [bold]n:smile:.txt (" in said
    assert "\nCPU [/8] :gear:, " in said
    assert "transformers at 512 tokens: failed: no [/x] :smile:\n" in said
    assert f"Title at 512 tokens: “{title}”\n" in said
    assert "Memory: m [/x]." in said
    # In one line, however long.
    assert f"\nPicture: {picture}\n" in said
    assert f"\nFigures: {figures}\n" in said
    assert json.loads(figures.read_text())["document"] == file.name
    assert picture.stat().st_size > 1000


def test_the_files_are_written_before_anything_of_them_is_printed(monkeypatch, unmeasured, tmp_path):
    def fail(*args):
        raise UnicodeEncodeError("ascii", "…", 0, 1, "no")

    unmeasured([one()])
    monkeypatch.setattr(show, "_table", fail)
    picture, figures = tmp_path / "p.png", tmp_path / "f.json"
    with pytest.raises(UnicodeEncodeError):
        show.demo(show.SAMPLE, (96,), picture=picture, figures=figures, **OPTIONS)
    assert json.loads(figures.read_text())["rows"][0]["seconds"] == 1.0
    assert picture.stat().st_size > 1000


def test_a_file_that_cannot_be_written_loses_neither_the_other_nor_the_words(unmeasured, capsys, tmp_path):
    unmeasured([one()])
    picture, folder = tmp_path / "p.png", tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OSError, match=r"^Figures: '.*folder' could not be written \(Is a directory\)$"):
        show.demo(show.SAMPLE, (96,), picture=picture, figures=folder, **OPTIONS)
    assert picture.stat().st_size > 1000
    said = capsys.readouterr().out
    assert "Exact: " in said
    assert f"Picture: {picture}" in said
    assert "Figures" not in said


def test_a_title_without_words_is_named_so(unmeasured, capsys):
    empty = Row(1024, "tilewise", 2.0, 1.0, 5.0, tokens=[0, 1])
    unmeasured([empty, Row(2048, "tilewise", note="failed: no")])
    show.demo(show.SAMPLE, (96,), picture=None, **OPTIONS)
    said = capsys.readouterr().out
    assert "Title at 1,024 tokens: (empty)\n" in said
    assert "Title at 2,048" not in said


_STUBBED = """
import sys
from tilewise import cli
from tilewise.demo import show
from tilewise.demo.experiment import Experiment, Row
def run(*args, progress, **kwargs):
    rows = [Row(64, "transformers", 2.0, 1.0, 9.0), Row(64, "tilewise", 1.0, 0.5, 3.0, 0.0, True)]
    workers = {"tilewise": {"memory_method": "m"}, "transformers": {"attention": "sdpa"}}
    experiment = Experiment(rows, {"workers": workers})
    progress(experiment, "tilewise, 64 tokens")
    return experiment
show.run = run
cli.main()
"""


def test_a_name_or_a_terminal_with_other_characters_does_not_stop_a_run(tmp_path):
    name = os.fsdecode(b"n\xff.txt")
    try:
        (tmp_path / name).write_text("A ray of light falls on the water and is bent. " * 40)
    except OSError:
        name = "n\udcff.txt".encode("ascii", "backslashreplace").decode()
        (tmp_path / name).write_text("A ray of light falls on the water and is bent. " * 40)
    done = subprocess.run(
        [sys.executable, "-c", _STUBBED, "demo", "--json", "f.json", name],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "300"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "first tokens of n\\udcff.txt (" in done.stdout
    assert json.loads((tmp_path / "f.json").read_text())["exact"] is True


def test_a_reader_that_is_gone_does_not_stop_a_run(tmp_path):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", _STUBBED, "demo", "--json", "f.json"],
        cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(write)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads((tmp_path / "f.json").read_text())["exact"] is True
