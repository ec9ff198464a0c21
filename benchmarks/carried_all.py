"""All about carried scores that one GPU has to say, in one run: the whole set, checks, decoding.

    python benchmarks/carried_all.py OUT [--seconds 300] [--only goals,others,checks,report]

Most important first, each in a process of its own, in OUT/carried.json: `goals` times the set's cells that decide, our
plans and the same kernels without a carry, each beside PyTorch's attention in every round; `others` the remaining rows.
`checks` are the smoke tests, compiled blocks and decoding, `report` the tables of it all. Only where named:
`over` times steps in rounds with the same kernels without a carry (OUT/carried_over.json), `long` steps of 12,288 and
20,480 tokens, where the automatic plan changes, and `step` says what host and GPU do in the 4,096 tokens' step
(carried_step.py). A step that fails or runs into its limit costs only itself; what is left of the seconds is shared out
in proportion. A limit that is short leaves cells out: run again, it measures those that the JSON lacks.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import processes

HERE = Path(__file__).resolve().parent
CLI = "from tilewise.bench.cli import app; app()"
SET = ["run", "--set", "carried", "--time-limit", "{run}"]

STEPS: dict[str, tuple[int, list[str]]] = {
    "goals": (135, ["-c", CLI, *SET, "--json", "{out}/carried.json", "--systems", "no-carry,tilewise,tilewise-mixed"]),
    "others": (110, ["-c", CLI, *SET, "--json", "{out}/carried.json", "--quick",
                     "--systems", "plain,plain-flex,tilewise-recompute,eager,tilewise-stored",
                     "--cases", "step,step-window,block,block-window"]),
    "checks": (72, ["carried_kernels.py", "--out", "{out}", "tests", "decoding", "--until", "{run}",
                    "--select", "smoke or compiled"]),
    "report": (8, ["-c", CLI, "report", "{out}/carried.json", "--no-plots"]),
    "over": (100, ["-c", CLI, "run", "--set", "carried-over", "--time-limit", "{run}",
                   "--json", "{out}/carried_over.json", "--systems", "tilewise,no-carry"]),
    "long": (60, ["-c", CLI, *SET, "--json", "{out}/carried.json", "--quick", "--cases", "step", "--size",
                  "tokens=12288,20480", "--systems", "tilewise,no-carry"]),
    "step": (45, ["carried_step.py", "--out", "{out}/carried_step.json", "--seconds", "{run}"]),
}  # fmt: skip
"""Step ↦ (its share of the seconds, command)."""

ALWAYS = ("goals", "others", "checks", "report")

TAIL = {"goals": 24, "others": 28, "checks": 12, "report": 75, "over": 24, "long": 16, "step": 45}


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
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--only", default=",".join(ALWAYS))
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"--only has {unknown[0]!r}; expected some of {', '.join(STEPS)}")
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    shares = {name: STEPS[name][0] for name in names}
    step = lambda name, limit: run(name, out, limit)  # noqa: E731
    record = out / "carried_all.json"
    status = processes.in_turn(shares, args.seconds, step, record, least=5.0)
    # Imported and asked only once no step needs the GPU.
    import torch
    from carried_blocks import made_with

    environment = made_with("carried_all", "cuda" if torch.cuda.is_available() else "cpu")
    record.write_text(
        json.dumps({"environment": environment, "steps": json.loads(record.read_text())}, indent=1) + "\n"
    )
    sys.exit(status)


if __name__ == "__main__":
    main()
