"""The 3B model's training step with carried scores on one GPU: checks, where its time goes, and the set's step cells.

    python benchmarks/carried_all.py OUT [--seconds 245] [--only smoke,step]

Most important first, each in a process of its own: `smoke` meets every kernel once, `step` says what host and GPU do in
a step (carried_step.py), `set` times steps beside PyTorch's attention and checks them against fp64, `blocks` is the
attention of four layers alone, with the host's time. A step that fails or runs into its limit costs only itself; what
is left of the seconds is shared out in proportion.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import processes

HERE = Path(__file__).resolve().parent
SYSTEMS = "no-carry,tilewise,tilewise-mixed"
CLI = "from tilewise.bench.cli import app; app()"

STEPS: dict[str, tuple[int, list[str]]] = {
    "smoke": (60, ["carried_kernels.py", "--out", "{out}", "tests", "--select", "smoke", "--until", "{run}"]),
    "step": (45, ["carried_step.py", "--out", "{out}/carried_step.json", "--seconds", "{run}"]),
    "set": (105, ["-c", CLI, "run", "--set", "carried", "--cases", "step,step-graph", "--systems", SYSTEMS,
                 "--size", "window=0", "--json", "{out}/carried_steps.json", "--time-limit", "{run}"]),
    "blocks": (35, ["carried_kernels.py", "--out", "{out}", "blocks", "--shapes", "4096", "8192",
                    "--without", "recompute", "flash", "mixed, cuDNN first", "--until", "{run}"]),
}  # fmt: skip
"""Step ↦ (its share of the seconds, command). 36 s were too few for `smoke`, 50 s reached 5 of 12 cells of `set`, where
plain attention needs no cell: it runs in every other's rounds."""

TAIL = {"smoke": 3, "step": 60, "set": 30, "blocks": 14}


def command(name: str, out: Path, limit: float) -> list[str]:
    """The step's command line; nothing new begins near its end."""
    words = [w.format(out=out, run=int(limit * 0.85)) if "{" in w else w for w in STEPS[name][1]]
    return [sys.executable, *words] if words[0] == "-c" else [sys.executable, str(HERE / words[0]), *words[1:]]


def run(name: str, out: Path, limit: float) -> dict:
    """Run a step; its processes end with it."""
    return processes.run(name, command(name, out, limit), out / f"carried_all_{name}.log", limit, TAIL[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=245)
    parser.add_argument("--only", default=",".join(STEPS))
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"--only has {unknown[0]!r}; expected some of {', '.join(STEPS)}")
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end, done = time.monotonic() + args.seconds, []
    for position, name in enumerate(names):
        limit = (end - time.monotonic()) * STEPS[name][0] / sum(STEPS[n][0] for n in names[position:])
        if limit < 5:
            done.append({"step": name, "status": "no time left", "seconds": 0.0, "tail": []})
            continue
        print(f"== {name}, at most {limit:.0f} s", flush=True)
        done.append(run(name, out, limit))
        print("\n".join(f"   {line[:220]}" for line in done[-1]["tail"]), flush=True)
        (out / "carried_all.json").write_text(json.dumps(done, indent=1))
    print(f"{'step':<12}{'s':>6}  status")
    for step in done:
        print(f"{step['step']:<12}{step['seconds']:6.0f}  {step['status']}")
    sys.exit(any(step["status"] != 0 for step in done))


if __name__ == "__main__":
    main()
