"""One sequence of up to 65,536 tokens: time per squared length and peak memory of both passes, and O beside the oracle.

    python benchmarks/relative_scaling.py --out scaling.json [--lengths 8192,16384,32768,65536] [--seconds 60]

Of the first and last heads a few rows of O are compared with the fp64 reference, which forms those rows alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from relative_cases import MECHANISMS, buffers_of, passes_of, timed_call
from rounds import environment

from tilewise.reference import attention_reference
from tilewise.terms import Port
from tilewise.testing import error_budget


def once(run) -> float:
    """Milliseconds of one run, the last of three."""
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def row_of(call, h: int, i: int, dtype) -> torch.Tensor:
    """O of the first sequence's query i and head h by the reference in `dtype`, [1, 1, 1, d]."""
    mine = lambda x: None if x is None else x[h % x.shape[0]][None].to(dtype)  # noqa: E731
    q = call.q[:1, h : h + 1, i : i + 1].to(dtype)
    hk = h // (call.q.shape[1] // call.k.shape[1])
    k, v = (x[:1, hk : hk + 1].to(dtype) for x in (call.k, call.v))
    content, ports = q, []
    for p in call.ports:
        left = None if p.left is None else p.left[:1, h : h + 1, i : i + 1].to(dtype)
        if p.content is not None:
            content = q + mine(p.content)[:, None]
        if p.bias is not None or p.content is not None:
            left = q if p.bias is None else q + mine(p.bias)[:, None]
        ports.append(Port(p.kind, p.rows, mine(p.table), left))
    o, _ = attention_reference(content, k, v, ports, call.mask, call.scale, call.offset + i, 0.0, None)
    return o


def checked(call, o) -> dict:
    """The error of a few rows of O, what is allowed (twice what the reference in q's dtype errs), and if that held."""
    _, H, N, _ = o.shape
    places = [(h, i) for h in dict.fromkeys((0, H - 1)) for i in (0, N // 2 + 1, N - 1)]
    exact, low = (torch.cat([row_of(call, h, i, t) for h, i in places], 2) for t in (torch.float64, call.q.dtype))
    got = torch.cat([o[:1, h : h + 1, i : i + 1] for h, i in places], 2)
    found = error_budget("o", got, low, exact)
    return {"rows": len(places), "error": found.error, "allowed": found.allowed, "ok": found.ok}


def main() -> None:
    from relative_ahead import precompile

    from tilewise import triton

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
                records.append({"case": case, "n": N, "error_text": "no time left"})
                continue
            try:
                call, do = timed_call(case, N, "cuda", tokens=N, H=12)
                o, lse, _, kept = buffers_of(call)
                triton.forward(call, o, lse, kept)
                check = {"case": case, "n": N, "pass": "check", **checked(call, o)}
                del o, lse, kept
                records.append(check)
                print(f"{case:8} N={N:6} check    {check['rows']} rows, error {check['error']:.2e}, "
                      f"allowed {check['allowed']:.2e}", flush=True)  # fmt: skip
                if not check["ok"]:
                    check["error_text"] = "over what is allowed"
                runs = passes_of(call, do)
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
                records.append({"case": case, "n": N, "error_text": text})
                print(f"{case} N={N}: {text}", flush=True)
            torch.cuda.empty_cache()
    Path(arguments.out).write_text(json.dumps({**environment(), "records": records}, indent=1))
    if late := [f"{r['case']} {r['n']}: {r['error_text']}" for r in records if "error_text" in r]:
        print("without a result:", ", ".join(late), flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
