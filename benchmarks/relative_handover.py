"""A kernel that only starts a second group of warps, under compute-sanitizer: what the tool says of that alone.

    compute-sanitizer --tool racecheck python benchmarks/relative_handover.py

Triton lets warps of a program wait until the first four tell them, by a byte in shared memory for each, which function
to run. Kernels with groups of warps (:mod:`tilewise.triton.specialised`) have this code, too, and nothing else of it
stores to those bytes.
"""

from __future__ import annotations

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

GROUPS = 2


@gluon.jit
def _store(out, group: gl.constexpr):
    i = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(out + group * 128 + i, i + group)


@gluon.jit
def hand_over(out):
    """out[group, i] = group + i, each group by four warps of its own."""
    gl.warp_specialize([(_store, (out, 0)), (_store, (out, 1))], [4], [64])


def main() -> int:
    out = torch.full((GROUPS, 128), -1, dtype=torch.int32, device="cuda")
    hand_over[(8,)](out, num_warps=4)
    right = torch.arange(128, device="cuda") + torch.arange(GROUPS, device="cuda")[:, None]
    ok = bool((out == right).all())
    print("done hand-over alone" if ok else "WRONG hand-over alone", flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
