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
