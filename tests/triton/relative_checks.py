"""One attention call through the Triton kernels, forward and backward, against the fp64 oracle; any device."""

from contextlib import nullcontext
from dataclasses import replace

import torch

from tilewise import Mask, Options, triton
from tilewise.call import Call
from tilewise.reference import attention_reference
from tilewise.terms import Port, flatten, lower
from tilewise.testing import CASES, MASKS, Sizes, error_budget


def call_of(
    case: str,
    sizes: Sizes,
    mask: str,
    dtype,
    device,
    dropout: float = 0.0,
    seed: int = 0,
    options: Options | None = None,
    biases: bool = True,
) -> Call:
    """The lowered call of a case; `mask` names an entry of MASKS, `biases` leaves Transformer-XL's to the kernels."""
    case = CASES[case]
    inputs = case.inputs(sizes, dtype, device, seed)
    arguments = case.arguments(inputs, sizes)
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    content, ports = lower(q, flatten(arguments["terms"]), biases=biases)
    offset = sizes.Tk - sizes.Tq if sizes.offset is None else sizes.offset
    chosen = MASKS[mask](sizes, "cpu").to(torch.device(device)) if isinstance(mask, str) else mask
    key = torch.tensor([0x1234_5678_9ABC], dtype=torch.int64, device=device) if dropout else None
    return Call(content, k, v, tuple(ports), chosen, arguments["scale"], offset, dropout, key, options or Options())


def dense(call: Call, do, dlse, dtype):
    """O, lse and every gradient by the dense reference in `dtype`."""
    leaf = lambda x: None if x is None else x.detach().to(dtype).requires_grad_()  # noqa: E731
    q, k, v = leaf(call.q), leaf(call.k), leaf(call.v)
    ports = [replace(p, **{name: leaf(getattr(p, name)) for name in p.names}) for p in call.ports]
    content, summed = q, []
    for p in ports:
        if p.content is not None:
            content = q + p.content[:, None]
        left = p.left if p.bias is None and p.content is None else q if p.bias is None else q + p.bias[:, None]
        summed.append(Port(p.kind, p.rows, p.table, left))
    o, lse = attention_reference(content, k, v, summed, call.mask, call.scale, call.offset, call.dropout_p, call.seed)
    seen = torch.isfinite(lse)
    leaves = [q, k, v, *(t for p in ports for t in p.tensors)]
    total = (o * do.to(dtype)).sum() + (lse.masked_fill(~seen, 0.0) * dlse.to(lse.dtype)).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return o, lse, [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]


def run(call: Call, do, dlse, need=None):
    """O, lse and the gradients by the kernels, into buffers that hold NaN."""
    B, H, Tq, _ = call.q.shape
    nan = float("nan")
    o = torch.full((B, Tq, H, call.v.shape[3]), nan, dtype=call.q.dtype, device=call.q.device).transpose(1, 2)
    lse = torch.full((B, H, Tq), nan, device=call.q.device)
    count, dtype = triton.kept(call)
    kept = torch.full((count,), nan, dtype=dtype, device=call.q.device) if count else None
    triton.forward(call, o, lse, kept)
    before = None if kept is None else kept.clone()
    leaves = [call.q, call.k, call.v, *call.tensors]
    need = need or [True] * len(leaves)
    grads = [torch.full_like(x, nan) if n else x.new_empty(0) for x, n in zip(leaves, need, strict=True)]
    triton.backward(call, do, dlse, o, lse, need, grads, kept)
    if kept is not None and not kept.is_meta:
        assert torch.equal(kept.view(torch.uint8), before.view(torch.uint8)), "the backward changed what was kept"
    return o, lse, grads


def names_of(call: Call) -> list[str]:
    ports = [f"{p.kind}{n}.{name}" for n, p in enumerate(call.ports) for name in p.names]
    return ["dq", "dk", "dv", *(f"d{name.removesuffix('.table')}" for name in ports)]


def verdicts(call: Call, factor: float = 2.0, products=nullcontext):
    """A budget for O, lse and each gradient; raises AssertionError where lse is infinite in the wrong places.

    `products` makes a context inside which dense PyTorch forms its products as those under test are formed.
    """
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(call.q.device)  # noqa: E731
    B, H, Tq, _ = call.q.shape
    do = draw(B, H, Tq, call.v.shape[3]).to(call.q.dtype)
    dlse = draw(B, H, Tq)
    # Rows that see nothing have no gradient of lse here; the kernels must be given none.
    exact_o, exact_lse, exact = dense(call, do, dlse, torch.float64)
    seen = torch.isfinite(exact_lse)
    dlse = dlse * seen
    with products():
        low_o, low_lse, low = dense(call, do, dlse, call.q.dtype)
    o, lse, grads = run(call, do, dlse)
    assert torch.equal(torch.isfinite(lse), seen), "lse is infinite in the wrong places"
    flat = lambda x: x.masked_fill(~seen, 0.0)  # noqa: E731
    out = [error_budget("o", o, low_o, exact_o, factor=factor)]
    # lse is fp32 whatever the inputs; its error is that of the scores, which the inputs' dtype decides.
    to = call.q.dtype
    out.append(error_budget("lse", flat(lse).to(to), flat(low_lse).to(to), flat(exact_lse), factor=factor))
    out += [
        error_budget(name, got, small, big, factor=factor)
        for name, got, small, big in zip(names_of(call), grads, low, exact, strict=True)
    ]
    return out


def masks_of(*names: str):
    return [Mask() if n == "none" else n for n in names]
