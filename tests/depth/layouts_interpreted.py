"""Queries and weights of every layout and dtype give the kernels' results for contiguous ones in fp32, forward and
backward; so do passes within passes and reads made twice.

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


@pytest.mark.parametrize("weights", [torch.float64, torch.float16])
@pytest.mark.parametrize("sources", [torch.float32, torch.float16])
def test_weights_of_other_dtypes(sources, weights):
    """Given as fp32 the same numbers have the same results; gradients come in the weight's own dtype."""
    v = [torch.randn(T, D).to(sources) for _ in range(4)]
    # Exact in every dtype, products too.
    q, g, w = (torch.randint(-4, 5, (S, D)).to(weights) / 8 for _ in range(3))

    def all_operators(q, g, w, u, p, *v):
        o1, lse = depth.phase1(v, q, g, impl="triton")
        merged = depth.phase2(u, p, o1[1], lse[1], q[1], g[1], w[1], impl="triton")
        mixed = depth.mix_update(u, p, v, q[0], g[0], w[0], impl="triton")
        return *merged, *mixed, depth.phase2_first(o1[0], w[0], impl="triton")

    own, wide = ([*(x.to(dtype) for x in (q, g, w)), *v] for dtype in (weights, torch.float32))
    for n, (a, b) in enumerate(zip(results(all_operators, own), results(all_operators, wide), strict=True)):
        assert a.dtype in (sources, weights)
        # Five outputs, then gradients: those of a weight autograd adds in the weight's own dtype.
        close = {"rtol": 1e-2, "atol": 1e-4} if n >= 5 and a.dtype == torch.float16 else {}
        torch.testing.assert_close(a.float(), b.float(), **close)
    bank = torch.stack(v[:2], 1)
    served = []
    for dtype in (weights, torch.float32):
        vectors = [x[0].to(dtype) for x in (g, q, w)]
        served.append(depth.fused_attn_res(v[2].clone(), v[3], bank, *vectors, 1, -1, 1e-6, 1e-6, impl="triton"))
    torch.testing.assert_close(*served, rtol=0, atol=0)


@pytest.mark.parametrize("save_o1", [False, True])
def test_a_pass_within_a_pass_and_a_read_made_twice(save_o1):
    found = []
    for impl in ("triton", "eager"):
        torch.manual_seed(2)
        x, u, q, w = (torch.randn(*s, D, requires_grad=True) for s in ((T,), (T,), (S,), (S,)))
        sources = [depth.SharedSource(v) for v in (x, x.sin())]
        reads = depth.BlockReads(sources, q, None, w, save_o1=save_o1, impl=impl)
        ys = [reads.first(), reads.merge(1, u, None)[1], reads.merge(1, u.cos(), None)[1]]
        last, inner = depth.mix_norm_shared(sources, q[0], None, w[1], impl=impl), []

        def hook(_, last=last, ys=ys, inner=inner, leaves=(x, u, q, w)):
            if not inner:
                inner.append(None)
                with torch.enable_grad():
                    loss = (last * ys[1]).sum()
                inner[:] = torch.autograd.grad(loss, leaves, retain_graph=True)

        ys[2].register_hook(hook)
        loss = sum((y * y).sum() for y in (*ys, last))
        found.append([*torch.autograd.grad(loss, [x, u, q, w], retain_graph=True), *inner])
    assert len(found[0]) == 8
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_no_tokens():
    """An empty rank of a sharded stream."""
    residual, x = AttnRes(D, depth.Schedule.block(4, 2), impl="triton"), torch.zeros(0, D, requires_grad=True)
    for norms in (None, torch.ones(4, D).unbind(0)):
        stream = residual(x, norms=norms)
        for l in range(4):
            stream.write(l, torch.tanh(stream.read(l)))
        for leaf in (x, residual.query):
            (grad,) = torch.autograd.grad(stream.output().sum(), leaf, retain_graph=True)
            torch.testing.assert_close(grad, torch.zeros_like(leaf), rtol=0, atol=0)
