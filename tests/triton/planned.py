"""What a call allocates and starts, counted on tensors without memory: no kernel runs."""

from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilewise import triton
from tilewise.triton.launch import launcher


class Allocations(TorchDispatchMode):
    """The largest number of bytes that live tensors made inside held at once."""

    def __init__(self):
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        self.live = {key: held for key, held in self.live.items() if not held[0].expired()}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in known and storage._cdata not in self.live:
                    self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


@contextmanager
def counted(started: list | None = None):
    """Inside, kernels are noted instead of started."""
    note = [] if started is None else started
    launcher.append(lambda kernel, grid, *args, **meta: note.append((kernel.__name__, grid, meta)))
    try:
        yield
    finally:
        launcher.pop()


def passes(call) -> dict[str, tuple[float, list]]:
    """{pass: (peak MiB beside inputs and results, kernels started)} of a call on meta tensors."""
    B, H, Tq, _ = call.q.shape
    o = call.q.new_empty(B, Tq, H, call.v.shape[3]).transpose(1, 2)
    lse, do = torch.empty(B, H, Tq, device="meta"), torch.empty_like(o)
    leaves = [call.q, call.k, call.v, *call.tensors]
    grads = [torch.empty_like(x) for x in leaves]
    count, dtype = triton.kept(call)
    kept = torch.empty(count, dtype=dtype, device="meta") if count else None
    found = {}
    for name, run in (
        ("forward", lambda: triton.forward(call, o, lse, kept)),
        ("backward", lambda: triton.backward(call, do, None, o, lse, [True] * len(leaves), grads, kept)),
    ):
        started: list = []
        with counted(started), Allocations() as memory:
            run()
        found[name] = memory.peak / 2**20, started
    return found
