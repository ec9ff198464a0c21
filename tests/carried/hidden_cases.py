"""Keys and values that the mask hides, spoilt: what they may and may not change. Used with and without Triton."""

import torch
from carried_cases import CarriedConfig, dense, inputs, promoted, run

from tilewise.mask import Mask

PLANS = ("stored", "mixed", "recompute")
# name: options, mask, rows that count, first spoilt key, whether spoilt keys lie in dead tiles (of 16) only
CASES = {
    "lengths": ({"causal": False}, Mask.lengths([32]), 48, 32, True),
    "lengths, causal": ({}, Mask.lengths([32]), 48, 32, True),
    "within a live tile": ({"causal": False}, Mask.lengths([30]), 48, 30, False),
    "tokens after the last document": ({}, Mask.packed([0, 10, 32], total=48), 32, 32, True),
    "later keys": ({}, None, 38, 38, False),
    "windows of a chunk": ({"windows": 9}, None, 20, None, True),
}


def spoilt(name, plan, value, impl, dtype):
    """Outputs and gradients of the rows that count with spoilt keys (and values, in dead tiles), with zeros in their
    place, and exactly."""
    options, mask, rows, first, dead = CASES[name]
    config = CarriedConfig(plan=plan, impl=impl, tile=16, layers=3, **options)
    torch.manual_seed(0)
    q, k, v = inputs(layers=3, H=2, Hk=1, d=16, T=20 if first is None else 48, Tk=48, dtype=dtype)
    results = []
    for number in (value, 0.0, None):
        leaves = promoted((q, k, v)) if number is None else [[x.detach().clone() for x in g] for g in (q, k, v)]
        with torch.no_grad():
            for x in leaves[1] + (leaves[2] if dead else []):
                (x[:, :, :16] if first is None else x[:, :, first:]).fill_(number or 0.0)
        leaves = [[x.requires_grad_() for x in g] for g in leaves]
        outputs = (dense if number is None else run)(config, *leaves, mask=mask)
        outputs = [o[:, :, :rows] for o in outputs]
        grads = torch.autograd.grad(sum(o.square().sum() for o in outputs), [x for g in leaves for x in g])
        results.append((outputs, list(grads)))
    return results
