"""Starting a kernel: one place, so that everything can also be compiled without being run (and without a GPU)."""

from collections.abc import Callable

__all__ = ["cdiv", "launch", "launcher", "next_power_of_2"]


def _run(kernel, grid: tuple[int, ...], *args, **meta) -> None:
    # Triton is imported with the first kernel only.
    from .direct import start

    start(kernel, grid, args, meta)


launcher: list[Callable] = [_run]
"""The last entry starts the kernels; a test puts its own on top to compile ahead of time."""


def launch(kernel, grid: tuple[int, ...], *args, **meta) -> None:
    """Start `kernel` on `grid`; an empty grid starts nothing. See :mod:`.direct` for what this costs the host."""
    if all(grid):
        launcher[-1](kernel, grid, *args, **meta)


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉. Triton's own serves kernels too and costs the host ten times as much."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two ≥ n ≥ 1."""
    return 1 << (n - 1).bit_length()
