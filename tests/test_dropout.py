"""The dropout generator: the published answers of Philox, its rate, and independence of how the work is cut."""

import torch

from tilewise.dropout import keep, philox, threshold

# Random123's kat_vectors for philox4x32 with 7 rounds: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


def test_published_answers():
    for counter, key, result in KNOWN:
        words = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
        assert [int(w) for w in words] == list(result)


def test_any_cut_gives_the_same_mask():
    seed, heads, rows = torch.tensor([0x1234_5678_9ABC]), torch.arange(6), torch.arange(33)
    whole = keep(seed, heads, rows, (0, 41), 0.3)
    assert whole.shape == (6, 33, 41)
    for h, i, (a, b) in ((slice(2, 4), slice(7, 20), (5, 18)), (slice(0, 6), slice(32, 33), (40, 41))):
        assert torch.equal(keep(seed, heads[h], rows[i], (a, b), 0.3), whole[h, i, a:b])
    assert not torch.equal(keep(seed + 1, heads, rows, (0, 41), 0.3), whole)


def test_the_rate_is_the_one_asked_for():
    kept = keep(torch.tensor([7]), torch.arange(4), torch.arange(250), (0, 1000), 0.1).double()
    # One million draws: four standard deviations of the mean are 1.2e-3.
    assert abs(kept.mean().item() - 0.9) < 1.2e-3
    assert kept.mean((1, 2)).std() < 2e-3
    assert threshold(0.0) == 0
    assert keep(torch.tensor([7]), torch.arange(1), torch.arange(9), (0, 9), 0.0).all()
