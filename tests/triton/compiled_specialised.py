"""Compiles the warp-specialised forward for sm_90, without a GPU: `python compiled_specialised.py CASE:WIDTH …`.

Prints one JSON line a call: its shared memory, warps, the registers a thread that its parts ask for, how often it waits
for products (one that runs alone is followed by its own), how often turns are freed, and what the machine code
says of the groups' loops between the start of their products and the last wait for them: instructions there that touch
local memory, exponentials, and instructions that touch the registers of a product that still runs.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from compiled_overlapped import instructions, touched
from compiled_skew import TOOLS, resources

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from relative_cases import timed_call

from tilewise.bench.ahead import compile_for
from tilewise.triton import plan, specialised
from tilewise.triton.config import Limits
from tilewise.triton.launch import launcher


def loops(code: list[str]) -> list[list[str]]:
    """From the first product of a turn to the wait after which none runs, for each loop that leaves one running."""
    found = []
    for n, line in enumerate(code):
        if line.startswith("WARPGROUP.DEPBAR") and line.endswith("0x1"):
            before = [k for k in range(n) if code[k].startswith(("WARPGROUP.DEPBAR", "BRA"))]
            end = next(k for k in range(n + 1, len(code)) if code[k].startswith("WARPGROUP.DEPBAR"))
            found.append(code[before[-1] + 1 : end])
    return found


def unordered_words(code: list[str]) -> list[str]:
    """Accesses to the bytes that tell waiting warps what to run which no barrier of all warps separates.

    Stores come before such a barrier, loads behind it; all else that is stored to shared memory are matrices.
    """
    bad, whole = [], re.compile(r"BAR\.SYNC\S* 0x1$")
    for n, line in enumerate(code):
        if re.match(r"STS(\.64)? ", line):
            found = next((x for x in code[n + 1 :] if x.startswith(("BAR", "LDS", "BRA", "EXIT"))), "")
        elif line.startswith("LDS.U8"):
            found = next((x for x in reversed(code[:n]) if x.startswith(("BAR", "STS", "BRA"))), "")
        else:
            continue
        if not whole.match(found):
            bad.append(line)
    return bad


def described(made) -> dict:
    ptx, cubin = made.asm["ptx"], made.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    code = instructions(sass)
    turns = loops(code)
    asked = {int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)}
    return {
        "shared": made.metadata.shared, "warps": made.metadata.num_warps, "asked": sorted(asked), **resources(cubin),
        "local": [line for turn in turns for line in turn if line.startswith(("LDL", "STL"))],
        "exponentials": [sum("MUFU.EX2" in line for line in turn) for turn in turns], "touched": touched(code),
        "words": sum(bool(re.match(r"STS(\.64)? |LDS", line)) for line in code),
        "unordered_words": unordered_words(code),
        "freed": len(re.findall(r"mbarrier\.arrive\.(?!expect)", ptx)),
    }  # fmt: skip


def main(case: str, width: int):
    def warm(kernel, grid, *args, **meta):
        if kernel.__name__ == "attend_specialised":
            made = kernel.warmup(*args, grid=grid, **meta)
            print(json.dumps({"case": f"{case}:{width}", "groups": meta["GROUPS"], **described(made)}), flush=True)

    launcher.append(warm)
    call, _ = timed_call(case, 2048, "meta", d=width)
    o, lse = torch.empty_like(call.q), torch.empty(call.q.shape[:3], device="meta")
    specialised.forward(plan.Layout(call), o, lse)
    launcher.pop()


if __name__ == "__main__":
    compile_for(90)
    plan.limits_of = lambda device: Limits(232448, True, True)
    for job in sys.argv[1:]:
        name, width = job.split(":")
        main(name, int(width))
