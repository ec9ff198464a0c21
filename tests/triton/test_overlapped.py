"""The forward with overlapped exponentials: run from its own source against the fp64 oracle, and compiled for sm_90."""

import sys
from pathlib import Path

import pytest
from planned import passes
from test_skew_kernels import lines

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from relative_cases import timed_call

pytest.importorskip("tilewise.triton.overlapped")

JOBS = [
    "none-odd", "none-short", "t5-odd", "t5-causal", "t5-lengths", "t5-padding", "t5-cross", "t5-offset", "t5-bf16",
    "windowed", "wide-lengths",
]  # fmt: skip
BROKEN = ["wait", "sides", "band", "ranges", "open"]


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
    assert list(found) == ["t5", "none", "t5 wide", "none wide"]
    for name, line in found.items():
        assert line["unordered"] == line["touched"] == []
        assert line["stack"] == 0
        # The first scores, two in the loop, the last product.
        assert line["waits"] == 4
        # Those of a tile's entries of a thread.
        assert line["exponentials"] >= (32 if "wide" in name else 64)
        programs = 2 if "wide" in name else 3
        assert programs * (line["shared"] + 1024) <= 233472
        assert programs * 128 * line["registers"] <= 65536


@pytest.mark.parametrize(
    ("case", "N", "d", "kernel"),
    [("t5", 1024, 64, "attend_overlapped"), ("t5", 512, 64, "attend"), ("none", 128, 64, "attend_overlapped"),
     ("t5", 2048, 128, "attend_specialised"), ("none", 512, 80, "attend"), ("shaw", 2048, 64, "attend_band")],
)  # fmt: skip
def test_calls_that_take_it(case, N, d, kernel):
    def forward(**options):
        started = passes(timed_call(case, N, "meta", H=2, d=d, **options)[0])["forward"][1]
        return [name for name, _, _ in started]

    assert kernel in forward()
    assert "attend" in forward(skew="memory")


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
