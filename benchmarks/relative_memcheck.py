"""One small call of each case through every kernel, to be run under compute-sanitizer.

    compute-sanitizer --tool memcheck python benchmarks/relative_memcheck.py
    compute-sanitizer --tool racecheck python benchmarks/relative_memcheck.py

Exit status 1: a result is not finite, or not every call came before the time limit. Kernels are compiled beforehand by
processes without a GPU, which the sanitizer does not watch.

Lengths are no multiples of a tile, so that the ragged edges are met; saturated tiles are, too. Allocations are one
for each tensor (`PYTORCH_NO_CUDA_MEMORY_CACHING=1`, set here), so that an access beyond one is seen.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
from relative_cases import BRAIN, HALF, SINGLE, label, sizes

SHORT, LONG = sizes(150, B=5, H=2), sizes(333, B=1, H=2)
JOBS = [
    *((case, "none", HALF, SHORT, 0.0)
      for case in ("none", "t5", "shaw", "deberta", "txl", "wavlm", "inkling", "explicit")),
    *((case, "none", HALF, LONG, 0.0) for case in ("wav2vec2_bert", "txl")),
    ("everything", "none", HALF, sizes(70, B=1, H=1), 0.0),
    ("wav2vec2_bert", "packed", BRAIN, LONG, 0.1),
    ("wav2vec2_bert", "causal_padding", HALF, sizes(150, B=2, H=2, Hk=1), 0.0),
    ("t5", "window", HALF, sizes(100, 270, B=1, H=2), 0.0),
    ("deberta", "none", HALF, sizes(1300, B=1, H=1), 0.0),
    ("vits", "lengths", HALF, sizes(150, B=2, H=2, d=80), 0.0),
    ("wav2vec2_bert", "none", SINGLE, sizes(150, B=1, H=1), 0.0),
]  # fmt: skip


CALLS = [
    (n, projections) for n, job in enumerate(JOBS) for projections in ("recompute", "keep")
    if projections == "recompute" or job[0] not in ("none", "t5")
]  # fmt: skip
"""(position in JOBS, projections). Those that are kept lie in device memory, so that on a Hopper both the kernels that
skew in registers and the portable ones run."""


def run_one(n: int, projections: str, device: str) -> list:
    """O and the gradients of a call."""
    from relative_checks import call_of, run

    from tilewise import Options

    case, mask, dtype, s, dropout = JOBS[n]
    call = replace(call_of(case, s, mask, dtype, device, dropout), options=Options(projections=projections))
    o, _, grads = run(call, torch.randn(s.B, s.H, s.Tq, s.d_v, device=device).to(dtype), None)
    return [o, *grads]


def main() -> None:
    from relative_ahead import precompile

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120, help="no case begins later than this from the start on")
    parser.add_argument("--compile-seconds", type=float, default=60)
    arguments = parser.parse_args()
    until = time.time() + arguments.seconds
    precompile([("memcheck", *call) for call in CALLS], arguments.compile_seconds)
    done, wrong = 0, 0
    for n, projections in CALLS:
        if time.time() > until:
            break
        results = run_one(n, projections, "cuda")
        torch.cuda.synchronize()
        bad = [position for position, x in enumerate(results) if not bool(torch.isfinite(x).all())]
        done, wrong = done + 1, wrong + bool(bad)
        print(f"{'NOT FINITE ' + str(bad) if bad else 'done'} {label(*JOBS[n])} {projections}", flush=True)
    print(f"{done} of {len(CALLS)} calls, {wrong} not finite", flush=True)
    sys.exit(1 if wrong or done < len(CALLS) else 0)


if __name__ == "__main__":
    main()
