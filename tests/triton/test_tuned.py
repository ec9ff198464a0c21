"""`tilewise bench tune` with a made-up clock; its file, and what is refused in one."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from tilewise import info
from tilewise.bench import tune as tuning
from tilewise.bench.cli import app
from tilewise.triton import config, tuned
from tilewise.triton.config import MEASURED, Limits, Tiles, backward_tiles, forward_tiles, projection_tiles
from tilewise.triton.plan import Facts

H200 = Limits.of((9, 0), 232448, "NVIDIA H200")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No file of the user's, and nothing read before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(tuned.VARIABLE, raising=False)
    tuned._tables.cache_clear()
    yield
    tuned._tables.cache_clear()


def clock(favourites):
    """Every shape takes 1 ms, favourites less; one does not fit."""

    def time(trial, found):
        if trial.shape == (64, 32, 4, 3, 3):
            return None
        return favourites.get((trial.what, trial.kind, trial.N, trial.shape), 1.0)

    return time


def run(favourites, classes=tuple(tuning.CLASSES), said=None):
    return tuning.tune(
        clock(favourites), classes, tuning.PASSES, (512, 4096), (said if said is not None else []).append
    )


def test_nothing_faster_changes_nothing():
    assert run({}) == {}
    assert run({("forward", "plain", 512, (64, 128, 4, 3, 2)): 0.985}) == {}


def test_a_faster_shape_is_taken_from_its_length_on():
    wide = (128, 64, 8, 3, 2)
    said = []
    found = run({("forward", "query", 4096, wide): 0.9}, said=said)
    assert found == {("forward", "query"): ((0, (64, 64, 4, 3, 2)), (4096, wide))}
    assert any(line.startswith("forward query N=4096:") and "takes (128, 64, 8, 3, 2)" in line for line in said)
    # One that wins everywhere replaces entries that change with the length.
    narrow = (64, 64, 4, 3, 2)
    found = run({("forward", "plain", N, narrow): 0.5 for N in (512, 4096)})
    assert found == {("forward", "plain"): ((0, narrow),)}


def test_later_trials_run_with_what_earlier_ones_found():
    wide, seen = (128, 64, 8, 3, 2), {}

    def time(trial, found):
        seen[trial.what] = found
        return 0.5 if trial.shape == wide else 1.0

    tuning.tune(time, ["query"], tuning.PASSES, [512], lambda line: None)
    assert seen["keys"][("forward", "query")] == ((0, wide),)


def test_only_shapes_that_the_kernels_can_take_are_tried():
    for what, kind, _, N in tuning.jobs(tuning.CLASSES, tuning.PASSES, tuning.LENGTHS):
        tried = tuning.shapes(what, kind, N)
        assert len(set(tried)) == len(tried) > 1
        assert [tuned.shape_error(what, kind, shape) for shape in tried] == [None] * len(tried)
    for (what, kind), entries in MEASURED.items():
        assert [tuned.shape_error(what, kind, shape) for _, shape in entries] == [None] * len(entries)


def test_the_file_is_used_by_its_gpu_alone():
    wide = (128, 64, 8, 3, 2)
    before = forward_tiles(64, 2, 4096, "query", H200)
    tuned.write(tuned.default_path(), "NVIDIA H200", {("forward", "query"): ((0, before_tuple(before)), (4096, wide))})
    tuned.write(tuned.default_path(), "NVIDIA H200", {("projection", "query"): ((0, (64, 128, 4, 3)),)})
    tuned.write(tuned.default_path(), "NVIDIA A100", {("keys", "scalar"): ((0, (32, 64, 4, 3, 3)),)})
    assert tuned.path_in_use() == tuned.default_path()
    assert forward_tiles(64, 2, 4096, "query", H200) == Tiles(*wide)
    assert forward_tiles(64, 2, 512, "query", H200) == before
    assert projection_tiles(64, 2, 512, "query", H200.gpu) == (64, 128, 4, 3)
    assert projection_tiles(64, 2, 512, "query", "NVIDIA A100") == (64, 64, 4, 3)
    assert backward_tiles(64, 2, 512, "scalar", True, H200) == Tiles(64, 64, 4, 3, 3)
    other = Limits.of((8, 0), 166912, "NVIDIA A100")
    assert backward_tiles(64, 2, 512, "scalar", True, other) == Tiles(32, 64, 4, 3, 3)


def test_info_says_which_shapes_are_used():
    assert info.environment()["tiles"] is None
    tuned.write(tuned.default_path(), "NVIDIA H200", {("fold", ""): ((0, (64, 64, 4, 4)),)})
    assert info.environment()["tiles"] == str(tuned.default_path())


def before_tuple(tiles):
    return tiles.queries, tiles.keys, tiles.warps, tiles.stages, tiles.band_stages


def test_the_variable_comes_first(monkeypatch, tmp_path):
    tuned.write(tuned.default_path(), "NVIDIA H200", {("forward", "query"): ((0, (128, 64, 8, 3, 2)),)})
    monkeypatch.setenv(tuned.VARIABLE, "builtin")
    assert tuned.path_in_use() is None
    assert forward_tiles(64, 2, 512, "query", H200) == Tiles(64, 64, 4, 3, 2)
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "nowhere.json"))
    tuned._tables.cache_clear()
    with pytest.raises(ValueError, match=r"TILEWISE_TILES is '.*nowhere.json', which is no file; expected"):
        forward_tiles(64, 2, 512, "query", H200)


def test_using_comes_before_every_file():
    with config.using({("forward", "query"): ((0, (64, 128, 4, 3, 2)),)}):
        assert forward_tiles(64, 2, 512, "query", H200) == Tiles(64, 128, 4, 3, 2)
    assert forward_tiles(64, 2, 512, "query", H200) == Tiles(64, 64, 4, 3, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a file of tile shapes"),
        ("[]", r"the file is \[\]; expected an object"),
        ('{"tilewise_tiles": 2}', "tilewise_tiles is 2; expected 1"),
        ({"x": {"sideways": {}}}, r"gpus\['x'\].sideways is \"a pass\"; expected one of forward"),
        ({"x": {"fold": {"query": []}}}, r"gpus\['x'\].fold\['query'\] is \"a class\"; expected one of ''"),
        ({"x": {"keys": {"query": []}}}, r"gpus\['x'\].keys\['query'\] is \[\]; expected pairs \[keys from, shape\]"),
        ({"x": {"keys": {"query": [[5, [64] * 5]]}}}, "expected pairs .* that ascend from 0"),
        ({"x": {"keys": {"query": [[0, [64, 64, 4, 3]]]}}}, r"from 0 keys, is \[64, 64, 4, 3\]; expected 5 integers"),
        ({"x": {"keys": {"query": [[0, [128, 64, 4, 3, 3]]]}}}, "expected queries of 16, 32, 64"),
        ({"x": {"forward": {"query": [[0, [64, 48, 4, 3, 3]]]}}}, "expected keys of 16, 32, 64, 128, 256"),
        ({"x": {"forward": {"query": [[0, [64, 64, 3, 3, 3]]]}}}, "expected warps of 1, 2, 4, 8, 16"),
        ({"x": {"forward": {"query": [[0, [64, 64, 4, 3, 0]]]}}}, "expected stages from 1 to 8"),
    ],
)
def test_a_bad_file_is_named_with_its_key(tmp_path, content, message):
    path = tmp_path / "tiles.json"
    path.write_text(content if isinstance(content, str) else json.dumps({"tilewise_tiles": 1, "gpus": content}))
    with pytest.raises(ValueError, match=re.escape(str(path)) + ": .*" + message):
        tuned.read(path)


def test_the_command_says_what_it_would_do(tmp_path):
    arguments = ["tune", "--dry-run", "--classes", "query", "--passes", "forward,keys", "--lengths", "512"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line.split()[:3] for line in lines[:-1]] == [["forward", "query", "512"], ["keys", "query", "512"]]
    assert lines[-1] == f"11 measurements, results to {tmp_path}/tilewise/tiles.json"
    assert CliRunner().invoke(app, ["tune", "--classes", "shaw"]).exit_code == 2


def test_the_calls_that_are_measured():
    for kind in tuning.CLASSES:
        call = tuning.call_of(kind, 512, "meta")
        assert Facts(call).kind == kind
        assert call.q.shape == (32, 12, 512, 64)
        assert call.q.dtype == torch.float16
