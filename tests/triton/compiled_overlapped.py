"""Compiles the forward with overlapped exponentials for sm_90, without a GPU: prints one JSON line a call.

Each has its shared memory, registers and stack, places where the order of its PTX does not protect shared memory, and
what the machine code says of its products: how many waits it has (a product that runs alone is followed by its own),
and instructions that touch the registers of one that still runs. `exponentials` counts those in the loop between its
first wait, which leaves products running, and its last.
"""

import json
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from compiled_skew import TOOLS, resources, unordered

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from relative_cases import timed_call

from tilewise import triton as kernels
from tilewise.bench.ahead import compile_for
from tilewise.triton import config, plan
from tilewise.triton.config import Limits
from tilewise.triton.launch import launcher


def instructions(sass: str) -> list[str]:
    """Instructions in their order, without predicates."""
    found = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", sass, re.MULTILINE)
    return [re.sub(r"^@!?U?P\w+\s+", "", line).strip() for line in found]


def touched(code: list[str]) -> list[str]:
    """Instructions that write what a running product reads, or touch what it sums."""
    found, running, group = [], [], []
    for line in code:
        name, _, rest = line.partition(" ")
        if name.startswith("HGMMA"):
            width = int(re.match(r"HGMMA\.64x(\d+)x", name).group(1))
            to, left = (part.strip() for part in rest.split(",")[:2])
            sums = int(to[1:].split(".")[0])
            reads = range(int(left[1:].split(".")[0]), int(left[1:].split(".")[0]) + 4) if left[0] == "R" else ()
            group.append((set(range(sums, sums + width // 2)), set(reads)))
            if "gsb0" in rest:
                running.append(group)
                group = []
            continue
        if name.startswith("WARPGROUP.DEPBAR"):
            left_running = int(rest.split(",")[1], 16)
            running = running[len(running) - left_running :] if left_running else []
            continue
        used = [int(n) for n in re.findall(r"\bR(\d+)\b", rest)]
        wide = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
        written = set(range(used[0], used[0] + wide)) if used and re.match(r"R\d", rest) else set()
        for sums, reads in (product for products in [*running, group] for product in products):
            if sums & set(used) or reads & written:
                found.append(line)
                break
    return found


def main():
    compile_for(90)
    plan.limits_of = lambda device: Limits(232448, True, True)
    config.SPECIALISED = {}

    def warm(name, kernel, grid, *args, **meta):
        if kernel.__name__ != "attend_overlapped":
            return
        made = kernel.warmup(*args, grid=grid, **meta)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            sass = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True)
        code = instructions(sass.stdout)
        waits = [n for n, line in enumerate(code) if line.startswith("WARPGROUP.DEPBAR")]
        # Those of the loop come last but one: all products have ended before it and behind it.
        ends = [n for n in waits if code[n].endswith("0x0")]
        stretch = code[next(n for n in waits if n > ends[-3]) : ends[-2]]
        line = {"case": name, "shared": made.metadata.shared,
                "unordered": unordered(made.asm["ptx"]), "waits": len(waits), "touched": touched(code),
                "exponentials": sum("MUFU.EX2" in line for line in stretch),
                **resources(made.asm["cubin"])}  # fmt: skip
        print(json.dumps(line), flush=True)

    calls = {"t5": ("t5", 64), "none": ("none", 64), "t5 wide": ("t5", 128), "none wide": ("none", 128)}
    for name, (case, width) in calls.items():
        call, _ = timed_call(case, 2048, "meta", d=width)
        launcher.append(partial(warm, name))
        o, lse = torch.empty_like(call.q), torch.empty(call.q.shape[:3], device="meta")
        kernels.forward(call, o, lse)


if __name__ == "__main__":
    main()
