"""The GPU programs' lists of kernels to compile beforehand, and what their results say of the plans' order."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
import test_kernels_gpu
import torch

from tilewise.carried import CarriedConfig, TileLayout
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


def test_every_gpu_test_says_what_it_launches():
    names = {name for name in vars(test_kernels_gpu) if name.startswith("test_")}
    assert names == {*test_kernels_gpu.LAUNCHED, "test_uninitialised_memory_is_nan", "test_compiled_blocks"}


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
