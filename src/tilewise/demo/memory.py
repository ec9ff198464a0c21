"""Memory of this process and of this machine, in bytes, as the operating system counts it."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import psutil

__all__ = ["METHOD", "available", "peak", "release", "reset_peak", "resident"]

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")

if sys.platform == "linux":
    METHOD = (
        "high-water mark of the process's resident memory (VmHWM, reset before each length), above the loaded model"
    )
else:
    METHOD = "peak resident memory of the process so far (it never falls from length to length), above the loaded model"


def release() -> None:
    """Hand memory that was freed back to the system, where the allocator can (glibc), lest a run take it unseen."""
    gc.collect()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def resident() -> int:
    """Resident memory now."""
    return psutil.Process().memory_info().rss


def reset_peak() -> None:
    """Forget the high-water mark, where the system can (Linux)."""
    if sys.platform == "linux":
        _CLEAR.write_text("5")


def peak() -> int:
    """The high-water mark of resident memory since reset_peak(), or since the process began where it cannot reset."""
    if sys.platform == "linux":
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def available() -> int:
    """Memory that a new process may take: what the machine has left, or a container's limit if that is less."""
    free = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return free
