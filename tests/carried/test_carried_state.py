"""The carry's lifetime: unused outputs, several forwards, checkpoints, casting frameworks, dead tiles."""

import contextlib
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from carried_cases import CarriedConfig, dense, grads_of, inputs, run
from torch.distributed.utils import _apply_to_tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tilewise.carried import Carry, SharedKeyCarry, TileLayout, carried_attention, shared_key_attention
from tilewise.mask import Mask

PLANS = ("recompute", "stored", "mixed")


def config(plan, **options):
    return CarriedConfig(impl="blocked", tile=16, plan=plan, **options)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("used", [(0,), (3,), (1, 2), (0, 2)])
def test_layers_whose_output_is_not_used_send_no_gradient(plan, used):
    q, k, v = inputs()
    leaves = [*q, *k, *v]
    results = []
    for out in (run(config(plan), q, k, v), dense(config(plan), q, k, v)):
        loss = sum((out[i] ** 2).sum() for i in used)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        results.append([torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("plan", PLANS)
def test_two_forwards_before_a_backward_and_two_backwards_after_a_forward(plan):
    batches = [inputs(T=37), inputs(T=37)]
    weights = [torch.randn_like(o) for o in batches[0][0]]
    exact = [grads_of(dense(config(plan), *b), [x for group in b for x in group], weights) for b in batches]
    outs = [run(config(plan), *b) for b in batches]
    losses = [sum((o * w).sum() for o, w in zip(out, weights, strict=True)) for out in outs]
    for _ in range(2):
        for loss, batch, want in zip(losses, batches, exact, strict=True):
            got = torch.autograd.grad(loss, [x for group in batch for x in group], retain_graph=True)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_of_a_plain_sum_refuse_to_be_differentiated_again(plan):
    q, k, v = inputs()
    outs = run(config(plan), q, k, v)
    exact = grads_of(outs, [*q, *k, *v], [torch.ones_like(o) for o in outs])
    found = torch.autograd.grad(sum(o.sum() for o in run(config(plan), q, k, v)), [*q, *k, *v], create_graph=True)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            a.sum().backward(retain_graph=True)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_of_a_whole_block(plan, reentrant):
    q, k, v = inputs()
    weights = [torch.randn_like(o) for o in q]
    exact = grads_of(dense(config(plan), q, k, v), [*q, *k, *v], weights)

    def block(*flat):
        return tuple(run(config(plan), flat[:4], flat[4:8], flat[8:]))

    got = (
        grads_of(checkpoint(block, *q, *k, *v, use_reentrant=reentrant), [*q, *k, *v], weights)
        if not reentrant
        else None
    )
    if reentrant:
        out = checkpoint(block, *q, *k, *v, use_reentrant=True)
        sum((o * w).sum() for o, w in zip(out, weights, strict=True)).backward()
        got = [x.grad for x in [*q, *k, *v]]
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("plan", PLANS)
def test_checkpoint_of_single_layers(plan):
    """Right for every plan that keeps a layer's scores; an overwritten buffer is refused rather than read."""
    q, k, v = inputs()
    weights = [torch.randn_like(o) for o in q]
    carry, outs = Carry(config(plan)), []
    for i in range(4):
        o, carry = checkpoint(carried_attention, q[i], k[i], v[i], carry, use_reentrant=False)
        outs.append(o)
    if plan == "mixed":
        with pytest.raises(RuntimeError, match="Checkpoint whole blocks"):
            grads_of(outs, [*q, *k, *v], weights)
        return
    exact = grads_of(dense(config(plan), q, k, v), [*q, *k, *v], weights)
    for a, b in zip(grads_of(outs, [*q, *k, *v], weights), exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("shared", [False, True])
def test_a_reentrant_checkpoint_of_single_layers_is_refused(shared):
    """Its layers run where nothing is recorded, so gradients through the carry would be missing without a word."""
    q, k, v = inputs(layers=2)
    start, attend = (SharedKeyCarry, shared_key_attention) if shared else (Carry, carried_attention)
    carry, outs = start(config("recompute", layers=2)), []
    for i in range(2):
        o, carry = checkpoint(attend, q[i], k[0], v[i], carry, use_reentrant=True)
        outs.append(o)
    with pytest.raises(RuntimeError, match="layer 1 was made where no gradients are recorded"):
        sum(o.sum() for o in outs).backward()
    with torch.no_grad():
        o, carry = attend(q[0], k[0], v[0], start(config("recompute", layers=2)))
        attend(q[1], k[0], v[1], carry)
    attend(*(x.detach() for x in (q[1], k[0], v[1])), carry)


def test_frameworks_that_cast_arguments_leave_the_carry_alone():
    """FSDP2 casts floating tensors inside tuples, dicts and dataclasses; a carry passes as it is."""
    q, k, v = inputs(dtype=torch.bfloat16)
    _, carry = carried_attention(q[0], k[0], v[0], Carry(config("stored")))
    (moved,), named = _apply_to_tensors(lambda t: t.to(torch.bfloat16), ((carry,), {"carry": carry}))
    assert moved is carry
    assert named["carry"]._z.dtype == torch.float16


@pytest.mark.parametrize("plan", ["stored", "mixed"])
@pytest.mark.parametrize("options", [{}, {"windows": 20}, {"windows": (9, 20, 5, None)}], ids=str)
def test_memory_that_nothing_wrote_is_never_read(plan, options):
    """Buffers start as NaN (conftest), and a buffer is no larger than its live tiles."""
    q, k, v = inputs(T=90, dtype=torch.float32)
    mask = Mask.packed([0, 1, 2, 40, 90])
    out = run(config(plan, **options), q, k, v, mask=mask)
    grads = grads_of(out, [*q, *k, *v], [torch.randn_like(o) for o in out])
    assert all(x.isfinite().all() for x in [*out, *grads])


def test_poison_would_be_noticed():
    """The test above can fail: a buffer with a live tile left unwritten gives NaN."""
    q, k, v = inputs(T=90, dtype=torch.float32)
    _, carry = carried_attention(q[0], k[0], v[0], Carry(config("stored")))
    carry._z[:, :, 3] = float("nan")
    carry._version = carry._z._version
    o, _ = carried_attention(q[1], k[1], v[1], carry)
    assert o.isnan().any()


@pytest.mark.parametrize("plan", PLANS)
def test_bitwise_repeatable(plan):
    q, k, v = inputs(T=50, d=16, dtype=torch.bfloat16)
    weights = [torch.randn_like(o) for o in q]
    runs = [grads_of(run(config(plan), q, k, v), [*q, *k, *v], weights) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_one_buffer_a_block():
    """The mixed plan writes into the buffer it started with."""
    q, k, v = inputs(dtype=torch.bfloat16)
    carry, buffers = Carry(config("mixed")), []
    for i in range(4):
        _, carry = carried_attention(q[i], k[i], v[i], carry)
        buffers.append(None if carry._z is None else carry._z.data_ptr())
    assert buffers[0] is None
    assert buffers[1] == buffers[2]
    assert buffers[3] is None


def saved_bytes(plan, layers=4):
    q, k, v = inputs(layers=layers, T=256, H=4, Hk=4, d=8, dtype=torch.bfloat16)
    seen = {}

    def pack(t):
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() * (t.dim() == 5)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        outs = run(config(plan, layers=layers), q, k, v)
    assert len(outs) == layers
    return sum(seen.values())


def test_saved_scores_are_what_the_policy_says():
    one = TileLayout(config("stored"), 256, 256).nbytes(1, 4)
    assert [saved_bytes(plan) for plan in PLANS] == [0, 3 * one, one]
    assert one == 4 * (136 + 1) * 16 * 16 * 2  # 16 · 17 / 2 live tiles of a causal matrix, and a spare one


def test_the_next_block_starts_afresh_with_the_same_layout():
    q, k, v = inputs(layers=4)
    carry, outs = Carry(config("stored", layers=2)), []
    for i in range(4):
        o, carry = carried_attention(q[i], k[i], v[i], carry)
        outs.append(o)
    assert carry.index == 0
    assert carry.layout is not None
    fresh = run(config("stored", layers=2), q[2:], k[2:], v[2:])
    torch.testing.assert_close(outs[3], fresh[1], rtol=0, atol=0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_buffer_that_was_overwritten_is_refused_where_writes_are_not_counted(mode):
    q, k, v = inputs()
    with mode():
        carry = Carry(config("mixed"))
        for i in range(2):
            _, carry = carried_attention(q[i], k[i], v[i], carry)
        carried_attention(q[2], k[2], v[2], carry)
        with pytest.raises(RuntimeError, match="layer 2 have been overwritten"):
            carried_attention(q[2], k[2], v[2], carry)


def test_no_gradient_no_graph():
    q, k, v = ([x.detach() for x in group] for group in inputs())
    with torch.inference_mode():
        outs = run(CarriedConfig(impl="blocked", tile=16), q, k, v)
    for a, b in zip(outs, dense(CarriedConfig(), q, k, v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_autocast():
    q, k, v = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = run(config("stored"), q, k, v)
    assert out[3].dtype == torch.bfloat16
    low = run(config("stored"), *[[x.bfloat16() for x in group] for group in (q, k, v)])
    torch.testing.assert_close(out[3], low[3], rtol=0, atol=0)


def output_of(name):
    """A script of this folder in a process of its own: Dynamo cannot trace the poisoned torch.empty of this one."""
    script = Path(__file__).with_name(name)
    done = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def test_compiled_fullgraph_with_dynamic_lengths():
    """And a whole model's loss with its gradients in every plan, one graph; and with the kernels' conditions in the
    graph, of which Triton's settings are none that Dynamo can trace."""
    models = [f"model-{plan}:1" for plan in ("recompute", "mixed", "stored", "auto")]
    assert output_of("compiled_block.py") == ["recompute:1", "mixed:1", *models, "refusal"]


def test_fsdp2_with_mixed_precision_leaves_the_carry_in_fp16():
    done = [(scaling, plan) for scaling in ("sum", "gain") for plan in ("stored", "mixed", "recompute")]
    assert output_of("sharded_model.py") == [word for pair in done for word in pair]


def test_a_pipeline_cut_at_block_boundaries_is_bitwise_the_whole_model():
    """Losses and gradients of two processes and two micro-batches, with gains, in every plan."""
    assert output_of("piped_model.py") == ["mixed", "recompute", "stored"]


def test_detached_queries_and_keys_of_earlier_layers_are_not_trained():
    q, k, v = inputs()
    out = run(config("stored", detach=True), q, k, v)
    grads = torch.autograd.grad(out[3].sum(), [*q, *k], allow_unused=True)
    assert [g is not None for g in grads] == [False, False, False, True] * 2


def test_reference_implementation_through_the_same_call():
    q, k, v = inputs()
    out = run(dataclasses.replace(config("auto"), impl="reference"), q, k, v)
    for a, b in zip(out, run(config("mixed"), q, k, v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("plan", PLANS)
def test_a_carry_may_feed_two_layers(plan):
    """The gradients that both ask of it add up; the mixed plan's buffer is written at layer 1 at the earliest."""
    q, k, v = inputs(layers=3)
    results = []
    for options in ({"plan": plan}, {"impl": "reference"}):
        shape = dataclasses.replace(config("auto", layers=2), **options)
        o, carry = carried_attention(q[0], k[0], v[0], Carry(shape))
        left, _ = carried_attention(q[1], k[1], v[1], carry)
        right, _ = carried_attention(q[2], k[2], v[2], carry)
        loss = (o**2).sum() + (left**3).sum() + right.sin().sum()
        results.append(torch.autograd.grad(loss, [*q, *k, *v]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returned, in elements."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return out


def test_recompute_needs_memory_in_proportion_to_length():
    largest = []
    for T in (256, 512):
        q, k, v = inputs(H=2, Hk=2, T=T, d=8, dtype=torch.float32)
        with Largest() as mode:
            out = run(config("recompute"), q, k, v)
            grads_of(out, [*q, *k, *v], [torch.ones_like(o) for o in out])
        largest.append(mode.numel)
    assert largest[1] <= 2 * largest[0]
    assert largest[1] < 2 * 512 * 512 / 4


class Watching(TorchDispatchMode):
    """Names of this package's operators that were called; nothing is changed."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tilewise":
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "options", [{}, {"scaling": "gain"}, {"windows": (9, None, 20, 5)}, {"dropout_p": 0.2, "sink": True}], ids=str
)
def test_operators_are_called_where_something_watches_them_and_say_the_same(plan, options):
    """Elsewhere their work is done without the dispatcher: same results bit for bit, and in the same memory order."""
    q, k, v = inputs(dtype=torch.float32)
    heads = lambda: [torch.rand(4).requires_grad_() for _ in q]  # noqa: E731
    extra = {"gain": heads() if "scaling" in options else None, "sink": heads() if "sink" in options else None}
    extra["seed"] = [torch.tensor([3 + i]) for i in range(4)] if "dropout_p" in options else None
    leaves = [*q, *k, *v, *(extra["gain"] or [])[1:], *(extra["sink"] or [])]
    weights = [torch.randn_like(x) for x in q]
    results = []
    for forward, backward in ((False, False), (True, True), (True, False), (False, True)):
        watching = Watching()
        with watching if forward else contextlib.nullcontext():
            outputs = run(config(plan, **options), q, k, v, **extra)
        assert watching.seen == ["carried_forward"] * (4 if forward else 0)
        watching.seen.clear()
        with watching if backward else contextlib.nullcontext():
            grads = grads_of(outputs, leaves, weights)
        assert watching.seen == ["carried_backward"] * (4 if backward else 0)
        results.append([*outputs, *grads])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
