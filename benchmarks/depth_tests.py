"""The depth tests that need a GPU, dealt to processes that each compile what their tests need.

    python benchmarks/depth_tests.py --out DIR [--processes 12] [--until SECONDS] [--select TEXT]

Compiling takes most of the time, one core a process; the tests themselves are small and share the GPU. Every process
takes the next test when it is done with one; the compiler's own tests come first, since they take longest. Prints what
failed and a line a test, writes DIR/depth_tests.json, and fails if a test failed or was not run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import queue
import subprocess
import sys
import time
from pathlib import Path

import torch
from depth_record import where

ROOT = Path(__file__).resolve().parent.parent
START = time.time()


def say(*words) -> None:
    print(f"[{time.time() - START:.0f}s]", *words, flush=True)


def collected(select: str) -> list[str]:
    """Names of the GPU tests, those of torch.compile first."""
    files = sorted(map(str, (ROOT / "tests/depth").glob("test_*_gpu.py")))
    options = ["--collect-only", "-q", "-o", "addopts=", "-p", "no:cacheprovider", *(["-k", select] if select else [])]
    done = subprocess.run([sys.executable, "-m", "pytest", *files, *options], capture_output=True, text=True, cwd=ROOT)
    names = [line for line in done.stdout.splitlines() if "::" in line]
    if not names:
        raise ValueError(
            f"select: found {select!r}, expected a part of a test's name. pytest said: {done.stdout[-500:]}"
        )
    return sorted(names, key=lambda name: "test_compile" not in name)


def worker(tests, results) -> None:
    """Runs tests until none is left; each gives (name, outcome, seconds, text of a failure)."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Inductor's pool of compilers would be one a process.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.chdir(ROOT)
    import pytest

    while True:
        try:
            name = tests.get_nowait()
        except queue.Empty:
            return
        began, text = time.time(), io.StringIO()
        with contextlib.redirect_stdout(text):
            code = pytest.main([name, "-q", "--tb=short", "-p", "no:cacheprovider", "--no-header", "-o", "addopts="])
        said = text.getvalue()
        outcome = "passed" if code == 0 and " passed" in said else "failed"
        results.put((name, outcome, time.time() - began, "" if outcome == "passed" else said))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--processes", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--until", type=float, default=150.0, help="seconds after which what runs is ended")
    parser.add_argument("--select", default="", help="as pytest's -k")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    names = collected(args.select)
    context = multiprocessing.get_context("spawn")
    tests, results = context.Queue(), context.Queue()
    for name in names:
        tests.put(name)
    processes = [context.Process(target=worker, args=(tests, results)) for _ in range(min(args.processes, len(names)))]
    for process in processes:
        process.start()
    rows: dict[str, dict] = {}
    while len(rows) < len(names) and time.time() - START < args.until:
        try:
            name, outcome, seconds, text = results.get(timeout=1)
        except queue.Empty:
            if not any(process.is_alive() for process in processes):
                break
            continue
        rows[name] = {"test": name.split("/")[-1], "outcome": outcome, "seconds": round(seconds, 1), "text": text}
        if outcome != "passed":
            say("failed:", name, text[-1500:])
    for process in processes:
        # A process that waits for the results' reader, or for the GPU, is not needed any more.
        process.kill()
        process.join()
    left = [name.split("/")[-1] for name in names if name not in rows]
    failed = sum(row["outcome"] != "passed" for row in rows.values())
    for row in sorted(rows.values(), key=lambda row: -row["seconds"])[:5]:
        say(f"{row['seconds']:6.1f} s  {row['outcome']:7s} {row['test']}")
    for name in left:
        say("not run:", name)
    say(f"tests: {len(rows) - failed} of {len(names)} passed, {failed} failed, {len(left)} not run")
    everything = [*rows.values(), *({"test": name, "outcome": "not run"} for name in left)]
    made = where("cuda" if torch.cuda.is_available() else "cpu", "tests", select=args.select)
    (args.out / "depth_tests.json").write_text(json.dumps({**made, "tests": everything}, indent=1) + "\n")
    return 1 if failed or left else 0


if __name__ == "__main__":
    sys.exit(main())
