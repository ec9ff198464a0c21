"""What relative_kernels.py checks and times: calls with their sizes, and the two passes of a call as closures."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "triton"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from tilewise.testing import Sizes

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
MECHANISMS = ("none", "t5", "shaw", "deberta", "txl")


def sizes(
    N: int = 1100,
    Tk: int | None = None,
    B: int = 2,
    H: int = 4,
    Hk: int | None = None,
    d: int = 64,
    d_v=None,
    offset=None,
):
    return Sizes(B, H, Hk or H, N, Tk or N, d, d_v or d, offset, published=True)


CHECKS = [
    *((case, "none", dtype, sizes(N), 0.0) for dtype in (HALF, BRAIN)
      for case, N in (("t5", 1024), ("shaw", 1024), ("deberta", 2304), ("txl", 1024))),
    *((case, "none", HALF, sizes(), 0.0) for case in ("none", "t5", "t5_causal", "alibi", "shaw", "wav2vec2_bert",
      "vits", "txl", "deberta", "wavlm", "inkling", "explicit")),
    ("everything", "none", HALF, sizes(600), 0.0),
    # Short sequences share residue tiles, have no saturated ones and keep their projections.
    *((case, mask, dtype, sizes(N, B=B), 0.0) for case, mask, dtype, N, B in (
      ("t5", "none", HALF, 128, 6), ("wav2vec2_bert", "none", HALF, 128, 6), ("shaw", "lengths", HALF, 128, 5),
      ("deberta", "none", HALF, 128, 5), ("deberta", "lengths", BRAIN, 100, 9), ("txl", "none", HALF, 128, 6),
      ("wav2vec2_bert", "causal", HALF, 256, 7), ("deberta", "packed", HALF, 250, 4),
      ("explicit", "none", HALF, 90, 5))),
    ("wav2vec2_bert", "none", HALF, sizes(128, B=5, Hk=2), 0.1),
    *((case, "none", SINGLE, sizes(N), 0.0)
      for case, N in (("t5", 1024), ("shaw", 1100), ("deberta", 2176), ("txl", 600))),
    *(("wav2vec2_bert", mask, HALF, sizes(), 0.0) for mask in ("causal", "window", "lengths", "holes", "packed",
      "intervals", "dense", "causal_padding")),
    *(("deberta", mask, HALF, sizes(2304), 0.0) for mask in ("causal", "lengths", "packed")),
    ("t5", "causal", BRAIN, sizes(1024), 0.0),
    ("txl", "lengths", BRAIN, sizes(), 0.0),
    ("txl", "causal", BRAIN, sizes(), 0.0),
    ("txl", "packed", HALF, sizes(), 0.0),
    ("txl", "holes", HALF, sizes(Hk=2), 0.0),
    ("txl", "none", HALF, sizes(1024, d=128), 0.0),
    ("txl", "none", HALF, sizes(), 0.1),
    ("wav2vec2_bert", "none", HALF, sizes(Hk=2), 0.0),
    ("deberta", "causal", HALF, sizes(1500, Hk=1), 0.0),
    ("wav2vec2_bert", "none", HALF, sizes(700, 1500), 0.0),
    ("txl", "none", HALF, sizes(1500, 700, offset=100), 0.0),
    ("txl", "none", HALF, sizes(d=64, d_v=192), 0.0),
    *(("wav2vec2_bert", "none", HALF, sizes(d=d), 0.0) for d in (16, 80, 128, 256)),
    ("deberta", "none", HALF, sizes(2304, d=96), 0.0),
    ("deberta", "none", HALF, sizes(2304), 0.1),
    ("shaw", "causal", BRAIN, sizes(), 0.2),
    *(("t5", mask, HALF, sizes(1100), 0.0) for mask in ("none", "causal", "window", "lengths", "packed", "holes")),
    ("t5", "none", HALF, sizes(1100, Hk=2), 0.0),
    ("t5", "none", HALF, sizes(700, 1500), 0.0),
    ("t5", "lengths", HALF, sizes(1030, d=128), 0.0),
    *(("none", "none", HALF, sizes(1100, d=d), 0.0) for d in (64, 128)),
    # Many tiles beyond the band, on both sides of it: sums of dS by products, a gate's gradient among them.
    ("t5", "none", HALF, sizes(2304), 0.0),
    ("t5", "none", BRAIN, sizes(2100, 2304, Hk=2), 0.1),
    ("wavlm", "none", HALF, sizes(2304, 2048), 0.0),
    # Wider than 128: the portable kernels with their smallest tiles.
    ("wav2vec2_bert", "none", HALF, sizes(d=192), 0.0),
    *((case, "none", HALF, sizes(d=256), 0.0) for case in ("t5", "deberta", "txl", "shaw", "vits")),
    # Width 128: the forward with a warp for copies, and the backward's tiles of each class.
    *((case, "none", HALF, sizes(N, d=128), 0.0)
      for case, N in (("none", 2304), ("t5", 2304), ("t5", 1152), ("shaw", 2304), ("deberta", 2304), ("vits", 1100))),
    ("t5", "causal", HALF, sizes(2304, Hk=2, d=128), 0.0),
]  # fmt: skip


def label(case, mask, dtype, s, dropout):
    return f"{case} {mask} {str(dtype)[6:]} {s.Tq}x{s.Tk} H{s.H}/{s.Hk} d{s.d}/{s.d_v} p{dropout}"


def check_fields(job, device) -> dict:
    """What a record says of a check."""
    return dict(case=label(*job))


def check_one(job, device):
    """Error budgets of a check; on the meta device, only its launches."""
    from relative_checks import call_of, run, verdicts

    case, mask, dtype, s, dropout = job
    call = call_of(case, s, mask, dtype, device, dropout)
    if device == "meta":
        do = torch.empty(s.B, s.H, s.Tq, s.d_v, dtype=dtype, device=device)
        run(call, do, torch.empty(s.B, s.H, s.Tq, device=device))
        return None
    budgets = verdicts(call)
    do = torch.randn(s.B, s.H, s.Tq, s.d_v, device=device).to(dtype)
    first, second = run(call, do, None), run(call, do, None)
    for one, two in zip((*first[:2], *first[2]), (*second[:2], *second[2]), strict=True):
        assert torch.equal(one, two), "two runs differ"
    return budgets


def timed_call(
    case: str, N: int, device, dtype=HALF, tokens: int = 16384, H: int = 12, d: int = 64, mask=None, **options
):
    """(call, do) of a timed case, drawn on the device; `options` are those of tilewise.Options.

    Transformer-XL has both of its biases, and their gradients are part of the backward.
    """
    from tilewise import Mask, Options
    from tilewise.call import Call
    from tilewise.terms import flatten, lower
    from tilewise.testing import CASES

    s = Sizes(max(1, tokens // N), H, H, N, N, d, d, None, published=True)
    made = CASES[case]
    shapes = {"q": (s.B, H, N, d), "k": (s.B, H, N, d), "v": (s.B, H, N, d), **made.shapes(s)}
    if case == "shaw":
        del shapes["values"]
    x = {
        n: torch.randn(shape, device=device, dtype=dtype) * (1.0 if n in "qkv" else 0.5) for n, shape in shapes.items()
    }
    if case == "t5":
        x["q"] *= 0.125
    if case == "shaw":
        from tilewise import Shaw

        terms, scale = Shaw(x["keys"], left=64, right=64), d**-0.5
    else:
        arguments = made.arguments(x, s)
        terms, scale = arguments["terms"], arguments["scale"]
    content, ports = lower(x["q"], flatten(terms), biases=True)
    return Call(content, x["k"], x["v"], tuple(ports), mask or Mask(), scale, 0, options=Options(**options)), (
        torch.randn_like(x["q"])
    )


def buffers_of(call, keep: bool = True):
    """(o, lse, gradients, what the forward keeps for the backward or None) of a call, not yet filled."""
    from tilewise import triton

    B, H, Tq, _ = call.q.shape
    o = torch.empty(B, Tq, H, call.v.shape[3], dtype=call.q.dtype, device=call.q.device).transpose(1, 2)
    lse = torch.empty(B, H, Tq, device=call.q.device)
    grads = [torch.empty_like(x) for x in (call.q, call.k, call.v, *call.tensors)]
    count, dtype = triton.kept(call)
    kept = torch.empty(count, dtype=dtype, device=call.q.device) if keep and count else None
    return o, lse, grads, kept


def passes_of(call, do, keep: bool = True):
    """(forward, backward) closures over fixed buffers."""
    from tilewise import triton

    o, lse, grads, kept = buffers_of(call, keep)
    return (lambda: triton.forward(call, o, lse, kept)), (
        lambda: triton.backward(call, do, None, o, lse, [True] * len(grads), grads, kept)
    )


def ready(passes):
    """The closures again, after one forward: with an lse that nothing wrote, P would be zeros, infinities and NaN."""
    passes[0]()
    return passes


EXTRA = [
    ("t5", 8192, HALF, 128, False), ("t5", 2048, HALF, 128, False), ("shaw", 8192, HALF, 128, False),
    ("deberta", 8192, HALF, 128, False), ("txl", 8192, HALF, 128, False),
    ("none", 8192, HALF, 128, False),
    *((case, 8192, BRAIN, 64, False) for case in ("t5", "shaw", "deberta", "txl")),
    *((case, 8192, HALF, 64, True) for case in ("none", "t5", "shaw", "txl")),
]  # fmt: skip
"""(case, length, dtype, width, causal) of what is timed beside the usual."""


def extra_call(case, N, dtype, d, causal, device):
    from tilewise import Mask

    return timed_call(case, N, device, dtype=dtype, d=d, mask=Mask.causal() if causal else None)
