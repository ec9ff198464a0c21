"""Every depth operator on the GPU, outputs and gradients, against the fp64 oracle, for `depth_kernels.py`."""

import sys
from pathlib import Path

import torch

from tilewise import depth
from tilewise.depth import reference as R
from tilewise.testing import error_budget

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/depth"))
import depth_dense as dense

F32 = torch.float32


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def compare(name, call, leaves, dtype, rows):
    """Outputs and gradients of call(f, leaves, kw) against the fp64 oracle, one row a tensor."""

    def run(f, xs, **kw):
        xs = [None if x is None else x.detach().clone().requires_grad_() for x in xs]
        outs = call(f, xs, kw)
        outs = outs if isinstance(outs, tuple) else (outs,)
        torch.manual_seed(1)
        seeds = [torch.randn(x.shape, device="cuda").to(dtype).to(x.dtype) for x in outs]
        live = [x for x in xs if x is not None]
        grads = torch.autograd.grad(outs, live, seeds, allow_unused=True)
        return [*outs, *(torch.zeros_like(x) if g is None else g for x, g in zip(live, grads, strict=True))]

    got = run(depth, leaves, impl="triton")
    low = run(dense, leaves)
    exact = run(R, [None if x is None else x.double() for x in leaves])
    for k, xs in enumerate(zip(got, low, exact, strict=True)):
        # A gradient in fp32 of a function of bf16 data is judged by bf16's rounding unit.
        b = error_budget(name, xs[0].to(dtype), *xs[1:])
        rows.append({"case": name, "tensor": k, "ok": b.ok, "error": b.error, "allowed": b.allowed, "rel": b.relative})


def check(dtype_name, d, n, S, T, correlation):
    dtype = getattr(torch, dtype_name)
    torch.manual_seed(d + n)
    torch.backends.cuda.matmul.allow_tf32 = False
    base, c = torch.randn(T, d, device="cuda"), correlation
    v = [(c * base + (1 - c * c) ** 0.5 * torch.randn(T, d, device="cuda")).to(dtype) for _ in range(n)]
    w, g = (2 * normal(S, d, dtype=F32) / d**0.5).to(dtype), (1 + 0.2 * normal(S, d, dtype=F32)).to(dtype)
    o = (1 + 0.2 * normal(d, dtype=F32)).to(dtype)
    u, p = normal(T, d, dtype=dtype), normal(T, d, dtype=dtype)
    tag, rows = f"{dtype_name} d={d} n={n} S={S} T={T} corr={c}", []
    kw = {"output_eps": 1e-5}
    calls = {
        "mix_update": (lambda f, x, k: f.mix_update(x[0], x[1], x[5:], *x[2:5], **kw, **k), [u, p, w[0], g[0], o, *v]),
        "mix": (lambda f, x, k: f.mix(x[2:], x[0], x[1], **k), [w[0], g[0], *v]),
        "phase1": (lambda f, x, k: f.phase1(x[2:], x[0], x[1], **k), [w, g, *v]),
    }
    o1, lse = R.phase1(v, w, g)
    calls["phase2"] = (lambda f, x, k: f.phase2(*x, **kw, **k), [u, p, o1[0], lse[0], w[0], g[0], o])
    calls["phase2 second"] = (lambda f, x, k: f.phase2(*x, **kw, **k), [u, None, o1[0], lse[0], w[0], g[0], o])
    calls["phase2_first"] = (lambda f, x, k: f.phase2_first(*x, **k), [o1[0], o])
    for name, (call, leaves) in calls.items():
        compare(f"{name} {tag}", call, leaves, dtype, rows)
    with torch.no_grad():
        bank = torch.stack(v)
        if n == 2:
            near = v[0].clone()
            gap = torch.empty(9 << 30, dtype=torch.int8, device="cuda")
            far = v[1].clone()
            del gap
            same = torch.equal(depth.phase1([near, far], w, g)[0], depth.phase1(bank, w, g)[0])
            rows.append(
                {
                    "case": f"far apart {tag}",
                    "ok": same,
                    "error": 0,
                    "allowed": 0,
                    "rel": far.data_ptr() - near.data_ptr(),
                }
            )
        same = torch.equal(depth.phase1(bank, w, g)[0], depth.phase1(v, w, g)[0])
        again = torch.equal(depth.phase1(bank, w, g)[0], depth.phase1(bank, w, g)[0])
        rows.append({"case": f"bank equals list {tag}", "ok": same, "error": 0, "allowed": 0, "rel": 0})
        rows.append({"case": f"repeatable {tag}", "ok": again, "error": 0, "allowed": 0, "rel": 0})
        b, s = depth.complete(u, p, w, g)
        every = torch.cat([depth.scores(v, w, g), s[:, None]], 1)
        got = depth.phase1_from_scores([*v, b], every)
        low, exact = dense.phase1([*v, b], w, g), R.phase1([x.double() for x in (*v, b)], w.double(), g.double())
        serve = torch.stack([*v, u], 1)
        args = g[0], w[0], o, n, n, 1e-5, 1e-6
        p1, p2, s2 = p.clone(), p.double(), serve.double()
        y = depth.fused_attn_res(p1, u, serve, *args)
        ref = R.fused_attn_res(p2, u.double(), s2, *(x.double() for x in args[:3]), *args[3:])
        lowp = R.fused_attn_res(p.clone(), u, torch.stack([*v, u], 1), *args)
        for name, *xs in (("ahead o1", got[0], low[0], exact[0]), ("ahead lse", got[1], low[1], exact[1]),
                          ("serve", y, lowp, ref)):  # fmt: skip
            e = error_budget(name, *xs)
            rows.append(
                {"case": f"{name} {tag}", "ok": e.ok, "error": e.error, "allowed": e.allowed, "rel": e.relative}
            )
    return rows


SHAPES = ((64, 2, 3, 1000, 0.0), (2304, 8, 16, 1000, 0.0), (5120, 3, 6, 1000, 0.99), (7168, 8, 16, 1000, 0.0))
MANY = (
    ("bfloat16", 2048, 8, 8, 2500, 0.99),
    ("bfloat16", 7168, 3, 20, 1100, 0.99),
    ("bfloat16", 2048, 29, 8, 300, 0.0),
    ("bfloat16", 64, 129, 16, 200, 0.99),
    ("float16", 64, 1, 18, 1000, 0.0),
)
CHECKS = [(t, *shape) for t in ("bfloat16", "float16", "float32") for shape in SHAPES] + list(MANY)
