"""Runs attention calls through the Triton interpreter; a process of its own, since the switch is read at import.

python interpreted.py NAME … , NAME …   prints one JSON line a job: its name and what missed its budget. Each group
between commas has a process of its own, forked from the first; some jobs leave settings behind for those after them.
"""

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch

torch.set_num_threads(1)
sys.path.append(str(Path(__file__).parents[1]))


def _poisoned(make):
    def made(*args, **kwargs):
        tensor = make(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.dtype.is_floating_point else tensor

    return made


torch.empty = _poisoned(torch.empty)

from distant import apart, placed  # noqa: E402
from forked import groups_of, run_groups  # noqa: E402
from relative_checks import call_of, dense, names_of, run, verdicts  # noqa: E402
from tensor_cores import NearestTF32, cut_operands  # noqa: E402

import tilewise.triton.plan as plan  # noqa: E402
from quick_interpreter import quicken  # noqa: E402
from tilewise import Mask, Options, rows, triton  # noqa: E402
from tilewise.call import Call  # noqa: E402
from tilewise.terms import Port  # noqa: E402
from tilewise.testing import Sizes  # noqa: E402
from tilewise.triton.config import Limits, using  # noqa: E402
from tilewise.triton.terms import rows_of  # noqa: E402

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def sizes(Tq, Tk=None, B=1, H=1, Hk=None, d=16, d_v=None, offset=None):
    return Sizes(B, H, Hk or H, Tq, Tk or Tq, d, d_v or d, offset)


JOBS = {
    "t5": ("t5", sizes(200), "none", HALF, 0.0),
    "shaw-values": ("shaw", sizes(200), "none", HALF, 0.0),
    "deberta-causal": ("deberta", sizes(200), "causal", HALF, 0.0),
    "txl-packed": ("txl", sizes(140), "packed", HALF, 0.0),
    "txl-heads-dropout": ("txl", sizes(70, 90, H=2, Hk=1, d=20), "dense", HALF, 0.2),
    "txl-fp32": ("txl", sizes(70), "none", SINGLE, 0.0),
    "tf32-txl": ("txl", sizes(70), "none", SINGLE, 0.0),
    "txl-bf16-short": ("txl", sizes(20, B=5), "lengths", BRAIN, 0.0),
    "txl-pointers": ("txl", sizes(70, H=2), "causal", HALF, 0.0),
    "alibi-fp32": ("alibi", sizes(70), "lengths", SINGLE, 0.1),
    "t5-fp32": ("t5", sizes(200), "causal", SINGLE, 0.0),
    "explicit-holes": ("explicit", sizes(80), "holes", HALF, 0.0),
    "everything": ("everything", sizes(70), "none", HALF, 0.0),
    "wavlm-window": ("wavlm", sizes(200), "window", HALF, 0.0),
    "inkling-fp32": ("inkling", sizes(100), "none", SINGLE, 0.0),
    "shared-heads-dropout": ("wav2vec2_bert", sizes(140, H=2, Hk=1), "causal_padding", HALF, 0.2),
    "lengths": ("wav2vec2_bert", sizes(140, B=2), "lengths", HALF, 0.0),
    "left-padding": ("wav2vec2_bert", sizes(70, B=2), "left_padding", HALF, 0.0),
    "right-padding": ("deberta", sizes(70, B=2), "right_padding", HALF, 0.0),
    "widths": ("vits", sizes(70, 140, d=20, d_v=24), "dense", HALF, 0.0),
    "offset-intervals": ("t5_causal", sizes(70, 200, offset=90), "intervals", HALF, 0.0),
    "beyond": ("shaw", sizes(20, 40, offset=500), "none", HALF, 0.0),
    "wide": ("wav2vec2_bert", sizes(140, d=80), "none", HALF, 0.0),
    "shares": ("explicit", sizes(80, H=2), "none", HALF, 0.0),
    "negative-scale": ("wav2vec2_bert", sizes(130), "none", HALF, 0.0),
    "zero-scale": ("wav2vec2_bert", sizes(70), "none", HALF, 0.0),
    "bf16": ("wav2vec2_bert", sizes(70), "none", BRAIN, 0.0),
    "short": ("deberta", sizes(40, B=5), "lengths", HALF, 0.0),
    "short-shared": ("shaw", sizes(20, B=4, H=2, Hk=1), "none", HALF, 0.0),
    "pointers": ("deberta", sizes(200), "none", HALF, 0.0),
    # Whole tiles without a mask, saturated on either side of the band: one loop takes both sides.
    "wavlm-sides": ("wavlm", sizes(320), "none", HALF, 0.0),
    # 128 rows a tile of either pass: the band is decided on taller blocks, ragged and cut on both sides.
    "t5-tall": ("t5", sizes(320, H=2, Hk=1), "none", HALF, 0.0),
    "t5-lengths-tall": ("t5", sizes(200, 330, B=2), "lengths", HALF, 0.0),
    "t5-window-tall": ("t5", sizes(290, H=1), "window", HALF, 0.0),
    "wavlm-tall": ("wavlm", sizes(192, 256, B=2, offset=30), "none", BRAIN, 0.1),
    "tf32-explicit": ("explicit", sizes(70), "none", SINGLE, 0.0),
    "tf32-deberta": ("deberta", sizes(130), "none", SINGLE, 0.0),
}


def missed(name: str) -> list[str]:
    case, size, mask, dtype, dropout = JOBS[name]
    if name == "shares":
        # One head at a time, as long sequences do to bound their buffers.
        plan.BUDGET = plan.PROGRAMS = 1
    if name.endswith("pointers"):
        plan.limits_of = lambda device: Limits(166912, False)
    if dtype == BRAIN:
        sys.path.append(str(Path(__file__).parents[1] / "carried"))
        from interpreted_bf16 import exact_bf16

        exact_bf16()
    coarse = name.startswith("tf32")
    if coarse:
        cut_operands()
    call = call_of(case, size, mask, dtype, "cpu", dropout, options=Options(fp32="tf32" if coarse else "ieee"))
    call = replace(call, scale={"negative-scale": -4.0, "zero-scale": 0.0}.get(name, call.scale))
    tall = {("queries", "scalar"): ((0, (128, 64, 4, 3, 2)),), ("keys", "scalar"): ((0, (64, 128, 4, 3, 2)),)}
    with using(tall if name.endswith("tall") else {}):
        budgets = verdicts(call, products=NearestTF32 if coarse else nullcontext)
    return [f"{b.name}: error {b.error:.2e}, allowed {b.allowed:.2e}" for b in budgets if not b.ok]


def unneeded(case: str = "deberta", T: int = 80) -> list[str]:
    """Each gradient asked for alone: the same bits as with all of them, twice, and nothing else written."""
    call = call_of(case, sizes(T), "none", HALF, "cpu")
    do = torch.randn(*call.q.shape[:3], call.v.shape[3], generator=torch.Generator().manual_seed(3)).half()
    o, lse, everything = run(call, do, None)
    wrong = []
    _, _, exact = dense(call, do, torch.zeros_like(lse), torch.float64)
    for position, name in enumerate(names_of(call)):
        need = [n == position for n in range(len(everything))]
        again_o, _, grads = run(call, do, None, need)
        if not torch.equal(again_o, o):
            wrong.append("O differs between two runs")
        if not torch.equal(grads[position], everything[position]):
            wrong.append(f"{name} alone differs from {name} among all")
        if any(g.numel() for n, g in enumerate(grads) if n != position):
            wrong.append(f"{name}: a buffer that nobody asked for has entries")
        if (grads[position].double() - exact[position]).norm() > 0.01 * exact[position].norm():
            wrong.append(f"{name} is wrong without dlse")
    return wrong


def kept() -> list[str]:
    """Kept projections give the same bits as those made again, in shares of the heads too."""
    plan.BUDGET = plan.PROGRAMS = 1
    wrong = []
    for case, T, mask in (("vits", 20, "none"), ("deberta", 20, "lengths")):
        results = {}
        for choice in ("keep", "recompute"):
            call = call_of(case, sizes(T, H=2), mask, HALF, "cpu", options=Options(projections=choice))
            assert bool(triton.kept(call)[0]) == (choice == "keep")
            do = torch.randn(*call.q.shape[:3], call.v.shape[3], generator=torch.Generator().manual_seed(3)).half()
            results[choice] = run(call, do, None)
        for name, one, two in zip(
            ("o", "lse", *names_of(call)), *([o, lse, *grads] for o, lse, grads in results.values()), strict=True
        ):
            if one.isnan().any() or not torch.equal(one, two):
                wrong.append(f"{case}: {name} differs")
    return wrong


def cancelling() -> list[str]:
    """A bias that all scores share has no gradient, whatever O's rounding: Δ must be the sum of the same P·dP."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 70, 16, generator=generator) for _ in range(2))
    wrong = []
    for fp32, map_, mask in (("ieee", rows.clipped(0, 0), Mask()), ("ieee", rows.clipped(-2, 2), Mask.causal()),
                             ("tf32", rows.clipped(0, 0), Mask())):  # fmt: skip
        if fp32 == "tf32":
            cut_operands()
        port = Port("scalar", map_, torch.zeros(1, map_.size))
        call = Call(q, k, torch.ones_like(k), (port,), mask, 0.25, 0, options=Options(fp32=fp32))
        do = torch.full_like(q, 1 + 0.4 * 2**-10)
        o, lse, _ = run(call, do, None)
        leaves = [q, k, call.v, port.table]
        for dlse in (None, torch.full_like(lse, 0.5)):
            grads = [torch.empty_like(x) for x in leaves]
            # An O with an error that the forward would never make.
            triton.backward(call, do, dlse, o * 1.001, lse, [True] * 4, grads)
            # The sum of dlse over the rows is what is left.
            rest = grads[3].sum() - (0.0 if dlse is None else dlse.sum())
            if not rest.abs() < 1e-3:
                wrong.append(f"{fp32} {map_}, dlse {dlse is not None}: the bias's gradient is {rest.item():.2e}")
    return wrong


def distant(case: str, size: Sizes, axis: int = 1, dtype=HALF) -> list[str]:
    """Tables whose rows (or heads, axis 0) lie 2^31 elements apart and more: the same bits as of those in one piece.

    A second backward writes the tables' gradients to such memory, too.
    """
    call = call_of(case, size, "none", dtype, "cpu", options=Options(projections="recompute"))
    do = torch.randn(*call.q.shape[:3], call.v.shape[3], generator=torch.Generator().manual_seed(3)).to(dtype)
    dlse = torch.ones(call.q.shape[:3])
    far = apart(call, axis)
    one, two = (run(each, do, dlse) for each in (call, far))
    tables = {id(port.table) for port in far.ports}
    leaves = [far.q, far.k, far.v, *far.tensors]
    grads = [torch.full_like(x, float("nan"), memory_format=torch.contiguous_format) for x in leaves]
    grads = [placed(g, axis) if id(x) in tables else g for x, g in zip(leaves, grads, strict=True)]
    triton.backward(far, do, dlse, *two[:2], [True] * len(leaves), grads)
    names = ("o", "lse", *names_of(call))
    results = (*one[:2], *one[2]), (*two[:2], *two[2]), (*two[:2], *grads)
    return [
        f"{name} differs"
        for name, x, y, z in zip(names, *results, strict=True)
        if x.isnan().any() or not torch.equal(x, y) or not torch.equal(x, z)
    ]


def beyond_half() -> list[str]:
    """Projections in log2 units beyond ±65504 are cut to that: O and lse are those of cut projections."""
    call = call_of("wav2vec2_bert", sizes(60), "none", HALF, "cpu")
    (port,) = call.ports
    # Content has nothing of the last column, in which projections of several rows are too large, of both signs.
    call.q[..., -1], call.k[..., -1] = 250.0, 0.0
    port.table[..., -1] = torch.tensor([0, 900, 1400, 1000, 0, 1100, -1200, 0, -2000], dtype=HALF)
    do = torch.zeros(*call.q.shape[:3], call.v.shape[3], dtype=HALF)
    o, lse, grads = run(call, do, None)
    q, k, v, table = (x.double() for x in (call.q[0, 0], call.k[0, 0], call.v[0, 0], port.table.reshape(-1, 16)))
    log2e = 1.4426950408889634
    delta = torch.arange(60)[:, None] - torch.arange(60)
    projected = call.scale * log2e * (q @ table.T).gather(1, rows_of(port.rows, delta))
    cut = projected.clamp(-65504, 65504)
    assert (cut == 65504).sum(1).gt(1).sum() > 50
    assert (cut == -65504).any()
    scores = (call.scale * (q @ k.T) * log2e + cut) / log2e
    # An fp32 score of 65504 has steps of 2^-8, in log2 units: P is off by up to 0.14 % of itself.
    wrong = []
    if not (o[0, 0] - scores.softmax(-1) @ v).abs().max() < 0.01:
        wrong.append(f"O is off by {(o[0, 0] - scores.softmax(-1) @ v).abs().max():.2e}")
    if not (lse[0, 0] - scores.logsumexp(-1)).abs().max() < 0.01:
        wrong.append(f"lse is off by {(lse[0, 0] - scores.logsumexp(-1)).abs().max():.2e}")
    return wrong + [f"{n} is not finite" for n, g in zip(names_of(call), grads, strict=True) if not g.isfinite().all()]


def not_a_number(name: str) -> list[str]:
    """A table whose row of offset 0 is NaN spoils every row: it is not cut to a number as what is too large is."""
    call = call_of(name, sizes(60), "none", HALF, "cpu")
    for port in call.ports:
        port.table.select(1, int(rows_of(port.rows, torch.zeros(1, dtype=torch.int64)))).fill_(torch.nan)
    o, lse, _ = run(call, torch.zeros(*call.q.shape[:3], call.v.shape[3], dtype=HALF), None)
    return [f"{n} is finite" for n, x in (("O", o), ("lse", lse)) if x.isfinite().any()]


OTHERS = {"unneeded": unneeded, "unneeded-txl": lambda: unneeded("txl", 70), "kept": kept, "cancelling": cancelling}
OTHERS |= {
    "beyond-half": beyond_half,
    "not-a-number t5": lambda: not_a_number("t5"),
    "not-a-number wav2vec2_bert": lambda: not_a_number("wav2vec2_bert"),
    "not-a-number deberta": lambda: not_a_number("deberta"),
    "not-a-number txl": lambda: not_a_number("txl"),
    "distant-rows wav2vec2_bert": lambda: distant("wav2vec2_bert", sizes(140)),
    "distant-rows txl": lambda: distant("txl", sizes(20)),
    "distant-rows t5": lambda: distant("t5", sizes(140, H=2)),
    "distant-rows deberta": lambda: distant("deberta", sizes(20)),
    "distant-rows shaw": lambda: distant("shaw", sizes(140)),
    "distant-rows inkling": lambda: distant("inkling", sizes(40)),
    "distant-heads t5": lambda: distant("t5", sizes(140, H=3), 0),
    "distant-heads deberta": lambda: distant("deberta", sizes(20, H=3), 0),
}


def work(names: list[str]) -> None:
    for name in names:
        print(json.dumps({"name": name, "missed": OTHERS[name]() if name in OTHERS else missed(name)}), flush=True)


if __name__ == "__main__":
    quicken()
    run_groups(groups_of(sys.argv[1:]), work)
