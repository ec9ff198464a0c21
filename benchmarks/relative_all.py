"""All evidence for the relative-position kernels on one GPU, most important first, each in a process of its own.

    python benchmarks/relative_all.py OUT [--seconds 740] [--only check,time]

OUT gets a JSON file and a log from each step; a step that fails or runs into its limit costs only itself. What is left
of the total time is shared out in proportion to the steps' limits. A short table comes last.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import processes

HERE = Path(__file__).resolve().parent

STEPS = {
    "check": (110, "relative_kernels.py check --compile-seconds {compile} --seconds {run} --out {json}"),
    "time": (120, "relative_kernels.py time extra --lengths 128,256,512,1024,2048,8192 --compile-seconds {compile} "
                 "--seconds {run} --out {json}"),
    "numerics": (110, "relative_numerics.py --lengths 1024,4096,8192,16384 --compile-seconds {compile} "
                      "--seconds {run} --out {json}"),
    "ablations": (80, "relative_ablations.py --lengths 512,8192 --compile-seconds {compile} --seconds {run} "
                      "--out {json}"),
    "sanitizer": (120, "relative_memcheck.py --tools memcheck,racecheck --compile-seconds {compile} --seconds {run} "
                       "--out {json}"),
    "traffic": (80, "relative_traffic.py --compile-seconds {compile} --seconds {run} --out {json}"),
    "scaling": (60, "relative_scaling.py --compile-seconds {compile} --seconds {run} --out {json}"),
    "first_call": (60, "relative_first_call.py --seconds {run} --out {json}"),
}  # fmt: skip
"""Step ↦ (seconds that it may take of 740, command)."""

TAIL = 6


def command(name: str, out: Path, limit: float, python: str = sys.executable) -> list[str]:
    """The step's command line: compiling may take the larger part of its time, and nothing begins near its end."""
    text = STEPS[name][1].format(json=out / f"relative_{name}.json", compile=int(limit * 0.6), run=int(limit * 0.9))
    script, *arguments = text.split()
    return [python, str(HERE / script), *arguments]


def run(name: str, out: Path, limit: float, words: list[str] | None = None) -> dict:
    """Run a step; its processes end with it."""
    return processes.run(name, words or command(name, out, limit), out / f"relative_{name}.log", limit, TAIL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=740)
    parser.add_argument("--only", default=",".join(STEPS))
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"--only has {unknown[0]!r}; expected some of {', '.join(STEPS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    shares = {name: STEPS[name][0] for name in names}
    step = lambda name, limit: run(name, arguments.out, limit)  # noqa: E731
    sys.exit(processes.in_turn(shares, arguments.seconds, step, arguments.out / "relative_all.json"))


if __name__ == "__main__":
    main()
