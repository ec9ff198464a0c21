"""Compiles the kernels that skew in registers, and a portable forward, for sm_90, without a GPU: a JSON line a kernel.

Each has its shared memory, registers, spilled bytes, loop-invariant register operands (:mod:`compiled`), accesses of
device memory narrower than 4 bytes, the places where the order of its PTX does not protect shared memory, and how often
its machine code waits for products, of which it has four instructions each.
"""

import json
import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import triton
from compiled import invariant_operands
from relative_checks import call_of

from tilewise import Options
from tilewise import triton as kernels
from tilewise.bench.ahead import compile_for
from tilewise.testing import Sizes
from tilewise.triton import config, plan
from tilewise.triton.config import Limits
from tilewise.triton.launch import launcher

KERNELS = ("attend_band", "query_pass", "key_pass", "collect_tiles", "spread", "sum_ends", "sum_rows", "attend")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def unordered(ptx: str) -> list[str]:
    """Copies into shared memory that no barrier separates from a product, and copies out of it that could be early.

    A copy in overwrites what products read, so all threads must have passed a barrier after the last product; a copy
    out reads what threads stored, so it must come after a fence and then a barrier.
    """
    found = []
    product = stored = fenced = False
    for line in ptx.splitlines():
        if "wgmma.mma_async" in line:
            product = True
        elif re.search(r"st\.shared|stmatrix", line):
            stored, fenced = True, False
        elif "fence.proxy.async" in line:
            fenced = True
        elif "bar.sync" in line:
            product = False
            stored = stored and not fenced
        elif "cp.async.bulk.tensor" in line:
            into = ".global.shared::" not in line
            if (into and product) or (not into and stored):
                found.append(line.strip())
    return found


def resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True).stdout
        code = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return {"registers": int(registers), "stack": int(stack), "waits": code.count("WARPGROUP.DEPBAR"),
            "instructions": code.count("HGMMA")}  # fmt: skip


def main():
    compile_for(90)
    plan.limits_of = lambda device: Limits(232448, True, True)
    config.SKEW_IN_REGISTERS = True

    def warm(kernel, grid, *args, **meta):
        if kernel.__name__ not in KERNELS:
            return
        made = kernel.warmup(*args, grid=grid, **meta)
        ptx = made.asm["ptx"]
        line = {"case": case, "kernel": kernel.__name__, "shared": made.metadata.shared,
                "invariant": invariant_operands(made.asm["ttgir"]), "unordered": unordered(ptx),
                "narrow": len(re.findall(r"(?:ld|st)\.global\.[bu](?:8|16)\b", ptx)),
                "products": ptx.count("wgmma.mma_async"), **resources(made.asm["cubin"])}  # fmt: skip
        print(json.dumps(line), flush=True)

    launcher.append(warm)
    for case in ("deberta", "txl", "wav2vec2_bert"):
        call = call_of(case, Sizes(2, 4, 4, 2048, 2048, 64, 64, None, published=True), "none", torch.float16, "meta")
        o, lse = torch.empty_like(call.q), torch.empty(2, 4, 2048, device="meta")
        kernels.forward(call, o, lse)
        leaves = [call.q, call.k, call.v, *call.tensors]
        kernels.backward(call, o, None, o, lse, [True] * len(leaves), [torch.empty_like(x) for x in leaves])
    # The portable forward, whose projections lie in memory.
    kernels.forward(replace(call, options=Options(skew="memory")), o, lse)


if __name__ == "__main__":
    main()
