"""The kernels that skew in registers: run from their own source against the fp64 oracle, and compiled for sm_90."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

FORWARD = ["both", "both-backwards", "query", "key", "narrow", "causal", "window", "lengths", "cross", "long-queries",
           "bf16", "identity", "identity-ascending", "wide"]  # fmt: skip
BACKWARD = ["", "-own", "-heads", "-causal", "-window", "-lengths", "-cross", "-long-queries", "-shares", "-bf16",
            "-wide"]  # fmt: skip
BROKEN = ["phase", "rows", "slot", "edge", "order", "early", "staged", "heads", "turned"]


def lines(script: str, *jobs: str):
    done = subprocess.run(
        [sys.executable, str(HERE / script), *jobs], cwd=HERE, capture_output=True, text=True, timeout=500,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("jobs", [FORWARD, [f"gradients{name}" for name in BACKWARD]], ids=["forward", "backward"])
def test_within_the_error_budget(jobs):
    found = lines("modelled.py", *jobs)
    assert [line["name"] for line in found] == jobs
    assert [line for line in found if line["missed"]] == []


def test_a_mistake_shows():
    found = lines("modelled.py", *(f"broken:{name}" for name in BROKEN))
    assert len(found) == len(BROKEN)
    assert [line["name"] for line in found if not line["found"]] == []
