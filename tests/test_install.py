"""The shape of the package: what importing it pulls in, which parts know which, how long files are, its set-up."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "tilewise"
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path):
    """(absolute module, names or None) of every import in a file, those inside functions too."""
    found = []
    package = ["tilewise", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            found.append((".".join([*base, *filter(None, [node.module])]), [alias.name for alias in node.names]))
    return found


def modules(path):
    """Modules that a file imports; ``from . import x`` counts as the module x."""
    for module, names in imports(path):
        yield module
        yield from (f"{module}.{name}" for name in names or ())


def test_importing_the_package_imports_neither_triton_nor_transformers():
    code = "import sys, tilewise; print([m for m in ('triton', 'transformers', 'rich', 'typer') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("order", ["tilewise, torch.utils.flop_counter", "torch.utils.flop_counter, tilewise"])
def test_flops_are_counted_whichever_is_imported_first(order):
    code = (
        f"import torch, {order}\nq = torch.zeros(1, 2, 8, 4)\n"
        "with torch.utils.flop_counter.FlopCounterMode(display=False) as counter: tilewise.attention(q, q, q)\n"
        "import inspect; assert 'FlopCounterMode' in inspect.getsource(torch.utils.flop_counter)\n"
        "print(counter.get_total_flops())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) == 4 * 2 * 8 * 8 * 4


def test_the_drop_ins_are_found_on_the_package():
    code = (
        "import sys, tilewise; tilewise.patch; tilewise.unpatch; print('transformers' in sys.modules)\n"
        "try: tilewise.nothing\nexcept AttributeError as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines() == ["False", "module 'tilewise' has no attribute 'nothing'"]


def test_reference_blocked_and_triton_never_import_one_another():
    parts = {
        name: [p for p in (PACKAGE / f"{name}.py", *(PACKAGE / name).rglob("*.py")) if p.is_file()]
        for name in ("reference", "blocked", "triton")
    }
    assert parts["reference"]
    assert parts["blocked"]
    for name, files in parts.items():
        others = [f"tilewise.{other}" for other in parts if other != name]
        for path in files:
            wrong = [m for m in modules(path) if any(m == o or m.startswith(f"{o}.") for o in others)]
            assert not wrong, f"{path.name} imports {wrong}"


KERNELS = sorted((PACKAGE / "triton").rglob("*.py"))


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_the_kernels_package_imports_torch_and_triton_only(path):
    outside = {m.split(".")[0] for m in modules(path)} - {"torch", "triton", "tilewise"} - set(sys.stdlib_module_names)
    assert not outside


DROP_INS = sorted((PACKAGE / "models").glob("*.py"))


@pytest.mark.parametrize("path", DROP_INS, ids=lambda path: path.name)
def test_drop_ins_use_public_names_only(path):
    for module, names in imports(path):
        if not module.startswith("tilewise") or module.startswith("tilewise.models"):
            continue
        public = importlib.import_module(module).__all__
        assert names is not None
        assert set(names) <= set(public), f"{path.name} imports {sorted(set(names) - set(public))} from {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_is_longer_than_400_lines_and_each_says_what_lives_there(path):
    text = path.read_text()
    assert text.count("\n") < 400
    assert ast.get_docstring(ast.parse(text)), "no first lines that say what lives there"


def test_the_lock_pins_everything_that_the_package_asks_for():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    marker = r"platform_system == \"Linux\"|python_version < \"3\.14\""
    assert all(re.fullmatch(rf"[A-Za-z0-9._-]+==[^\s;+]+(; ({marker}))?", line) for line in lines), lines
    normal = lambda name: re.sub(r"[-_.]+", "-", name).lower()  # noqa: E731
    pinned = {normal(line.split("==")[0]) for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    for part in (*project["project"]["optional-dependencies"].values(), *project["dependency-groups"].values()):
        wanted += part
    names = {normal(re.match(r"[A-Za-z0-9._-]+", requirement)[0]) for requirement in wanted}
    assert names - pinned == {"tilewise"}
    assert {"torch==2.13.0", 'triton==3.8.0; platform_system == "Linux"'} <= set(lines)


def test_no_test_is_left_out():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    places = [place for path in options["testpaths"] for place in ROOT.glob(path)]
    found = [file for place in places for file in ([place] if place.is_file() else place.rglob("test_*.py"))]
    assert sorted(found) == sorted((ROOT / "tests").rglob("test_*.py"))


@pytest.fixture
def setup_env(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    module = importlib.import_module("setup_env")
    commands, failing = [], []

    def run(*command, check=True):
        commands.append(" ".join(map(str, command)))
        return not any(word in commands[-1] for word in failing)

    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(module, "installed", lambda python: None)
    monkeypatch.setattr(module, "VENV", tmp_path)
    monkeypatch.setattr(module.sys, "platform", "linux")
    module.commands, module.failing = commands, failing
    return module


def test_without_a_gpu_the_cpu_build_is_taken_from_wherever_it_is_found(setup_env, monkeypatch, capsys):
    monkeypatch.setattr(setup_env, "has_gpu", lambda: False)
    assert setup_env.install_torch("python") == setup_env.LOCK
    assert len(setup_env.commands) == 1
    assert "torch==2.13.0+cpu" in setup_env.commands[0]

    setup_env.commands.clear()
    setup_env.failing[:] = ["+cpu"]
    assert setup_env.install_torch("python") == setup_env.LOCK
    assert "--torch-backend=cpu" in setup_env.commands[-1]
    assert "torch==2.13.0" in setup_env.commands[-1]

    setup_env.failing[:] = ["+cpu", "uv"]
    assert "triton" not in setup_env.install_torch("python").read_text()
    assert "torch-backend" not in setup_env.commands[-1]
    assert "several gigabytes" in capsys.readouterr().out


def test_with_a_gpu_the_usual_build_is_taken(setup_env, monkeypatch):
    monkeypatch.setattr(setup_env, "has_gpu", lambda: True)
    lock = setup_env.install_torch("python")
    assert len(setup_env.commands) == 1
    assert setup_env.commands[0].endswith(f"-c {lock} torch==2.13.0 --disable-pip-version-check")
    # That build requires a triton of its own, which the CPU build's lock would forbid.
    lines = setup_env.LOCK.read_text().splitlines()
    assert [line for line in lines if line not in lock.read_text()] == ['triton==3.8.0; platform_system == "Linux"']


@pytest.mark.parametrize(("build", "locked"), [("2.13.0+cpu", True), ("2.13.0", False), ("2.13.0+cu130", False)])
def test_an_installed_torch_stays_and_chooses_the_lock(setup_env, monkeypatch, build, locked):
    monkeypatch.setattr(setup_env, "installed", lambda python: f"torch=={build}")
    assert ("triton==" in setup_env.install_torch("python").read_text()) is locked
    assert setup_env.commands == []


def test_an_old_python_is_refused_with_the_way_out(setup_env, monkeypatch):
    monkeypatch.setattr(setup_env.sys, "version_info", (3, 10, 4))
    with pytest.raises(SystemExit, match=r"Python is 3\.10\.4 .*expected 3\.11 or later.*make PYTHON=python3\.12"):
        setup_env.main()


@pytest.mark.parametrize("version", [(3, 11, 0), (3, 13, 9), (3, 14, 0), (3, 15, 1)])
def test_every_later_python_gets_the_model_of_the_demo(setup_env, monkeypatch, tmp_path, version):
    monkeypatch.setattr(setup_env.sys, "version_info", version)
    monkeypatch.setattr(setup_env, "STAMP", tmp_path / "ready")
    monkeypatch.setattr(setup_env, "has_gpu", lambda: False)
    monkeypatch.setattr(setup_env, "environment_python", lambda: Path(sys.executable))
    setup_env.main()
    apart = [c for c in setup_env.commands if "--ignore-requires-python" in c]
    assert len(apart) == (version >= (3, 14))
    assert all("traceforge-title-model==0.2.0 " in command for command in apart)
    assert (tmp_path / "ready").exists()
