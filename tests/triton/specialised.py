"""Which kernels would be compiled for a call, without compiling them: `python specialised.py CASE …` prints JSON lines.

Each line has the case, a kernel, how many kernels of that name the first of several lengths and offsets needs, all of
them, and for which values of MASKED. Lengths are in one bucket of every tile table: multiples of 16, of 64, of 128 and
odd ones. Where blocks of keys end with the keys, kernels need no mask of elements and are compiled without.
"""

import json
import sys
from collections import defaultdict

import torch
from relative_checks import call_of, run

import tilewise.triton.plan as plan
from tilewise.bench.ahead import compile_for
from tilewise.testing import Sizes
from tilewise.triton.config import Limits
from tilewise.triton.launch import launcher

LENGTHS = [
    (2416, 2416, 0), (2401, 2401, 0), (2448, 2803, 355), (2403, 2803, 391),
    (2432, 2432, 0), (2496, 2496, 0), (2401, 2816, 415), (2560, 2752, 100),
]  # fmt: skip


def main(case: str):
    found = defaultdict(lambda: [set() for _ in LENGTHS])
    masked = defaultdict(set)
    for position, (Tq, Tk, offset) in enumerate(LENGTHS):

        def note(kernel, grid, *args, at=position, **meta):
            binder = kernel.device_caches[0][-1]
            _, specialization, options = binder(*args, debug=False, **meta)
            found[kernel.__name__][at].add(str((specialization, options)))
            if "MASKED" in meta:
                masked[kernel.__name__].add(meta["MASKED"])

        sizes = Sizes(2, 4, 4, Tq, Tk, 64, 64, offset, published=True)
        call = call_of(case, sizes, "none", torch.float16, "meta")
        launcher.append(note)
        run(call, torch.empty(2, 4, Tq, 64, dtype=torch.float16, device="meta"), torch.empty(2, 4, Tq, device="meta"))
        launcher.pop()
    for kernel, keys in found.items():
        line = {"case": case, "kernel": kernel, "first": len(keys[0]), "all": len(set.union(*keys)),
                "masked": sorted(masked[kernel])}  # fmt: skip
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    compile_for(90)
    plan.limits_of = lambda device: Limits.of((9, 0), 232448)
    for name in sys.argv[1:]:
        main(name)
