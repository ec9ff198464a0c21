"""Compile every depth kernel for sm_90 without a GPU and print a JSON line each; run by `test_depth_kernels.py`."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.runtime.jit import JITFunction

from tilewise.bench import plain_residual
from tilewise.bench.ahead import compile_for
from tilewise.depth.triton import config, launch, sources

RESULTS = []


def resources(cubin: bytes) -> dict:
    """Registers and spilled bytes (local memory) of a kernel, from its machine code."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    fields = dict(x.split(":") for x in text.split("Function")[-1].split("\n")[1].split() if x.count(":") == 1)
    return {"registers": int(fields["REG"]), "stack": int(fields["STACK"]), "local": int(fields["LOCAL"])}


def compile_only(kernel, grid):
    def run(*args, **meta):
        compiled = kernel.warmup(*args, grid=grid, **meta)
        name = kernel.fn.__name__
        keys = ("num_warps", "BT", "BS", "BN", "BK", "BD", "STAGES", "N", "TABLE", "PREFIX", "LOW", "ADD", "SPLIT")
        row = {"kernel": name, **{k: meta[k] for k in keys if k in meta}, "shared": compiled.metadata.shared}
        row |= resources(compiled.asm["cubin"])
        row["wgmma"] = "wgmma" in compiled.asm["ptx"]
        row["wide_loads"] = ".v4.b32" in compiled.asm["ptx"] or "cp.async" in compiled.asm["ptx"]
        RESULTS.append(row)
        print(json.dumps(row), flush=True)

    return run


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def main(dtype: torch.dtype, d: int, T: int, n: int, S: int) -> None:
    compile_for(90)
    JITFunction.__getitem__ = compile_only
    launch_all(dtype, d, T, n, S)


def launch_all(dtype: torch.dtype, d: int, T: int, n: int, S: int) -> None:
    """Every kernel once, in every form that operators and streams ask for at these sizes."""
    even_step = sources.even_step
    x, f32 = (lambda *s: empty(*s, dtype=dtype)), torch.float32
    q, w = empty(d, dtype=f32), x(d)
    v = [x(T, d) for _ in range(n)]
    u, p = x(T, d), x(T, d)
    launch.mix_fwd(v, u, p, q, w, 1e-6, 1e-6)
    launch.mix_bwd(u, p, v, p, q, w, 1e-6, 1e-6)
    launch.phase2_fwd(u, p, u, empty(T, dtype=f32), q, w, 1e-6, 1e-6)
    launch.phase2_fwd(None, None, u, None, None, w, 1e-6, 1e-6)
    launch.phase2_from_scores(u, p, v[:3], empty(3, T, dtype=f32), q, w, 1e-6, 1e-6)
    launch.phase2_bwd(u, p, p, u, empty(T, dtype=f32), q, w, 1e-6, 1e-6)
    qs, do = empty(S, d, dtype=f32), x(S, T, d)
    s, r = launch.scores(v, qs, 1e-6)
    narrow = launch.merge_queries(q, dtype)
    launch.phase2_fwd(u, p, u, empty(T, dtype=f32), narrow, w, 1e-6, 1e-6)
    launch.phase2_from_scores(u, p, v[:4], empty(4, T, dtype=f32), narrow, w, 1e-6, 1e-6)
    launch.complete(u, p, qs, 1e-6)
    tiles = config.score_tiles
    config.score_tiles = lambda *shape: {**tiles(*shape), "GRAM": 2}
    launch.complete(u, p, qs, 1e-6)
    config.score_tiles = tiles
    launch.scores([x(32768, d)], empty(128, d, dtype=f32), 1e-6)
    launch.combine(v, s[:1])
    _, lse = launch.combine(v, s)
    launch.phase1_bwd(do.unbind(0), lse, v, qs, s, lse, r, [empty(T, d, dtype=f32) for _ in v])
    wide = plain_residual._block(d)
    plain_residual.add_rms_norm_(u, p, w, x(T, d), 1e-6)
    plain_residual.add_norm_bwd_kernel[(264,)](
        u, p, u, w, p, empty(264, d, dtype=f32), T, 1e-6, D=d, BD=wide, STAGES=2, num_warps=min(max(wide // 512, 4), 16)
    )
    launch.read(u, empty(T, dtype=f32), v, p, empty(n + 1, T, dtype=f32), w, 1e-6, slot=u)
    many = [x(T, d) for _ in range(17)]
    launch.combine(many, empty(S, 17, T, dtype=f32))
    sources.even_step = lambda _: None
    launch.mix_fwd(many, u, p, q, w, 1e-6, 1e-6)
    launch.combine(many, empty(S, 17, T, dtype=f32))
    sources.even_step = even_step


if __name__ == "__main__":
    kind, *shape = sys.argv[1:]
    main(getattr(torch, kind), *map(int, shape))
