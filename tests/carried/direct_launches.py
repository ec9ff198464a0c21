"""Launches without Triton's binder start what Triton would: checked with Triton's own front end and compiler, on a
driver that notes what it is given instead of a GPU. Prints one line a check."""

import contextlib
import sys
from types import SimpleNamespace
from unittest import mock

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.triton import direct
from tilewise.triton.launch import launch

started: list[tuple] = []
LEVEL = tl.constexpr(3)


class Launcher:
    def __init__(self, src, metadata):
        pass

    def __call__(self, x, y, z, stream, function, packed, launch_metadata, enter, leave, *args):
        if enter is not None:
            enter(launch_metadata)
        started.append(((x, y, z), stream, function, packed, args))


class Driver:
    """Loads a kernel as its binary, so that two are the same if their binaries are."""

    launcher_cls = Launcher
    device = 0

    def __init__(self):
        self.utils = SimpleNamespace(
            load_binary=lambda name, kernel, shared, device: (None, (name, kernel, device), 32, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            unload_module=lambda module: None,
        )

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device=None):
        return 7 + (device or 0)


@triton.jit(do_not_specialize=["n"])
def kernel(x, y, d, strides, n, m, f, N: tl.constexpr, FLAG: tl.constexpr, TMA: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i * m + strides[0] * n)
    if TMA:
        value += tl.sum(tl.sum(d.load([0, 0]), 0), 0).to(value.dtype)
    if y is not None:
        value += tl.load(y + i)
    if FLAG:
        value = value * f + LEVEL
    tl.store(x + i * strides[1], value)


def tensor(dtype=torch.float32, first=0):
    return torch.zeros(512, dtype=dtype)[first:]


def described(rows, dtype=torch.float16):
    return TensorDescriptor(torch.zeros(64, 64, dtype=dtype), [64, 64], [64, 1], [rows, 64])


X, BLOCK = tensor(), described(16)
BASE = {"x": X, "y": None, "d": BLOCK, "strides": (64, 1), "n": 5, "m": 3, "f": 1.5}
CONSTANTS = {"N": 16, "FLAG": True, "TMA": True, "num_warps": 4}
VARIATIONS = [
    {},
    {"x": tensor(torch.float16)},
    {"x": tensor(first=1)},
    {"x": tensor(first=4)},
    {"y": tensor()},
    {"y": tensor(first=3)},
    {"d": described(32)},
    {"d": described(16, torch.bfloat16)},
    {"d": None, "TMA": False},
    {"strides": (63, 1)},
    {"strides": (64, 2)},
    {"n": 16},
    {"n": 2**40},
    {"m": 1},
    {"m": 16},
    {"m": 32},
    {"m": 2**40},
    {"f": 2.5},
    {"N": 32},
    {"FLAG": False},
    {"num_warps": 8},
    {"maxnreg": 64},
]


def triton_way(args, meta):
    kernel[(4, 2)](*args, **meta)
    return started.pop()


def no_binder(*args, **kwargs):
    raise AssertionError("Triton's binder was called")


def direct_way(go):
    """What is started by a call like an earlier one, which must not reach Triton."""
    kept, kernel.run = kernel.run, no_binder
    try:
        go()
    finally:
        kernel.run = kept
    return started.pop()


def check_variations():
    """Every dtype, alignment, divisibility, constant and option: the same kernel, with the same arguments."""
    seen = {}
    for twice in range(2):
        for n, change in enumerate(VARIATIONS):
            args = tuple((BASE | {k: v for k, v in change.items() if k in BASE}).values())
            meta = CONSTANTS | {k: v for k, v in change.items() if k not in BASE}
            prepared = seen.get(n)
            if prepared is None:
                prepared = seen[n] = direct.Prepared(kernel, (4, 2), args[3:], meta)
                for go in (lambda: launch(kernel, (4, 2), *args, **meta), lambda: prepared(*args[:3])):  # noqa: B023
                    go()
                    started.pop()
            expected = triton_way(args, meta)
            for go in (lambda: launch(kernel, (4, 2), *args, **meta), lambda: prepared(*args[:3])):  # noqa: B023
                found = direct_way(go)
                assert found[:4] == expected[:4], (twice, change)
                assert all(a is b or a == b for a, b in zip(found[4], expected[4], strict=True)), (twice, change)
    print("variations", len({triton_way_of(n)[2] for n in range(len(VARIATIONS))}))


def triton_way_of(n):
    change = VARIATIONS[n]
    args = tuple((BASE | {k: v for k, v in change.items() if k in BASE}).values())
    return triton_way(args, CONSTANTS | {k: v for k, v in change.items() if k not in BASE})


def check_one_prepared_meets_other_tensors():
    """A launch prepared once takes tensors of other dtypes and alignments."""
    prepared = direct.Prepared(kernel, (4, 2), tuple(BASE.values())[3:], CONSTANTS)
    for _ in range(2):
        for x in (X, tensor(first=1), tensor(torch.float16), tensor(first=2), X):
            args = (x, *tuple(BASE.values())[1:])
            prepared(*args[:3])
            assert started.pop()[:4] == triton_way(args, CONSTANTS)[:4]
    assert len(prepared._started) == 3
    print("other tensors")


def ways(prepared):
    """The same call of the kernel, both ways."""
    args = tuple(BASE.values())
    return [lambda: launch(kernel, (4, 2), *args, **CONSTANTS), lambda: prepared(*args[:3])]


@contextlib.contextmanager
def changed_level():
    global LEVEL
    kept, LEVEL = LEVEL, tl.constexpr(4)
    try:
        yield
    finally:
        LEVEL = kept


def check_devices():
    """Another device has its own kernels and stream."""
    Driver.device = 1
    prepared = direct.Prepared(kernel, (4, 2), tuple(BASE.values())[3:], CONSTANTS)
    for go in (
        lambda: launch(kernel, (4, 2), *BASE.values(), **CONSTANTS),
        lambda: prepared(*tuple(BASE.values())[:3]),
    ):
        for device in (1, 0, 1, 0):
            Driver.device = device
            go()
            found = started.pop()
            assert found[1] == 7 + device
            assert found[2][2] == device
    print("devices")


@contextlib.contextmanager
def on_device(n):
    kept, Driver.device = Driver.device, n
    try:
        yield
    finally:
        Driver.device = kept


def check_tensors_elsewhere():
    """Kernels start on their tensors' device, whichever is current; the first may be described or in a tuple."""
    prepared = direct.Prepared(kernel, (4, 2), tuple(BASE.values())[3:], CONSTANTS)
    assert [direct._away(args) for args in ((X, 1), (BLOCK, 1), ((X, X), 1))] == [-1] * 3
    with (
        mock.patch.object(torch.Tensor, "get_device", return_value=1),
        mock.patch.object(torch.cuda, "current_device", side_effect=lambda: Driver.device),
        mock.patch.object(torch.cuda, "device", on_device),
    ):
        assert [direct._away(args) for args in ((X, 1), (BLOCK, 1), ((X, X), 1))] == [1] * 3
        for go in ways(prepared) * 2:
            go()
            found = started.pop()
            assert (found[1], found[2][2], Driver.device) == (8, 1, 0)
    print("tensors elsewhere")


def check_empty_grid():
    direct.Prepared(kernel, (0, 2), tuple(BASE.values())[3:], CONSTANTS)(*tuple(BASE.values())[:3])
    launch(kernel, (0, 2), *BASE.values(), **CONSTANTS)
    assert not started
    print("empty grid")


def check_settings():
    """Who listens to launches hears all of them; debugging compiles other kernels; a changed global is refused."""
    prepared = direct.Prepared(kernel, (4, 2), tuple(BASE.values())[3:], CONSTANTS)
    heard = []
    for go in ways(prepared):
        go()
        plain = started.pop()
        heard.clear()
        knobs.runtime.launch_enter_hook.add(heard.append)
        go()
        knobs.runtime.launch_enter_hook.remove(heard.append)
        assert len(heard) == 1
        assert started.pop()[2] == plain[2]
        kernel.add_pre_run_hook(lambda *args, **kwargs: heard.append(kwargs["N"]))
        go()
        kernel.pre_run_hooks.clear()
        started.clear()
        assert heard[1:] == [16]
        knobs.runtime.debug = True
        go()
        debugged, expected = started.pop(), triton_way(tuple(BASE.values()), CONSTANTS)
        knobs.runtime.debug = False
        assert debugged[2] == expected[2] != plain[2]
        said = ""
        with changed_level():
            try:
                go()
            except RuntimeError as error:
                said = str(error)
        assert "LEVEL has changed" in said
        go()
        assert started.pop()[2] == plain[2]
    print("settings")


if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    assert direct.SUPPORTED, triton.__version__
    check_variations()
    check_one_prepared_meets_other_tensors()
    check_devices()
    check_tensors_elsewhere()
    check_empty_grid()
    check_settings()
    sys.stdout.flush()
