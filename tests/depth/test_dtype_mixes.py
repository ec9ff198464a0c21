"""Weights, sources and statistics in different dtypes: cast as the docs say, with gradients in each one's own dtype."""

import pytest
import torch

from tilewise import depth
from tilewise.depth import Schedule
from tilewise.depth import reference as R
from tilewise.nn import AttnRes

D, T, S = 16, 5, 3
HALF, BF, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
MIXES = [(F32, F64), (BF, F64), (HALF, F64), (BF, F32), (HALF, BF), (F32, BF), (F64, F32), (F64, BF)]


def weighted(sources, weights):
    """(two sources, update, prefix), (w, g, output weights); prefix + update is exact in every dtype."""
    streams = [torch.randint(-8, 9, (T, D)) / 4 for _ in range(4)]
    return [x.to(sources).requires_grad_() for x in streams], [
        (0.3 * torch.randn(S, D) + shift).to(weights).requires_grad_() for shift in (0, 1, 1)
    ]


def merged(m, v, u, p, w, g, o, options):
    o1, lse = m.phase1(v, w, g, **options)
    return m.phase2(u, p, o1[1], lse[1], w[1], g[1], o[1], **options)


OPERATORS = {
    "mix": lambda m, v, u, p, w, g, o, **k: m.mix(v, w[0], g[0], **k),
    "mix_norm": lambda m, v, u, p, w, g, o, **k: m.mix_norm(v, w[0], g[0], o[0], **k),
    "mix_update": lambda m, v, u, p, w, g, o, **k: m.mix_update(u, p, v, w[0], g[0], o[0], **k),
    "scores": lambda m, v, u, p, w, g, o, **k: m.scores(v, w, g, **k),
    "complete": lambda m, v, u, p, w, g, o, **k: m.complete(u, p, w, g, **k),
    "phase1": lambda m, v, u, p, w, g, o, **k: m.phase1(v, w, g, **k),
    "phase2": lambda m, v, u, p, w, g, o, **k: merged(m, v, u, p, w, g, o, k),
    "phase2_first": lambda m, v, u, p, w, g, o, **k: m.phase2_first(v[0], o[0], **k),
}  # fmt: skip


def results(operator, module, streams, weights, **options):
    out = OPERATORS[operator](module, streams[:2], *streams[2:], *weights, **options)
    out = out if isinstance(out, tuple) else (out,)
    signs = [torch.randint(-1, 2, y.shape, generator=torch.Generator().manual_seed(1)) for y in out]
    loss = sum((y.double() * sign).sum() for y, sign in zip(out, signs, strict=True))
    return out, torch.autograd.grad(loss, [*streams, *weights], allow_unused=True)


@pytest.mark.parametrize("impl", ["eager", "reference"])
@pytest.mark.parametrize(("sources", "weights"), MIXES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_take_weights_of_any_dtype(operator, sources, weights, impl):
    leaves = weighted(sources, weights)
    out, grads = results(operator, depth, *leaves, impl=impl)
    wide = [[x.detach().double().requires_grad_() for x in part] for part in leaves]
    exact, exact_grads = results(operator, R, *wide)
    for y, e in zip(out, exact, strict=True):
        assert y.dtype in (sources, F64 if sources == F64 else F32)
        near(y, e, sources, weights)
    for leaf, g, e in zip([*leaves[0], *leaves[1]], grads, exact_grads, strict=True):
        assert (g is None) == (e is None)
        if g is not None:
            assert g.dtype == leaf.dtype
            near(g, e, sources, weights)


def near(got, exact, *dtypes):
    """Within 20 rounding units of the coarsest dtype, in norm: a query's gradient is a difference of larger numbers."""
    unit = max(torch.finfo(dtype).eps for dtype in dtypes)
    assert (got.double() - exact).norm() <= 20 * unit * exact.norm()


@pytest.mark.parametrize("kind", ["block", "two phases", "full"])
@pytest.mark.parametrize("mode", ["none", "read", "start"])
@pytest.mark.parametrize(("sources", "weights"), [(F32, F64), (BF, F64), (F64, F32)])
def test_streams_take_weights_of_any_dtype(sources, weights, mode, kind):
    L = 4
    schedule = {
        "block": Schedule.block(L, 2), "two phases": Schedule.block(L, 2, one_pass_sources=0),
        "full": Schedule.full_attention(L, 2, one_pass_sources=0),
    }[kind]  # fmt: skip
    residual = AttnRes(D, schedule, dtype=weights)
    torch.nn.init.normal_(residual.query)
    norms = [torch.rand(D).to(weights).requires_grad_() for _ in range(L + 1)]
    x = torch.randn(T, D).to(sources).requires_grad_()
    found = []
    for dtype in (None, F64):
        module = residual if dtype is None else AttnRes(D, schedule, impl="reference", dtype=F64)
        module.load_state_dict(residual.state_dict())
        own = [n if dtype is None else n.detach().double().requires_grad_() for n in norms]
        start = x if dtype is None else x.detach().double().requires_grad_()
        stream = module(start, norms=own[:L] if mode == "start" else None)
        for l in range(L):
            y = stream.read(l, own[l]) if mode == "read" else stream.read(l)
            stream.write(l, torch.sin(y))
        out = stream.output(own[L])
        leaves = [start, module.query, module.key_weight, *(own if mode != "none" else own[L:])]
        grads = torch.autograd.grad(out.double().square().sum(), leaves)
        assert [g.dtype for g in grads] == [leaf.dtype for leaf in leaves]
        found.append((out, *grads))
    assert found[0][0].dtype == sources
    for got, exact in zip(*found, strict=True):
        near(got, exact, sources, weights)


def test_norms_of_several_dtypes():
    residual, x = AttnRes(D, Schedule.block(4, 2)), torch.randn(T, D)
    norms = [torch.rand(D, dtype=dtype) for dtype in (F32, F64, BF, HALF)]
    outputs = []
    for given in (norms, [n.float() for n in norms]):
        stream = residual(x, norms=given)
        for l in range(4):
            stream.write(l, torch.sin(stream.read(l)))
        outputs.append(stream.output())
    torch.testing.assert_close(*outputs)


@torch.no_grad()
def test_inference_and_serving_take_weights_of_any_dtype():
    schedule = Schedule.block(4, 2, one_pass_sources=0)
    for dtype in (F32, BF):
        wide = AttnRes(D, schedule, dtype=F64)
        torch.nn.init.normal_(wide.query)
        norms, x = torch.rand(5, D, dtype=F64), torch.randn(T, D).to(dtype)
        outputs = []
        for weights in (F64, F32):
            state = depth.InferenceState(schedule, wide.to(weights).reads(), max_tokens=T, dtype=dtype)
            stream = state(x)
            for l in range(4):
                stream.write(l, torch.sin(stream.read(l, norms[l].to(weights))))
            bank = x[:, None].repeat(1, 2, 1)
            vectors = [v.to(weights) for v in (norms[0], norms[1], norms[2])]
            served = depth.fused_attn_res(x.clone(), x, bank, *vectors, 1, -1, 1e-6, 1e-6)
            outputs.append((stream.output(norms[4].to(weights)), served))
        for a, b in zip(*outputs, strict=True):
            assert a.dtype == dtype
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("impl", ["auto", "eager", "reference"])
@pytest.mark.parametrize("sources", [BF, F32, F64])
def test_statistics_that_a_caller_gives_are_not_rounded(sources, impl):
    v, w = [torch.randn(T, D, dtype=sources) for _ in range(2)], torch.randn(S, D, dtype=sources)
    o1, lse = depth.phase1(v, w, impl=impl)
    s = depth.scores(v, w, impl=impl)
    depth.phase2(v[0], None, o1[1], lse[1], w[1], impl=impl)
    depth.phase1_from_scores(v, s, impl=impl)
    for dtype in {HALF, BF, F32, F64} - {s.dtype}:
        with pytest.raises(TypeError, match=rf"lse: found {dtype}, expected {s.dtype} beside sources in {sources}"):
            depth.phase2(v[0], None, o1[1], lse[1].to(dtype), w[1], impl=impl)
        with pytest.raises(TypeError, match=rf"s: found {dtype}, expected {s.dtype} beside sources in {sources}"):
            depth.phase1_from_scores(v, s.to(dtype), impl=impl)
