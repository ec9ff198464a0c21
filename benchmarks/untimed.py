"""Everything that needs a GPU and whose result is no time, side by side: tests, checks, memory checks, training.

    python benchmarks/untimed.py OUT [--only tests] [--seconds 300] [--tokens 3145728]

`tests`: the GPU tests of depth and of carried logits, the error budgets of the relative kernels, compute-sanitizer on
kernels of depth and of relative positions. `train`: the training comparisons of depth and of carried logits (out/text
from prepare_text.py). The programs of a part share the GPU and the processors, so nothing they say of speed counts.
OUT/untimed.json has each program's status, the end of what it printed, and the results that it wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import processes

HERE = Path(__file__).resolve().parent
PYTHON, DEPTH = [sys.executable], ["sh", str(HERE / "depth_all.sh")]

PARTS: dict[str, dict[str, list[str]]] = {
    "tests": {
        "carried": [*PYTHON, "carried_kernels.py", "--out", "{out}", "tests", "--until", "{run}", "--processes", "12"],
        "depth": [*PYTHON, "depth_tests.py", "--out", "{out}", "--until", "{run}", "--processes", "5"],
        "depth-memcheck": [*DEPTH, "{out}", "memcheck={run}"],
        "relative": [*PYTHON, "relative_all.py", "{out}", "--seconds", "{run}", "--only", "check,sanitizer"],
    },
    "train": {
        "carried": [*PYTHON, "carried_train.py", "--data", "../out/text", "--out", "{out}", "--processes", "16",
                    "--tokens", "{tokens}", "--seconds", "{run}"],
        "depth": [*DEPTH, "{out}", "train={run}"],
    },
}  # fmt: skip
"""Part ↦ program ↦ its command, in this folder; for depth_all.sh in the one above."""

LARGEST = 4 << 20
"""Bytes of a result that OUT/untimed.json takes."""


def start(words: list[str], out: Path, limit: float, tokens: int) -> subprocess.Popen:
    """Start a program that ends by itself a little before its limit; it writes to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    words = [w.format(out=out, run=int(limit - 10), tokens=tokens) if "{" in w else w for w in words]
    os.environ["TOKENS"] = str(tokens)  # what depth_all.sh reads
    return processes.begin(words, out / "log.txt", HERE if words[0] == sys.executable else HERE.parent)


def report(out: Path) -> dict:
    """The end of what a program printed, and its results by file name."""
    results = {}
    for file in sorted(out.glob("*.json")):
        if file.stat().st_size <= LARGEST:
            results[file.name] = json.loads(file.read_text())
    return {"tail": (out / "log.txt").read_text(errors="replace").splitlines()[-40:], "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="tests", choices=list(PARTS))
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--tokens", type=int, default=3_145_728, help="of a training run, alike in both comparisons")
    args = parser.parse_args()
    out, began, found = args.out.resolve() / args.only, time.monotonic(), {}
    programs = {name: start(words, out / name, args.seconds, args.tokens) for name, words in PARTS[args.only].items()}
    for name, process in programs.items():
        status = processes.end(process, began + args.seconds - time.monotonic())
        found[name] = {"status": status, "seconds": time.monotonic() - began, **report(out / name)}
        print(f"== {name}: {status}, by {found[name]['seconds']:.0f} s", flush=True)
        print("\n".join(f"   {line[:200]}" for line in found[name]["tail"][-12:]), flush=True)
    (args.out / "untimed.json").write_text(json.dumps(found))
    sys.exit(any(each["status"] != 0 for each in found.values()))


if __name__ == "__main__":
    main()
