"""The command line: info, the demo's options and exit status, and what it says when something is missing."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tilewise
from tilewise import cli, info
from tilewise.demo import show
from tilewise.demo.experiment import Experiment, Row


@pytest.fixture
def invoke():
    def run(*arguments):
        result = CliRunner().invoke(cli._app(), list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})
        # The frame around an error breaks its lines.
        return result.exit_code, re.sub(r"[│╭╮╰╯─\s]+", " ", result.output)

    return run


def test_info_as_json_has_versions_devices_and_every_implementation(invoke):
    result = CliRunner().invoke(cli._app(), ["info", "--json", "--device", "cpu"])
    assert result.exit_code == 0
    facts = json.loads(result.output)
    assert facts["versions"]["torch"].startswith("2.")
    assert facts["devices"][0]["device"] == "cpu"
    lines = {(line["implementation"], line["mechanism"]): line for line in facts["support"]}
    assert lines["blocked", "T5"]["usable"]
    assert not lines["triton", "T5"]["usable"]
    assert "cpu" in lines["triton", "T5"]["reasons"][0]
    assert {implementation for implementation, _ in lines} == {"triton", "blocked", "reference"}


def test_the_version(invoke):
    assert invoke("--version") == (0, f"tilewise {tilewise.__version__} ")


def test_info_as_a_table(invoke):
    code, output = invoke("info", "--device", "cpu")
    assert code == 0
    assert "Transformer-XL" in output
    assert re.search(r"blocked ┃? ?T5 yes", output)


def test_info_prints_names_and_paths_as_they_are(monkeypatch):
    facts = info.environment()
    facts["tiles"] = "/a[/x]/:smile:/" + "t" * 300
    facts["devices"][0]["name"] = "CPU [bold]8[/bold]"
    facts["platform"] = "[/p]"
    support = info.support("cpu")
    support[0]["reasons"] = ["no [/r]"]
    monkeypatch.setattr(info, "environment", lambda: facts)
    monkeypatch.setattr(info, "support", lambda device: support)
    result = CliRunner().invoke(cli._app(), ["info"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert f"\nTile shapes: {facts['tiles']}\n" in result.output
    assert "cpu: CPU [bold]8[/bold] (" in result.output
    assert ", [/p]\n" in result.output
    assert "no [/r]" in result.output


@pytest.mark.parametrize("device", ["nonsense", "cuda:-1", "cuda:99", "xpu:99", "mps:7", "hpu", "vulkan", "meta"])
def test_info_on_a_device_that_is_not_there(device):
    result = CliRunner().invoke(cli._app(), ["info", "--device", device])
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert f"--device: device {device!r} is not" in result.output
    assert "expected a device that PyTorch can use here: cpu" in result.output


def test_info_on_a_gpu_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for device in ("cuda", "cuda:0", "xpu"):
        result = CliRunner().invoke(cli._app(), ["info", "--device", device])
        assert result.exit_code == 2
        assert result.output == (
            f"tilewise: --device: device {device!r} is not on this machine; expected a device that PyTorch can use "
            "here: cpu\n"
        )


def test_info_on_a_device_that_fails(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("CUDA error: out of memory\nCompile with ...")

    monkeypatch.setattr(torch, "zeros", fail)
    result = CliRunner().invoke(cli._app(), ["info", "--device", "cpu"])
    assert result.exit_code == 2
    assert result.output == "tilewise: --device: CUDA error: out of memory\n"


@pytest.fixture
def forbidden(monkeypatch):
    """The demo may not start."""

    def start(*args, **kwargs):
        raise AssertionError("the demo started")

    monkeypatch.setattr(show, "demo", start)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "512,x"], "--lengths is '512,x'; expected numbers of tokens from 64 on"),
        (["--lengths", "8"], "--lengths is '8'; expected numbers of tokens from 64 on"),
        (["--lengths", "٦٤"], "--lengths is '٦٤'; expected numbers of tokens from 64 on"),
        (["--lengths", "512,６４"], "--lengths is '512,６４'; expected numbers of tokens from 64 on"),
        (["--lengths", "64²"], "--lengths is '64²'; expected numbers of tokens from 64 on"),
        (["--lengths", "9" * 5000], "9'; expected numbers of tokens from 64 on"),
        (["/nowhere/text"], "'/nowhere/text' does not exist"),
        (["--impl", "foo"], "--impl is 'foo'; expected one that can run the demo's model, fp32 on the CPU: 'auto', 'b"),
        (["--impl", "triton"], "--impl is 'triton', which cannot run the demo's model: "),
        (["--budget", "-5"], "--budget is -5 seconds; expected more than 0"),
        (["--budget", "0"], "--budget is 0 seconds; expected more than 0"),
        (["--budget", "nan"], "--budget is nan seconds; expected more than 0"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(invoke, forbidden, arguments, message):
    code, output = invoke("demo", *arguments)
    assert code == 2
    assert message in output


def test_triton_is_refused_with_the_reasons(invoke, forbidden):
    reasons = tilewise.explain(*[torch.zeros(1, 6, 64, 64)] * 3)["triton"]
    assert reasons
    assert "; ".join(reasons) in invoke("demo", "--impl", "triton")[1]


@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("folder.png", ", a folder; expected a file that can be written, such as "),
        ("text/x.png", "; expected a file that can be written (Not a directory: "),
        ("text/deep/x.png", "; expected a file that can be written (Not a directory: "),
        ("/proc/x/y.png", "; expected a file that can be written (No such file or directory: '/proc/x')"),
        ("x" * 300 + ".png", "; expected a file that can be written (File name too long: "),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_anything_starts(
    monkeypatch, forbidden, tmp_path, option, path, why
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "text").write_text("Kept.")
    result = CliRunner().invoke(cli._app(), ["demo", option, path])
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert result.output.startswith(f"tilewise: {option} is {path!r}{why}")
    assert (tmp_path / "text").read_text() == "Kept."


@pytest.mark.parametrize("name", ["p.xyz", "p", "p.png.txt"])
def test_a_picture_of_an_unknown_kind_is_refused_before_anything_starts(invoke, forbidden, tmp_path, name):
    code, output = invoke("demo", "--plot", str(tmp_path / "new" / name))
    assert code == 2
    assert f"--plot is '{tmp_path}/new/{name}'; expected a name that ends in one of .png, .pdf, .svg" in output
    assert ".png'" in output
    assert not (tmp_path / "new").exists()


def test_checking_a_path_leaves_files_links_and_pipes_as_they_are(tmp_path):
    old, link, pipe, new = (tmp_path / name for name in ("old", "link", "pipe", "folder/new"))
    old.write_text("Kept.")
    link.symlink_to(tmp_path / "nothing")
    os.mkfifo(pipe)
    for path in (old, link, pipe, new):
        cli._check_output("--json", path, (), "demo.json")
    assert old.read_text() == "Kept."
    assert link.is_symlink()
    assert not link.exists()
    assert pipe.is_fifo()
    assert new.parent.is_dir()
    assert not new.exists()


def test_a_file_that_is_not_a_text_or_too_short(invoke, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"\xff\xfe\x00")
    code, output = invoke("demo", str(file))
    assert code == 2
    assert "is not UTF-8 text" in output
    file.write_text("Short.")
    code, output = invoke("demo", str(file))
    assert code == 2
    assert re.search(r"has \d+ tokens; expected at least 64", output)


def test_a_text_that_fails_while_it_is_read_is_refused_in_a_line(monkeypatch, tmp_path):
    def fail(self, **kwargs):
        raise OSError(5, "Input/output error")

    (tmp_path / "text").touch()
    monkeypatch.setattr(Path, "read_text", fail)
    result = CliRunner().invoke(cli._app(), ["demo", str(tmp_path / "text"), "--plot", str(tmp_path / "p.png")])
    assert result.exit_code == 2
    assert result.output == (
        f"tilewise: the text is '{tmp_path}/text', which cannot be read (Input/output error); expected a text file\n"
    )


@pytest.mark.parametrize(
    ("difference", "status", "exact"), [(1e-6, 0, True), (0.0, 0, True), (1e-3, 1, False), (None, 3, None)]
)
def test_the_exit_status_and_the_json_say_whether_it_was_exact(
    invoke, monkeypatch, tmp_path, difference, status, exact
):
    same = None if difference is None else True
    experiment = Experiment(
        [Row(64, "transformers", 2.0, 1.0, 9.0), Row(64, "tilewise", 1.0, 0.5, 3.0, difference, same)],
        {"workers": {"tilewise": {"memory_method": "m"}, "transformers": {"attention": "sdpa"}}},
    )
    monkeypatch.setattr(show, "run", lambda *args, **kwargs: experiment)
    path, picture = tmp_path / "new" / "figures.json", tmp_path / "other" / "p.svg"
    code, output = invoke("demo", "--json", str(path), "--plot", str(picture))
    assert code == status
    assert str(path) in output
    assert picture.parent.is_dir()
    figures = json.loads(path.read_text())
    assert figures["exact"] is exact
    assert figures["rows"][1] == {
        "n": 64, "system": "tilewise", "seconds": 1.0, "encode_seconds": 0.5, "peak_mib": 3.0,
        "max_abs_diff": difference, "tokens_equal": same, "note": "", "tokens": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("absent", "arguments", "install"),
    [
        ("typer", [], "tilewise[cli]"),
        ("onnx", ["demo"], "tilewise[demo]"),
        ("traceforge_title_model", ["demo"], "tilewise[demo]"),
    ],
)
def test_a_missing_extra_is_named_with_the_way_to_install_it(monkeypatch, capsys, absent, arguments, install):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == absent else find(name, *rest))
    monkeypatch.setattr("sys.argv", ["tilewise", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert f"needs {absent}, not installed here. Install with: pip install '{install}'" in capsys.readouterr().err


def test_a_run_that_cannot_start_is_not_taken_for_outputs_that_differ(invoke, monkeypatch, tmp_path):
    def fail(*args, **kwargs):
        raise RuntimeError("the worker process ended with status 1: no")

    monkeypatch.setattr(show, "demo", fail)
    code, output = invoke("demo", "--plot", str(tmp_path / "p.png"))
    assert code == 3
    assert "the demo could not run: the worker process ended with status 1: no" in output


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("name", ["text.txt", "my text.txt", 'Newton\'s $HOME "x" & y;z.txt', "-x.txt", ""])
def test_make_demo_hands_on_the_name_of_the_text_as_it_is(tmp_path, name):
    shutil.copy(Path(__file__).parents[1] / "Makefile", tmp_path)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "setup_env.py").touch()
    command = tmp_path / ".venv" / "bin" / "tilewise"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    command.chmod(0o755)
    made = subprocess.run(
        ["make", "--silent", "demo", f"FILE={name}", f"PYTHON={sys.executable}"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    options = ["demo", "--plot", "out/demo.png", "--json", "out/demo.json"]
    assert made.stdout.splitlines() == [*options, *(["--", name] if name else [])]
