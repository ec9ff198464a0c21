"""The attention kernels under Triton's interpreter, forward and backward, against the fp64 oracle."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from forked import missed_by

HERE = Path(__file__).parent
SHARDS = (
    ("t5", "everything", "wavlm-window", "offset-intervals"),
    ("shaw-values", "lengths", "widths", "wide"),
    ("deberta-causal", "explicit-holes", "inkling-fp32", "short", "short-shared"),
    ("txl-packed", "shared-heads-dropout", "pointers", "negative-scale", "zero-scale"),
    ("unneeded", "shares", "kept"),
    ("bf16", "beyond"),
    ("beyond-half", "left-padding", "right-padding"),
    ("not-a-number t5", "not-a-number wav2vec2_bert", "not-a-number deberta", "not-a-number txl"),
    ("tf32-explicit", "tf32-deberta", "wavlm-sides", "cancelling"),
    ("alibi-fp32", "t5-fp32"),
    ("t5-tall", "t5-lengths-tall", "t5-window-tall", "wavlm-tall"),
    ("txl-heads-dropout", "txl-fp32", "tf32-txl", "txl-bf16-short", "txl-pointers", "unneeded-txl"),
    ("distant-rows wav2vec2_bert", "distant-rows txl", "distant-rows t5", "distant-rows deberta", "distant-rows shaw",
     "distant-rows inkling", "distant-heads t5", "distant-heads deberta"),
)  # fmt: skip


@pytest.fixture(scope="module")
def missed(request):
    return missed_by("interpreted.py", request, "test_interpreted", "names")


@pytest.mark.parametrize("names", SHARDS, ids=" ".join)
def test_interpreted(missed, names):
    found, errors = missed
    assert [name for name in names if name not in found] == [], errors[-3000:]
    assert {name: found[name] for name in names if found[name]} == {}


def test_the_operator_contract():
    done = subprocess.run(
        [sys.executable, str(HERE / "contract.py")], cwd=HERE, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    names = ("opcheck", "compiled", "opcheck txl", "compiled txl", "strided wav2vec2_bert", "strided inkling")
    assert results == [{"name": name, "held": True} for name in names]


def test_the_quick_interpreter_changes_no_bit_and_refuses_the_same():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "both_interpreters.py")], cwd=HERE, capture_output=True, text=True,
        timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["name"] for r in results] == [
        "reductions", "reductions, fp16", "shaw", "t5", "shapes", "ranks", "types", "block", "none",
    ]  # fmt: skip
    assert [r for r in results if not (r["same"] and r["ran"])] == []
    assert ["Error" in r["ran"] for r in results[4:]] == [True] * 4 + [False]
