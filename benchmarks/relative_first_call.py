"""A user's first call: seconds of a cold forward and backward, with an empty Triton cache, and of those after it.

    python benchmarks/relative_first_call.py --out relative_first_call.json [--length 2048] [--seconds 120]

Each mechanism has two processes, one after the other: the first finds an empty cache and compiles every kernel, the
second finds what the first compiled. Both have a GPU context, their tensors and PyTorch's matrix products before the
clock starts; then come two forwards and two backwards through :func:`tilewise.attention`, each waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from relative_cases import HALF, sizes

CASES = ("t5", "shaw", "deberta", "txl")
PARTS = ("import", "forward", "backward", "second_forward", "second_backward")


def first_call(case: str, N: int, device: str, impl: str = "triton") -> dict[str, float]:
    """Seconds of PARTS in this process: 16,384 tokens a batch, 12 heads × 64, fp16."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    start = time.perf_counter()
    from tilewise import attention
    from tilewise.testing import CASES as PUBLISHED

    taken = {"import": time.perf_counter() - start}
    s = sizes(N, B=max(1, 16384 // N) if device == "cuda" else 1, H=12 if device == "cuda" else 1)
    made = PUBLISHED[case]
    x = {name: t.requires_grad_() for name, t in made.inputs(s, HALF, device, 0).items()}
    arguments, do = made.arguments(x, s), torch.randn(s.B, s.H, s.Tq, s.d_v, dtype=HALF, device=device)
    torch.mm(do[0, 0], do[0, 0].T)
    wait()
    for prefix in ("", "second_"):
        start = time.perf_counter()
        o = attention(x["q"], x["k"], x["v"], terms=arguments["terms"], scale=arguments["scale"], impl=impl)
        wait()
        taken[f"{prefix}forward"] = time.perf_counter() - start
        start = time.perf_counter()
        torch.autograd.grad(o, list(x.values()), do)
        wait()
        taken[f"{prefix}backward"] = time.perf_counter() - start
    return taken


def measured(case: str, words: list[str], until: float) -> list[dict]:
    """The records of a mechanism's two processes, which share a cache that is empty at first."""
    found = []
    with tempfile.TemporaryDirectory() as cache:
        for kind in ("empty", "filled"):
            record = {"case": case, "cache": kind}
            found.append(record)
            seconds = until - time.time()
            if seconds <= 0:
                record["error_text"] = "no time left"
                continue
            try:
                done = subprocess.run(words, capture_output=True, text=True, timeout=seconds,
                                      env=os.environ | {"TRITON_CACHE_DIR": cache})  # fmt: skip
            except subprocess.TimeoutExpired:
                record["error_text"] = f"stopped after {seconds:.0f} s"
                continue
            if done.returncode:
                record["error_text"] = done.stderr[-400:]
                continue
            record["seconds"] = json.loads(done.stdout.splitlines()[-1])
            record["kernels"] = len(list(Path(cache).rglob("*.cubin")))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("relative_first_call.json"))
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(first_call(arguments.child, arguments.length, "cuda")))
        return
    from rounds import environment

    until, records = time.time() + arguments.seconds, []
    for case in arguments.cases.split(","):
        words = [sys.executable, __file__, "--child", case, "--length", str(arguments.length)]
        records += measured(case, words, until)
        for record in records[-2:]:
            shown = record.get("error_text") or ", ".join(f"{k} {v:.2f} s" for k, v in record["seconds"].items())
            print(f"{case} with an {record['cache']} cache: {shown}".replace("an filled", "a filled"), flush=True)
    found = {**environment(), "length": arguments.length, "records": records}
    arguments.out.write_text(json.dumps(found, indent=1))
    sys.exit(1 if any("error_text" in record for record in records) else 0)


if __name__ == "__main__":
    main()
