"""Tile sweeps of `depth_kernels.py`: for each kernel and shape, the entries of the tile table to try."""


def grid(names, *rows):
    """Rows of numbers as keyword overrides."""
    names = names.split()
    return [dict(zip(names, map(int, row.split()), strict=True)) for row in rows]


COMBINE = "BD span num_warps STAGES"
BIG, TRAIN, FEW = (8192, 7168), (8192, 2048), (128, 7168)


def unit(T, d):
    return 2 * T * d


def sweeps():
    """label -> (kind, shape, overrides, bytes moved)."""
    kinds = {}
    for n in (8, 4):
        rows = ["256 14 4 3", "256 28 4 3", "256 7 4 3", "256 7 4 2", "256 7 4 4", "256 4 4 3", "256 14 8 3"]
        rows += ["128 14 4 4", "128 56 4 3", "128 14 4 3", "128 7 4 3"]
        pointers = grid(COMBINE + " tma", "256 7 4 3 0", "128 14 4 3 0")
        kinds[f"combine {n}"] = "combine", (*BIG, n, 16), grid(COMBINE, *rows) + pointers, (n + 16) * unit(*BIG)
    for queries in (96, 32):
        rows = [
            "32 64 4 3",
            "32 64 4 2",
            "32 64 8 3",
            "32 128 4 2",
            "32 128 8 2",
            "16 64 4 3",
            "32 32 4 4",
            "64 64 8 3",
        ]
        kinds[f"complete {queries}"] = (
            "complete", (*BIG, queries), grid("BT BK num_warps STAGES", *rows), 3 * unit(*BIG),
        )  # fmt: skip
    for n in (8, 2):
        rows = ["128 4 2 4", "128 4 1 4", "128 4 3 4", "128 8 2 4", "64 4 2 4", "64 4 3 6", "128 4 1 8", "256 8 1 4"]
        kinds[f"dv {n}"] = (
            "dv", (*TRAIN, n, 8), grid("BD num_warps STAGES factor", *rows), (2 * (8 + n) + 4 * n) * unit(*TRAIN),
        )  # fmt: skip
    rows = ["128 4 3", "128 4 4", "64 4 4", "256 4 3", "256 4 2", "128 2 3"]
    kinds["inner 8"] = "inner", (*TRAIN, 8, 8), grid("BK num_warps STAGES", *rows), 64 * unit(*TRAIN)
    rows = ["256 8 4 3", "256 4 4 3", "128 8 4 3", "128 16 4 3", "64 16 4 4"]
    kinds["combine 8, d 2048"] = "combine", (*TRAIN, 8, 8), grid(COMBINE, *rows), 16 * unit(*TRAIN)
    rows = ["264 4 3", "396 4 2", "264 4 2", "132 8 3", "264 8 3", "396 4 3"]
    kinds["merge backward"] = "merge_bwd", TRAIN, grid("programs num_warps STAGES", *rows), 6 * unit(*TRAIN)
    rows = ["264 4", "396 4", "528 4", "264 8", "132 8"]
    kinds["mix backward"] = "mix_bwd", (*TRAIN, 9), grid("programs num_warps", *rows), 28 * unit(*TRAIN)
    rows = ["128 7 4 3", "128 14 4 3", "256 4 4 3", "256 7 4 3", "128 4 4 3", "256 4 8 3"]
    kinds["combine 8, decode"] = "combine", (*FEW, 8, 16), grid(COMBINE, *rows), 24 * unit(*FEW)
    rows = ["16 128 14 4 3", "16 128 8 4 3", "32 128 28 4 2", "16 64 14 4 4", "16 128 16 8 3", "16 256 14 4 2"]
    names = "BT BK splits num_warps STAGES"
    kinds["complete 48, decode"] = "complete", (*FEW, 48), grid(names, *rows), 3 * unit(*FEW)
    kinds["merge, decode"] = "merge", FEW, grid("num_warps", "4", "8", "16"), 5 * unit(*FEW)
    return kinds
