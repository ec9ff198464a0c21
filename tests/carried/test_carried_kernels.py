"""The Triton kernels: under the interpreter against the oracle, and compiled for sm_90 with no GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from carried_cases import CarriedConfig, inputs, run

from tilewise.carried.triton import settings

HERE = Path(__file__).parent


def script(name, *arguments, **environment):
    """Run a script of this folder in its own process: the interpreter has to be chosen before Triton is imported."""
    command = [sys.executable, "-W", "ignore", HERE / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_kernels_under_the_interpreter():
    """All cases of interpreted_kernels.py, each with a check that two runs are bitwise equal where it says so."""
    lines = script("interpreted_kernels.py", TRITON_INTERPRET="1").splitlines()
    assert len(lines) == 18


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver's own target is used where there is a GPU")
def test_kernels_compile_for_hopper_within_its_shared_memory():
    lines = [x for x in script("compiled_kernels.py", "third layer, mixed").splitlines() if "registers" in x]
    kernels = {
        x.split(":")[0].strip(): dict(re.findall(r"(spills|shared|wgmma|dots|register) (\d+)", x)) for x in lines
    }
    assert set(kernels) == {"row_shift", "attend", "row_delta", "keys_gradient", "queries_from_e"}
    for name in ("attend", "keys_gradient", "queries_from_e"):
        assert int(kernels[name]["shared"]) <= settings.SHARED
        assert int(kernels[name]["spills"]) == 0
        assert int(kernels[name]["wgmma"]) > 0
        # Only P and E, new in every iteration, may be left operands in registers: ptxas before 13.3 overwrites Q there.
        assert 2 * int(kernels[name]["register"]) <= int(kernels[name]["dots"])


@pytest.mark.parametrize("width", [16, 64, 128, 256])
@pytest.mark.parametrize("bytes_", [2, 4])
@pytest.mark.parametrize("tile", [16, 64, 128])
def test_tiles_divide_a_packed_tile(width, bytes_, tile):
    shapes = [
        f(width, bytes_, tile, n, 2) for n in (1, 2, 4) for f in (settings.forward_tiles, settings.backward_tiles)
    ]
    shapes += [settings.again_tiles(width, bytes_, tile, 4, 0), settings.product_tiles(width, bytes_, tile)]
    for shape in shapes:
        assert tile % shape.queries == tile % shape.keys == 0
        assert min(shape.queries, shape.keys) >= 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernels run")
def test_an_explicit_implementation_does_not_fall_back():
    q, k, v = inputs(layers=1, dtype=torch.float32)
    with pytest.raises(ValueError, match="the kernels run on cuda; nearest legal call: impl='blocked'"):
        run(CarriedConfig(layers=1, impl="triton"), q, k, v)
