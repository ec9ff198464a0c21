"""Rows of 16,384 columns, the most the kernels take, and 12,296, under the interpreter; run by `test_depth_kernels.py`.

12,296 is a multiple of 8 alone: its tiles are padded, and its last one is cut in the middle.
"""

import depth_interpreted as interpreted
import pytest
import torch

from tilewise import depth
from tilewise.depth import reference as R
from tilewise.depth.triton import config
from tilewise.testing import assert_within_budget

D = [16384, 12296]


@pytest.fixture(autouse=True)
def many(monkeypatch):
    monkeypatch.setattr(config, "few", lambda T: False)


@pytest.mark.parametrize("d", D)
def test_one_pass(d):
    v, w, g, o, u, p = interpreted.make(3, 1, 2, d, torch.float16)
    interpreted.check(
        lambda f, x, kw: f.mix_update(x[0], x[1], x[5:], x[2], x[3], x[4], output_eps=1e-3, **kw),
        [u, p, w[0].half(), g[0].half(), o.half(), *v],
    )


@pytest.mark.parametrize("d", D)
def test_phase1(d):
    v, w, g, *_ = interpreted.make(2, 2, 1, d, torch.float16)
    interpreted.check(lambda f, x, kw: f.phase1(x[2:], x[0], x[1], **kw), [w.half(), g.half(), *v])


@pytest.mark.parametrize("d", D)
def test_phase2(d):
    v, w, g, o, u, p = interpreted.make(2, 1, 2, d, torch.float16)
    o1, lse = R.phase1(v, w.half(), g.half())
    interpreted.check(lambda f, x, kw: f.phase2(*x, output_eps=1e-3, **kw), [u, p, o1[0], lse[0], w[0], g[0], o])
    interpreted.check(lambda f, x, kw: f.phase2_first(*x, **kw), [o1[0], o.half()])


def test_scores_ahead_and_the_serving_contract():
    d = max(D)
    v, w, g, o, u, p = interpreted.make(2, 3, 2, d, torch.float16)
    b, own = depth.complete(u, p, w, g, impl="triton")
    assert torch.equal(b, u + p)
    s = torch.cat([depth.scores(v, w, g, impl="triton"), own[:, None]], 1)
    exact = R.phase1([x.double() for x in (*v, b)], w.double(), g.double())
    low = interpreted.dense.phase1([*v, b], w.half(), g.half())
    for name, *xs in zip(("o1", "lse"), depth.phase1_from_scores([*v, b], s, impl="triton"), low, exact, strict=True):
        assert_within_budget(name, *xs)
    args, results = (2, 2, 1e-5, 1e-6), []
    for f, kind, kw in ((depth, torch.float16, {"impl": "triton"}), (R, torch.float16, {}), (R, torch.float64, {})):
        prefix, bank = p.to(kind, copy=True), torch.stack([*v, u], 1).to(kind)
        weights = (x.half().to(kind) for x in (g[0], w[0], o))
        results.append(f.fused_attn_res(prefix, u.to(kind), bank, *weights, *args, **kw))
    assert_within_budget("y", *results)
