"""Set up .venv for this checkout: the locked packages, the right build of torch, the package itself (editable).

Runs again in a moment when nothing changed. Needs Python 3.11 or later and its own standard library, nothing else.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
LOCK = ROOT / "constraints.txt"
STAMP = VENV / "tilewise-ready"
UV = "uv==0.13.9"


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - it runs before pip checks the version
        found = ".".join(map(str, sys.version_info[:3]))
        sys.exit(f"Python is {found} ({sys.executable}); expected 3.11 or later. Choose one: make PYTHON=python3.12")
    fingerprint = current_fingerprint()
    if STAMP.is_file() and STAMP.read_text() == fingerprint:
        return
    python = environment_python()
    if not python.exists():
        say("making a virtual environment in .venv")
        create()
    lock = install_torch(python)
    say("installing the locked packages")
    pip(python, "install", "--no-deps", "-r", lock)
    if sys.version_info >= (3, 14):
        # The demo's model is data in a wheel; only its metadata stops at Python 3.13.
        pip(python, "install", "--no-deps", "--ignore-requires-python", locked("traceforge-title-model"))
    say("installing tilewise from this checkout")
    pip(python, "install", "--no-deps", "--no-build-isolation", "-e", ROOT)
    pip(python, "check")
    STAMP.write_text(fingerprint)
    say("ready")


def current_fingerprint() -> str:
    """Changes when the lock, the package's metadata, this program or the interpreter does."""
    parts = [LOCK.read_bytes(), (ROOT / "pyproject.toml").read_bytes(), Path(__file__).read_bytes()]
    return hashlib.sha256(b"\0".join([*parts, sys.version.encode(), str(ROOT).encode()])).hexdigest()


def environment_python() -> Path:
    return VENV / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def create() -> None:
    try:
        venv.create(VENV, with_pip=True)
    except subprocess.CalledProcessError:
        sys.exit(
            "Python could not make a virtual environment with pip: its venv module is incomplete. "
            "On Debian and Ubuntu: apt install python3-venv"
        )


def install_torch(python: Path) -> Path:
    """The locked version: its CPU build on a Linux machine without an NVIDIA GPU, the usual build elsewhere.

    Returns:
        The lock for all other packages: the usual build for Linux asks for one version of triton, which then stays.
    """
    wanted = locked("torch")
    if (found := installed(python)) is not None and found.split("+")[0] == wanted:
        return LOCK if found.endswith("+cpu") else without_triton()
    if sys.platform == "linux" and not has_gpu():
        say(f"installing {wanted}, CPU build")
        if pip(python, "install", "-qqq", "-c", LOCK, f"{wanted}+cpu", check=False):
            return LOCK
        # pip's index has the CUDA build alone; uv knows where torch's other builds are.
        say(f"pip is not configured with a CPU build; trying {UV}")
        uv = (python, "-m", "uv", "pip", "install", "-qq", "--python", python, "--torch-backend=cpu")
        if pip(python, "install", "-q", UV, check=False) and run(*uv, "-c", LOCK, wanted, check=False):
            return LOCK
        say("no CPU build was found: installing the usual one, several gigabytes with its CUDA libraries")
    else:
        say(f"installing {wanted}")
    lock = without_triton()
    pip(python, "install", "-c", lock, wanted)
    return lock


def without_triton() -> Path:
    """A copy of the lock that leaves the version of triton to torch."""
    path = VENV / "lock-without-triton.txt"
    lines = LOCK.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("triton==")))
    return path


def locked(package: str) -> str:
    """``package==version`` as the lock has it, without its marker."""
    lines = LOCK.read_text().splitlines()
    return next(line.partition(";")[0].strip() for line in lines if line.startswith(f"{package}=="))


def installed(python: Path) -> str | None:
    """``torch==version``, the build's name with it; None if it is not there."""
    code = "from importlib.metadata import version; print(version('torch'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return f"torch=={found.stdout.strip()}" if found.returncode == 0 else None


def has_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool], capture_output=True).returncode == 0


def pip(python: Path, *arguments: str | Path, check: bool = True) -> bool:
    return run(python, "-m", "pip", *arguments, "--disable-pip-version-check", check=check)


def run(*command: str | Path, check: bool = True) -> bool:
    """Whether it succeeded. Where it had to (`check`), failure ends this program."""
    code = subprocess.run(list(map(str, command))).returncode
    if check and code:
        sys.exit(f"set-up failed (status {code}) at: {' '.join(map(str, command))}")
    return code == 0


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


if __name__ == "__main__":
    main()
