"""A whole model on the Triton kernels on a CUDA device, in bf16: its cache against its forward pass, checkpointing."""

from typing import NamedTuple

import pytest
import torch

from tilewise.carried import CarriedConfig
from tilewise.carried.llama import CarriedLlama, KeyValueCache, LlamaOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PLANS = ("recompute", "stored", "mixed")
DEVICE, IMPL, DTYPE = "cuda", "triton", torch.bfloat16
SIZES = {"vocabulary": 256, "width": 256, "layers": 6, "heads": 4, "kv_heads": 2, "hidden": 384}


def model_of(impl=None, dtype=None, checkpointed=False, device=None, **options):
    torch.manual_seed(0)
    carried = CarriedConfig(impl=impl or IMPL, **options)
    model = CarriedLlama(LlamaOptions(carried=carried, **SIZES), checkpointed=checkpointed)
    return model.to(device or DEVICE, dtype or DTYPE)


class Generation(NamedTuple):
    """Prefill in chunks, then token by token, and one forward pass over all tokens."""

    windows: tuple | None

    def results(self, model, device):
        """All tokens, those generated, their logits from one pass and from the cache."""
        prompt, count = torch.randint(256, (2, 300), device=device), 24
        with torch.no_grad():
            new = model.generate(prompt, count, chunk=130)
            tokens = torch.cat([prompt, new], 1)
            whole, cache = model(tokens), KeyValueCache(tokens.shape[1])
            parts = [*prompt.split(130, 1), *new.split(1, 1)]
            cached = torch.cat([model(part, cache=cache) for part in parts], 1)
        assert new.shape == (2, count)
        return tokens, new, whole, cached

    def launch(self):
        self.results(model_of(windows=self.windows, device="cpu"), "cpu")


class Training(NamedTuple):
    """A loss and its gradients, checkpointed and not."""

    plan: str

    def results(self, device):
        tokens = torch.randint(256, (2, 301), device=device)
        for checkpointed in (False, True):
            model = model_of(checkpointed=checkpointed, plan=self.plan, device=device)
            loss = model.loss(tokens)
            yield [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    def launch(self):
        for _ in self.results("cpu"):
            pass


LAUNCHED = {
    "test_a_cached_generation_is_the_forward_pass": Generation,
    "test_a_checkpointed_model_has_the_same_gradients": Training,
}
"""Test ↦ what it launches, from its parameters."""


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("windows", [None, (100, 100, 100, None)])
def test_a_cached_generation_is_the_forward_pass(windows):
    """Prefill in chunks, then token by token: errors of the logits against fp64 as those of one forward pass over all
    tokens, and every token the best of that pass's logits as far as the two differ."""
    model = model_of(windows=windows)
    exact = model_of("reference", windows=windows)
    exact.load_state_dict(model.state_dict())
    exact.double()
    tokens, new, whole, cached = Generation(windows).results(model, DEVICE)
    with torch.no_grad():
        true = exact(tokens)
    assert cached.shape == whole.shape == true.shape
    assert distance(whole, true) < 0.03
    assert distance(cached, true) <= 1.5 * distance(whole, true)
    seen = whole[:, -new.shape[1] - 1 : -1].float()
    apart = (whole.float() - cached.float()).abs().max()
    assert (seen.amax(-1) - seen.gather(-1, new[..., None])[..., 0]).max() <= 2 * apart


@pytest.mark.parametrize("plan", [*PLANS, "auto"])
def test_a_checkpointed_model_has_the_same_gradients(plan):
    results = list(Training(plan).results(DEVICE))
    assert torch.equal(results[0][0], results[1][0])
    for a, b in zip(*results, strict=True):
        assert a.isfinite().all()
        # The embedding's gradient is added up in an order that PyTorch does not fix.
        assert distance(a, b) <= 1e-3
