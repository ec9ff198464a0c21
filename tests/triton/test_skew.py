"""The skew of Hopper's tiles: the inlined PTX, run thread by thread, against the formula; and the tiles it serves."""

import numpy as np
import pytest
from lanes import execute, fragment, tile_of

skew = pytest.importorskip("tilewise.triton.skew")

GENERATOR = np.random.default_rng(5)


def tile():
    return GENERATOR.integers(0, 2**16, (64, 64), dtype=np.uint16)


def by_register(text, *registers):
    return tile_of(execute(text, 16, [register for r in registers for register in r]))


def carried(x):
    """The registers of a tile as a loop carries them: those of even columns hold two."""
    wide = np.zeros((64, 64), np.uint32)
    wide[:, ::2] = x[:, ::2] | x[:, 1::2].astype(np.uint32) << 16
    return fragment(wide)


def test_fragments_hold_every_entry_once():
    x = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    assert (tile_of(fragment(x)) == x).all()
    assert (tile_of(carried(x))[:, ::2] >> 16 == x[:, 1::2]).all()


def test_right_shift_moves_row_r_by_r():
    last, here = tile(), tile()
    window = np.concatenate([last, here], 1)
    expected = np.stack([window[r, 64 - r : 128 - r] for r in range(64)])
    assert (by_register(skew.right_shift(), fragment(here), fragment(last)) == expected).all()
    assert (by_register(skew.right_shift(2), fragment(here), carried(last)) == expected).all()


def test_left_shift_is_its_mirror():
    before, now = tile(), tile()
    window = np.concatenate([before, now], 1)
    expected = np.stack([window[r, r : r + 64] for r in range(64)])
    assert (by_register(skew.left_shift(), fragment(now), carried(before)) == expected).all()
