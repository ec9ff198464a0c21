"""The warp-specialised forward in several shapes: checks, then times beside cuDNN and the forward it may replace.

    python benchmarks/relative_specialised.py --out relative_specialised.json --seconds 60
    python benchmarks/relative_specialised.py --only-compile          # no GPU

A barrier in the wrong place makes a kernel wait for ever, so checks and times run in processes of their own that end
themselves after some seconds; a shape whose first check fails or does not end gets no others and no times. CUDA graphs,
L2 flushed, rounds interleaved with cuDNN's attention without a term under the same mask; 12 heads, 16,384 tokens, fp16.
The seconds are counted from the end of compiling on.
"""

from __future__ import annotations

import signal
import sys
import time

import rounds
import torch
from processes import isolated
from relative_cases import BRAIN, HALF, sizes, timed_call

SHAPES = {
    128: {"2x128": (2, 128, 3, 240), "2x128 ordered": (2, 128, 3, 240, True), "3x64": (3, 64, 4, 160),
          "2x128 resident": (2, 128, 3, 240, False, True), "3x64 ordered": (3, 64, 4, 160, True),
          "2x128 two stages": (2, 128, 2, 240), "2x128 resident two stages": (2, 128, 2, 240, False, True)},
    64: {"3x128": (3, 128, 4, 160), "3x128 ordered": (3, 128, 4, 160, True), "2x128": (2, 128, 4, 240),
         "2x128 ordered": (2, 128, 4, 240, True), "3x128 resident": (3, 128, 4, 160, False, True)},
}  # fmt: skip
"""Width ↦ name ↦ fields of :class:`tilewise.triton.specialised.Shape`; names are groups × keys of a tile."""

CHECKS = [
    ("t5", "none", HALF, dict(N=1100, Tk=1152)), ("none", "none", HALF, dict(N=1100, Tk=1152)),
    ("t5", "none", BRAIN, dict(N=1152, Tk=1280, Hk=2)),
    *(("t5", mask, HALF, dict(N=1100))
      for mask in ("causal", "window", "lengths", "packed", "holes", "causal_padding")),
    ("none", "causal", HALF, dict(N=1100)), ("t5", "none", HALF, dict(N=1500, Tk=1100, offset=100)),
    ("t5", "none", HALF, dict(N=8192, B=1, H=1)),
]  # fmt: skip
PLAIN, MASKED = (0, 1, 2), ("2x128", "2x128 ordered", "2x128 resident")
"""The checks of every shape, and the shapes that have all of them and are timed under a mask."""

CELLS = [("t5", 128, 8192, False), ("t5", 64, 8192, False), ("none", 128, 8192, False), ("none", 64, 8192, False),
         ("t5", 128, 2048, False), ("t5", 64, 2048, False), ("none", 128, 2048, False), ("none", 64, 2048, False),
         ("t5", 128, 8192, True), ("t5", 64, 8192, True),
         ("t5", 128, 1024, False), ("none", 128, 1024, False), ("none", 128, 512, False)]  # fmt: skip
"""(case, width, tokens, causal), the most important first."""

CHECK_SECONDS, CELL_SECONDS = 15, 30


def forward_of(call, o, lse, shape=None):
    """The forward with a shape, or that of :mod:`tilewise.triton.overlapped`, as a closure."""
    from tilewise.triton import overlapped, plan, specialised

    def forward():
        layout = plan.Layout(call)
        if reasons := overlapped.unsuited(layout):
            raise ValueError("; ".join(reasons))
        if shape is None:
            overlapped.forward(layout, o, lse)
        else:
            specialised.forward(layout, o, lse, specialised.Shape(*shape))

    return forward


def outputs_of(call, fill: float = float("nan")):
    B, H, Tq, d = call.q.shape
    o = torch.full((B, Tq, H, d), fill, dtype=call.q.dtype, device=call.q.device).transpose(1, 2)
    return o, torch.full((B, H, Tq), fill, device=call.q.device)


def ends_itself(seconds: int) -> None:
    """Let the system end this process after so many seconds, also while it waits for the GPU; 0: no longer."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)


def checked_call(width: int, n: int, device: str):
    from relative_checks import call_of

    case, mask, dtype, fields = CHECKS[n]
    return call_of(case, sizes(d=width, **fields), mask, dtype, device)


def check(width: int, name: str, n: int, device: str) -> list:
    """The budgets of O and lse, in a process that ends itself; raises where something is wrong."""
    from tilewise.reference import attention_reference
    from tilewise.terms import Port
    from tilewise.testing import error_budget

    ends_itself(CHECK_SECONDS)
    call = checked_call(width, n, device)
    results = [outputs_of(call) for _ in range(2)]
    for o, lse in results:
        forward_of(call, o, lse, SHAPES[width][name])()
    (o, lse), again = results
    for one, two in zip((o, lse), again, strict=True):
        assert torch.equal(one, two), "two runs differ"

    def dense(dtype):
        to = lambda x: x.to(dtype)  # noqa: E731
        ports = [Port(p.kind, p.rows, to(p.table), None) for p in call.ports]
        return attention_reference(to(call.q), to(call.k), to(call.v), ports, call.mask, call.scale, call.offset)

    exact_o, exact_lse = dense(torch.float64)
    low_o, low_lse = dense(call.q.dtype)
    seen = torch.isfinite(exact_lse)
    assert torch.equal(torch.isfinite(lse), seen), "lse is infinite in the wrong places"
    flat = lambda x: x.masked_fill(~seen, 0.0).to(call.q.dtype)  # noqa: E731
    budgets = [error_budget("o", o, low_o, exact_o),
               error_budget("lse", flat(lse), flat(low_lse), exact_lse.masked_fill(~seen, 0.0))]  # fmt: skip
    ends_itself(0)
    return budgets


def timed(case: str, width: int, N: int, causal: bool, names: list[str], device: str) -> list[dict]:
    """Rows of cuDNN, of the forward that may be replaced ("overlapped") and of the shapes."""
    ends_itself(CELL_SECONDS)
    cell = rounds.Cell(N, width, causal=causal, passes=("forward",))
    call = timed_cell(case, width, N, causal, device)
    for name in ("overlapped", *names):
        print(f"{case} d={width} N={N} causal={causal}: {name}", flush=True)
        cell.add("forward", name, forward_of(call, *outputs_of(call), SHAPES[width].get(name)))
    rows = [row | dict(case=case, system=row["case"], causal=causal) for row in cell.rows(4, 12)]
    ends_itself(0)
    return rows


def timed_cell(case: str, width: int, N: int, causal: bool, device: str):
    from tilewise import Mask

    return timed_call(case, N, device, d=width, mask=Mask.causal() if causal else None)[0]


def names_of(width: int, causal: bool) -> list[str]:
    return [name for name in SHAPES[width] if not causal or name in MASKED]


def perform(what: str, *rest) -> None:
    """Launch on meta tensors what ("check", width, name, n) or ("time", case, width, N, causal, name) launches."""
    if what == "check":
        width, name, n = rest
        call = checked_call(width, n, "meta")
    else:
        *cell, name = rest
        width, call = cell[1], timed_cell(*cell, "meta")
    forward_of(call, *outputs_of(call), SHAPES[width].get(name))()


def plan_checks() -> tuple[list[tuple], list[tuple]]:
    """(width, name, check): the first check of every shape, and all others."""
    every = [(width, name) for width, shapes in SHAPES.items() for name in shapes]
    others = [(width, name, n) for width, name in every for n in range(1, len(CHECKS)) if n in PLAIN or name in MASKED]
    return [(width, name, 0) for width, name in every], others


def check_fields(width: int, name: str, n: int, device: str) -> dict:
    case, mask, dtype, fields = CHECKS[n]
    return dict(width=width, shape=name, case=f"{case} {mask} {str(dtype)[6:]} {fields}")


def run_checks(record: rounds.Record) -> set[tuple[int, str]]:
    """(width, name) of the shapes without a failure; those whose first check fails are left out of the others."""

    def run(jobs, until):
        return record.check(check, [(*job, rounds.DEVICE) for job in jobs], until, check_fields)

    def failed(records):
        return {(r["width"], r["shape"]) for r in records if not r["ok"]}

    first, others = plan_checks()
    until = record.until(0.5)
    bad = failed(run(first, min(until, time.time() + CHECK_SECONDS + 10)))
    bad |= failed(run([job for job in others if job[:2] not in bad], until))
    return {job[:2] for job in first} - bad


def run_times(record: rounds.Record, good: set[tuple[int, str]]) -> None:
    """Times of the shapes that are right, a cell after the other, each in a process."""
    jobs = [(*cell, [n for n in names_of(cell[1], cell[3]) if (cell[1], n) in good], rounds.DEVICE) for cell in CELLS]
    for job, rows, why in isolated(timed, jobs, record.until(1.0), 1):
        if why is not None:
            record.fail(f"{job[:4]} failed: {why}")
            continue
        record.result["timings"] += rows
    title = lambda row: f"{row['case']} d{row['head_dim']} {row['system']}{' causal' if row['causal'] else ''}"  # noqa: E731
    print(rounds.table(record.result["timings"], title), flush=True)


def main():
    parser = rounds.parser_of(__doc__, "relative_specialised.json", 60.0, 40.0)
    arguments = parser.parse_args()
    first, others = plan_checks()
    jobs = [("specialised", "check", *job) for job in first + others]
    jobs += [("specialised", "time", *cell, name) for cell in CELLS
             for name in ("overlapped", *names_of(cell[1], cell[3]))]  # fmt: skip
    rounds.compile_jobs(arguments, jobs)
    record = rounds.Record(arguments, shapes={str(width): shapes for width, shapes in SHAPES.items()}, timings=[])
    with record:
        run_times(record, run_checks(record))
    sys.exit(record.status)


if __name__ == "__main__":
    main()
