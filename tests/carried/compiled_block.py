"""A compiled block against the eager one for three lengths; prints each plan and how many graphs were compiled."""

import torch
from carried_cases import CarriedConfig, grads_of, inputs, run

torch.manual_seed(0)
for plan in ("recompute", "mixed"):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layers = 3 if plan == "mixed" else 2
    config = CarriedConfig(impl="blocked", tile=16, layers=layers, plan=plan, windows=20)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def block(q, k, v, config=config):
        return run(config, q, k, v)

    for T in (37, 81):
        q, k, v = inputs(layers=layers, T=T, dtype=torch.float32)
        weights = [torch.randn_like(o) for o in q]
        eager, compiled = run(config, q, k, v), block(q, k, v)
        grads = [grads_of(o, [*q, *k, *v], weights) for o in (eager, compiled)]
        for a, b in zip([*eager, *grads[0]], [*compiled, *grads[1]], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    print(f"{plan}:{torch._dynamo.utils.counters['stats']['unique_graphs']}")
