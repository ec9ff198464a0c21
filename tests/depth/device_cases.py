"""What the tests on a GPU check of whole passes, on any device: the serving contract, training steps, graphs.

`test_device_cases.py` runs all of it without a GPU, at small sizes and by the eager path.
"""

import depth_naive as naive
import torch

from tilewise.depth import InferenceState, Schedule, eager, fused_attn_res
from tilewise.nn import AttnRes
from tilewise.testing import assert_within_budget


def module(schedule, d, dtype, device, std=0.5):
    made = AttnRes(d, schedule, device=device, dtype=dtype)
    with torch.no_grad():
        made.query.normal_(std=std)
        made.key_weight.normal_(1, 0.2)
    return made


def serving_in_a_large_bank(T, NB, d, dtype, device, impl):
    """Some rows against the eager path on these rows alone; every row of the block that is written, and no other."""
    bank = torch.empty(T, NB, d, device=device, dtype=dtype).normal_()
    prefix, delta = (torch.empty(T, d, device=device, dtype=dtype).normal_() for _ in range(2))
    g, o = (torch.rand(d, device=device).add(0.5).to(dtype) for _ in range(2))
    q = (2 * torch.randn(d, device=device) / d**0.5).to(dtype)
    # Token 2^31 / (NB d) is where an offset of 32 bits ends.
    edge = min(2**31 // (NB * d), T - 2)
    rows = sorted({0, 1, T // 2, edge, edge + 1, T - 2, T - 1})
    kept = prefix[rows], delta[rows], bank[rows]
    expected = prefix + delta
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    before = bank.view(bits).sum(-1, dtype=torch.int64)
    y = fused_attn_res(prefix, delta, bank, g, q, o, NB - 1, NB - 1, 1e-5, 1e-6, impl=impl)
    assert torch.equal(prefix, expected)
    assert torch.equal(bank[:, NB - 1], expected)
    assert torch.equal(bank.view(bits).sum(-1, dtype=torch.int64)[:, : NB - 1], before[:, : NB - 1])
    assert y.isfinite().all()
    found = []
    for kind in (dtype, torch.float64):
        few = [x.to(kind, copy=True) for x in kept]
        weights = (x.to(kind) for x in (q, g, o))
        found.append(eager.serve_(*few, *weights, NB - 1, NB - 1, 1e-5, 1e-6))
    assert_within_budget("y", y[rows], *found)


class TrainingStep:
    """A pass with norms given and its gradients of every leaf: embedding, updates' factors, queries, weights, norms."""

    def __init__(self, schedule, T, d, dtype, device):
        self.schedule, L = schedule, schedule.sublayers
        self.residual = module(schedule, d, dtype, device)
        self.x = torch.randn(T, d, device=device).to(dtype).requires_grad_()
        self.factors = [torch.rand(d, device=device).add(0.5).to(dtype).requires_grad_() for _ in range(L)]
        self.norms = [torch.rand(d, device=device).add(0.5).to(dtype).requires_grad_() for _ in range(L + 1)]
        self.seed = torch.randn(T, d, device=device).to(dtype)
        self.leaves = [self.x, self.residual.query, self.residual.key_weight, *self.factors, *self.norms]

    def __call__(self):
        stream = self.residual(self.x, norms=self.norms[:-1])
        for l, factor in enumerate(self.factors):
            stream.write(l, torch.sin(stream.read(l) * factor))
        y = stream.output(self.norms[-1])
        return [y.detach(), *torch.autograd.grad(y, self.leaves, self.seed)]

    def renew(self):
        with torch.no_grad():
            self.x.copy_(torch.randn_like(self.x))
            self.seed.copy_(torch.randn_like(self.seed))


class ServingStep:
    """Two calls of the contract in a row, the first of which writes a block that the second reads."""

    def __init__(self, T, NB, d, dtype, device, impl="auto"):
        self.kept = [torch.randn(*s, device=device).to(dtype) for s in ((T, d), (T, d), (T, NB, d))]
        self.prefix, self.delta, self.bank = (x.clone() for x in self.kept)
        self.weights = [torch.rand(d, device=device).add(0.5).to(dtype) for _ in range(3)]
        self.n, self.impl = NB - 1, impl

    @torch.no_grad()
    def __call__(self):
        for x, kept in zip((self.prefix, self.delta, self.bank), self.kept, strict=True):
            x.copy_(kept)
        ends = {"eps": 1e-5, "output_norm_eps": 1e-6, "impl": self.impl}
        first = fused_attn_res(self.prefix, self.delta, self.bank, *self.weights, self.n, self.n, **ends)
        last = fused_attn_res(self.prefix, first, self.bank, *self.weights, self.n + 1, -1, **ends)
        return [first, last, self.prefix.clone(), self.bank.clone()]

    def renew(self):
        for x in (*self.kept, *self.weights):
            x.copy_(torch.randn_like(x))


class InferenceStep:
    """A pass through the bank of an `InferenceState`."""

    def __init__(self, schedule, T, d, dtype, device):
        self.state = InferenceState(schedule, module(schedule, d, dtype, device).reads(), max_tokens=T)
        self.x = torch.randn(T, d, device=device).to(dtype)
        self.norms = [torch.rand(d, device=device).add(0.5).to(dtype) for _ in range(schedule.sublayers + 1)]

    @torch.no_grad()
    def __call__(self):
        stream = self.state(self.x)
        for l, norm in enumerate(self.norms[:-1]):
            stream.write(l, torch.sin(stream.read(l, norm)))
        return [stream.output(self.norms[-1])]

    def renew(self):
        self.x.copy_(torch.randn_like(self.x))


def captured(step):
    """(replay, its results) of a step in a CUDA graph."""
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(warm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph.replay, results


def replays_equal_eager(step, capture=captured):
    """Three times with new inputs, bit for bit; a step without a replay has other results."""
    replay, results = capture(step)
    for _ in range(3):
        before = [x.clone() for x in results]
        step.renew()
        replay()
        expected = step()
        for k, (a, b) in enumerate(zip(results, expected, strict=True)):
            assert torch.equal(a, b), f"result {k}: {(a.double() - b.double()).abs().max().item()}"
        assert not torch.equal(results[0], before[0])


def steps_are_repeatable(step):
    """Gradients of every leaf, twice: the same bits, and none of them zeros alone."""
    first, second = step(), step()
    for k, (a, b) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(a, b), f"result {k}: {(a.double() - b.double()).abs().max().item()}"
        # The first read has no query of its own: one source.
        assert a.any(), f"result {k} is zeros"


SCHEDULES = {"block": lambda L: Schedule.block(L, 4), "full": Schedule.full_attention}


def reads(stream, updates, norms):
    found = []
    for l, u in enumerate(updates):
        found.append(stream.read(l, norms[l]).clone())
        stream.write(l, u)
    return [*found, stream.output(norms[-1])]


def dense_reads(schedule, residual, x, updates, norms):
    """The same from the equations, dense, in the dtype of `x`."""
    functions = [lambda h, u=u: u for u in updates]
    how = (naive.full, ()) if schedule.full else (naive.block, (schedule.starts,))
    inputs, out = how[0](x, functions, residual.query.to(x.dtype), residual.key_weight.to(x.dtype), *how[1])
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    normed = [naive.rms(h.to(wide)) * w.to(wide) for h, w in zip([*inputs, out], norms, strict=True)]
    return [y.to(x.dtype) for y in normed]


def training_gradients(schedule, tokens, d, dtype, device):
    """Name → (shared gradients of the stream, dense autograd in the same dtype, dense autograd in fp64)."""
    L = schedule.sublayers
    low = module(schedule, d, dtype, device, 2 / d**0.5)
    exact = AttnRes(d, schedule, device=device, dtype=torch.float64)
    exact.load_state_dict(low.state_dict())
    x, updates = torch.randn(tokens, d, device=device).to(dtype), torch.randn(L, tokens, d, device=device).to(dtype)
    seeds = torch.randn(L + 1, tokens, d, device=device).to(dtype)
    norms = torch.rand(L + 1, d, device=device).add(0.5).to(dtype)

    def run(residual, kind, shared):
        leaves = [t.detach().to(kind).requires_grad_() for t in (x, updates, norms)]
        if shared:
            weights = leaves[2].unbind(0)
            found = reads(residual(leaves[0], norms=weights[:-1]), leaves[1], weights)
        else:
            found = dense_reads(schedule, residual, *leaves)
        loss = sum((y * s.to(kind)).sum(dtype=torch.float64) for y, s in zip(found, seeds, strict=True))
        return torch.autograd.grad(loss, [*leaves, residual.query, residual.key_weight])

    results = (run(low, dtype, True), run(low, dtype, False), run(exact, torch.float64, False))
    names = ("embedding", "updates", "norms", "queries", "key weights")
    return dict(zip(names, zip(*results, strict=True), strict=True))


def assert_gradients_within_budget(values):
    """The budget of :func:`tilewise.testing.error_budget` for 16 bits, and the same of norms for fp32.

    The largest error of an fp32 gradient is that of the one token whose softmax is most sensitive: of the eager path
    it was 0.2 to 2.9 times the budget by the seed, while norms of the errors were 0.8 to 1.9 times dense PyTorch's.
    """
    for name, (got, low, exact) in values.items():
        if got.dtype != torch.float32:
            assert_within_budget(name, got, low, exact)
            continue
        error, dense = (torch.linalg.vector_norm(x.double() - exact).item() for x in (got, low))
        allowed = 2 * dense + 2 * torch.finfo(got.dtype).eps * torch.linalg.vector_norm(exact).item()
        assert error <= allowed, f"{name}: norm of the error {error:.3e}, allowed {allowed:.3e}"


def inference_reads(schedule, tokens, d, dtype, device, std):
    """(state, all reads of a stream, the same dense in this dtype, in fp64), with queries of this deviation."""
    residual = module(schedule, d, dtype, device, std)
    state = InferenceState(schedule, residual.reads(), max_tokens=tokens)
    x = torch.randn(tokens, d, device=device).to(dtype)
    updates = torch.randn(schedule.sublayers, tokens, d, device=device).to(dtype)
    norms = torch.rand(schedule.sublayers + 1, d, device=device).add(0.5).to(dtype)
    with torch.no_grad():
        found = reads(state(x), updates, norms)
        low = dense_reads(schedule, residual, x, updates, norms)
        wide = AttnRes(d, schedule, device=device, dtype=torch.float64)
        wide.load_state_dict(residual.state_dict())
        exact = dense_reads(schedule, wide, x.double(), updates.double(), norms.double())
    return state, *(torch.stack(values) for values in (found, low, exact))
