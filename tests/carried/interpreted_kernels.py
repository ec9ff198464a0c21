"""Every kernel under Triton's interpreter (TRITON_INTERPRET=1) against the dense oracle. Prints one line a case."""

import dataclasses
import sys

import torch
from carried_cases import CarriedConfig, dense, grads_of, inputs, promoted, run
from interpreted_bf16 import exact_bf16, quicken

from tilewise.carried import TileLayout, blocked
from tilewise.carried.config import Options
from tilewise.carried.triton import launch, settings
from tilewise.mask import Mask
from tilewise.testing import assert_within_budget

ALL = ("recompute", "stored", "mixed")
FILL, TRANSIENT = settings.FILL, settings.TRANSIENT
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Rows 16 … 31 see nothing, so that the first tile column has a dead tile between live ones.
MIDDLE = Mask.intervals(torch.zeros(36, dtype=torch.int32), torch.where(torch.arange(36) // 16 == 1, 0, 36))
# name: options, plans, inputs' dtype and sizes (and settings of the launches), mask
CASES = {
    "causal": ({"layers": 3}, ALL, {"dtype": BF16, "T": 40}, None),
    "window": ({"windows": 14}, ("mixed",), {"dtype": F16, "T": 40}, None),
    "window, whole tiles": ({"windows": 36, "layers": 2}, ("stored",), {"dtype": F16, "T": 64}, None),
    "window within a tile": ({"windows": 2, "layers": 2}, ("stored",), {"dtype": F16, "T": 32}, None),
    "full": ({"causal": False, "layers": 2}, ("stored",), {"dtype": F32, "T": 20}, None),
    "windows differ": ({"windows": (9, 20, 5)}, ("stored", "mixed"), {"dtype": F16, "T": 36}, None),
    "windows differ, recomputed": ({"windows": (20, 5), "layers": 2}, ("recompute",), {"dtype": F16, "T": 36}, None),
    "six layers": ({"layers": 6}, ("stored",), {"dtype": F16, "T": 20}, None),
    "one layer": ({"layers": 1}, ("recompute",), {"dtype": BF16, "T": 48}, None),
    "heads summed in registers": ({"layers": 2}, ALL[:2], {"dtype": BF16, "T": 36, "H": 4, "Hk": 2, "fill": 0}, None),
    "E in parts": (
        {"scaling": "gain", "layers": 2},
        ("recompute",),
        {"dtype": F32, "T": 36, "transient": 1, "fill": 0},
        Mask.packed([0, 1, 2, 18, 36]),
    ),
    "E a head at a time": ({"layers": 2}, ("recompute",), {"dtype": F16, "T": 20, "transient": 2048}, None),
    "documents": ({}, ("mixed",), {"dtype": BF16, "T": 36}, Mask.packed([0, 1, 2, 18, 36])),
    "rows without keys": (
        {"layers": 2},
        ("stored", "recompute"),
        {"dtype": F16, "T": 20, "B": 2},
        Mask.lengths([20, 0]),
    ),
    "a tile of rows without keys": ({"layers": 2}, ("stored",), {"dtype": F16, "T": 36}, MIDDLE),
    "mean, softcap": ({"scaling": "mean", "softcap": 2.0, "layers": 3}, ("mixed",), {"dtype": F16, "T": 20}, None),
    "gain": ({"scaling": "gain", "layers": 3}, ("stored", "mixed"), {"dtype": F32, "T": 20}, None),
    "gain, recomputed": ({"scaling": "gain", "layers": 2}, ("recompute",), {"dtype": F32, "T": 20}, None),
    "sink": ({"sink": True, "layers": 2}, ("stored",), {"dtype": F32, "T": 20, "B": 2}, Mask.lengths([20, 0])),
    "dropout": ({"dropout_p": 0.3, "layers": 2}, ("stored",), {"dtype": F32, "T": 20}, None),
    "detached": ({"detach": True, "layers": 3}, ("stored", "mixed"), {"dtype": F16, "T": 20}, None),
    "chunk": ({"windows": 20, "layers": 3}, ("mixed",), {"dtype": F16, "T": 11, "Tk": 50}, None),
    "odd widths": ({"layers": 2}, ("stored",), {"dtype": F16, "T": 20, "d": 24, "dv": 40}, None),
    "strided": ({"layers": 2}, ("stored",), {"dtype": F16, "T": 20, "strided": True}, None),
    "begins anywhere": ({"layers": 2}, ("stored",), {"dtype": F16, "T": 20, "begins": 1}, None),
    "fp16 carry of fp32": ({"carry_dtype": F16, "grad_dtype": F16}, ("mixed",), {"dtype": F32, "T": 20}, None),
}


def check(name):
    options, plans, sizes, mask = CASES[name]
    sizes = dict(sizes)
    strided, begins = sizes.pop("strided", False), sizes.pop("begins", 0)
    settings.FILL, settings.TRANSIENT = sizes.pop("fill", FILL), sizes.pop("transient", TRANSIENT)
    config = CarriedConfig(**{"impl": "triton", "tile": 16, "layers": 3} | options)
    torch.manual_seed(0)
    q, k, v = inputs(layers=config.layers, **{"H": 2, "Hk": 1, "d": 16} | sizes)
    if strided:  # as a projection leaves them: [B, T, H, d] in memory
        q, k, v = (
            [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in g] for g in (q, k, v)
        )
    if begins:  # within a buffer, where no descriptor may point; other cases of these shapes begin where one may
        q, k, v = (
            [x.new_empty(x.numel() + begins)[begins:].view(x.shape).copy_(x.detach()).requires_grad_() for x in g]
            for g in (q, k, v)
        )
    heads = lambda: [torch.rand(q[0].shape[1]).add(0.3).requires_grad_() for _ in q]  # noqa: E731
    gain, sink = heads() if config.scaling == "gain" else None, heads() if config.sink else None
    seed = [torch.tensor([7 + i]) for i in range(len(q))] if config.dropout_p else None
    G = [torch.randn_like(x[..., :1]).expand(*x.shape[:3], v[0].shape[-1]).contiguous() for x in q]
    extra = [*(gain or [])[1:], *(sink or [])]
    wide, wide_gain, wide_sink = promoted((q, k, v)), *(None if x is None else promoted([x])[0] for x in (gain, sink))
    wide_extra = [*(wide_gain or [])[1:], *(wide_sink or [])]

    def both(outputs, leaves):
        loss = sum((o * w.to(o.dtype)).sum() for o, w in zip(outputs, G, strict=True))
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        return [*outputs, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True))]

    leaves, wide_leaves = [*q, *k, *v, *extra], [*wide[0], *wide[1], *wide[2], *wide_extra]
    exact = both(dense(config, *wide, mask=mask, gain=wide_gain, sink=wide_sink, seed=seed), wide_leaves)
    low = both(dense(config, q, k, v, mask=mask, gain=gain, sink=sink, seed=seed), leaves)
    names = [f"{x}{i}" for x in ("O", "dQ", "dK", "dV") for i in range(len(q))]
    rounded = config.carry_dtype is not None
    for plan in plans:
        results = []
        for _ in range(1 + (name == "causal" and plan == "mixed")):
            got = run(dataclasses.replace(config, plan=plan), q, k, v, mask=mask, gain=gain, sink=sink, seed=seed)
            results.append(both(got, leaves))
        for label, a, b, c in zip(names, results[0], low, exact, strict=False):
            if rounded:
                assert ((a.double() - c).norm() / c.norm()).item() < 4e-3, f"{name} {plan} {label}"
            else:
                assert_within_budget(f"{name} {plan} {label}", a, b, c)
        # A handful of sums over all tokens: one lucky rounding of the dense sums says nothing, so no budget here.
        for a, c in zip(results[0][len(names) :], exact[len(names) :], strict=True):
            torch.testing.assert_close(a.double(), c, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(a, b) for a, b in zip(results[0], results[-1], strict=True))
    print(f"{name}: {' '.join(plans)}", flush=True)


def check_packing():
    """Kernels put a score where the any-device path puts it, for rows that start at a computed and at a listed slot."""
    for options, mask in (({"windows": 40}, None), ({}, Mask.packed([0, 30, 70]))):
        config = CarriedConfig(tile=16, layers=2, **options)
        q, k, v = ([x.detach() for x in g] for g in inputs(layers=1, H=2, Hk=1, d=16, T=70, dtype=F16))
        layout = TileLayout(config, 70, 70, mask)
        tiles, found = layout.layers[0], []
        numbers = Options(0.25, 1, 0.0, 0.0, 16, True, layout.back, (True,), F16)
        for kernels in (blocked, launch):
            z = torch.full((1, 2, layout.slots, 16, 16), torch.nan, dtype=F16)
            lists = ([], [k[0].float().mean(2)], tiles.bounds)
            kernels.forward(q, k, v[0], *lists, tiles.rows, None, z, False, None, None, numbers)
            dense = torch.zeros(2, 80, 80)
            for m, (base, first, end, *_) in enumerate(tiles.rows.t().tolist()):
                for n in range(first, end):
                    dense[:, 16 * m : 16 * m + 16, 16 * n : 16 * n + 16] = z[0, :, base + n]
            found.append(dense[:, :70, :70].masked_fill(~config.mask(0, mask).allowed(70, 70)[0], 0.0))
        torch.testing.assert_close(*found, rtol=2e-3, atol=2e-2)
    print("packing", flush=True)


def check_gradient_of_a_bad_value():
    """A value that is NaN or infinite spoils rows, not its own gradient, which is P's sum of dO: in every plan."""
    for plan in ("stored", "mixed", "recompute"):
        q, k, v = inputs(layers=3, H=2, Hk=1, d=16, T=20, dtype=F32)
        with torch.no_grad():
            v[0][:, :, 9], v[1][:, :, 9] = torch.nan, torch.inf
        config = CarriedConfig(impl="triton", layers=3, plan=plan, tile=16)
        weights = [torch.randn(1, 2, 20, 16) for _ in q]
        wide = promoted((q, k, v))
        found = grads_of(run(config, q, k, v), v, weights)
        exact = grads_of(dense(config, *wide), wide[2], weights)
        torch.testing.assert_close([x.double() for x in found], list(exact), rtol=1e-3, atol=1e-3)
    print("gradient of a bad value", flush=True)


def check_bad_numbers():
    """What is NaN does not become a saturated score or gradient: rows are spoilt as on the any-device path."""
    for plan in ("stored", "mixed", "recompute"):
        for what in ("q", "k", "dO"):
            q, k, v = inputs(layers=4, H=2, Hk=1, d=16, T=20, dtype=F16)
            weights = [torch.randn(1, 2, 20, 16) for _ in q]
            with torch.no_grad():
                {"q": q[0], "k": k[0], "dO": weights[3]}[what][:, :, 9, 3] = torch.nan
            config, rows = CarriedConfig(layers=4, plan=plan, tile=16), []
            for impl in ("triton", "blocked"):
                outputs = run(dataclasses.replace(config, impl=impl), q, k, v)
                found = [*outputs, *grads_of(outputs, q, weights)]
                rows.append([x.isfinite().all(-1) for x in found])
            assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True)), f"{plan} {what}"
            assert not all(x.all() for x in rows[1])
    print("bad numbers", flush=True)


def check_lowest_scores():
    """Rows whose first tile is hidden beside a sink of −∞, and scores far below any that are hidden."""
    q, k, v = ([x.detach() for x in g] for g in inputs(layers=2, H=2, Hk=1, d=16, T=40, dtype=F32))
    sink = [torch.full((2,), -torch.inf), torch.tensor([0.5, -torch.inf])]
    for large, options in ((1.0, {"windows": 5, "sink": True}), (1e16, {}), (1e16, {"windows": 5, "sink": True})):
        config = CarriedConfig(impl="triton", layers=2, tile=16, **options)
        given = {"sink": sink if "sink" in options else None}
        low = [x.abs() * large for x in q], [-x.abs() * large for x in k], v
        for a, b in zip(run(config, *low, **given), dense(config, *promoted(low), **given), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)
    print("lowest scores", flush=True)


if __name__ == "__main__":
    quicken()
    exact_bf16()
    # Refused because of what exact_bf16 puts right.
    launch.refusal = lambda *_: None
    check_packing()
    check_gradient_of_a_bad_value()
    check_bad_numbers()
    check_lowest_scores()
    for name in sys.argv[1:] or CASES:
        check(name)
