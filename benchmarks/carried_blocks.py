"""Blocks of attention that `carried_kernels.py` times, and their kernels compiled side by side before a GPU is used."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tilewise.bench.ahead import compile_for, make_ready
from tilewise.bench.records import environment
from tilewise.carried import CarriedConfig, Carry, TileLayout, carried_attention
from tilewise.carried.triton import decode, settings
from tilewise.carried.triton import launch as kernels
from tilewise.triton.launch import launcher

LAYERS, H, HK, D = 4, 20, 4, 128
CARRIED = ("recompute", "stored", "mixed")
LONGEST = {"keys_gradient": 8, "attend": 4, "decode_keys": 4}
"""Kernels that take long to compile, longer the more layers they sum."""


def made_with(program: str, device: str = "cuda") -> dict:
    """GPU, versions and commit, as records of the sets have them, with the names that older records used."""
    found = environment(program, "carried", device, ("torch", "triton"), {})
    return found | {"torch": torch.__version__, "triton": triton.__version__}


@dataclass(frozen=True)
class Job:
    """One block: its plan (``none``: layers without a carry), dtype, tiles other than the table's and its window.

    ``fill`` 0 sums the query heads of a key head in registers, as long sequences do, 1e9 never.
    """

    plan: str
    dtype: torch.dtype = torch.bfloat16
    tiles: tuple[tuple[str, settings.Shape], ...] = ()
    window: int | None = None
    fill: float = 1e9

    def run(self) -> None:
        """A small block on the CPU: the kernels of any length, given the fill."""
        with tiles_of(self):
            # A window is a constant of the kernels where a sequence is longer.
            q, k, v, G = tensors(256 if self.window is None else 2 * self.window, "cpu", self.dtype)
            outputs = carried_block(config_of(self.plan, self.window), q, k, v)()
            torch.autograd.grad(outputs, [*q, *k, *v], G)


@contextmanager
def tiles_of(job: Job):
    """The tile table and the fill with the job's entries in place of their own."""
    kept, kept_fill = dict(settings.WIDE), settings.FILL
    settings.WIDE.update(job.tiles)
    settings.FILL = job.fill
    try:
        yield
    finally:
        settings.WIDE.update(kept)
        settings.FILL = kept_fill


def config_of(plan: str, window: int | None = None, impl: str = "triton") -> CarriedConfig:
    if plan == "none":
        return CarriedConfig(layers=1, windows=window, impl=impl)
    return CarriedConfig(layers=LAYERS, plan=plan, windows=window, impl=impl)


def tensors(T: int, device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[list[Tensor], ...]:
    """q, k, v of every layer as projections leave them ([B, T, heads, d] in memory), and upstream gradients."""

    def made(heads: int) -> list[Tensor]:
        new = [torch.randn(1, T, heads, D, device=device, dtype=dtype).transpose(1, 2) for _ in range(LAYERS)]
        return [x.requires_grad_() for x in new]

    q, k, v = made(H), made(HK), made(HK)
    return q, k, v, [x.detach() for x in made(H)]


def carried_block(config: CarriedConfig, q, k, v, layout: TileLayout | None = None) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        carry, outputs = Carry(config, layout=layout), []
        for x in zip(q, k, v, strict=True):
            o, carry = carried_attention(*x, carry)
            outputs.append(o)
        return outputs

    return run


def with_cudnn(run: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """The same block, its first layer forward through cuDNN."""

    def switched() -> list[Tensor]:
        settings.CUDNN, kept = True, settings.CUDNN
        try:
            return run()
        finally:
            settings.CUDNN = kept

    return switched


def plain_block(system: str, q, k, v, window: int | None) -> Callable[[], list[Tensor]]:
    """Four layers of PyTorch's own attention: ``cudnn`` or ``flash``; windows are flash's."""
    backend = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[system]

    def run() -> list[Tensor]:
        if window is not None:
            return [flash_window(*x, window) for x in zip(q, k, v, strict=True)]
        with sdpa_kernel(backend):
            return [
                scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True) for x in zip(q, k, v, strict=True)
            ]

    return run


def flash_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """PyTorch's flash kernel with a window, which scaled_dot_product_attention does not pass on."""
    x = [t.transpose(1, 2) for t in (q, k, v)]
    T = q.shape[2]
    o = torch.ops.aten._flash_attention_forward(
        *x, None, None, T, T, 0.0, True, False, window_size_left=window - 1, window_size_right=0
    )
    return o[0].transpose(1, 2)


def _launches(job, act: Callable) -> None:
    """Run a job with `act` in place of every launch."""
    refusals = kernels.refusal, decode.refusal
    kernels.refusal = decode.refusal = lambda *_: None
    launcher.append(act)
    try:
        job.run()
    finally:
        launcher.pop()
        kernels.refusal, decode.refusal = refusals


def _worker() -> None:
    # Without devices autograd starts no threads for them.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    compile_for(90)


def _list(job) -> list[tuple[str, int, str]]:
    """Of every launch the kernel, how many layers it sums, and what Triton compiles for."""
    found: list[tuple[str, int, str]] = []

    def act(kernel, grid, *args, **meta):
        kind = kernel.device_caches[0][-1](*args, debug=False, **meta)[1:]
        found.append((kernel.fn.__name__, meta.get("COUNT", 0), str(kind)))

    _launches(job, act)
    return found


def _compile(task: tuple[object, int]) -> tuple[str, float, str]:
    job, wanted = task
    count, done = -1, ("", 0.0, "")

    def act(kernel, grid, *args, **meta):
        nonlocal count, done
        count += 1
        if count == wanted:
            start, why = time.perf_counter(), ""
            try:
                make_ready(kernel, grid, *args, **meta)
                needs = kernel.warmup(*args, grid=grid, **meta).metadata.shared
                # Compiled it is all the same, and would only fail once it is loaded.
                why = f"needs {needs} bytes of shared memory" if needs > settings.SHARED else ""
            except Exception:
                why = traceback.format_exc()[-600:]
            done = (kernel.fn.__name__, time.perf_counter() - start, why)

    _launches(job, act)
    return done


class Compiler:
    """Processes that compile kernels; made before the GPU is used."""

    def __init__(self, processes: int | None = None) -> None:
        processes = processes or max(1, (os.cpu_count() or 2) - 1)
        self.pool = multiprocessing.get_context("fork").Pool(processes, _worker)
        self.seen: set[tuple] = set()

    def __call__(self, jobs: list, limit: float = 3600.0) -> list[tuple[str, float, str]]:
        """Compile every kernel of the jobs that has not been; (name, seconds, error) of each.

        A job's `run` makes the launches. What is not done within `limit` seconds compiles when it is used.
        """
        began, tasks = time.time(), []
        for job, found in zip(jobs, self.pool.map(_list, jobs, chunksize=1), strict=True):
            for n, key in enumerate(found):
                if key not in self.seen:
                    self.seen.add(key)
                    tasks.append((LONGEST.get(key[0], 0) + key[1], len(tasks), (job, n)))
        done: list[tuple[str, float, str]] = []
        # The longest first, so that all end together.
        results = self.pool.imap_unordered(_compile, [task for *_, task in sorted(tasks, key=lambda t: (-t[0], t[1]))])
        for _ in tasks:
            try:
                done.append(results.next(timeout=max(1.0, limit - (time.time() - began))))
            except multiprocessing.TimeoutError:
                break
        return done

    def close(self) -> None:
        """End the processes, with what they still compile."""
        self.pool.terminate()
        self.pool.join()
