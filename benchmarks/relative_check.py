"""The checks of relative_cases.py on a GPU: several processes share it, since most of a check is the host's work.

    python benchmarks/relative_kernels.py check --out relative_check.json

A check compares O, lse and every gradient with dense attention in fp64, beside dense attention in the dtype under test,
and two runs bit for bit.
"""

from __future__ import annotations

import multiprocessing
import time

import torch
from relative_cases import CHECKS, check_one, label

PROCESSES = 8


def _begin() -> None:
    torch.set_num_threads(1)


def checked(n: int) -> dict:
    """The record of check n."""
    start = time.time()
    try:
        budgets = check_one(CHECKS[n], "cuda")
        record = dict(ok=all(b.ok for b in budgets), budgets=[vars(b) | {"ok": b.ok} for b in budgets])
    except Exception as error:
        record = dict(ok=False, error=f"{type(error).__name__}: {error}"[-500:])
    # What the dense references held would be missed by the other processes.
    torch.cuda.empty_cache()
    return dict(case=label(*CHECKS[n]), **record, seconds=time.time() - start)


def run_checks(chosen: list[int], until: float, processes: int = PROCESSES) -> list[dict]:
    """Records of the chosen checks in their order; those without a result at `until` (time.time()) have an error."""
    # The long sequences of DeBERTa first, so that the processes end together.
    order = sorted(chosen, key=lambda n: -CHECKS[n][3].Tq * CHECKS[n][3].Tk)
    found: dict[str, dict] = {}
    with multiprocessing.get_context("spawn").Pool(min(processes, len(order)), _begin) as pool:
        results = pool.imap_unordered(checked, order)
        try:
            for _ in order:
                record = results.next(timeout=max(0.1, until - time.time()))
                found[record["case"]] = record
                bad = [b for b in record.get("budgets", ()) if not b["ok"]]
                text = record.get("error", "") or "; ".join(
                    f"{b['name']} {b['error']:.1e}/{b['allowed']:.1e} rel {b['relative']:.0e}" for b in bad
                )
                print(
                    f"{'ok ' if record['ok'] else 'BAD'} {record['seconds']:5.1f} s {record['case']} {text}", flush=True
                )
        except multiprocessing.TimeoutError:
            print("the time is over", flush=True)
    late = dict(ok=False, error="no time left")
    return [found.get(name, dict(case=name, **late)) for name in (label(*CHECKS[n]) for n in chosen)]
