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

__all__ = ["Launched", "collect", "get_ready", "in_order", "run"]

ROOT = Path(__file__).resolve().parent.parent
FILES = tuple(ROOT / f"tests/carried/test_{name}_gpu.py" for name in ("kernels", "models"))
PROCESSES = 6
"""That run tests: each makes a CUDA context, one after another, and then mostly waits for the GPU."""

LONGEST = (
    "test_compiled_blocks", "test_a_cached_generation", "test_a_checkpointed_model", "test_packed_elements", "test_4096"
)  # fmt: skip
"""How the names begin of tests that take longest, longest first; Inductor's come before all others."""


@dataclass(frozen=True)
class Launched:
    """What a test launches: a job for :class:`carried_blocks.Compiler`."""

    test: str
    function: str
    params: dict = field(hash=False)

    def run(self) -> None:
        """Nothing where the test launches no kernel."""
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
                   "seconds": report.duration, "why": why, "process": os.getpid()}  # fmt: skip
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


class _InTurn:
    """Instead of all tests one after another, runs the next of a list that other processes take from, too."""

    def __init__(self, names: list[str], taken) -> None:
        self.names, self.taken, self.failed = names, taken, False

    def _next(self) -> str | None:
        with self.taken.get_lock():
            n = self.taken.value
            self.taken.value += 1
        return self.names[n] if n < len(self.names) else None

    def pytest_runtest_logreport(self, report) -> None:
        self.failed |= report.failed

    def pytest_runtestloop(self, session) -> bool:
        items = {item.nodeid: item for item in session.items}
        # A process whose GPU context is lost would fail all that is left, faster than others can take it.
        while not (self.failed and _lost()) and (name := self._next()) is not None:
            session.config.hook.pytest_runtest_protocol(item=items[name], nextitem=None)
        return True


def _lost() -> bool:
    """Whether this process's GPU context answers every call with an error of an earlier kernel."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _process(names: list[str], taken, path: Path, root: Path) -> None:
    os.chdir(root)
    # Inductor's pool of compilers would be one a process.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import pytest

    options = ["-q", "--tb=short", "-o", "addopts=", "-p", "no:cacheprovider", "--no-header", f"--rootdir={root}"]
    with (path.with_suffix(".log")).open("w") as log, contextlib.redirect_stdout(log):
        pytest.main([*names, *options], plugins=[_Outcomes(path), _InTurn(names, taken)])


def get_ready():
    """A context whose processes have imported PyTorch and Triton by the time they start, without a GPU."""
    context = multiprocessing.get_context("forkserver")
    # Python before 3.13.1 passes over "__main__" here.
    context.set_forkserver_preload(["torch", "triton", "pytest", "tilewise.carried.triton.launch"])
    forkserver.ensure_running()
    return context


def in_order(names: list[str]) -> list[str]:
    """The longest tests first, the others as they are."""

    def rank(name: str) -> int:
        function = name.split("::")[-1]
        return next((n for n, start in enumerate(LONGEST) if function.startswith(start)), len(LONGEST))

    return sorted(names, key=rank)


def run(
    context, jobs: list[Launched], left: Callable[[], float], say: Callable, count: int = PROCESSES, root: Path = ROOT
) -> list[dict]:
    """Run the tests in processes that each take the next one when they are done with one; one record of each test.

    Args:
        context: of :func:`get_ready`.
        jobs: the tests.
        left: seconds until all that still run are stopped.
        say: takes a line.
        count: processes.
        root: the folder that the tests' names begin at.
    """
    names, folder, start = in_order([job.test for job in jobs]), Path(tempfile.mkdtemp()), time.time()
    count, taken = min(count, len(names)), context.Value("i", 0)
    files = [folder / f"{n}.json" for n in range(count)]
    processes = [context.Process(target=_process, args=(names, taken, file, root)) for file in files]
    for process in processes:
        process.start()
    end = time.time() + left()
    for process in processes:
        process.join(max(0.0, end - time.time()))
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    for process in late:
        process.join()
    rows = [json.loads(line) for file in files for line in _lines(file)]
    failed = [r for r in rows if r["outcome"] == "failed"]
    for r in failed[:8]:
        say("failed:", r["test"], r["why"][-500:])
    passed, skipped = (sum(r["outcome"] == outcome for r in rows) for outcome in ("passed", "skipped"))
    ended = {r["test"] for r in rows}
    missing = [name for name in (name.split("::")[-1] for name in names) if name not in ended]
    for r in sorted(rows, key=lambda r: -r["seconds"])[:5]:
        say(f"{r['seconds']:6.1f} s  {r['outcome']:7s} {r['test']}")
    for name in missing[:8]:
        say("not run:", name)
    say(f"tests: {passed} of {len(names)} passed, {len(failed)} failed, {skipped} skipped, {len(missing)} not run, "
        f"{time.time() - start:.0f} s in {count} processes")  # fmt: skip
    return rows + [{"test": name, "outcome": "not run"} for name in missing]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
