"""A compiled block against the eager one for two lengths; prints each plan and how many graphs were compiled.

Then the loss of a whole model and its gradients, in every plan. With the argument ``cuda``: the kernels on a GPU, in
bf16, compiled by Inductor; prints the plans.
"""

import sys

import torch
from carried_cases import CarriedConfig, grads_of, inputs, run

from tilewise.carried import Carry, carried_attention
from tilewise.carried.llama import CarriedLlama, LlamaOptions
from tilewise.carried.triton import launch

GPU = sys.argv[1:] == ["cuda"]
GPU_OPTIONS, GPU_WIDTH, GPU_LENGTHS = {"impl": "triton", "windows": 200}, 64, (300, 520)
GPU_PLANS = ("recompute", "mixed", "stored")
SIZES = {"d": GPU_WIDTH, "dtype": torch.bfloat16, "device": "cuda"} if GPU else {"dtype": torch.float32}
OPTIONS = GPU_OPTIONS if GPU else {"impl": "blocked", "tile": 16, "windows": 20}
PLANS = GPU_PLANS if GPU else ("recompute", "mixed")
# In bf16 a product that Inductor forms may be rounded elsewhere than the eager one.
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2} if GPU else {"rtol": 1e-6, "atol": 1e-6}


def layers_of(plan):
    return 4 if plan == "mixed" else 2


def check(plan):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layers = layers_of(plan)
    config = CarriedConfig(layers=layers, plan=plan, **OPTIONS)

    @torch.compile(fullgraph=True, dynamic=True, backend="inductor" if GPU else "aot_eager")
    def block(q, k, v):
        return run(config, q, k, v)

    for T in GPU_LENGTHS if GPU else (37, 81):
        q, k, v = inputs(layers=layers, T=T, **SIZES)
        weights = [torch.randn_like(o) for o in q]
        eager, compiled = run(config, q, k, v), block(q, k, v)
        grads = [grads_of(o, [*q, *k, *v], weights) for o in (eager, compiled)]
        for a, b in zip([*eager, *grads[0]], [*compiled, *grads[1]], strict=True):
            torch.testing.assert_close(a, b, **TOLERANCE)
    print(plan if GPU else f"{plan}:{torch._dynamo.utils.counters['stats']['unique_graphs']}")


def check_that_the_kernels_conditions_can_be_traced():
    """Up to the last one, as on a GPU; the device is what keeps them from this one. Eight layers are stored."""
    launch.INTERPRETED = True
    # What is decided is asked here, and no kernel can run.
    launch.forward = lambda q, k, v, *_: (torch.zeros_like(q[-1]), q[-1].new_zeros(q[-1].shape[:3]).float())
    config = CarriedConfig(impl="triton", layers=8)

    @torch.compile(fullgraph=True, backend="eager")
    def stored(q, k, v):
        _, carry = carried_attention(q, k, v, Carry(config))
        return q.new_ones(()) if carry.decision[:2] == ("stored", "triton") else q.new_zeros(())

    q, k, v = (x[0].detach() for x in inputs(layers=1, dtype=torch.float16))
    assert stored(q, k, v) == 1
    config = CarriedConfig(impl="triton", plan="stored")

    @torch.compile(fullgraph=True, backend="eager")
    def refused(q, k, v):
        return q.new_zeros(()) if launch.refusal(q, k, v, config) is None else q.new_ones(())

    for dtype, wanted in ((torch.float16, 0), (torch.bfloat16, 1)):
        assert refused(*(x[0] for x in inputs(layers=1, dtype=dtype))) == wanted
    print("refusal")


def check_model(plan):
    """One graph of all blocks, of which the last is shorter."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    carried = CarriedConfig(layers=3, plan=plan, **OPTIONS)
    torch.manual_seed(0)
    sizes = {"vocabulary": 32, "width": 16, "heads": 2, "kv_heads": 1, "hidden": 16}
    model = CarriedLlama(LlamaOptions(layers=2 if plan == "auto" else 4, carried=carried, **sizes))
    tokens, weights = torch.randint(32, (1, 34)), list(model.parameters())
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    results = []
    for loss in (model.loss(tokens), compiled(tokens)):
        results.append([loss, *torch.autograd.grad(loss, weights)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)
    print(f"model-{plan}:{torch._dynamo.utils.counters['stats']['unique_graphs']}")


if __name__ == "__main__":
    torch.manual_seed(0)
    for plan in PLANS:
        check(plan)
    if not GPU:
        for plan in ("recompute", "mixed", "stored", "auto"):
            check_model(plan)
        check_that_the_kernels_conditions_can_be_traced()
