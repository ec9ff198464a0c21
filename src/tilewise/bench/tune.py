"""``tilewise bench tune``: the fastest tile shapes of a few, by pass and class of call, measured on this GPU.

One kernel's shape changes at a time, in the pass in which it runs, the others staying at the best found before it. What
is measured is what :data:`tilewise.triton.config.MEASURED` holds: 16-bit inputs of width 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from ..call import Call, Options
from ..mask import Mask
from ..terms import flatten, lower
from ..testing import CASES, Sizes
from ..triton.config import MEASURED, using
from ..triton.tuned import Table, shape_error

__all__ = [
    "CLASSES", "LENGTHS", "PASSES", "Trial", "call_of", "compile_ahead", "jobs", "measure", "passes_of", "precompile",
    "shapes", "tune",
]  # fmt: skip

CLASSES = {
    "plain": "none", "scalar": "t5", "query": "wav2vec2_bert", "key": "deberta", "identity": "txl", "value": "vits",
}  # fmt: skip
"""Class of call ↦ the case of :mod:`tilewise.testing` that stands for it."""

PASSES = ("forward", "projection", "queries", "keys", "fold")
LENGTHS = (512, 2048, 8192)

GAIN = 0.02
"""What a shape must win to replace the one in use: less than that is noise."""

_TILES = {
    "forward": [(64, 64, 4, 3, 2), (64, 64, 4, 2, 2), (64, 64, 4, 3, 3), (64, 128, 4, 3, 2), (64, 128, 4, 2, 1),
                (128, 64, 4, 3, 2), (128, 64, 8, 3, 2)],
    "queries": [(64, 64, 4, 3, 2), (64, 64, 4, 3, 3), (64, 64, 4, 2, 2), (64, 32, 4, 3, 3), (128, 64, 4, 3, 2)],
    "keys": [(64, 64, 4, 3, 2), (64, 64, 4, 3, 3), (64, 64, 4, 2, 2), (32, 64, 4, 3, 3), (64, 128, 8, 3, 2)],
    "projection": [(64, 64, 4, 3), (64, 128, 4, 3), (64, 128, 8, 3), (64, 256, 8, 3), (128, 64, 8, 3)],
    "fold": [(64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2), (32, 64, 4, 4)],
}  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One measurement: the shape of `what` in a call of class `kind` (of `runs`, where `what` has none) at length N."""

    what: str
    kind: str
    runs: str
    N: int
    shape: tuple[int, ...]


Timer = Callable[[Trial, Table], "float | None"]
"""(trial, entries found so far) ↦ milliseconds, None where the shape does not fit the GPU."""


def shapes(what: str, kind: str, N: int) -> list[tuple[int, ...]]:
    """The shapes tried, first the one that is in use without a file."""
    now = [shape for first, shape in MEASURED[what, kind] if first <= N][-1]
    legal = (shape for shape in _TILES[what] if shape_error(what, kind, shape) is None)
    return list(dict.fromkeys((now, *legal)))


def jobs(classes: Iterable[str], passes: Iterable[str], lengths: Iterable[int]) -> Iterator[tuple[str, str, str, int]]:
    """(pass, class, class of the call that shows it, length) in the order in which they are measured."""
    classes, lengths = list(classes), sorted(lengths)
    for what in passes:
        for kind in classes if what != "fold" else [""]:
            if (what, kind) in MEASURED:
                shown = kind or next((k for k in ("key", "query", "identity", "scalar") if k in classes), None)
                for N in lengths if shown else ():
                    yield what, kind, shown, N


def tune(
    time: Timer, classes: Iterable[str], passes: Iterable[str], lengths: Iterable[int], say: Callable[[str], None]
) -> Table:
    """The entries that beat those in use by at least :data:`GAIN`, for every pass and class where one does."""
    found: Table = {}
    best: dict[tuple[str, str], list[tuple[int, tuple[int, ...]]]] = {}
    changed: set[tuple[str, str]] = set()
    for what, kind, runs, N in jobs(classes, passes, lengths):
        tried = shapes(what, kind, N)
        times = {shape: time(Trial(what, kind, runs, N, shape), dict(found)) for shape in tried}
        ran = {shape: ms for shape, ms in times.items() if ms is not None}
        if not ran:
            raise RuntimeError(f"no shape of {what} {kind or runs} ran at {N} tokens; tried {tried}")
        fastest = min(ran, key=ran.get)
        now = tried[0]
        chosen = now if now in ran and ran[fastest] > (1.0 - GAIN) * ran[now] else fastest
        shown = ", ".join(f"{'×'.join(map(str, s))} {'-' if t is None else f'{t:.3f} ms'}" for s, t in times.items())
        say(f"{what} {kind or runs} N={N}: {shown}{'' if chosen == now else f'; takes {chosen}'}")
        rows = best.setdefault((what, kind), [])
        if not rows or rows[-1][1] != chosen:
            rows.append((N if rows else 0, chosen))
        changed |= {(what, kind)} if chosen != now else set()
        # An entry replaces all lengths at once, so those at which nothing won are in it too.
        found.update({key: tuple(best[key]) for key in changed & {(what, kind)}})
    return found


def call_of(kind: str, N: int, device: torch.device | str, tokens: int = 16384, H: int = 12) -> Call:
    """A call of the class: fp16, width 64, `tokens` in the batch."""
    case, B = CASES[CLASSES[kind]], max(1, tokens // N)
    sizes = Sizes(B, H, H, N, N, 64, 64, None, published=True)
    shape = (B, H, N, 64)
    x = {
        name: torch.randn(s, device=device, dtype=torch.float16) * (0.5 if name not in "qkv" else 1.0)
        for name, s in {"q": shape, "k": shape, "v": shape, **case.shapes(sizes)}.items()
    }
    x["q"] = x["q"] * (64**-0.5 / case.scale(64))
    content, ports = lower(x["q"], flatten(case.build(x, sizes)), biases=True)
    # The tiles are those of the kernels that every GPU has, and of a backward that makes its own projections.
    options = Options(skew="memory", projections="recompute")
    return Call(content, x["k"], x["v"], tuple(ports), Mask(), case.scale(64), 0, options=options)


def passes_of(call: Call) -> dict[str, Callable[[], None]]:
    """``forward`` and ``backward`` of the call, over buffers of their own."""
    from .. import triton

    B, H, Tq, _ = call.q.shape
    o = call.q.new_empty(B, Tq, H, call.v.shape[3]).transpose(1, 2)
    lse = torch.empty(B, H, Tq, device=call.q.device)
    leaves = [call.q, call.k, call.v, *call.tensors]
    grads, do = [torch.empty_like(x) for x in leaves], torch.randn_like(o)
    return {
        "forward": lambda: triton.forward(call, o, lse),
        "backward": lambda: triton.backward(call, do, None, o, lse, [True] * len(leaves), grads),
    }


def measure(device: torch.device | str = "cuda") -> Timer:
    """Median milliseconds of the pass in which a trial's shape shows; inputs of a class and length are made once."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    held: dict[tuple[str, int], dict[str, Callable[[], None]]] = {}

    def time(trial: Trial, found: Table) -> float | None:
        if (trial.runs, trial.N) not in held:
            held.clear()
            held[trial.runs, trial.N] = passes_of(call_of(trial.runs, trial.N, device))
        runs = held[trial.runs, trial.N]
        run = runs["forward" if trial.what in ("forward", "projection") else "backward"]
        with using(found), using({(trial.what, trial.kind): ((0, trial.shape),)}):
            try:
                if trial.what not in ("forward", "projection"):
                    runs["forward"]()
                run()
            except OutOfResources:
                return None
            return do_bench(run, warmup=5, rep=30, return_mode="median")

    return time


def compile_ahead(job: tuple[str, str, str, int, tuple[int, int], int, str]) -> None:
    """Compile what a job's trials will run, without a GPU; a process of its own."""
    from ..triton import plan
    from ..triton.config import Limits
    from ..triton.launch import launcher
    from .ahead import compile_for, make_ready

    what, kind, runs, N, capability, shared, gpu = job
    compile_for(capability[0] * 10 + capability[1])
    plan.limits_of = lambda device: Limits.of(capability, shared, gpu)
    launcher.append(make_ready)
    torch.set_num_threads(1)
    made = passes_of(call_of(runs, N, "meta"))
    for shape in shapes(what, kind, N):
        with using({(what, kind): ((0, shape),)}):
            made["forward" if what in ("forward", "projection") else "backward"]()


def precompile(chosen: list[tuple[str, str, str, int]], seconds: float, say: Callable[[str], None]) -> None:
    """Compile the kernels of all trials by many processes, as far as `seconds` go; the rest compiles when it runs."""
    import multiprocessing
    import os
    import time

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    gpu = ((properties.major, properties.minor), properties.shared_memory_per_block_optin, properties.name)
    start = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(max(1, min(16, os.cpu_count() or 1, len(chosen)))) as pool:
        results = pool.imap_unordered(compile_ahead, [(*job, *gpu) for job in chosen])
        for done in range(len(chosen)):
            try:
                results.next(timeout=max(0.1, seconds - (time.monotonic() - start)))
            except multiprocessing.TimeoutError:
                say(f"Compiled the kernels of {done} of {len(chosen)} jobs in {seconds:.0f} s; the rest as they run")
                return
    say(f"Compiled in {time.monotonic() - start:.0f} s")
