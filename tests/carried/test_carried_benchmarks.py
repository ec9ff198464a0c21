"""The GPU programs' lists of kernels to compile beforehand, and what their results say of the plans' order."""

import json
import multiprocessing
import sys
import time
import warnings
from argparse import Namespace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import ClassVar

import pytest
import test_kernels_gpu
import test_models_gpu
import torch

from tilewise.bench import carried_systems, runner, worker
from tilewise.bench.carried import CARRIED, CARRIED_OVER
from tilewise.bench.records import environment
from tilewise.bench.timing import Plan
from tilewise.carried import CarriedConfig, SharedKeyCarry, TileLayout, shared_key_attention
from tilewise.carried.config import Options
from tilewise.carried.policy import choose_plan
from tilewise.carried.triton import launch, settings
from tilewise.triton import launch as starting

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def programs(monkeypatch):
    """The modules carried_blocks and carried_kernels, which imports carried_tests."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import carried_blocks
    import carried_kernels

    yield carried_blocks, carried_kernels
    for name in ("carried_blocks", "carried_kernels", "carried_tests"):
        del sys.modules[name]


TINY = {"tokens": [40], "head_dim": [8]}


@pytest.mark.parametrize("case", ["step", "step-graph", "step-window"])
def test_steps_beside_the_same_kernels_without_a_carry(case):
    """The baseline is the system no-carry to the bit, in a model with a carry or without; systems are right."""
    losses = {}
    for cell in runner.select("carried-over", "cpu", sizes=TINY, cases=[case]):
        work = CARRIED_OVER.build(cell)
        losses[cell.system] = work.run().item(), work.baseline().item()
    own = losses.pop("no-carry")
    assert own[0] == own[1]
    assert set(losses) == {"tilewise", "tilewise-mixed", "tilewise-stored"}
    for mine, other in losses.values():
        assert other == own[0] != mine
    (cell,) = runner.select("carried-over", "cpu", sizes=TINY, cases=[case], systems=["tilewise"])
    (record,) = worker.measure(CARRIED_OVER, cell, CARRIED_OVER.truth(cell), Plan(rounds=2, replays=1))
    assert record["ok"]
    assert (record["set"], record["baseline"]) == ("carried-over", "no-carry")
    assert len(record["samples"]["system"]) == len(record["samples"]["baseline"]) == 2


@pytest.mark.parametrize("window", [None, 9])
def test_flex_attention_is_the_plain_one(window):
    """Forward, which is all that it does on the CPU; GQA, and a length that its blocks of 128 do not divide."""
    shape = carried_systems.Shape(tokens=150, window=window, layers=1, heads=4, kv_heads=2, head_dim=16, hidden=0,
                                  vocabulary=0)  # fmt: skip
    q, k, v = (torch.randn(1, h, 150, 16) for h in (4, 2, 2))
    found = []
    with torch.no_grad(), warnings.catch_warnings():
        # Uncompiled it warns that it is slow.
        warnings.simplefilter("ignore")
        for system in ("plain", "plain-flex"):
            o, carry = carried_systems.attend_of(system, shape, torch.float32, "cpu")(q, k, v, "untouched")
            assert carry == "untouched"
            found.append(o)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    for case in ("step", "step-graph", "block"):
        assert not CARRIED.supports(case, "plain-flex", "cuda")
    for case in ("step-window", "block-window"):
        assert CARRIED.supports(case, "plain-flex", "cuda")
        assert CARRIED.ceiling(case, "plain-flex")


def test_longer_steps_of_the_automatic_plan_can_be_asked_for():
    """As for 12,288 and 20,480 tokens of the set on a GPU."""
    found = runner.select("carried", "cuda", sizes={"tokens": [12288, 20480]}, cases=["step"], systems=["tilewise"])
    assert [cell.size["tokens"] for cell in found] == [12288, 20480]
    sizes = {**TINY, "tokens": [48, 80]}
    for cell in runner.select("carried", "cpu", sizes=sizes, cases=["step"], systems=["tilewise"]):
        (record,) = worker.measure(CARRIED, cell, CARRIED.truth(cell), Plan(rounds=1, replays=1))
        assert record["ok"]
        assert "stored" in record["notes"]["plan"]


def kind(x):
    return "none" if x is None else type(x).__name__ + str(getattr(x, "dtype", "")) + str(getattr(x, "block_shape", ""))


@pytest.mark.parametrize("label", ["4096", "8192", "8192, window 1024"])
def test_blocks_find_their_kernels_compiled(monkeypatch, programs, label):
    """Launches at the length itself, on meta tensors, are among those of the small blocks that are compiled."""
    monkeypatch.setattr(settings, "FILL", 1.9)
    blocks, kernels = programs

    def collect(found):
        def act(kernel, grid, *args, **meta):
            found.add((kernel.fn.__name__, *map(kind, args), *sorted((n, str(x)) for n, x in meta.items())))

        return act

    listed, needed = set(), set()
    args = Namespace(stages=["blocks"], shapes=[label], without=["stored", "recompute"])
    for job in kernels.jobs_of(args):
        blocks._launches(job, collect(listed))
    monkeypatch.setattr(launch, "refusal", lambda *_: None)
    monkeypatch.setattr(starting, "launcher", [collect(needed)])
    count = len(Options._fields) + 1
    for name in ("forward", "backward"):
        host = getattr(launch, name)
        real = SimpleNamespace(default=lambda *x, host=host: host(*x[:-count], Options.of(x[-count:-1])))
        monkeypatch.setattr(torch.ops.tilewise, f"carried_{name}", real)
    T, window = kernels.SHAPES[label]
    for plan in ("none", "mixed"):
        q, k, v, G = blocks.tensors(T, "meta")
        outputs = blocks.carried_block(blocks.config_of(plan, window), q, k, v)()
        torch.autograd.grad(outputs, [*q, *k, *v], G)
    assert len(needed) >= 10
    assert needed <= listed


@pytest.mark.parametrize("module", [test_kernels_gpu, test_models_gpu])
def test_every_gpu_test_says_what_it_launches(module):
    names = {name for name in vars(module) if name.startswith("test_")}
    assert names - {"test_uninitialised_memory_is_nan"} == set(module.LAUNCHED)


@pytest.mark.parametrize(
    ("function", "params", "kernels"),
    [
        ("test_a_cached_generation_is_the_forward_pass", {"windows": None}, {"attend", "decode_keys", "join_splits"}),
        ("test_a_checkpointed_model_has_the_same_gradients", {"plan": "mixed"}, {"attend", "keys_gradient"}),
        ("test_compiled_blocks", {}, {"attend", "keys_gradient", "row_shift"}),
    ],
)
def test_kernels_of_models_and_compiled_blocks_are_compiled_beforehand(programs, function, params, kernels):
    blocks, names = programs[0], set()
    launched = programs[1].carried_tests.Launched("", function, params)
    blocks._launches(launched, lambda kernel, *_, **__: names.add(kernel.fn.__name__))
    assert kernels <= names


class Clock:
    now = 0.0

    def time(self):
        return self.now


class Hanging:
    """A process that never ends by itself; waiting for it passes the clock's time."""

    made: ClassVar[list] = []

    def __init__(self, clock, **_):
        self.clock, self.alive, self.waited = clock, False, []
        self.made.append(self)

    def start(self):
        self.alive = True

    def join(self, timeout=None):
        assert timeout is not None or not self.alive
        self.clock.now += timeout or 0.0

    def is_alive(self):
        return self.alive

    def kill(self):
        self.alive = False


@pytest.mark.parametrize("count", [1, 12])
def test_processes_have_one_limit_together(monkeypatch, programs, count):
    """However many hang: joined one after another with a second each, 12 took 12 s more than they had."""
    tests, clock = programs[1].carried_tests, Clock()
    monkeypatch.setattr(tests, "time", clock)
    context = SimpleNamespace(Process=lambda **given: Hanging(clock, **given), Value=lambda *_: None)
    jobs = [tests.Launched(f"file::test_{n}", "test", {}) for n in range(20)]
    rows = tests.run(context, jobs, lambda: 30.0 - clock.now, lambda *_: None, count)
    assert clock.now == 30.0
    assert [row["outcome"] for row in rows] == ["not run"] * 20


def test_a_process_that_lost_its_gpu_takes_no_more_tests(monkeypatch, programs):
    """After a failure; one whose context is whole goes on."""
    tests, taken = programs[1].carried_tests, multiprocessing.Value("i", 0)
    names, run = ["a", "b", "c", "d"], []

    def protocol(item, nextitem):
        run.append(item.nodeid)
        turn.pytest_runtest_logreport(SimpleNamespace(failed=item.nodeid == "b"))

    hook = SimpleNamespace(pytest_runtest_protocol=protocol)
    session = SimpleNamespace(items=[SimpleNamespace(nodeid=n) for n in names], config=SimpleNamespace(hook=hook))
    for lost in (True, False):
        monkeypatch.setattr(tests, "_lost", lambda lost=lost: lost)
        turn = tests._InTurn(names, taken)
        assert turn.pytest_runtestloop(session)
        assert run == (["a", "b"] if lost else names)


def test_what_has_ended_is_reported_when_others_are_stopped(monkeypatch, programs, tmp_path):
    """Two tests that hang, named as the longest are, hold up one process each; the third runs all others."""
    tests, folder = programs[1].carried_tests, tmp_path / "outcomes"
    folder.mkdir()
    (tmp_path / "test_hang.py").write_text(
        "import time\n"
        "def test_quick_1(): pass\n"
        "def test_quick_2(): assert False, 'seen'\n"
        "def test_quick_3(): pass\n"
        "def test_4096_x(): time.sleep(3600)\n"
        "def test_compiled_blocks(): time.sleep(3600)\n"
    )
    names = ["quick_1", "quick_2", "quick_3", "4096_x", "compiled_blocks"]
    jobs = [tests.Launched(f"test_hang.py::test_{name}", name, {}) for name in names]
    assert [name.split("_")[-1] for name in tests.in_order([job.test for job in jobs])] == [
        "blocks",
        "x",
        "1",
        "2",
        "3",
    ]
    monkeypatch.setattr(tests.tempfile, "mkdtemp", lambda: str(folder))
    said = []

    def left():
        while sum(len(tests._lines(path)) for path in folder.glob("*.json")) < 3:
            time.sleep(0.05)
        return 0.0

    rows = tests.run(multiprocessing.get_context("spawn"), jobs, left, lambda *words: said.append(" ".join(words)), 3,
                     tmp_path)  # fmt: skip
    found = {row["test"]: row["outcome"] for row in rows}
    assert found == {"test_quick_1": "passed", "test_quick_2": "failed", "test_quick_3": "passed",
                     "test_4096_x": "not run", "test_compiled_blocks": "not run"}  # fmt: skip
    assert "seen" in said[0]
    assert sum("test_quick" in line and " s " in line for line in said) == 3
    assert "2 of 5 passed, 1 failed, 0 skipped, 2 not run" in said[-1]


@pytest.mark.parametrize("name", ["parts", "documents"])
def test_a_gpu_test_launches_what_was_compiled(monkeypatch, programs, name):
    """The smoke test itself, on the CPU and with its launches collected, against its job's."""
    blocks, kernels = programs

    def collect(found):
        def act(kernel, grid, *args, **meta):
            numbers = [x for x in args if isinstance(x, int)]
            found.append(
                (kernel.fn.__name__, grid, numbers, *map(kind, args), sorted((n, str(x)) for n, x in meta.items()))
            )

        return act

    listed, needed = [], []
    blocks._launches(kernels.carried_tests.Launched("", "test_smoke", {"name": name}), collect(listed))
    # What the kernels would have computed is not there to be compared.
    block = test_kernels_gpu.Block
    monkeypatch.setattr(block, "draw", lambda self, draw=block.draw: draw(self, "cpu"))
    monkeypatch.setattr(test_kernels_gpu, "dense", None)
    run = SimpleNamespace(run=lambda: test_kernels_gpu.test_smoke(name))
    with pytest.raises(TypeError, match="NoneType"):
        blocks._launches(run, collect(needed))
    assert {"attend", "keys_gradient", "queries_from_e"} <= {x[0] for x in needed}
    assert needed == listed


def test_the_host_s_time_is_taken_of_every_plan(monkeypatch, programs):
    """Of blocks whose launches start nothing, here by the entry that tests put on top."""
    import carried_host

    monkeypatch.setattr(launch, "refusal", lambda *_: None)
    monkeypatch.setattr(starting, "launcher", [lambda *_, **__: None])
    idle = []
    found = carried_host.blocks(128, "cpu", 2, lambda: idle.append(None))
    assert set(found) == {"none", "stored", "mixed", "auto"}
    assert len(idle) == 5 * 4
    found = [x for each in found.values() for x in each.values()]
    found += carried_host.parts(128, "cpu", 2, lambda: None).values()
    assert all(len(x) == 2 and min(x) > 0.0 for x in found)
    assert carried_host.fastest([3.0, 1.0, 2.0]) == 1.0
    del sys.modules["carried_host"]


def test_queries_of_shared_keys_are_folded_as_the_model_folds_them(programs):
    """What decoding times is what CarriedLlama(keys="shared") runs: plain attention of Σ Q_j, each rounded once."""
    _, kernels = programs
    layers = [tuple(torch.randn(1, h, n, 128) for h, n in ((4, 1), (2, 20), (2, 20))) for _ in range(4)]
    config = CarriedConfig(impl="blocked")
    found = kernels.shared_keys(layers, config)
    _, k, v = layers[0]
    carry = SharedKeyCarry(config)
    for (q, *_), o in zip(layers, found, strict=True):
        expected, carry = shared_key_attention(q, k, v, carry)
        torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-5)
    assert kernels.POINTS == ((1, 8192), (1, 32768), (16, 8192))


def test_records_say_what_they_were_made_with(monkeypatch, programs, tmp_path):
    """GPU, versions and commit, in every program's file."""
    blocks, kernels = programs
    monkeypatch.setattr(blocks, "environment", lambda *x: environment(*x[:2], "cpu", *x[3:]))
    needed = {"gpu", "commit", "cuda", "cudnn", "versions", "python", "torch", "triton"}
    assert needed <= set(blocks.made_with("carried_step", "cpu"))
    assert needed | {"heads", "d"} <= set(kernels.environment())
    import carried_all

    monkeypatch.setattr(sys, "argv", ["carried_all.py", str(tmp_path), "--only", "report"])
    monkeypatch.setattr(carried_all, "run", lambda *x: {"step": x[0], "status": 0, "seconds": 0.0, "tail": []})
    with pytest.raises(SystemExit) as ended:
        carried_all.main()
    assert ended.value.code == 0
    written = json.loads((tmp_path / "carried_all.json").read_text())
    assert [step["step"] for step in written["steps"]] == ["report"]
    assert needed <= set(written["environment"])


def test_plans_are_tried_in_the_order_of_their_measured_times():
    records = json.loads((BENCHMARKS / "results/h200/carried_blocks.json").read_text())["records"]
    assert len(records) == 3
    for record in records:
        ms = {plan: median(x["forward"]) + median(x["backward"]) for plan, x in record["samples"].items()}
        config = CarriedConfig(windows=record["window"])
        layout = TileLayout(config, record["tokens"], record["tokens"])
        where = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "impl": "triton"}
        taken = [choose_plan(config, layout, 1, 20, free=free << 20, **where).plan for free in range(40000, 0, -100)]
        order = list(dict.fromkeys(taken))
        assert sorted(order) == ["mixed", "recompute", "stored"]
        assert order == sorted(order, key=ms.get)
