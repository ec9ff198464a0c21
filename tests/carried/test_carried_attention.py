"""Every plan of the any-device path against the dense oracle, in fp64 and in the dtypes people train in."""

import dataclasses

import pytest
import torch
from carried_cases import CarriedConfig, dense, grads_of, inputs, run

from tilewise.mask import Mask

PLANS = ("recompute", "stored", "mixed")
DOCUMENTS = [0, 1, 2, 14, 15, 33, 37]

CASES = {
    "causal": ({}, {}),
    "full": ({"causal": False}, {}),
    "window 1": ({"windows": 1}, {}),
    "window 9": ({"windows": 9}, {}),
    "window beyond the length": ({"windows": 64}, {}),
    "window both sides": ({"windows": 7, "causal": False}, {}),
    "windows differ": ({"windows": (9, 20, 5, None)}, {}),
    "documents": ({}, {"mask": lambda: Mask.packed(DOCUMENTS)}),
    "documents, unused tail": ({}, {"mask": lambda: Mask.packed([0, 1, 30], total=37)}),
    "padding, one sequence empty": ({}, {"mask": lambda: Mask.lengths([37, 0])}),
    "left padding": ({"causal": False}, {"mask": lambda: Mask.lengths([37, 20], [11, 3])}),
    "mean": ({"scaling": "mean"}, {}),
    "gain": ({"scaling": "gain"}, {"gain": True}),
    "gain, windows differ": ({"scaling": "gain", "windows": (9, 20, 5, None)}, {"gain": True}),
    "detached": ({"detach": True}, {}),
    "detached gain": ({"detach": True, "scaling": "gain"}, {"gain": True}),
    "softcap": ({"softcap": 2.0}, {}),
    "softcap and mean": ({"softcap": 1.5, "scaling": "mean"}, {}),
    "sink": ({"sink": True}, {"sink": True}),
    "sink, rows without keys": ({"sink": True}, {"sink": True, "mask": lambda: Mask.lengths([37, 0])}),
    "dropout": ({"dropout_p": 0.3}, {"seed": True}),
    "scale": ({"scale": 0.2}, {}),
    "chunk of queries": ({}, {"shape": {"T": 21, "Tk": 53}}),
    "chunk of queries, window": ({"windows": 10}, {"shape": {"T": 21, "Tk": 53}}),
    "queries without keys": ({}, {"shape": {"T": 37, "Tk": 20}}),
    "multi-query": ({}, {"shape": {"H": 5, "Hk": 1}}),
    "one head each": ({}, {"shape": {"H": 2, "Hk": 2}}),
    "value width": ({}, {"shape": {"dv": 5}}),
    "one layer": ({"layers": 1}, {}),
    "two layers": ({"layers": 2}, {}),
    "three layers": ({"layers": 3}, {}),
    "six layers": ({"layers": 6}, {}),
    "block cut short": ({"layers": 6}, {"cut": 3}),
    "one token": ({}, {"shape": {"T": 1}}),
}


def build(name, dtype=torch.float64, std=1.0):
    options, extra = CASES[name]
    config = CarriedConfig(tile=16, impl="blocked", **options)
    layers = extra.get("cut", config.layers)
    mask = extra["mask"]() if "mask" in extra else None
    B = mask.bounds.shape[0] if mask is not None else 2
    shape = {"T": 37, "B": B} | extra.get("shape", {})
    q, k, v = inputs(layers=layers, dtype=dtype, std=std, **shape)
    H = q[0].shape[1]

    def heads():
        return [(torch.rand(H, dtype=torch.float64) + 0.3).to(dtype).requires_grad_() for _ in range(layers)]

    gain, sink = heads() if extra.get("gain") else None, heads() if extra.get("sink") else None
    seed = [torch.tensor([1000 + i]) for i in range(layers)] if extra.get("seed") else None
    leaves = [*q, *k, *v, *(gain or [])[1:], *(sink or [])]
    return config, (q, k, v), {"mask": mask, "gain": gain, "sink": sink, "seed": seed}, leaves


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name, plan):
    config, qkv, extra, leaves = build(name)
    exact = dense(config, *qkv, **extra)
    got = run(dataclasses.replace(config, plan=plan), *qkv, **extra)
    weights = [torch.randn_like(o) for o in exact]
    for i, (a, b) in enumerate(zip(got, exact, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, i=i: f"O_{i}: {m}")
    for a, b in zip(grads_of(got, leaves, weights), grads_of(exact, leaves, weights), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("plan", PLANS)
def test_every_window_from_one_key_to_all(plan):
    """35 tokens in tiles of 16; four query heads on one key head."""
    q, k, v = inputs(layers=3, T=35, H=4, Hk=1, d=4)
    leaves, weights = [*q, *k, *v], [torch.randn_like(o) for o in q]
    for window in range(1, 36):
        config = CarriedConfig(layers=3, tile=16, impl="blocked", plan=plan, windows=window)
        got, exact = run(config, q, k, v), dense(config, q, k, v)
        got, exact = ([*out, *grads_of(out, leaves, weights)] for out in (got, exact))
        for a, b in zip(got, exact, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11, msg=lambda m, n=window: f"window {n}: {m}")
