"""Full's kernels and the serving contract on a CUDA device, within budget, at many waves."""

import pytest
import torch

from tilewise.depth import eager
from tilewise.testing import assert_within_budget

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DTYPES = [torch.bfloat16, torch.float16]


def bank(n, T, d, dtype):
    """Sources that agree up to 0.9, as residual streams do."""
    base = torch.randn(T, d, device="cuda")
    values = torch.empty(n, T, d, device="cuda", dtype=dtype)
    for v in values:
        v.copy_(0.9 * base + 0.19**0.5 * torch.randn_like(base))
    return values


def exact(function, *args, **kwargs):
    """In fp64, for the tokens kept."""
    wide = [[v.double() for v in x] if isinstance(x, list) else x.double() if torch.is_tensor(x) else x for x in args]
    return function(*wide, **kwargs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "S", "T", "d"), [(23, 11, 1100, 7168), (122, 11, 3000, 7168), (67, 18, 1100, 2304), (129, 3, 40, 64)]
)
def test_weighted_sums_of_many_sources(dtype, n, S, T, d):
    from tilewise.depth.triton import launch

    v, s = bank(n, T, d, dtype), 2 * torch.randn(S, n, T, device="cuda")
    got = launch.combine(v.unbind(0), s)
    scattered = launch.combine([x.clone() for x in v], s)
    for a, b in zip(got, scattered, strict=True):
        assert torch.equal(a, b)
    for part in (slice(0, 24), slice(T // 2, T // 2 + 8), slice(T - 24, T)):
        few, scores = [x[part] for x in v], s[:, :, part]
        found = got[0][:, part], got[1][:, part]
        for name, *x in zip(
            ("o1", "lse"), found, eager.combine(few, scores), exact(eager.combine, few, scores), strict=True
        ):
            assert_within_budget(f"{name} of {part}", *x)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize(
    ("n", "T", "d"), [(0, 1100, 7168), (5, 3000, 7168), (10, 1100, 2048), (128, 300, 7168), (3, 128, 64)]
)
def test_reads_from_scores(dtype, n, T, d):
    from tilewise.depth.triton import launch

    v = bank(n + 2, T, d, dtype)
    sources, o1, update = list(v[:n].unbind(0)), v[n], v[n + 1]
    s, lse, w = (
        2 * torch.randn(n + 1, T, device="cuda"),
        torch.randn(T, device="cuda"),
        torch.rand(d, device="cuda") + 0.5,
    )
    w = w.to(dtype)
    for first, norm in ((True, w), (False, w), (True, None)):
        slot = torch.zeros_like(update)
        given = (o1, lse) if first else (None, None)
        got = launch.read(*given, sources, update, s, norm, 1e-6, slot=slot)
        assert torch.equal(slot, update)
        low = eager.read(*given, sources, update, s, norm, 1e-6)
        assert_within_budget(
            f"read, o1 {first}, norm {norm is not None}",
            got,
            low,
            exact(eager.read, *given, sources, update, s, norm, 1e-6),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "T", "d"), [(0, 1100, 7168), (2, 1100, 7168), (8, 3000, 7168), (8, 128, 7168), (5, 1100, 2048)]
)
def test_serving_contract(dtype, n, T, d):
    from tilewise.depth.triton import launch

    blocks = bank(n + 1, T, d, dtype).transpose(0, 1).contiguous()
    prefix, delta = (torch.randn(T, d, device="cuda").to(dtype) for _ in range(2))
    weights = [(torch.rand(d, device="cuda") + 0.5).to(dtype) for _ in range(2)]
    args = (torch.randn(d, device="cuda") * d**-0.5).to(dtype), *weights, n, n, 1e-6, 1e-5
    results, kept = [], []
    for function, kind in ((launch.serve_, dtype), (eager.serve_, dtype), (eager.serve_, torch.float64)):
        p, b = prefix.to(kind, copy=True), blocks.to(kind, copy=True)
        wide = [x.to(kind) if torch.is_tensor(x) else x for x in args]
        results.append(function(p, delta.to(kind), b, *wide))
        kept.append((p, b))
    assert torch.equal(kept[0][0], kept[1][0])
    assert torch.equal(kept[0][1], kept[1][1])
    assert_within_budget("y", *results)
