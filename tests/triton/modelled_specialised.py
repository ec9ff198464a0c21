"""The warp-specialised Hopper forward, as :mod:`gluon_model` runs it, against the fp64 oracle.

A process of its own, since the interpreter's switch is read at import.
python modelled_specialised.py NAME …   prints one JSON line a job: its name and what missed its budget.
"""

import json
import sys

import modelled
import torch
from modelled import BRAIN
from modelled_overlapped import BUCKETS, call_of, verdict

from tilewise import Mask, rows
from tilewise.triton import specialised
from tilewise.triton.specialised import Shape

TWO, THREE = Shape(2, 64, 2, 240), Shape(3, 64, 3, 160)
WIDE = Shape(2, 128, 3, 240)
RESIDENT = Shape(2, 64, 3, 240, resident=True)
ORDERED = Shape(3, 64, 2, 160, ordered=True, resident=True)
CAUSAL = rows.t5_buckets(32, 40, False)
LENGTHS = lambda: Mask.lengths(torch.tensor([330, 0]))  # noqa: E731

JOBS = {
    "none": (TWO, lambda: call_of(None, 384, H=2)),
    "none-odd": (THREE, lambda: call_of(None, 300, B=2)),
    "none-short": (THREE, lambda: call_of(None, 70, 30)),
    "none-wide": (WIDE, lambda: call_of(None, 400, d=128, dtype=BRAIN)),
    "none-resident": (RESIDENT, lambda: call_of(None, 300, 333, H=3)),
    "t5": (TWO, lambda: call_of(BUCKETS, 580)),
    "t5-odd": (WIDE, lambda: call_of(BUCKETS, 555, table=torch.float32)),
    "t5-three": (THREE, lambda: call_of(BUCKETS, 400, B=2, H=2, Hk=1, d=128)),
    "t5-shared": (TWO, lambda: call_of(BUCKETS, 400, H=2, Hk=1, shared=True, scale=1.0)),
    "t5-causal": (TWO, lambda: call_of(CAUSAL, 500, mask=Mask.causal())),
    "t5-causal-three": (THREE, lambda: call_of(CAUSAL, 500, mask=Mask.causal(), d=128)),
    "t5-window": (TWO, lambda: call_of(BUCKETS, 500, mask=Mask.window(150, 70))),
    "t5-lengths": (TWO, lambda: call_of(BUCKETS, 400, B=2, mask=LENGTHS())),
    "t5-padding": (TWO, lambda: call_of(BUCKETS, 300, mask=Mask.padding(torch.arange(300)[None] % 7 > 2))),
    "t5-packed": (THREE, lambda: call_of(BUCKETS, 420, mask=Mask.packed([0, 250, 420]))),
    "t5-cross": (THREE, lambda: call_of(BUCKETS, 130, 520)),
    "t5-long-queries": (TWO, lambda: call_of(BUCKETS, 520, 130)),
    "t5-offset": (TWO, lambda: call_of(BUCKETS, 300, 300, offset=37)),
    "t5-bf16": (TWO, lambda: call_of(BUCKETS, 400, dtype=BRAIN, table=torch.float32)),
    "t5-resident": (RESIDENT, lambda: call_of(BUCKETS, 330, B=2, H=2, mask=Mask.window(90, 60))),
    "t5-ordered": (ORDERED, lambda: call_of(BUCKETS, 420, 400, B=2)),
    "clipped": (THREE, lambda: call_of(rows.clipped(-90, 20), 460)),
    "windowed": (TWO, lambda: call_of(rows.windowed(-9, 30), 460)),
    "wide-causal": (WIDE, lambda: call_of(BUCKETS, 400, d=128, mask=Mask.causal())),
    "wide-lengths": (TWO, lambda: call_of(BUCKETS, 400, B=2, d=128, mask=LENGTHS())),
}

ATTEND, COPY, TILES, KERNEL = "_attend", "_copy", "_tiles", "attend_specialised"
PRODUCT, FREED = "        acc = warpgroup_mma_wait(0, deps=[sums])\n", "        _free(free, turn, STAGES)\n"
BROKEN = {
    "early": ("t5", ATTEND, f"    {PRODUCT}    {FREED}", f"    {FREED}    {PRODUCT}"),
    "last": ("none-resident", ATTEND, PRODUCT + FREED, FREED + PRODUCT),
    "phase": ("t5", ATTEND, "_await(full, turn + 1, STAGES)", "_await(full, turn, STAGES)"),
    "filled": ("t5", COPY, "_await(free, turn + STAGES, STAGES)", "_await(free, turn, STAGES)"),
    "unasked": ("t5", COPY, "_await(free, turn + STAGES, STAGES)", "pass"),
    "kept": ("none-resident", ATTEND, "        _free(free, turn, STAGES)\n        turn += 1\n        served",
             "        turn += 1\n        served"),
    "order": ("t5-ordered", "_begun", "(GROUP + 1) % GROUPS", "GROUP"),
    "one": ("t5", KERNEL, "free.index(stage), count=GROUPS", "free.index(stage), count=1"),
    "bytes": ("t5", COPY, "2 * BYTES", "BYTES"),
    "values": ("t5", COPY, "_key_of(u - 1, t1", "_key_of(u, t1"),
    "queries": ("none-resident", ATTEND, "served & 1", "0"),
    "rows": ("t5", ATTEND, "i0 = i0 + GROUP * _ROWS", "i0 = i0 + (1 - GROUP) * _ROWS * 0"),
    "ranges": ("t5-causal-three", TILES, "beyond = gl.maximum(beyond, to)", "beyond = to"),
    "spare": ("t5-packed", ATTEND, "if i0 < Tq:", "if i0 >= 0:"),
    "band": ("t5", TILES, "i0 + GROUPS * _ROWS - 1", "i0 + _ROWS - 1"),
}  # fmt: skip
"""One mistake each in a function, and a job that must miss or stop."""


def found(name: str) -> str | None:
    """How the mistake shows; None where it does not."""
    job, function, right, wrong = BROKEN[name]
    return modelled.mistaken(getattr(specialised, function), right, wrong, lambda: missed(job))


def missed(name: str) -> list[str]:
    shape, call = JOBS[name]
    # Fewer programs than blocks.
    specialised._processors = lambda device: 2
    return verdict(call(), lambda layout, o, lse: specialised.forward(layout, o, lse, shape))


if __name__ == "__main__":
    modelled.quicken()
    modelled.exact_bf16()
    for name in sys.argv[1:]:
        if name.startswith("broken:"):
            print(json.dumps({"name": name, "found": found(name[7:])}), flush=True)
            continue
        print(json.dumps({"name": name, "missed": missed(name)}), flush=True)
