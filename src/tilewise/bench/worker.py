"""One process of a benchmark: compiles its cells, then measures each while no other process uses the device.

``python -m tilewise.bench.worker JOB`` reads a job (JSON) and writes events, one JSON object a line, to the standard
output that it was started with; whatever libraries print goes to the standard error.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from .cells import BenchSet, Cell, Truth, Workload
from .oracle import gate
from .sets import load
from .timing import Plan, backward_of, captured, compare, peak_mib, step_of, synchronize

__all__ = ["main"]

BROKEN_DEVICE = 75
"""Exit status after an error that leaves the CUDA context unusable: the rest of the job needs a new process."""


class BrokenDevice(Exception):
    """An asynchronous CUDA error: no later call of this process can succeed."""


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def emit(event: str, **values) -> None:
        events.write(json.dumps({"event": event, **values}, allow_nan=False) + "\n")

    cells = [Cell.from_json(c) for c in job["cells"]]
    bench = load(job["bench"])
    lock = _Lock(job["lock"])
    truths = Path(job["truths"])
    try:
        if job["kind"] == "truth":
            with lock.shared():
                for cell in cells:
                    emit("compile", cell=cell.to_json())
                    _truth(bench, cell, truths)
            return
        if bench.compiles(cells[0].system):
            with lock.shared():
                for cell in cells:
                    emit("compile", cell=cell.to_json())
                    _compile(bench, cell)
        # What is loaded and compiled by now stays: later collections need not look at it.
        gc.collect()
        gc.freeze()
        for cell in cells:
            emit("wait")
            with lock.exclusive():
                emit("measure", cell=cell.to_json())
                truth = _truth(bench, cell, truths)
                for record in measure(bench, cell, truth, Plan(**job["plan"])):
                    emit("record", record=record)
                del truth
                _release(cell.device)
    except BrokenDevice as error:
        emit("broken", error=str(error))
        events.flush()
        os._exit(BROKEN_DEVICE)


class _Lock:
    """A file lock between the processes of a run; a process that dies gives it back."""

    def __init__(self, path: str):
        self.file = open(path, "a")

    @contextlib.contextmanager
    def _held(self, kind: int):
        fcntl.flock(self.file, kind)
        try:
            yield
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)

    def shared(self):
        return self._held(fcntl.LOCK_SH)

    def exclusive(self):
        return self._held(fcntl.LOCK_EX)


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextlib.contextmanager
def _device_errors():
    """Turn asynchronous CUDA errors into :class:`BrokenDevice`; out of memory is no such error."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        text = str(error)
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in text or "illegal memory access" in text:
            raise BrokenDevice(_message(error)) from error
        raise


def _release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _compile(bench: BenchSet, cell: Cell) -> None:
    """Run every pass once. What fails here fails again when it is measured, and is recorded there."""
    try:
        with bench.compiling(cell.system):
            for small in bench.warm(cell):
                _once(bench, small)
    except BrokenDevice:
        raise
    except Exception as error:
        print(f"{cell}: {_message(error)}", file=sys.stderr)
    with _device_errors():
        _release(cell.device)


def _once(bench: BenchSet, cell: Cell) -> None:
    with _device_errors():
        work = bench.build(cell)
        for pass_ in cell.passes:
            _timed(pass_, work.run, list(work.leaves.values()), work.upstream)()()
        synchronize(cell.device)


def _truth(bench: BenchSet, cell: Cell, folder: Path) -> Truth:
    """The oracle's answer, computed once a run and shared through a file."""
    path = folder / cell.truth_name()
    if not path.exists():
        truth = bench.truth(cell)
        partial = path.with_suffix(f".{os.getpid()}")
        torch.save({"exact": {n: t.cpu() for n, t in truth.exact.items()}, "low_error": truth.low_error}, partial)
        partial.replace(path)
        del truth
        _release(cell.device)
    stored = torch.load(path)
    return Truth({n: t.to(cell.device) for n, t in stored["exact"].items()}, stored["low_error"])


def measure(bench: BenchSet, cell: Cell, truth: Truth, plan: Plan) -> Iterator[dict]:
    """One record for each pass of the cell, as soon as it is known."""
    work, error = None, None
    try:
        with _device_errors():
            work = bench.build(cell)
    except BrokenDevice:
        raise
    except Exception as caught:
        error = _message(caught)
    for pass_ in cell.passes:
        record = blank(bench, cell, pass_, error)
        if work is not None:
            try:
                with _device_errors():
                    _pass(bench, cell, pass_, work, truth, plan, record)
            except BrokenDevice:
                raise
            except Exception as caught:
                record["error"] = _message(caught)
            _release(cell.device)
        yield record


def blank(bench: BenchSet, cell: Cell, pass_: str, error: str | None = None) -> dict:
    """A record without results."""
    return {
        "record": "cell", "set": cell.set, "case": cell.case, "pass": pass_, "system": cell.system,
        "ceiling": bench.ceiling(cell.case, cell.system), "dtype": cell.dtype, **cell.size, "size": list(cell.size),
        "ok": False, "ms": None, "tflops": None, "peak_mib": None, "baseline": bench.baseline(cell.device),
        "baseline_ms": None, "ratio_to_baseline": None, "ratio_to_cudnn": None, "graph": None, "not_captured": None,
        "baseline_not_captured": None,
        "numerics": None,
        "samples": None, "error": error,
    }  # fmt: skip


def _pass(bench: BenchSet, cell: Cell, pass_: str, work: Workload, truth: Truth, plan: Plan, record: dict) -> None:
    """Check, then measure memory, then time; fills the record."""
    leaves = list(work.leaves.values())
    results = _results(work, pass_) if work.results is None else work.results(pass_)
    check = work.gate or gate
    verdicts = {n: check(t, truth.exact[n], truth.low_error[n], work.strict) for n, t in results.items()}
    del results
    record["numerics"] = {n: _finite(v) for n, v in verdicts.items()}
    missed = [n for n, v in verdicts.items() if not v["ok"]]

    def once() -> object:
        with _grad_mode(pass_):
            o = work.run()
            return o, None if pass_ == "fwd" else torch.autograd.grad(o, leaves, work.upstream)

    peak = peak_mib(once, cell.device)
    record["peak_mib"] = None if peak is None else round(peak + work.held / 2**20, 1)
    if missed:
        record["error"] = f"outside the error bounds: {', '.join(missed)}"
        return
    runs = [_timed(pass_, work.run, leaves, work.upstream)]
    runs.append(_timed(pass_, work.baseline, work.baseline_leaves, work.upstream))
    if work.overhead is not None:
        runs.append(_timed("fwd", work.overhead, [], work.upstream))
    graphs = cell.device == "cuda" and work.capture
    timed, reasons = zip(*(captured(make) if graphs else (make(), None) for make in runs), strict=True)
    samples = compare(*timed[:2], cell.device, plan, *timed[2:])
    ratio = None if samples.ratio is None else round(samples.ratio, 4)
    flops = bench.flops(cell, pass_)
    record.update(
        ok=True, ms=round(samples.ms, 5), tflops=None if flops is None else round(flops / samples.ms / 1e9, 4),
        baseline_ms=round(samples.baseline_ms, 5), ratio_to_baseline=ratio,
        ratio_to_cudnn=ratio if record["baseline"] == "cudnn" else None,
        graph=graphs and reasons[0] is None, not_captured=reasons[0], baseline_not_captured=reasons[1],
        samples={"system": _rounded(samples.system), "baseline": _rounded(samples.baseline)},
    )  # fmt: skip
    if samples.overhead is not None:
        record["samples"]["overhead"] = _rounded(samples.overhead)
        record.update(
            overhead_ms=round(samples.overhead_ms, 5), net_ms=round(samples.ms - samples.overhead_ms, 5),
            baseline_net_ms=round(samples.baseline_ms - samples.overhead_ms, 5),
        )  # fmt: skip
    if work.notes:
        record["notes"] = work.notes


def _results(work: Workload, pass_: str) -> dict[str, torch.Tensor]:
    """The output and, unless the pass is the forward, the gradients."""
    with _grad_mode(pass_):
        results = {"o": work.run()}
        if pass_ != "fwd":
            grads = torch.autograd.grad(results["o"], list(work.leaves.values()), work.upstream)
            results |= {f"d{name}": g for name, g in zip(work.leaves, grads, strict=True)}
    return results


def _grad_mode(pass_: str):
    return torch.no_grad() if pass_ == "fwd" else torch.enable_grad()


def _timed(pass_: str, run: Callable, leaves: list, upstream: torch.Tensor) -> Callable[[], Callable[[], object]]:
    if pass_ != "fwd":
        kind = backward_of if pass_ == "bwd" else step_of
        return lambda: kind(run, leaves, upstream)

    def forward() -> object:
        with torch.no_grad():
            return run()

    return lambda: forward


def _finite(verdict: dict) -> dict:
    """JSON has no NaN: a result that is not finite shows as None."""
    return {k: v if isinstance(v, bool) or v - v == 0 else None for k, v in verdict.items()}


def _rounded(rounds: list[list[float]]) -> list[list[float]]:
    return [[round(x, 5) for x in r] for r in rounds]


if __name__ == "__main__":
    main()
