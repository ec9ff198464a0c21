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
    """128 sublayers: 2,135 vectors where the operators' count is 1,972, the paper's (keys and values apart) 2,901."""
    schedule = Schedule.full_attention(128)
    found = counted(schedule)
    assert found.vectors == 2135
    assert found.vectors <= 1.3 * sum(schedule.vectors_moved())
    # Scores are 1 % of the traffic at the width that is meant.
    assert 4 * found.scalars < 0.02 * found.vectors * 7168 * 2


def test_block_counts_every_vector():
    """S = 4 over 8: o1 of the first block is the embedding; the merge that reads the finished block also writes it."""
    found = counted(Schedule.block(8, 4, one_pass_sources=0))
    embedding = 2 + 1 + 2  # copied, scored, normed
    first = 3 + 5 + 5 + 5
    phase1 = 1 + 2 + 4
    second = 3 + 5 + 5 + 5
    assert found.vectors == embedding + first + phase1 + second
