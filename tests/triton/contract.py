"""The operators with the Triton implementation, on CPU tensors by the interpreter: a process of its own.

Prints one JSON line a check, its name and whether it held.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch._functorch.config

torch.set_num_threads(1)
sys.path.append(str(Path(__file__).parents[1]))
# Donated buffers refuse a second backward.
torch._functorch.config.donated_buffer = False

from relative_checks import call_of  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from quick_interpreter import quicken  # noqa: E402
from tilewise import Mask, Options  # noqa: E402
from tilewise.call import Call  # noqa: E402
from tilewise.mechanisms import Shaw, TransformerXL  # noqa: E402
from tilewise.ops import attend  # noqa: E402
from tilewise.rows import identity  # noqa: E402
from tilewise.terms import lower, spec_of  # noqa: E402
from tilewise.testing import Sizes  # noqa: E402

REACH = 40
FWD, BWD = torch.ops.tilewise.attn_fwd.default, torch.ops.tilewise.attn_bwd.default


def call(projections: str, case: str, T: int = 20):
    sizes = Sizes(1, 1, 1, T, T, 16, 16)
    c = call_of(case, sizes, "none", torch.float16, "cpu", options=Options(projections=projections))
    if case != "txl":
        return c
    # Room for every length that is tried: another table would be another graph.
    port = c.ports[0]
    table = torch.randn(1, 2 * REACH + 1, 16, generator=torch.Generator().manual_seed(1)).half()
    return replace(c, ports=(replace(port, rows=identity(REACH, descending=True), table=table),))


def opcheck(projections: str, case: str = "wav2vec2_bert") -> bool:
    c = call(projections, case)
    arguments = (
        c.q, c.k, c.v, c.tensors, None, None, None, None, spec_of(c.ports), c.scale, c.offset, c.mask.left,
        c.mask.right, 0.0, c.options.spec, "triton",
    )  # fmt: skip
    # Autograd is registered around both operators, not for them.
    tests = ("test_schema", "test_faketensor")
    outcome = torch.library.opcheck(FWD, arguments, test_utils=tests)
    o, lse, kept = FWD(*arguments)
    assert bool(kept.numel()) == (projections == "keep")
    backward = (torch.randn_like(o), None, o, lse, kept, [True] * (3 + len(c.tensors)), *arguments)
    outcome |= {
        f"{k} of the backward": v for k, v in torch.library.opcheck(BWD, backward, test_utils=tests[1:]).items()
    }
    return set(outcome.values()) == {"SUCCESS"}


def gradients(run, c) -> list[torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (c.q, c.k, c.v, *c.tensors)]
    o = run(*leaves)
    return [o.detach(), *torch.autograd.grad(o.square().sum(), leaves, retain_graph=True),
            *torch.autograd.grad(o.sum(), leaves)]  # fmt: skip


def compiled(projections: str, case: str = "wav2vec2_bert") -> bool:
    """One graph serves two lengths, and its results are those without a compiler; each backward runs twice."""
    counters.clear()
    options = Options(projections=projections)

    def run(q, k, v, table, *biases):
        terms = TransformerXL(table, *biases) if biases else Shaw(table, left=7, right=1)
        content, ports = lower(q, terms, biases=True)
        offset = k.shape[2] - q.shape[2]
        return attend(
            Call(content, k, v, tuple(ports), Mask(), 0.25, offset, options=options), spec_of(ports), "triton"
        )[0]

    same = True
    whole = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for T in (20, 28):
        c = call(projections, case, T)
        same &= all(torch.equal(a, b) for a, b in zip(gradients(run, c), gradients(whole, c), strict=True))
    return same and counters["stats"]["unique_graphs"] == 1


def strided(case: str) -> bool:
    """The gradients of q, k, v and left factors whose rows lie in pieces, in buffers that autograd makes for them."""
    c = call("recompute", case)
    columns = lambda x: x.mT.contiguous().mT  # noqa: E731
    ports = tuple(replace(p, left=None if p.left is None else columns(p.left)) for p in c.ports)
    pieces = replace(c, q=columns(c.q), k=columns(c.k), v=columns(c.v), ports=ports)
    assert pieces.q.stride(-1) > 1

    def run(*leaves):
        tensors = iter(leaves[3:])
        parts = tuple(replace(p, **{n: next(tensors) for n in p.names}) for p in c.ports)
        whole = replace(c, q=leaves[0], k=leaves[1], v=leaves[2], ports=parts)
        return attend(whole, spec_of(whole.ports), "triton")[0]

    return all(torch.equal(a, b) for a, b in zip(gradients(run, c), gradients(run, pieces), strict=True))


if __name__ == "__main__":
    quicken()
    for check in (opcheck, compiled):
        print(json.dumps({"name": check.__name__, "held": check("keep")}), flush=True)
    for check in (opcheck, compiled):
        print(json.dumps({"name": f"{check.__name__} txl", "held": check("keep", "txl")}), flush=True)
    for case in ("wav2vec2_bert", "inkling"):
        print(json.dumps({"name": f"strided {case}", "held": strided(case)}), flush=True)
