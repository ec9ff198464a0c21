"""Compile every kernel of the 3B model's shapes for sm_90 with no GPU.

Prints registers, spilled bytes, shared memory, matrix instructions, and of the dots those whose left operand lies in
registers.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from carried_cases import CarriedConfig
from triton.backends.compiler import GPUTarget

from tilewise.carried import TileLayout
from tilewise.carried.config import Options
from tilewise.carried.triton import decode
from tilewise.carried.triton import launch as kernels
from tilewise.triton.launch import launcher

SHAPE = {"queries": "BM", "keys": "BN", "warps": "num_warps", "stages": "STAGES"}
PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"


compiled_here: set[tuple] = set()


class NoGPU:
    """Enough of a driver to compile for sm_90."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def is_active(self):
        return True


def resources(kernel, grid, *args, **meta):
    """Compile instead of run; a kernel that a layer starts again only once."""
    key = (kernel.fn.__name__, *sorted(map(str, meta.items())))
    if key in compiled_here:
        return
    compiled_here.add(key)
    compiled = kernel.warmup(*args, grid=grid, **meta)
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        done = subprocess.run(
            [PTXAS, "-v", "-arch=sm_90a", ptx, "-o", ptx.with_suffix(".cubin")], capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    registers = int(re.search(r"Used (\d+) registers", done.stderr).group(1))
    spills = int(re.search(r"(\d+) bytes spill stores", done.stderr).group(1))
    mma = compiled.asm["ptx"].count("wgmma.mma_async")
    dots = [x for x in compiled.asm["ttgir"].splitlines() if "warp_group_dot " in x]
    register = sum(" : tensor<" in x for x in dots)
    shape = " ".join(f"{name} {meta[key]}" for name, key in SHAPE.items() if key in meta)
    used = f"registers {registers} spills {spills} shared {compiled.metadata.shared} wgmma {mma}"
    print(f"  {kernel.fn.__name__}: {shape} {used} dots {len(dots)} left {register}", flush=True)


def tensors(count, T, H, Hk, d, dtype=torch.bfloat16):
    new = lambda h: torch.empty(1, T, h, d, dtype=dtype, device="meta").transpose(1, 2)  # noqa: E731
    return [new(H) for _ in range(count)], [new(Hk) for _ in range(count)], new(Hk)


def layer(name, config=None, *, T=4096, H=20, Hk=4, d=128, count=1, z_in=False, z_out=False, accumulate=False,
          own=False, read_e=False, write_e=False, push=False, backward=True, forward=True, learned=False):  # fmt: skip
    print(name, flush=True)
    compiled_here.clear()
    config = config or CarriedConfig()
    q, k, v = tensors(count, T, H, Hk, d)
    layout = TileLayout(config, T, T, device="meta")
    tiles = layout.layers[0]
    buffer = lambda dtype: torch.empty(1, H, layout.slots, config.tile, config.tile, dtype=dtype, device="meta")  # noqa: E731
    centre = [torch.empty(1, Hk, d, device="meta") for _ in range(count)] if z_in or z_out or own else []
    options = Options(d**-0.5, 1, 0.0, 0.0, config.tile, True, layout.back, (z_out,) * count, torch.float16,
                      layout.plain, tiles.window)  # fmt: skip
    O = torch.empty_like(q[0])
    lse = torch.empty(1, H, T, device="meta")
    bounds = (tiles.bounds, tiles.rows)
    if forward:
        z = [buffer(torch.float16) if wanted else None for wanted in (z_in, z_out)]
        kernels.forward(q, k, v, [], centre, *bounds, *z, accumulate, None, None, options)
    if backward:
        e = buffer(torch.bfloat16) if read_e or write_e else None
        z = buffer(torch.float16) if z_in or own else None
        last = (tiles.columns, z, own, e, read_e, write_e, push, None, None, options)
        gain = [torch.empty(H, device="meta") for _ in q] if learned else []
        kernels.backward(O, q, k, v, O, lse, gain, centre, *bounds, *last)


def decoding(T=8192, H=20, Hk=4, d=128, queries=1):
    """One step of a middle layer, which reads and writes a row of scores."""
    q, k, v = (
        torch.empty(1, h, n, d, dtype=torch.bfloat16, device="meta") for h, n in ((H, queries), (Hk, T), (Hk, T))
    )
    row = torch.empty(1, H, queries, T, device="meta")
    given = {"mask": None, "offset": None, "gain": None, "sink": None, "row_dtype": None}
    decode.decode(q, k, v, row, 1, CarriedConfig(), **given)


if __name__ == "__main__":
    triton.runtime.driver.set_active(NoGPU())
    launcher.append(resources)
    window = CarriedConfig(windows=1024)
    CASES = {
        "first layer, mixed": dict(read_e=True),
        "second layer, mixed": dict(count=2, z_out=True, read_e=True, write_e=True),
        "third layer, mixed": dict(z_out=True, accumulate=True, own=True, read_e=True, write_e=True),
        "last layer": dict(z_in=True, write_e=True),
        "first layer, stored": dict(z_out=True, own=True, read_e=True),
        "plain": dict(),
        "plain, window 1024": dict(config=window),
        "third layer, mixed, window 1024": dict(
            config=window, z_out=True, accumulate=True, own=True, read_e=True, write_e=True
        ),
        "recompute of four": dict(count=4, push=True),
        "recompute of two with gains": dict(count=2, push=True, forward=False, learned=True),
    }
    for name in sys.argv[1:] or [*CASES, "decode"]:
        if name == "decode":
            print(name, flush=True)
            decoding()
            decoding(queries=8)
        else:
            layer(name, **CASES[name])
