"""The Hopper forward with overlapped exponentials, as :mod:`gluon_model` runs it, against the fp64 oracle.

A process of its own, since the interpreter's switch is read at import.
python modelled_overlapped.py NAME …   prints one JSON line a job: its name and what missed its budget.
"""

import json
import sys

import modelled
import torch
from modelled import BRAIN, HALF
from relative_checks import dense

from tilewise import Mask, rows
from tilewise.call import Call
from tilewise.terms import Port
from tilewise.testing import error_budget
from tilewise.triton import overlapped, plan

BUCKETS, NEAR = rows.t5_buckets(32, 40), rows.t5_buckets(16, 12)


def call_of(rowmap, Tq, Tk=None, B=1, H=1, Hk=None, dtype=HALF, mask=None, shared=False, d=64, offset=None,
            table=None, scale=None):  # fmt: skip
    """A call with one table of numbers, or without a term; `table` is its dtype, or the dtype of q."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
    Tk, Hk = Tk or Tq, Hk or H
    q, k, v = draw(B, H, Tq, d), draw(B, Hk, Tk, d), draw(B, Hk, Tk, d)
    ports = []
    if rowmap is not None:
        values = torch.randn(1 if shared else H, rowmap.size, generator=generator).to(table or dtype)
        # As T5 keeps it: buckets × heads.
        ports = [Port("scalar", rowmap, values.t().contiguous().t(), None)]
    return Call(q, k, v, tuple(ports), mask or Mask(), scale or d**-0.5, Tk - Tq if offset is None else offset)


LENGTHS = lambda: Mask.lengths(torch.tensor([130, 0]))  # noqa: E731
JOBS = {
    "none": lambda: call_of(None, 384, H=2),
    "none-odd": lambda: call_of(None, 300, B=2),
    "none-short": lambda: call_of(None, 70, 30),
    "t5": lambda: call_of(BUCKETS, 580),
    "t5-odd": lambda: call_of(BUCKETS, 555, table=torch.float32),
    "t5-shared": lambda: call_of(BUCKETS, 400, H=2, Hk=1, shared=True, scale=1.0),
    "t5-causal": lambda: call_of(rows.t5_buckets(32, 40, False), 500, mask=Mask.causal()),
    "t5-window": lambda: call_of(BUCKETS, 500, mask=Mask.window(300, 130)),
    "t5-lengths": lambda: call_of(BUCKETS, 300, B=2, mask=LENGTHS()),
    "t5-padding": lambda: call_of(BUCKETS, 300, mask=Mask.padding(torch.arange(300)[None] % 7 > 2)),
    "t5-packed": lambda: call_of(BUCKETS, 420, mask=Mask.packed([0, 250, 420])),
    "t5-cross": lambda: call_of(BUCKETS, 130, 520),
    "t5-long-queries": lambda: call_of(BUCKETS, 520, 130),
    "t5-offset": lambda: call_of(BUCKETS, 300, 300, offset=37),
    "t5-bf16": lambda: call_of(BUCKETS, 400, dtype=BRAIN, table=torch.float32),
    "clipped": lambda: call_of(rows.clipped(-90, 20), 460),
    "windowed": lambda: call_of(rows.windowed(-9, 30), 460),
    "wide": lambda: call_of(BUCKETS, 530, d=128),
    "wide-lengths": lambda: call_of(BUCKETS, 300, B=2, d=128, mask=LENGTHS()),
    "wide-causal": lambda: call_of(BUCKETS, 400, d=128, mask=Mask.causal()),
}

BROKEN = {
    "keys": ("t5", "kbars.index(1 - slot), ks.index(1 - slot)", "kbars.index(1 - slot), ks.index(slot)"),
    "values": ("t5", "j = _key_of(u, t1, band, first, BN)", "j = _key_of(u + 1, t1, band, first, BN)"),
    "phase": ("t5", "mbarrier.wait(vbars.index(slot), u // 2 & 1)", "mbarrier.wait(vbars.index(slot), u & 1)"),
    "wait": ("t5", "warpgroup_mma_wait(1, deps=[scores])", "warpgroup_mma_wait(2, deps=[scores])"),
    "sides": ("t5", "left_edge, right_edge,\n", "right_edge, left_edge,\n"),
    "slab": ("t5", "shift - i0", "shift"),
    "band": ("t5", "i0 + offset - hi + 1", "i0 + offset - hi + 1 + BN"),
    "shrink": ("t5", "l = l * shrink + gl.sum(prob, 1)", "l = l + gl.sum(prob, 1)"),
    "ranges": ("t5-lengths", "first = first // BN * BN", "first = first // BN * BN + BN"),
    "empty": ("t5-lengths", "gl.where(empty, 1.0, l)", "l"),
    "open": ("t5-odd", "fhi = beyond", "fhi = beyond + BN"),
}
"""The kernel with one mistake each, and a job that must miss or stop."""


def found(name: str) -> str | None:
    """How the mistake shows; None where it does not."""
    job, right, wrong = BROKEN[name]
    return modelled.mistaken(overlapped.attend_overlapped, right, wrong, lambda: missed(job))


def missed(name: str) -> list[str]:
    return verdict(JOBS[name](), overlapped.forward)


def verdict(call: Call, forward) -> list[str]:
    """What misses its budget of the O and lse that `forward(layout, o, lse)` writes."""
    B, H, Tq, d = call.q.shape
    generator = torch.Generator().manual_seed(7)
    do = torch.randn(B, H, Tq, d, generator=generator).to(call.q.dtype)
    dlse = torch.zeros(B, H, Tq)
    exact_o, exact_lse, _ = dense(call, do, dlse, torch.float64)
    low_o, low_lse, _ = dense(call, do, dlse, call.q.dtype)
    seen = torch.isfinite(exact_lse)
    layout = plan.Layout(call)
    # Also at lengths at which it is not worth it.
    overlapped.BIASED_FROM = 0
    if reasons := overlapped.unsuited(layout):
        return reasons
    o = torch.full_like(call.q, float("nan"))
    lse = torch.full((B, H, Tq), float("nan"))
    forward(layout, o, lse)
    out = [] if torch.equal(torch.isfinite(lse), seen) else ["lse is infinite in the wrong places"]
    flat = lambda x: x.masked_fill(~seen, 0.0)  # noqa: E731
    to = call.q.dtype
    budgets = [error_budget("o", o, low_o, exact_o),
               error_budget("lse", flat(lse).to(to), flat(low_lse).to(to), flat(exact_lse))]  # fmt: skip
    return out + [f"{b.name}: error {b.error:.2e}, allowed {b.allowed:.2e}" for b in budgets if not b.ok]


if __name__ == "__main__":
    modelled.quicken()
    modelled.exact_bf16()
    for name in sys.argv[1:]:
        if name.startswith("broken:"):
            print(json.dumps({"name": name, "found": found(name[7:])}), flush=True)
            continue
        print(json.dumps({"name": name, "missed": missed(name)}), flush=True)
