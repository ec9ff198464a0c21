"""One small call of each case through every kernel, to be run under compute-sanitizer.

    compute-sanitizer --tool memcheck python benchmarks/relative_memcheck.py
    compute-sanitizer --tool racecheck python benchmarks/relative_memcheck.py

Lengths are no multiples of a tile, so that the ragged edges are met; saturated tiles are, too. Allocations are one
for each tensor (`PYTORCH_NO_CUDA_MEMORY_CACHING=1`, set here), so that an access beyond one is seen.
"""

from __future__ import annotations

import argparse
import os
import time

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="no case begins after this")
    arguments = parser.parse_args()
    from dataclasses import replace

    from relative_checks import call_of, run

    from tilewise import Options

    start, done = time.time(), 0
    for case, mask, dtype, s, dropout in JOBS:
        for projections in ("recompute", "keep"):
            if time.time() - start > arguments.seconds:
                print(f"stopped at the time limit after {done} of {2 * len(JOBS)} calls", flush=True)
                return
            call = call_of(case, s, mask, dtype, "cuda", dropout)
            call = replace(call, options=Options(projections=projections))
            do = torch.randn(s.B, s.H, s.Tq, s.d_v, device="cuda").to(dtype)
            o, _, grads = run(call, do, None)
            torch.cuda.synchronize()
            bad = [n for n, x in enumerate((o, *grads)) if not bool(torch.isfinite(x).all())]
            done += 1
            print(f"{'NOT FINITE ' + str(bad) if bad else 'done'} {label(case, mask, dtype, s, dropout)} {projections}",
                  flush=True)  # fmt: skip
    print(f"{done} calls", flush=True)


if __name__ == "__main__":
    main()
