"""Tensors that calls share: the oldest are dropped, but none that a CUDA graph reads."""

import torch

from tilewise.triton import cached as module


def test_what_a_graph_reads_is_never_dropped(monkeypatch):
    capturing = False
    monkeypatch.setattr(module, "_capturing", lambda device: capturing)
    cpu, made = torch.device("cpu"), []

    @module.cached(2)
    def numbers(n, device):
        made.append(n)
        return torch.full((4,), n, device=device)

    first = numbers(1, cpu)
    assert numbers(1, cpu) is first
    capturing = True
    assert numbers(1, cpu) is first
    # Made during a capture: the graph's own.
    own = numbers(2, cpu)
    capturing = False
    assert numbers(2, cpu) is not own
    for n in (3, 4, 5):
        numbers(n, cpu)
    assert numbers(1, cpu) is first
    assert made == [1, 2, 2, 3, 4, 5]
    numbers(2, cpu)
    assert made[-1] == 2, "more than two are kept"
