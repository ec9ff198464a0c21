"""Making a kernel ready before it is launched: compiled, and with the C function that starts it.

Triton up to 3.7 builds that function for every new signature with the system's compiler when a kernel is first
launched: 0.2 to 0.8 s each, ten of them for one attention call, which compiling ahead alone leaves to the first call.
"""

from __future__ import annotations

from ctypes.util import find_library

__all__ = ["make_ready"]


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
