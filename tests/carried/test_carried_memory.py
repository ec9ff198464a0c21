"""Packed buffers: how many each plan makes, when, and that nothing is concatenated, within the operators and around."""

import contextlib

import pytest
import torch
from carried_cases import CarriedConfig, inputs
from meta_launches import on_meta
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.carried import Carry, TileLayout, blocked, carried_attention
from tilewise.carried.triton import launch, settings

TILE = 16
MAKING = ("empty", "new_empty", "zeros", "new_zeros", "full", "ones")
HOSTS = {"blocked": blocked, "triton": launch}


class Made(TorchDispatchMode):
    """Bytes of every packed buffer that was made, and every operator's name."""

    def __init__(self, tile, packed, names):
        super().__init__()
        self.tile, self.packed, self.names = tile, packed, names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.add(func._opname)
        made = func._opname.startswith(MAKING) and isinstance(out, torch.Tensor)
        if made and out.dim() >= 4 and out.shape[-2:] == (self.tile, self.tile):
            self.packed.append(out.untyped_storage().nbytes())
        return out


def watched(monkeypatch, host, tile, packed, names):
    """The work of both operators is watched too: around a call of them a dispatch mode sees the call alone."""
    for name in ("forward", "backward"):
        real = getattr(host, name)

        def work(*args, real=real, name=name):
            names.add(f"within {name}")
            # On meta tensors the host code is called without the operator, and the mode around it is still there.
            with contextlib.nullcontext() if torch._C._len_torch_dispatch_stack() else Made(tile, packed, names):
                return real(*args)

        monkeypatch.setattr(host, name, work)


def made_by(monkeypatch, impl, plan, *, blocks=2, layers=4, T=40, tile=TILE, **sizes):
    """Bytes of the buffers that each layer makes forward, of those made backward, and the operators' names.

    Layer by layer over `blocks` blocks, as a model goes through them.
    """
    packed, names = [], set()
    watched(monkeypatch, HOSTS[impl], tile, packed, names)
    device = "cpu"
    if impl == "triton":
        on_meta(monkeypatch)
        device = "meta"
    config = CarriedConfig(layers=layers, impl=impl, tile=tile, plan=plan)
    q, k, v = inputs(layers=blocks * layers, T=T, dtype=torch.float16, device=device, **sizes)
    carry = Carry(config, layout=TileLayout(config, T, T, device=device))
    outputs, forward = [], []
    for i in range(blocks * layers):
        with Made(tile, packed, names):
            o, carry = carried_attention(q[i], k[i], v[i], carry)
        outputs.append(o)
        forward.append([*packed])
        packed.clear()
    # Of every output at once: the test adds up nothing itself.
    upstream = [torch.ones_like(o) for o in outputs]
    with Made(tile, packed, names):
        torch.autograd.grad(outputs, [*q, *k, *v], upstream)
    assert {"within forward", "within backward"} <= names
    return forward, packed, names


def check(monkeypatch, impl, plan, forward, backward, layers=4, **sizes):
    found, after, names = made_by(monkeypatch, impl, plan, layers=layers, **sizes)
    assert [len(x) for x in found] == 2 * forward
    assert len(after) == 2 * backward
    assert not {"cat", "stack"} & names


# Buffers of scores made by the layers of a block, and of E by its backward pass: of recompute the kernels form one in
# every layer, for some heads at a time, and the any-device path none.
COUNTS = [
    ("stored", 4, [1, 1, 1, 0], {"blocked": 1, "triton": 1}),
    ("mixed", 4, [0, 1, 0, 0], {"blocked": 1, "triton": 1}),
    ("recompute", 4, [0] * 4, {"blocked": 0, "triton": 4}),
    ("stored", 2, [1, 0], {"blocked": 1, "triton": 1}),
    ("mixed", 2, [0, 0], {"blocked": 1, "triton": 1}),
    ("stored", 6, [1, 1, 1, 1, 1, 0], {"blocked": 1, "triton": 1}),
    (None, 1, [0], {"blocked": 0, "triton": 1}),
]


@pytest.mark.parametrize("impl", HOSTS)
@pytest.mark.parametrize(("plan", "layers", "forward", "backward"), COUNTS)
def test_packed_memory_is_made_within_blocks_only_and_nothing_is_concatenated(
    monkeypatch, impl, plan, layers, forward, backward
):
    """Over two blocks: the first layer of a block gets nothing from the last one of the block before, the last one
    leaves nothing, stored keeps layers − 1 buffers and mixed one, and one E serves all layers of a block."""
    check(monkeypatch, impl, plan or "auto", forward, backward[impl], layers)


@pytest.mark.parametrize("impl", HOSTS)
@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("planted", ["cat", "buffer"])
def test_what_an_operator_does_inside_is_seen(monkeypatch, impl, name, planted):
    """A concatenation, or a buffer more, within the operator's own work."""
    real = getattr(HOSTS[impl], name)

    def more(*args):
        q = args[0] if name == "forward" else args[1]
        if planted == "cat":
            torch.cat([q[-1], q[-1]], 1)
        else:
            q[-1].new_zeros(1, 4, 7, TILE, TILE)
        return real(*args)

    monkeypatch.setattr(HOSTS[impl], name, more)
    with pytest.raises(AssertionError):
        check(monkeypatch, impl, "stored", [1, 1, 1, 0], 1)


@pytest.mark.parametrize(("plan", "each"), [("stored", "whole"), ("mixed", "whole"), ("recompute", "parts")])
def test_bytes_of_buffers_on_the_kernels(monkeypatch, plan, each):
    """20 heads, 8,192 tokens: buffers of scores and the E that layers hand on are whole; one that no layer asks for
    takes at most 512 MiB, four times in recompute, one after the other."""
    forward, backward, _ = made_by(
        monkeypatch, "triton", plan, blocks=1, T=8192, tile=128, H=20, Hk=4, d=128,
    )  # fmt: skip
    config = CarriedConfig(plan=plan)
    whole = TileLayout(config, 8192, 8192, device="meta").nbytes(1, 20)
    assert whole > settings.TRANSIENT == 512 << 20
    assert [n for x in forward for n in x] == [whole] * {"stored": 3, "mixed": 1, "recompute": 0}[plan]
    if each == "whole":
        assert backward == [whole]
    else:
        assert len(backward) == 4
        assert all(n <= settings.TRANSIENT for n in backward)
