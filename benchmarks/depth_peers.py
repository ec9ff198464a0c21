"""Adapters of other projects' operators, tried without a GPU: their kernels under Triton's interpreter on tiny shapes.

    python benchmarks/depth_peers.py [--systems NAME …] [--vllm-source PATH]

Imports, signatures, argument order and conventions show here: each system runs a pass and a training step and goes
through the gate of ``tilewise bench run --set depth``. Exit status 1 if one does not pass.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import time
import traceback

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner

from tilewise.bench import plain_residual
from tilewise.bench.cells import Cell
from tilewise.bench.depth import DEPTH
from tilewise.bench.depth_peers import PEERS
from tilewise.bench.depth_systems import SYSTEMS, plain
from tilewise.bench.depth_work import Work, gate, inputs
from tilewise.bench.sets import VLLM_SOURCE

SIZE = {"tokens": 6, "d": 64, "sublayers": 7, "block": 3}
BF16_ONLY = ("fast-attnres", "flash-attn-res")
"""The interpreter multiplies no bf16 numbers; these two take nothing else, and convert what they load at once."""


def first_configuration(self, *args, grid, warmup=False, **kwargs):
    """In place of an autotuner, whose timings need a device."""
    config = self.prune_configs(kwargs)[0] if getattr(self, "nargs", None) else self.configs[0]
    return self.fn.run(*args, grid=grid, warmup=False, **{**kwargs, **config.all_kwargs()})


class Index(int):
    """A loop's index, which the interpreter makes a Python number, with the conversion that kernels apply to it."""

    def to(self, dtype) -> Index:
        return self

    def __mul__(self, other) -> Index:
        return Index(int(self) * other)


class Scalar(float):
    """A floating argument, which the interpreter hands over as a Python number, likewise."""

    def to(self, dtype) -> Scalar:
        return self


def scalars(function):
    """The function with its floating arguments as scalars."""
    return lambda *args, **more: function(*(Scalar(x) if type(x) is float else x for x in args), **more)


def indices(*bounds):
    return map(Index, range(*map(int, bounds)))


def stand_in() -> None:
    """Tensors on the CPU pass for CUDA tensors, autotuners take their first configuration."""
    interpreter.range = indices
    if importlib.util.find_spec("fla"):
        importlib.import_module("fla.ops.attnres.fused").range = indices
    if importlib.util.find_spec("liger_kernel"):
        liger = importlib.import_module("liger_kernel.ops.fused_add_rms_norm")
        for name in ("fused_add_rms_norm_forward", "fused_add_rms_norm_backward"):
            setattr(liger, name, scalars(getattr(liger, name)))
        liger.rsqrt = lambda x: tl.rsqrt(x)  # the own one comes from libdevice
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    Autotuner.run = first_configuration
    if importlib.util.find_spec("attnres"):
        from attnres._kernels import fixed_tail_sources as ops

        # Registered for CUDA alone.
        for op in (ops._fixed_tail_sources_forward_with_aux_custom_op, ops._fixed_tail_sources_backward_custom_op):
            op.register_kernel("cpu")(op._init_fn)


def attempt(name: str, case: str) -> dict:
    """Verdicts of one system on one case."""
    passes = DEPTH.passes(case)
    cell = Cell(
        "depth", case, name, SIZE, dtype="bfloat16" if name in BF16_ONLY else "float16", passes=passes, device="cpu"
    )
    truth = DEPTH.truth(cell)
    if name == "plain":
        work, data = Work.of(cell), inputs(cell)
        built = plain(work, data, plain_residual.add_rms_norm)
        y = built.forward()
        found = {"plain.y": y}
        if work.train:
            grads = torch.autograd.grad(y, list(built.leaves.values()), data.dy)
            found |= {f"plain.d{n}": g for n, g in zip(built.leaves, grads, strict=True)}
        else:
            h, out = data.x.clone(), torch.empty_like(data.x)
            plain_residual.add_rms_norm_(data.dy, h, data.norm[0], out, 1e-6)
            assert torch.equal(h, data.x + data.dy)
    else:
        found = DEPTH.build(cell).results(passes[0])
    return {n: gate(t, truth.exact[n], truth.low_error[n], False) for n, t in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=["plain", *SYSTEMS, *PEERS], default=["plain", *PEERS])
    parser.add_argument("--vllm-source")
    options = parser.parse_args()
    if options.vllm_source:
        os.environ[VLLM_SOURCE] = options.vllm_source
    stand_in()
    bad = 0
    for name in options.systems:
        for case in ("prefill", "training"):
            if name == "vllm" and (case == "training" or not options.vllm_source):
                continue
            began = time.time()
            try:
                verdicts = attempt(name, case)
            except Exception:
                bad += 1
                print(f"{name} {case}: failed", flush=True)
                traceback.print_exc(limit=-4)
                continue
            bad += not all(v["ok"] for v in verdicts.values())
            shown = ", ".join(f"{n} {v['error']:.1e} of {v['allowed']:.1e}" for n, v in verdicts.items())
            print(f"{name} {case}: {'ok' if all(v['ok'] for v in verdicts.values()) else 'WRONG'}: {shown}"
                  f" ({time.time() - began:.0f} s)", flush=True)  # fmt: skip
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
