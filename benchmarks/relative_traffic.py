"""The kernels of one call in launch order, with the bytes that each moves in device memory and the fewest possible.

    python benchmarks/relative_traffic.py --out traffic.json [--calls shaw:8192:forward,t5:8192:forward:128,…]

A call is case:length:pass, or case:length:pass:width where the width is not 64.

All calls run under Nsight Compute (`ncu`) with its hardware counters, in one process that ends in time; clocks stay as
they are, and kernels are compiled beforehand. The fewest bytes are counted from what the host hands to each kernel:
every row that it needs once, every result once, of skewed buffers the windows alone. What an L2 cache keeps from one
kernel to the next can be fewer still.
`--csv FILE` makes the tables from a saved output of ncu instead.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from relative_cases import passes_of, timed_call

READ, WRITTEN, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
CALLS = (*(f"{case}:{N}:{p}" for N in (8192, 512) for case in ("t5", "shaw", "deberta", "txl")
           for p in ("forward", "backward")), "t5:8192:forward:128")  # fmt: skip


HOPPER = ("attend_band", "attend_overlapped", "attend_specialised", "key_pass", "query_pass", "collect_tiles",
          "sum_ends", "sum_rows", "spread")  # fmt: skip
MARK = "spin_kernel"
"""The kernel of torch.cuda._sleep, which stands between two calls."""


def parts_of(call: str) -> tuple[str, int, str, int]:
    """(case, length, pass, width) of a call's name."""
    case, N, pass_, *width = call.split(":")
    return case, int(N), pass_, int(width[0]) if width else 64


def parse(text: str) -> list[dict]:
    """Kernels in launch order from ncu's `--csv --page raw --print-units base`: name, bytes read and written, µs.

    Raises:
        ValueError: there is no table, or a counter is missing in it (`n/a`: the counters could not be read).
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.reader(lines))
    if len(rows) < 3 or "Kernel Name" not in rows[0]:
        raise ValueError(f"no table of ncu in {text[-300:]!r}")
    header, units = rows[0], dict(zip(rows[0], rows[1], strict=True))
    missing = [name for name in (READ, WRITTEN, TIME) if name not in header]
    if missing:
        raise ValueError(f"the table has no {', '.join(missing)}; it has {', '.join(header[-6:])}")
    factor = {"": 1, "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "ns": 1e-3, "us": 1, "usecond": 1, "ms": 1e3,
              "nsecond": 1e-3, "msecond": 1e3}  # fmt: skip
    found = []
    for values in rows[2:]:
        row = dict(zip(header, values, strict=True))
        number = lambda name: float(row[name].replace(",", "")) * factor[units[name]]  # noqa: B023, E731
        found.append(
            {"kernel": row["Kernel Name"], "read": number(READ), "written": number(WRITTEN), "us": number(TIME)}
        )
    return found


def _size(x, share: float = 1.0) -> float:
    return x.numel() * x.element_size() * share


def _key(x) -> int:
    return x.untyped_storage()._cdata


def _window(a: dict, itemsize: int) -> float:
    """Bytes of a skewed buffer's windows, for the rows, heads and batch of a launch."""
    WM, WN, total = a["WM"], a["WN"], 0
    whole = -(-a["others"] // WN) * WN
    for first in range(0, a["rows"], WM):
        low = min(max((first + a["offset"] - a["ahead"] + 1) // WN * WN, 0), whole)
        high = min(max(-(-(first + WM - 1 + a["offset"] + a["behind"]) // WN) * WN, low), whole)
        total += (high - low) * min(WM, a["rows"] - first)
    return total * itemsize * a["heads"] * a["B"]


def _hopper(kernel: str, a: dict, programs: int, windows: dict[int, float]) -> tuple[float, float]:
    """:func:`fewest` of Hopper's own kernels; `programs` of them make a launch of a pass."""
    if kernel in ("attend_overlapped", "attend_specialised"):
        slab = _size(a["slab"]) if a["TERM"] else 0.0
        return sum(_size(a[n].base) for n in ("q", "k", "v")) + slab, _size(a["o"].base) + _size(a["lse"])
    if kernel == "attend_band":
        left = 0.0 if a["w"].base is a["q"].base else _size(a["w"].base)
        shifted = _size(a["x"].base) if a["SHIFTED"] else 0.0
        tables = sum(_size(a[n].base) for n, used in (("a", a["QUERY"]), ("cr", a["KEY"])) if used)
        read = sum(_size(a[n].base) for n in ("q", "k", "v")) + left + shifted + tables
        return read, _size(a["o"].base) + _size(a["lse"])
    if kernel in ("key_pass", "query_pass"):
        length, heads = (a["Tk"], a["HK"]) if kernel == "key_pass" else (a["Tq"], a["H"])
        share = programs / (-(-length // 64) * a["B"] * heads)
        left = [] if a["OWN"] else ["w"]
        shifted = ["x"] if a["SHIFTED"] else []
        tables = sum(_size(a[n].base) for n in ("a", *(["cr"] if a["KEY"] else [])))
        read = sum(_size(a[n].base, share) for n in ("q", "k", "v", "g", *left, *shifted))
        outs = ["dk", "dv"] if kernel == "key_pass" else ["dq", *([] if a["OWN"] else ["dw"])]
        stored = [] if kernel == "key_pass" and not a["KEY"] else ["dh" if kernel == "key_pass" else "dg"]
        # What a program writes of its buffer are whole tiles of its rows.
        for name in stored:
            rows = programs * 64 * (a["G"] if kernel == "key_pass" else 1)
            buffer = a[name].base if hasattr(a[name], "base") else a[name]
            windows[_key(buffer)] = rows * buffer.shape[-1] * buffer.element_size()
        written = sum(_size(a[n].base if hasattr(a[n], "base") else a[n], share) for n in outs)
        buffers = [a[n].base if hasattr(a[n], "base") else a[n] for n in stored]
        # Of the biases' gradients, a sum each for every program.
        written += programs * 2 * a["D"] * 4 if kernel == "query_pass" and a["BIASED"] else 0.0
        return read + tables + _size(a["stats"], share), written + sum(windows[_key(x)] for x in buffers)
    if kernel == "collect_tiles":
        return windows.get(_key(a["dg"]), 0.0), _size(a["out"])
    # Partial sums of every offset, in fp32, and of every block what it adds to end rows.
    if kernel == "sum_ends":
        return _size(a["parts"]) if a["blocks"] else 0.0, _size(a["sums"])
    return _size(a["partial"]) + (_size(a["sums"]) if kernel == "sum_rows" and a["ENDS"] else 0.0), _size(a["grad"])


def fewest(kernel: str, a: dict, windows: dict[int, float], programs: int) -> tuple[float, float]:
    """(read, written) bytes that a launch with these arguments cannot do without; notes windows of skewed buffers."""
    if kernel in HOPPER:
        return _hopper(kernel, a, programs, windows)
    if kernel == "dots":
        return _size(a["x"]) + _size(a["bias"]), _size(a["out"])
    if kernel == "add_parts":
        return _size(a["parts"]), _size(a["grad"])
    share = a["heads"] / a["H"] if "heads" in a and "H" in a else 1.0
    terms = [windows.get(_key(t.z), _size(t.z)) for name in ("terms", "values") for t in a.get(name, ())
             if hasattr(t, "z")]  # fmt: skip
    rows = lambda *names: sum(_size(a[n].base if hasattr(a[n], "base") else a[n], share) for n in names)  # noqa: E731
    if kernel == "toeplitz":
        return 0.0, _size(a["slab"])
    if kernel == "expand":
        return _size(a["table"]), _size(a["out"])
    if kernel == "prepare":
        shifts = [x for flag, x in (("SHIFT_Q", "qx"), ("SHIFT_K", "kx"), ("SHIFT_V", "vx")) if a[flag]]
        sources = [x[0] for x in shifts]
        grads = ["g", "o", "lse"] if a["GRADS"] else []
        return sum(_size(a[n]) for n in (*sources, *grads)), sum(_size(a[n]) for n in shifts) + (
            _size(a["stats"]) if grads else 0.0
        )
    if kernel == "project":
        windows[_key(a["z"])] = written = _window(a, a["z"].element_size())
        return rows("x") + _size(a["table"]), written
    if kernel in ("attend", "probabilities", "grad_key", "grad_query"):
        names = {"attend": "q k v", "probabilities": "q k", "grad_key": "q k v g", "grad_query": "q k v g"}[kernel]
        extra = [x for flag, x in (("SHIFT_Q", "qx"), ("SHIFT_K", "kx"), ("SHIFT_V", "vx")) if a.get(flag)]
        read = rows(*names.split(), *extra) + sum(terms)
        written = {"attend": ["o", "lse"], "probabilities": [], "grad_key": ["dk", "dv"], "grad_query": ["dq"]}[kernel]
        stored = 0.0
        if kernel == "probabilities" or a.get("STORE"):
            others = {"WM": max(a["UNIT"], a["BM"]), "WN": a["UNIT"], "heads": a["heads"], "B": a["B"]}
            keyed = kernel == "grad_key"
            band = (-a["offset"], -a["lo"], a["hi"]) if keyed else (a["offset"], a["hi"], -a["lo"])
            sizes = (a["Tk"], a["Tq"]) if keyed else (a["Tq"], a["Tk"])
            named = dict(zip(("offset", "ahead", "behind", "rows", "others"), (*band, *sizes), strict=True))
            stored = windows[_key(a["out"].z)] = _window({**others, **named}, a["out"].z.element_size())
        if "stats" in a:
            read += _size(a["stats"], share)
        return read, rows(*written) + stored
    if kernel == "fold":
        return windows.get(_key(a["dz"]), 0.0) + (rows("acc") if a["ACC"] else 0.0) + _size(a["table"]), rows("out")
    if kernel == "collect":
        return windows.get(_key(a["dz"]), 0.0) + rows("x"), _size(a["out"])
    if kernel == "collect_scalars":
        gate = _size(a["gate"], a["heads"] / a["gate"].shape[1]) if a["GATED"] else 0.0
        return windows.get(_key(a["dz"]), 0.0) + gate, _size(a["out"])
    if kernel == "reduce":
        read = _size(a["parts"], share) if a["PARTS"] else 0.0 if a["ENDS"] else _size(a["partial"])
        return read, 0.0 if a["ENDS"] else rows("grad")
    return 0.0, 0.0


def planned(call, do, pass_: str) -> list[dict]:
    """The Triton launches of a pass in order, with the fewest bytes of each; nothing runs."""
    from tilewise.triton.launch import launcher

    found, windows = [], {}

    def note(kernel, grid, *args, **meta):
        named = dict(zip(kernel.arg_names, args, strict=False)) | meta
        read, written = fewest(kernel.__name__, named, windows, grid[0])
        found.append({"kernel": kernel.__name__, "fewest_read": read, "fewest_written": written})

    runs = dict(zip(("forward", "backward"), passes_of(call, do), strict=True))
    launcher.append(note)
    try:
        runs[pass_]()
    finally:
        launcher.pop()
    return found


def joined(measured: list[dict], plan: list[dict]) -> list[dict]:
    """Measured kernels with the plan's counts, launch by launch; PyTorch's own kernels have none.

    Raises:
        ValueError: the kernels of the plan are not those that ran, in their order.
    """
    rest, rows = list(plan), []
    for row in measured:
        if rest and row["kernel"] == rest[0]["kernel"]:
            row = {**row, **rest.pop(0)}
        rows.append(row)
    if rest:
        raise ValueError(f"planned {rest[0]['kernel']}, which did not run; ran {[r['kernel'] for r in measured]}")
    return rows


def table(name: str, rows: list[dict]) -> list[str]:
    """Lines of a table in MiB and µs, with the sums last."""
    lines = [f"{name:<34}{'µs':>8}{'read':>9}{'fewest':>9}{'written':>9}{'fewest':>9}  MiB"]
    keys = ("us", "read", "fewest_read", "written", "fewest_written")
    total = {"kernel": "all", **{key: sum(row.get(key, 0.0) for row in rows) for key in keys}}
    for row in (*rows, total):
        cells = [f"{row['us']:8.1f}"]
        cells += [f"{row[key] / 2**20:9.1f}" if key in row else f"{'':9}" for key in keys[1:]]
        lines.append(f"{row['kernel'][:33]:<34}{''.join(cells)}")
    return lines


def child(calls: list[str], seconds: float):
    """Run each pass twice, the second time with the profiler on and a mark behind it; none begins after `seconds`."""
    until = time.time() + seconds
    for call in calls:
        if time.time() > until:
            break
        case, N, pass_, d = parts_of(call)
        runs = dict(zip(("forward", "backward"), passes_of(*timed_call(case, N, "cuda", d=d)), strict=True))
        runs["forward"]()
        runs[pass_]()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        runs[pass_]()
        torch.cuda._sleep(1000)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
        del runs
        torch.cuda.empty_cache()


def by_call(rows: list[dict]) -> list[list[dict]]:
    """The kernels of each call, between the marks; those of a call that did not end are left out."""
    found, current = [], []
    for row in rows:
        if MARK in row["kernel"]:
            found.append(current)
            current = []
        else:
            current.append(row)
    return found


def profiled(calls: list[str], seconds: float) -> str:
    """What ncu prints of a process that runs the calls.

    Raises:
        subprocess.TimeoutExpired, FileNotFoundError: it did not end; there is no ncu.
    """
    command = [
        "ncu", "--target-processes", "all", "--profile-from-start", "off", "--clock-control", "none", "--csv",
        "--page", "raw", "--print-units", "base", "--metrics", f"{READ},{WRITTEN},{TIME}", sys.executable, __file__,
        "--child", ",".join(calls), "--seconds", str(0.75 * seconds),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds)
    return done.stdout


def main():
    from relative_ahead import precompile
    from rounds import environment

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="relative_traffic.json")
    parser.add_argument("--calls", default=",".join(CALLS))
    parser.add_argument("--seconds", type=float, default=180, help="of everything, compiling included")
    parser.add_argument("--compile-seconds", type=float, default=60)
    parser.add_argument("--csv", help="a saved output of ncu for these calls")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.child.split(","), arguments.seconds)
    end, calls, wrong = time.time() + arguments.seconds, arguments.calls.split(","), []
    try:
        if arguments.csv:
            text = Path(arguments.csv).read_text()
        else:
            jobs = dict.fromkeys(("traffic", case, N, d) for case, N, _, d in map(parts_of, calls))
            precompile(list(jobs), arguments.compile_seconds)
            text = profiled(calls, max(5.0, end - time.time()))
        measured = by_call(parse(text))
    except (ValueError, subprocess.TimeoutExpired, FileNotFoundError) as error:
        print(f"{type(error).__name__}: {str(error)[:600]}", flush=True)
        sys.exit(1)
    results = []
    for name, kernels in zip(calls, measured, strict=False):
        case, N, pass_, d = parts_of(name)
        try:
            rows = joined(kernels, planned(*timed_call(case, N, "meta", d=d), pass_))
        except ValueError as error:
            wrong.append(name)
            print(f"{name}: {error}", flush=True)
            # What was measured is worth keeping without the plan.
            rows = kernels
        print("\n".join(table(name, rows)), flush=True)
        results.append({"call": name, "kernels": rows})
    Path(arguments.out).write_text(json.dumps({**environment(), "calls": results}, indent=1))
    if missing := calls[len(results) :] + wrong:
        print("without a result or a plan:", ", ".join(missing), flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
