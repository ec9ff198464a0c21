"""The tests on a GPU: their kernels compiled side by side by many processes, then the tests run by a few.

Compiled by the tests themselves a kernel that several need is compiled by each, and a test's kernels one after another:
36 s were too few for 14 tests in 12 processes on 16 cores.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path

__all__ = ["Launched", "collect", "get_ready", "run"]

ROOT = Path(__file__).resolve().parent.parent
FILES = tuple(ROOT / f"tests/carried/test_{name}_gpu.py" for name in ("kernels", "models"))
PROCESSES = 6
"""That run tests: each makes a CUDA context, one after another, and then mostly waits for the GPU."""


@dataclass(frozen=True)
class Launched:
    """What a test launches: a job for :class:`carried_blocks.Compiler`."""

    test: str
    function: str
    params: dict = field(hash=False)

    def run(self) -> None:
        """Nothing where the test is none of kernels."""
        if str(FILES[0].parent) not in sys.path:
            sys.path.insert(0, str(FILES[0].parent))
        for file in FILES:
            launched = importlib.import_module(file.stem).LAUNCHED
            if self.function in launched:
                launched[self.function](**self.params).launch()


class _Collected:
    def pytest_collection_finish(self, session) -> None:
        self.items = [
            Launched(item.nodeid, item.originalname, dict(item.callspec.params) if hasattr(item, "callspec") else {})
            for item in session.items
        ]


def collect(select: str) -> list[Launched]:
    """The tests chosen, as pytest's -k does.

    Raises:
        ValueError: none is.
    """
    import pytest

    found, said = _Collected(), io.StringIO()
    # The project's own options would run them in processes.
    options = ["--collect-only", "-o", "addopts=", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    with contextlib.redirect_stdout(said):
        pytest.main([*map(str, FILES), *options, *(["-k", select] if select else [])], plugins=[found])
    if not getattr(found, "items", []):
        raise ValueError(
            f"select is {select!r}; expected a part of a test's name. pytest said: {said.getvalue()[-300:]}"
        )
    return found.items


class _Outcomes:
    """Writes a line of JSON for every test as it ends, so that a run cut short keeps what it found."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            why = str(report.longrepr)[-1500:] if report.failed else ""
            row = {"test": report.nodeid.split("::")[-1], "when": report.when, "outcome": report.outcome,
                   "seconds": report.duration, "why": why}  # fmt: skip
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def _process(names: list[str], path: Path) -> None:
    import pytest

    os.chdir(ROOT)
    with (path.with_suffix(".log")).open("w") as log, contextlib.redirect_stdout(log):
        pytest.main([*names, "-q", "--tb=short", "-p", "no:cacheprovider", "--no-header"], plugins=[_Outcomes(path)])


def get_ready():
    """A context whose processes have imported PyTorch and Triton by the time they start, without a GPU."""
    context = multiprocessing.get_context("forkserver")
    # Python before 3.13.1 passes over "__main__" here.
    context.set_forkserver_preload(["torch", "triton", "pytest", "tilewise.carried.triton.launch"])
    forkserver.ensure_running()
    return context


def run(context, jobs: list[Launched], left: Callable[[], float], say: Callable, count: int = PROCESSES) -> list[dict]:
    """Deal the tests to processes; one record of each test.

    Args:
        context: of :func:`get_ready`.
        jobs: the tests.
        left: seconds until those that still run are stopped.
        say: takes a line.
        count: processes.
    """
    names, folder, start = [job.test for job in jobs], Path(tempfile.mkdtemp()), time.time()
    count = min(count, len(names))
    processes = [context.Process(target=_process, args=(names[n::count], folder / f"{n}.json")) for n in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(1.0, left()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    rows = [json.loads(line) for n in range(count) for line in _lines(folder / f"{n}.json")]
    failed = [r for r in rows if r["outcome"] == "failed"]
    for r in failed[:8]:
        say("failed:", r["test"], r["why"][-500:])
    passed, skipped = (sum(r["outcome"] == outcome for r in rows) for outcome in ("passed", "skipped"))
    missing = sorted({name.split("::")[-1] for name in names} - {r["test"] for r in rows})
    say(f"tests: {passed} of {len(names)} passed, {len(failed)} failed, {skipped} skipped, {len(missing)} not run, "
        f"{time.time() - start:.0f} s in {count} processes")  # fmt: skip
    return rows + [{"test": name, "outcome": "not run"} for name in missing]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
