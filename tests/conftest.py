"""Uninitialised memory is NaN in every test, so a value that nothing wrote cannot pass; one thread pool for all."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch):
    """torch.empty and its kin return NaN (floating) or a large value (integer) instead of what the memory held."""

    def poison(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta and type(tensor) is torch.Tensor:
                with torch.no_grad():
                    if tensor.dtype.is_floating_point:
                        tensor.fill_(float("nan"))
                    elif tensor.dtype in (torch.int32, torch.int64):
                        tensor.fill_(-(2**31) + 1)
            return tensor

        return made

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
