"""The Triton kernels without a GPU: under the interpreter on tiny shapes, and compiled for sm_90."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise.depth.triton import config

HERE = Path(__file__).parent


def run(*args, **env):
    done = subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **env}
    )
    assert done.returncode == 0, f"{' '.join(map(str, args))} failed:\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("file", ["depth_interpreted.py", "fp32_chains_interpreted.py", "layouts_interpreted.py",
                                  "wide_interpreted.py"])  # fmt: skip
def test_kernels_under_the_interpreter(file):
    out = run("-m", "pytest", HERE / file, "-p", "no:cacheprovider", TRITON_INTERPRET="1")
    assert " passed" in out
    assert "skipped" not in out


@pytest.mark.parametrize(
    ("dtype", "d", "T", "n", "S"),
    [("bfloat16", 2304, 8192, 8, 8), ("float16", 7168, 128, 3, 16)],
)
def test_kernels_compile_for_hopper(dtype, d, T, n, S):
    """No wgmma (see `triton.phase1`), 16-byte or asynchronous loads, shared memory within a block's 227 KiB."""
    rows = [json.loads(x) for x in run(HERE / "depth_aot.py", dtype, str(d), str(T), str(n), str(S)).splitlines()]
    names = {row["kernel"] for row in rows}
    assert {"merge_fwd_kernel", "merge_bwd_kernel", "mix_bwd_kernel", "scores_kernel", "combine_kernel"} <= names
    assert {
        "add_norm_kernel",
        "add_norm_bwd_kernel",
        "inner_kernel",
        "weights_kernel",
        "source_grad_kernel",
        "table_kernel",
    } <= names
    assert ("mix_few_kernel" if T <= 1024 else "mix_fwd_kernel") in names
    # 128 queries at 32,768 tokens: one part, so no partial sums and no kernel that adds them.
    assert any(row["kernel"] == "scores_kernel" and row["BS"] == 128 and not row["SPLIT"] for row in rows)
    for row in rows:
        assert not row["wgmma"], row
        assert row["shared"] <= 227 << 10, row
        if row["kernel"] not in ("table_kernel", "finish_kernel", "weights_kernel"):
            assert row["wide_loads"], row
        # Two programs of 128 threads an SM.
        if T > 1024 and row["kernel"] == "merge_bwd_kernel":
            assert (row["num_warps"], row["local"], row["stack"]) == (4, 0, 0), row
            assert row["registers"] * 128 * 2 <= 65536, row


@pytest.mark.parametrize(("dtype", "d"), [("float32", 16384), ("bfloat16", 12296)])
def test_the_widest_rows_compile_for_hopper(dtype, d):
    """As wide as the kernels take, forward and backward: shared memory within a block's 227 KiB."""
    rows = [json.loads(x) for x in run(HERE / "depth_aot.py", dtype, str(d), "2048", "3", "3").splitlines()]
    assert {"mix_fwd_kernel", "mix_bwd_kernel", "merge_fwd_kernel", "merge_bwd_kernel", "scores_kernel", "read_kernel",
            "combine_kernel", "inner_kernel", "source_grad_kernel"} <= {row["kernel"] for row in rows}  # fmt: skip
    for row in rows:
        assert row["shared"] <= 227 << 10, row
        assert not row["wgmma"], row


def test_kernel_variants_do_not_grow_with_the_number_of_tokens():
    """Many tokens have one set of variants and few tokens another; no further number of tokens asks for more."""
    found = json.loads(run(HERE / "kernel_variants.py"))
    assert {T for T, names in found["warm"].items() if names} == {"2000", "1"}
    assert len(found["warm"]["2000"]) > 20
    assert not any(found["later"].values()), found["later"]


def test_a_row_of_the_backward_takes_two_tiles_where_one_would_be_mostly_padding():
    tiles = {d: config.row_tiles(d) for d in (64, 256, 2048, 2304, 4096, 5120, 7168, 16384)}
    assert tiles == {
        64: (256, 0, 4), 256: (256, 0, 4), 2048: (2048, 0, 4), 2304: (2048, 256, 4), 4096: (4096, 0, 8),
        5120: (4096, 1024, 16), 7168: (8192, 0, 16), 16384: (16384, 0, 16),
    }  # fmt: skip
    for d in range(8, 16385, 8):
        block, tail, warps = config.row_tiles(d)
        assert block + tail >= d, (block, tail)
        assert not tail or tail >= 64 * warps, (d, tail, warps)


@pytest.mark.parametrize("d", [2048, 2304, 5120, 7168])
@pytest.mark.parametrize("n", [1, 8, 9])
def test_programs_of_source_gradients_are_two_waves(d, n):
    tile = config.dv_tiles(8192, d, n, 8, 2)
    columns = -(-d // tile["BD"]) * -(-n // tile["BN"])
    grid = columns * tile["programs"]
    assert grid <= 4 * config.SMS < grid + columns


def test_importing_the_package_does_not_import_triton():
    run("-c", "import sys, tilewise.depth; assert 'triton' not in sys.modules and 'transformers' not in sys.modules")
