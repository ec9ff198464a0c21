"""The depth set's works, their inputs, and the oracle: a stack of sublayers with the trivial update u = 0.7 y."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .cells import Cell, Truth

__all__ = ["EPS", "Inputs", "Read", "Work", "dense_read", "drive", "gate", "inputs", "sample", "standard", "truth"]

EPS = 1e-6
ROWS = 64
"""So many first and last tokens of a result are compared with the oracle."""

Read = Callable[[int, Sequence[Tensor]], Tensor]
"""(l, sources) ↦ the normalised input of sublayer l; l = L is the output read."""


class Work(NamedTuple):
    """Tokens T, width d, sublayers L, sublayers a block S (0: Full, every output is a source), gradients or not."""

    tokens: int
    d: int
    sublayers: int
    block: int
    train: bool

    @classmethod
    def of(cls, cell: Cell) -> Work:
        size = cell.size
        return cls(size["tokens"], size["d"], size["sublayers"], size["block"], cell.passes == ("step",))

    def blocks(self) -> Iterator[range]:
        """The sublayers of each block; the last one may be partial."""
        step = self.block or 1
        for first in range(0, self.sublayers, step):
            yield range(first, min(first + step, self.sublayers))


class Inputs(NamedTuple):
    """x `[T, d]`, queries and input-norm weights `[L + 1, d]`, gradient of the result; the same in every process."""

    x: Tensor
    query: Tensor
    norm: Tensor
    dy: Tensor


def inputs(cell: Cell) -> Inputs:
    """Queries are drawn so that scores have unit variance."""
    T, d, L = (cell.size[name] for name in ("tokens", "d", "sublayers"))
    g = torch.Generator(cell.device).manual_seed(cell.seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=cell.device, generator=g)

    x, query, norm = draw(T, d), draw(L + 1, d) * d**-0.5, 1 + 0.1 * draw(L + 1, d)
    return Inputs(*(t.to(cell.torch_dtype) for t in (x, query, norm, draw(T, d))))


def update(y: Tensor) -> Tensor:
    return y * 0.7


def overhead(x: Tensor, work: Work) -> Callable[[], object]:
    """The updates alone, forward and, in training, backward."""

    def run() -> object:
        with torch.no_grad():
            y = x
            for _ in range(work.sublayers * (1 + work.train)):
                y = update(y)
            return y

    return run


def drive(x: Tensor, work: Work, read: Read, compact: bool = False) -> Tensor:
    """A pass with the running sum of a block in a tensor of its own, read by one call a sublayer.

    `compact` recomputes each block in the backward, for oracles that would not fit.
    """

    def block(part: range, *sources: Tensor) -> Tensor:
        sum_ = None
        for l in part:
            u = update(read(l, [*sources] if sum_ is None else [*sources, sum_]))
            sum_ = u if sum_ is None else sum_ + u
        return sum_

    sources = [x]
    for part in work.blocks():
        done = checkpoint(block, part, *sources, use_reentrant=False) if compact else block(part, *sources)
        sources.append(done)
    return read(work.sublayers, sources)


def dense_read(query: Tensor, norm: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """One read as its equations: stack, normalise, score, softmax, weighted sum, input norm."""
    v, d = torch.stack(list(sources)), query.shape[0]
    statistic = torch.float64 if v.dtype == torch.float64 else torch.float32
    p = (F.rms_norm(v, (d,), None, EPS) * query).sum(-1, dtype=statistic).softmax(0)
    return F.rms_norm((p[..., None].to(v.dtype) * v).sum(0), (d,), norm, EPS)


def standard(x: Tensor, norm: Tensor, work: Work) -> Tensor:
    """The plain residual h += u with an input norm, from its equations."""
    h, y = x, F.rms_norm(x, (work.d,), norm[0], EPS)
    for l in range(work.sublayers):
        h = h + update(y)
        y = F.rms_norm(h, (work.d,), norm[l + 1], EPS)
    return y


def sample(y: Tensor) -> Tensor:
    """The first and the last rows of a result that has a row a token."""
    return y if y.shape[0] <= 2 * ROWS else torch.cat([y[:ROWS], y[-ROWS:]])


def gate(got: Tensor, exact: Tensor, low_error: float, strict: bool) -> dict:
    """At most twice the relative error of dense PyTorch in the same dtype, since chains of reads amplify rounding.

    Other projects' systems are held to no less than 8 rounding units, as in the relative set.
    """
    if got.shape != exact.shape:
        raise ValueError(f"got has shape {tuple(got.shape)}; expected {tuple(exact.shape)}")
    error = _relative(got, exact)
    allowed = 2 * low_error if strict else max(2 * low_error, 8 * torch.finfo(got.dtype).eps)
    return {"error": error, "allowed": allowed, "ok": error <= allowed}


def _relative(got: Tensor, exact: Tensor) -> float:
    exact = exact.double()
    return ((got.detach().double() - exact).norm() / exact.norm()).item()


def truth(cell: Cell) -> Truth:
    """``y`` and, in training, ``dx``, ``dquery`` and ``dnorm`` of the work; the plain residual's with ``plain.``."""
    work, data = Work.of(cell), inputs(cell)
    exact, low = {}, {}
    for plain in (False, True):
        found = [_dense(data, work, dtype, plain) for dtype in (torch.float64, cell.torch_dtype)]
        for name, value in found[0].items():
            label = f"plain.{name}" if plain else name
            kept = torch.float32 if cell.torch_dtype.itemsize == 2 else torch.float64
            exact[label], low[label] = value.to(kept), _relative(found[1][name], value)
    return Truth(exact, low)


def _dense(data: Inputs, work: Work, dtype: torch.dtype, plain: bool) -> dict[str, Tensor]:
    """The work in dense PyTorch. Rows never meet, so a forward needs the sampled ones alone; gradients of queries and
    norms are sums over all tokens, taken in parts."""
    query, norm = (t.to(dtype).requires_grad_(work.train) for t in (data.query, data.norm))

    def forward(x: Tensor) -> Tensor:
        if plain:
            return standard(x, norm, work)
        return drive(x, work, lambda l, v: dense_read(query[l], norm[l], v), compact=work.train)

    if not work.train:
        with torch.no_grad():
            return {"y": forward(sample(data.x).to(dtype))}
    leaves = {"norm": norm} if plain else {"query": query, "norm": norm}
    y, dx, sums = [], [], dict.fromkeys(leaves, 0.0)
    for x, dy in zip(data.x.split(2048), data.dy.split(2048), strict=True):
        x = x.to(dtype).requires_grad_()
        out = forward(x)
        gradient, *rest = torch.autograd.grad(out, [x, *leaves.values()], dy.to(dtype))
        y, dx = [*y, out.detach()], [*dx, gradient]
        sums = {name: sums[name] + g.double() for name, g in zip(leaves, rest, strict=True)}
    found = {"y": sample(torch.cat(y)), "dx": sample(torch.cat(dx))}
    return found | {f"d{name}": value for name, value in sums.items()}
