"""What the relative benchmarks share: checks and timed rounds within limits of time, and one record of both.

A script has its jobs compiled and fills a :class:`Record` with checks and with the rows of :class:`Cell`. What fails or
has no time left is printed, costs only itself and makes the exit status 1; the record is written whatever happens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from processes import isolated
from relative_ahead import precompile
from relative_cases import HALF

from tilewise.bench import records
from tilewise.bench.timing import Plan, backward_of, captured, interleaved, peak_mib

DEVICE = "cuda"
PASSES = {"forward": 4, "backward": 10}
"""Pass ↦ floating-point operations for a query, a key and an entry of a head: two for each of its products."""

PROCESSES = 8
"""That share the GPU during checks, since most of a check is the host's work."""


def parser_of(doc: str, out: str, seconds: float, compile_seconds: float) -> argparse.ArgumentParser:
    """The options that all scripts have, with a script's description and defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=out)
    parser.add_argument("--seconds", type=float, default=seconds, help="of the run; nothing is begun near its end")
    parser.add_argument("--compile-seconds", type=float, default=compile_seconds)
    parser.add_argument("--only-compile", action="store_true", help="compile everything for sm_90 and stop (no GPU)")
    return parser


def environment(device: str = DEVICE) -> dict:
    """What every record says of where, with what and from which commit it was measured."""
    found = records.environment("", "", "cpu", ("triton",), {})
    gpu = torch.cuda.get_device_properties(0).name if device == "cuda" else "no GPU"
    versions = {name: found[name] for name in ("python", "tilewise", "commit")}
    return dict(gpu=gpu, torch=torch.__version__, triton=found["versions"]["triton"], cuda=torch.version.cuda,
                time=found["date"], **versions)  # fmt: skip


def whole_numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def compile_jobs(arguments: argparse.Namespace, jobs: list[tuple]) -> None:
    """Compile what the jobs launch within `--compile-seconds`; with `--only-compile` that ends the program."""
    missing = precompile(jobs, arguments.compile_seconds)
    if arguments.only_compile:
        sys.exit(1 if missing else 0)


def _checked(check: Callable, *job) -> tuple[list[dict], float]:
    torch.set_num_threads(1)
    start = time.time()
    budgets = [vars(b) | {"ok": b.ok} for b in check(*job)]
    # What the dense references held would be missed by the other processes.
    torch.cuda.empty_cache()
    return budgets, time.time() - start


class Record:
    """A run's JSON record, its clock, which starts here, and how much of it failed.

    `parts` are further fields: lists that are yet to be filled, or constants.
    """

    def __init__(self, arguments: argparse.Namespace, **parts) -> None:
        self.out, self.seconds, self.start = Path(arguments.out), arguments.seconds, time.time()
        self.failed, self.checked = 0, 0
        self.result = dict(checks=[], **parts)

    def __enter__(self) -> Record:
        self.result = environment() | self.result
        return self

    def __exit__(self, *error) -> None:
        self.out.write_text(json.dumps(self.result))
        within = sum(check["ok"] for check in self.result["checks"])
        print(f"{within} of {self.checked} checks within budget, {self.failed} failures, "
              f"{time.time() - self.start:.0f} s", flush=True)  # fmt: skip

    @property
    def status(self) -> int:
        return 1 if self.failed else 0

    def until(self, share: float) -> float:
        """The time of the clock at which this share of the seconds is over."""
        return self.start + share * self.seconds

    def fail(self, line: str) -> None:
        self.failed += 1
        print(line, flush=True)

    def in_time(self, cells: Iterable, spare: float) -> Iterator:
        """Those that begin at least `spare` seconds before the end; each of the others counts as a failure."""
        for cell in cells:
            if time.time() > self.start + self.seconds - spare:
                self.fail(f"not timed: {cell}")
            else:
                yield cell

    @contextmanager
    def attempt(self, title: str) -> Iterator[None]:
        """What is raised inside is printed and counts as a failure."""
        try:
            yield
        except Exception as error:
            self.fail(f"{title} failed: {type(error).__name__} {str(error)[-300:]}")

    def check(self, check: Callable, jobs: list[tuple], until: float, fields: Callable[..., dict]) -> list[dict]:
        """Records of check(*job) for all jobs, with the fields that fields(*job) names; added to those before.

        `check` returns error budgets, or raises; it runs in processes of its own. After an illegal instruction all
        later checks of its process would fail, so it takes none.
        """
        found = []
        self.checked += len(jobs)
        for (_, *job), value, why in isolated(_checked, [(check, *job) for job in jobs], until, PROCESSES):
            record = fields(*job)
            name = " ".join(map(str, record.values()))
            if why is None:
                budgets, seconds = value
                bad = [b for b in budgets if not b["ok"]]
                shown = bad or [max(budgets, key=lambda b: b["error"] / max(b["allowed"], 1e-30))]
                text = "; ".join(
                    f"{b['name']} {b['error']:.1e}/{b['allowed']:.1e} rel {b['relative']:.0e}" for b in shown
                )
                record |= dict(ok=not bad, budgets=budgets, seconds=seconds)
            else:
                text = why[-400:]
                record |= dict(ok=False, error=why)
            found.append(record)
            self.failed += not record["ok"]
            print("ok " if record["ok"] else "BAD", name, text, flush=True)
        self.result["checks"] += found
        return found


def graphed(make: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    """A CUDA graph of what `make` returns; raises RuntimeError where it cannot be captured."""
    run, reason = captured(make)
    if reason is not None:
        raise RuntimeError(f"it cannot be captured: {reason}")
    return run


def cudnn(N: int, tokens: int = 16384, H: int = 12, d: int = 64, dtype=HALF, causal: bool = False) -> tuple:
    """cuDNN's forward and backward without a term, as CUDA graphs."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = max(1, tokens // N), H, N, d
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_() for _ in range(3))
    g = torch.randn_like(q)

    def forward():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return graphed(lambda: torch.no_grad()(forward)), graphed(lambda: backward_of(forward, (q, k, v), g))


def steady(runs: dict[str, Callable[[], object]], rounds: int, ms: float) -> dict[str, list[float]]:
    """The median of each round, ms; a round has `ms` of each run, at most 200 of it."""
    # The card throttles when it is warm: the first round, untimed, makes it so.
    interleaved(runs, DEVICE, Plan(1, 400, 100.0))
    samples = interleaved(runs, DEVICE, Plan(rounds, 200, ms))
    return {name: [median(each) for each in found] for name, found in samples.items()}


@contextmanager
def recorded() -> Iterator[set[str]]:
    """The names of the kernels that are launched inside."""
    from tilewise.triton.launch import launcher

    names, below = set(), launcher[-1]

    def note(kernel, grid, *args, **meta):
        names.add(kernel.__name__)
        below(kernel, grid, *args, **meta)

    launcher.append(note)
    try:
        yield names
    finally:
        launcher.pop()


class Cell:
    """Passes of a length and width, timed in rounds beside cuDNN's attention without a term under the same mask."""

    def __init__(
        self, N: int, d: int = 64, dtype=HALF, causal: bool = False, passes: Sequence[str] = tuple(PASSES),
        base: str = "cudnn",
    ) -> None:  # fmt: skip
        self.N, self.d, self.dtype, self.causal = N, d, dtype, causal
        found = dict(zip(PASSES, cudnn(N, d=d, dtype=dtype, causal=causal), strict=True))
        self.runs = {pass_: {base: found[pass_]} for pass_ in passes}
        self.peaks: dict[tuple[str, str], float | None] = {}

    def add(self, pass_: str, title: str, run: Callable[[], object], without: Collection[str] = ()) -> None:
        """Capture a pass of a variant, and the peak MiB of a run beside inputs and results.

        Raises:
            AssertionError: it ran one of the kernels `without` which it should do.
            RuntimeError: it cannot be captured.
        """
        with recorded() as names:
            run()
        if others := names.intersection(without):
            raise AssertionError(f"other kernels ran: {sorted(others)}")
        self.peaks[pass_, title] = peak_mib(run, DEVICE)
        self.runs[pass_][title] = graphed(lambda: run)

    def rows(self, rounds: int, ms: float) -> list[dict]:
        """A row of each variant and pass; what was captured is given up."""
        B, pairs, found = max(1, 16384 // self.N), self.N**2 / (2 if self.causal else 1), []
        for pass_, runs in self.runs.items():
            samples = steady(runs, rounds, ms)
            medians = {title: median(x) for title, x in samples.items()}
            base = next(iter(medians.values()))
            for title, time_ in medians.items():
                found.append(dict(
                    case=title, n=self.N, **{"pass": pass_}, ms=time_, ratio=base / time_,
                    tflops=PASSES[pass_] * B * 12 * pairs * self.d / 1e9 / time_,
                    peak_mib=self.peaks.get((pass_, title)), dtype=str(self.dtype)[6:], heads=12, head_dim=self.d,
                    tokens=B * self.N, samples=samples[title],
                ))  # fmt: skip
            shown = "; ".join(f"{title} {ms:.3f} ms {base / ms:.3f}" for title, ms in medians.items())
            print(f"{pass_:8} N={self.N} d={self.d}: {shown}", flush=True)
        self.runs.clear()
        torch.cuda.empty_cache()
        return found


def table(rows: list[dict], title: Callable[[dict], str] = lambda row: row["case"]) -> str:
    """Lines of the ratio to cuDNN by pass, title and length, with milliseconds and peak MiB."""
    lines = []
    for pass_ in dict.fromkeys(row["pass"] for row in rows):
        lines.append(f"\n{pass_}: ratio to cuDNN without a term (ms, peak MiB)")
        by_title: dict[str, list[str]] = {}
        for row in rows:
            if row["pass"] == pass_:
                peak = "-" if row.get("peak_mib") is None else f"{row['peak_mib']:.0f}"
                text = f"{row['n']}: {row['ratio']:.2f} ({row['ms']:.3f}, {peak})"
                by_title.setdefault(title(row), []).append(text)
        lines += [f"  {name:32s} {'  '.join(found)}" for name, found in by_title.items()]
    return "\n".join(lines)
