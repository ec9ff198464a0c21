"""Every depth operator on the GPU, outputs and gradients, against the fp64 oracle, for `depth_kernels.py`.

The grid is every width of {64, 2304, 5120, 7168} with {1, 2, 9, 29, 129} sources, uncorrelated and correlated 0.99, in
bf16; a part of it in fp16 and fp32. Few tokens (at most 1,024) and many take turns, since they take other kernels; many
sources of wide rows have few tokens, since the oracle keeps all of them in fp64.
"""

import sys
from pathlib import Path

import torch

from tilewise import depth
from tilewise.testing import error_budget

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/depth"))
import operator_cases as operators

F32 = torch.float32


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def judged(case, values, **fields):
    budget = error_budget(case, *values)
    return {"case": case, **fields, "ok": budget.ok, "error": budget.error, "allowed": budget.allowed,
            "rel": budget.relative}  # fmt: skip


def equal(case, same, rel=0):
    return {"case": case, "ok": same, "error": 0, "allowed": 0, "rel": rel}


def check(dtype_name, d, n, S, T, correlations=(0.0, 0.99), device="cuda", impl="triton"):
    """Rows of a case, a row a tensor; the correlations share their kernels, so one process has both."""
    dtype, rows = getattr(torch, dtype_name), []
    torch.backends.cuda.matmul.allow_tf32 = False
    for correlation in correlations:
        torch.manual_seed(d + n)
        tensors = operators.tensors(n, S, T, d, dtype, device, correlation)
        tag = f"{dtype_name} d={d} n={n} S={S} T={T} corr={correlation}"
        for name, case in operators.calls(*tensors).items():
            for k, values in enumerate(operators.results(*case, impl)):
                rows.append(judged(f"{name} {tag}", values, tensor=k))
        with torch.no_grad():
            rows += places(tag, *tensors[:3], impl)
            for name, values in operators.inference_results(*tensors, impl).items():
                rows.append(judged(f"{name} {tag}", values))
    return rows


def places(tag, v, w, g, impl):
    """The same bits wherever sources lie: a list, a bank, addresses further apart than 32 bits reach; and twice."""
    bank, kw = torch.stack(v), {"impl": impl}
    first = depth.phase1(bank, w, g, **kw)[0]
    rows = [
        equal(f"bank equals list {tag}", torch.equal(first, depth.phase1(v, w, g, **kw)[0])),
        equal(f"repeatable {tag}", torch.equal(first, depth.phase1(bank, w, g, **kw)[0])),
    ]
    if len(v) == 2 and v[0].is_cuda:
        near = v[0].clone()
        gap = torch.empty(9 << 30, dtype=torch.int8, device="cuda")
        far = v[1].clone()
        del gap
        same = torch.equal(first, depth.phase1([near, far], w, g, **kw)[0])
        rows.append(equal(f"far apart {tag}", same, far.data_ptr() - near.data_ptr()))
        torch.cuda.empty_cache()
    return rows


QUERIES = {1: 3, 2: 20, 9: 16, 29: 8, 129: 3}
TOKENS = {
    64: {1: 1100, 2: 300, 9: 1100, 29: 300, 129: 1100},
    2304: {1: 300, 2: 1100, 9: 300, 29: 1100, 129: 40},
    5120: {1: 300, 2: 1100, 9: 300, 29: 100, 129: 24},
    7168: {1: 1100, 2: 300, 9: 1100, 29: 100, 129: 16},
}
GRID = [(d, n, QUERIES[n], T) for d, tokens in TOKENS.items() for n, T in tokens.items()]
PART = {"float16": ((64, 1), (2304, 9), (7168, 2)), "float32": ((64, 29), (2304, 2), (5120, 9), (7168, 1))}
CHECKS = [("bfloat16", *shape) for shape in GRID]
CHECKS += [(dtype, *shape) for dtype, shapes in PART.items() for shape in GRID if shape[:2] in shapes]
