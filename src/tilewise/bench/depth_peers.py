"""Other projects' operators over depth, called as their own models call them; the user installs them.

``tools/peers.txt`` pins them; fla-core needs einops besides. vLLM's operator is loaded from its source file alone,
``vllm/models/kimi_k3/nvidia/ops/attn_res.py``, which ``--vllm-source`` names.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .depth_systems import Builder, Built, leaves_of, one_read, plain, serving
from .depth_work import EPS, Inputs, Work, update
from .sets import VLLM_SOURCE

__all__ = ["AUTOTUNED", "PEERS", "compile_only", "load_vllm"]

AUTOTUNED = ("fla-core", "fast-attnres", "flash-attn-res")


def _quick_tuning() -> None:
    """Shorter timings in Triton's autotuners: the same choice from 10 ms a configuration."""
    import triton.testing

    for name, quick in (("do_bench", {"warmup": 2, "rep": 10}), ("do_bench_cudagraph", {"rep": 5})):
        own = getattr(triton.testing, name)
        if not isinstance(own, functools.partial):
            setattr(triton.testing, name, partial(own, **quick))


@contextlib.contextmanager
def compile_only() -> Iterator[None]:
    """Autotuners compile all their configurations, side by side, and time none: other processes use the device now.

    The tuning itself happens in the first run of the measurement, when the device belongs to one process.
    """
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner

    with ThreadPoolExecutor(4) as pool, contextlib.ExitStack() as stack:

        def run(self, *args, grid, warmup=False, **kwargs):
            with AsyncCompileMode(pool, ignore_errors=True):
                self.warmup(*args, grid=grid, **kwargs)

        own = Autotuner.run
        stack.callback(setattr, Autotuner, "run", own)
        Autotuner.run = run
        yield


def fla(work: Work, data: Inputs) -> Callable:
    """fla-core's ``fused_attnres`` with its output norm."""
    from fla.ops.attnres import fused_attnres

    _quick_tuning()
    one = torch.ones_like(data.query[0])
    return lambda query, norm, v: fused_attnres(query, v, one, output_rms_weight=norm, rms_eps=EPS)


def liger(work: Work, data: Inputs) -> Callable:
    """liger-kernel's function takes a stacked tensor and no output norm."""
    from liger_kernel.ops.attn_res import LigerAttnResFunction

    one = torch.ones_like(data.query[0])
    return lambda query, norm, v: F.rms_norm(
        LigerAttnResFunction.apply(torch.stack(list(v)), query, one, EPS), (work.d,), norm, EPS
    )


def liger_plain(work: Work, data: Inputs) -> Built:
    """liger-kernel's fused add + RMSNorm as the plain residual."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    def add_norm(u: Tensor, h: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, h = LigerFusedAddRMSNormFunction.apply(u, h, w, eps, 0.0, "llama", False)
        return h, y

    return plain(work, data, add_norm)


def fast(work: Work, data: Inputs) -> Callable:
    """fast-attnres takes a list; no output norm and no key weight."""
    from attnres import attnres

    _quick_tuning()
    return lambda query, norm, v: F.rms_norm(attnres(list(v), query, eps=EPS), (work.d,), norm, EPS)


def flash(work: Work, data: Inputs) -> Built:
    """flash-attn-res: two phases over a bank, its autograd function for training; widths that are powers of two."""
    _quick_tuning()
    leaves, (T, d), L, S = leaves_of(work, data), data.x.shape, work.sublayers, work.block
    if work.train:
        from flash_attn_res.experimental.autograd import BlockAttentionResiduals

        class Sublayer(nn.Module):
            def __init__(self, weight: Tensor) -> None:
                super().__init__()
                self.weight = nn.Parameter(weight)

            def forward(self, h: Tensor) -> Tensor:
                return update(F.rms_norm(h, (d,), self.weight, EPS))

        # Parameters of its own over the same storage: the function differentiates its sublayers itself.
        sublayers = [Sublayer(w) for w in leaves["norm"].detach()[:L].unbind(0)]

        def train() -> Tensor:
            norm = leaves["norm"].unbind(0)
            y = BlockAttentionResiduals.apply(leaves["x"][None], leaves["query"], sublayers, S, EPS, *norm[:L])[0]
            return F.rms_norm(y, (d,), norm[L], EPS)

        return Built(train, leaves)
    from flash_attn_res.ops.phase_1 import phase_1_batched_attention_triton_op as phase1
    from flash_attn_res.ops.phase_2 import phase_2_online_softmax_merge_triton_op as phase2

    blocks = list(work.blocks())
    bank = torch.empty(len(blocks) + 1, 1, T, d, device=data.x.device, dtype=data.x.dtype)
    query, norm = leaves["query"], leaves["norm"].unbind(0)

    def forward() -> Tensor:
        bank[0, 0].copy_(leaves["x"])
        for b, block in enumerate(blocks):
            o, lse = phase1(bank[: b + 1], query[block.start : block.stop], EPS)
            part = None
            for i, l in enumerate(block):
                h = o[i] if part is None else phase2(part, query[l], o[i], lse[i], EPS)
                u = update(F.rms_norm(h, (d,), norm[l], EPS))
                part = u if part is None else part + u
            bank[b + 1].copy_(part)
        return F.rms_norm(phase1(bank, query[L:], EPS)[0][0, 0], (d,), norm[L], EPS)

    return Built(forward, leaves, bank.nbytes)


def load_vllm(path: Path) -> Callable[..., Tensor]:
    """``attn_res`` of vLLM's source file, without vLLM: what it imports from ``vllm`` is stood in for.

    Raises:
        ValueError: the file imports something else from vLLM than Triton, its platform and its custom operators.
    """
    import triton
    import triton.language as tl

    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    platform = SimpleNamespace(
        is_device_capability_family=lambda family: False, is_arch_support_pdl=lambda: hopper, is_cuda=lambda: hopper
    )
    known = {"tl": tl, "triton": triton, "current_platform": platform, "_custom_ops": SimpleNamespace()}
    modules: dict[str, ModuleType] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "vllm":
            continue
        parts = node.module.split(".")
        for n in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:n]), ModuleType(".".join(parts[:n])))
        for name in (alias.name for alias in node.names):
            if name not in known:
                raise ValueError(f"{path} imports {name!r} from {node.module}; expected one of {', '.join(known)}")
            setattr(modules[node.module], name, known[name])
    spec = importlib.util.spec_from_file_location("vllm_attn_res", path)
    module = importlib.util.module_from_spec(spec)
    kept = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        # Triton looks a kernel's globals up by its module.
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        for name, own in kept.items():
            del sys.modules[name]
            if own is not None:
                sys.modules[name] = own
    return module.attn_res


def vllm(work: Work, data: Inputs) -> Built:
    """vLLM's operator of Kimi K3: prefix add, block write, mix and output norm in one launch."""
    if VLLM_SOURCE not in os.environ:
        raise ValueError("vllm needs its source; expected --vllm-source PATH of vllm/…/kimi_k3/nvidia/ops/attn_res.py")
    return serving(load_vllm(Path(os.environ[VLLM_SOURCE])), work, data)


PEERS: dict[str, Builder] = {
    "plain-liger": liger_plain,
    "fla-core": one_read(fla),
    "liger-kernel": one_read(liger),
    "fast-attnres": one_read(fast),
    "flash-attn-res": flash,
    "vllm": vllm,
}
