"""attention() where there is little or nothing to attend: rows and calls without keys, NaN and scores of -inf."""

import pytest
import torch

import tilewise as tw
from attention_inputs import qkv


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_rows_without_keys(impl):
    q, k, v = (x.requires_grad_() for x in qkv(dtype=torch.float64))
    mask = tw.Mask.lengths([0, 6])
    o, lse = tw.attention(q, k, v, mask=mask, impl=impl, return_lse=True)
    assert (o[0] == 0).all()
    assert (lse[0] == -torch.inf).all()
    for grad in torch.autograd.grad(o.square().sum(), (q, k, v)):
        assert (grad[0] == 0).all()
        assert grad[1].abs().sum() > 0
    uniform = tw.attention(q, k, v, mask=mask, impl=impl, empty_rows="uniform")
    torch.testing.assert_close(uniform[0], v[0].mean(1, keepdim=True).expand_as(uniform[0]))
    torch.testing.assert_close(uniform[1], o[1])
    dq, dk, dv = torch.autograd.grad(uniform[0].sum(), (q, k, v))
    assert (dq == 0).all()
    assert (dk == 0).all()
    torch.testing.assert_close(dv[0], torch.ones_like(dv[0]))


def test_partial_attentions_merge_by_their_lse():
    q, k, v = qkv(dtype=torch.float64)
    o, lse = tw.attention(q, k, v, return_lse=True)
    parts = [tw.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 4), slice(4, 10))]
    weights = torch.stack([part[1] for part in parts]).softmax(0)
    torch.testing.assert_close(sum(w[..., None] * part[0] for w, part in zip(weights, parts, strict=True)), o)
    torch.testing.assert_close(torch.stack([part[1] for part in parts]).logsumexp(0), lse)


@pytest.mark.parametrize(("Tq", "Tk", "B"), [(0, 5, 2), (5, 0, 2), (5, 5, 0)])
@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_nothing_to_attend(Tq, Tk, B, impl):
    q, k, v = (x.requires_grad_() for x in qkv(B=B, Tq=Tq, Tk=Tk))
    table = torch.randn(32, 4, requires_grad=True)
    o = tw.attention(q, k, v, terms=tw.T5(table), impl=impl, offset=0)
    assert o.shape == (B, 4, Tq, 8)
    assert (o == 0).all()
    for x, grad in zip((q, k, v, table), torch.autograd.grad(o.sum(), (q, k, v, table)), strict=True):
        assert grad.shape == x.shape
        assert (grad == 0).all()


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_a_nan_shows(impl):
    q, k, v = qkv()
    q[0, 1, 3, 2] = torch.nan
    o = tw.attention(q, k, v, terms=tw.T5(torch.randn(32, 4)), impl=impl)
    assert o[0, 1, 3].isnan().all()
    assert o.isnan().sum() == 8
    q, k, v = qkv(Tq=3, Tk=9)
    o, lse = tw.attention(q, torch.full_like(k, torch.nan), v, impl=impl, return_lse=True)
    assert o.isnan().all()
    assert lse.isnan().all()


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_a_row_whose_scores_are_all_minus_infinity_is_empty(impl):
    q, k, v = (x.requires_grad_() for x in qkv(Tq=4, Tk=4))
    table = torch.zeros(32, q.shape[1])
    table[0] = -torch.inf
    given = {"terms": tw.T5(table), "mask": tw.Mask.causal(), "impl": impl}
    o, lse = tw.attention(q, k, v, **given, return_lse=True)
    assert not o[:, :, 0].any()
    assert (lse[:, :, 0] == -torch.inf).all()
    (dv,) = torch.autograd.grad(o[:, :, 0].sum(), v)
    assert not dv.any()
    mean = tw.attention(q, k, v, **given, empty_rows="uniform")[:, :, 0]
    torch.testing.assert_close(mean, v.mean(2))


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_an_offset_without_a_row_adds_nothing_whatever_the_table_holds(impl):
    q, k, v = qkv(dtype=torch.float64)
    table = torch.tensor([[-torch.inf, 0.3, 0.7]] * 4, dtype=torch.float64)
    delta = torch.arange(10)[:, None] - torch.arange(10)
    bias = torch.where(delta.abs() > 1, 0.0, table[0, (delta.clamp(-1, 1) + 1)])
    expected = ((q @ k.mT) * 8**-0.5 + bias).softmax(-1) @ v
    torch.testing.assert_close(tw.attention(q, k, v, terms=tw.Scalar(table, tw.windowed(-1, 1)), impl=impl), expected)


def huge(name, table, H):
    rows = tw.clipped(-4, 4)
    return {
        "none": (),
        "T5": tw.T5(table[:, 0].expand(H, -1).T.repeat(4, 1)[:32]),
        "Shaw": tw.Shaw(table, left=4, right=4),
        "DeBERTa": (tw.OnKey(table, rows), tw.OnQuery(table, rows)),
    }[name]


@pytest.mark.parametrize("mask", [tw.Mask(), tw.Mask.causal()], ids=["all", "causal"])
@pytest.mark.parametrize("size", [1e6, 1e8, 1e12])
@pytest.mark.parametrize("name", ["none", "T5", "Shaw", "DeBERTa"])
def test_scores_of_any_size_have_the_gradients_of_the_dense_formula(name, size, mask):
    """Every row has one key with all of P, and no gradient but v's; 1/√48 is no power of two."""
    q, k, v, do = (torch.randn(1, 2, 600, 48) for _ in range(4))
    x = [(q * size).requires_grad_(), k.requires_grad_(), v.requires_grad_(), torch.randn(9, 48, requires_grad=True)]
    runs = []
    for impl in ("reference", "blocked"):
        o = tw.attention(*x[:3], terms=huge(name, x[3], 2), mask=mask, impl=impl)
        runs.append((o, *torch.autograd.grad((o * do).sum(), x, allow_unused=True)))
    for got, wanted, scale in zip(runs[1], runs[0], (1.0, 1.0, size, 1.0, size), strict=True):
        if wanted is not None:
            torch.testing.assert_close(got / scale, wanted / scale, rtol=1e-4, atol=1e-5)


HIDING = {
    "padding": lambda hidden: tw.Mask.padding(~hidden[None]),
    "dense": lambda hidden: tw.Mask.full((~hidden).expand(len(hidden), -1).clone()),
}


@pytest.mark.parametrize("size", [1e30, 3e38])
@pytest.mark.parametrize("mask", HIDING)
@pytest.mark.parametrize("name", ["none", "T5", "Shaw", "DeBERTa"])
def test_finite_hidden_keys_and_values_do_not_matter(name, mask, size):
    """Nor where their scores overflow, to +∞ or, in a sum of both signs, to NaN."""
    T = 600
    hidden = torch.arange(T) % 100 == 7
    q, k, v, do = (torch.randn(1, 2, T, 16) for _ in range(4))
    table, runs = torch.randn(9, 16), []
    for fill in (0.0, size):
        K = torch.where(hidden[:, None], fill * torch.randn(T, 16).sign(), k)
        V = torch.where(hidden[:, None], min(fill, 1e30), v)
        x = [t.clone().requires_grad_() for t in (q, K, V, table)]
        terms, shown = huge(name, x[3], 2), HIDING[mask](hidden)
        o, lse = tw.attention(*x[:3], terms=terms, mask=shown, impl="blocked", return_lse=True)
        grads = torch.autograd.grad((o * do).sum() + lse.sum(), x, allow_unused=True)
        runs.append((o, lse, *(grad for grad in grads if grad is not None)))
    for got, wanted in zip(*runs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["none", "T5", "Shaw"])
def test_a_key_that_a_causal_mask_hides_from_most_rows_may_overflow_there(name):
    """The last row sees it, with a query of 0. Its sum with the other keys is finite."""
    q, k, v, do = (torch.randn(1, 2, 40, 16) for _ in range(4))
    q[:, :, -1] = do[:, :, -1] = 0.0
    table, runs = torch.randn(9, 16), []
    for fill in (1.0, 3e38):
        k[:, :, -1] = torch.tensor([0.0] * 15 + [fill])
        x = [t.clone().requires_grad_() for t in (q, k, v, table)]
        o, lse = tw.attention(
            *x[:3], terms=huge(name, x[3], 2), mask=tw.Mask.causal(), scale=8.0, impl="blocked", return_lse=True
        )
        grads = torch.autograd.grad((o * do).sum(), x, allow_unused=True)
        runs.append((o, lse, *(grad for grad in grads if grad is not None)))
    for got, wanted in zip(*runs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fill", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", [tw.Scalar, tw.OnQuery, tw.OnKey])
@pytest.mark.parametrize("dense", [False, True])
def test_table_rows_of_hidden_offsets_do_not_matter(kind, fill, dense):
    """In a compiled call: elsewhere a NaN in a table is refused. They leave a gradient where no product meets them."""
    torch._dynamo.reset()
    q, k, v = qkv(B=1, Tq=150, Tk=150)
    rows, delta = tw.clipped(-40, 40), torch.arange(150)[:, None] - torch.arange(150)
    mask = tw.Mask.full((delta <= 20) & (delta >= -10)) if dense else tw.Mask.window(20, 10)
    clean = torch.randn(4, 81) if kind is tw.Scalar else torch.randn(4, 81, 8)
    shown = (torch.arange(-40, 41) <= 20) & (torch.arange(-40, 41) >= -10)
    dirty = clean.clone()
    dirty[:, ~shown] = fill
    run = torch.compile(
        lambda q, k, v, table: tw.attention(q, k, v, terms=kind(table, rows), mask=mask, impl="blocked"),
        backend="eager",
    )
    runs = []
    for table in (clean, dirty):
        x = [t.clone().requires_grad_() for t in (q, k, v, table)]
        o = run(*x)
        spoilt = {tw.Scalar: None, tw.OnQuery: 0, tw.OnKey: 1}[kind]
        grads = torch.autograd.grad(o.square().sum(), x)
        runs.append((o, *(grad for n, grad in enumerate(grads) if n != spoilt)))
    for got, wanted in zip(*runs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
