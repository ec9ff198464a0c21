"""The oracle says what the paper's equations say: two-phase equals one-pass, zero queries give the mean, and so on."""

import pytest
import torch

from tilewise import depth
from tilewise.depth import reference as R

F64 = torch.float64


def make(n, S, d=24, tokens=(2, 3)):
    v = torch.randn(n, *tokens, d, dtype=F64)
    return v, torch.randn(S, d, dtype=F64), 1 + 0.2 * torch.randn(S, d, dtype=F64)


def test_zero_query_is_the_mean():
    v, _, _ = make(5, 1)
    torch.testing.assert_close(R.mix(v, torch.zeros(24, dtype=F64)), v.mean(0))


def test_one_source_is_itself_and_its_query_has_no_gradient():
    v, q, _ = make(1, 1)
    q = q[0].requires_grad_()
    h = R.mix(v, q)
    torch.testing.assert_close(h, v[0])
    assert torch.autograd.grad(h.sum(), q)[0].abs().max() < 1e-14


def test_scores_by_hand():
    v, w, g = make(3, 2)
    norm = v / (v.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    for l in range(2):
        for j in range(3):
            torch.testing.assert_close(R.scores(v, w, g, eps=1e-3)[l, j], ((norm[j] * g[l]) * w[l]).sum(-1))


@pytest.mark.parametrize("key", [False, True])
def test_two_phase_equals_one_pass_along_a_block(key):
    v, w, g = make(4, 5)
    g = g if key else [None] * 5
    o1, lse = R.phase1(v, w, torch.stack(list(g)) if key else None)
    out = 1 + 0.1 * torch.randn(24, dtype=F64)
    torch.testing.assert_close(R.phase2_first(o1[0], out), R.mix_norm(v, w[0], g[0], out))
    prefix = None
    for i in range(1, 5):
        u = torch.randn_like(v[0])
        expected = R.mix_update(u, prefix, list(v), w[i], g[i], out, output_eps=1e-5)
        prefix, y = R.phase2(u, prefix, o1[i], lse[i], w[i], g[i], out, output_eps=1e-5)
        torch.testing.assert_close(prefix, expected[0])
        torch.testing.assert_close(y, expected[1])


def test_scores_ahead_equal_phase_one():
    v, w, g = make(3, 4)
    u, p = torch.randn_like(v[0]), torch.randn_like(v[0])
    b, s = R.complete(u, p, w, g)
    every = torch.cat([R.scores(v, w, g), s[:, None]], 1)
    for got, expected in zip(R.phase1_from_scores([*v, b], every), R.phase1([*v, u + p], w, g), strict=True):
        torch.testing.assert_close(got, expected)


def test_the_prefix_is_rounded_before_it_is_a_source():
    u, p, v = (torch.randn(7, 24).bfloat16() for _ in range(3))
    q = torch.randn(24)
    rounded = (u.float() + p.float()).bfloat16()
    got, y = R.mix_update(u, p, [v], q)
    assert torch.equal(got, rounded)
    assert torch.equal(y, R.mix([v, rounded], q))


def test_serving_contract():
    T, NB, d = 5, 4, 24
    p, delta, bank = torch.randn(T, d, dtype=F64), torch.randn(T, d, dtype=F64), torch.randn(T, NB, d, dtype=F64)
    w, g, o = torch.randn(d, dtype=F64), torch.rand(d, dtype=F64) + 0.5, torch.rand(d, dtype=F64) + 0.5
    expected = R.mix_norm([bank[:, 0], bank[:, 1], p + delta], w, g, o, eps=1e-5, output_eps=1e-4)
    bank0, p1 = bank.clone(), p + delta
    y = R.fused_attn_res(p, delta, bank, g, w, o, 2, 3, 1e-5, 1e-4)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(p, p1)
    bank0[:, 3] = p1
    torch.testing.assert_close(bank, bank0)


INSIDE = {
    "mix": lambda v, w, o: depth.mix(v, w[0], o, impl="reference"),
    "mix_norm": lambda v, w, o: depth.mix_norm(v, w[0], None, o, impl="reference"),
    "mix_update": lambda v, w, o: depth.mix_update(v[0], v[1], v[2:], w[0], None, o, impl="reference")[1],
    "scores": lambda v, w, o: depth.scores(v, w, impl="reference"),
    "complete": lambda v, w, o: depth.complete(v[0], v[1], w, impl="reference")[1],
    "phase1": lambda v, w, o: depth.phase1(v, w, impl="reference")[0],
    "phase1_from_scores": lambda v, w, o: depth.phase1_from_scores(v, v[..., :4], impl="reference")[0],
    "phase2": lambda v, w, o: depth.phase2(v[0], v[1], v[2], v[3, ..., 0], w[0], None, o, impl="reference")[1],
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
def test_autocast_lowers_nothing(name):
    """Neither what is computed, in any dtype, nor gradients of a backward pass that autocast surrounds as well."""
    leaves = [x.float().requires_grad_() for x in (torch.randn(4, 4, 4, 24), torch.randn(4, 24), torch.rand(24) + 0.5)]

    def run(inside):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            y = INSIDE[name](*leaves)
            return y, *torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)

    for a, b in zip(run(True), run(False), strict=True):
        if b is not None:
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        else:
            assert a is None


def test_products_inside_autocast_can_be_differentiated_again_and_mapped():
    v, w, _ = make(3, 2, d=5)
    leaves = [w.requires_grad_(), *(x.requires_grad_() for x in v.unbind(0))]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.autograd.gradgradcheck(lambda w, *v: R.phase1(v, w), leaves)
        assert torch.autograd.gradgradcheck(lambda w, o1, u: R.phase2(u, None, o1, o1[..., 0], w[0])[1], leaves[:3])
        v = [x.detach() for x in leaves[1:]]
        mapped = torch.func.vmap(torch.func.grad(lambda w: R.mix(v, w).square().sum()))(w.detach())
    expected = torch.stack([torch.autograd.grad(R.mix(v, row).square().sum(), row)[0] for row in w.unbind(0)])
    torch.testing.assert_close(mapped, expected)


def test_products_inside_autocast_have_forward_mode():
    """Alone, and over a backward pass, as a Hessian is made."""
    v, w, _ = make(3, 2, d=5)
    v, w = v.detach(), w.detach()
    f = lambda w: R.phase1(list(v), w)[0].square().sum()  # noqa: E731
    expected = torch.func.jvp(f, (w,), (torch.ones_like(w),))[1], torch.func.hessian(f)(w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.func.jvp(f, (w,), (torch.ones_like(w),))[1], torch.func.hessian(f)(w)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("inside", [False, True])
def test_a_whole_graph_holds_products_inside_autocast(inside, monkeypatch):
    torch._dynamo.reset()
    # As Dynamo of PyTorch 2.11, which does not know what this returns.
    unknown = torch._dynamo.disable(torch.amp.is_autocast_available)
    monkeypatch.setattr(torch.amp, "is_autocast_available", unknown)
    v, w, _ = make(3, 2, d=5)
    v, w = v.detach(), w.detach().requires_grad_()
    compiled = torch.compile(lambda w: R.phase1(list(v), w)[0], backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
        found = compiled(w)
    torch.testing.assert_close(found, R.phase1(list(v), w)[0])
    (a,), (b,) = (torch.autograd.grad(y.square().sum(), w) for y in (found, R.phase1(list(v), w)[0]))
    torch.testing.assert_close(a, b)
