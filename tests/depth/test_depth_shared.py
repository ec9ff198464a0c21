"""Shared-gradient reads: the same function and the same gradients as the oracle, for a whole stack."""

import gc
import weakref

import pytest
import torch

from tilewise import depth
from tilewise.depth import BlockReads, SharedSource, mix_norm_shared
from tilewise.depth import reference as R
from tilewise.depth.schedule import Schedule
from tilewise.nn import AttnRes

D, T, S, BLOCKS = 16, 5, 3, 3


def leaves():
    x = torch.randn(T, D, dtype=torch.float64)
    w = torch.randn(BLOCKS * S + 1, D, dtype=torch.float64)
    g, o = (1 + 0.2 * torch.randn(BLOCKS * S + 1, D, dtype=torch.float64) for _ in range(2))
    return [t.requires_grad_() for t in (x, w, g, o)]


def layer(y, l):
    return torch.tanh(y) * (1 + 0.1 * l)


def oracle(x, w, g, o):
    sources, prefix, l = [x], None, 0
    for _ in range(BLOCKS):
        for i in range(S):
            values = sources if i == 0 else [*sources, prefix]
            u = layer(R.mix_norm(values, w[l], g[l], o[l]), l)
            prefix, l = u if i == 0 else prefix + u, l + 1
        sources = [*sources, prefix]
    return R.mix_norm(sources, w[l], g[l], o[l])


def shared(x, w, g, o, save_o1, impl="eager"):
    sources, l = [SharedSource(x)], 0
    for _ in range(BLOCKS):
        rows = slice(l, l + S)
        reads = BlockReads(sources, w[rows], g[rows], o[rows], save_o1=save_o1, impl=impl)
        u, prefix = layer(reads.first(), l), None
        for i in range(1, S):
            prefix, y = reads.merge(i, u, prefix)
            u = layer(y, l + i)
        sources, l = [*sources, SharedSource(prefix + u)], l + S
    return mix_norm_shared(sources, w[l], g[l], o[l], impl=impl)


@pytest.mark.parametrize("save_o1", [False, True])
def test_a_stack_equals_the_oracle(save_o1):
    args = leaves()
    a, b = oracle(*args), shared(*args, save_o1)
    torch.testing.assert_close(a, b)
    seed = torch.randn_like(a)
    want = torch.autograd.grad(a, args, seed)
    for _ in range(2):
        have = torch.autograd.grad(b, args, seed, retain_graph=True)
        for x, y in zip(have, want, strict=True):
            torch.testing.assert_close(x, y)


def test_unused_reads_and_sources_have_no_gradient():
    x, w, _, o = leaves()
    a, b = SharedSource(x), SharedSource(2 * x)
    reads = BlockReads([a, b], w[:S], None, o[:S])
    _, y = reads.merge(1, x, None)
    dw, dx = torch.autograd.grad(y.sum(), [w, x])
    assert dw[1].abs().min() > 0
    assert dw[[0, *range(2, len(w))]].abs().max() == 0
    o1, lse = R.phase1([x, 2 * x], w[:S])
    expected = torch.autograd.grad(R.phase2(x, None, o1[1], lse[1], w[1], None, o[1])[1].sum(), x)[0]
    torch.testing.assert_close(dx, expected)


def test_a_pass_for_other_gradients_leaves_nothing_behind():
    """Readers add to what a source's own backward takes away, which a pass that ends before it does not run."""
    x, w, _, o = leaves()
    u = (2 * x.detach()).requires_grad_()
    reads = BlockReads([SharedSource(x), SharedSource(x * x)], w[:S], None, o[:S])
    _, y = reads.merge(1, u, None)
    read = mix_norm_shared([SharedSource(x), SharedSource(y)], w[S])
    wanted = torch.autograd.grad(read.sum(), [x, w, u], retain_graph=True)
    for inputs in ([u], [w]):
        torch.autograd.grad(read.sum(), inputs, retain_graph=True)
        found = torch.autograd.grad(read.sum(), [x, w, u], retain_graph=True)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kept", [1, 2])
def test_a_backward_before_the_last_read_changes_neither_reads_nor_gradients(kept):
    x, w, _, o = leaves()
    blocks = [BlockReads([SharedSource(x), SharedSource(x * x)], w[:S], None, o[:S]) for _ in range(2)]
    ys = [b.merge(1, x, None)[1] for b in blocks]
    first, second = (torch.autograd.grad(ys[0].square().sum(), [x, w], retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(*(b.merge(kept, x, x) for b in blocks), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("n", range(4))
@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.square().sum()])
def test_gradients_refuse_to_be_differentiated_again(n, loss):
    args = leaves()
    (grad,) = torch.autograd.grad(loss(shared(*args, False)), args[n], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        grad.sum().backward()


def test_nothing_keeps_a_step_alive():
    gc.disable()
    try:
        args = leaves()
        y = shared(*args, False)
        source = SharedSource(args[0] * 2)
        reads = BlockReads([source], args[1][:1])
        seen = [weakref.ref(t) for t in (source.value, reads._ticket, source.sum, reads._block)]
        y.sum().backward()
        del y, source, reads
        assert [ref() for ref in seen] == [None] * 4
    finally:
        gc.enable()


def test_bad_calls_say_so():
    x, w, _, _ = leaves()
    with pytest.raises(TypeError, match="wrap it: SharedSource"):
        BlockReads([x], w)
    with pytest.raises(TypeError, match=r"sources\[1\]: found Tensor"):
        mix_norm_shared([SharedSource(x), x], w[0])
    reads = BlockReads([SharedSource(x)], w[:S])
    with pytest.raises(IndexError, match="i: found 0, expected 1 to 2"):
        reads.merge(0, x, None)
    assert depth.BlockReads is BlockReads


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("size", [*range(1, 10), 16])
def test_every_block_size_has_the_gradients_of_separate_reads(size, blocks):
    """The last block recomputes o1 in smaller parts than the others; a part that another overlaps loses a gradient."""
    residual = AttnRes(D, Schedule.block(size * blocks, size)).double()
    torch.nn.init.normal_(residual.query)
    norms = torch.randn(size * blocks, D, dtype=torch.float64).unbind(0)
    x = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    results = []
    for given in (norms, None):
        stream = residual(x, norms=given)
        assert type(stream).__name__ == ("Stream" if given is None else "SharedStream")
        for l in range(size * blocks):
            stream.write(l, layer(stream.read(l, norms[l]), l))
        out = stream.output()
        leaves = [x, residual.query, residual.key_weight]
        results.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_a_gradient_keeps_no_other_accumulators():
    x, w, g, o = (t.detach().float().requires_grad_() for t in leaves())
    shared(x, w, g, o, False).sum().backward()
    assert x.grad.untyped_storage().nbytes() == x.grad.nbytes


@pytest.mark.parametrize(
    ("i", "update", "prefix", "error", "message"),
    [
        (1, torch.ones(1, D), None, ValueError, r"update: found shape \(1, 16\), expected \(5, 16\)"),
        (
            1,
            torch.ones(T, D, dtype=torch.float16),
            None,
            TypeError,
            "update: found dtype torch.float16, expected torch.float32",
        ),
        (1, None, None, TypeError, "update: found NoneType"),
        (2, torch.ones(T, D), None, ValueError, "prefix: found None for sublayer 2"),
        (2, torch.ones(T, D), torch.ones(T, 1), ValueError, r"prefix: found shape \(5, 1\), expected \(5, 16\)"),
        (3, torch.ones(T, D), torch.ones(T, D), IndexError, "i: found 3, expected 1 to 2"),
    ],
)
def test_a_merge_checks_what_it_is_given(i, update, prefix, error, message):
    reads = BlockReads([SharedSource(torch.randn(T, D))], torch.zeros(S, D))
    reads.first()
    with pytest.raises(error, match=message):
        reads.merge(i, update, prefix)


def steps(stream):
    for l in range(4):
        stream.write(l, torch.tanh(stream.read(l)))


@pytest.mark.parametrize("wanted", ["embedding", "query", "norm"])
def test_second_derivatives_are_refused_with_norms_given_at_the_start(wanted):
    residual, norms = AttnRes(D, Schedule.block(4, 2)), [torch.ones(D, requires_grad=True) for _ in range(4)]
    x = torch.randn(T, D, requires_grad=True)
    stream = residual(x, norms=norms)
    steps(stream)
    (first,) = torch.autograd.grad(stream.output().square().sum(), x, create_graph=True)
    leaf = {"embedding": x, "query": residual.query, "norm": norms[2]}[wanted]
    penalty = first.square().sum() + 0.5 * leaf.square().sum()
    with pytest.raises(RuntimeError, match="these gradients cannot be differentiated again"):
        torch.autograd.grad(penalty, leaf)


def test_a_change_of_the_embedding_in_place_is_noticed_without_the_output_read():
    x = torch.randn(T, D, requires_grad=True)
    embedding = x * 1.0
    stream = AttnRes(D, Schedule.block(4, 2))(embedding, norms=list(torch.ones(4, D)))
    for l in range(3):
        stream.write(l, torch.tanh(stream.read(l)))
    y = stream.read(3)
    with torch.no_grad():
        embedding.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
