"""Pipeline parallelism with cross-stage caching: an adapter for torch.distributed.pipelining.

Forward, a stage passes on the prefix and only those sources that the next rank has never seen; the rest comes from the
rank's cache. Backward, a later stage deposits the gradients of cached sources with the rank, in fp32, and the stage
that received (or made) a source adds the deposit to what it sends upstream: every gradient reaches the owner over the
same edges as the source came, in the same number of bytes. Stage c's backward for a micro-batch always runs after that
of stage c + P, so the deposit is complete when it is taken.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from tilewise.depth import stream as functional
from tilewise.depth.checks import check_int, check_kind
from tilewise.depth.parallel.plan import PipelinePlan
from tilewise.depth.reference import wide
from tilewise.depth.stream import State
from tilewise.once import once

__all__ = ["DepthPipelineStage", "DepthStage", "SourceCache"]


class SourceCache:
    """Sources that a rank has seen, by micro-batch and number, and the gradients deposited for them. One a rank."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, int], Tensor] = {}
        self._grads: dict[tuple[int, int], Tensor] = {}

    def keep(self, microbatch: int, number: int, value: Tensor) -> None:
        """Remember a source for the rank's later stages."""
        self._values[microbatch, number] = value.detach()

    def leaf(self, microbatch: int, number: int) -> Tensor:
        """A cached source as a leaf whose gradient becomes a deposit as soon as it is complete.

        Raises:
            ValueError: a source that was never kept, or whose micro-batch was released.
        """
        if (microbatch, number) not in self._values:
            kept = sorted(n for m, n in self._values if m == microbatch)
            raise ValueError(f"number: found source {number} of micro-batch {microbatch}, expected one of {kept}")
        leaf = self._values[microbatch, number].detach()
        if torch.is_grad_enabled():
            leaf.requires_grad_().register_post_accumulate_grad_hook(
                lambda leaf: self._deposit(microbatch, number, leaf)
            )
        return leaf

    def take(self, microbatch: int, number: int) -> Tensor | None:
        """The gradients deposited for a source, or None; they leave the cache."""
        return self._grads.pop((microbatch, number), None)

    def release(self, microbatch: int) -> None:
        """Forget a micro-batch.

        Raises:
            RuntimeError: a deposit was never taken, so its gradient would be lost.
        """
        if left := [number for m, number in self._grads if m == microbatch]:
            raise RuntimeError(f"sources {left} of micro-batch {microbatch}: found gradients that no stage has taken")
        self._values = {key: value for key, value in self._values.items() if key[0] != microbatch}

    @property
    def nbytes(self) -> int:
        """Bytes of the sources and deposits held now."""
        return sum(x.nbytes for x in (*self._values.values(), *self._grads.values()))

    def _deposit(self, microbatch: int, number: int, leaf: Tensor) -> None:
        grad, leaf.grad = wide(leaf.grad), None
        held = self._grads.get((microbatch, number))
        self._grads[microbatch, number] = grad if held is None else held + grad


class _Deposited(torch.autograd.Function):
    """Identity whose backward adds what later stages of the rank have deposited for the source."""

    @staticmethod
    def forward(ctx, value, cache, microbatch, number):
        ctx.key = cache, microbatch, number
        return value.view_as(value)

    @staticmethod
    @once
    def backward(ctx, grad):
        cache, microbatch, number = ctx.key
        deposit = cache.take(microbatch, number)
        return grad if deposit is None else (wide(grad) + deposit).to(grad.dtype), None, None, None


class DepthStage(nn.Module):
    """The module of one pipeline stage: sublayers [first, last) of a residual stream over depth.

    Args:
        plan: stages and ranks.
        index: this stage.
        residual: an :class:`tilewise.nn.AttnRes` with `span = plan.bounds[index : index + 2]`.
        body: called with the stream; reads and writes the stage's sublayers.
        cache: the rank's, shared by all its stages.
        embed: the first stage's: what the pipeline is fed with → `[..., d]`.
        head: the last stage's: called with the stream → the pipeline's output.

    Raises:
        TypeError: a plan, residual, body or cache that is none.
        ValueError: a span that is not the stage's, or an embed or head on the wrong stage.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        index: int,
        residual: nn.Module,
        body: Callable[..., None],
        cache: SourceCache,
        *,
        embed: Callable[..., Tensor] | None = None,
        head: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__()
        check_kind("plan", plan, PipelinePlan, "a PipelinePlan")
        check_int("index", index, 0, plan.stages - 1)
        if not hasattr(residual, "span"):
            raise TypeError(f"residual: found {type(residual).__name__}, expected an AttnRes with the stage's span")
        check_kind("body", body, Callable, "a module or function of the stream")
        check_kind("cache", cache, SourceCache, "the rank's SourceCache")
        if residual.span != plan.bounds[index : index + 2]:
            raise ValueError(f"residual: found span {residual.span} for stage {index}, expected bounds {plan.bounds}")
        if (embed is None) != (index > 0) or (head is None) != (index < plan.stages - 1):
            raise ValueError("embed, head: expected embed on the first stage and head on the last stage alone")
        self.plan, self.index, self.cache = plan, index, cache
        self.residual, self.body, self.embed, self.head = residual, body, embed, head
        self.microbatch: int | None = None

    def forward(self, *inputs: Tensor):
        """First stage: the pipeline's input. Others: prefix and new sources. Returns the same kind for the next one.

        Without a micro-batch set (the pipeline's shape inference) cached sources are zeros and nothing is kept.
        """
        plan, index = self.plan, self.index
        if self.embed is not None:
            state = State((self._kept(0, None, self.embed(*inputs)),))
        else:
            received = plan.received(index)
            if len(inputs) != 1 + len(received):
                raise ValueError(
                    f"inputs: found {len(inputs)} tensors, expected the prefix and the sources {list(received)}"
                )
            prefix, *new = inputs
            old = [self._cached(number, prefix) for number in range(received.start)]
            fresh = [self._kept(number, None, x) for number, x in zip(received, new, strict=True)]
            state = State((*old, *fresh), prefix=prefix)
        stream = self.residual(state)
        stream.complete = self._kept
        self.body(stream)
        if self.head is not None:
            return self.head(stream)
        state = functional.finish(stream.state)
        prefix = state.prefix
        if plan.schedule.complete_before(plan.bounds[index + 1]) > len(state.sources):
            prefix = self._kept(len(state.sources), None, prefix)
        return (prefix, *(state.sources[number] for number in plan.received(index + 1)))

    def _kept(self, number: int, prefix: Tensor | None, update: Tensor | None) -> Tensor:
        """A source that this stage makes or receives, kept for the rank's later stages."""
        value = functional.total(number, prefix, update)
        if self.microbatch is None or not self.plan.kept(self.index):
            return value
        self.cache.keep(self.microbatch, number, value)
        return _Deposited.apply(value, self.cache, self.microbatch, number)

    def _cached(self, number: int, like: Tensor) -> Tensor:
        return torch.zeros_like(like) if self.microbatch is None else self.cache.leaf(self.microbatch, number)


class DepthPipelineStage(PipelineStage):
    """A `torch.distributed.pipelining.PipelineStage` around a :class:`DepthStage`.

    For GPipe, 1F1B, interleaved 1F1B and looped breadth-first schedules, whose stages go round the ranks. Use one
    :class:`SourceCache` for all stages of a rank.

    Args:
        module: the stage, possibly wrapped in place by FSDP2.
        device: of the stage.
        options: further arguments of `PipelineStage` (group, input_args, output_args).

    Attributes:
        sent_forward, sent_backward: bytes handed to send operations so far.
    """

    def __init__(self, module: DepthStage, device: torch.device, **options) -> None:
        check_kind("module", module, DepthStage, "a DepthStage")
        super().__init__(module, module.index, module.plan.stages, device, **options)
        self.sent_forward = self.sent_backward = 0
        ranks = self.group_size
        if module.plan.ranks != ranks:
            raise ValueError(f"plan: found {module.plan.ranks} ranks, expected the pipeline group's {ranks}")

    def forward_one_chunk(self, fwd_chunk_id: int, *args, **kwargs):
        """Forward of one micro-batch, with the cache set to it."""
        module = self.submod
        module.microbatch = fwd_chunk_id
        try:
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        finally:
            module.microbatch = None
        if not (self.has_backward and torch.is_grad_enabled()) and not module.plan.kept(module.index):
            module.cache.release(fwd_chunk_id)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args, full_backward: bool = True, **kwargs):
        """Backward of one micro-batch; the rank's first stage releases its cache.

        Raises:
            ValueError: a zero-bubble schedule with several stages a rank: it would lose the deposits.
        """
        plan, index = self.submod.plan, self.submod.index
        if not full_backward and plan.stages > plan.ranks:
            raise ValueError("schedule: found split backward passes, expected 1F1B, interleaved 1F1B or GPipe")
        super().backward_one_chunk(bwd_chunk_id, *args, full_backward=full_backward, **kwargs)
        if index < plan.ranks:
            self.submod.cache.release(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int):
        """The parent's send operations, counted."""
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        self.sent_forward += sum(op.tensor.nbytes for op in operations)
        return operations

    def get_bwd_send_ops(self, bwd_chunk_id: int):
        """The parent's send operations, counted."""
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        self.sent_backward += sum(op.tensor.nbytes for op in operations)
        return operations
