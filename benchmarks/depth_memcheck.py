"""Every kernel of the depth operators on odd shapes, to be run under compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 9 python benchmarks/depth_memcheck.py

Forward and backward of each operator with few tokens and many, neither a multiple of a tile, in 16 and 32 bits, sources
as a list, as a bank and through a table of addresses; then the streams: training with shared gradients, Block and Full
at inference, the contract of serving engines. `--tool racecheck` and `--tool initcheck` take the same program.

    python benchmarks/depth_memcheck.py --collect DIR

makes DIR/depth_memcheck.json of DIR/memcheck_*.txt, what the sanitizer and the nine programs printed, and fails if one
of them found an error or did not end.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import torch
from depth_record import where

from tilewise import depth
from tilewise.depth import InferenceState, Schedule
from tilewise.nn import AttnRes

SHAPES = {"cuda": ((130, 7168, 3), (1100, 2304, 3), (37, 64, 18)), "cpu": ((5, 64, 3),)}
DTYPES = {"cuda": (torch.bfloat16, torch.float16, torch.float32), "cpu": (torch.float32,)}


def backward(*outputs: torch.Tensor) -> None:
    """Gradients of everything that an operator returns and that has one."""
    torch.autograd.backward([(o * torch.randn_like(o)).sum() for o in outputs if o.requires_grad])


def operators(T: int, d: int, n: int, dtype: torch.dtype, device: str) -> None:
    """The functional operators, forward and backward."""

    def leaf(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(shape, device=device)).to(dtype).requires_grad_()

    S = 5
    v, u, p = [leaf(T, d) for _ in range(n)], leaf(T, d), leaf(T, d)
    w, g, o = leaf(S, d, scale=d**-0.5), leaf(S, d), leaf(d)
    bank = leaf(n, T, d)
    for sources in (v, bank):
        backward(depth.mix(sources, w[0], g[0]))
        backward(depth.mix_norm(sources, w[0], g[0], o))
        backward(*depth.phase1(sources, w, g))
    backward(*depth.mix_update(u, p, v, w[0], g[0], o))
    backward(*depth.mix_update(u, None, v, w[0], g[0], o))
    o1, lse = depth.phase1(v, w, g)
    backward(*depth.phase2(u, p, o1[0], lse[0], w[0], g[0], o))
    backward(*depth.phase2(u, None, o1[1].detach(), lse[1].detach(), w[1], g[1], None))
    backward(depth.phase2_first(leaf(T, d), o))
    s = depth.scores(v, w, g)
    backward(*depth.phase1_from_scores(v, s))
    backward(*depth.complete(u, p, w, g))
    with torch.no_grad():
        serve = torch.randn(T, n + 1, d, device=device).to(dtype)
        prefix = p.detach().clone()
        depth.fused_attn_res(prefix, u.detach(), serve, g[0], w[0], o, n, n, 1e-6, 1e-6)
        depth.fused_attn_res(prefix, None, serve, g[0], w[0], None, 0, -1, 1e-6, 1e-6)


def streams(T: int, d: int, dtype: torch.dtype, device: str) -> None:
    """Training and inference of whole stacks."""
    L = 9
    x = torch.randn(T, d, device=device).to(dtype)
    for schedule in (
        Schedule.block(L, 4, one_pass_sources=0),
        Schedule.block(L, 2, one_pass_sources=2),
        Schedule.at(L, (0, 1, 6), one_pass_sources=0, max_queries=2),
        Schedule.full_attention(L),
    ):
        module = AttnRes(d, schedule, device=device, dtype=dtype)
        norms = [torch.ones(d, device=device, dtype=dtype, requires_grad=True) for _ in range(L + 1)]
        overlaps = (0, T) if device == "cuda" else (0,)
        states = [InferenceState(schedule, module.reads(), T, overlap_tokens=overlap) for overlap in overlaps]
        for make in (module, *states):
            leaf = x.clone().requires_grad_()
            with torch.set_grad_enabled(make is module):
                stream = make(leaf, norms=norms[:-1])
                for l in range(L):
                    stream.write(l, torch.tanh(stream.read(l)))
                y = stream.output(norms[-1])
            if make is module:
                backward(y)


def collected(texts: list[str]) -> list[dict]:
    """One row a program: what it ran to its end, and how many errors the sanitizer counted (None: it did not say)."""
    rows = []
    for text in texts:
        tool, count = re.search(r"COMPUTE-SANITIZER.*", text), re.search(r"ERROR SUMMARY: (\d+) error", text)
        ran = [
            {"dtype": dtype, "tokens": int(T), "d": int(d), "sources": int(n)}
            for dtype, T, d, n in re.findall(r"^done torch\.(\w+) (\d+) (\d+) (\d+)$", text, re.MULTILINE)
        ]
        rows.append({
            "sanitizer": tool is not None,
            "ran": ran,
            "checked": ["operators, forward and backward", "streams, training and inference"] if ran else [],
            "errors": int(count[1]) if count else None,
            "found": re.findall(r"^=+ ((?:Invalid|Uninitialized|Error|Program hit).*)$", text, re.MULTILINE)[:20],
        })  # fmt: skip
    return rows


def collect(folder: Path) -> int:
    """Write the record; 1 unless every pair of dtype and shape ran to its end without an error."""
    rows = collected([path.read_text(errors="replace") for path in sorted(folder.glob("memcheck_*.txt"))])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (folder / "depth_memcheck.json").write_text(
        json.dumps({**where(device, "memcheck", tool="memcheck"), "programs": rows}, indent=1) + "\n"
    )
    clean = [row for row in rows if row["sanitizer"] and row["errors"] == 0]
    ran = {(pair["dtype"], pair["tokens"]) for row in clean for pair in row["ran"]}
    expected = {(str(dtype).removeprefix("torch."), T) for dtype in DTYPES["cuda"] for T, _, _ in SHAPES["cuda"]}
    print(f"memcheck: {len(clean)} of {len(rows)} programs without an error, {len(ran)} of {len(expected)} pairs ran")
    return int(len(clean) < len(rows) or ran != expected)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--only", type=int, help="one of the nine pairs of dtype and shape: they can run side by side")
    parser.add_argument("--collect", type=Path, help="run nothing: make a record of the texts in this folder")
    args = parser.parse_args()
    if args.collect:
        return collect(args.collect)
    pairs = [(dtype, shape) for dtype in DTYPES[args.device] for shape in SHAPES[args.device]]
    for dtype, (T, d, n) in pairs if args.only is None else [pairs[args.only]]:
        operators(T, d, n, dtype, args.device)
        streams(T, d, dtype, args.device)
        if args.device == "cuda":
            torch.cuda.synchronize()
        print("done", dtype, T, d, n, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
