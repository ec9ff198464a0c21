"""A benchmark set whose systems misbehave, for the runner's tests; worker processes import it by its path.

A process takes its cells by length, then by case. "mixed" dies in (a, 2), is wrong in (b, 2), raises in (a, 4) and is
right in (b, 4); "hangs" does so in the backward of (a, 4); "slow" compiles until the file $SLOW_COMPILER exists.
"""

import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from tilewise.bench.cells import Truth, Workload


class Fake:
    name = "fake"
    cases = ("a", "b")
    systems = ("mixed", "hangs", "fine", "slow")

    def baseline(self, device):
        return "sdpa"

    def sizes(self, case, device):
        return {"n": (2, 4), "width": (4,)}

    def passes(self, case):
        return ("fwd", "bwd")

    def check_size(self, size):
        if size["width"] != 4:
            raise ValueError(f"width is {size['width']}; expected 4")

    def dtype(self, device):
        return "float32"

    def default_systems(self, device):
        return self.systems

    def supports(self, case, system, device):
        return True

    def ceiling(self, case, system):
        return False

    def compiles(self, system):
        # Both compile where one is slow: what only measures could hold the device's lock before "slow" has begun.
        return system == "slow" or "SLOW_COMPILER" in os.environ

    def kernels(self, cell):
        return cell.case

    def warm(self, cell):
        return (cell,)

    def compiling(self, system):
        return nullcontext()

    def truth_bytes(self, cell):
        return 64

    def inputs(self, cell):
        n = cell.size["n"]
        generator = torch.Generator().manual_seed(n)
        return torch.randn(n, 4, generator=generator), torch.ones(n, 4)

    def build(self, cell):
        x, upstream = self.inputs(cell)
        x.requires_grad_()
        if slow := os.environ.get("SLOW_COMPILER"):
            # "fine" is ready only after "slow" has begun, however long that takes to start.
            begun = Path(f"{slow}, and has begun")
            if cell.system == "slow":
                begun.touch()
            while not (Path(slow) if cell.system == "slow" else begun).exists():
                time.sleep(0.05)

        def run():
            match cell.system, cell.case, cell.size["n"]:
                case "mixed", "a", 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                case "mixed", "b", 2:
                    return x.sin() * 1.5
                case "mixed", "a", 4:
                    raise RuntimeError("no such luck")
                case "hangs", "a", 4 if torch.is_grad_enabled():
                    time.sleep(600)
            return x.sin()

        return Workload(run, {"x": x}, upstream, lambda: x.cos(), [x])

    def truth(self, cell):
        x, _ = self.inputs(cell)
        return Truth({"o": x.double().sin(), "dx": x.double().cos()}, {"o": 1e-7, "dx": 1e-7})

    def flops(self, cell, pass_):
        return 1e6 * cell.size["n"]

    def packages(self):
        return ("torch", "no-such-package")


FAKE = Fake()
