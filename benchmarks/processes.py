"""Programs and functions in processes of their own, with limits: one that fails or hangs costs only itself."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

HERE = Path(__file__).resolve().parent


def begin(words: list[str], log: Path, folder: Path | None = None) -> subprocess.Popen:
    """Start a program of this repository; what it prints goes to `log`. Raises FileNotFoundError if there is none."""
    path = os.pathsep.join(filter(None, (str(HERE.parent / "src"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    environment["PYTHON"] = sys.executable
    with open(log, "wb") as file:
        return subprocess.Popen(
            words, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def end(process: subprocess.Popen, limit: float) -> int | str:
    """Its exit status, or that it was stopped, with all that it started, after so many seconds more."""
    try:
        return process.wait(timeout=max(0.1, limit))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"stopped after {limit:.0f} s"


def run(name: str, words: list[str], log: Path, limit: float, tail: int) -> dict:
    """Run a step: its name, status, seconds, and the last lines that it printed."""
    start = time.monotonic()
    try:
        process = begin(words, log)
    except FileNotFoundError as error:
        return {"step": name, "status": f"no {error.filename} here", "seconds": 0.0, "tail": []}
    status = end(process, limit)
    lines = log.read_text(errors="replace").splitlines()[-tail:]
    return {"step": name, "status": status, "seconds": time.monotonic() - start, "tail": lines}


def in_turn(
    shares: dict[str, float], seconds: float, step: Callable[[str, float], dict], record: Path, least: float = 2.0
) -> int:
    """Run step(name, limit) for each name, in their order; 1 if one failed or had no time, else 0.

    Seconds that are left go to the steps that are left, by their shares; with a limit below `least` a step is not
    begun. `record` gets what all have returned, as :func:`run` does; a table comes last.
    """
    end, done, left = time.monotonic() + seconds, [], sum(shares.values())
    for name, share in shares.items():
        limit = (end - time.monotonic()) * share / left
        left -= share
        if limit < least:
            done.append({"step": name, "status": "no time left", "seconds": 0.0, "tail": []})
        else:
            print(f"== {name}, at most {limit:.0f} s", flush=True)
            done.append(step(name, limit))
            print("\n".join(f"   {line[:220]}" for line in done[-1]["tail"]), flush=True)
        record.write_text(json.dumps(done, indent=1))
    print(f"{'step':<12}{'s':>6}  status")
    for each in done:
        print(f"{each['step']:<12}{each['seconds']:6.0f}  {each['status']}", flush=True)
    return 1 if any(each["status"] != 0 for each in done) else 0


def _worker(function: Callable, pipe: Connection) -> None:
    """Run jobs until none comes, or one fails: what it left behind would spoil the next."""
    while (job := pipe.recv()) is not None:
        try:
            pipe.send((function(*job), None))
        except Exception:
            pipe.send((None, traceback.format_exc()[-600:]))
            return


def isolated(
    function: Callable, jobs: list[tuple], until: float, most: int
) -> Iterator[tuple[tuple, object, str | None]]:
    """(job, what function(*job) returned, or None and why not), as jobs end; `most` processes at a time.

    A process takes one job after the other until one fails; then a fresh one takes its place. `until` is a time of the
    clock: what has not ended then is stopped.
    """
    context = multiprocessing.get_context("forkserver")
    # Forked from a process that has imported it, one starts in a tenth of the seconds.
    context.set_forkserver_preload(["torch"])
    todo, running = list(jobs), {}

    def start() -> tuple:
        ours, theirs = context.Pipe()
        process = context.Process(target=_worker, args=(function, theirs), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def give(pipe: Connection, process) -> None:
        running[pipe] = process, todo.pop(0)
        # Of a process that has ended since its last job, the next read of the pipe tells the status.
        with suppress(BrokenPipeError):
            pipe.send(running[pipe][1])

    try:
        while todo or running:
            while todo and len(running) < most and time.time() < until:
                give(*start())
            # `until` may be infinite, which no system call waits for.
            ended = wait(list(running), timeout=min(60.0, max(0.0, until - time.time()))) if running else []
            for pipe in ended:
                process, job = running.pop(pipe)
                try:
                    value, why = pipe.recv()
                except EOFError:
                    process.join()
                    value, why = None, f"its process ended with status {process.exitcode}"
                if why is None and todo and time.time() < until:
                    give(pipe, process)
                elif why is None:
                    pipe.send(None)
                yield job, value, why
            if not ended and time.time() >= until:
                for job in [*(job for _, job in running.values()), *todo]:
                    yield job, None, "not run: out of time"
                return
    finally:
        for process, _ in running.values():
            process.kill()
            process.join()
