"""attention(): check the arguments, choose an implementation, and say why not."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import replace
from numbers import Real

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .call import Call, Options, Unsupported
from .mask import Mask, unreadable
from .ops import attend
from .reference import attention_reference
from .rows import as_tokens
from .terms import Port, QueryBias, Term, flatten, lower, spec_of

__all__ = ["IMPLEMENTATIONS", "Unsupported", "attention", "why_not"]

IMPLEMENTATIONS = ("triton", "blocked", "reference")
"""In the order in which ``impl="auto"`` tries them; the reference only serves where it is asked for."""


_HUGE = 1e300


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    terms: Term | Iterable = (),
    mask: Mask | None = None,
    scale: float | None = None,
    offset: int | None = None,
    dropout_p: float = 0.0,
    empty_rows: str = "zero",
    impl: str = "auto",
    options: Options | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention with relative-position terms, in memory linear in the lengths, forward and backward.

    S_ij = τ·(q_i·k_j + terms) + scalar terms (:mod:`tilewise.terms` has the equation), O = softmax(S)·V over the keys
    that the mask shows. Differentiable once in q, k, v and every tensor of the terms, by autograd: torch.func's
    transforms, batched gradients and forward mode need ``impl="reference"``, and are refused elsewhere, in compiled
    calls too. A program exported with ``strict=False`` infers and trains; one exported with ``strict=True`` infers
    alone; forward mode loses its tangents in both, as in other custom operators. An :func:`~tilewise.explicit` map has
    to be made again where such a program is loaded.

    Args:
        q: [B, H, Tq, d], fp64, fp32, bf16 or fp16.
        k: [B, Hk, Tk, d]; Hk divides H (query heads h share key head h // (H / Hk)).
        v: [B, Hk, Tk, d_v]. Keys and values that the mask hides must be finite too, and so must dO·v: 0 · NaN is NaN,
            here as in PyTorch. Scores that it hides may overflow.
        terms: what :class:`~tilewise.Scalar` … or a constructor such as :func:`~tilewise.T5` made; they may be nested.
        mask: a :class:`~tilewise.Mask`; None shows every key.
        scale: τ; default 1/√d.
        offset: the position of query 0, key 0 being at 0. Default Tk − Tq: the queries are the last of the keys'
            positions, as in decoding with a cache.
        dropout_p: probability of dropping an entry of P, drawn from torch's generator at each call.
        empty_rows: what a query that sees no key gives. ``"zero"``: 0, and no gradient. ``"uniform"``: the mean of all
            values, as Hugging Face's finite masks do, with a gradient to v alone.
        impl: ``"auto"``, ``"triton"``, ``"blocked"`` or ``"reference"``. A name never falls back to another.
        options: :class:`~tilewise.Options` that force a choice of the kernels; None leaves all to them.
        return_lse: also return lse [B, H, Tq], the natural log of each row's sum (fp32, fp64 for fp64 inputs;
            −∞ for a row without keys), differentiable, with which partial attentions can be merged.

    Returns:
        O [B, H, Tq, d_v] in q's dtype, or (O, lse).

    Raises:
        ValueError, TypeError: naming the argument, the value found and the value expected.
        Unsupported: `impl` names an implementation that cannot run the call, or `options` force what it cannot do.

    Example:
        >>> q = k = v = torch.randn(1, 6, 100, 64)
        >>> table = torch.randn(32, 6, requires_grad=True)
        >>> o = attention(q, k, v, terms=T5(table), mask=Mask.lengths([90]), scale=1.0)
        >>> o.shape
        torch.Size([1, 6, 100, 64])
    """
    call, terms = prepared(q, k, v, terms, mask, scale, offset, dropout_p, options)
    if empty_rows not in ("zero", "uniform"):
        raise ValueError(f"empty_rows is {empty_rows!r}; expected 'zero' or 'uniform'")
    if call.dropout_p > 0.0:
        call = replace(call, seed=torch.randint(2**62, (1,), device=call.q.device))
    chosen = _choose(call, impl)
    if chosen != "triton" and any(port.biased for port in call.ports):
        content, ports = lower(call.q, terms)
        call = replace(call, q=content, ports=tuple(ports))
    if chosen == "reference":
        o, lse = attention_reference(
            call.q, call.k, call.v, call.ports, call.mask, call.scale, call.offset, call.dropout_p, call.seed
        )
    else:
        _check_derivatives(call, chosen)
        o, lse = attend(call, spec_of(call.ports), chosen)
    if empty_rows == "uniform" and call.k.shape[2]:
        mean = call.v.mean(-2, keepdim=True).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        o = torch.where((lse == float("-inf"))[..., None], mean.to(o.dtype), o)
    return (o, lse) if return_lse else o


def prepared(q, k, v, terms, mask, scale, offset, dropout_p, options) -> tuple[Call, tuple[Term, ...]]:
    """The call that these arguments of :func:`attention` make, without a seed, and its terms; raises as it does."""
    if torch.jit.is_tracing():
        raise RuntimeError(
            "torch.jit.trace would record attention for one length alone; expected torch.export or torch.compile"
        )
    terms = flatten(terms)
    _check_tensors(q, k, v)
    _check_biases(q, terms)
    if _autocasting(q):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    Tq, Tk = q.shape[2], k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else _number("scale", scale)
    offset = Tk - Tq if offset is None else as_tokens("offset", offset)
    # A mask without a window reaches 2³⁰ tokens.
    if not -(2**29) < offset < 2**29:
        raise TypeError(f"offset is {offset}; expected an integer within ±2²⁹")
    mask = Mask() if mask is None else mask
    if not isinstance(mask, Mask):
        call = "Mask.full(mask) or Mask.padding(mask)" if isinstance(mask, Tensor) else "such as Mask.causal()"
        raise TypeError(f"mask is a {type(mask).__name__}; expected a Mask, {call}")
    mask = mask.to(q.device)
    mask.check(q.shape[0], q.shape[1], Tq, Tk)
    dropout_p = _number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p is {dropout_p}; expected 0 ≤ dropout_p < 1")
    options = Options() if options is None else options
    if not isinstance(options, Options):
        raise TypeError(f"options is a {type(options).__name__}; expected Options, such as Options(skew='memory')")
    content, ports = lower(q, terms, biases=True)
    _check_ports(q, v.shape[3], ports, offset, Tk)
    return Call(content, k, v, tuple(ports), mask, scale, offset, dropout_p, None, options), terms


def why_not(impl: str, call: Call) -> list[str]:
    """The reasons for which `impl` cannot run the call; empty if it can."""
    if impl == "triton":
        if importlib.util.find_spec("triton") is None:
            return ["triton is not installed"]
        if call.q.device.type != "cuda":
            return [f"q is on {call.q.device.type}; triton runs on cuda"]
        from . import triton

        return triton.why_not(call)
    if impl in ("blocked", "reference"):
        return _forced(call)
    raise ValueError(f"impl is {impl!r}; expected 'auto', {', '.join(map(repr, IMPLEMENTATIONS))}")


def _choose(call: Call, impl: str) -> str:
    if impl == "auto":
        impl = "triton" if call.q.device.type == "cuda" and not why_not("triton", call) else "blocked"
    if reasons := why_not(impl, call):
        if impl != "triton" and (others := why_not("triton", call)):
            reasons.append(f"impl='triton' cannot either: {'; '.join(others)}")
        runs = "Without these options it runs." if _forced(call) else "impl='blocked' runs it."
        raise Unsupported(f"impl={impl!r} cannot run this call: {'; '.join(reasons)}. {runs}")
    return impl


def _check_derivatives(call: Call, impl: str) -> None:
    """RuntimeError under what attention() has no rule for. Dynamo, which would trace past it, evaluates this too."""
    if torch._C._are_functorch_transforms_active():
        found = "a transform of torch.func"
    elif forward_ad._current_level < 0:
        return
    # Dynamo's tensors have no tangents. What it refuses runs eagerly, unless fullgraph=True.
    elif torch.compiler.is_compiling() or any(
        forward_ad.unpack_dual(x).tangent is not None for x in (call.q, call.k, call.v, *call.tensors)
    ):
        found = "forward-mode differentiation"
    else:
        return
    raise RuntimeError(f"{found} is active; impl={impl!r} has none, expected impl='reference'")


def _forced(call: Call) -> list[str]:
    """What of the options only the Triton kernels can do."""
    options, reasons = call.options, []
    if options.skew != "auto":
        reasons.append(f"options.skew is {options.skew!r}, a choice of impl='triton' alone")
    if options.projections == "keep":
        reasons.append("options.projections is 'keep', which impl='triton' alone can do")
    everywhere = call.q.dtype != torch.float32 or (call.q.device.type == "cpu" and options.fp32 == "ieee")
    if options.fp32 != "auto" and not everywhere:
        reasons.append(
            f"options.fp32 is {options.fp32!r}, a choice of impl='triton' alone; elsewhere PyTorch's own switch, "
            "torch.backends.cuda.matmul.fp32_precision, decides"
        )
    return reasons


def _autocasting(q: Tensor) -> bool:
    # torch.is_autocast_enabled raises for "meta"; fp64 inputs are never lowered (as torch's own autocast).
    return q.device.type != "meta" and q.dtype != torch.float64 and torch.is_autocast_enabled(q.device.type)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; expected a tensor [B, H, T, d]")
        if x.layout != torch.strided or x.is_nested:
            raise TypeError(f"{name} is a {'nested' if x.is_nested else x.layout} tensor; expected a dense one")
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected [B, H, T, d]")
        if x.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"{name} is {x.dtype}; expected float64, float32, bfloat16 or float16")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}; expected {q.device}, where q is")
        if x.dtype != q.dtype and not _autocasting(q):
            raise TypeError(f"{name} is {x.dtype}; expected {q.dtype}, as q")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has a batch of {x.shape[0]}; expected {q.shape[0]}, as q")
    if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
        raise ValueError(f"v has shape {tuple(v.shape)}; expected [B, {k.shape[1]}, {k.shape[2]}, d_v], as k")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k has width {k.shape[3]}; expected {q.shape[3]}, as q")
    if q.shape[3] == 0:
        raise ValueError("q has width 0; expected at least 1")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"k has {k.shape[1]} heads; expected a divisor of q's {q.shape[1]}")


def _check_biases(q: Tensor, terms: tuple[Term, ...]) -> None:
    H, d = q.shape[1], q.shape[3]
    for term in terms:
        name = type(term).__name__
        bias = getattr(term, "bias", None)
        if bias is not None:
            width = d if isinstance(term, QueryBias) else term.table.shape[-1]
            _check_values(f"{name}.bias", bias)
            # Not `in`: to torch.compile a size is a symbol, which it does not find in a tuple.
            if bias.dim() != 2 or bias.shape[1] != width or (bias.shape[0] != H and bias.shape[0] != 1):
                raise ValueError(f"{name}.bias has shape {tuple(bias.shape)}; expected [{H}, {width}], heads and width")
            if bias.device != q.device:
                raise ValueError(f"{name}.bias is on {bias.device}; expected {q.device}, where q is")


def _check_ports(q: Tensor, d_v: int, ports: list[Port], offset: int, Tk: int) -> None:
    B, H, Tq, d = q.shape
    names = {"scalar": "Scalar", "query": "OnQuery", "key": "OnKey", "value": "OnValue"}
    for port in ports:
        name, table, left = names[port.kind], port.table, port.left
        if table.shape[0] != H and table.shape[0] != 1:
            raise ValueError(f"{name}.table has {table.shape[0]} heads; expected {H} (q's) or 1")
        for part, x in (("table", table), ("left factor", left)):
            if x is not None and x.device != q.device:
                raise ValueError(f"{name}'s {part} is on {x.device}; expected {q.device}, where q is")
        if left is not None:
            wanted = (B, H, Tq) if port.kind == "scalar" else (B, H, Tq, table.shape[-1])
            if left.dim() != len(wanted) or any(m != n for m, n in zip(left.shape, wanted, strict=True)):
                part = "gate" if port.kind == "scalar" else "left"
                raise ValueError(f"{name}'s {part} has shape {tuple(left.shape)}; expected {wanted}")
        elif port.kind in ("query", "key", "value") and table.shape[-1] != (wide := d_v if port.kind == "value" else d):
            raise ValueError(f"{name}.table has width {table.shape[-1]}; expected {wide}, the width of what it meets")
        if port.rows.kind == "identity":
            far = max(Tq - 1 + offset, Tk - 1 - offset)
            if far > port.rows.params[0]:
                raise ValueError(
                    f"{name}.table has {port.rows.size} rows, for offsets up to ±{port.rows.params[0]}; these lengths "
                    f"(Tq = {Tq}, Tk = {Tk}, offset = {offset}) meet {far}: expected at least {2 * far + 1} rows"
                )
        _check_values(f"{name}.table", table)
        if port.kind == "scalar" and left is not None:
            _check_values(f"{name}.gate", left)


def _check_values(name: str, x: Tensor) -> None:
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name} is {x.dtype}; expected a floating dtype")
    # Reading a tensor on a GPU would stall the stream; there a NaN shows in the output instead.
    if x.device.type == "cpu" and not unreadable() and bool(x.isnan().any()):
        raise ValueError(f"{name} has NaN entries; expected numbers")


def _number(name: str, value: object) -> float:
    if not isinstance(value, (int, float)):
        # NumPy's scalars are such; a tensor is not.
        if not isinstance(value, Real):
            raise TypeError(f"{name} is {value!r}; expected a number")
        value = float(value)
    if isinstance(value, int) and abs(value) > _HUGE:
        raise ValueError(f"{name} is an integer of {value.bit_length()} bits; expected a finite number")
    value = float(value)
    if not -_HUGE < value < _HUGE:
        raise ValueError(f"{name} is {value}; expected a finite number")
    return value
