"""torch.compile with Inductor on a CUDA device: operators, models and serving steps around the Triton kernels."""

import pytest
import torch
from torch._dynamo.utils import counters

from tilewise import depth
from tilewise.depth import Schedule
from tilewise.nn import AttnRes, Decoder, DecoderConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # The compiler's own warnings are no errors of this package.
    pytest.mark.filterwarnings("default"),
]
CUDA, BACKEND = "cuda", "inductor"


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()


def close(got, expected, dtype):
    """Fusing the update with its neighbours rounds it elsewhere: within a few units of the largest value."""
    unit = torch.finfo(dtype).eps
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=16 * unit * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_are_one_graph_for_any_number_of_tokens(dtype):
    d = 256

    def step(v0, v1, w, g, o, u, p):
        o1, lse = depth.phase1([v0, v1], w, g)
        y0 = depth.phase2_first(o1[0], o)
        p, y1 = depth.phase2(u * y0, None, o1[1], lse[1], w[1], g[1], o)
        p, y2 = depth.mix_update(u * y1, p, [v0, v1], w[2], g[2], o)
        b, _ = depth.complete(u, p, w, g)
        return depth.mix([v0, v1, b], w[2]) + y2

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=BACKEND)
    for T in (40, 56, 1100):
        v0, v1, u, p = (torch.randn(T, d, device=CUDA).to(dtype).requires_grad_() for _ in range(4))
        w = (torch.randn(3, d, device=CUDA) * d**-0.5).to(dtype).requires_grad_()
        g, o = (torch.rand(s, device=CUDA).add(0.5).to(dtype).requires_grad_() for s in ((3, d), (d,)))
        leaves = [v0, v1, w, g, o, u]
        expected, got = step(*leaves, p), compiled(*leaves, p)
        close([got], [expected], dtype)
        dy = torch.randn_like(expected)
        close(torch.autograd.grad(got, leaves, dy), torch.autograd.grad(expected, leaves, dy), dtype)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("kind", ["block", "full"])
def test_a_model_trains_compiled(kind):
    config = DecoderConfig(vocab=256, d=128, layers=4, heads=4, kv_heads=2, hidden=256, residual=kind, block=3)
    model = Decoder(config).to(CUDA)
    with torch.no_grad():
        model.residual.query.normal_(std=0.1)
    tokens = torch.randint(256, (2, 33), device=CUDA)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model.loss(tokens), parameters)
    got = torch.autograd.grad(torch.compile(model.loss, fullgraph=True, backend=BACKEND)(tokens), parameters)
    for a, b in zip(got, expected, strict=True):
        # TF32 is off: what is left is the order of sums.
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-7
    assert counters["stats"]["unique_graphs"] == 1


@torch.no_grad()
def test_a_decode_step_compiled_with_cuda_graphs():
    schedule, d, dtype = Schedule.block(12, 5, one_pass_sources=0), 512, torch.bfloat16
    residual = AttnRes(d, schedule, device=CUDA, dtype=dtype)
    residual.query.normal_(std=0.1)
    norms = [torch.ones(d, device=CUDA, dtype=dtype) for _ in range(13)]

    def step(x):
        stream = residual(x, norms=norms[:-1])
        for l in range(12):
            stream.write(l, torch.tanh(stream.read(l)))
        return stream.output(norms[-1])

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn(8, d, device=CUDA).to(dtype)
        close([compiled(x).clone()], [step(x)], dtype)
