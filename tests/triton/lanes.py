"""A numpy interpreter for the PTX that the Hopper kernels inline: 128 threads, registers of 32 bits, quad shuffles."""

import re
from functools import lru_cache

import numpy as np

THREADS = np.arange(128, dtype=np.uint32)


@lru_cache
def _place(k: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and first column of the k-th pair of entries of each thread."""
    warp, lane = THREADS // 32, THREADS % 32
    return 16 * warp + 8 * (k % 2) + lane // 4, 8 * (k // 2) + 2 * (lane % 4)


def fragment(tile: np.ndarray) -> list[np.ndarray]:
    """The registers (128 threads each) that hold a [64, 64] tile as a Hopper product leaves it.

    16 for 16-bit values, register 2n + s of a thread: columns 8n + 2·(lane mod 4) + {0, 1} of row 16·warp + 8·s +
    lane / 4, low half first; 32 for 32-bit values, the two columns one after the other.
    """
    registers = []
    for k in range(16):
        row, column = _place(k)
        pair = tile[row, column].astype(np.uint32), tile[row, column + 1].astype(np.uint32)
        registers += [pair[0] | pair[1] << 16] if tile.itemsize == 2 else pair
    return registers


def tile_of(registers: list[np.ndarray]) -> np.ndarray:
    """The inverse of :func:`fragment`."""
    wide = len(registers) == 32
    tile = np.zeros((64, 64), np.uint32 if wide else np.uint16)
    for k in range(16):
        row, column = _place(k)
        pair = registers[2 * k : 2 * k + 2] if wide else (registers[k] & 0xFFFF, registers[k] >> 16)
        tile[row, column], tile[row, column + 1] = pair
    return tile


@lru_cache(maxsize=16)
def _instructions(ptx: str) -> list[tuple[str, str, list[str]]]:
    """(name, destination, sources) of each instruction."""
    found = []
    for line in re.split(r"[;\n]", ptx.strip()[1:-1]):
        line = line.strip()
        if line and not line.startswith(".reg"):
            name, rest = line.split(maxsplit=1)
            to, *sources = [a.strip() for a in rest.split(",")]
            found.append((name, to, sources))
    return found


def execute(ptx: str, outputs: int, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Run the text on all threads at once; %0 … are the outputs, then come the inputs."""
    state = {f"${outputs + n}": x for n, x in enumerate(inputs)}

    def value(name: str) -> np.ndarray:
        if name == "%tid.x":
            return THREADS
        if name in state:
            return state[name]
        return np.full(128, int(name, 0), np.uint32)

    for name, to, sources in _instructions(ptx):
        a = [value(s) for s in sources]
        operation = name.split(".")[0]
        if operation == "mov":
            state[to] = a[0]
        elif operation == "and":
            state[to] = a[0] & a[1]
        elif operation == "shr":
            state[to] = a[0] >> a[1]
        elif operation == "add":
            state[to] = a[0] + a[1]
        elif operation == "sub":
            state[to] = a[0] - a[1]
        elif operation == "setp":
            compare = {"lt": np.less, "ge": np.greater_equal, "gt": np.greater, "eq": np.equal, "ne": np.not_equal}
            state[to] = compare[name.split(".")[1]](a[0], a[1])
        elif operation == "selp":
            state[to] = np.where(a[2], a[0], a[1])
        elif operation == "prmt":
            both = a[0].astype(np.uint64) | a[1].astype(np.uint64) << 32
            out = np.zeros(128, np.uint64)
            for byte in range(4):
                pick = (a[2] >> 4 * byte & 7).astype(np.uint64)
                out |= (both >> 8 * pick & np.uint64(255)) << np.uint64(8 * byte)
            state[to] = out.astype(np.uint32)
        elif operation == "shfl":
            assert name == "shfl.sync.idx.b32"
            assert (a[3] == 0xFFFFFFFF).all()
            segment, clamp, lane = a[2] >> 8 & 31, a[2] & 31, THREADS & 31
            source = (lane & segment) | (a[1] & 31 & ~segment)
            assert (source <= (lane & segment | clamp & ~segment)).all()
            state[to] = a[0][THREADS - lane + source]
        else:
            raise ValueError(f"unknown instruction {name}")
    return [state[f"${n}"] for n in range(outputs)]
