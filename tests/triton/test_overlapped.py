"""The kernels with overlapped exponentials: run from its own source against the fp64 oracle, and compiled for sm_90."""

import pytest
from test_skew_kernels import lines

pytest.importorskip("tilewise.triton.overlapped")

JOBS = [
    "none-odd", "none-short", "t5-odd", "t5-causal", "t5-lengths", "t5-cross", "t5-offset", "t5-bf16", "windowed",
    "wide-lengths", "gradients", "gradients-odd", "gradients-heads", "gradients-window", "gradients-wide-heads",
    "gradients-lengths", "gradients-padding", "gradients-bf16",
]  # fmt: skip
BROKEN = ["wait", "band", "ranges", "open", "query-slot", "query-sums", "query-stretch", "key-slot", "key-open"]


def test_within_the_error_budget():
    found = lines("modelled_overlapped.py", *JOBS)
    assert [line["name"] for line in found] == JOBS
    assert [line for line in found if line["missed"]] == []


def test_a_mistake_shows():
    found = lines("modelled_overlapped.py", *(f"broken:{name}" for name in BROKEN))
    assert len(found) == len(BROKEN)
    assert [line["name"] for line in found if not line["found"]] == []


def test_compiled_for_hopper():
    found = {(line["case"], line["kernel"]): line for line in lines("compiled_overlapped.py")}
    assert list(found) == [
        ("t5", "attend_overlapped"), ("t5", "key_overlapped"), ("t5", "query_overlapped"),
        ("wide", "attend_overlapped"),
    ]  # fmt: skip
    for (_, kernel), line in found.items():
        forward = kernel == "attend_overlapped"
        assert line["unordered"] == line["touched"] == []
        # A few bytes of spills outside of the loop cost nothing.
        assert line["stack"] <= 32
        # Forward: the first scores, two in the loop, the last product. Backward: two products more wait in each.
        assert line["waits"] == (4 if forward else 6)
        # Those of a tile's 64 or 32 entries a thread.
        assert line["exponentials"] >= (64 if forward else 32)
    for kernel, programs in (("attend_overlapped", 3), ("query_overlapped", 3), ("key_overlapped", 2)):
        line = found["t5", kernel]
        assert programs * (line["shared"] + 1024) <= 233472
        assert programs * 128 * line["registers"] <= 65536


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
