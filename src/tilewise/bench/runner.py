"""Runs the cells of a set: processes that crash alone, limits, progress, and results kept after every cell.

A system that compiles gets a process for each case (or set of kernels), any other one process; all start together and
compile side by side. A file lock then lets one process at a time have the device. On a GPU an oracle process works out
the truths meanwhile; elsewhere processes follow one another, and the first that needs a truth works it out.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path

from . import records as store
from .cells import Cell
from .sets import SETS, bench_set
from .timing import Plan
from .worker import blank

__all__ = ["Limits", "Outcome", "estimate", "run", "select"]


@dataclass(frozen=True)
class Limits:
    """Seconds.

    Attributes:
        measure: one cell's measurement.
        compile: one cell's first run.
        start: a process's start.
        patience: how long processes that are ready wait for those that still compile. These are stopped then, and
            start again at the end; the compilers' caches keep what they had done.
        total: the whole run; None for no limit.
    """

    measure: float = 60.0
    compile: float = 120.0
    start: float = 120.0
    patience: float = 60.0
    total: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What a run did: records written, and keys that the time limit left unmeasured."""

    records: list[dict]
    missing: list[tuple]


def select(
    set_name: str, device: str, *, cases: Sequence[str] | None = None, systems: Sequence[str] | None = None,
    passes: Sequence[str] | None = None, dtype: str | None = None, sizes: Mapping[str, Sequence[int]] | None = None,
) -> list[Cell]:  # fmt: skip
    """The cells that the arguments name; None means the set's defaults for the device.

    Args:
        sizes: size field ↦ values in place of the set's own; cells are the product.

    Raises:
        ValueError: an unknown name, a size that cannot be, or nothing left that the device can run.
    """
    bench, sizes = bench_set(set_name), sizes or {}
    offered = dict.fromkeys(p for case in bench.cases for p in bench.passes(case))
    for what, found, known in (
        ("case", cases, bench.cases),
        ("system", systems, bench.systems),
        ("pass", passes, offered),
        ("size", sizes, bench.sizes(bench.cases[0], device)),
    ):
        for name in found or ():
            if name not in known:
                raise ValueError(f"{what} is {name!r}; expected one of {', '.join(known)}")
    cells = []
    for system in systems or bench.default_systems(device):
        for case in cases or bench.cases:
            wanted = tuple(p for p in bench.passes(case) if passes is None or p in passes)
            if not wanted or not bench.supports(case, system, device):
                continue
            values = {name: sorted(sizes.get(name, own)) for name, own in bench.sizes(case, device).items()}
            for point in product(*values.values()):
                size = dict(zip(values, point, strict=True))
                bench.check_size(size)
                kind = dtype or bench.dtype(device)
                cells.append(Cell(set_name, case, system, size, dtype=kind, passes=wanted, device=device))
    if not cells:
        raise ValueError(f"no system of the set runs these cases on {device}")
    return cells


def estimate(cells: Sequence[Cell], plan: Plan) -> float:
    """Seconds that a run will take, roughly, on a machine with 16 cores."""
    groups = _groups(cells)
    seconds = {"compile": 30.0, "flex": 16.0, "flex-dense": 16.0}
    compiling = [len(g) * seconds.get(g[0].system, 8.0) for g in groups if _compiles(g[0])]
    measuring = sum(0.5 + len(c.passes) * plan.rounds * 2 * plan.round_ms / 2e3 for c in cells)
    start = 20.0 if cells[0].device == "cuda" else 6.0 * len(groups)
    return start + max(max(compiling, default=0.0), sum(compiling) / 16) + measuring


def _compiles(cell: Cell) -> bool:
    return cell.device == "cuda" and bench_set(cell.set).compiles(cell.system)


def _groups(cells: Sequence[Cell], cores: int | None = None) -> list[list[Cell]]:
    """Cells by process: one a system or, where it compiles, one a set of kernels, or more while cores are idle."""
    groups: dict[tuple, list[Cell]] = {}
    for cell in cells:
        kernels = bench_set(cell.set).kernels(cell) if _compiles(cell) else None
        groups.setdefault((cell.system, kernels), []).append(cell)
    compiling = sum(_compiles(g[0]) for g in groups.values())
    parts = max(1, (cores or os.cpu_count() or 1) // max(1, compiling))
    split = []
    for group in groups.values():
        count = min(parts, len(group)) if _compiles(group[0]) else 1
        split += [sorted(group, key=lambda c: c.order)[part::count] for part in range(count)]
    # Slow compilers first.
    return sorted(split, key=lambda g: (not _compiles(g[0]), g[0].system != "compile"))


def _scratch(cells: Sequence[Cell]) -> str | None:
    """Where truths go: memory where there is room for twice their size (some 7 GB for a whole set), else the disk."""
    names = {cell.truth_name(): bench_set(cell.set).truth_bytes(cell) for cell in cells}
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 * sum(names.values()):
        return str(memory)
    return None


@dataclass
class _Process:
    kind: str
    cells: list[Cell]
    handle: subprocess.Popen
    errors: Path
    state: str = "start"
    cell: Cell | None = None
    since: float = field(default_factory=time.monotonic)
    began_compiling: float | None = None
    killed: str | None = None
    late: bool = False
    postponed: bool = False
    listener: threading.Thread | None = None

    def enter(self, state: str, cell: Cell | None = None) -> None:
        self.state, self.cell, self.since = state, cell, time.monotonic()
        if state == "compile" and self.began_compiling is None:
            self.began_compiling = self.since

    def kill(self, why: str) -> None:
        self.killed = why
        # The process leads its own group: compilers that it started go with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.handle.pid, signal.SIGKILL)

    def last_words(self) -> str:
        lines = [line for line in self.errors.read_text(errors="replace").splitlines() if line.strip()]
        telling = [line for line in lines if "Error" in line] or lines
        return telling[-1][:300] if telling else ""


class _Run:
    def __init__(
        self, cells: Sequence[Cell], path: Path, plan: Plan, limits: Limits, say: Callable[[str], None],
        jobs: int | None,
    ):  # fmt: skip
        self.path, self.plan, self.limits, self.say = path, plan, limits, say
        self.device = cells[0].device
        self.bench = bench_set(cells[0].set)
        self.id = uuid.uuid4().hex[:8]
        self.began = self.spoke = time.monotonic()
        self.left = {key for cell in cells for key in cell.keys()}
        self.events: queue.Queue = queue.Queue()
        self.folder = Path(tempfile.mkdtemp(prefix="tilewise-bench-", dir=_scratch(cells)))
        self.alive: list[_Process] = []
        # On the CPU a neighbour that merely starts would disturb the timing.
        self.width = jobs or (len(cells) + 1 if self.device == "cuda" else 1)
        self.later: list[list[Cell]] = []
        self.patient = False
        self.waiting = [("cells", group) for group in _groups(cells)]
        if self.device == "cuda":
            truths = {cell.truth_name(): cell for cell in cells}
            self.waiting.insert(0, ("truth", sorted(truths.values(), key=lambda c: c.order)))
        options = {"plan": asdict(plan), "flush_mib": 256 if self.device == "cuda" else 32}
        environment = store.environment(self.id, self.bench.name, self.device, self.bench.packages(), options)
        self.fresh = [environment]

    def start(self, kind: str, cells: list[Cell]) -> None:
        number = uuid.uuid4().hex[:8]
        job, errors = self.folder / f"{number}.json", self.folder / f"{number}.err"
        what = {"kind": kind, "bench": SETS[self.bench.name], "cells": [c.to_json() for c in cells]}
        where = {"lock": str(self.folder / "lock"), "truths": str(self.folder)}
        job.write_text(json.dumps({**what, **where, "plan": asdict(self.plan)}))
        environment = dict(os.environ, PYTHONUNBUFFERED="1")
        # All processes compile at once: a pool of as many compilers as cores in each would only compete.
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4" if self.device == "cuda" else "1")
        with errors.open("w") as stderr:
            handle = subprocess.Popen(
                [sys.executable, "-m", "tilewise.bench.worker", str(job)],
                stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment, start_new_session=True,
            )  # fmt: skip
        process = _Process(kind, cells, handle, errors)
        self.alive.append(process)
        process.listener = threading.Thread(target=self._listen, args=(process,), daemon=True)
        process.listener.start()

    def _listen(self, process: _Process) -> None:
        with process.handle.stdout as lines:
            for line in lines:
                self.events.put((process, json.loads(line)))
        process.handle.wait()
        self.events.put((process, {"event": "end"}))

    def loop(self) -> None:
        while self.alive or self.waiting or self.later:
            if not self.alive and not self.waiting:
                self.waiting, self.later, self.patient = [("cells", g) for g in self.later], [], True
            while self.waiting and len(self.alive) < self.width:
                self.start(*self.waiting.pop(0))
            try:
                process, event = self.events.get(timeout=0.5)
            except queue.Empty:
                pass
            else:
                self.handle(process, event)
            self.enforce()
            self.status()
            if self.limits.total is not None and time.monotonic() - self.began > self.limits.total:
                self.say(f"time limit of {self.limits.total:.0f} s reached")
                return

    def handle(self, process: _Process, event: dict) -> None:
        match event["event"]:
            case "compile" | "measure" as state:
                process.enter(state, Cell.from_json(event["cell"]))
            case "wait":
                process.enter("wait")
            case "record":
                self.keep(event["record"])
            case "broken":
                process.killed = event["error"]
            case "end":
                self.alive.remove(process)
                self.bury(process)

    def status(self) -> None:
        """Say every 15 s without a record who keeps the others waiting."""
        now = time.monotonic()
        if now - self.spoke < 15.0:
            return
        self.spoke = now
        busy = [p for p in self.alive if p.state != "wait"]
        what = [
            f"{p.state} {p.kind if p.cell is None else p.cell} {now - p.since:.0f} s"
            for p in sorted(busy, key=lambda p: p.since)
        ]
        self.say(f"[{now - self.began:4.0f} s] {len(self.alive) - len(busy)} processes wait for: {'; '.join(what)}")

    def enforce(self) -> None:
        allowed = {"start": self.limits.start, "compile": self.limits.compile, "measure": self.limits.measure}
        ready = [p for p in self.alive if p.state == "wait"]
        if not self.patient and ready and not any(p.state == "measure" for p in self.alive):
            # What has not begun to compile has its own limit (`start`), and a compiler gets all of the patience.
            busy = [p for p in self.alive if p.state in ("start", "compile") and p.killed is None]
            begun = [p.began_compiling for p in busy]
            if None not in begun and all(
                time.monotonic() - at > self.limits.patience for at in (*begun, *(p.since for p in ready))
            ):
                self.postpone()
        for process in self.alive:
            limit = allowed.get(process.state)
            if limit is not None and process.killed is None and time.monotonic() - process.since > limit:
                process.late = True
                process.kill(f"stopped after {limit:.0f} s ({process.state})")

    def postpone(self) -> None:
        """Stop what still compiles, so that the others can be measured."""
        for process in self.alive:
            if process.state == "compile" and process.killed is None:
                process.postponed = True
                process.kill("postponed")
                what = process.kind if process.cell is None else f"{process.cell.case} {process.cell.system}"
                self.say(f"[{time.monotonic() - self.began:4.0f} s] postponed: {what}")

    def bury(self, process: _Process) -> None:
        """Record why a process died, and start another for the cells that it leaves."""
        status = process.handle.returncode
        if process.kind == "truth":
            if status != 0 and not process.postponed:
                self.say(f"oracle process: {process.killed or process.last_words()}")
            return
        rest = [c for c in (self.unmeasured(c) for c in process.cells) if c is not None]
        if not rest:
            return
        if process.postponed:
            self.later.append(rest)
            return
        why = process.killed or f"exit status {status}: {process.last_words()}"
        # Without a cell in hand the process cannot even start; else the first pass without a record is to blame.
        at = [c for c in rest if process.cell is None or replace(c, passes=process.cell.passes) == process.cell]
        alone = []
        for cell in at:
            rest.remove(cell)
            if process.state == "compile" and not process.late and len(cell.passes) > 1:
                alone += [replace(cell, passes=(p,)) for p in cell.passes]
                continue
            lost = cell.passes if process.cell is None or process.state == "compile" else cell.passes[:1]
            for pass_ in lost:
                self.keep(blank(self.bench, cell, pass_, why))
            if len(lost) < len(cell.passes):
                rest.append(replace(cell, passes=cell.passes[len(lost) :]))
        self.waiting += [("cells", group) for group in ([c] for c in alone)]
        if rest:
            self.waiting.append(("cells", sorted(rest, key=lambda c: c.order)))

    def unmeasured(self, cell: Cell) -> Cell | None:
        """The cell with the passes that have no record yet; None if all have one."""
        passes = tuple(p for p, key in zip(cell.passes, cell.keys(), strict=True) if key in self.left)
        return replace(cell, passes=passes) if passes else None

    def keep(self, record: dict) -> None:
        record = {**record, "run": self.id}
        self.left.discard(store.key(record))
        self.fresh.append(record)
        store.save(self.path, store.merge(store.load(self.path), self.fresh))
        self.spoke = time.monotonic()
        self.say(f"[{self.spoke - self.began:4.0f} s] {describe(record)}  ({len(self.left)} left)")

    def close(self) -> None:
        for process in self.alive:
            process.kill("the run ended")
            process.listener.join()
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()


def describe(record: dict) -> str:
    """One line about a record."""
    first = next(iter(store.size(record).values()))
    head = f"{record['case']:<15}{first:>6} {record['pass']:<4} {record['system']:<19}"
    if not record["ok"]:
        return f"{head} no result: {record['error']}"
    line = f"{head} {record['ms']:9.3f} ms"
    if record["tflops"] is not None:
        line += f" {record['tflops']:7.4g} TFLOP/s"
    if "net_ms" in record:
        line += f" ({record['net_ms']:.3f} net)"
    if record["ratio_to_baseline"] is not None:
        line += f"  {record['ratio_to_baseline']:.2f} of {record['baseline']}"
    return line if record["peak_mib"] is None else f"{line}{record['peak_mib']:9.0f} MiB"


def run(
    cells: Sequence[Cell], path: str | Path, *, plan: Plan, limits: Limits, again: bool = False,
    say: Callable[[str], None] = print, jobs: int | None = None,
) -> Outcome:  # fmt: skip
    """Measure cells and keep their records in the file at `path`, which may hold others already.

    Args:
        cells: from :func:`select`.
        path: JSON list of records; rewritten after each record.
        plan: how many samples.
        limits: seconds.
        again: measure cells of which the file has records.
        say: gets each line of progress.
        jobs: processes at a time; default all on a GPU, one on the CPU.
    """
    path = Path(path)
    known = set() if again else {store.key(r) for r in store.load(path) if r.get("record") == "cell"}
    todo = []
    for cell in cells:
        passes = tuple(p for p, k in zip(cell.passes, cell.keys(), strict=True) if k not in known)
        if passes:
            todo.append(replace(cell, passes=passes))
    if len(todo) < len(cells):
        say(f"{len(cells) - len(todo)} of {len(cells)} cells are in {path} already")
    if not todo:
        return Outcome([], [])
    say(f"{len(todo)} cells, about {estimate(todo, plan):.0f} s")
    state = _Run(todo, path, plan, limits, say, jobs)
    try:
        state.loop()
    finally:
        state.close()
    return Outcome(state.fresh[1:], sorted(state.left, key=str))
