"""Gradients that are shared beside autograd: passes within passes, passes that fail, reads made twice, second ones."""

import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tilewise.depth import BlockReads, Schedule, SharedSource, mix_norm_shared
from tilewise.nn import AttnRes

D, T, L = 8, 5, 6
LEAVES = ("x", "weight", "query", "key_weight", "norm 0", "norm 3", "last")


def stack(given, save_o1=False, each=lambda l, y: None, layer=None):
    """(output, leaves) of a stream whose norms are given at the start, or to each read (the gradients of separate
    operators)."""
    torch.manual_seed(1)
    residual = AttnRes(D, Schedule.block(L, 2), save_o1=save_o1, dtype=torch.float64)
    torch.nn.init.normal_(residual.query)
    make = lambda *shape: torch.randn(shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    norms, x, weight, last = [make(D) for _ in range(L)], make(T, D), make(D, D), make(D)
    stream = residual(x, norms=norms if given else None)
    for l in range(L):
        y = stream.read(l, norms[l])
        each(l, y)
        stream.write(l, torch.tanh(y @ weight) if layer is None else layer(l, y, weight))
    leaves = (x, weight, residual.query, residual.key_weight, norms[0], norms[3], last)
    return stream.output(last), dict(zip(LEAVES, leaves, strict=True))


def same(found, wanted):
    for name, a, b in zip(LEAVES, found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("save_o1", [False, True])
@pytest.mark.parametrize("at", range(L))
def test_a_pass_within_a_pass_over_the_same_stream(at, save_o1):
    """A hook asks for gradients of the last read while the gradient of read `at` is on its way."""
    results = []
    for given in (True, False):
        reads, inner = [], []
        out, leaves = stack(given, save_o1, lambda l, y, reads=reads: reads.append(y))

        def hook(_, reads=reads, inner=inner, leaves=leaves):
            if not inner:
                inner.append(None)
                with torch.enable_grad():
                    loss = reads[-1].square().sum()
                wanted = list(leaves.values())[:3]
                inner[0] = torch.autograd.grad(loss, wanted, retain_graph=True)

        reads[at].register_hook(hook)
        outer = torch.autograd.grad(out.square().sum(), list(leaves.values()), retain_graph=True)
        results.append((outer, inner[0]))
    (found, inner), (wanted, inner_wanted) = results
    same(found, wanted)
    for a, b in zip(inner, inner_wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("save_o1", [False, True])
def test_a_stream_within_a_sublayer_that_runs_again_in_the_backward(save_o1):
    def layer(l, y, weight):
        return checkpoint(inside, y, weight, use_reentrant=True) if l == 2 else torch.tanh(y @ weight)

    def inside(y, weight):
        norms = torch.ones(2, D, dtype=torch.float64).unbind(0)
        stream = AttnRes(D, Schedule.block(2, 1), dtype=torch.float64)(y, norms=norms)
        for l in range(2):
            stream.write(l, torch.sin(stream.read(l) @ weight))
        return stream.output()

    results = []
    for given in (True, False):
        out, leaves = stack(given, save_o1, layer=layer)
        out.square().sum().backward()
        results.append([x.grad for x in leaves.values()])
    same(*results)


def test_a_pass_that_fails_leaves_nothing_behind():
    x = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    source = SharedSource(x)
    reads = BlockReads([source], torch.zeros(2, D, dtype=torch.float64))
    y, failing = reads.first(), [True]

    def hook(grad):
        if failing:
            raise RuntimeError("out of luck")

    z = x * 1.0
    z.register_hook(hook)
    loss = (reads.merge(1, torch.tanh(y) + z, None)[1] * mix_norm_shared([source], torch.zeros(D))).sum()
    wanted = None
    for attempt in range(3):
        failing[:] = [True] if attempt == 1 else []
        if failing:
            with pytest.raises(RuntimeError, match="out of luck"):
                torch.autograd.grad(loss, x, retain_graph=True)
        else:
            (found,) = torch.autograd.grad(loss, x, retain_graph=True)
            wanted = found if wanted is None else wanted
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        gc.collect()
        assert len(source.sum.passes) == len(reads._block.passes) == 0


@pytest.mark.parametrize("save_o1", [False, True])
@pytest.mark.parametrize("sources", [1, 2])
def test_a_read_made_twice_has_the_gradients_of_both(sources, save_o1):
    x, u, w, norm = (torch.randn(*s, D, dtype=torch.float64, requires_grad=True) for s in ((T,), (T,), (3,), (3,)))

    def outputs(*blocks):
        a, b = blocks[0], blocks[-1]
        return a.first() * b.first().sin(), a.merge(1, u, None)[1] * b.merge(1, u.cos(), None)[1]

    def block():
        values = [SharedSource(v) for v in (x, x.sin())[:sources]]
        return BlockReads(values, w, None, norm, save_o1=save_o1)

    results = []
    for blocks in ((block(),), (block(), block())):
        loss = sum(y.sum() for y in outputs(*blocks))
        results.append(torch.autograd.grad(loss, [x, u, w, norm]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_a_source_given_twice_is_refused():
    a, b = (SharedSource(torch.randn(T, D)) for _ in range(2))
    for call in (lambda s: BlockReads(s, torch.zeros(1, D)), lambda s: mix_norm_shared(s, torch.zeros(D))):
        with pytest.raises(ValueError, match=r"sources\[2\]: found a source that stands before it already"):
            call([a, b, a])


@pytest.mark.parametrize("first", LEAVES)
@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.square().sum()])
def test_second_derivatives_are_refused_whichever_the_two_leaves(first, loss):
    """A term that reaches the second leaf besides would hide that a gradient "appears to not have been used"."""
    out, leaves = stack(True)
    (grad,) = torch.autograd.grad(loss(out), leaves[first], create_graph=True)
    for leaf in leaves.values():
        with pytest.raises(RuntimeError, match="these gradients cannot be differentiated again"):
            torch.autograd.grad(grad.cos().sum() + leaf.square().sum(), leaf, retain_graph=True)


def test_second_derivatives_of_the_reference_are_exact_with_norms_given_at_the_start_too():
    residual = AttnRes(D, Schedule.block(4, 2), impl="reference", dtype=torch.float64)
    torch.nn.init.normal_(residual.query)
    x, *norms = (torch.randn(*s, D, dtype=torch.float64, requires_grad=True) for s in ((T,), (), (), (), ()))

    def output(x, query, norm):
        stream = residual(x, norms=[norm, *norms[1:]], reads=residual.reads()._replace(query=query))
        for l in range(4):
            stream.write(l, torch.sin(stream.read(l)))
        return stream.output()

    assert torch.autograd.gradgradcheck(output, (x, residual.query, norms[0]))
