"""Making kernels ready before they are launched: compiled, and with the C function that starts each.

Triton up to 3.7 builds that function for every new signature with the system's compiler when a kernel is first
launched: 0.2 to 0.8 s each, ten of them for one attention call, which compiling ahead alone leaves to the first call.
"""

from __future__ import annotations

from ctypes.util import find_library

__all__ = ["compile_for", "make_ready"]


def compile_for(capability: int) -> None:
    """From now on Triton compiles for a GPU of this compute capability, which need not be there, and starts nothing.

    Args:
        capability: ten times the number, 90 for an H100 or H200.
    """
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", capability, 32))
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device=None: 0)
        is_active = staticmethod(lambda: True)

    driver.set_active(Driver())


def make_ready(kernel, grid: tuple[int, ...], *args, **meta) -> None:
    """An entry for :data:`tilewise.triton.launch.launcher` that starts nothing; needs no GPU context.

    Args:
        kernel: a Triton or Gluon kernel.
        grid, args, meta: as it would be launched; tensors may be meta tensors.
    """
    made = kernel.warmup(*args, grid=grid, **meta)
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher") and find_library("cuda"):
        driver.CudaLauncher(made.src, made.metadata)
