"""The kernels' host code on meta tensors, which hold nothing: what it launches and allocates, without a GPU."""

from types import SimpleNamespace

import torch

from tilewise.carried.config import Options
from tilewise.carried.triton import decode, launch
from tilewise.triton import launch as starting


def on_meta(monkeypatch):
    """Host code runs on meta tensors; returns a list that gets (name, grid, constants) of every launch."""
    monkeypatch.setattr(launch, "refusal", lambda *_: None)
    monkeypatch.setattr(decode, "refusal", lambda *_: None)
    launches = []
    record = lambda kernel, grid, *_, **meta: launches.append((kernel.fn.__name__, grid, meta))  # noqa: E731
    monkeypatch.setattr(starting, "launcher", [record])
    count = len(Options._fields) + 1
    for name in ("forward", "backward"):
        # The operators themselves would only say the results' shapes for meta tensors.
        host = getattr(launch, name)
        real = SimpleNamespace(default=lambda *x, host=host: host(*x[:-count], Options.of(x[-count:-1])))
        monkeypatch.setattr(torch.ops.tilewise, f"carried_{name}", real)
    return launches
