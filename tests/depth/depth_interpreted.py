"""Every Triton kernel under the interpreter, tiny shapes, against the oracle; run by `test_depth_kernels.py`."""

import os

import depth_dense as dense
import pytest
import test_depth_shared as stack
import torch
import triton
import triton.language as tl

from paired_sums import pair_sums
from quick_interpreter import quicken
from tilewise import depth
from tilewise.bench import plain_residual
from tilewise.depth import BlockReads, SharedSource, eager
from tilewise.depth import reference as R
from tilewise.depth.sources import Fixed
from tilewise.depth.triton import config, launch, sources
from tilewise.depth.triton.common import source_rows
from tilewise.depth.triton.launch_phase1 import split_queries
from tilewise.testing import assert_within_budget

assert os.environ.get("TRITON_INTERPRET") == "1"
quicken()
pair_sums()
F64 = torch.float64
DTYPES = [torch.float16, torch.float32]


def make(n, S, T, d, dtype, correlation=0.0):
    base = torch.randn(T, d)
    v = [(correlation * base + (1 - correlation**2) ** 0.5 * torch.randn(T, d)).to(dtype) for _ in range(n)]
    w, g, o = 2 * torch.randn(S, d) / d**0.5, 1 + 0.2 * torch.randn(S, d), 1 + 0.2 * torch.randn(d)
    u, p = torch.randn(T, d).to(dtype), torch.randn(T, d).to(dtype)
    return v, w, g, o, u, p


def check(call, leaves, impl="triton"):
    """Outputs and gradients of call(f, leaves) within the budget, gradients of one shape as one tensor.

    Each alone, some of 18 sources' largest errors are above dense PyTorch's in the same source by chance.
    """

    def run(f, xs, **kw):
        xs = [None if x is None else x.detach().clone().requires_grad_() for x in xs]
        outs = call(f, xs, kw)
        outs = outs if isinstance(outs, tuple) else (outs,)
        torch.manual_seed(1)
        seeds = [torch.randn(x.shape).half() for x in outs]
        seeds = [s.to(x.dtype) for s, x in zip(seeds, outs, strict=True)]
        live = [x for x in xs if x is not None]
        grads = torch.autograd.grad(outs, live, seeds, allow_unused=True)
        found = [torch.zeros_like(x) if g is None else g for x, g in zip(live, grads, strict=True)]
        shapes = dict.fromkeys(x.shape for x in found)
        return [*outs, *(torch.stack([x for x in found if x.shape == shape]) for shape in shapes)]

    got = run(depth, leaves, impl=impl)
    low = run(dense, leaves)
    exact = run(R, [None if x is None else x.double() for x in leaves])
    for k, xs in enumerate(zip(got, low, exact, strict=True)):
        assert_within_budget(f"result {k}", *xs)


@pytest.fixture(params=["few", "many"])
def tokens(request, monkeypatch):
    """Few tokens and many take different kernels and tiles; tiny tests run both by overriding the choice."""
    monkeypatch.setattr(config, "few", lambda T: request.param == "few")


@pytest.mark.usefixtures("tokens")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "T", "d"), [(1, 3, 24), (5, 2, 40)])
def test_mix(dtype, n, T, d):
    v, w, g, *_ = make(n, 1, T, d, dtype)
    check(lambda f, x, kw: f.mix(x[4:], x[0], x[1], **kw), [w[0], g[0], None, None, *v])


@pytest.mark.usefixtures("tokens")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_mix_update(dtype, first, norm):
    v, w, g, o, u, p = make(3, 1, 3, 24, dtype)

    def call(f, x, kw):
        return f.mix_update(x[0], x[1], x[5:], x[2], x[3], x[4], output_eps=1e-3, **kw)

    check(call, [u, None if first else p, w[0], g[0], o if norm else None, *v])


def test_mix_of_many_sources():
    v, w, _, o, u, p = make(18, 1, 2, 16, torch.float32)
    check(lambda f, x, kw: f.mix_update(x[0], x[1], x[4:], x[2], None, x[3], **kw), [u, p, w[0], o, *v])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "S", "T"), [(1, 1, 3), (3, 5, 9), (2, 16, 3), (17, 2, 5), (2, 18, 2)])
def test_phase1(dtype, n, S, T):
    v, w, g, *_ = make(n, S, T, 40, dtype, correlation=0.9)
    check(lambda f, x, kw: f.phase1(x[2:], x[0], x[1], **kw), [w, g, *v])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_phase2(dtype, first, norm):
    v, w, g, o, u, p = make(2, 1, 5, 24, dtype)
    o1, lse = R.phase1(v, w)

    def call(f, x, kw):
        return f.phase2(x[0], x[1], x[2], x[3], x[4], x[5], x[6], output_eps=1e-3, **kw)

    check(call, [u, None if first else p, o1[0], lse[0], w[0], g[0], o if norm else None])
    check(lambda f, x, kw: f.phase2_first(x[0], x[1], **kw), [o1[0], o])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("first", "norm"), [(False, True), (True, False)])
def test_merges_whose_rows_are_two_tiles(dtype, first, norm):
    """d = 648 is 512 columns and 136 of a second tile of 256 in the backward."""
    assert config.row_tiles(648) == (512, 256, 4)
    v, w, g, o, u, p = make(2, 1, 3, 648, dtype)
    o1, lse = R.phase1(v, w)

    def call(f, x, kw):
        return f.phase2(*x[:7], output_eps=1e-3, **kw)

    check(call, [u, None if first else p, o1[0], lse[0], w[0], g[0], o if norm else None])
    check(lambda f, x, kw: f.phase2_first(x[0], x[1], **kw), [o1[0], o if norm else None])


@pytest.mark.parametrize("first", [False, True])
def test_merges_in_another_order_of_rows(first, monkeypatch):
    v, w, g, o, u, p = make(2, 1, 5, 24, torch.float16)
    o1, lse = (x[0] for x in R.phase1(v, w))
    q = (w * g)[0]

    def run(**order):
        monkeypatch.setattr(config, "merge_order", lambda T, d: order)
        launch._merge_plan.cache_clear()
        return launch.phase2_fwd(u, None if first else p, o1, lse, q, o.half(), 1e-6, 1e-3)

    expected = run(DOWN=False, STREAM=False)
    for stream in (False, True):
        assert all(map(torch.equal, run(DOWN=True, STREAM=stream), expected))
    launch._merge_plan.cache_clear()


def test_a_bank_equals_a_list_and_scattered_rows():
    bank = torch.randn(4, 3, 2 * 24)[:, :, :24]
    w = torch.randn(3, 24)
    for f in (lambda v: depth.phase1(v, w, impl="triton")[0], lambda v: depth.mix(v, w[0], impl="triton")):
        expected = f([x.clone() for x in bank])
        assert torch.equal(f(bank), expected)
        assert torch.equal(f([bank[0], bank[1].clone(), bank[2], bank[3]]), expected)


@pytest.mark.usefixtures("tokens")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", [5, 18])
@pytest.mark.parametrize("gram", [0, 1, 2])
def test_scores_ahead(dtype, S, gram, monkeypatch):
    tiles = config.score_tiles
    monkeypatch.setattr(config, "score_tiles", lambda *shape: {**tiles(*shape), "GRAM": gram})
    v, w, g, _, u, p = make(2, S, 5, 40, dtype)
    b, s = depth.complete(u, p, w, g, impl="triton")
    assert torch.equal(b, u + p)
    s = torch.cat([depth.scores(v, w, g, impl="triton"), s[:, None]], 1)
    exact = R.scores([x.double() for x in (*v, b)], w.double(), g.double())
    torch.testing.assert_close(s.double(), exact, atol=2e-5, rtol=1e-4)
    got = depth.phase1_from_scores([*v, b], s[1:4], impl="triton")
    low, exact = (
        dense.phase1([*v, b], w[1:4], g[1:4]),
        R.phase1([x.double() for x in (*v, b)], w[1:4].double(), g[1:4].double()),
    )
    for name, *xs in zip(("o1", "lse"), got, low, exact, strict=True):
        assert_within_budget(name, *xs)


@pytest.mark.parametrize("T", [8192, 32768])
def test_scores_with_the_tiles_of_many_tokens(T, monkeypatch):
    """66 queries, 7,168 columns: two parts at 8,192 tokens, one at 32,768; here 70 tokens of 40 columns use them."""
    tile = config.score_tiles(T, 7168, 66, 2)
    assert tile["splits"] == (2 if T == 8192 else 1)
    monkeypatch.setattr(config, "score_tiles", lambda *_: {**tile})
    v, w, g, *_ = make(2, 66, 70, 40, torch.float32)
    got = depth.scores(v, w, g, impl="triton")
    exact = R.scores([x.double() for x in v], w.double(), g.double())
    torch.testing.assert_close(got.double(), exact, atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("tokens")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 3])
def test_phase_two_from_scores(dtype, n):
    v, w, g, o, u, p = make(n, 1, 3, 40, dtype, correlation=0.9)
    q = depth.fold_queries(w, g)
    s = depth.scores(v, w, g)
    for update, prefix in ((u, p), (u, None), (None, None)):
        for norm in (None, o):
            args = update, prefix, v, s[0], q[0], norm, 1e-6, 1e-3
            got, low = launch.phase2_from_scores(*args), eager.phase2_from_scores(*args)
            exact = [x.double() if torch.is_tensor(x) else x for x in args]
            exact[2], exact[3] = [x.double() for x in v], R.scores([x.double() for x in v], w.double(), g.double())[0]
            exact = eager.phase2_from_scores(*exact)
            assert_within_budget("y", got[1], low[1], exact[1])
            assert (got[0] is None) == (low[0] is None)
            assert got[0] is None or torch.equal(got[0], low[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "S", "width"), [(18, 3, 24), (70, 18, 24), (130, 2, 24), (20, 1, 256)])
def test_weighted_sums_of_many_sources(dtype, n, S, width):
    """A tile of 32 or 128 sources, queries beyond a tile, more sources than fit, columns with and without a rest."""
    v, w, g, *_ = make(n, S, 2, width, dtype, correlation=0.9)
    s = R.scores([x.double() for x in v], w.double(), g.double()).to(torch.float32)
    got, low = launch.combine(v, s), eager.combine(v, s)
    exact = eager.combine([x.double() for x in v], s.double())
    for name, *xs in zip(("o1", "lse"), got, low, exact, strict=True):
        assert_within_budget(name, *xs)
    bank = torch.stack(v)
    assert torch.equal(launch.combine(bank.unbind(0), s)[0], got[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "first", "update"), [(0, True, True), (1, True, False), (5, False, True), (18, True, True)]
)
@pytest.mark.parametrize("warm", [0, 1])
def test_read_from_scores(dtype, n, first, update, warm):
    """Over o1, sources and an update in every combination, with and without norm and copy; scattered and in a bank."""
    v, _, _, o, u, o1 = make(max(n, 1), 1, 3, 24, dtype, correlation=0.9)
    v, lse = v[:n], torch.randn(3)
    s = torch.randn(n + 1, 3)
    args = [o1 if first else None, lse if first else None, v, u if update else None, s, o if warm else None, 1e-3]
    slot = torch.zeros(3, 48).to(dtype)[:, 24:] if update and warm else None
    got, low = launch.read(*args, slot=slot), eager.read(*args)
    wide = [x.double() if torch.is_tensor(x) else x for x in args]
    wide[2] = [x.double() for x in v]
    assert_within_budget("y", got, low, eager.read(*wide))
    assert slot is None or torch.equal(slot, u)
    if n:
        args[2] = torch.stack(v).unbind(0)
        assert torch.equal(launch.read(*args), got)


def test_rows_of_queries_that_were_split_share_their_parts():
    q = torch.randn(6, 16)
    launch.prepare(q, torch.float16)
    whole = split_queries(q, torch.float16)
    for part, all_ in zip(split_queries(q[2:5], torch.float16), whole, strict=True):
        assert part.data_ptr() == all_[2:].data_ptr()
        assert part.shape == (3, 16)
    q.mul_(2)
    assert torch.equal(split_queries(q[2:5], torch.float16)[0], q[2:5].half())


@pytest.mark.usefixtures("tokens")
@pytest.mark.parametrize(("n", "write", "delta"), [(0, -1, True), (2, 3, True), (4, -1, False), (6, 7, True)])
@pytest.mark.parametrize("ahead", [1, 4])
def test_serving_contract(n, write, delta, ahead, monkeypatch):
    tile = config.mix
    monkeypatch.setattr(config, "mix", lambda *shape: {**tile(*shape), "AHEAD": ahead})
    T, NB, d = 3, 8, 24
    store = torch.randn(T, d + 8).half()
    prefix, bank = store[:, 8:], torch.randn(T, NB, 2 * d).half()[:, :, d:]
    change = torch.randn(T, d).half() if delta else None
    args = 1 + 0.1 * torch.randn(d), torch.randn(d) / 4, torch.rand(d) + 0.5, n, write, 1e-5, 1e-4
    p2, b2 = prefix.clone(), bank.clone()
    expected = R.fused_attn_res(p2, change, b2, *args)
    y = depth.fused_attn_res(prefix, change, bank, *args, impl="triton")
    torch.testing.assert_close(y, expected, atol=2e-3, rtol=2e-3)
    assert torch.equal(prefix, p2)
    assert torch.equal(bank, b2)


@pytest.mark.parametrize("delta", [True, False])
def test_serving_contract_with_rows_of_any_stride(delta):
    """Strides of 27 and 33 elements: no row but the first is 16-byte aligned."""
    T, NB, d = 3, 4, 24
    prefix, bank = torch.randn(T, d + 3).half()[:, 3:], torch.randn(T, NB, d + 9).half()[:, :, 1 : d + 1]
    change = torch.randn(T, d + 1).half()[:, 1:] if delta else None
    args = 1 + 0.1 * torch.randn(d), torch.randn(d) / 4, torch.rand(d) + 0.5, 2, 3, 1e-5, 1e-4
    p2, b2, kept = prefix.clone(), bank.clone(), bank.clone()
    expected = R.fused_attn_res(p2, change, b2, *args)
    y = depth.fused_attn_res(prefix, change, bank, *args, impl="triton")
    torch.testing.assert_close(y, expected, atol=2e-3, rtol=2e-3)
    assert torch.equal(prefix, p2)
    assert torch.equal(bank, b2)
    assert torch.equal(bank[:, :3], kept[:, :3])


def test_contracts_hold_for_the_kernels():
    v, w, _, o, u, p = make(2, 3, 2, 16, torch.float32)
    op, norm, tests = torch.ops.tilewise, (1e-6, 1e-6, "triton"), ("test_schema", "test_faketensor")
    s, r = op.depth_scores(v, w, 1e-6, "triton")
    o1, lse = op.depth_combine(v, s, "triton")
    calls = [
        (op.depth_mix, (v, u, p, w[0], o, *norm)),
        (op.depth_mix_bwd, (u, p, v, p, w[0], o, *norm)),
        (op.depth_scores, (v, w, 1e-6, "triton")),
        (op.depth_complete, (u, p, w, 1e-6, "triton")),
        (op.depth_combine, (v, s, "triton")),
        (op.depth_phase1_bwd, (o1, lse, v, w, s, lse, r, "triton")),
        (op.depth_phase2, (u, p, o1[0], lse[0], w[0], o, *norm)),
        (op.depth_phase2_bwd, (u, p, p, o1[0], lse[0], w[0], o, *norm)),
        (op.depth_serve_, (u, p, torch.randn(2, 4, 16), w[0], None, o, 2, 3, *norm)),
    ]
    for packet, args in calls:
        assert set(torch.library.opcheck(packet.default, args, test_utils=tests).values()) == {"SUCCESS"}


@triton.jit
def address_kernel(base, table, out, stride8):
    j = tl.arange(0, 4)
    rows = source_rows(base, table, j, j * 0, stride8, 1, False)
    tl.store(out + j, rows.to(tl.int64) - source_rows(base, table, j * 0, j * 0, stride8, 1, False).to(tl.int64))


def test_sources_may_lie_more_than_2_to_the_31_elements_apart():
    base, out = torch.zeros(8).half(), torch.zeros(4, dtype=torch.int64)
    address_kernel[(1,)](base, base, out, 1 << 29)
    assert out.tolist() == [j * 2 * 8 << 29 for j in range(4)]


def test_a_bank_is_one_storage_evenly_spaced():
    bank = torch.zeros(4, 3, 16).half()
    assert sources.even_step(bank.unbind(0)) == 3 * 16 * 2
    assert sources.even_step(bank[::2].unbind(0)) == 2 * 3 * 16 * 2
    assert sources.even_step([bank[0], bank[1], bank[3]]) is None
    assert sources.even_step([bank[1], bank[0]]) is None
    assert sources.even_step([bank[0], bank[1].clone()]) is None
    assert sources.even_step([bank[2]]) == 0


def test_fixed_sources_keep_their_table():
    v = Fixed(torch.randn(2, 16) for _ in range(3))
    made = sources.bank(v)
    assert made.table is not None
    assert sources.bank(v) is made
    assert made.table.tolist() == [x.data_ptr() for x in v]
    assert sources.bank(list(v)) is not made


@pytest.mark.parametrize("d", [24, 300])
def test_the_benchmarks_plain_residual(d):
    u, h, w = (torch.randn(s).requires_grad_() for s in ((5, d), (5, d), (d,)))
    seeds = torch.randn(2, 5, d)

    def dense(u, h, w):
        h = h + u
        return h, torch.nn.functional.rms_norm(h, (d,), w, 1e-6)

    for have, want in zip(plain_residual.add_rms_norm(u, h, w, 1e-6), dense(u, h, w), strict=True):
        torch.testing.assert_close(have, want)
    grads = [torch.autograd.grad(f, (u, h, w), list(seeds)) for f in
             (plain_residual.add_rms_norm(u, h, w, 1e-6), dense(u, h, w))]  # fmt: skip
    for have, want in zip(*grads, strict=True):
        torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5)
    new, y = h.detach().clone(), torch.empty(5, d)
    plain_residual.add_rms_norm_(u.detach(), new, w.detach(), y, 1e-6)
    torch.testing.assert_close((new, y), dense(u, h, w))


def test_no_tokens():
    v = [torch.randn(0, 24) for _ in range(2)]
    assert depth.mix(v, torch.zeros(24), impl="triton").shape == (0, 24)
    assert depth.phase1(v, torch.zeros(2, 24), impl="triton")[0].shape == (2, 0, 24)


@pytest.mark.parametrize("save_o1", [False, True])
def test_shared_gradients(save_o1):
    args = stack.leaves()
    want = torch.autograd.grad(stack.oracle(*args).sum(), args)
    low = [x.detach().float().requires_grad_() for x in args]
    have = torch.autograd.grad(stack.shared(*low, save_o1, "triton").sum(), low)
    for x, y in zip(have, want, strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-4)


def test_a_query_written_through_data_is_not_remembered():
    v, w = [torch.randn(4, 256).half() for _ in range(2)], torch.nn.Parameter(torch.randn(2, 256))
    for _ in range(2):
        seen = [
            (depth.phase1(v, w, impl=impl)[1], BlockReads([SharedSource(x) for x in v], w, impl=impl).first())
            for impl in ("triton", "eager")
        ]
        for a, b in zip(*seen, strict=True):
            torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)
        w.data.normal_()
