"""Tables, plots and the command line, on made-up results."""

import json

import pytest
from typer.testing import CliRunner

from tilewise.bench import records, runner
from tilewise.bench.carried import CARRIED
from tilewise.bench.cli import app
from tilewise.bench.relative import RELATIVE
from tilewise.bench.report import carry_costs, failures, lost, render, tables
from tilewise.bench.worker import blank

SPEEDS = {"tilewise": 1.0, "flex": 2.0, "eager": 9.0}
"""ms at length 512; ours takes three times as long at 128, where flex takes 2.0."""


def made():
    cells = runner.select("relative", "cuda", cases=["t5"], sizes={"n": [128, 512]}, systems=list(SPEEDS))
    out = [
        {"record": "environment", "run": "r", "set": "relative", "date": "2026-01-02", "gpu": "H200", "cuda": "13.0",
         "versions": {"torch": "2.11.0", "flashdeberta": None}, "options": {}},
    ]  # fmt: skip
    for cell in cells:
        for pass_ in cell.passes:
            r = blank(RELATIVE, cell, pass_) | {"run": "r"}
            ms = SPEEDS[cell.system] * (3.0 if (cell.system, cell.size["n"]) == ("tilewise", 128) else 1.0)
            if (cell.system, cell.size["n"], pass_) == ("eager", 512, "bwd"):
                r["error"] = "OutOfMemoryError: so much"
            else:
                r |= {"ok": True, "ms": ms, "tflops": 500.0 / ms, "ratio_to_baseline": 1 / ms, "peak_mib": 24.0 * ms}
            out.append(r)
    return out


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "relative.json"
    records.save(path, made())
    return path


def test_tables_put_ours_first_and_mark_the_fastest_of_a_column():
    forward, memory, backward, _ = tables(made())
    assert forward.title.startswith("t5, forward: float16, 12 heads × 64, 16,384 tokens a batch · TFLOP/s")
    assert forward.header == ["system", "128", "512"]
    assert forward.rows == [
        ["tilewise", "167 (0.33)", "500 (1.00)"],
        ["flex", "250 (0.50)", "250 (0.50)"],
        ["eager", "56 (0.11)", "56 (0.11)"],
    ]
    assert forward.emphasis == {(1, 1), (0, 2)}
    assert memory.rows[1] == ["flex", "48", "48"]
    assert backward.rows[2] == ["eager", "56 (0.11)", "–"]


def carried(systems, case="step"):
    """Records at 4,096 tokens; without a result at 8,192. Two rounds, one sample below and one above the median."""
    out = [{"record": "environment", "run": "r", "gpu": "H200", "date": "", "cuda": "", "versions": {}}]
    for system, (ms, ratio) in systems.items():
        for cell in runner.select("carried", "cuda", cases=[case], systems=[system]):
            r = blank(CARRIED, cell, "step")
            samples = {"system": [[ms - 2.0], [ms + 3.0]], "baseline": [[ms * ratio]] * 2}
            full = {"ok": True, "ms": ms, "ratio_to_baseline": ratio, "baseline_ms": ms * ratio, "peak_mib": 2048.0,
                    "samples": samples}  # fmt: skip
            out.append(r | full if cell.size["tokens"] == 4096 else r)
    return out


def test_cost_of_the_carry_is_over_the_kernel_without_one_and_over_the_baseline():
    table = carry_costs(carried({"tilewise": (110.0, 0.9), "tilewise-mixed": (105.0, 0.8), "no-carry": (100.0, 1.25)}))
    assert table.rows == [
        ["step", "4,096", "tilewise-mixed", "105", "103–108", "+5.0%", "+25.0%"],
        ["step", "4,096", "tilewise", "110", "108–113", "+10.0%", "+11.1%"],
        ["step", "4,096", "no-carry", "100", "98–103", "", "-20.0%"],
    ]
    assert table.emphasis == {(0, 3)}


def test_cells_not_won_and_cells_without_a_result_are_shown():
    assert lost(made()).rows == [
        ["t5", "fwd", "128", "3.000", "flex 2.000", "1.50×"],
        ["t5", "bwd", "128", "3.000", "flex 2.000", "1.50×"],
    ]
    assert failures(made()).rows == [["t5", "bwd", "512", "eager", "OutOfMemoryError: so much"]]
    broken = made()
    for r in broken:
        if r.get("system") == "tilewise" and r["n"] == 512:
            r |= {"ok": False, "ms": None, "error": "outside the error bounds: o"}
    assert ["t5", "fwd", "512", "no result", "outside the error bounds: o", ""] in lost(broken).rows


@pytest.mark.parametrize("rich", [False, True])
def test_render_prints_every_table(rich, capsys):
    render(made(), rich=rich)
    out = capsys.readouterr().out
    for expected in (
        "H200",
        "torch 2.11.0",
        "500 (1.00)",
        "Cells not won",
        "Cells without a result",
        "OutOfMemoryError",
    ):
        assert expected in out
    assert "flashdeberta" not in out


def test_names_in_a_record_are_no_markup(capsys):
    strange = [r | {"gpu": "[/x] card"} if r["record"] == "environment" else r | {"case": "[b]t5"} for r in made()]
    titles = [word for table in tables(strange) for word in table.title.split() if word.startswith("[")]
    assert titles
    render(strange, rich=True)
    out = capsys.readouterr().out
    assert all(out.count(word) >= titles.count(word) for word in titles)
    assert "[/x] card" in out


def test_report_draws_a_picture_a_case(results, tmp_path):
    shown = CliRunner().invoke(app, ["report", str(results), "--plots", str(tmp_path / "plots")])
    assert shown.exit_code == 0, shown.output
    picture = tmp_path / "plots" / "t5-float16-64.png"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 20_000


@pytest.mark.parametrize(("factor", "scale"), [(1.1, "linear"), (100.0, "log")])
@pytest.mark.parametrize("least", [24.0, 0.03])
def test_axes_of_memory_have_numbers_whatever_the_spread(factor, scale, least):
    from matplotlib.figure import Figure

    from tilewise.bench.plots import _looks, _memory

    by_system = {
        s: {128: {"peak_mib": mib}, 512: {"peak_mib": mib}} for s, mib in (("a", least), ("b", least * factor))
    }
    figure = Figure()
    axis = figure.subplots()
    _memory(axis, by_system, _looks([by_system]))
    figure.canvas.draw()
    low, high = axis.get_ylim()
    ticks = [(t.get_position()[1], t.get_text()) for t in axis.get_yticklabels()]
    shown = {float(text.replace(",", "")): at for at, text in ticks if low <= at <= high and text}
    assert axis.get_yscale() == scale
    assert len(shown) >= 3
    assert all(said == pytest.approx(at) for said, at in shown.items())


def test_a_baseline_at_one_length_is_seen():
    from matplotlib.figure import Figure

    from tilewise.bench.plots import _looks, _speed

    cells = {n: {"ok": True, "tflops": 2.0, "ratio_to_baseline": 0.5, "baseline": "sdpa"} for n in (64, 128)}
    for lengths in ((64,), (64, 128)):
        by_system = {"eager": {n: cells[n] for n in lengths}}
        axis = Figure().subplots()
        _speed(axis, by_system, _looks([by_system]))
        (line,) = [line for line in axis.lines if line.get_label() == "sdpa, no term"]
        assert (line.get_marker() != "None") == (len(lengths) == 1)


def test_carried_cells_become_bars_with_the_slowest_cut(tmp_path):
    from tilewise.bench.carried_plots import _panels
    from tilewise.bench.plots import plot

    results = carried({"eager": (400.0, 0.25), "tilewise": (110.0, 0.9), "plain": (100.0, 1.0)})
    results += carried({"tilewise": (105.0, 0.95)}, case="step-graph")[1:]
    first, second = _panels(results, "step")
    assert (first.title, list(first.records)) == ("4,096 tokens", ["eager", "tilewise", "plain"])
    assert (second.title, list(second.records)) == ("4,096 tokens, one CUDA graph", ["tilewise"])
    (picture,) = plot(results, tmp_path)
    assert picture.name == "carried-step.png"
    assert picture.stat().st_size > 20_000


def test_systems_that_share_a_case_never_share_a_colour():
    from tilewise.bench.plots import _looks

    cases = {case: {} for case in RELATIVE.cases}
    for cell in runner.select("relative", "cuda"):
        cases[cell.case][cell.system] = {}
    looks = _looks(list(cases.values()))
    for systems in cases.values():
        assert len({looks[s] for s in systems}) == len(systems)


def test_merge_joins_files(results, tmp_path):
    out = tmp_path / "all.json"
    done = CliRunner().invoke(app, ["merge", str(out), str(results), str(results)])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text()) == made()


def test_plan_names_reasons_and_memory():
    shown = CliRunner().invoke(app, ["plan", "--case", "deberta_v3", "-N", "64", "-H", "2", "--device", "cpu"])
    assert shown.exit_code == 0, shown.output
    lines = [" ".join(line.split()) for line in shown.output.splitlines()]
    assert "triton does not: q is on cpu; triton runs on cuda" in lines
    assert "blocked runs" in lines
    assert "one dense score matrix (not held) 0.0 MiB" in lines


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "--cases", "bert"], "case is 'bert'"),
        (["run", "--lengths", "many"], "expected numbers such as 512,2048"),
        (["run", "--lengths", "٦٤"], "expected numbers such as 512,2048"),
        (["run", "--lengths", "9" * 5000], "expected numbers such as 512,2048"),
        (["run", "--size", "tokens"], "--size 'tokens'; expected a field and numbers, such as tokens=4096,8192"),
        (["report", __file__], "test_report.py' is no file of results"),
        (["run", "--device", "tpu"], "expected auto, cuda or cpu"),
        (["run", "--dtype", "int8"], "expected float16, bfloat16 or float32"),
        (["plan", "--case", "bert"], "expected one of none, t5"),
    ],
)
def test_bad_input_is_named(arguments, expected):
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert shown.exit_code == 2
    assert expected in shown.output


def test_a_report_without_a_picture_says_so(tmp_path):
    path = tmp_path / "results.json"
    records.save(path, made()[:1])
    shown = CliRunner().invoke(app, ["report", str(path)])
    assert shown.exit_code == 0
    assert "No plots: " in shown.output
    assert not list(tmp_path.glob("*.png"))


def test_a_run_on_the_cpu_from_the_command_line_to_the_report(tmp_path):
    path = tmp_path / "results.json"
    tiny = ["--cases", "t5", "--systems", "tilewise-blocked", "--lengths", "32", "--tokens", "32", "--heads", "2"]
    arguments = ["run", "--device", "cpu", *tiny, "--json", str(path), "--rounds", "4"]
    shown = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert "1 cells" in shown.output
    assert not path.exists()
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    cells = [r for r in records.load(path) if r["record"] == "cell"]
    assert [(r["pass"], r["ok"], r["dtype"], r["heads"]) for r in cells] == [
        ("fwd", True, "float32", 2),
        ("bwd", True, "float32", 2),
    ]
    assert {len(side) for r in cells for side in r["samples"].values()} == {4}
    shown = CliRunner().invoke(app, ["report", str(path), "--no-plots"])
    assert "tilewise-blocked" in shown.output
