"""Streams at their edges: reads that are changed in place, no tokens, one token, pickling, dynamic shapes, misuse."""

import io
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tilewise.depth import (
    InferenceState,
    Schedule,
    fused_attn_res,
    mix_norm_shared,
    phase1,
    phase2_first,
    plan_memory,
    scores,
)
from tilewise.depth.parallel import SequenceSharded
from tilewise.depth.shared import SharedSource
from tilewise.nn import AttnRes, Decoder, DecoderConfig, StandardResidual
from tilewise.nn.decoder import KVCache

D, L = 8, 6
SCHEDULES = {
    "block": Schedule.block(L, 2),
    "block, two phases": Schedule.block(L, 2, one_pass_sources=0),
    "one block": Schedule.block(L, L),
    "full": Schedule.full_attention(L),
    "full, two phases": Schedule.full_attention(L, 3, one_pass_sources=0),
}


def module(schedule, dtype=torch.float64, **options):
    made = AttnRes(D, schedule, dtype=dtype, **options)
    with torch.no_grad():
        made.query.normal_()
        made.key_weight.normal_(1, 0.3)
    return made


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(stream, weight, norm=None, change=False):
    for l in range(L):
        y = stream.read(l, norm)
        update = torch.tanh(y @ weight)
        if change:
            y.mul_(0).add_(1e3)
        stream.write(l, update)
    out = stream.output(norm)
    kept = out.clone()
    if change:
        out.mul_(0)
    return kept


def makers(schedule, **options):
    residual = module(schedule, **options)
    state = InferenceState(schedule, residual.reads(), max_tokens=6)
    return {"AttnRes": residual, "InferenceState": state, "standard": StandardResidual(L)}


@pytest.mark.parametrize("impl", ["eager", "reference"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_read_returns_may_be_changed_in_place_without_gradients(name, normed, impl):
    x, weight = torch.randn(2, 3, D, dtype=torch.float64), torch.randn(D, D, dtype=torch.float64)
    norm = torch.randn(D, dtype=torch.float64) if normed else None
    for kind, make in makers(SCHEDULES[name], impl=impl).items():
        with torch.no_grad():
            expected, kept = run(make(x), weight, norm), x.clone()
            got = run(make(x), weight, norm, change=True)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, msg=kind)
        torch.testing.assert_close(x, kept, rtol=0, atol=0, msg=kind)


@pytest.mark.parametrize("shape", [(3, D), (2, 3, D)])
@pytest.mark.parametrize("mode", ["none", "read", "start"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_read_returns_may_be_changed_in_place_with_gradients(name, mode, shape):
    residual, norms = module(SCHEDULES[name]), torch.randn(L, D, dtype=torch.float64).unbind(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(D, D, dtype=torch.float64, requires_grad=True)
    for make in (residual, StandardResidual(L)):
        results = []
        for change in (False, True):
            stream = make(x, norms=norms if mode == "start" else None)
            for l in range(L):
                y = stream.read(l, norms[l]) if mode == "read" else stream.read(l)
                y = y.mul_(2).relu_() if change else (y * 2).relu()
                stream.write(l, torch.tanh(y @ weight))
            out = stream.output()
            out = out.add_(1) if change else out + 1
            leaves = [x, weight, *(make.parameters())]
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_sharded_read_may_be_changed_in_place(group):
    residual = module(SCHEDULES["block"])
    x = torch.randn(2, 3, D, dtype=torch.float64, requires_grad=True)
    outputs = []
    for change in (False, True):
        stream = SequenceSharded(residual)(x)
        for l in range(L):
            y = stream.read(l)
            stream.write(l, torch.sin(y.mul_(2) if change else y * 2))
        outputs.append(stream.output())
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("shape", [(0, D), (2, 0, D)])
@pytest.mark.parametrize("mode", ["none", "read", "start"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_tokens(name, mode, shape, group):
    """An empty rank of a data-parallel step: outputs of no tokens, and zeros as every parameter's gradient."""
    residual, norms = module(SCHEDULES[name]), nn.Parameter(torch.ones(L, D, dtype=torch.float64))
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(D, D, dtype=torch.float64, requires_grad=True)
    leaves = [x, weight, *residual.parameters(), *([norms] if mode != "none" else [])]
    for make in (residual, SequenceSharded(residual)):
        rows = norms.unbind(0)
        stream = make(x, norms=rows if mode == "start" else None)
        for l in range(L):
            y = stream.read(l, rows[l]) if mode == "read" else stream.read(l)
            stream.write(l, torch.tanh(y @ weight))
        out = stream.output()
        assert out.shape == shape
        for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
            torch.testing.assert_close(grad, torch.zeros_like(leaf), rtol=0, atol=0)
    state = InferenceState(residual.schedule, residual.reads(), max_tokens=4)
    for make in (state, SequenceSharded(state)):
        with torch.no_grad():
            assert run(make(x), weight).shape == shape


@pytest.mark.parametrize("mode", ["none", "read", "start"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_one_token_without_other_axes(name, mode, group):
    residual, norms = module(SCHEDULES[name]), torch.randn(L, D, dtype=torch.float64).unbind(0)
    x = torch.randn(D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(D, D, dtype=torch.float64, requires_grad=True)
    results = []
    for make, start in ((residual, x), (residual, x[None]), (SequenceSharded(residual), x)):
        stream = make(start, norms=norms if mode == "start" else None)
        for l in range(L):
            y = stream.read(l, norms[l]) if mode == "read" else stream.read(l)
            stream.write(l, torch.tanh(y @ weight))
        out = stream.output()
        assert out.shape == start.shape
        grads = torch.autograd.grad(out.square().sum(), [x, weight, *residual.parameters()])
        results.append((out.reshape(D), *grads))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_operators_of_one_token():
    sources = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    queries = torch.randn(2, D, dtype=torch.float64, requires_grad=True)
    for function in (lambda v, q: phase1(list(v), q)[0], lambda v, q: phase1(list(v), q)[1], scores_of):
        one = torch.autograd.grad(function(sources, queries).square().sum(), [sources, queries])
        row = torch.autograd.grad(function(sources[:, None], queries).square().sum(), [sources, queries])
        for a, b in zip(one, row, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def scores_of(v, q):
    return scores(list(v), q)


def test_an_operator_without_a_norm_returns_no_alias():
    o1 = torch.randn(3, D)
    for impl in ("eager", "reference"):
        y = phase2_first(o1, impl=impl)
        assert y.data_ptr() != o1.data_ptr()
        torch.testing.assert_close(y, o1, rtol=0, atol=0)


def test_the_serving_contract_needs_a_query():
    x, bank = torch.randn(3, D), torch.randn(3, 2, D)
    with pytest.raises(TypeError, match="qk_weight: found None"):
        fused_attn_res(x, None, bank, None, None, None, 1, -1, 1e-6, 1e-6)


def decoder(kind="block", **changes):
    sizes = dict(vocab=32, d=16, layers=2, heads=2, kv_heads=1, hidden=8, residual=kind, block=3)
    return Decoder(DecoderConfig(**(sizes | changes)))


@pytest.mark.parametrize("kind", ["standard", "block", "full"])
def test_a_decoder_refuses_recomputation_with_a_cache_and_another_batch(kind):
    model, tokens = decoder(kind), torch.randint(32, (2, 4))
    cache = KVCache(model.config, 2, 8)
    with pytest.raises(ValueError, match="recompute: found True with a cache"):
        model(tokens, cache, recompute=True)
    for other in (tokens[:1], tokens.repeat(2, 1)):
        with pytest.raises(ValueError, match=rf"found {len(other)} sequences, expected 2, the cache's batch"):
            model(other, cache)
    assert cache.length == 0


@pytest.mark.parametrize("kind", ["standard", "block", "full"])
def test_a_decoder_is_pickled_whole(kind):
    model, tokens = decoder(kind), torch.randint(32, (2, 5))
    with torch.no_grad():
        expected = model(tokens)
        torch.testing.assert_close(pickle.loads(pickle.dumps(model))(tokens), expected, rtol=0, atol=0)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        torch.testing.assert_close(torch.load(file, weights_only=False)(tokens), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["block", "full"])
def test_compiles_with_dynamic_shapes_and_gradients(kind):
    model = decoder(kind, layers=1, block=1).double()
    with torch.no_grad():
        model.residual.query.normal_()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (5, 9):
        tokens = torch.randint(32, (2, length))
        results = []
        for run_ in (model, compiled):
            out = run_(tokens)
            results.append((out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    torch._dynamo.reset()


def test_epsilons_are_kept_exactly_and_may_be_set():
    residual = AttnRes(D, Schedule.block(4, 2), eps=1 / 3e5)
    assert (residual.eps, residual.output_eps) == (1 / 3e5, 1 / 3e5)
    residual.output_eps = math.pi
    assert residual.reads().output_eps == math.pi
    with pytest.raises(ValueError, match="eps: found -1"):
        residual.eps = -1.0


@pytest.mark.parametrize("name", SCHEDULES)
def test_output_may_be_read_again(name):
    x, norms = torch.randn(3, D, dtype=torch.float64), torch.ones(L, D, dtype=torch.float64).unbind(0)
    residual = module(SCHEDULES[name])
    state = InferenceState(residual.schedule, residual.reads(), max_tokens=3)
    for make in (residual, state, StandardResidual(L)):
        for early in (None, norms):
            stream = make(x, norms=early)
            for l in range(L):
                stream.write(l, torch.sin(stream.read(l)))
            torch.testing.assert_close(stream.output(), stream.output(), rtol=0, atol=0)
            for call in (lambda s=stream: s.read(L), lambda s=stream: s.write(L, x)):
                with pytest.raises(ValueError, match=r"expected output\(\): all"):
                    call()


BAD_NORMS = [
    (lambda: [nn.RMSNorm(D) for _ in range(L)], TypeError, r"norms\[0\]: found RMSNorm, .* pass its .weight"),
    (lambda: [torch.ones(D), None, *[torch.ones(D)] * (L - 2)], TypeError, r"norms\[1\]: found NoneType"),
    (lambda: [torch.ones(D + 1)] * L, ValueError, rf"norms\[0\]: found shape \({D + 1},\), expected \[{D}\]"),
    (lambda: (torch.ones(D) for _ in range(L)), TypeError, r"norms: found generator, .* pass list\(norms\)"),
    (lambda: [torch.ones(D)] * (L - 1), ValueError, f"norms: found {L - 1} weights, expected {L}"),
]


@pytest.mark.parametrize(("norms", "error", "message"), BAD_NORMS)
def test_bad_norms_are_refused_at_the_start(norms, error, message, group):
    x = torch.randn(3, D, dtype=torch.float64)
    for schedule in (SCHEDULES["block"], SCHEDULES["full"]):
        made = makers(schedule)
        for make in (*made.values(), SequenceSharded(made["AttnRes"]), SequenceSharded(made["InferenceState"])):
            with pytest.raises(error, match=message):
                make(x, norms=norms())


def test_weights_and_updates_of_another_kind_are_refused():
    x = torch.randn(3, D, dtype=torch.float64)
    norms = torch.ones(L, D, dtype=torch.float64).unbind(0)
    for make in makers(SCHEDULES["block"]).values():
        with pytest.raises(TypeError, match=r"norm_weight: found RMSNorm, .* pass its .weight"):
            make(x).read(0, nn.RMSNorm(D))
        for early in (None, norms):
            for update in (torch.ones(3, D, dtype=torch.int64), torch.ones(3, D, dtype=torch.complex64), 1.0):
                stream = make(x, norms=early)
                stream.read(0)
                with pytest.raises(TypeError, match="update: found"):
                    stream.write(0, update)
            stream = make(x, norms=early)
            for l in range(L):
                stream.write(l, torch.sin(stream.read(l)))
            with pytest.raises(TypeError, match="weight: found RMSNorm"):
                stream.output(nn.RMSNorm(D))
    with pytest.raises(ValueError, match=rf"output_weight: found \({D + 1},\)"):
        mix_norm_shared([SharedSource(x)], torch.zeros(D), None, torch.ones(D + 1))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Schedule.at(4, (0, 1.5)), TypeError, r"starts\[1\]: found 1.5, expected an integer"),
        (lambda: Schedule.block(4, 2, one_pass_sources=-5), ValueError, "one_pass_sources: found -5"),
        (lambda: Schedule.block(4, 2, max_queries=1.0), TypeError, "max_queries: found 1.0"),
        (lambda: AttnRes(D, Schedule.block(4, 2), eps=-1), ValueError, "eps: found -1"),
        (lambda: AttnRes(D, Schedule.block(4, 2), eps=math.nan), ValueError, "eps: found nan"),
        (lambda: AttnRes(D, Schedule.block(4, 2), output_eps=math.inf), ValueError, "output_eps: found inf"),
        (lambda: StandardResidual(4, -1.0), ValueError, "output_eps: found -1.0"),
        (lambda: plan_memory(4.5, 8, blocks=2), TypeError, "tokens: found 4.5, expected an integer"),
        (lambda: AttnRes(0, Schedule.block(4, 2)), ValueError, "d: found 0"),
        (lambda: AttnRes(D, Schedule.block(4, 2), impl="foo"), ValueError, "impl: found 'foo'"),
    ],
)
def test_bad_settings_are_refused_when_a_module_is_made(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_an_inference_state_refuses_what_it_cannot_serve():
    block, other = SCHEDULES["block"], Schedule.block(L, 3)
    reads = module(block).reads()
    for schedule in (SCHEDULES["full"], other):
        with pytest.raises(ValueError, match="reads: found those of"):
            InferenceState(schedule, reads, max_tokens=4)
    InferenceState(SCHEDULES["block, two phases"], reads, max_tokens=4)
    with pytest.raises(TypeError, match=r"dtype: found torch.int8"):
        InferenceState(block, reads, max_tokens=4, dtype=torch.int8)
    stream = InferenceState(block, reads, max_tokens=4)(torch.zeros(4, D, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="records no gradients"):
        stream.checkpoint(lambda inner: None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_memory_plan_is_exact_in_every_dtype(name, dtype):
    state = InferenceState(SCHEDULES[name], module(SCHEDULES[name], dtype).reads(), max_tokens=5)
    plan = plan_memory(5, D, SCHEDULES[name], dtype=dtype)
    assert plan.bank + plan.phase1 == state.nbytes


def test_the_adds_that_complete_blocks_are_counted():
    # Read: 1, 1 + 1; b_0, u_0, u_1 for b_1 and its first read; b_0, b_1, u_2; b_0, b_1, u_2, u_3 at the end.
    # Written: the five results and both blocks.
    assert Schedule.block(4, 2).vectors_moved() == (1 + 2 + 3 + 3 + 4, 5 + 2)
    # Blocks of one sublayer need no add, and Full has none.
    assert Schedule.block(2, 1).vectors_moved() == (1 + 2 + 3, 3)
    assert Schedule.full_attention(2, 2, one_pass_sources=9).vectors_moved() == (1 + 2 + 3, 3)


@pytest.mark.parametrize("name", ["block", "block, two phases", "full"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_second_derivative_by_any_leaf_is_refused(name, recompute):
    residual, x = module(SCHEDULES[name]), torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    stream = residual(x)

    def part(inner, last):
        while inner.position < last:
            l = inner.position
            inner.write(l, torch.tanh(inner.read(l)))

    for last in (3, L):
        stream.checkpoint(part, last) if recompute else part(stream, last)
    (grad,) = torch.autograd.grad(stream.output().square().sum(), x, create_graph=True)
    for leaf in (x, residual.query, residual.key_weight):
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(grad.sum(), leaf, retain_graph=True)


def test_a_state_made_in_inference_mode_serves_steps_outside_it():
    residual, x = module(SCHEDULES["block"]), torch.randn(3, D, dtype=torch.float64)
    weight = torch.randn(D, D, dtype=torch.float64)
    with torch.inference_mode():
        state = InferenceState(residual.schedule, residual.reads(), max_tokens=3)
        inside = run(state(x), weight)
    torch.testing.assert_close(run(state(x), weight), inside, rtol=0, atol=0)
    assert not state.folded.requires_grad
