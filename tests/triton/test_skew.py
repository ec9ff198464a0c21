"""The skew of Hopper's tiles: the inlined PTX, run thread by thread, against the formula; and the tiles it serves."""

import numpy as np
import pytest
from lanes import execute, fragment, tile_of

skew = pytest.importorskip("tilewise.triton.skew")

GENERATOR = np.random.default_rng(5)


def tile():
    return GENERATOR.integers(0, 2**16, (64, 64), dtype=np.uint16)


def by_register(which, *tiles):
    return tile_of(execute(which(), 16, [register for t in tiles for register in fragment(t)]))


def test_fragments_hold_every_entry_once():
    x = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    assert (tile_of(fragment(x)) == x).all()


def test_right_shift_moves_row_r_by_r():
    last, here = tile(), tile()
    window = np.concatenate([last, here], 1)
    expected = np.stack([window[r, 64 - r : 128 - r] for r in range(64)])
    assert (by_register(skew.right_shift, here, last) == expected).all()


def test_left_shift_is_its_mirror():
    before, now = tile(), tile()
    window = np.concatenate([before, now], 1)
    expected = np.stack([window[r, r : r + 64] for r in range(64)])
    assert (by_register(skew.left_shift, before, now) == expected).all()
