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


def test_precision_study_of_the_kernels():
    """Shifted rows with scores of spread 2, all plans in bf16: errors as multiples of plain attention's."""
    lines = script("interpreted_study.py", "4", TRITON_INTERPRET="1").splitlines()
    assert [x.split()[0] for x in lines] == ["recompute", "stored", "mixed"]


# Of the products of an iteration, those with P or E on the left; these are new every time. Q and K are not, and ptxas
# before 13.3 overwrites such an operand if it lies in registers.
COMPILED = {
    "third layer, mixed": ({"attend": (1, 2), "keys_gradient": (2, 3), "queries_from_e": (0, 1)}, 0),
    "recompute of four": ({"attend": (1, 5), "keys_gradient": (2, 7), "queries_again": (1, 6)}, 2048),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver's own target is used where there is a GPU")
@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile_for_hopper_within_its_shared_memory(name):
    products_of, spills = COMPILED[name]
    lines = [x for x in script("compiled_kernels.py", name).splitlines() if "registers" in x]
    number = re.compile(r"(spills|shared|wgmma|dots|left) (\d+)")
    kernels = {x.split(":")[0].strip(): {key: int(n) for key, n in number.findall(x)} for x in lines}
    assert set(kernels) - {"row_shift", "row_delta"} == set(products_of)
    for kernel, (fresh, products) in products_of.items():
        found = kernels[kernel]
        assert found["shared"] <= settings.SHARED
        assert found["spills"] <= spills
        assert found["wgmma"] > 0
        assert found["left"] * products <= found["dots"] * fresh


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
