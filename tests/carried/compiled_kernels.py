"""Compile every kernel of the 3B model's shapes for sm_90 with no GPU.

Prints registers, spilled bytes, shared memory, matrix instructions, tiles of exponentials, and of the dots those whose
left operand lies in registers.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from carried_cases import CarriedConfig

from tilewise.bench.ahead import compile_for
from tilewise.carried import TileLayout
from tilewise.carried.state import _call
from tilewise.carried.triton import decode
from tilewise.carried.triton import launch as kernels
from tilewise.triton.launch import launcher

SHAPE = {"queries": "BM", "keys": "BN", "warps": "num_warps", "stages": "STAGES"}
PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"


compiled_here: set[tuple] = set()


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
    exps = len(re.findall(r"math\.exp2 .* tensor<\d+x\d+xf32", compiled.asm["ttgir"]))
    shape = " ".join(f"{name} {meta[key]}" for name, key in SHAPE.items() if key in meta)
    used = f"registers {registers} spills {spills} shared {compiled.metadata.shared} wgmma {mma} exps {exps}"
    centred = " centred" if meta.get("CENTRE") else ""
    print(f"  {kernel.fn.__name__}: {shape} {used} dots {len(dots)} left {register}{centred}", flush=True)


def layer(plan, index, *, T=4096, H=20, Hk=4, d=128, forward=True, **options):
    """What one layer of a block launches under a plan, forward and backward; `options` are those of the block."""
    config, dtype = CarriedConfig(plan=plan, **options), torch.bfloat16
    layout = TileLayout(config, T, T, device="meta")
    tiles, last = layout.layers[index], index == config.layers - 1
    learned = config.scaling == "gain" and index > 0
    facts = (layout.uniform, layout.back, layout.plain, tiles.window)
    call, reads, writes = _call(config, facts, index, plan, "triton", d, dtype, last, learned, 0.0, False)

    def by_token(h):
        return torch.empty(1, T, h, d, dtype=dtype, device="meta").transpose(1, 2)

    def buffer(of):
        return torch.empty(1, H, layout.slots, config.tile, config.tile, dtype=of, device="meta")

    def tensors(count):
        centred = any(call.options_of(count).rounded)
        return ([by_token(H) for _ in range(count)], [by_token(Hk) for _ in range(count)],
                [torch.empty(H, device="meta") for _ in range(count) if config.scaling == "gain"],
                [torch.empty(1, Hk, d, device="meta") for _ in range(count) if centred],
                layout.span(index, count))  # fmt: skip

    v, O, lse = by_token(Hk), by_token(H), torch.empty(1, H, T, device="meta")
    z_in = buffer(call.options.carry_dtype) if reads else None
    z_out = buffer(call.options.carry_dtype) if writes or call.accumulate else None
    if forward:
        q, k, gain, centre, bounds = tensors(call.forward)
        given = (tiles.rows, z_in, z_out, call.accumulate, None, None, call.options_of(call.forward))
        kernels.forward(q, k, v, gain, centre, bounds, *given)
    q, k, gain, centre, bounds = tensors(call.backward)
    read_e, write_e = call.links, plan != "recompute" and index > 0
    e = buffer(call.grad_dtype) if read_e or write_e else None
    z = {"none": None, "entering": z_in, "own": z_out}[call.saved]
    given = (tiles.rows, tiles.columns, z, call.saved == "own", e, read_e, write_e, call.push, None, None)
    kernels.backward(O, q, k, v, O, lse, gain, centre, bounds, *given, call.options_of(call.backward))


def decoding(T=8192, H=20, Hk=4, d=128, queries=1, row_dtype=torch.float32):
    """One step of a middle layer, which reads and writes a row of scores."""
    q, k, v = (
        torch.empty(1, h, n, d, dtype=torch.bfloat16, device="meta") for h, n in ((H, queries), (Hk, T), (Hk, T))
    )
    row = torch.empty(1, H, queries, T, device="meta", dtype=row_dtype)
    given = {"mask": None, "offset": None, "gain": None, "sink": None, "row_dtype": row_dtype}
    decode.decode(q, k, v, row, 1, CarriedConfig(), **given)


if __name__ == "__main__":
    compile_for(90)
    launcher.append(resources)
    CASES = {
        "first layer, mixed": dict(plan="mixed", index=0),
        "second layer, mixed": dict(plan="mixed", index=1),
        "third layer, mixed": dict(plan="mixed", index=2),
        "last layer": dict(plan="mixed", index=3),
        "first layer, stored": dict(plan="stored", index=0),
        "second layer, stored": dict(plan="stored", index=1),
        "plain": dict(plan="recompute", index=0, layers=1),
        "plain, window 1024": dict(plan="recompute", index=0, layers=1, windows=1024),
        "third layer, mixed, window 1024": dict(plan="mixed", index=2, windows=1024),
        "recompute of four": dict(plan="recompute", index=3),
        "recompute of two with gains": dict(plan="recompute", index=1, scaling="gain", forward=False),
    }
    for name in sys.argv[1:] or [*CASES, "decode"]:
        print(name, flush=True)
        compiled_here.clear()
        if name == "decode":
            decoding()
            decoding(queries=8)
            compiled_here.clear()
            decoding(row_dtype=torch.float16)
        else:
            layer(**CASES[name])
