"""The warp-specialised forward: run from its own source against the fp64 oracle, and compiled for sm_90."""

import signal
import sys
from pathlib import Path

import pytest
from partitions import Barrier, Partitions, order_of
from planned import passes
from test_skew_kernels import lines

from tilewise.reference import attention_reference
from tilewise.triton import config
from tilewise.triton.launch import launcher

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import relative_specialised as benchmark
from relative_cases import timed_call

pytest.importorskip("tilewise.triton.specialised")

JOBS = [
    "none-odd", "none-short", "none-resident", "t5-odd", "t5-three", "t5-causal-three", "t5-window", "t5-lengths",
    "t5-packed", "t5-cross", "t5-bf16", "t5-ordered", "wide-causal",
]  # fmt: skip
BROKEN = [
    "early", "last", "phase", "filled", "unasked", "kept", "order", "one", "bytes", "queries", "rows", "ranges",
    "spare", "band",
]  # fmt: skip


def test_within_the_error_budget():
    found = lines("modelled_specialised.py", *JOBS)
    assert [line["name"] for line in found] == JOBS
    assert [line for line in found if line["missed"]] == []


def test_a_mistake_shows():
    found = {
        line["name"][7:]: line["found"] for line in lines("modelled_specialised.py", *map("broken:{}".format, BROKEN))
    }
    assert list(found) == BROKEN
    assert [name for name, how in found.items() if not how] == []
    # Slots that are never freed, or that the first filling waits for, stop everything.
    for name in ("filled", "kept", "order"):
        assert "no partition can go on" in found[name]
    for name in ("early", "last"):
        assert found[name] == "an operand changed while its product ran"


def test_compiled_for_hopper():
    (line,) = lines("compiled_specialised.py", "t5:128")
    groups = line["groups"]
    assert line["local"] == line["touched"] == []
    # The first scores, two in the loop, the last product.
    assert line["waits"] == 4 * groups
    # A group's first turn, the loop's, the last.
    assert line["freed"] == 3 * groups
    # Those of a tile's entries of a thread.
    assert len(line["exponentials"]) == groups
    assert min(line["exponentials"]) >= 64
    assert line["shared"] <= 232448
    assert line["warps"] == 4 * groups + 4
    # Two stores (what to run, and that all is done) and a load.
    assert line["words"] == 3
    assert line["unordered_words"] == []
    # The producer's, and the groups'.
    assert line["asked"][0] == 24
    assert {2: 240, 3: 160}[groups] in line["asked"]


def test_an_access_without_a_barrier_shows():
    import compiled_specialised

    store, load, whole, part = (
        "STS.64 [UR4+0x38140], R4",
        "LDS.U8 R4, [R4]",
        "BAR.SYNC.DEFER_BLOCKING 0x1",
        "BAR.SYNC 0x0, 0x80",
    )
    assert compiled_specialised.unordered_words([store, whole, load, "EXIT"]) == []
    assert compiled_specialised.unordered_words([whole, part, load, "BRX R4", store, part, whole]) == [load, store]


def test_calls_that_take_it(monkeypatch):
    def forward(d, N):
        return [name for name, _, _ in passes(timed_call("t5", N, "meta", H=2, d=d)[0])["forward"][1]]

    assert "attend_specialised" in forward(128, 1024)
    assert "attend_overlapped" in forward(64, 2048)
    monkeypatch.setattr(config, "SPECIALISED", {128: 2048})
    assert "attend_specialised" in forward(128, 2048)
    assert "attend_overlapped" in forward(128, 1024)
    monkeypatch.setattr(config, "SPECIALISED", {})
    assert "attend_overlapped" in forward(128, 2048)


def test_partitions_that_wait_for_one_another():
    one, two = Barrier(), Barrier()
    one.count = two.count = 1
    parts = Partitions()

    def part(mine, other):
        parts.switch(lambda: other.passed(0))
        mine.arrive()

    with pytest.raises(AssertionError, match="no partition can go on"):
        parts.run([lambda: part(one, two), lambda: part(two, one)], (0, 1))


def test_partitions_take_precedence():
    def order(n):
        parts, seen = Partitions(), []

        def part(me):
            for _ in range(2):
                seen.append(me)
                parts.switch()

        parts.run([lambda me=me: part(me) for me in range(3)], order_of(n, 3))
        return seen

    assert order(0) == [2, 2, 1, 1, 0, 0]
    assert order(1) == [0, 0, 1, 1, 2, 2]
    assert len({order_of(n, 3) for n in range(12)}) == 6


def test_a_partition_that_fails_ends_all():
    parts = Partitions()

    def fails():
        raise ValueError("no such row")

    with pytest.raises(ValueError, match="no such row"):
        parts.run([lambda: parts.switch(lambda: False), fails], (0, 1))
    assert parts.current is None


def test_everything_that_is_measured_can_be_launched():
    started = []
    launcher.append(lambda kernel, grid, *args, **meta: started.append((kernel.__name__, meta)))
    first, others = benchmark.plan_checks()
    assert {job[:2] for job in others} == {job[:2] for job in first}
    for width, name, n in first + [job for job in others if job[:2] == (128, "2x128")]:
        benchmark.perform("check", width, name, n)
        kernel, meta = started[-1]
        assert kernel == "attend_specialised"
        assert meta["MASKED"] == (n > 2 and n != len(benchmark.CHECKS) - 1)
    for cell in benchmark.CELLS:
        for name in ("overlapped", "2x128"):
            benchmark.perform("time", *cell, name)
            assert started[-1][0] == ("attend_overlapped" if name == "overlapped" else "attend_specialised")
            assert started[-1][1]["MASKED"] == cell[3]
    launcher.pop()


@pytest.mark.parametrize("wrong", [None, "o", "lse", "again"])
def test_checks_of_the_benchmark_see_what_is_wrong(monkeypatch, wrong):
    runs = []

    def forward_of(call, o, lse, shape):
        def forward():
            runs.append(shape)
            found = attention_reference(call.q, call.k, call.v, list(call.ports), call.mask, call.scale, call.offset)
            for to, x in zip((o, lse), found, strict=True):
                to.copy_(x)
            if wrong == "lse" or (wrong == "again" and len(runs) == 2):
                lse[0, 0, 140] += 0.5
            if wrong == "o":
                o[0, 0, 140] += 0.5

        return forward

    monkeypatch.setattr(benchmark, "forward_of", forward_of)
    monkeypatch.setattr(benchmark, "ends_itself", lambda seconds: None)
    monkeypatch.setattr(benchmark, "CHECKS", [("t5", "causal_padding", benchmark.HALF, dict(N=150, H=1))])
    if wrong == "again":
        with pytest.raises(AssertionError, match="two runs differ"):
            benchmark.check(64, "2x128", 0, "cpu")
        return
    budgets = benchmark.check(64, "2x128", 0, "cpu")
    assert [b.name for b in budgets if not b.ok] == ([wrong] if wrong else [])
    assert runs == [benchmark.SHAPES[64]["2x128"]] * 2


def test_a_check_that_hangs_ends_itself(monkeypatch):
    calls = []
    monkeypatch.setattr(signal, "signal", lambda *a: calls.append(a))
    monkeypatch.setattr(signal, "alarm", lambda *a: calls.append(a))
    benchmark.ends_itself(7)
    # Nothing of Python's runs while a thread waits for the GPU: the system's own handler ends the process.
    assert calls == [(signal.SIGALRM, signal.SIG_DFL), (7,)]
