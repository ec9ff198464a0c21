"""A model under FSDP2 with mixed precision, every layer a unit: the carry crosses module boundaries as it is."""

import tempfile
from itertools import product

import torch
import torch.distributed as dist
from carried_cases import CarriedConfig
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tilewise.carried.llama import CarriedLlama, LlamaOptions


def note(seen):
    """A hook that notes the dtype of the scores that enter a layer."""
    return lambda module, args: seen.add(None if args[1]._z is None else args[1]._z.dtype)


with tempfile.NamedTemporaryFile() as store:
    dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for scaling, plan in product(("sum", "gain"), ("stored", "mixed", "recompute")):
        config = CarriedConfig(impl="blocked", tile=16, plan=plan, scaling=scaling)
        losses, grads, seen = [], [], set()
        for sharded in (False, True):
            torch.manual_seed(0)
            model = CarriedLlama(LlamaOptions(vocabulary=61, width=32, layers=4, hidden=48, carried=config))
            tokens = torch.randint(61, (2, 38))
            if sharded:
                policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
                for block in model.blocks:
                    for layer in block.layers:
                        layer.register_forward_pre_hook(note(seen))
                        fully_shard(layer, mesh=mesh, mp_policy=policy)
                fully_shard(model, mesh=mesh, mp_policy=policy)
            else:
                model = model.to(torch.bfloat16)
            loss = model.loss(tokens)
            loss.backward()
            losses.append(loss.item())
            grads.append(
                [
                    (g.full_tensor() if hasattr(g, "full_tensor") else g).float()
                    for g in (p.grad for p in model.parameters())
                ]
            )
        assert losses[0] == losses[1], losses
        for a, b in zip(*grads, strict=True):
            assert torch.equal(a, b)
        assert seen == ({None} if plan == "recompute" else {None, torch.float16}), seen
        print(scaling, plan)
    dist.destroy_process_group()
