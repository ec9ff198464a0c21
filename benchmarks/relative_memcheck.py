"""One small call of each case through every kernel, under compute-sanitizer.

    python benchmarks/relative_memcheck.py --tools memcheck,racecheck --seconds 110 --out sanitizer.json
    compute-sanitizer --tool memcheck python benchmarks/relative_memcheck.py

The first compiles everything in processes that nobody watches, then runs shares of the calls under each tool side by
side: the tools are slow, and most of a watched process is the host's work. Its exit status is 1 unless every process
was watched to its end without a finding. Each share's own exit status is 1 where a result is not finite, or not every
call came before the time limit.

A process of each tool runs :mod:`relative_handover` alone: what is found there is Triton's, and is no failure here.

Lengths are no multiples of a tile, so that the ragged edges are met; saturated tiles are, too. Allocations are one
for each tensor (`PYTORCH_NO_CUDA_MEMORY_CACHING=1`, set here), so that an access beyond one is seen.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import processes
import torch
from relative_cases import BRAIN, HALF, SINGLE, label, sizes

SHORT, LONG = sizes(150, B=5, H=2), sizes(333, B=1, H=2)
JOBS = [
    *((case, "none", HALF, SHORT, 0.0)
      for case in ("none", "t5", "shaw", "deberta", "txl", "wavlm", "inkling", "explicit")),
    *((case, "none", HALF, LONG, 0.0) for case in ("wav2vec2_bert", "txl")),
    ("everything", "none", HALF, sizes(70, B=1, H=1), 0.0),
    ("wav2vec2_bert", "packed", BRAIN, LONG, 0.1),
    ("wav2vec2_bert", "causal_padding", HALF, sizes(150, B=2, H=2, Hk=1), 0.0),
    ("t5", "window", HALF, sizes(100, 270, B=1, H=2), 0.0),
    ("deberta", "none", HALF, sizes(1300, B=1, H=1), 0.0),
    # Enough keys for the forward with overlapped exponentials.
    ("t5", "none", HALF, sizes(1100, B=1, H=1), 0.0),
    # The forward with a warp for copies: a last tile of keys that is masked, and all tiles whole.
    *(("t5", "none", HALF, sizes(1100, Tk, B=1, H=1, d=128), 0.0) for Tk in (1100, 1152)),
    ("alibi", "none", SINGLE, sizes(150, B=1, H=1), 0.0),
    ("vits", "lengths", HALF, sizes(150, B=2, H=2, d=80), 0.0),
    ("wav2vec2_bert", "none", SINGLE, sizes(150, B=1, H=1), 0.0),
]  # fmt: skip


ALONE = "hand-over"
"""Instead of a share's position: the process with :mod:`relative_handover`."""

CALLS = [
    (n, projections) for n, job in enumerate(JOBS) for projections in ("recompute", "keep")
    if projections == "recompute" or job[0] not in ("none", "t5")
]  # fmt: skip
"""(position in JOBS, projections). Those that are kept lie in device memory, so that on a Hopper both the kernels that
skew in registers and the portable ones run."""


def run_one(n: int, projections: str, device: str) -> list:
    """O and the gradients of a call."""
    from relative_checks import call_of, run

    from tilewise import Options

    case, mask, dtype, s, dropout = JOBS[n]
    call = replace(call_of(case, s, mask, dtype, device, dropout), options=Options(projections=projections))
    o, _, grads = run(call, torch.randn(s.B, s.H, s.Tq, s.d_v, device=device).to(dtype), None)
    return [o, *grads]


def share(shard: int, shards: int) -> list:
    """The calls of one share: the long ones first, dealt out in turn."""

    def scores(call) -> int:
        s = JOBS[call[0]][3]
        return s.B * s.H * s.Tq * s.Tk

    return sorted(CALLS, key=scores, reverse=True)[shard::shards]


def run_calls(calls: list, until: float) -> int:
    """Run them; the exit status."""
    done, wrong = 0, 0
    for n, projections in calls:
        if time.time() > until:
            break
        results = run_one(n, projections, "cuda")
        torch.cuda.synchronize()
        bad = [position for position, x in enumerate(results) if not bool(torch.isfinite(x).all())]
        done, wrong = done + 1, wrong + bool(bad)
        print(f"{'NOT FINITE ' + str(bad) if bad else 'done'} {label(*JOBS[n])} {projections}", flush=True)
    print(f"{done} of {len(calls)} calls, {wrong} not finite", flush=True)
    return 1 if wrong or done < len(calls) else 0


def outcome(status: int | str, text: str) -> dict:
    """What a watched process did: it must have been watched to its end, and nothing found."""
    summary = re.search(r"SUMMARY: (\d+) (?:errors?|hazards?)", text)
    findings = int(summary.group(1)) if summary else None
    return {
        "status": status, "findings": findings, "ok": status == 0 and findings == 0,
        "calls": len(re.findall("^done ", text, re.M)), "tail": text.splitlines()[-12:],
    }  # fmt: skip


def watch(tools: list[str], shards: int, until: float, out: Path) -> list[dict]:
    """Every share under every tool, all at once; what each did. Logs lie beside `out`."""
    running, here = [], Path(__file__).resolve()
    # A process ends by itself before its limit, so that the tool can say what it saw.
    seconds = max(1.0, until - time.time() - 10)
    programs = {n: [str(here), "--shard", f"{n}/{shards}", "--seconds", f"{seconds:.0f}"] for n in range(shards)}
    programs[ALONE] = [str(here.with_name("relative_handover.py"))]
    for tool in tools:
        for shard, program in programs.items():
            log = out.parent / f"{out.stem}_{tool}_{shard}.log"
            words = ["compute-sanitizer", "--tool", tool, "--launch-timeout", "100", "--error-exitcode", "9",
                     sys.executable, *program]  # fmt: skip
            running.append((tool, shard, log, processes.begin(words, log)))
    found = []
    for tool, shard, log, process in running:
        status = processes.end(process, until - time.time())
        found.append({"tool": tool, "shard": shard, **outcome(status, log.read_text(errors="replace"))})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120, help="no case begins later than this from the start on")
    parser.add_argument("--shard", default="0/1", help="of the calls, which share: its position and their number")
    parser.add_argument("--tools", default="", help="compile, then run everything under these tools of the sanitizer")
    parser.add_argument("--shards", type=int, default=8, help="processes of each tool")
    parser.add_argument("--compile-seconds", type=float, default=60, help="with --tools: of compiling")
    parser.add_argument("--out", type=Path, default=Path("relative_sanitizer.json"), help="with --tools: the results")
    arguments = parser.parse_args()
    until = time.time() + arguments.seconds
    if not arguments.tools:
        shard, shards = map(int, arguments.shard.split("/"))
        sys.exit(run_calls(share(shard, shards), until))
    from relative_ahead import precompile
    from rounds import environment

    missing = precompile([("memcheck", *call) for call in CALLS], arguments.compile_seconds)
    found = watch(arguments.tools.split(","), arguments.shards, until, arguments.out)
    arguments.out.write_text(json.dumps({**environment(), "processes": found}, indent=1))
    for each in found:
        print(f"{each['tool']} {each['shard']}: status {each['status']}, findings {each['findings']}, "
              f"{each['calls']} calls", flush=True)  # fmt: skip
        if not each["ok"]:
            print("\n".join(f"   {line[:200]}" for line in each["tail"]), flush=True)
    ours = [each for each in found if each["shard"] != ALONE]
    good = sum(each["ok"] for each in ours)
    print(f"{good} of {len(ours)} processes clean, {missing} jobs not compiled ahead", flush=True)
    sys.exit(0 if good == len(ours) else 1)


if __name__ == "__main__":
    main()
