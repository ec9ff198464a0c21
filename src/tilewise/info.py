"""What this machine can run: versions, devices, and for each implementation and mechanism whether it is usable."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from typing import Any

import torch
from torch import Tensor

from . import mechanisms as t
from .api import IMPLEMENTATIONS, prepared, why_not
from .call import Options
from .mask import Mask
from .terms import Term

__all__ = ["environment", "explain", "mechanisms", "support"]


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    terms: Term | tuple = (),
    mask: Mask | None = None,
    scale: float | None = None,
    offset: int | None = None,
    dropout_p: float = 0.0,
    options: Options | None = None,
) -> dict[str, list[str]]:
    """For each implementation the reasons why it cannot run this call of :func:`tilewise.attention`; empty if it can.

    The order is the one in which ``impl="auto"`` tries them. The call itself is not made; arguments are as there.

    Raises:
        ValueError, TypeError: arguments that :func:`tilewise.attention` refuses, as it does.

    Example:
        >>> q = torch.zeros(1, 2, 16, 8)
        >>> explain(q, q, q)["blocked"]
        []
    """
    call, _ = prepared(q, k, v, terms, mask, scale, offset, dropout_p, options)
    return {name: why_not(name, call) for name in IMPLEMENTATIONS}


def mechanisms(q: Tensor) -> dict[str, Term | tuple]:
    """By name, the terms of every mechanism, of sizes that fit a call with the query q [B, H, N, d] and N keys."""
    B, H, N, d = q.shape
    rows = lambda n, *width: q.new_zeros(H, n, *width)  # noqa: E731
    return {
        "no term": (),
        "T5": t.T5(q.new_zeros(32, H)),
        "T5, causal": t.T5(q.new_zeros(32, H), bidirectional=False),
        "MPNet": t.MPNet(q.new_zeros(32, H)),
        "ALiBi": t.ALiBi(q.new_zeros(H), reach=N - 1),
        "WavLM": t.WavLM(q.new_zeros(320, H), q.new_zeros(B, H, N)),
        "Shaw": t.Shaw(q.new_zeros(73, d), left=64, right=8),
        "VITS": t.VITS(q.new_zeros(9, d), q.new_zeros(9, d), window=4),
        "Transformer-XL": t.TransformerXL(rows(2 * N - 1, d), q.new_zeros(H, d), q.new_zeros(H, d)),
        "DeBERTa v2/v3": t.DeBERTa(rows(512, d), rows(512, d), position_buckets=256, max_relative_positions=512),
        "DeBERTa v1": t.DeBERTaV1(rows(1024, d), rows(1024, d)),
        "Inkling": t.Inkling(q.new_zeros(1024, 16), q.new_zeros(B, H, N, 16)),
    }


def support(device: torch.device | str | None = None) -> list[dict[str, Any]]:
    """One dictionary an implementation and mechanism: ``implementation, mechanism, device, usable, reasons``.

    The call judged is a usual one: 8 heads of width 64, 512 tokens, fp16 on a GPU and fp32 elsewhere; the device is
    the GPU where there is one.

    Raises:
        ValueError: this machine has no such device, or this PyTorch cannot use it.

    Example:
        >>> support("cpu")[0]["implementation"]
        'triton'
    """
    device = _present(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    q = torch.zeros(1, 8, 512, 64, dtype=dtype, device=device)
    lines = []
    for name, terms in mechanisms(q).items():
        for implementation, reasons in explain(q, q, q, terms=terms).items():
            lines.append(
                {"implementation": implementation, "mechanism": name, "device": str(device), "usable": not reasons,
                 "reasons": reasons}
            )  # fmt: skip
    return sorted(lines, key=lambda line: IMPLEMENTATIONS.index(line["implementation"]))


def _present(device: torch.device | str) -> torch.device:
    """The device, if PyTorch can make a tensor there."""
    here = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        here += [f"{kind}:{index}" for index in range(torch.accelerator.device_count())]
    expected = f"expected a device that PyTorch can use here: {', '.join(here)}"
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device {str(device)!r} is not a device's name; {expected}") from None
    # An index of the CPU means nothing to PyTorch; an accelerator's is 0 where it is not given.
    if (found.type if found.type == "cpu" else f"{found.type}:{found.index or 0}") not in here:
        raise ValueError(f"device {str(device)!r} is not on this machine; {expected}")
    return found


def environment() -> dict[str, Any]:
    """Versions and devices: ``versions`` (None where a package is missing), ``python``, ``platform``, ``devices``.

    ``tiles`` is the file of tile shapes that the Triton kernels read, None where they use the built-in ones.
    """
    packages = ("tilewise", "torch", "triton", "transformers", "numpy")
    devices = [{"device": "cpu", "name": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        devices.append(
            {"device": f"cuda:{index}", "name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}",
             "memory_mib": gpu.total_memory // 2**20}
        )  # fmt: skip
    return {
        "versions": {name: _version(name) for name in packages},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": devices,
        "tiles": _tiles(),
    }


def _tiles() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from .triton.tuned import path_in_use

    path = path_in_use()
    return None if path is None else str(path)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    # platform.processor() is empty on Linux.
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
