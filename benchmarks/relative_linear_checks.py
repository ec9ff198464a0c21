"""What relative_linear.py checks: the Hopper kernels that skew in registers, against the fp64 oracle."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from relative_cases import BRAIN, HALF, sizes, timed_call
from rounds import recorded

BANDED = [
    ("shaw", "none", HALF, sizes(1100)),
    ("shaw", "none", BRAIN, sizes(512)),
    ("shaw", "none", HALF, sizes(100)),
    ("wav2vec2_bert", "none", HALF, sizes(1100)),
    ("wav2vec2_bert", "none", BRAIN, sizes(1100)),
    *(("wav2vec2_bert", mask, HALF, sizes(1100)) for mask in ("causal", "window", "lengths", "packed", "holes")),
    ("wav2vec2_bert", "none", HALF, sizes(1100, Hk=2)),
    ("wav2vec2_bert", "none", HALF, sizes(700, 1500)),
    ("wav2vec2_bert", "causal", BRAIN, sizes(1500, 700, offset=100)),
    ("deberta", "none", HALF, sizes(2304)),
    ("deberta", "none", BRAIN, sizes(2304)),
    ("deberta", "none", HALF, sizes(512)),
    ("deberta", "none", HALF, sizes(100)),
    *(("deberta", mask, HALF, sizes(2304)) for mask in ("causal", "window", "lengths", "packed")),
    ("deberta", "holes", BRAIN, sizes(1100)),
    ("deberta", "none", HALF, sizes(2100, Hk=2)),
    ("deberta", "none", HALF, sizes(700, 2300)),
    ("deberta", "none", HALF, sizes(2300, 700, offset=100)),
]
"""Bands of ±64, of [-8, 64] and of ±512; DeBERTa at 512 and 100 tokens has no saturated tile."""
FORWARD = [
    ("deberta", "none", HALF, sizes(2304)),
    ("deberta", "none", BRAIN, sizes(2304)),
    ("deberta", "none", HALF, sizes(2100, Hk=2)),
    ("deberta", "none", HALF, sizes(512)),
    ("deberta", "none", HALF, sizes(700, 2300)),
    ("deberta", "none", HALF, sizes(2300, 700, offset=100)),
    *(("deberta", mask, HALF, sizes(2304)) for mask in ("causal", "window", "lengths", "packed")),
    ("deberta", "none", HALF, sizes(2304, d=128)),
    ("wav2vec2_bert", "none", HALF, sizes(1100)),
    ("wav2vec2_bert", "causal", BRAIN, sizes(1100)),
    ("wav2vec2_bert", "holes", HALF, sizes(700, 1500)),
]
WIDE = [
    ("wav2vec2_bert", "none", HALF, sizes(1100, d=128)),
    ("wav2vec2_bert", "causal", BRAIN, sizes(1100, d=128)),
    ("deberta", "none", HALF, sizes(2304, d=128)),
    ("txl", "none", HALF, sizes(1100, d=128)),
]
TXL = [
    ("txl", "none", HALF, sizes(1024)),
    ("txl", "none", HALF, sizes(2100)),
    ("txl", "none", BRAIN, sizes(1100)),
    ("txl", "lengths", BRAIN, sizes(1100)),
    ("txl", "causal", HALF, sizes(1100)),
    ("txl", "window", HALF, sizes(1100)),
    ("txl", "packed", HALF, sizes(1100)),
    ("txl", "holes", HALF, sizes(1100, Hk=2)),
    ("txl", "none", HALF, sizes(1500, 700, offset=100)),
    ("txl", "none", HALF, sizes(700, 1500)),
    ("left", "none", HALF, sizes(1100)),
    ("left", "lengths", BRAIN, sizes(1100)),
]
"""With biases; `left` has them summed with the query beforehand, which makes a left factor of its own.

The second is made again with dG in shares of 40 row blocks; so is the first of BANDED's DeBERTa."""
PASSES = {"attend_band", "key_pass", "query_pass", "collect_tiles"}
FORCED = {
    "": {},
    "shares": {},
}
"""Variants of a check; `shares`: a budget of 40 row blocks."""
OTHERS = {"attend", "grad_key", "grad_query", "project"}


@contextmanager
def registers(on: bool, **variant):
    """Inside, calls take the kernels of this script (or never do), with a variant of their constants."""
    from tilewise.triton import band, band_tables, config, linear_backward

    changes = {(config, "SKEW_IN_REGISTERS"): on, (linear_backward, "PORTABLE_FROM"): None}
    for name, value in variant.items():
        changes[next(m for m in (linear_backward, band_tables, band) if hasattr(m, name)), name] = value
    before = {(module, name): getattr(module, name) for module, name in changes}
    for (module, name), value in changes.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


def call_for(job, device):
    """The call of a check; its forward keeps no projection, so that both passes may take these kernels."""
    from relative_checks import call_of

    from tilewise import Options

    case, mask, dtype, s = job
    if case == "shaw":
        # As it is timed: the other of that name has values, too.
        return timed_call(case, s.Tq, device, dtype, s.B * s.Tq, s.H, s.d, projections="recompute")[0]
    options, left = Options(projections="recompute"), case == "left"
    return call_of("txl" if left else case, s, mask, dtype, device, options=options, biases=not left)


def check(job, device, backward: bool, forced: str = ""):
    """Error budgets of a check; on the meta device, only its launches."""
    from relative_checks import dense, run, verdicts

    from tilewise import triton
    from tilewise.testing import error_budget

    _, _, dtype, s = job
    torch.manual_seed(0)
    call = call_for(job, device)
    shape = (s.B, s.H, s.Tq)
    new = lambda: (torch.full_like(call.q, float("nan")), torch.full(shape, float("nan"), device=device))  # noqa: E731
    do = torch.randn(*shape, s.d_v, device=device).to(dtype)
    variant = {"WIDTHS": (64, 128), **FORCED[forced]}
    if forced == "shares":
        variant["BUDGET"] = variant["LARGEST"] = 40 * 64 * 64 * (-(-s.Tk // 64) + 1) * 2
    with registers(True, **variant), recorded() as names:
        if device == "meta":
            o, lse = new()
            run(call, do, torch.empty(shape, device=device)) if backward else triton.forward(call, o, lse)
            return []
        if backward:
            budgets = verdicts(call)
            results = [run(call, do, None) for _ in range(2)]
            results = [(o, lse, *grads) for o, lse, grads in results]
        else:
            results = [new(), new()]
            for o, lse in results:
                triton.forward(call, o, lse)
    expected = PASSES if backward else {"attend_band"}
    assert expected <= names, f"not all of these kernels ran: {sorted(names)}"
    assert not names & OTHERS, f"other kernels ran: {sorted(names)}"
    for one, two in zip(*results, strict=True):
        assert torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0)), "two runs differ"
    if not backward:
        zeros = torch.zeros(shape, device=device)
        exact_o, exact_lse, _ = dense(call, do, zeros, torch.float64)
        low_o, low_lse, _ = dense(call, do, zeros, dtype)
        (o, lse), seen = results[0], torch.isfinite(exact_lse)
        assert torch.equal(torch.isfinite(lse), seen), "lse is infinite in the wrong places"
        flat = lambda x: x.masked_fill(~seen, 0.0)  # noqa: E731
        budgets = [
            error_budget("o", o, low_o, exact_o),
            error_budget("lse", flat(lse).to(dtype), flat(low_lse).to(dtype), flat(exact_lse)),
        ]
    return budgets


def checks(groups) -> list:
    """(job, backward, what is forced) of every check of these groups."""
    deberta = next(job for job in BANDED if job[0] == "deberta")
    found = {
        "banded": [*((job, True, "") for job in BANDED), (deberta, True, "shares")],
        "wide": [(job, True, "") for job in WIDE],
        "txl": [*((job, True, "") for job in TXL), (TXL[1], True, "shares")],
        "forward": [(job, False, "") for job in FORWARD],
    }
    return [one for group in found if group in groups for one in found[group]]
