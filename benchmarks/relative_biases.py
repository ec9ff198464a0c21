"""Transformer-XL's biases in the kernels: checks, then times beside sums with the query formed before them, and cuDNN.

    python benchmarks/relative_biases.py --out biases.json --seconds 55

Checks are those of `relative_linear.py --only txl`. Times have everything that the biases cost: `kernels` leaves them
to the kernels, `sums` forms q + u and q + v in memory, and dQ and the biases' gradients from two gradients of its size
afterwards. CUDA graphs, L2 flushed, rounds interleaved with cuDNN's attention without any term.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import rounds
import torch
from relative_cases import passes_of, ready, timed_call
from relative_linear import run_checks
from relative_linear_checks import OTHERS, checks, registers

LENGTHS = (8192, 2048, 512, 128)
STAGES = {"QUERIES_ALONE": (3, None), "KEYS_ALONE": (3, None)}
VARIANTS = {"kernels": {}, "kernels, 3 stages": STAGES, "sums": {}}


def passes(variant: str, N: int, device: str):
    """(forward, backward) closures of a variant."""
    from tilewise import triton

    call, do = timed_call("txl", N, device)
    if variant != "sums":
        return passes_of(call, do, keep=False)
    (port,) = call.ports
    o = torch.empty_like(call.q)
    lse = torch.empty(call.q.shape[:3], device=device)

    def formed():
        bare = replace(port, left=call.q + port.bias[:, None], content=None, bias=None)
        return replace(call, q=call.q + port.content[:, None], ports=(bare,))

    before = formed()
    parts = [torch.empty_like(x) for x in (before.q, call.k, call.v, *before.tensors)]

    def backward():
        triton.backward(before, do, None, o, lse, [True] * len(parts), parts)
        return parts[0] + parts[-1], parts[0].sum((0, 2)), parts[-1].sum((0, 2))

    return (lambda: triton.forward(formed(), o, lse)), backward


def perform(variant: str, N: int) -> None:
    """What a time will launch, on meta tensors, for :func:`relative_ahead.perform`."""
    with registers(True, **VARIANTS[variant]):
        for run in passes(variant, N, "meta"):
            run()


def run_times(record: rounds.Record, lengths: list[int]) -> None:
    for N in record.in_time(lengths, 6.0):
        cell = rounds.Cell(N)
        for variant, changes in VARIANTS.items():
            with record.attempt(f"{variant} N={N}"), registers(True, **changes):
                for pass_, run in zip(cell.runs, ready(passes(variant, N, rounds.DEVICE)), strict=True):
                    if pass_ == "backward" or variant != "kernels, 3 stages":
                        cell.add(pass_, variant, run, without=OTHERS)
        record.result["timings"] += cell.rows(3, 20)
    print(rounds.table(record.result["timings"]), flush=True)


def main():
    parser = rounds.parser_of(__doc__, "relative_biases.json", 55.0, 25.0)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    arguments = parser.parse_args()
    lengths, wanted = rounds.whole_numbers(arguments.lengths), checks(("txl",))
    record = rounds.Record(arguments, timings=[])
    jobs = [("biases", variant, N) for N in lengths for variant in VARIANTS]
    rounds.compile_jobs(arguments, jobs + [("linear", "check", *one) for one in wanted])
    with record:
        run_checks(record, wanted)
        run_times(record, lengths)
    sys.exit(record.status)


if __name__ == "__main__":
    main()
