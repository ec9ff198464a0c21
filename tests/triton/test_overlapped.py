"""The forward with overlapped exponentials: run from its own source against the fp64 oracle, and compiled for sm_90."""

import pytest
from test_skew_kernels import lines

pytest.importorskip("tilewise.triton.overlapped")

JOBS = [
    "none", "none-odd", "none-short", "t5", "t5-odd", "t5-shared", "t5-causal", "t5-window", "t5-lengths", "t5-padding",
    "t5-packed", "t5-cross", "t5-long-queries", "t5-offset", "t5-bf16", "clipped", "windowed", "wide", "wide-lengths",
    "wide-causal",
]  # fmt: skip
BROKEN = ["keys", "values", "phase", "wait", "sides", "slab", "band", "shrink", "ranges", "empty", "open"]


def test_within_the_error_budget():
    found = lines("modelled_overlapped.py", *JOBS)
    assert [line["name"] for line in found] == JOBS
    assert [line for line in found if line["missed"]] == []


def test_a_mistake_shows():
    found = lines("modelled_overlapped.py", *(f"broken:{name}" for name in BROKEN))
    assert len(found) == len(BROKEN)
    assert [line["name"] for line in found if not line["found"]] == []


def test_compiled_for_hopper():
    found = {line["case"]: line for line in lines("compiled_overlapped.py")}
    assert list(found) == ["t5", "wide", "causal"]
    for line in found.values():
        assert line["kernel"] == "attend_overlapped"
        assert line["unordered"] == line["touched"] == []
        assert line["stack"] == 0
        # First scores, two in the loop, the last product.
        assert line["waits"] == 4
        # A tile's 64 entries a thread.
        assert line["exponentials"] >= 64
    assert 3 * (found["t5"]["shared"] + 1024) <= 233472
    assert 3 * 128 * found["t5"]["registers"] <= 65536


def test_what_touches_a_running_product():
    import compiled_overlapped

    start = ["HGMMA.64x64x16.F32 R88, R120, gdesc[UR8].tnspB, R88, gsb0"]
    wait = ["WARPGROUP.DEPBAR.LE gsb0, 0x0"]
    reads, writes = "FADD R10, R11, R90", "FADD R121, R11, R12"
    assert compiled_overlapped.touched([*start, "FADD R10, R120, R12", *wait, reads, writes]) == []
    assert compiled_overlapped.touched([*start, reads, writes, *wait]) == [reads, writes]
    # Of two that run, the older is done.
    two = ["HGMMA.64x128x16.F32 R24, gdesc[UR8], RZ, !UPT, gsb0", *start, "WARPGROUP.DEPBAR.LE gsb0, 0x1"]
    assert compiled_overlapped.touched([*two, "FADD R10, R24, R25", reads]) == [reads]
