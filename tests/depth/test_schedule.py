"""Schedules: boundaries, the hybrid rule, traffic, and two-phase against the definitions on deep stacks."""

import depth_naive as naive
import pytest
import torch

from tilewise.depth.schedule import Schedule, layers_from_sublayers, sublayers_from_layers
from tilewise.depth.stream import Reads, begin
from tilewise.nn import AttnRes
from tilewise.nn.stream import Stream
from tilewise.testing import assert_within_budget

PLANS = {
    "S1": Schedule.block(12, 1),
    "S5_partial": Schedule.block(12, 5),
    "inside_pairs": Schedule.at(12, (0, 3, 4, 9)),
    "one_block": Schedule.block(12, 12),
    "two_phase_only": Schedule.block(12, 4, one_pass_sources=0),
    "phase1_in_parts": Schedule.block(12, 5, one_pass_sources=1, max_queries=2),
    "one_pass_only": Schedule.block(12, 2, one_pass_sources=99),
    "full": Schedule.full_attention(12),
    "full_group_1": Schedule.full_attention(12, 1, one_pass_sources=0),
    "full_two_phase": Schedule.full_attention(12, 5, one_pass_sources=0),
    "full_one_group": Schedule.full_attention(12, 12, one_pass_sources=0),
    "full_one_pass": Schedule.full_attention(12, 4, one_pass_sources=99),
}


def reference(schedule, x, functions, query, key):
    if schedule.full:
        return naive.full(x, functions, query, key)
    return naive.block(x, functions, query, key, schedule.starts)


def residual(schedule, d, dtype, scale=0.5):
    module = AttnRes(d, schedule, dtype=dtype)
    with torch.no_grad():
        module.query.normal_(std=scale)
        module.key_weight.normal_(1, 0.2)
    return module


def streamed(module, x, functions, norm=None):
    stream, inputs = module(x), []
    for l, f in enumerate(functions):
        h = stream.read(l, norm)
        inputs.append(h)
        stream.write(l, f(h))
    return inputs, stream.output(norm)


def gradients(inputs, out, module, x):
    weights = torch.Generator().manual_seed(1)
    loss = sum((h * torch.randn(h.shape, generator=weights, dtype=h.dtype)).sum() for h in [*inputs, out])
    return torch.autograd.grad(loss, [x, module.query, module.key_weight])


@pytest.mark.parametrize("name", PLANS)
def test_equals_the_definition(name):
    schedule = PLANS[name]
    module = residual(schedule, 16, torch.float64)
    x = torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    matrices = torch.randn(12, 16, 16, dtype=torch.float64) / 4
    functions = [lambda h, m=m: torch.tanh(naive.rms(h) @ m) for m in matrices]
    got = streamed(module, x, functions)
    expected = reference(schedule, x, functions, module.query, module.key_weight)
    for a, b in zip([*got[0], got[1]], [*expected[0], expected[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    for a, b in zip(gradients(*got, module, x), gradients(*expected, module, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [name for name, schedule in PLANS.items() if not schedule.full])
def test_shared_reads_equal_the_definition(name):
    schedule = PLANS[name]
    module = residual(schedule, 16, torch.float64)
    x = torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    norms = torch.randn(13, 16, dtype=torch.float64, requires_grad=True)
    matrices = torch.randn(12, 16, 16, dtype=torch.float64) / 4

    stream = module(x, norms=norms[:12].unbind(0))
    for l, m in enumerate(matrices):
        stream.write(l, torch.tanh(stream.read(l) @ m))
    got = stream.output(norms[12])

    functions = [lambda h, m=m, w=w: torch.tanh((naive.rms(h) * w) @ m) for m, w in zip(matrices, norms, strict=False)]
    expected = naive.rms(reference(schedule, x, functions, module.query, module.key_weight)[1]) * norms[12]
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
    leaves, seed = [x, norms, module.query, module.key_weight], torch.randn_like(got)
    for a, b in zip(*(torch.autograd.grad(y, leaves, seed) for y in (got, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("schedule", [Schedule.block(128, 16), Schedule.full_attention(128)], ids=["block", "full"])
def test_deep_stack_is_exact(schedule):
    module = residual(schedule, 8, torch.float64)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    matrices = torch.randn(128, 8, 8, dtype=torch.float64) / 3
    functions = [lambda h, m=m: torch.tanh(naive.rms(h) @ m) for m in matrices]
    got = streamed(module, x, functions)
    expected = reference(schedule, x, functions, module.query, module.key_weight)
    for l, (a, b) in enumerate(zip([*got[0], got[1]], [*expected[0], expected[1]], strict=True)):
        assert (a - b).abs().max() <= 1e-10 * b.abs().max(), l
    for a, b in zip(gradients(*got, module, x), gradients(*expected, module, x), strict=True):
        assert (a - b).abs().max() <= 1e-10 * b.abs().max()


@pytest.mark.parametrize("how", ["block", "full", "shared"])
def test_deep_stack_in_bf16(how):
    """Every read of 128 within the budget of a dense bf16 run; updates are given, so errors do not feed back."""
    schedule = Schedule.full_attention(128) if how == "full" else Schedule.block(128, 16)
    exact = residual(schedule, 32, torch.float64)
    low = AttnRes(32, schedule, dtype=torch.bfloat16)
    low.load_state_dict(exact.state_dict())
    exact.load_state_dict(low.state_dict())
    x = torch.randn(3, 32).bfloat16().requires_grad_()
    updates = torch.randn(128, 3, 32).bfloat16().requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (x, updates)]
    norm = torch.ones(32)

    def run(side, module, x, updates):
        functions = [lambda h, u=u: u for u in updates]
        if side == "naive":
            inputs, out = reference(schedule, x, functions, module.query, module.key_weight)
            inputs, out = [naive.rms(h) for h in inputs], naive.rms(out)
        elif how == "shared":
            stream, inputs = module(x, norms=[norm] * 128), []
            for l, u in enumerate(updates):
                inputs.append(stream.read(l))
                stream.write(l, u)
            out = stream.output(norm)
        else:
            inputs, out = streamed(module, x, functions, norm)
        weights = torch.Generator().manual_seed(1)
        loss = sum(
            (h * torch.randn(h.shape, generator=weights, dtype=torch.float64).bfloat16().to(h.dtype)).sum()
            for h in [*inputs, out]
        )
        return [*inputs, out], torch.autograd.grad(loss, [x, updates, module.query, module.key_weight])

    got, dense, oracle = run("stream", low, x, updates), run("naive", low, x, updates), run("naive", exact, *wide)
    for l, values in enumerate(zip(got[0], dense[0], oracle[0], strict=True)):
        assert_within_budget(f"read {l}", *values)
    for name, values in zip(
        ("dx", "dupdates", "dquery", "dkey"), zip(got[1], dense[1], oracle[1], strict=True), strict=True
    ):
        assert_within_budget(name, *values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_has_the_gradients_of_its_equations_where_it_was_trained(dtype):
    """d 256 and 16 sublayers, as in the training comparison: against autograd over the equations in fp64."""
    L, d, T = 16, 256, 32
    leaves = [t.to(dtype) for t in (
        torch.randn(T, d) / 2, torch.randn(L + 1, d) / 8, 1 + 0.2 * torch.randn(L + 1, d), torch.randn(L, 96, d) / 16,
        torch.randn(L, d, 96) / 32, 1 + 0.2 * torch.randn(L + 1, d),
    )]  # fmt: skip
    seed = torch.randn(T, d).to(dtype)

    def run(dtype, ours):
        x, query, key, a, b, norms = xs = [t.to(dtype, copy=True).requires_grad_() for t in leaves]
        norm = lambda h, l: torch.nn.functional.rms_norm(h, (d,), norms[l], 1e-6)  # noqa: E731
        layer = lambda l, y: torch.tanh(y @ a[l].T) @ b[l].T  # noqa: E731
        if ours:
            reads = Reads(query, key, 0, L, impl="eager")
            stream = Stream(Schedule.full_attention(L), reads.apart(), begin(x), norms=norms[:L].unbind(0))
            for l in range(L):
                stream.write(l, layer(l, stream.read(l)))
            out = stream.output(norms[L])
        else:
            functions = [lambda h, l=l: layer(l, norm(h, l)) for l in range(L)]
            out = norm(naive.full(x, functions, query, key)[1], L)
        return [out, *torch.autograd.grad(out, xs, seed.to(dtype))]

    names = ("output", "embedding", "query", "key weight", "up", "down", "norm")
    for name, *found in zip(names, run(dtype, True), run(dtype, False), run(torch.float64, False), strict=True):
        assert_within_budget(name, *found)


def test_norm_is_fused_into_every_kind_of_read():
    weight = torch.randn(16, dtype=torch.float64)
    for schedule in PLANS.values():
        module = residual(schedule, 16, torch.float64)
        x = torch.randn(5, 16, dtype=torch.float64)
        updates = torch.randn(12, 5, 16, dtype=torch.float64)
        functions = [lambda h, u=u: u for u in updates]
        plain, normed = streamed(module, x, functions), streamed(module, x, functions, weight)
        for a, b in zip([*plain[0], plain[1]], [*normed[0], normed[1]], strict=True):
            torch.testing.assert_close(naive.rms(a) * weight, b, rtol=1e-11, atol=1e-11)


def test_zero_queries_read_the_mean_and_the_first_read_is_the_embedding():
    module = AttnRes(16, Schedule.block(4, 2))
    x, updates = torch.randn(3, 16), torch.randn(4, 3, 16)
    inputs, out = streamed(module, x, [lambda h, u=u: u for u in updates])
    torch.testing.assert_close(inputs[0], x)
    torch.testing.assert_close(inputs[3], (x + updates[:2].sum(0) + updates[2]) / 3)
    torch.testing.assert_close(out, (x + updates[:2].sum(0) + updates[2:].sum(0)) / 3)


def test_boundaries_and_sources():
    k3 = Schedule.kimi_k3()
    assert (k3.sublayers, k3.max_sources, k3.starts[-1]) == (186, 9, 168)
    assert [Schedule.block(10, 4).complete_before(l) for l in (0, 3, 4, 8, 9, 10)] == [1, 1, 2, 3, 3, 4]
    assert [Schedule.full_attention(3).complete_before(l) for l in range(4)] == [1, 2, 3, 4]
    visits = [Schedule.block(10, 4).visit(l) for l in range(10)]
    assert [v.sources for v in visits] == [1] * 4 + [2] * 4 + [3] * 2
    assert [v.one_pass for v in visits] == [True] * 8 + [False] * 2
    assert sublayers_from_layers(12) == 24
    assert layers_from_sublayers(24) == 12


def test_traffic_follows_the_two_phase_formulas():
    """Block: one-pass n + 4 and two-phase 6 + n / S vectors a sublayer; Full: at most (S + N), far below O(L)."""
    read, written = Schedule.block(128, 16, one_pass_sources=0).vectors_moved()
    assert (read + written) / 128 == pytest.approx(6 + (9 / 2) / 16, abs=0.25)
    read, written = Schedule.block(128, 16).vectors_moved()
    assert (read + written) / 128 == pytest.approx(6.13, abs=0.25)
    read, written = Schedule.full_attention(128).vectors_moved()
    assert (read + written) / 128 < 128 / 11 + 11
    naive_read, _ = Schedule.full_attention(128, 128, one_pass_sources=99).vectors_moved()
    assert naive_read / 128 > 60


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule.block(8, 0), "size: found 0"),
        (lambda: Schedule.at(8, (1, 4)), "first block to start at sublayer 0"),
        (lambda: Schedule.at(8, (0, 4, 4)), r"nearest legal is \(0, 4\)"),
        (lambda: Schedule.at(8, (0, 8)), "less than sublayers = 8"),
        (lambda: Schedule.full_attention(8, 0), "group: found 0"),
        (lambda: sublayers_from_layers(0), "layers: found 0, expected at least 1"),
        (lambda: layers_from_sublayers(7), "nearest is 6"),
        (lambda: Schedule(0, (0,)), "sublayers: found 0"),
    ],
)
def test_bad_plans_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_visit_outside_the_stack_raises():
    with pytest.raises(IndexError, match="expected 0 to 7"):
        Schedule.block(8, 2).visit(8)
