"""Attention calls through the Hopper kernels as :mod:`gluon_model` runs them; the other kernels are interpreted.

A process of its own, since the interpreter's switch is read at import.
python modelled.py NAME … , NAME …   prints one JSON line a job: its name and what missed its budget. Each group between
commas has a process of its own, forked from the first; some jobs leave settings behind for those after them.
"""

import inspect
import json
import os
import sys
import textwrap
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch

torch.set_num_threads(1)
sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "carried")]

import gluon_model  # noqa: E402
from forked import groups_of, run_groups  # noqa: E402
from interpreted_bf16 import exact_bf16  # noqa: E402
from relative_checks import dense, names_of  # noqa: E402

from quick_interpreter import quicken  # noqa: E402
from tilewise import Mask, rows  # noqa: E402
from tilewise.call import Call  # noqa: E402
from tilewise.terms import Port  # noqa: E402
from tilewise.testing import error_budget  # noqa: E402
from tilewise.triton import band, band_keys, band_queries, linear_backward, plan  # noqa: E402
from tilewise.triton.config import Limits  # noqa: E402
from tilewise.triton.launch import launcher  # noqa: E402

HALF, BRAIN = torch.float16, torch.bfloat16
BASE = launcher[-1]


def modelled(kernel, grid, *args, **meta):
    if type(kernel).__name__ == "GluonJITFunction":
        gluon_model.run(kernel, grid, *args, **meta)
    else:
        BASE(kernel, grid, *args, **meta)


launcher.append(modelled)
linear_backward.WIDTHS = (64, 128)
plan.limits_of = lambda device: Limits(232448, True, True)


def call_of(kinds, rowmap, Tq, Tk=None, B=1, H=1, Hk=None, dtype=HALF, mask=None, shared=False, own=True, d=64,
            parameters=None, biases=""):  # fmt: skip
    """A call with terms of these kinds on one map; `parameters`: the dtype of all but q, k and v, or dtype.

    `biases`: of "u" and "v" those that an OnQuery has.
    """
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
    Tk, Hk = Tk or Tq, Hk or H
    q, k, v = draw(B, H, Tq, d), draw(B, Hk, Tk, d), draw(B, Hk, Tk, d)
    ports = [
        Port(kind, rowmap, draw(1 if shared else H, rowmap.size, d).to(parameters or dtype),
             None if kind == "key" or own else draw(B, H, Tq, d).to(parameters or dtype),
             *(draw(1 if shared else H, d).to(parameters or dtype) if n in biases else None for n in "uv"))
        for kind in kinds
    ]  # fmt: skip
    return Call(q, k, v, tuple(ports), mask or Mask(), (3 * d) ** -0.5, Tk - Tq)


CLIPPED, NEAR, BUCKETS = rows.clipped(-70, 55), rows.clipped(-9, 5), rows.deberta_buckets(16, 72)
LENGTHS = lambda: Mask.lengths(torch.tensor([130, 0]))  # noqa: E731
JOBS = {
    "both": lambda: call_of(["query", "key"], BUCKETS, 330),
    "both-backwards": lambda: call_of(["key", "query"], CLIPPED, 290, H=2, shared=True),
    "query": lambda: call_of(["query"], CLIPPED, 390, own=False),
    "key": lambda: call_of(["key"], rows.clipped(-30, 40), 330),
    "narrow": lambda: call_of(["query", "key"], rows.windowed(-3, 2), 200),
    "causal": lambda: call_of(["query", "key"], BUCKETS, 330, mask=Mask.causal()),
    "window": lambda: call_of(["query", "key"], rows.clipped(-40, 40), 330, mask=Mask.window(90, 20)),
    "lengths": lambda: call_of(["query", "key"], BUCKETS, 200, B=2, mask=Mask.lengths(torch.tensor([130, 0]))),
    "cross": lambda: call_of(["query", "key"], BUCKETS, 70, 300, H=2, Hk=1),
    "long-queries": lambda: call_of(["query", "key"], BUCKETS, 300, 70),
    "bf16": lambda: call_of(["query", "key"], BUCKETS, 200, dtype=BRAIN),
    "identity": lambda: call_of(["query"], rows.identity(199, descending=True), 200, own=False),
    "identity-ascending": lambda: call_of(["query"], rows.identity(150), 130),
    "wide": lambda: call_of(["query", "key"], rows.clipped(-9, 9), 200, d=128),
    "biases": lambda: biased(200, H=2),
    "biases-wide": lambda: biased(130, d=128, dtype=BRAIN),
}


GRADIENTS = {
    "gradients": lambda: txl(200),
    "gradients-own": lambda: call_of(["query"], rows.identity(150), 130),
    "gradients-heads": lambda: txl(130, H=4, Hk=2),
    "gradients-causal": lambda: txl(200, mask=Mask.causal()),
    "gradients-window": lambda: txl(260, mask=Mask.window(70, 10)),
    "gradients-lengths": lambda: txl(140, B=2, mask=Mask.lengths(torch.tensor([0, 65]))),
    "gradients-cross": lambda: txl(70, 200, H=2, shared=True),
    "gradients-long-queries": lambda: txl(200, 70),
    "gradients-shares": lambda: txl(200, B=2, H=2),
    "gradients-bf16": lambda: txl(130, dtype=BRAIN),
    "gradients-parameters": lambda: txl(100, parameters=torch.float32),
    "gradients-wide": lambda: txl(70, d=128),
    "both-gradients-wide": lambda: call_of(["query", "key"], NEAR, 200, d=128),
    "biased-gradients": lambda: biased(200),
    "biased-gradients-heads": lambda: biased(130, H=4, Hk=2),
    "biased-gradients-causal": lambda: biased(200, mask=Mask.causal()),
    "biased-gradients-lengths": lambda: biased(140, B=2, mask=LENGTHS()),
    "biased-gradients-cross": lambda: biased(70, 200, H=2, shared=True),
    "biased-gradients-long-queries": lambda: biased(200, 70),
    "biased-gradients-shares": lambda: biased(200, B=2, H=2),
    "biased-gradients-bf16": lambda: biased(130, dtype=BRAIN),
    "biased-gradients-parameters": lambda: biased(100, parameters=torch.float32),
    "biased-gradients-content": lambda: biased(100, biases="u"),
    "biased-gradients-position": lambda: biased(100, biases="v"),
    "biased-gradients-wide": lambda: biased(70, d=128),
    "query-gradients": lambda: call_of(["query"], NEAR, 200),
    "query-gradients-long": lambda: call_of(["query"], rows.clipped(-70, 20), 330),
    "query-gradients-shared": lambda: call_of(["query"], rows.clipped(-9, 20, descending=True), 200, H=2, shared=True),
    "query-gradients-causal": lambda: call_of(["query"], NEAR, 200, mask=Mask.causal()),
    "query-gradients-window": lambda: call_of(["query"], NEAR, 200, mask=Mask.window(120, 20)),
    "query-gradients-lengths": lambda: call_of(["query"], NEAR, 200, B=2, mask=LENGTHS()),
    "query-gradients-heads": lambda: call_of(["query"], NEAR, 140, H=4, Hk=2),
    "query-gradients-cross": lambda: call_of(["query"], NEAR, 70, 260, H=2, Hk=1),
    "query-gradients-long-queries": lambda: call_of(["query"], NEAR, 260, 70),
    "query-gradients-bf16": lambda: call_of(["query"], NEAR, 200, dtype=BRAIN),
    "query-gradients-short": lambda: call_of(["query"], BUCKETS, 100, B=2),
    "query-gradients-reached": lambda: call_of(["query"], rows.clipped(-70, 60), 100, H=2, shared=True),
    "query-gradients-none": lambda: call_of(["query"], rows.windowed(-3, 2), 200),
    "both-gradients": lambda: call_of(["query", "key"], NEAR, 200),
    "both-gradients-long": lambda: call_of(["query", "key"], BUCKETS, 330),
    "both-gradients-backwards": lambda: call_of(["key", "query"], NEAR, 200, H=2, shared=True),
    "both-gradients-causal": lambda: call_of(["query", "key"], NEAR, 200, mask=Mask.causal()),
    "both-gradients-window": lambda: call_of(["query", "key"], NEAR, 200, mask=Mask.window(120, 20)),
    "both-gradients-lengths": lambda: call_of(["query", "key"], NEAR, 200, B=2, mask=LENGTHS()),
    "both-gradients-heads": lambda: call_of(["query", "key"], NEAR, 140, H=2, Hk=1),
    "both-gradients-cross": lambda: call_of(["query", "key"], NEAR, 70, 260),
    "both-gradients-bf16": lambda: call_of(["query", "key"], NEAR, 200, dtype=BRAIN),
    "both-gradients-short": lambda: call_of(["query", "key"], BUCKETS, 70, B=2),
    "both-gradients-shares": lambda: call_of(["query", "key"], NEAR, 200, B=2),
}


def txl(Tq, Tk=None, **more):
    """A Transformer-XL term: a left factor of its own, a table that descends and reaches further than the lengths."""
    more.setdefault("own", False)
    return call_of(["query"], rows.identity(max(Tq, Tk or 0) + 5, descending=True), Tq, Tk, **more)


def biased(Tq, Tk=None, biases="uv", **more):
    """Transformer-XL with its biases."""
    return txl(Tq, Tk, own=True, biases=biases, **more)


BROKEN = {
    "phase": ("both", band.attend_band, "(u + 1) // 2 & 1", "u // 2 & 1"),
    "rows": ("both", band.attend_band, "row_c - (u + 2) * _T", "row_c - (u + 1) * _T"),
    "slot": ("both", band.attend_band, "later = u + STAGES - 1", "later = u + STAGES"),
    "edge": ("query", band.attend_band, "end_a if side == 0 else end_b", "end_b if side == 0 else end_a"),
    "order": ("gradients", band_queries.query_pass, "unskew(before, now)", "unskew(carried(now), now)"),
    "early": ("gradients", band_queries.query_pass, "(u + 2) % 3", "u % 3"),
    "staged": ("gradients", band_queries.query_pass, "        tma.store_wait(0)\n        #", "        #"),
    "heads": ("gradients-heads", band_keys.key_pass, "e0 = n * (band + 1)", "e0 = n * band"),
    "turned": ("gradients", band_keys.key_pass, "skew(low, high)", "skew(high, low)"),
    "end": (
        "query-gradients",
        band_queries.query_pass,
        "end_a if side == 0 else end_b",
        "end_b if side == 0 else end_a",
    ),
    "plane": ("query-gradients", band_queries.query_pass, "(side + 1) * plane", "side * plane"),
    "sums": ("query-gradients", band_queries._saturated, "sums += gl.sum(ds, 1)", "sums = gl.sum(ds, 1)"),
    "place": ("query-gradients", band_queries.query_pass, "t1 * _T - i0 - base", "t1 * _T - base"),
    "stretch": (
        "query-gradients",
        band_keys._of_step,
        "gl.where(t < band + t1, 2, 1)",
        "gl.where(t < band + t1, 1, 2)",
    ),
    "before": ("both-gradients", band_queries.query_pass, "total - done", "total"),
    "shifted": ("both-gradients", band_keys._fetch, "gl.where(stretch == 2, B + b, b)", "b"),
    "carried": ("both-gradients", band_keys.key_pass, "last = carried(here)", "last = last"),
    "missing": ("both-gradients", band_keys.key_pass, "acc_k + gl.where(some, rest, 0.0)", "acc_k"),
    "slots": ("both-gradients", band_keys.key_pass, "cbars.index((e0 + t + 2) % 3)", "cbars.index((e0 + t) % 3)"),
    "open": ("query-gradients-lengths", band_queries._saturated, "j + _T > fhi", "j > fhi"),
    "closed": ("gradients-window", band_keys.key_pass, "i_now < flo", "i_now < flo - _T"),
    "content": ("biased-gradients", band_keys.key_pass, "s + at_keys[:, None]", "s"),
    "position": ("biased-gradients", band_keys.key_pass, ".load(fragment) + position[None, :]", ".load(fragment)"),
    "columns": ("biased-gradients", band_keys.key_pass, "sigma += gl.sum(ds, 1)", "sigma = gl.sum(ds, 1)"),
    "group": ("biased-gradients-heads", band_keys.key_pass, "bias + h.to", "bias + hk.to"),
    "parts": ("biased-gradients", band_queries.query_pass, "gl.sum(acc_w, 0)", "gl.sum(acc, 0)"),
    "groups": ("both-gradients-heads", band_keys.key_pass, "to = ((f - f0) * G + n) * _T", "to = (f - f0) * G * _T"),
}
"""Kernels with one mistake each, and a job that must miss or stop."""


def found(name: str) -> str | None:
    """How the mistake shows; None where it does not."""
    job, kernel, right, wrong = BROKEN[name]
    return mistaken(kernel, right, wrong, lambda: missed(job))


def mistaken(kernel, right: str, wrong: str, missed) -> str | None:
    """What `missed()` finds where a part of a kernel's source, or of a function of it, is another one."""
    source = textwrap.dedent(inspect.getsource(kernel.fn))
    body = source[source.index("def ") :]
    assert right in body, right
    names = dict(kernel.fn.__globals__)
    exec(body.replace(right, wrong), names)
    whole, kernel.fn = kernel.fn, names[kernel.fn.__name__]
    try:
        return "; ".join(missed()) or None
    except AssertionError as error:
        return str(error) or "an assertion"
    finally:
        kernel.fn = whole


def differing(call, do, dlse, o, lse, leaves, grads) -> list[str]:
    """Gradients that are others when they alone are asked for, or not left alone when they are not."""
    out = []
    for n, whole in enumerate(grads):
        need = [m == n for m in range(len(leaves))]
        alone = [torch.full_like(x, 7.0) for x in leaves]
        linear_backward.backward(call, do, dlse, o, lse, need, alone)
        same = [torch.equal(x, whole if m == n else torch.full_like(x, 7.0)) for m, x in enumerate(alone)]
        if not all(same):
            out.append(f"{names_of(call)[n]} asked for alone: {same}")
    return out


def missed(name: str) -> list[str]:
    call = (JOBS | GRADIENTS)[name]()
    B, H, Tq, _ = call.q.shape
    generator = torch.Generator().manual_seed(7)
    do = torch.randn(B, H, Tq, call.v.shape[3], generator=generator).to(call.q.dtype)
    _, exact_lse, _ = dense(call, do, torch.zeros(B, H, Tq), torch.float64)
    seen = torch.isfinite(exact_lse)
    dlse = torch.randn(B, H, Tq, generator=generator) * seen
    exact_o, exact_lse, exact = dense(call, do, dlse, torch.float64)
    low_o, low_lse, low = dense(call, do, dlse, call.q.dtype)
    o = torch.full_like(call.q, float("nan"))
    lse = torch.full((B, H, Tq), float("nan"))
    layout = plan.Layout(call)
    reasons = band.unsuited(layout)
    if name in GRADIENTS:
        reasons += linear_backward.unsuited(layout)
    if reasons:
        return reasons
    band.forward(layout, o, lse)
    out = [] if torch.equal(torch.isfinite(lse), seen) else ["lse is infinite in the wrong places"]
    flat = lambda x: x.masked_fill(~seen, 0.0)  # noqa: E731
    to = call.q.dtype
    budgets = [error_budget("o", o, low_o, exact_o),
               error_budget("lse", flat(lse).to(to), flat(low_lse).to(to), flat(exact_lse))]  # fmt: skip
    if name in GRADIENTS:
        if name.endswith("-shares"):
            # Three row blocks at a time, of four a sequence.
            linear_backward.BUDGET = linear_backward.LARGEST = 3 * 64 * 64 * (4 if name.startswith("both") else 5) * 2
        leaves = [call.q, call.k, call.v, *call.tensors]
        grads = [torch.full_like(x, float("nan")) for x in leaves]
        linear_backward.backward(call, do, dlse, o, lse, [True] * len(leaves), grads)
        if name in ("both-gradients", "gradients-own", "biased-gradients"):
            out += differing(call, do, dlse, o, lse, leaves, grads)
        budgets += [error_budget(*x) for x in zip(names_of(call), grads, low, exact, strict=True)]
    return out + [f"{b.name}: error {b.error:.2e}, allowed {b.allowed:.2e}" for b in budgets if not b.ok]


def work(names: list[str]) -> None:
    for name in names:
        made = {"found": found(name[7:])} if name.startswith("broken:") else {"missed": missed(name)}
        print(json.dumps({"name": name} | made), flush=True)


if __name__ == "__main__":
    quicken()
    exact_bf16()
    run_groups(groups_of(sys.argv[1:]), work)
