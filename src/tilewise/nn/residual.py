"""Residual streams with one face: `read(l)`, `write(l, update)`, `output()`; standard, Block or Full over depth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tilewise.depth import stream as functional
from tilewise.depth.checks import FLOATS, check_eps, check_impl, check_int, check_kind, check_norms
from tilewise.depth.schedule import Schedule
from tilewise.depth.stream import Reads, State

from .shared import SharedStream
from .stream import StandardStream, Stream

__all__ = ["AttnRes", "Residual", "StandardResidual"]


class AttnRes(nn.Module):
    r"""Attention Residuals (arXiv:2603.15031): the learned reads of a residual stream over depth.

    h_l = \sum_j softmax_j(<w_l, RMSNorm_{g_l}(v_j)>) v_j over the earlier blocks (Block) or outputs (Full).

    Args:
        d: width of the stream.
        schedule: :meth:`Schedule.block`, :meth:`Schedule.full_attention`, :meth:`Schedule.at`, or
            :meth:`Schedule.kimi_k3`.
        eps: epsilon of the key norm.
        output_eps: epsilon of the sublayers' input norms when `read` is given a norm weight; None means `eps`.
        span: sublayers [first, last) that this module serves; None means all. For pipeline stages.
        impl: implementation of the operators.
        save_o1: in eager training of a Block schedule with `norms`, keep phase 1's outputs until the backward: a tensor
            `[..., d]` more a sublayer, and no phase 1 in the backward. By default their scores are kept, not they.
        device, dtype: of the parameters.

    Raises:
        TypeError: a schedule that is none, a number or a span that is none, or a dtype that is no float.
        ValueError: a width below 1, an epsilon that is negative or not finite, a span outside the schedule, or an
            unknown implementation.

    Attributes:
        query: w, `[R, d]`, zeros at the start: every read is the mean of its sources. The last row is the output
            head's, present if the span ends with the last sublayer.
        key_weight: g, `[R, d]`, ones at the start.

    Example:
        >>> residual = AttnRes(64, Schedule.full_attention(6))
        >>> residual.query.shape
        torch.Size([7, 64])
    """

    def __init__(
        self,
        d: int,
        schedule: Schedule,
        *,
        eps: float = 1e-6,
        output_eps: float | None = None,
        span: tuple[int, int] | None = None,
        impl: str = "auto",
        save_o1: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("d", d, 1)
        check_kind("schedule", schedule, Schedule, "a Schedule, such as Schedule.block(sublayers, 8)")
        first, last = (0, schedule.sublayers) if span is None else _span(span)
        if not 0 <= first < last <= schedule.sublayers:
            raise ValueError(f"span: found {span}, expected 0 <= first < last <= {schedule.sublayers}")
        check_impl(impl)
        check_kind("save_o1", save_o1, bool, "True or False")
        if dtype is not None and dtype not in FLOATS:
            raise TypeError(f"dtype: found {dtype!r}, expected one of {', '.join(map(str, FLOATS))}")
        self.d, self.schedule, self.span, self.impl = d, schedule, (first, last), impl
        self.eps, self.output_eps = eps, eps if output_eps is None else output_eps
        self.save_o1 = save_o1
        rows = last - first + (last == schedule.sublayers)
        self.query = nn.Parameter(torch.zeros(rows, d, device=device, dtype=dtype))
        self.key_weight = nn.Parameter(torch.ones(rows, d, device=device, dtype=dtype))

    # As text: torch.compile(dynamic=True) makes a tensor of a module's float, which no autograd.Function takes (2.13).
    @property
    def eps(self) -> float:
        """Epsilon of the key norm."""
        return float(self._eps)

    @eps.setter
    def eps(self, value: float) -> None:
        check_eps("eps", value)
        self._eps = repr(float(value))

    @property
    def output_eps(self) -> float:
        """Epsilon of the sublayers' input norms."""
        return float(self._output_eps)

    @output_eps.setter
    def output_eps(self, value: float) -> None:
        check_eps("output_eps", value)
        self._output_eps = repr(float(value))

    def reads(self) -> Reads:
        """The parameters with the constants of the reads, as the functions of `tilewise.depth.stream` take them."""
        constants = self.eps, self.output_eps, self.impl
        return Reads(self.query, self.key_weight, *self.span, *constants, schedule=self.schedule)

    def forward(
        self,
        embedding: Tensor | State,
        position: int | None = None,
        *,
        norms: Sequence[Tensor] | None = None,
        reads: Reads | None = None,
    ) -> Stream | SharedStream:
        """A stream for one forward pass, from the embedding `[..., d]` or from the state that another stream left.

        Args:
            embedding: `[..., d]`, or `stream.state`. Kept, not copied: leave it as it is during the pass.
            position: the sublayer to be read next; None means where the state stands, or the first of the span.
            reads: the parameters in another form (sharded, shared between ranks); None means :meth:`reads`.
            norms: the weights `[d]` of all L sublayers' input norms, if they are known now; `read(l)` then returns the
                normalised input. In eager training of a Block schedule the reads of a block share their gradients: one
                fp32 gradient a source and one phase-1 backward a block, at less memory (:class:`SharedStream`). The
                function and its gradients are the same.

        Raises:
            TypeError: an embedding that is neither a tensor of floats nor a state, or norms that are no sequence of
                tensors.
            ValueError: a width other than d, norms that are not L weights `[d]`, or a position that is not the state's.
            RuntimeError: this module is a unit of FSDP2 by itself.
        """
        # By name: importing FSDP takes longer than the package.
        if any(kind.__name__ == "FSDPModule" for kind in type(self).__mro__):
            raise RuntimeError(
                f"{type(self).__name__} is a unit of FSDP2; expected to belong to its model's: it returns no tensors, "
                "so its parameters would be freed before the backward pass. Shard attention, MLP modules and the root"
            )
        resumed = isinstance(embedding, State)
        state = embedding if resumed else functional.begin(embedding)
        if state.sources[0].shape[-1] != self.d:
            raise ValueError(f"embedding: found width {state.sources[0].shape[-1]}, expected {self.d}")
        device = state.sources[0].device
        if reads is not None:
            functional.check_reads(reads, self.schedule, self.d, device)
        elif device != self.query.device:
            raise ValueError(f"embedding: found a tensor on {device}, expected one on {self.query.device}")
        reads = self.reads() if reads is None else reads
        check_norms(norms, self.schedule.sublayers, self.d, device)
        whole = position is None and not resumed and self.span == (0, self.schedule.sublayers)
        eager = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if norms is not None and whole and eager and not self.schedule.full and reads.impl != "reference":
            return SharedStream(self.schedule, reads, embedding, norms, self.save_o1)
        return Stream(self.schedule, reads.apart() if position is None else reads, state, position, norms)

    def reset_parameters(self) -> None:
        """Queries to zero, key weights to one: every read is a mean."""
        nn.init.zeros_(self.query)
        nn.init.ones_(self.key_weight)

    def extra_repr(self) -> str:
        kind = "full" if self.schedule.full else "block"
        return f"d={self.d}, {kind}, sublayers={self.span}, starts={self.schedule.starts}"


def _span(span: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(span, (tuple, list)) or len(span) != 2 or not all(isinstance(x, int) for x in span):
        raise TypeError(f"span: found {span!r}, expected two integers (first, last)")
    return tuple(span)


class StandardResidual(nn.Module):
    """The ordinary residual as a module without parameters; calling it gives a :class:`StandardStream`."""

    def __init__(self, sublayers: int, output_eps: float = 1e-6) -> None:
        super().__init__()
        check_int("sublayers", sublayers, 1)
        check_eps("output_eps", output_eps)
        self.sublayers, self.output_eps = sublayers, output_eps

    def forward(self, embedding: Tensor, *, norms: Sequence[Tensor] | None = None) -> StandardStream:
        """A stream for one forward pass; `norms` as for :meth:`AttnRes.forward`."""
        return StandardStream(embedding, self.sublayers, self.output_eps, norms)


def Residual(d: int, sublayers: int, kind: str, block: int = 8, **options) -> nn.Module:
    """A residual by name.

    Args:
        d: width of the stream.
        sublayers: L; attention and MLP count one each.
        kind: `standard`, `block` or `full`.
        block: sublayers a block.
        options: further arguments of :class:`AttnRes`; `standard` takes `output_eps` alone, or `eps` for it.

    Raises:
        TypeError: an option that the kind does not take.
        ValueError: another kind.
    """
    if kind == "standard":
        check_int("d", d, 1)
        if unknown := set(options) - {"eps", "output_eps"}:
            raise TypeError(f"options: found {', '.join(sorted(unknown))} for 'standard', expected output_eps alone")
        given = options.get("output_eps")
        return StandardResidual(sublayers, options.get("eps", 1e-6) if given is None else given)
    if kind == "block":
        return AttnRes(d, Schedule.block(sublayers, block), **options)
    if kind == "full":
        return AttnRes(d, Schedule.full_attention(sublayers), **options)
    raise ValueError(f"kind: found {kind!r}, expected 'standard', 'block' or 'full'")
