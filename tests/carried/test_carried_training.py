"""The training comparison of carried attention runs, pairs its variants, resumes, and joins what processes wrote."""

import importlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZES = {"width": 16, "layers": 8, "heads": 2, "kv-heads": 1, "hidden": 32, "window": 6}
RECIPE = {"tokens": 9 * 4 * 16, "batch": 4, "length": 16, "evaluations": 3, "held-out": 8, "lr": 1e-2}


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("carried_train")


@pytest.fixture
def arguments(tmp_path):
    """Of a run on a text of 32 symbols, each followed by one of two."""
    ids = (np.cumsum(np.random.default_rng(0).choice([3, 7], 3000)) % 32).astype(np.uint16)
    ids[:2500].tofile(tmp_path / "train.bin")
    ids[2500:].tofile(tmp_path / "valid.bin")
    meta = {"vocab": 32, "valid": {"tokens": 500, "bytes": 1500}}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    given = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--device", "cpu", "--dtype", "float32"]
    return [*given, *(f"--{name}={value}" for name, value in (SIZES | RECIPE).items())]


def test_variants_are_paired_with_their_baseline(program, arguments, tmp_path, capsys):
    names = ["window-none", "window-mean4", "hidden-none", "hidden-sum8"]
    program.main([*arguments, "--seeds", "0", "1", "--variants", *names])
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "out/carried_train.json").read_text())
    assert list(record["runs"]) == names
    for base in ("window", "hidden"):
        runs = {name: found for name, found in record["runs"].items() if name.startswith(base)}
        # A carry adds no parameter, and each variant starts from the weights and batches of its baseline.
        assert len({run["parameters"] for found in runs.values() for run in found}) == 1
        losses = [[run["train"] for run in found] for found in runs.values()]
        assert len({round(loss[0][0], 2) for loss in losses}) == 1
        assert losses[0] != losses[1]
        for run in (run for found in runs.values() for run in found):
            assert run["valid"][-1][1] < run["valid"][0][1] < math.log(32) + 0.1
    lines = [
        line.split() for line in printed.splitlines() if line.startswith(("window-", "hidden-")) and "seed" not in line
    ]
    assert [line[0] for line in lines] == names
    assert [float(line[5]) for line in lines if line[0].endswith("-none")] == [0.0, 0.0]

    program.main([*arguments, "--seeds", "0", "1", "--variants", *names])
    assert "seed" not in capsys.readouterr().out.replace("seeds", "")


def test_processes_write_what_one_process_writes(program, arguments, tmp_path):
    for extra in ([], ["--processes", "1"]):
        folder = tmp_path / ("out" if not extra else "other")
        changed = [str(folder) if x == str(tmp_path / "out") else x for x in arguments]
        program.main([*changed, "--variants", "full-sum4", "--seeds", "3", *extra])
    runs = [json.loads((tmp_path / f / "full-sum4.json").read_text())["runs"]["full-sum4"] for f in ("out", "other")]
    assert runs[0][0]["train"] == runs[1][0]["train"]
    assert (tmp_path / "other/carried_train.json").exists()


def test_a_comparison_cut_short_compares_what_all_variants_have_finished(program, arguments, tmp_path, capsys):
    """window-none has one seed more than window-sum4, and nothing of window-sum2 is there."""
    for name, seeds in (("window-none", ["0", "1"]), ("window-sum4", ["1"])):
        assert program.main([*arguments, "--variants", name, "--seeds", *seeds]) == 0
    names = ["window-none", "window-sum2", "window-sum4"]
    capsys.readouterr()
    assert program.main([*arguments, "--variants", *names, "--seconds", "-1", "--processes", "1"]) == 1
    said, head, *rows = capsys.readouterr().out.splitlines()[1:]
    lacking = "not all variants have finished 0; no run of " + ", ".join(
        f"window-{carry}" for carry in ("sum2", "sum8", "mean2", "mean4", "mean8")
    )
    assert said == f"window: 576 tokens, seeds 1; {lacking}"
    assert [row.split()[:2] for row in rows] == [["window-none", "1"], ["window-sum4", "1"]]
    assert head.split()[0] == "variant"


def test_sizes_of_every_variant(program):
    """Windows and groups by layer, and no parameter more than the baseline's."""
    sizes = {name.replace("-", "_"): value for name, value in SIZES.items() if name != "window"}
    counts = {}
    for name in program.VARIANTS:
        options = program.options_of(name, 32, sizes, 6, "stored")
        model = program.Model(options, torch.float32)
        counts.setdefault(name.split("-")[0], set()).add(sum(p.numel() for p in model.parameters()))
        assert options.carried.windows == (6 if name.startswith("window") else None)
        assert len(model.blocks) == 8 // options.carried.layers
        assert [options.refreshes(i) for i in range(8)] == [name.startswith("hidden") and i % 4 == 0 for i in range(8)]
    assert all(len(found) == 1 for found in counts.values())
    assert min(counts["window"]) > min(counts["full"])


def test_arguments_of_a_child(program):
    given = ["--data", "x", "--variants", "a", "b", "--seeds", "0", "1", "--processes=3", "--lr", "1"]
    assert program._without(given, ("--variants", "--processes")) == ["--data", "x", "--seeds", "0", "1", "--lr", "1"]
