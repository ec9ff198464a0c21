"""One sequence of up to 65,536 tokens: time per squared length and peak memory of both passes.

python benchmarks/relative_scaling.py --out scaling.json [--lengths 8192,16384,32768,65536] [--seconds 60]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from relative_cases import MECHANISMS, passes_of, timed_call


def once(run) -> float:
    """Milliseconds of one run, the last of three."""
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def main() -> None:
    from relative_ahead import precompile

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="relative_scaling.json")
    parser.add_argument("--lengths", default="8192,16384,32768,65536")
    parser.add_argument("--seconds", type=float, default=120, help="nothing begins later than this")
    parser.add_argument("--compile-seconds", type=float, default=60)
    arguments = parser.parse_args()
    until = time.time() + arguments.seconds
    lengths = [int(n) for n in arguments.lengths.split(",")]
    precompile([("scaling", case, N) for N in lengths for case in MECHANISMS], arguments.compile_seconds)
    records = []
    for N in lengths:
        for case in MECHANISMS:
            if time.time() > until:
                records.append({"case": case, "n": N, "error": "no time left"})
                continue
            try:
                runs = passes_of(*timed_call(case, N, "cuda", tokens=N, H=12))
                for pass_, run in zip(("forward", "backward"), runs, strict=True):
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    ms = once(run)
                    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
                    records.append({"case": case, "n": N, "pass": pass_, "ms": ms, "peak_mib": peak,
                                    "ns_per_pair": ms * 1e6 / N**2, "kib_per_token": peak * 1024 / N})  # fmt: skip
                    print(f"{case:8} N={N:6} {pass_:8} {ms:9.2f} ms {ms * 1e6 / N**2:7.3f} ns a pair "
                          f"{peak:8.0f} MiB {peak * 1024 / N:7.2f} KiB a token", flush=True)  # fmt: skip
            except Exception as error:
                text = f"{type(error).__name__}: {str(error)[-300:]}"
                records.append({"case": case, "n": N, "error": text})
                print(f"{case} N={N}: {text}", flush=True)
            torch.cuda.empty_cache()
    gpu = torch.cuda.get_device_properties(0).name
    Path(arguments.out).write_text(json.dumps({"gpu": gpu, "torch": torch.__version__, "records": records}, indent=1))
    if late := [f"{r['case']} {r['n']}" for r in records if "error" in r]:
        print("without a result:", ", ".join(late), flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
