"""The Hopper kernels with overlapped exponentials, as :mod:`gluon_model` runs it, against the fp64 oracle.

A process of its own, since the interpreter's switch is read at import.
python modelled_overlapped.py NAME …   prints one JSON line a job: its name and what missed its budget.
"""

import inspect
import json
import sys
import textwrap

import modelled
import torch
from modelled import BRAIN, HALF
from relative_checks import dense, names_of

from tilewise import Mask, rows
from tilewise.call import Call
from tilewise.terms import Port
from tilewise.testing import error_budget
from tilewise.triton import overlapped, overlapped_backward, overlapped_passes, plan

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

GRADIENTS = {
    "gradients-none": lambda: call_of(None, 200, H=2),
    "gradients-none-odd": lambda: call_of(None, 70, 135, B=2),
    "gradients": lambda: call_of(NEAR, 256),
    "gradients-odd": lambda: call_of(NEAR, 217, H=2, table=torch.float32),
    "gradients-one": lambda: call_of(NEAR, 50, 320),
    "gradients-heads": lambda: call_of(NEAR, 130, H=4, Hk=2),
    "gradients-shared": lambda: call_of(NEAR, 200, H=2, Hk=1, shared=True, scale=1.0),
    "gradients-causal": lambda: call_of(NEAR, 260, mask=Mask.causal()),
    "gradients-window": lambda: call_of(NEAR, 260, mask=Mask.window(120, 20)),
    "gradients-lengths": lambda: call_of(NEAR, 200, B=2, mask=LENGTHS()),
    "gradients-padding": lambda: call_of(NEAR, 200, mask=Mask.padding(torch.arange(200)[None] % 7 > 2)),
    "gradients-packed": lambda: call_of(NEAR, 300, mask=Mask.packed([0, 90, 300])),
    "gradients-long-queries": lambda: call_of(NEAR, 280, 70),
    "gradients-offset": lambda: call_of(NEAR, 260, 260, offset=37),
    "gradients-bf16": lambda: call_of(NEAR, 260, dtype=BRAIN, table=torch.float32),
    "gradients-wide": lambda: call_of(NEAR, 300, d=128),
    "gradients-wide-heads": lambda: call_of(NEAR, 200, 333, H=2, Hk=1, d=128),
    "gradients-wide-lengths": lambda: call_of(NEAR, 200, B=2, d=128, mask=LENGTHS()),
    "gradients-wide-window": lambda: call_of(NEAR, 300, d=128, mask=Mask.window(60, 90)),
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
    "ranges": ("wide-lengths", "beyond = gl.maximum(beyond, hi_more)", "beyond = hi_more"),
    "empty": ("t5-lengths", "gl.where(empty, 1.0, l)", "l"),
    "query-slot": ("gradients", "ks.index((u - 1) % 3)", "ks.index(u % 3)", "query_overlapped"),
    "query-fetch": ("gradients", "(u + 1) % 3, (u + 1) % 2,", "u % 3, (u + 1) % 2,", "query_overlapped"),
    "query-sums": ("gradients", "u >= band + t1, rows", "u >= band, rows", "_query_step"),
    "query-wait": (
        "gradients",
        "warpgroup_mma_wait(PENDING, deps=[dp])",
        "warpgroup_mma_wait(1, deps=[dp])",
        "_query_step",
    ),
    "query-stretch": ("gradients", "u < band + t1, ls1, ls2", "u < band + t1, ls2, ls1", "_query_step"),
    "query-store": ("gradients", "(key + shift_z)[None, :]\n", "(key + shift_z + 1)[None, :]\n", "_query_step"),
    "key-slot": ("gradients", "gs.index((u - 1) % 3)", "gs.index(u % 3)", "key_overlapped"),
    "key-head": ("gradients-heads", "ahead.to(gl.int64) * pad", "pad * 0", "_key_step"),
    "key-bias": ("gradients", "at - i0, 0", "at + i0, 0", "_key_step"),
    "key-stretch": ("gradients", "t < band + t1, 2, 1", "t < band + t1, 1, 2", "_key_step"),
    "key-open": ("gradients-window", "i0 + _T > fhi", "i0 > fhi", "_key_step"),
    "open": ("t5-odd", "fhi = beyond", "fhi = beyond + BN"),
}
"""The kernel with one mistake each, and a job that must miss or stop."""


def found(name: str) -> str | None:
    """How the mistake shows; None where it does not."""
    job, right, wrong, *of = BROKEN[name]
    kernel = getattr(overlapped_passes, *of) if of else overlapped.attend_overlapped
    source = textwrap.dedent(inspect.getsource(kernel.fn))
    assert right in source
    names = dict(kernel.fn.__globals__)
    exec(source[source.index("def ") :].replace(right, wrong), names)
    whole, kernel.fn = kernel.fn, names[kernel.fn.__name__]
    try:
        return "; ".join(missed(job)) or None
    except AssertionError as error:
        return str(error) or "an assertion"
    finally:
        kernel.fn = whole


def missed(name: str) -> list[str]:
    call = (JOBS | GRADIENTS)[name]()
    B, H, Tq, d = call.q.shape
    generator = torch.Generator().manual_seed(7)
    do = torch.randn(B, H, Tq, d, generator=generator).to(call.q.dtype)
    exact_o, exact_lse, _ = dense(call, do, torch.zeros(B, H, Tq), torch.float64)
    seen = torch.isfinite(exact_lse)
    dlse = torch.randn(B, H, Tq, generator=generator) * seen
    _, _, exact = dense(call, do, dlse, torch.float64)
    low_o, low_lse, low = dense(call, do, dlse, call.q.dtype)
    layout = plan.Layout(call)
    if reasons := overlapped_backward.unsuited(layout, do):
        return reasons
    o = torch.full_like(call.q, float("nan"))
    lse = torch.full((B, H, Tq), float("nan"))
    overlapped.forward(layout, o, lse)
    out = [] if torch.equal(torch.isfinite(lse), seen) else ["lse is infinite in the wrong places"]
    flat = lambda x: x.masked_fill(~seen, 0.0)  # noqa: E731
    to = call.q.dtype
    budgets = [error_budget("o", o, low_o, exact_o),
               error_budget("lse", flat(lse).to(to), flat(low_lse).to(to), flat(exact_lse))]  # fmt: skip
    if name in GRADIENTS:
        leaves = [call.q, call.k, call.v, *call.tensors]
        grads = [torch.full_like(x, float("nan")) for x in leaves]
        overlapped_backward.backward(layout, do, dlse, o, lse, [True] * len(leaves), grads)
        budgets += [error_budget(*x) for x in zip(names_of(call), grads, low, exact, strict=True)]
    return out + [f"{b.name}: error {b.error:.2e}, allowed {b.allowed:.2e}" for b in budgets if not b.ok]


if __name__ == "__main__":
    modelled.exact_bf16()
    for name in sys.argv[1:]:
        if name.startswith("broken:"):
            print(json.dumps({"name": name, "found": found(name[7:])}), flush=True)
            continue
        print(json.dumps({"name": name, "missed": missed(name)}), flush=True)
