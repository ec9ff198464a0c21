"""Queries and weights of every layout give the kernels' results for contiguous ones, forward and backward.

Run by `test_depth_kernels.py` in its own process: rows of a transposed matrix, columns, steps, one expanded number.
"""

import pytest
import torch

from quick_interpreter import quicken
from tilewise import depth
from tilewise.nn import AttnRes

quicken()

T, D, S = 3, 16, 2
LAYOUTS = {
    "columns": lambda x: x.mT.contiguous().mT,
    "steps": lambda x: torch.stack((x, x), -1)[..., 0],
    "one number": lambda x: x[..., :1].expand_as(x),
}


def vector(layout):
    """[D] of this layout and the same numbers in a row."""
    matrix = LAYOUTS[layout](torch.rand(4, D) + 0.5)
    x = matrix[1] if layout != "columns" else (torch.rand(D, 5) + 0.5)[:, 2]
    assert x.stride(-1) != 1
    return x


def results(run, leaves):
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = run(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    return *out, *torch.autograd.grad(sum((y * y).sum() for y in out), leaves)


def check(run, leaves):
    for a, b in zip(results(run, leaves), results(run, [x.contiguous() for x in leaves]), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vectors(layout):
    v = [torch.randn(T, D) for _ in range(2)]
    q, w = vector(layout), vector(layout)
    o1, lse, update, prefix = torch.randn(T, D), torch.randn(T), torch.randn(T, D), torch.randn(T, D)
    check(lambda q, w, *v: depth.mix_norm(v, q, None, w, impl="triton"), [q, w, *v])
    check(lambda q, *v: depth.mix(v, q, impl="triton"), [q, *v])
    check(lambda q, w, *v: depth.mix_update(update, prefix, v, q, None, w, impl="triton"), [q, w, *v])
    check(lambda q, w, u, p: depth.phase2(u, p, o1, lse, q, None, w, impl="triton"), [q, w, update, prefix])
    check(lambda w, x: depth.phase2_first(x, w, impl="triton"), [w, o1])


@pytest.mark.parametrize("layout", ["columns", "steps"])
def test_matrices(layout):
    v = [torch.randn(T, D) for _ in range(2)]
    q, g, w = (LAYOUTS[layout](torch.randn(S, D)) for _ in range(3))
    assert q.stride(-1) != 1
    check(lambda q, *v: depth.phase1(v, q, impl="triton"), [q, *v])
    check(lambda q, g, *v: depth.phase1(v, q, g, impl="triton"), [q, g, *v])

    def block(q, g, w, x):
        reads = depth.BlockReads([depth.SharedSource(x)], q, g, w, impl="triton")
        y = reads.first()
        return reads.merge(1, torch.tanh(y), None)

    check(block, [q, g, w, v[0]])


@pytest.mark.parametrize("block", [2, None])
def test_streams(block):
    schedule = depth.Schedule.full_attention(4) if block is None else depth.Schedule.block(4, block)
    x, results = torch.randn(T, D), []
    torch.manual_seed(1)
    numbers, norms = torch.randn(2, 5, D), torch.rand(5, D) + 0.5
    for layout in (lambda x: x, LAYOUTS["columns"]):
        residual = AttnRes(D, schedule, impl="triton")
        residual.query = torch.nn.Parameter(layout(numbers[0]))
        residual.key_weight = torch.nn.Parameter(layout(numbers[1]))
        stream = residual(x)
        for l in range(4):
            stream.write(l, torch.tanh(stream.read(l, layout(norms)[l])))
        y = stream.output(layout(norms)[4])
        results.append((y, *torch.autograd.grad(y.square().sum(), [residual.query, residual.key_weight])))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
