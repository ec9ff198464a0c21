"""All evidence for the relative-position kernels on one GPU, most important first, each in a process of its own.

    python benchmarks/relative_all.py OUT [--seconds 650] [--only check,time]

OUT gets a JSON file and a log from each step; a step that fails or runs into its limit costs only itself. What is left
of the total time is shared out in proportion to the steps' limits. A short table comes last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
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
}  # fmt: skip
"""Step ↦ (seconds that it may take of 650, command)."""

TAIL = 6


def command(name: str, out: Path, limit: float, python: str = sys.executable) -> list[str]:
    """The step's command line: compiling may take the larger part of its time, and nothing begins near its end."""
    text = STEPS[name][1].format(json=out / f"relative_{name}.json", compile=int(limit * 0.6), run=int(limit * 0.9))
    script, *arguments = text.split()
    return [python, str(HERE / script), *arguments]


def run(name: str, out: Path, limit: float, words: list[str] | None = None) -> dict:
    """Run a step; its processes end with it."""
    return processes.run(name, words or command(name, out, limit), out / f"relative_{name}.log", limit, TAIL)


def limits(names: list[str], left: float) -> dict[str, float]:
    """Seconds of each step, in proportion to the shares."""
    total = sum(STEPS[name][0] for name in names)
    return {name: left * STEPS[name][0] / total for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=650)
    parser.add_argument("--only", default=",".join(STEPS))
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"--only has {unknown[0]!r}; expected some of {', '.join(STEPS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    end, done = time.monotonic() + arguments.seconds, []
    for position, name in enumerate(names):
        limit = limits(names[position:], end - time.monotonic())[name]
        if limit < 2:
            done.append({"step": name, "status": "no time left", "seconds": 0.0, "tail": []})
            continue
        print(f"== {name}, at most {limit:.0f} s", flush=True)
        done.append(run(name, arguments.out, limit))
        print("\n".join(f"   {line[:200]}" for line in done[-1]["tail"]), flush=True)
        (arguments.out / "relative_all.json").write_text(json.dumps(done, indent=1))
    print(f"{'step':<12}{'s':>6}  status")
    for step in done:
        print(f"{step['step']:<12}{step['seconds']:6.0f}  {step['status']}")
    sys.exit(1 if any(step["status"] != 0 for step in done) else 0)


if __name__ == "__main__":
    main()
