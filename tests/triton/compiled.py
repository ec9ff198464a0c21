"""Compiles the attention kernels ahead of time, without a GPU: `python compiled.py CASE@ARCH …` prints JSON lines.

CASE/ieee and CASE/tf32 are fp32 calls with those products, others fp16. Each line has the kernel, the architecture, the
shared memory it needs, how often its PTX names wgmma and tf32, the sums that its products carry on from turn to turn of
a loop, and the loop-invariant register tensors that are the left operand of a Hopper dot: what ptxas before 13.3
overwrites (see :mod:`tilewise.triton.core`).
"""

import json
import re
import sys
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from relative_checks import call_of, run

import tilewise.triton.plan as plan
from tilewise import Options
from tilewise.bench.ahead import compile_for
from tilewise.testing import Sizes
from tilewise.triton.config import Limits
from tilewise.triton.launch import launcher

SHARED = {80: 166912, 86: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Bytes of shared memory that one program may use."""


def in_loops(text: str) -> Iterator[tuple[str, list[set[str]]]]:
    """Each line, and of every loop around it the values made in it before: those it carries on, and its own."""
    loops = []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        while loops and line.strip().startswith("}") and indent <= loops[-1][0]:
            loops.pop()
        if "scf.for" in line:
            loops.append((indent, set(re.findall(r"(%[\w#]+) = %", line.split("iter_args")[-1]))))
            continue
        made = [names for _, names in loops]
        yield line, made
        if value := re.match(r"\s*(%\w+)(?::\d+)? =", line):
            for names in made:
                names.add(value.group(1))


def invariant_operands(ttgir: str) -> list[str]:
    """Register tensors made outside a loop and used inside it as the first operand of ``warp_group_dot``."""
    found = []
    for line, made in in_loops(ttgir):
        dot = re.search(r"warp_group_dot (%\w+)(?:#\d+)?,.*?: (tensor|!ttg)", line)
        if dot and made and dot.group(2) == "tensor" and not any(dot.group(1) in names for names in made):
            found.append(line.strip())
    return found


def chained_sums(ttgir: str) -> list[str]:
    """Products whose accumulator depends on the turn before: one chain of additions over the whole loop."""
    found = []
    for line, made in in_loops(ttgir):
        dot = re.search(r"tt\.dot %[\w#]+, %[\w#]+, (%\w+)", line)
        if dot and any(dot.group(1) in names for names in made):
            found.append(line.strip())
    return found


@triton.jit
def _trapped(q, k, out, edge, n, D: tl.constexpr):
    i = tl.arange(0, D)
    tile = tl.load(q + i[:, None] * D + i[None, :]) + tl.load(edge + i)[None, :]
    total = tl.zeros([D, D], tl.float32)
    for j in range(0, n):
        total += tl.dot(tile, tl.load(k + j * D * D + i[:, None] * D + i[None, :]))
    tl.store(out + i[:, None] * D + i[None, :], total)


def main(case: str, arch: int):
    compile_for(arch)
    seen = set()

    def warm(kernel, grid, *args, **meta):
        made = kernel.warmup(*args, grid=grid, **meta)
        if made.hash in seen:
            return
        seen.add(made.hash)
        found = invariant_operands(made.asm["ttgir"])
        line = {"kernel": kernel.__name__, "arch": arch, "shared": made.metadata.shared, "limit": SHARED[arch],
                "wgmma": made.asm["ptx"].count("wgmma.mma_async"), "tf32": made.asm["ptx"].count(".tf32"),
                "chained": len(chained_sums(made.asm["ttgir"])), "invariant": found}  # fmt: skip
        print(json.dumps(line), flush=True)

    if case == "trap":
        half = torch.empty(64, 64, dtype=torch.float16, device="meta")
        warm(_trapped, (1,), half, half, torch.empty(64, 64, device="meta"), half, 8, D=64, num_warps=4)
        return
    launcher.append(warm)
    plan.limits_of = lambda device: Limits(SHARED[arch], arch >= 90)
    case, _, precision = case.partition("/")
    dtype, d = (torch.float32, 16) if precision else (torch.float16, 64)
    sizes = Sizes(2, 4, 4, 2048, 2048, d, d, None, published=True)
    call = call_of(case, sizes, "none", dtype, "meta", options=Options(fp32=precision or "auto"))
    do = torch.empty(2, 4, 2048, d, dtype=dtype, device="meta")
    run(call, do, torch.empty(2, 4, 2048, device="meta"))


if __name__ == "__main__":
    for job in sys.argv[1:]:
        name, arch = job.split("@")
        main(name, int(arch))
