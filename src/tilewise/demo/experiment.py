"""The comparison: one document at several lengths, one worker a system, and what came out as data."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import mechanisms as t
from ..api import IMPLEMENTATIONS
from ..info import explain
from . import memory
from .worker import SYSTEMS

__all__ = ["LENGTHS", "TOLERANCE", "Experiment", "Row", "check", "dense_bytes", "run"]

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOLERANCE = 1e-4
"""How far the encoder's output, in fp32, may be from transformers'."""

_HEADS = 6
_QUADRATIC = 2048
"""From here on attention is most of the work, so that the time at one length foretells the next."""


@dataclass
class Row:
    """One length of one system. What was not measured is None, and `note` says why.

    Attributes:
        n: tokens of the document.
        system: ``transformers`` or ``tilewise``.
        seconds: encoding and generating; `encode_seconds` is the first part.
        peak_mib: see :data:`tilewise.demo.memory.METHOD`.
        max_abs_diff: of the encoder's output, from transformers'; None for transformers itself.
        tokens_equal: whether the tokens generated are transformers'; None for transformers itself.
    """

    n: int
    system: str
    seconds: float | None = None
    encode_seconds: float | None = None
    peak_mib: float | None = None
    max_abs_diff: float | None = None
    tokens_equal: bool | None = None
    note: str = ""
    tokens: list[int] = field(default_factory=list, repr=False)


@dataclass
class Experiment:
    """All rows, and whether tilewise agreed with transformers wherever both ran."""

    rows: list[Row] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def exact(self) -> bool | None:
        """Whether every length that was compared is within :data:`TOLERANCE` and has the same tokens, and tilewise ran
        at every length; None if no length was compared."""
        ours = [row for row in self.rows if row.system == "tilewise"]
        compared = [row for row in ours if row.max_abs_diff is not None]
        if not compared:
            return None
        # A NaN difference is not ≤ the tolerance.
        agree = all(row.max_abs_diff <= TOLERANCE and row.tokens_equal for row in compared)
        return agree and all(row.seconds is not None for row in ours)

    def row(self, n: int, system: str) -> Row | None:
        return next((row for row in self.rows if (row.n, row.system) == (n, system)), None)

    def as_dict(self) -> dict[str, Any]:
        """What ``--json`` writes."""
        return {"exact": self.exact, "tolerance": TOLERANCE, "rows": list(map(asdict, self.rows)), **self.environment}


def dense_bytes(n: int) -> int:
    """What transformers needs at its peak for n tokens: the bias of all heads, [6, n, n] in fp32, once as it was
    gathered and once in the order in which the operator takes it."""
    return 2 * 4 * _HEADS * n * n


def check(impl: str, budget: float) -> None:
    """Check what a run needs, before anything is loaded.

    Args:
        impl: ``"auto"``, or an implementation that can run the demo's model: T5 in fp32 on the CPU.
        budget: seconds, more than 0.

    Raises:
        ValueError: naming the argument, the value found and the value expected.

    Example:
        >>> check("blocked", 60.0)
    """
    q = torch.zeros(1, _HEADS, 64, 64)
    reasons = explain(q, q, q, terms=t.T5(q.new_zeros(32, _HEADS)))
    able = ", ".join(repr(name) for name in ("auto", *IMPLEMENTATIONS) if not reasons.get(name))
    if impl not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"impl is {impl!r}; expected one that can run the demo's model, fp32 on the CPU: {able}")
    if reasons.get(impl):
        raise ValueError(
            f"impl is {impl!r}, which cannot run the demo's model: {'; '.join(reasons[impl])}; expected one of {able}"
        )
    # NaN is not > 0.
    if not budget > 0:
        raise ValueError(f"budget is {budget:g} seconds; expected more than 0")


def run(
    ids: list[int],
    lengths: tuple[int, ...] = LENGTHS,
    *,
    new_tokens: int = 16,
    impl: str = "auto",
    budget: float = 160.0,
    progress: Callable[[Experiment, str], None] = lambda experiment, doing: None,
) -> Experiment:
    """Run both systems at every length.

    Args:
        ids: the document's tokens, at least as many as the longest length.
        lengths: rising.
        new_tokens: how many tokens to generate at most.
        impl: for the patched model.
        budget: seconds for all measurements, from when both systems have loaded the model. transformers is not started
            at a length where they are over or where, by its time at the length before, it would go beyond them. The
            first length is run by both systems in any case.
        progress: called with the rows so far and with what is being done, "" when a row was finished.

    Raises:
        RuntimeError: a worker could not load the model.
    """
    experiment, began = Experiment(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="tilewise-demo-") as folder:
        tokens = Path(folder) / "ids.npy"
        np.save(tokens, np.asarray(ids, dtype=np.int64))
        progress(experiment, "loading the model, once for each system")
        with _worker("tilewise", impl, folder) as tilewise, _worker("transformers", impl, folder) as transformers:
            workers = {"tilewise": tilewise, "transformers": transformers}
            experiment.environment["workers"] = {name: worker.receive() for name, worker in workers.items()}
            loaded = time.perf_counter()
            for n in lengths:
                saved = {system: Path(folder) / f"{system}.npy" for system in SYSTEMS}
                for system, worker in workers.items():
                    row = Row(n, system)
                    # Without one comparison a run would say nothing, however short the time.
                    left = math.inf if n == lengths[0] else budget - (time.perf_counter() - loaded)
                    row.note = _hindrance(experiment, n, left, worker) if system == "transformers" else ""
                    if not row.note:
                        progress(experiment, f"{system}, {n:,} tokens")
                        request = {"ids": str(tokens), "n": n, "new_tokens": new_tokens, "hidden": str(saved[system])}
                        _measure(row, worker, request)
                    experiment.rows.append(row)
                    progress(experiment, "")
                _compare(experiment, n, saved)
                progress(experiment, "")
    experiment.environment["total_seconds"] = time.perf_counter() - began
    return experiment


def _hindrance(experiment: Experiment, n: int, left: float, worker: _Worker) -> str:
    """Why transformers is not run at n tokens; "" if it is."""
    need, free = dense_bytes(n) / 2**30, memory.available() / 2**30
    if worker.ended:
        return "not run: the process ended at the length before"
    if need > 0.9 * free:
        return f"not run: needs {need:.1f} GiB, {free:.1f} GiB available"
    if left <= 0:
        return "not run: no time left of the budget"
    done = [row for row in experiment.rows if row.system == "transformers" and row.seconds is not None]
    if done and done[-1].n >= _QUADRATIC:
        ratio, before = n / done[-1].n, done[-1]
        expected = before.encode_seconds * ratio**2 + (before.seconds - before.encode_seconds) * ratio
        if expected > left:
            return f"not run: about {_rounded(expected)} s expected, {_rounded(left)} s left of the time budget"
    return ""


def _rounded(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 1 else f"{seconds:.1g}"


def _measure(row: Row, worker: _Worker, request: dict[str, Any]) -> None:
    try:
        reply = worker.ask(request)
    except (RuntimeError, BrokenPipeError) as error:
        row.note = f"failed: {error}"
        return
    if "error" in reply:
        row.note = f"failed: {reply['error'].splitlines()[0]}"
        return
    row.encode_seconds, row.peak_mib, row.tokens = reply["encode_seconds"], reply["peak_mib"], reply["tokens"]
    row.seconds = row.encode_seconds + reply["generate_seconds"]


def _compare(experiment: Experiment, n: int, saved: dict[str, Path]) -> None:
    ours, theirs = experiment.row(n, "tilewise"), experiment.row(n, "transformers")
    if ours.seconds is None or theirs.seconds is None:
        return
    a, b = (np.load(saved[row.system]) for row in (ours, theirs))
    ours.max_abs_diff = float(np.abs(a - b).max())
    ours.tokens_equal = ours.tokens == theirs.tokens


@dataclass
class _Worker:
    process: subprocess.Popen
    errors: Path

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.receive()

    def receive(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        code = self.process.wait()
        words = self.errors.read_text().strip().splitlines()
        # −9 is the signal that the system sends a process when memory runs out.
        why = "memory ran out" if code == -9 else words[-1] if words else "without a word"
        raise RuntimeError(f"the worker process ended with status {code}: {why}")


@contextmanager
def _worker(system: str, impl: str, folder: str) -> Iterator[_Worker]:
    errors = Path(folder) / f"{system}.err"
    with open(errors, "w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "tilewise.demo.worker", system, impl],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, text=True,
        )  # fmt: skip
    try:
        yield _Worker(process, errors)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
