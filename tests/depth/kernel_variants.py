"""Count the variants of depth kernels that calls with many numbers of tokens ask Triton for; nothing is compiled.

Prints a JSON object: T → names of kernels first asked for at that T. Run by `test_depth_kernels.py`.
"""

import json

import depth_aot
import torch
from triton.runtime.jit import JITFunction

from tilewise.bench.ahead import compile_for

ASKED: set[tuple[str, str]] = set()
WARM = (2000, 2001, 4096, 1101, 8191, 1, 7, 128, 1000)
LATER = (3, 9, 16, 64, 100, 513, 1008, 1023, 1025, 1040, 1999, 3000, 5000, 8192, 10007)


def remember(self, key, *args):
    """In place of the compiler. What Triton looks a compiled kernel up by decides whether it is another variant."""
    if self.fn.__module__.startswith("tilewise.depth."):
        ASKED.add((self.fn.__name__, str(key)))


def ask(kernel, grid):
    return lambda *args, **meta: kernel.run(*args, grid=grid, warmup=True, **meta)


def main() -> None:
    compile_for(90)
    JITFunction._do_compile = remember
    JITFunction.__getitem__ = ask
    found = {}
    for T in (*WARM, *LATER):
        before = set(ASKED)
        depth_aot.launch_all(torch.bfloat16, 2304, T, 8, 8)
        found[T] = sorted(name for name, _ in ASKED - before)
    print(json.dumps({"warm": {T: found[T] for T in WARM}, "later": {T: found[T] for T in LATER}}))


if __name__ == "__main__":
    main()
