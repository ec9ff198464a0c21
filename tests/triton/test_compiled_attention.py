"""The attention kernels compile for every architecture within its shared memory, and without the register trap."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def compiled(*jobs):
    done = subprocess.run(
        [sys.executable, str(HERE / "compiled.py"), *jobs], cwd=HERE, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("arch", [80, 86, 100, 120])
def test_every_architecture(arch):
    kernels = compiled(f"wav2vec2_bert@{arch}")
    assert {"attend", "grad_key", "grad_query", "project", "fold", "collect", "reduce"} <= {
        k["kernel"] for k in kernels
    }
    assert [k for k in kernels if k["shared"] > k["limit"]] == []


@pytest.mark.parametrize(("case", "arch", "products"), [("t5", 100, 0), ("deberta", 86, 2), ("txl", 120, 1)])
def test_other_mechanisms_on_other_architectures(case, arch, products):
    kernels = compiled(f"{case}@{arch}")
    names = [k["kernel"] for k in kernels]
    assert {"attend", "grad_key", "grad_query", "reduce"} <= {*names}
    assert ("project" in names, "toeplitz" in names) == (products > 0, products == 0)
    assert {k["arch"] for k in kernels} == {arch}
    assert [k for k in kernels if k["shared"] > k["limit"]] == []


def test_hopper_keeps_left_operands_out_of_registers():
    kernels = compiled("deberta@90", "t5@90", "txl@90")
    loops = [k for k in kernels if k["kernel"] in ("attend", "grad_key", "grad_query")]
    assert len(loops) == 9
    assert all(k["wgmma"] > 0 for k in loops)
    assert [k for k in kernels if k["shared"] > k["limit"]] == []
    assert {k["kernel"]: k["invariant"] for k in kernels if k["invariant"]} == {}


def test_the_trap_would_be_seen():
    (kernel,) = compiled("trap@90")
    assert kernel["invariant"]


def test_tf32_only_on_request_and_fp32_sums_by_tile():
    asked = compiled("wav2vec2_bert/tf32@80")
    products = {"attend", "grad_key", "grad_query", "project", "fold", "collect"}
    assert {k["kernel"] for k in asked if k["tf32"]} == products
    ieee = compiled("wav2vec2_bert/ieee@80")
    assert [k["kernel"] for k in ieee if k["tf32"]] == []
    # Each tile has a sum of its own in fp32, where one chain would err three times as much at 16,384 tokens.
    assert {k["kernel"]: k["chained"] for k in ieee if k["chained"]} == {}
    assert {k["kernel"] for k in asked if k["chained"]} == products - {"project"}


def test_lengths_and_offsets_share_one_kernel_with_and_one_without_a_mask_of_elements():
    done = subprocess.run(
        [sys.executable, str(HERE / "specialised.py"), "wavlm", "deberta", "txl", "none", "t5", "shaw"], cwd=HERE,
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {k["kernel"] for k in kernels if k["masked"] == [False, True]} == {
        "attend", "attend_band", "attend_overlapped", "grad_key", "grad_query", "key_pass", "probabilities",
        "query_pass",
    }  # fmt: skip
    assert {k["kernel"] for k in kernels if not k["masked"]} == {
        "prepare", "project", "expand", "toeplitz", "fold", "collect", "collect_scalars", "collect_tiles", "reduce",
        "sum_ends", "sum_rows", "spread", "add_parts",
    }  # fmt: skip
    assert [k for k in kernels if k["all"] != k["first"] * max(1, len(k["masked"]))] == []
    # What one length needs of a kernel: two of `prepare` and `reduce`, which start twice a call.
    assert {k["kernel"]: k["first"] for k in kernels if k["first"] > 1} == {"prepare": 2, "reduce": 2}
