"""Tile sweeps of `depth_kernels.py`: for each kernel and shape, the entries of the tile table to try."""

from typing import NamedTuple

from tilewise.depth.triton import config


class Sweep(NamedTuple):
    """A kernel and its shape, overrides of a function of the tile table, bytes moved, where an override applies."""

    kind: str
    shape: tuple
    table: str
    changes: list
    bytes: int
    where: object


BIG, TRAIN, FEW = (8192, 7168), (8192, 2048), (128, 7168)


def grid(names, *rows):
    """Rows of numbers as keyword overrides."""
    return [dict(zip(names.split(), map(int, row.split()), strict=True)) for row in rows]


def unit(shape):
    return 2 * shape[0] * shape[1]


def big(T, d, *_):
    return not config.few(T) and d > 4096


def small(T, d, *_):
    return not config.few(T) and d <= 4096


def few(T, *_):
    return config.few(T)


def sweeps():
    """label -> Sweep."""
    kinds = {}

    def add(label, kind, shape, table, names, rows, tensors, where):
        kinds[label] = Sweep(kind, shape, table, grid(names, *rows), int(tensors * unit(shape)), where)

    names = "BD span num_warps STAGES"
    rows = [
        "256 7 4 3",
        "128 14 4 3",
        "128 14 4 4",
        "128 14 4 2",
        "64 28 4 4",
        "128 14 8 3",
        "128 28 4 3",
        "256 14 4 3",
    ]
    for n in (8, 3):
        add(f"combine {n}", "combine", (*BIG, n, 16), "combine_tiles", names, rows, n + 16, big)
    rows = ["128 8 4 3", "128 16 4 3", "128 4 4 3", "256 8 4 3", "64 16 4 4", "128 8 4 4"]
    add("combine 8, d 2048", "combine", (*TRAIN, 8, 8), "combine_tiles", names, rows, 16, small)
    rows = ["128 7 4 3", "128 4 4 3", "128 14 4 3", "256 4 4 3", "64 7 4 4", "128 3 4 3"]
    add("combine 8, decode", "combine", (*FEW, 8, 16), "combine_tiles", names, rows, 24, few)
    names = "GRAM SUB BT BK splits num_warps STAGES"
    rows = ["0 2 32 32 2 4 4", "1 1 32 64 2 4 3", "1 2 32 32 2 4 4"]
    rows += ["1 1 32 64 4 4 3", "1 2 32 64 3 8 3", "1 1 32 128 4 4 2"]
    for S in (96, 32):
        where = lambda T, d, m, _, S=S: big(T, d) and m > 16 and (m > 64) == (S > 64)  # noqa: E731
        add(f"complete {S}", "complete", (*BIG, S), "score_tiles", names, rows, 3, where)
    rows = ["0 1 32 32 1 4 4", "1 1 32 128 1 4 3", "1 1 32 64 1 4 4", "1 1 32 32 1 4 4", "1 2 32 64 1 4 3"]
    add("scores 8", "scores", (*TRAIN, 8, 8), "score_tiles", names, rows, 8, small)
    names = "GRAM BS BT BK splits num_warps STAGES"
    rows = ["0 128 16 128 14 4 3", "0 32 16 128 14 4 3", "0 16 16 128 14 4 3", "0 32 16 128 7 4 4", "0 16 16 128 4 4 4"]
    rows += ["1 32 16 128 14 4 3", "1 16 16 128 7 4 4", "0 64 16 128 14 4 3"]
    rows += ["2 32 16 128 14 4 3", "2 32 16 128 14 8 3", "2 64 16 128 14 4 3", "2 32 16 64 14 4 4"]
    add("complete 112, decode", "complete", (*FEW, 112), "score_tiles", names, rows, 3, few)
    names = "BS BT BN BD span num_warps STAGES"
    rows = ["4 8 8 128 14 4 3", "4 8 8 256 7 4 3", "2 16 8 128 14 4 3", "8 4 8 256 7 4 3", "8 4 8 128 14 4 4"]
    where = lambda T, d, n, S, _: big(T, d) and S == 1 and n > 4  # noqa: E731
    add("output read", "combine", (*BIG, 8, 1), "combine_tiles", names, rows, 9, where)
    rows = ["4 8 8 128 7 4 3", "4 8 8 128 2 4 3", "8 4 8 128 2 4 3", "8 4 8 256 1 4 2"]
    where = lambda T, d, n, S, _: few(T) and S == 1 and n > 4  # noqa: E731
    add("output read, decode", "combine", (*FEW, 8, 1), "combine_tiles", names, rows, 9, where)
    rows = ["8 0", "8 1", "16 0", "16 1", "4 0"]
    add("merge, decode", "merge", FEW, "merge_warps", "num_warps one", rows, 5, few)
    for n in (2, 4):
        rows = ["8", "16", "32"]
        add(
            f"mix {n}, decode",
            "mix",
            (*FEW, n),
            "mix_few",
            "num_warps",
            rows,
            n + 4,
            lambda T, d, m, n=n: few(T) and m == n,
        )
    rows = ["264 4 3", "132 8 3", "264 4 2", "264 8 2", "396 4 2"]
    add("merge backward", "merge_bwd", TRAIN, "merge_bwd", "programs num_warps STAGES", rows, 6, small)
    # The first row of each is the table's.
    names = "programs num_warps STAGES BD TAIL"
    for d, rows in (
        (2304, ["264 4 3 2048 256", "264 8 3 4096 0", "264 8 3 2048 512", "132 8 3 2048 512"]),
        (7168, ["132 16 2 8192 0", "132 16 1 8192 0", "132 16 2 4096 4096", "264 8 2 4096 4096"]),
    ):
        where = lambda T, wide, *_, d=d: not config.few(T) and wide == d  # noqa: E731
        add(f"merge backward, d {d}", "merge_bwd", (8192, d), "merge_bwd", names, rows, 6, where)
        rows = ["29", "30"] if d == 2304 else ["9", "10"]
        add(f"phase 1 backward 8, d {d}", "dv", (8192, d, 8, 6), "dv_tiles", "programs", rows, 2 * 14 + 4 * 8, where)
    rows = ["128 4 2 4", "128 8 2 4", "128 4 3 4", "128 4 2 6", "128 8 2 8"]
    for n in (8, 2):
        label, names = f"phase 1 backward {n}", "BD num_warps STAGES factor"
        where = lambda T, d, m, *_, n=n: small(T, d) and (m > 4) == (n > 4)  # noqa: E731
        add(label, "dv", (*TRAIN, n, 8), "dv_tiles", names, rows, 2 * (8 + n) + 4 * n, where)
    return kinds
