"""Kernels under Triton's interpreter (TRITON_INTERPRET=1) with spoilt keys that the mask hides. Prints the plans."""

import math

import torch
from hidden_cases import CASES, PLANS, spoilt
from interpreted_bf16 import quicken

# A run in the interpreter takes seconds: each way of being hidden once for each way of centring, or of none.
NAMES = {
    "stored": ("lengths, causal", "later keys"),
    "mixed": ("later keys",),
    "recompute": ("lengths, causal",),
}

if __name__ == "__main__":
    quicken()
    for plan in PLANS:
        for name in NAMES[plan]:
            (outputs, grads), (_, zero_grads), (exact, _) = spoilt(name, plan, math.nan, "triton", torch.float16)
            for a, c in zip(outputs, exact, strict=True):
                assert ((a.double() - c).norm() / c.norm()).item() < 4e-3, (plan, name)
            if CASES[name][4]:
                for a, b in zip(grads, zero_grads, strict=True):
                    assert ((a - b).double().norm() / (b.double().norm() + 1e-9)).item() < 1e-2, (plan, name)
        print(plan, flush=True)
