"""Which plan a block runs: decided by length, windows, free memory and device, and said aloud."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from .arguments import check_flag, check_integer, require
from .config import DTYPES, CarriedConfig
from .layout import TileLayout
from .triton.settings import MOST, TRANSIENT

__all__ = ["Decision", "choose_plan", "free_memory"]

SHARE = 0.5
"""How much of the free memory carries may take: the rest is for activations that are not allocated yet."""


class Decision(NamedTuple):
    """What was picked and why.

    Attributes:
        plan: ``recompute``, ``stored`` or ``mixed``.
        impl: ``triton``, ``blocked`` or ``reference``.
        reason: one sentence.
        saved_bytes: scores kept for the backward pass by the blocks that are alive at once.
        transient_bytes: the gradient of the carry, and what a forward pass holds besides.
    """

    plan: str
    impl: str
    reason: str
    saved_bytes: int
    transient_bytes: int

    def __str__(self) -> str:
        mib = 2.0**20
        return (
            f"{self.plan} on {self.impl}: {self.reason} "
            f"(saved {self.saved_bytes / mib:.1f} MiB, transient {self.transient_bytes / mib:.1f} MiB)"
        )


_beyond: dict[torch.device, tuple[int, int]] = {}
"""Of each GPU: bytes that PyTorch held, and bytes free beside them, when the driver was last asked."""


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated on `device` now, or None where the platform does not say.

    Of a GPU: what PyTorch's allocator holds unused, and what the driver has free. The driver, which may take as long as
    a layer and hold up what is being enqueued, is asked again only once the allocator has taken or given memory.
    """
    if device.type == "cuda":
        # Of the two ways to read the same numbers the one that does not sort all of them by name.
        now = torch.cuda.memory_stats_as_nested_dict(device)
        if not now:
            return torch.cuda.mem_get_info(device)[0]
        held, used = (now[name]["all"]["current"] for name in ("reserved_bytes", "allocated_bytes"))
        found = _beyond.get(device)
        if found is None or found[0] != held or used > held:
            found = _beyond[device] = (held, torch.cuda.mem_get_info(device)[0])
        return found[1] + held - used
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def choose_plan(
    config: CarriedConfig, layout: TileLayout, B: int, H: int, *, dtype: torch.dtype, device: torch.device,
    training: bool = True, impl: str = "blocked", free: int | None = None, refusal: str | None = None,
) -> Decision:  # fmt: skip
    """Pick the plan of a block.

    One packed buffer holds b = B · H · live tiles · tile² scores. Of an L-layer block, ``stored`` keeps L − 1 buffers,
    ``mixed`` keeps one and forms the rest again, ``recompute`` keeps none and forms every earlier layer's scores again
    in every layer (its kernels use at most 512 MiB for E, a part of the heads at a time). The first whose saved and
    transient bytes fit in half of the free memory is taken, in that order, since each saves matrix products over the
    next. The kernels sum the scores of four layers at most, so longer blocks are ``stored`` there, whatever is free.
    Plans differ in rounding: name one where runs have to be bitwise equal although the free memory is not.

    Args:
        config: options; a plan other than ``auto`` is taken as it is.
        layout: the live tiles.
        B, H: batch and query heads.
        dtype, device: of the queries.
        training: whether a backward pass follows.
        impl: what runs the plan.
        free: bytes free; default :func:`free_memory`.
        refusal: with ``impl="triton"`` why the kernels run ``stored`` and no other plan, with ``blocked`` why they do
            not run; part of the reason.

    Raises:
        ValueError, TypeError: an argument of another type or outside its range, named.

    Example:
        >>> config = CarriedConfig(tile=16)
        >>> choose_plan(config, TileLayout(config, 64, 64), 1, 2, dtype=torch.bfloat16, device=torch.device("cpu"),
        ...             free=10**9).plan
        'stored'
    """
    require("config", config, CarriedConfig)
    require("layout", layout, TileLayout)
    require("device", device, torch.device, 'torch.device("cuda")')
    check_integer("B", B)
    check_integer("H", H)
    check_flag("training", training)
    if dtype not in DTYPES:
        raise TypeError(f"dtype is {dtype!r}; expected fp16, bf16, fp32 or fp64")
    if impl not in ("triton", "blocked", "reference"):
        raise ValueError(f"impl is {impl!r}; expected triton, blocked or reference")
    if free is not None:
        check_integer("free", free, 0, none=", or None for what is free now")
    carry, grad = carry_dtypes(config, dtype)
    one = layout.nbytes(B, H, carry.itemsize)
    e = layout.nbytes(B, H, grad.itemsize) if training and not config.detach else 0
    blocks = config.blocks if training else 1
    size = {
        "stored": ((config.layers - 1) * one * blocks if training else 0, e if training else 2 * one),
        "mixed": (one * blocks if training and config.layers > 2 else 0, e if training else one),
        # The kernels form E for some heads at a time even where no layer asks for it.
        "recompute": (0, min(e or one, TRANSIENT) if training and impl == "triton" else 0),
    }
    plan, reason = _picked(config, size, training, impl, device, free, refusal)
    if impl == "blocked" and refusal is not None:
        reason = f"{reason}; the kernels cannot run it: {refusal}"
    return Decision(plan, impl, reason, *size[plan])


def _picked(
    config: CarriedConfig, size: dict[str, tuple[int, int]], training: bool, impl: str, device: torch.device,
    free: int | None, refusal: str | None,
) -> tuple[str, str]:  # fmt: skip
    """The plan and why, of plans that save and use `size` bytes."""
    if config.plan != "auto":
        return config.plan, "asked for"
    if config.layers == 1:
        return "recompute", "a block of one layer carries nothing"
    if impl == "reference":
        return "recompute", "the dense reference keeps whole score matrices"
    if impl == "triton" and refusal is None and config.layers > MOST:
        refusal = f"layers is {config.layers}; the kernels sum up to {MOST}"
    if impl == "triton" and refusal is not None:
        return "stored", f"the only plan that the kernels run: {refusal}"
    if torch.compiler.is_compiling():
        return "recompute", "free memory cannot be read while a graph is traced; name a plan to store scores"
    free = free_memory(device) if free is None else free
    if free is None:
        return "recompute", f"free memory of {device.type} is not known"
    budget, gib = SHARE * free, 2.0**30
    blocks = config.blocks if training else 1
    refused = []
    for plan in ("stored", "mixed") if training else ("mixed",):
        need = sum(size[plan])
        if need <= budget:
            why = f"{need / gib:.2f} GiB for {blocks} block(s) fit in half of the {free / gib:.2f} GiB free"
            return plan, "; ".join([*refused, why])
        refused.append(f"{plan} needs {need / gib:.2f} GiB")
    return "recompute", f"{', '.join(refused)}: more than half of the {free / gib:.2f} GiB free"


def carry_dtypes(config: CarriedConfig, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """What Z and E are stored in for inputs of `dtype`."""
    half = dtype in (torch.float16, torch.bfloat16)
    return config.carry_dtype or (torch.float16 if half else dtype), config.grad_dtype or dtype
