"""A kernel that only starts a second group of warps, under compute-sanitizer: what the tool says of that alone.

    compute-sanitizer --tool racecheck python benchmarks/relative_handover.py

Triton lets warps of a program wait until the first four tell them, by a byte in shared memory for each, which function
to run. Kernels with groups of warps (:mod:`tilewise.triton.specialised`) have this code, too, and nothing else of it
stores to those bytes. Of one more group of four warps racecheck reports nothing; so here are two, with as many warps as
those kernels' groups have: four, and a single one, which Triton fills up with three that only wait.
"""

from __future__ import annotations

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WARPS = (4, 4, 1)


@gluon.jit
def _store(out, group: gl.constexpr, WARPS: gl.constexpr):
    i = gl.arange(0, 128, gl.BlockedLayout([4 // WARPS], [32], [WARPS], [0]))
    gl.store(out + group * 128 + i, i + group)


@gluon.jit
def hand_over(out):
    """out[group, i] = group + i, each group by warps of its own."""
    gl.warp_specialize([(_store, (out, 0, 4)), (_store, (out, 1, 4)), (_store, (out, 2, 1))], [4, 1], [64, 24])


def main() -> int:
    out = torch.full((len(WARPS), 128), -1, dtype=torch.int32, device="cuda")
    hand_over[(8,)](out, num_warps=4)
    right = torch.arange(128, device="cuda") + torch.arange(len(WARPS), device="cuda")[:, None]
    ok = bool((out == right).all())
    print("done hand-over alone" if ok else "WRONG hand-over alone", flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
