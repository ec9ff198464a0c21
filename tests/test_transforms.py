"""What attention() has no rule for (torch.func, forward mode, batched gradients) is refused, compiled or not."""

import pytest
import torch
from torch import func
from torch.autograd import forward_ad

import tilewise as tw

NEEDS = r"is active; impl='blocked' has none, expected impl='reference'"
FUNC, FORWARD = f"a transform of torch.func {NEEDS}", f"forward-mode differentiation {NEEDS}"


def loss(f):
    return lambda q: f(q).square().sum()


def dual(f, q):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(q, torch.ones_like(q)))).tangent


TRANSFORMS = {
    "grad": (lambda f, q: func.grad(loss(f))(q), FUNC),
    "vjp": (lambda f, q: func.vjp(f, q)[1](torch.ones_like(q))[0], FUNC),
    "jvp": (lambda f, q: func.jvp(f, (q,), (torch.ones_like(q),))[1], FUNC),
    "jacrev": (lambda f, q: func.jacrev(lambda q: f(q).sum(-1))(q), FUNC),
    "jacfwd": (lambda f, q: func.jacfwd(lambda q: f(q).sum(-1))(q), FUNC),
    "vmap": (lambda f, q: func.vmap(f)(torch.stack((q, 2 * q))), FUNC),
    "grad of grad": (lambda f, q: func.grad(loss(func.grad(loss(f))))(q), FUNC),
    "jvp of grad": (lambda f, q: func.jvp(func.grad(loss(f)), (q,), (torch.ones_like(q),))[1], FUNC),
    "dual": (dual, FORWARD),
}


def over_one(q, impl):
    return tw.attention(q, q, q, impl=impl)


def over_three(q, impl):
    return tw.attention(q, 2 * q.detach(), q.detach() + 1, terms=tw.T5(torch.ones(32, 2)), impl=impl)


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("attend", [over_one, over_three])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused_with_the_implementation_that_has_them(name, attend, backend):
    torch._dynamo.reset()
    transform, message = TRANSFORMS[name]
    q = torch.randn(1, 2, 9, 8)

    if backend is None:
        assert transform(lambda q: attend(q, "reference"), q).isfinite().all()
    run = lambda q: transform(lambda q: attend(q, "auto"), q)  # noqa: E731
    with pytest.raises(RuntimeError, match=message):
        (torch.compile(run, backend=backend) if backend else run)(q)


def test_a_whole_graph_is_refused_too():
    torch._dynamo.reset()
    jvp = lambda q: func.jvp(lambda q: over_three(q, "auto"), (q,), (q,))[1]  # noqa: E731
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"a transform of torch\.func is active"):
        torch.compile(jvp, backend="eager", fullgraph=True)(torch.randn(1, 2, 9, 8))


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_a_compiled_call_refuses_a_tangent_from_outside_and_nothing_else(backend):
    torch._dynamo.reset()
    q = torch.randn(1, 2, 9, 8)
    run = lambda q: tw.attention(q, q, q)  # noqa: E731
    run = torch.compile(run, backend=backend) if backend else run
    expected = run(q)
    with pytest.raises(RuntimeError, match=FORWARD):
        dual(run, q)
    with forward_ad.dual_level():
        assert torch.equal(run(q), expected)


def test_a_tangent_of_a_table_is_refused():
    q = torch.randn(1, 2, 9, 8)
    with pytest.raises(RuntimeError, match=FORWARD):
        dual(lambda table: tw.attention(q, q, q, terms=tw.T5(table)), torch.randn(32, 2))


@pytest.mark.parametrize("wanted", ["gradients", "jacobian", "operator"])
def test_batches_are_refused_with_a_way_out(wanted):
    q = torch.randn(1, 2, 9, 8, requires_grad=True)
    exported = torch.export.export(_Attention(), (q.detach(),), strict=False).module()
    run = {
        "gradients": lambda: torch.autograd.grad(
            tw.attention(q, q, q), q, torch.randn(3, *q.shape), is_grads_batched=True
        ),
        "jacobian": lambda: torch.autograd.functional.jacobian(_Attention(), q.detach(), vectorize=True),
        "operator": lambda: func.vmap(exported)(q.detach()[None]),
    }[wanted]
    with pytest.raises(RuntimeError, match=r"no rule for batches of gradients.*one by one, or with impl='reference'"):
        run()


class _Attention(torch.nn.Module):
    def forward(self, q):
        return tw.attention(q, q, q)


def test_the_reference_maps_over_tables_gates_and_lengths():
    q = torch.randn(2, 2, 9, 8)
    tables, gates, lengths = torch.randn(3, 32, 2), torch.randn(3, 2, 2, 9), torch.tensor([[3, 9], [4, 2], [9, 9]])

    def run(table, gate, length, impl="reference"):
        terms = (tw.T5(table), tw.Scalar(table.T, tw.clipped(-16, 15), gate=gate))
        return tw.attention(q, q, q, terms=terms, mask=tw.Mask.lengths(length), impl=impl)

    each = torch.stack([run(*x) for x in zip(tables, gates, lengths, strict=True)])
    torch.testing.assert_close(func.vmap(run)(tables, gates, lengths), each)
    with pytest.raises(RuntimeError, match=FUNC):
        func.vmap(lambda *x: run(*x, impl="auto"))(tables, gates, lengths)
