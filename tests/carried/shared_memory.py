"""Bytes of shared memory of kernels as Triton allocates them, with no GPU and without LLVM: half a second a kernel.

    python tests/carried/shared_memory.py "recompute dropout" "none wide dropout" [--capability 86 --limit 101376]

Prints kernel, summed layers, tile, stages, width and bytes of every kernel of the cases. What ptxas takes besides, a
kilobyte at most that the driver keeps for itself, is outside of the limit.
"""

import argparse
import hashlib

import torch
import triton
from carried_cases import CarriedConfig, grads_of, inputs, run
from triton import knobs
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.nvidia.compiler import get_ptx_version_from_options

from tilewise.bench.ahead import compile_for
from tilewise.carried import carried_decode
from tilewise.carried.triton import decode, prepare, settings
from tilewise.carried.triton import launch as kernels
from tilewise.triton.config import Limits
from tilewise.triton.launch import launcher

MEASURED = ("attend", "keys_gradient", "queries_from_e", "keys_from_e", "decode_keys")
OPTIONS = {
    "dropout": {"dropout_p": 0.2},
    "softcap": {"softcap": 3.0},
    "gain": {"scaling": "gain"},
    "differ": {"windows": (32, 130, 32, None)},
}
LAYERS = {"none": 1, "stored": 4, "mixed": 4, "recompute": 4}


class Allocated(Exception):
    """Ends a compilation once shared memory is laid out."""


def stages_until_allocation(backend=None, stages=None, options=None, language=None, capability=None):
    """Triton's hook: in place of its way from TTGIR to LLVM the passes that lay out shared memory."""
    if backend is None:
        return "allocation", hashlib.sha256(b"allocation").hexdigest()

    def allocate(module, metadata):
        manager = ir.pass_manager(module.context)
        passes.ttgpuir.add_combine_tensor_select_and_if(manager)
        more = (False,) if triton.__version__ >= "3.7" else ()
        passes.ttgpuir.add_allocate_warp_groups(manager, *more)
        passes.convert.add_scf_to_cf(manager)
        passes.gluon.add_inliner(manager)
        version = get_ptx_version_from_options(options, backend.target.arch)
        nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, version)
        manager.run(module, "allocate")
        raise Allocated(module.get_int_attr("ttg.shared"))

    stages["llir"] = allocate
    return None


class Bytes:
    """An entry for the launcher: lays out each new kernel's shared memory and prints it."""

    def __init__(self):
        self.seen = set()

    def __call__(self, kernel, grid, *args, **meta):
        name = kernel.fn.__name__
        key = (name, *sorted(map(str, meta.items())))
        if name not in MEASURED or key in self.seen:
            return
        self.seen.add(key)
        try:
            kernel.warmup(*args, grid=grid, **meta)
        except Allocated as found:
            tile = f"{meta['BM']} x {meta['BN']} stages {meta['STAGES']} width {meta['BD']}"
            print(f"{name}: layers {meta.get('COUNT', 1)} tile {tile} shared {found}", flush=True)


def launch_all(words):
    """What a case launches: a plan or decode, options, and "wide" (256), "narrow" (64), "fp32", "rows" (128)."""
    width = 256 if "wide" in words else 64 if "narrow" in words else 128
    dtype = torch.float32 if "fp32" in words else torch.bfloat16
    if "decode" in words:
        H, Tq = (64, 2) if "rows" in words else (20, 1)
        (q, *_), (k, *_), (v, *_) = inputs(layers=1, H=H, Hk=1 if H == 64 else 4, T=Tq, Tk=256, d=width, dtype=dtype)
        with torch.no_grad():
            carried_decode(q, k, v, torch.zeros(1, H, Tq, 256), 1, CarriedConfig(impl="triton"))
        return
    plan = next(word for word in words if word in LAYERS)
    layers = LAYERS[plan]
    options = {name: value for word in words if word in OPTIONS for name, value in OPTIONS[word].items()}
    plan = {} if plan == "none" else {"plan": plan}
    q, k, v = inputs(layers=layers, T=256, H=4, Hk=2, d=width, dtype=dtype)
    gain = [torch.ones(4, requires_grad=True) for _ in q] if "gain" in words else None
    out = run(CarriedConfig(layers=layers, impl="triton", **plan, **options), q, k, v, gain=gain)
    grads_of(out, [*q, *k, *v], out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--limit", type=int, default=settings.SHARED, help="bytes a program may use")
    args = parser.parse_args()
    compile_for(args.capability)
    knobs.runtime.add_stages_inspection_hook = stages_until_allocation
    knobs.compilation.always_compile = True
    limits = Limits.of(divmod(args.capability, 10), args.limit)
    for module in (prepare, kernels, decode):
        module.limits_of = lambda device: limits
    kernels.refusal = decode.refusal = lambda *_: None
    launcher.append(Bytes())
    for case in args.cases:
        print(case, flush=True)
        launch_all(case.split())


if __name__ == "__main__":
    main()
