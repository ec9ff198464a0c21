"""The GPU programs' lists of kernels to compile beforehand: what is missing compiles while the GPU waits."""

import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tilewise.carried.config import Options
from tilewise.carried.triton import launch, settings
from tilewise.triton import launch as starting


@pytest.fixture
def programs(monkeypatch):
    """The modules carried_blocks and carried_kernels."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
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
