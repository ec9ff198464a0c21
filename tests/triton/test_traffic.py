"""The table of device-memory traffic: ncu's CSV, and the fewest bytes as the host plans them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import relative_traffic as traffic
from relative_cases import timed_call

HEADER = '"ID","Process ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum"'
CSV = f"""==PROF== Connected to process 7
==PROF== Profiling "project": 0%....100% - 1 pass
{HEADER}
"","","","byte","byte","ns"
"0","7","project","25,165,824","75497472","80000"
"1","7","vectorized_elementwise_kernel","100","200","1500"
"2","7","attend","150994944","26000000","1,000,000"
"""


def test_the_csv_of_ncu():
    rows = traffic.parse(CSV)
    assert [row["kernel"] for row in rows] == ["project", "vectorized_elementwise_kernel", "attend"]
    assert rows[0] == {"kernel": "project", "read": 25165824.0, "written": 75497472.0, "us": 80.0}
    assert rows[2]["us"] == 1000.0
    with pytest.raises(ValueError, match="no table of ncu"):
        traffic.parse("==ERROR== Failed to initialize the profiler: LibraryNotLoaded")
    with pytest.raises(ValueError, match=r"has no dram__bytes_write.sum"):
        traffic.parse(CSV.replace("dram__bytes_write.sum", "something"))
    # Counters that could not be read.
    with pytest.raises(ValueError, match="n/a"):
        traffic.parse(CSV.replace("75497472", "n/a"))


def test_the_fewest_bytes_of_shaw():
    forward = traffic.planned(*timed_call("shaw", 8192, "meta", skew="memory"), "forward")
    assert [row["kernel"] for row in forward] == ["project", "attend"]
    MiB, q = 2**20, 24.0
    # Three blocks of 64 keys a row, but at the ends of the sequences.
    windows = 72.0 - 2 * 2 * 12 * 64 * 64 * 2 / MiB
    assert forward[0]["fewest_written"] / MiB == pytest.approx(windows)
    assert forward[0]["fewest_read"] / MiB == pytest.approx(q, rel=0.01)
    assert forward[1]["fewest_read"] / MiB == pytest.approx(3 * q + windows)
    assert forward[1]["fewest_written"] / MiB == pytest.approx(q + 0.75)
    backward = traffic.planned(*timed_call("shaw", 8192, "meta", skew="memory"), "backward")
    by = {row["kernel"]: row for row in backward}
    # dS by query is stored once and read once by each of fold and collect.
    assert by["grad_query"]["fewest_written"] / MiB == pytest.approx(2 * q + windows)
    assert by["grad_key"]["fewest_written"] / MiB == pytest.approx(2 * q)
    assert by["fold"]["fewest_read"] / MiB == pytest.approx(windows + 2 * q, rel=0.01)
    assert by["collect"]["fewest_read"] / MiB == pytest.approx(windows + q, rel=0.01)


def test_measured_kernels_meet_their_plan():
    plan = traffic.planned(*timed_call("shaw", 8192, "meta", skew="memory"), "forward")
    rows = traffic.joined(traffic.parse(CSV), plan)
    assert ["fewest_read" in row for row in rows] == [True, False, True]
    lines = traffic.table("shaw:8192:forward", rows)
    assert len(lines) == 5
    assert lines[1].split()[:3] == ["project", "80.0", "24.0"]
    assert lines[2].split() == ["vectorized_elementwise_kernel", "1.5", "0.0", "0.0"]
    assert lines[-1].startswith("all")
    with pytest.raises(ValueError, match="planned attend, which did not run"):
        traffic.joined(traffic.parse(CSV)[:2], plan)


@pytest.mark.parametrize("skew", ["auto", "memory"])
@pytest.mark.parametrize("call", traffic.CALLS)
def test_every_kernel_has_its_count(call, skew):
    case, N, pass_, d = traffic.parts_of(call)
    for row in traffic.planned(*timed_call(case, N, "meta", d=d, skew=skew), pass_):
        assert row["fewest_read"] + row["fewest_written"] > 0 or row["kernel"] == "reduce", row


def test_the_fewest_bytes_of_the_hopper_kernels():
    MiB, q = 2**20, 24.0
    forward = {r["kernel"]: r for r in traffic.planned(*timed_call("shaw", 8192, "meta"), "forward")}
    assert forward["attend_band"]["fewest_read"] / MiB == pytest.approx(3 * q, rel=0.01)
    assert forward["attend_band"]["fewest_written"] / MiB == pytest.approx(q + 0.75)
    rows = traffic.planned(*timed_call("txl", 8192, "meta"), "backward")
    total = lambda kernel, key: sum(r[key] for r in rows if r["kernel"] == kernel) / MiB  # noqa: E731
    # A query's dG reaches one tile beyond its keys; the collecting kernel reads what the pass wrote.
    assert total("query_pass", "fewest_written") == pytest.approx(2 * 12 * 8192 * 8256 * 2 / MiB + 2 * q, rel=0.02)
    assert total("collect_tiles", "fewest_read") == pytest.approx(2 * 12 * 8192 * 8256 * 2 / MiB, rel=0.01)
    assert total("query_pass", "fewest_read") >= 5 * q
    forward = {r["kernel"]: r for r in traffic.planned(*timed_call("t5", 8192, "meta"), "forward")}
    slab = forward["toeplitz"]["fewest_written"]
    assert slab > 0
    assert forward["attend_overlapped"]["fewest_read"] == pytest.approx(3 * q * MiB + slab)
    assert forward["attend_overlapped"]["fewest_written"] / MiB == pytest.approx(q + 0.75)


@pytest.mark.parametrize(("N", "saturated"), [(512, True), (128, False)])
def test_the_fewest_bytes_of_end_rows(N, saturated):
    rows = traffic.planned(*timed_call("shaw", N, "meta"), "backward")
    (ends,) = [row for row in rows if row["kernel"] == "sum_ends"]
    # What saturated tiles add: of 12 heads of 16,384 tokens, for every block of 64 two vectors of 64 numbers in fp32.
    assert ends["fewest_read"] == (12 * 16384 // 64 * 2 * 64 * 4 if saturated else 0)
    # One table for all heads: 32 sums for each of two rows.
    assert ends["fewest_written"] == 2 * 32 * 64 * 4


def test_marks_stand_between_the_calls():
    rows = [{"kernel": k} for k in ("prepare", "attend", traffic.MARK, "attend", f"void {traffic.MARK}(long)", "fold")]
    assert [[r["kernel"] for r in call] for call in traffic.by_call(rows)] == [["prepare", "attend"], ["attend"]]
