"""The decode kernel under Triton's interpreter (TRITON_INTERPRET=1) against the dense oracle. Prints a line a case."""

import sys
from functools import partial

import torch
from carried_cases import CarriedConfig, dense, inputs
from interpreted_bf16 import exact_bf16, quicken

from tilewise.carried import carried_decode
from tilewise.carried.triton import decode
from tilewise.mask import Mask
from tilewise.testing import assert_within_budget

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# name: options, inputs' dtype and sizes, splits of the keys, keyword arguments of a step
CASES = {
    "one query": ({}, {"dtype": BF16, "T": 1, "Tk": 300}, 3, {}),
    "one split": ({"layers": 2}, {"dtype": F16, "T": 3, "Tk": 70}, 1, {}),
    "fp16 row": ({}, {"dtype": F16, "T": 1, "Tk": 200}, 2, {"row_dtype": F16}),
    "windows differ": ({"windows": (9, 200, 5)}, {"dtype": F32, "T": 2, "Tk": 300}, 4, {}),
    "not causal": ({"causal": False, "layers": 2}, {"dtype": F32, "T": 5, "Tk": 70, "H": 2}, 2, {}),
    "lengths": ({"causal": False, "layers": 2}, {"dtype": F32, "T": 1, "Tk": 70, "B": 3}, 2,
                {"mask": Mask.lengths([70, 0, 13])}),
    "each its offset": ({"windows": 30}, {"dtype": F32, "T": 1, "Tk": 140, "B": 2}, 2,
                        {"offset": torch.tensor([6, 139])}),
    "mean, softcap": ({"scaling": "mean", "softcap": 2.0}, {"dtype": F32, "T": 2, "Tk": 70}, 2, {}),
    "gain, sink": ({"scaling": "gain", "sink": True}, {"dtype": F32, "T": 2, "Tk": 70}, 2, {}),
    "many splits": ({"layers": 2}, {"dtype": F16, "T": 1, "Tk": 64 * 34 - 5, "H": 2, "Hk": 1}, 34, {}),
    "odd widths": ({"layers": 2}, {"dtype": F16, "T": 1, "Tk": 70, "d": 24, "dv": 40}, 2, {}),
}  # fmt: skip


def steps(config, q, k, v, step, gain, sink, given):
    """O of every layer, and the rows of scores between them."""
    row, outputs, rows = None, [], []
    for i in range(len(q)):
        extra = {"gain": gain[i] if gain else None, "sink": sink[i] if sink else None}
        o, row = step(q[i], k[i], v[i], row, i, config, **{"mask": None, "offset": None, **given, **extra})
        outputs.append(o)
        rows += [] if row is None else [row]
    return outputs, rows


def check(name):
    options, sizes, splits, given = CASES[name]
    config = CarriedConfig(**{"impl": "blocked", "layers": 3} | options)
    q, k, v = ([x.detach() for x in g] for g in inputs(layers=config.layers, **{"H": 4, "Hk": 2, "d": 16} | sizes))
    heads = lambda: [torch.rand(q[0].shape[1]).add(0.3) for _ in q]  # noqa: E731
    gain, sink = heads() if config.scaling == "gain" else None, heads() if config.sink else None
    wide = [[x.double() for x in g] for g in (q, k, v)]
    exact, exact_rows = steps(
        config, *wide, carried_decode, gain, sink, {n: x for n, x in given.items() if n != "row_dtype"}
    )
    if "offset" in given:
        low, _ = steps(config, q, k, v, carried_decode, gain, sink, given)
    else:
        low = dense(config, q, k, v, mask=given.get("mask"), gain=gain, sink=sink)
    kernel = partial(decode.decode, splits=splits)
    got, got_rows = steps(config, q, k, v, kernel, gain, sink, {"row_dtype": None, **given})
    for n, tensors in enumerate(zip(got, low, exact, strict=True)):
        assert_within_budget(f"{name} O{n}", *tensors)
    for a, c in zip(got_rows, exact_rows, strict=True):
        assert ((a.double() - c).norm() / c.norm()).item() < (1e-6 if a.dtype == F32 else 5e-4)
    print(name, flush=True)


def saturated():
    """Scores beyond fp16's range are stored as its largest number, not as infinity, by either path."""
    q, k = (x * torch.ones(1, 1, n, 16, dtype=F16) for x, n in ((80.0, 1), (100.0, 70)))
    k[:, :, 1:] *= -1
    v = torch.randn(1, 1, 70, 16).half()
    for step in (carried_decode, partial(decode.decode, splits=1)):
        row = None
        for layer in range(3):
            given = {"mask": None, "offset": None, "gain": None, "sink": None, "row_dtype": F16}
            o, row = step(q, k, v, row, layer, CarriedConfig(layers=3, impl="blocked"), **given)
            assert torch.equal(o[0, 0, 0], v[0, 0, 0])
            assert row is None or (row.abs() == 65504.0).all()
    print("saturated", flush=True)


if __name__ == "__main__":
    quicken()
    exact_bf16()
    torch.manual_seed(0)
    for name in sys.argv[1:] or [*CASES, "saturated"]:
        saturated() if name == "saturated" else check(name)
