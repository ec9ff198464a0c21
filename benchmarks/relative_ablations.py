"""What each idea of the relative kernels is worth: both passes without it, beside the whole, on one GPU.

    python benchmarks/relative_ablations.py --out ablations.json [--lengths 512,2048,8192] [--seconds 150]

* `in device memory`: projections are made beforehand and read by the loops, where Hopper makes them a tile at a time in
  the loops; of T5, which has none, the portable forward. The rows below are told apart from this one.
* `all rows`: q and k are projected on the table row of every offset, not of those alone that unsaturated tiles reach.
* `no saturated tiles`: every tile reads a projection; none is plain attention on shifted tiles.
* `atomics`: partial sums of table gradients are added to the table by atomics, not by one writer in a fixed order.
* `kept`: projections are kept for the backward, not made again in it.

`in device memory` and `kept` are tilewise.Options; for the others methods of the product are replaced here.
A backward that adds dQ by atomics in one pass is another kernel and not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import rounds
import torch
from relative_cases import buffers_of, passes_of, timed_call

from tilewise.bench.timing import peak_mib

ABLATIONS = {
    "whole": ("t5", "shaw", "deberta", "txl"),
    "in device memory": ("t5", "shaw", "deberta", "txl"),
    "all rows": ("shaw", "deberta"),
    "no saturated tiles": ("t5", "shaw", "deberta"),
    "atomics": ("t5", "shaw", "deberta"),
    "kept": ("shaw", "deberta"),
}
_MEMORY = {"skew": "memory", "projections": "recompute"}
_OPTIONS = {
    "in device memory": _MEMORY, "all rows": _MEMORY, "no saturated tiles": _MEMORY, "atomics": _MEMORY,
    "kept": {"skew": "memory", "projections": "keep"},
}  # fmt: skip


@contextmanager
def ablated(name: str):
    """Inside, the kernels run without what the ablation takes away; gives the options of the calls to make."""
    from tilewise.triton import gradients, plan

    replaced = []

    def replace(owner, attribute, value):
        replaced.append((owner, attribute, getattr(owner, attribute)))
        setattr(owner, attribute, value)

    if name == "all rows":

        def everywhere(self, n, block):
            keyed = self.ports[n].kind == "key"
            rows, others = (self.Tk, self.Tq) if keyed else (self.Tq, self.Tk)
            tile = block[::-1] if keyed else block
            return plan.Geometry.make(rows, others, self.call.offset, -plan.FAR, plan.FAR, tile, keyed)

        replace(plan.Facts, "projection", everywhere)
        # The projection is larger than dS now: neither has room in the other.
        replace(gradients._Backward, "in_place", lambda self: None)
    elif name == "no saturated tiles":
        replace(plan, "saturated", lambda *lengths: False)
    elif name == "atomics":
        from relative_atomics import table_by_atomics

        replace(gradients._Backward, "_table", table_by_atomics)
    try:
        yield _OPTIONS.get(name, {})
    finally:
        for owner, attribute, value in reversed(replaced):
            setattr(owner, attribute, value)


def jobs(lengths):
    return [("ablation", name, case, N) for N in lengths for name, cases in ABLATIONS.items() for case in cases]


def results_of(call, do):
    """O and every gradient of a call."""
    from tilewise import triton

    o, lse, grads, kept = buffers_of(call)
    triton.forward(call, o, lse, kept)
    triton.backward(call, do, None, o, lse, [True] * len(grads), grads, kept)
    return [o, *grads]


def peaks(call, do):
    """MiB of each pass beside its inputs and results."""
    found = []
    for run in passes_of(call, do):
        run()
        found.append(peak_mib(run, rounds.DEVICE))
    return found


def measure(lengths, until: float):
    records = []
    for N in lengths:
        for case in ("t5", "shaw", "deberta", "txl"):
            items, facts, exact = {"forward": {}, "backward": {}}, {}, None
            for name, cases in ABLATIONS.items():
                if case not in cases:
                    continue
                if time.time() > until:
                    records.append(dict(ablation=name, case=case, n=N, error="no time left"))
                    continue
                torch.manual_seed(0)
                try:
                    with ablated(name) as options:
                        call, do = timed_call(case, N, rounds.DEVICE, **options)
                        first, again = results_of(call, do), results_of(call, do)
                        exact = first if exact is None else exact
                        far = max(
                            ((a.double() - b.double()).norm() / b.double().norm()).item()
                            for a, b in zip(first, exact, strict=True)
                        )
                        same = all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
                        facts[name] = (peaks(call, do), far, same)
                        for pass_, run in zip(items, passes_of(call, do), strict=True):
                            items[pass_][name] = rounds.graphed(lambda run=run: run)
                except Exception as error:
                    print(f"{name} {case} N={N}: {type(error).__name__} {str(error)[-300:]}", flush=True)
                    records.append(dict(ablation=name, case=case, n=N, error=f"{type(error).__name__}: {error}"[:500]))
            for at, (pass_, runs) in enumerate(items.items()):
                if not runs:
                    continue
                samples = rounds.steady(runs, 3, 20)
                medians = {name: median(x) for name, x in samples.items()}
                for name, ms in medians.items():
                    peak, far, same = facts[name]
                    records.append({
                        "ablation": name, "case": case, "n": N, "pass": pass_, "ms": ms, "peak_mib": peak[at],
                        "relative_to_whole": far, "repeatable": same, "samples": samples[name],
                    })  # fmt: skip
                shown = "; ".join(f"{n} {t:.3f} ms {facts[n][0][at]:.0f} MiB" for n, t in medians.items())
                print(f"{pass_:8} {case} N={N}: {shown}", flush=True)
            del items
            torch.cuda.empty_cache()
    return records


def main():
    from relative_ahead import precompile

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="relative_ablations.json")
    parser.add_argument("--lengths", default="512,2048,8192")
    parser.add_argument("--seconds", type=float, default=150, help="nothing begins later than this from the start on")
    parser.add_argument("--compile-seconds", type=float, default=120)
    arguments = parser.parse_args()
    until = time.time() + arguments.seconds
    lengths = [int(n) for n in arguments.lengths.split(",")]
    precompile(jobs(lengths), arguments.compile_seconds)
    records = measure(lengths, until)
    Path(arguments.out).write_text(json.dumps({**rounds.environment(), "records": records}, indent=1))
    for record in (missing := [r for r in records if "error" in r]):
        print(
            f"without a result: {record['ablation']} {record['case']} {record['n']}: {record['error'][:100]}",
            flush=True,
        )
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
