"""Bytes of a pass, counted from the operators' arguments, against the formula of the two-phase schedule."""

import pytest
import torch

pytest.importorskip("triton")

from tilewise.bench.depth_bytes import count
from tilewise.depth import InferenceState, Schedule
from tilewise.nn import AttnRes

D, TOKENS = 16, 1032


def counted(schedule):
    module = AttnRes(D, schedule)
    state = InferenceState(schedule, module.reads(), TOKENS, overlap_tokens=0)
    return count(state, TOKENS, torch.ones(schedule.sublayers + 1, D))


def test_full_moves_no_more_than_the_two_phase_formula_allows():
    """128 sublayers: 2,135 vectors where the operators' count is 1,972 and the paper's, keys and values apart, 2,901."""
    schedule = Schedule.full_attention(128)
    found = counted(schedule)
    assert found.vectors == 2135
    assert found.vectors <= 1.3 * sum(schedule.vectors_moved())
    # Scores are 1 % of the traffic at the width that is meant.
    assert 4 * found.scalars < 0.02 * found.vectors * 7168 * 2


def test_block_counts_every_vector():
    """Block of S = 4 over 8: embedding copied and read, its scores; merges of 3 and 5 vectors; the block's completion
    by an add and a read, its weighted sums; the output read over 2 sources."""
    found = counted(Schedule.block(8, 4, one_pass_sources=0))
    copied, scored, first = 2, 1, 2
    merges = 3 + 5 + 5
    completed, summed = 4, 2 + 4
    output = 2 + 1 + 5
    second = 2 + 3 + 5 + 5
    assert found.vectors == copied + scored + first + merges + completed + summed + second + output
