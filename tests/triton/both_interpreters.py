"""Kernels under Triton's interpreter as it is and then as `quick_interpreter` makes it: a process of its own.

Prints one JSON line a check: its name, whether both results are the same, and what shows that the kernels ran.
"""

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch

torch.set_num_threads(1)
sys.path.append(str(Path(__file__).parents[1]))

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from relative_checks import call_of, run  # noqa: E402

from quick_interpreter import quicken  # noqa: E402
from tilewise import Options  # noqa: E402
from tilewise.testing import Sizes  # noqa: E402


@triton.jit
def _wrong(x, kind: tl.constexpr):
    i = tl.arange(0, 16)
    if kind == "shapes":
        tl.store(x + i, tl.load(x + i) + tl.arange(0, 32))
    elif kind == "ranks":
        tl.store(x + i, tl.broadcast_to(tl.load(x + i), [16, 16]))
    elif kind == "types":
        tl.store(x + i, tl.load(x + i) & tl.load(x + i))
    elif kind == "block":
        tl.store(x + i, tl.zeros([24], tl.float32))
    else:
        tl.store(x + i, tl.load(x + i, mask=i < 8))


@triton.jit
def _both(a, b, c, d):
    return a * 0.5 + c, d * b - a


@triton.jit
def _sums(a, b, c, d):
    return a + c, b + d


@triton.jit
def _reduced(x, y, out, AXIS: tl.constexpr):
    i = tl.arange(0, 8)[:, None] * 32 + tl.arange(0, 32)[None, :]
    one, two = tl.reduce((tl.load(x + i), tl.load(y + i)), AXIS, _both)
    kept, _ = tl.reduce((tl.load(x + i), tl.load(y + i)), AXIS, _both, keep_dims=True)
    first, second = tl.reduce((tl.load(x + i), tl.load(y + i)), AXIS, _sums)
    tl.store(out + i, tl.expand_dims(one + two + first * second, AXIS) + kept + tl.zeros([8, 32], tl.float32))


def reductions(dtype: torch.dtype) -> list[torch.Tensor]:
    """By functions of the kernel's own, of two tensors of different types, along either axis."""
    x, y = (torch.randn(8, 32, generator=torch.Generator().manual_seed(n)) for n in range(2))
    found = [torch.zeros(8, 32) for _ in range(2)]
    for axis, out in enumerate(found):
        _reduced[(1,)](x, y.to(dtype), out, axis)
    return found


def refused(kind: str) -> str:
    """What the interpreter says of a kernel with a mistake; the last kind has none."""
    x = torch.arange(16.0)
    try:
        _wrong[(1,)](x, kind)
    except Exception as error:
        return repr(error)
    return str(x.tolist())


def attention(case: str, dtype: torch.dtype, mask: str, dropout: float) -> list[torch.Tensor]:
    sizes = Sizes(1, 1, 1, 9, 20, 16, 16)
    call = call_of(case, sizes, mask, dtype, "cpu", dropout, options=Options(fp32="ieee"))
    do = torch.randn(1, 1, 9, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    o, lse, grads = run(call, do, torch.ones(1, 1, 9))
    return [o, lse, *grads]


CALLS = [("shaw", torch.float16, "causal", 0.2), ("t5", torch.float32, "none", 0.0)]
KINDS = ["shapes", "ranks", "types", "block", "none"]

if __name__ == "__main__":
    results = []
    for quick in (False, True):
        if quick:
            quicken()
        tensors = [*map(reductions, (torch.float32, torch.float16)), *(attention(*call) for call in CALLS)]
        results.append((tensors, [refused(kind) for kind in KINDS]))
    (tensors, words), (quick_tensors, quick_words) = results
    names = ["reductions", "reductions, fp16", *(case for case, *_ in CALLS)]
    for name, whole, quick in zip(names, tensors, quick_tensors, strict=True):
        same = all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(whole, quick, strict=True))
        print(json.dumps({"name": name, "same": same, "ran": bool(whole[0].isfinite().all())}), flush=True)
    for kind, *said in zip(KINDS, words, quick_words, strict=True):
        print(json.dumps({"name": kind, "same": said[0] == said[1], "ran": said[0]}), flush=True)
