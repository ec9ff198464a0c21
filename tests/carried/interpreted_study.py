"""The precision study on the kernels under Triton's interpreter in bf16. Prints plan, spread, shift and worst ratio."""

import sys

import torch
from carried_cases import CarriedConfig
from interpreted_bf16 import exact_bf16, quicken
from precision_study import LIMIT, STUDY, measure

from tilewise.carried.triton import launch

if __name__ == "__main__":
    quicken()
    exact_bf16()
    # Refused because of what exact_bf16 puts right.
    launch.refusal = lambda *_: None
    chosen = [STUDY[int(n)] for n in sys.argv[1:]] or STUDY
    for plan, limit in LIMIT.items():
        for std, offset in chosen:
            torch.manual_seed(0)
            worst = max(measure(CarriedConfig(impl="triton", plan=plan), std, offset, H=2, Hk=1))
            print(f"{plan} {std} {offset} {worst:.2f}", flush=True)
            assert worst <= limit
