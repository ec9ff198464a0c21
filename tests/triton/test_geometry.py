"""Where entries of skewed buffers lie: none share a place, each offset finds its column; and what the core knows."""

import re
from pathlib import Path

import pytest
import torch

import tilewise
from tilewise import rows
from tilewise.triton.terms import FAR, Geometry, column_rows, end_rows, rows_of, saturation

SOURCE = Path(tilewise.__file__).parent / "triton"


def held(g: Geometry, r: int) -> tuple[int, int]:
    """[from, to) of the others that row r stores: its band in blocks of g.tile, as the kernels compute it."""
    WM, WN = g.tile
    offset, ahead, behind = (-g.offset, -g.lo, g.hi) if g.keyed else (g.offset, g.hi, -g.lo)
    first, whole = r // WM * WM, -(-g.others // WN) * WN
    a = min(max(first + offset - ahead + 1, 0) // WN * WN, whole)
    e = -(-max(first + WM - 1 + offset + behind, 0) // WN) * WN
    return a, min(max(e, a), whole)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("tile", [(64, 64), (64, 128), (128, 64)])
@pytest.mark.parametrize(
    ("n_rows", "others", "offset", "lo", "hi"),
    [(700, 700, 0, -64, 64), (900, 500, 0, -17, 3), (300, 1000, 700, -90, 91), (300, 1000, -5, 40, 60),
     (1000, 1000, 0, -512, 506), (300, 300, 0, -FAR, FAR), (1, 900, 899, -16, 16),
     (500, 900, 130, -20, 7), (900, 300, -333, -5, 5), (20, 40, 500, -64, 64), (20, 40, -500, -64, 64),
     (1, 80, 300, -16, 16)],
)  # fmt: skip
def test_every_entry_has_its_place(n_rows, others, offset, lo, hi, keyed, tile):
    g = Geometry.make(n_rows, others, offset, lo, hi, tile, keyed)
    assert g.shift % 16 == g.stride % 16 == g.head % 16 == g.first % 16 == 0
    # What a descriptor and a table of columns need, even where nothing is stored.
    assert min(g.head, g.width, g.last - g.first) > 0
    previous = -1
    for r in range(n_rows):
        a, e = held(g, r)
        if a == e:
            continue
        begin, end = r * g.stride + a + g.shift, r * g.stride + e + g.shift
        assert begin > previous, "two rows share a place"
        assert end <= g.head
        assert 0 <= a + g.shift
        previous = end - 1
        for other in (a, min(e, others) - 1):
            column = other + g.shift - r
            assert g.first <= column < g.last
            delta = r + offset - other if not keyed else other + offset - r
            assert (g.top - column if not keyed else column - g.top) == delta
        # The band itself is inside: an offset between the ends lies in a stored block.
        for other in range(0, others, 7):
            delta = r + offset - other if not keyed else other + offset - r
            if lo < delta < hi:
                assert a <= other < e


def test_columns_find_the_rows_of_their_offsets():
    for m in (rows.clipped(-7, 5, descending=True), rows.t5_buckets(), rows.windowed(-3, 4), rows.identity(400)):
        lo, hi = saturation([m], FAR) or (-FAR, FAR)
        for keyed in (False, True):
            g = Geometry.make(300, 260, 20, lo, hi, (64, 64), keyed)
            found = column_rows(m, g, g.first, g.last, torch.device("cpu"))
            Tq, Tk = (260, 300) if keyed else (300, 260)
            for column in range(g.first, g.last, 5):
                delta = column - g.top if keyed else g.top - column
                if 20 + 1 - Tk <= delta <= Tq - 1 + 20:
                    assert found[column - g.first] == m(torch.tensor([delta]))[0]


def test_ends_of_maps():
    assert end_rows(rows.clipped(-2, 3)) == (5, 0)
    assert end_rows(rows.windowed(-2, 3)) == (rows.NO_ROW, rows.NO_ROW)
    assert end_rows(rows.identity(9)) == (-1, -1)
    assert saturation([rows.clipped(-2, 3), rows.clipped(-9, 1)], 20) == (-9, 3)
    assert saturation([rows.clipped(-2, 3), rows.identity(9)], 20) is None
    assert saturation([rows.clipped(-2, 30), rows.clipped(-900, 1)], 20) == (-20, 20)
    assert saturation([rows.clipped(200, 300)], 20) == (20, 20)


def test_few_buckets_of_a_vast_distance_list_no_more_offsets_than_a_call_has():
    """Their ends: (−130,561, 512) and (−5e17, 1e9)."""
    delta = torch.arange(-3000, 3000)
    for m in (rows.deberta_buckets(5, 512), rows.deberta_buckets(5, 10**9), rows.t5_buckets(32, 10**9)):
        assert saturation([m], 1500)[0] == -1500
        assert torch.equal(rows_of(m, delta), m(delta))


def test_the_core_names_no_mechanism_and_no_kernel_is_atomic():
    names = re.compile(r"shaw|t5|deberta|transformer.?xl|txl|alibi|vits|wavlm|inkling|mpnet|conformer", re.IGNORECASE)
    for path in SOURCE.glob("core*.py"):
        assert names.findall(path.read_text()) == [], path
    for path in SOURCE.glob("*.py"):
        text = path.read_text()
        assert "atomic_" not in text, path
        assert not re.search(r"from \.\.(reference|blocked)|import (reference|blocked)", text), path
        assert len(text.splitlines()) < 400, path
