"""Starting a compiled kernel without Triton's own way to it, which takes the host as long as a short kernel the GPU.

Triton binds a call's arguments to names, makes text of its options and looks a compiled kernel up by all of that, every
time. Here the look-up is by the numbers that decide: what Triton itself specializes on for every argument (its own
function says: dtype, alignment by 16, integers that are 1 or multiples of 16, the block of a descriptor), the constants
and options, the device and the settings that Triton reads. What was not seen before, and every call while something
listens to launches, goes Triton's way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from . import launch as starting

try:
    from triton._C.libtriton import native_specialize_impl
except ImportError:
    native_specialize_impl = None

__all__ = ["Prepared", "start"]

KNOWN = ("3.6.", "3.8.")
"""Triton versions whose way to a compiled kernel is the one written here."""

SUPPORTED = native_specialize_impl is not None and triton.__version__.startswith(KNOWN)


class _Kernel:
    """A kernel's parameters: those filled in at run time come first, constants after them."""

    def __init__(self, kernel: JITFunction) -> None:
        self.kernel = kernel
        runtime = [p for p in kernel.params if not p.is_constexpr]
        self.count = len(runtime)
        self.direct = (
            [p.is_constexpr for p in kernel.params] == sorted(p.is_constexpr for p in kernel.params)
            and not any(p.annotation_type or p.is_const or p.has_default for p in runtime)
        )  # fmt: skip
        self.constants = [p.name for p in kernel.params if p.is_constexpr]
        self.specialize = [not p.do_not_specialize for p in runtime]
        self.align = [not p.do_not_specialize_on_alignment for p in runtime]
        self.backends: dict[int, object] = {}
        self.started: dict[tuple, Callable] = {}

    def kinds(self, device: int, args: tuple) -> tuple:
        """What Triton specializes the first arguments on."""
        backend = self.backends.get(device)
        if backend is None:
            backend = self.backends[device] = self.kernel.device_caches[device][3]
        # Of a descriptor Triton makes a name, from these two; that takes it four times as long.
        return tuple(
            [
                (x.base.dtype, *x.block_shape)
                if type(x) is TensorDescriptor
                else native_specialize_impl(backend, x, False, specialize, align)
                for x, specialize, align in zip(args, self.specialize, self.align, strict=False)
            ]
        )

    def starter(self, compiled: object, meta: dict) -> Callable | None:
        """(grid, stream, arguments) ↦ True once the kernel has started, False if Triton has to look again."""
        if type(compiled) is not CompiledKernel or any(name not in meta for name in self.constants):
            return None
        tail = tuple(meta[name] for name in self.constants)
        run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
        # Triton refuses to start a kernel whose globals have changed.
        watched = [(where, name, where.get(name)) for (name, _), (_, where) in self.kernel.used_global_vals.items()]

        def begin(grid: tuple[int, int, int], stream: int, args: tuple) -> bool:
            for where, name, value in watched:
                if where.get(name) is not value:
                    return False
            run(*grid, stream, function, packed, None, None, None, *args, *tail)
            return True

        return begin


_kernels: dict[JITFunction, _Kernel] = {}


def _known(kernel: object) -> _Kernel | None:
    """None for what Triton alone can start: interpreted kernels, parameters in another order, other versions."""
    found = _kernels.get(kernel)
    if found is None:
        if not SUPPORTED or type(kernel) is not JITFunction:
            return None
        found = _kernels[kernel] = _Kernel(kernel)
    return found if found.direct else None


def _listened(kernel: JITFunction) -> bool:
    """Whether something wants to see launches, or to change how kernels are compiled."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return bool(kernel.pre_run_hooks) or runtime.add_stages_inspection_hook is not None


def _settings(kernel: JITFunction) -> tuple:
    return knobs.runtime.debug, knobs.compilation.instrumentation_mode, kernel.debug


def _whole(grid: tuple[int, ...]) -> tuple[int, int, int]:
    return (*grid, 1, 1)[:3]


def _away(args: tuple) -> int:
    """The GPU of a kernel's first tensor if another one is current, else −1: Triton starts kernels on the current."""
    x = args[0][0] if type(args[0]) is tuple else args[0]
    at = (x if isinstance(x, torch.Tensor) else x.base).get_device()
    return at if at >= 0 and at != torch.cuda.current_device() else -1


def start(kernel: object, grid: tuple[int, ...], args: tuple, meta: dict) -> None:
    """``kernel[grid](*args, **meta)`` on the tensors' GPU, directly if such a call was made before."""
    if (at := _away(args)) >= 0:
        with torch.cuda.device(at):
            return start(kernel, grid, args, meta)
    known = _known(kernel)
    if known is None or len(args) != known.count or _listened(kernel):
        kernel[grid](*args, **meta)
        return None
    active = driver.active
    device = active.get_current_device()
    key = (device, _settings(kernel), known.kinds(device, args), *meta.items())
    begin = known.started.get(key)
    if begin is None or not begin(_whole(grid), active.get_current_stream(device), args):
        found = known.starter(kernel[grid](*args, **meta), meta)
        if found is not None:
            known.started[key] = found


class Prepared:
    """A launch of which only the tensors change: all else is looked at once.

    Args:
        kernel: tensors and descriptors are its first parameters.
        grid: programs; an empty grid starts nothing.
        numbers: the other arguments that are not constants, in order.
        meta: constants and options by name.

    Called with the tensors.
    """

    __slots__ = ("_known", "_started", "_whole", "grid", "kernel", "meta", "numbers")

    def __init__(self, kernel: object, grid: tuple[int, ...], numbers: tuple, meta: dict) -> None:
        self.kernel, self.grid, self.numbers, self.meta = kernel, grid, numbers, meta
        self._known, self._whole = _known(kernel), _whole(grid)
        self._started: dict[tuple, Callable] = {}

    def __call__(self, *tensors) -> None:
        kernel, known, args = self.kernel, self._known, (*tensors, *self.numbers)
        if starting.launcher[-1] is not starting._run or known is None or len(args) != known.count or _listened(kernel):
            starting.launch(kernel, self.grid, *args, **self.meta)
            return
        if 0 in self.grid:
            return
        if (at := _away(tensors)) >= 0:
            with torch.cuda.device(at):
                return self(*tensors)
        active = driver.active
        device = active.get_current_device()
        key = (device, _settings(kernel), known.kinds(device, tensors))
        begin = self._started.get(key)
        if begin is None or not begin(self._whole, active.get_current_stream(device), args):
            found = known.starter(kernel[self.grid](*args, **self.meta), self.meta)
            if found is not None:
                self._started[key] = found
