"""What a pass at inference reads and writes, counted from the arguments of the operators that it calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.depth import InferenceState
from tilewise.depth.triton import config, launch

__all__ = ["Bytes", "count"]


@dataclass
class Bytes:
    """Vectors of d elements and fp32 scalars that one token's pass reads and writes; queries and weights not counted.

    Attributes:
        read, written: vectors.
        scalars: scores and lse, both ways.
    """

    read: int = 0
    written: int = 0
    scalars: int = 0

    @property
    def vectors(self) -> int:
        return self.read + self.written

    def total(self, tokens: int, d: int, itemsize: int) -> int:
        """Bytes of a pass over so many tokens."""
        return tokens * (self.vectors * d * itemsize + 4 * self.scalars)


class _Counted:
    """The operators of a backend; each call adds what its kernels move for a token."""

    def __init__(self, run: ModuleType, found: Bytes, itemsize: int) -> None:
        self._run, self._found, self._itemsize = run, found, itemsize

    def __getattr__(self, name: str):
        return getattr(self._run, name)

    def _add(self, read: int, written: int, scalars: int = 0) -> None:
        self._found.read += read
        self._found.written += written
        self._found.scalars += scalars

    def direct(self, T: int, n: int, queries: int) -> bool:
        return launch.direct(T, n, queries)

    def scores(self, sources: Sequence[Tensor], q: Tensor, eps: float, out: Tensor | None = None):
        # A kernel takes up to BS queries: each further group of them reads the sources again.
        T, d, n, S = *sources[0].shape, len(sources), len(q)
        groups = config.cdiv(S, config.score_tiles(T, d, S, self._itemsize)["BS"])
        self._add(n * groups, 0, S * n + n)
        return self._run.scores(sources, q, eps, out=out)

    def combine(self, sources, s, out=None, lse=None):
        T, d, n, S = *sources[0].shape, len(sources), len(s)
        tiles = config.combine_many(T, d, n, S, self._itemsize) or config.combine_tiles(T, d, n, S, self._itemsize)
        groups = config.cdiv(S, tiles["BS"])
        self._add(n * groups, S, S * n + S)
        return self._run.combine(sources, s, out=out, lse=lse)

    def read(self, o1, lse, sources, update, s, w, output_eps, slot=None):
        given = len(sources) + (update is not None)
        self._add(given + (o1 is not None), 1 + (slot is not None), given + (o1 is not None))
        return self._run.read(o1, lse, sources, update, s, w, output_eps, slot=slot)

    def phase2_fwd(self, update, prefix, o1, lse, q, w, eps, output_eps, new=None):
        both = update is not None and prefix is not None
        self._add(1 + (update is not None) + (prefix is not None), 1 + both, int(lse is not None))
        return self._run.phase2_fwd(update, prefix, o1, lse, q, w, eps, output_eps, new=new)

    def phase2_from_scores(self, update, prefix, sources, s, q, w, eps, output_eps, new=None):
        both, n = update is not None and prefix is not None, len(sources)
        self._add(n + (update is not None) + (prefix is not None), 1 + both, n)
        return self._run.phase2_from_scores(update, prefix, sources, s, q, w, eps, output_eps, new=new)

    def mix_fwd(self, sources, update, prefix, q, w, eps, output_eps, new=None):
        both = update is not None and prefix is not None
        self._add(len(sources) + (update is not None) + (prefix is not None), 1 + both)
        return self._run.mix_fwd(sources, update, prefix, q, w, eps, output_eps, new=new)


class _Copies(TorchDispatchMode):
    """Counts copies and sums of whole sources that the stream makes between operators."""

    def __init__(self, found: Bytes, bank: Tensor) -> None:
        super().__init__()
        self._found, self._bank = found, bank

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        place = kwargs.get("out", args[0] if args else None)
        home = self._bank.untyped_storage().data_ptr()
        stored = torch.is_tensor(place) and place.untyped_storage().data_ptr() == home
        if stored and func in (torch.ops.aten.copy_.default, torch.ops.aten.add.out):
            self._found.read += 1 + (func is torch.ops.aten.add.out)
            self._found.written += 1
        return func(*args, **kwargs)


@torch.no_grad()
def count(state: InferenceState, tokens: int, norms: Tensor, itemsize: int = 2) -> Bytes:
    """Bytes of one pass through `state`: the operators' traffic, without the sublayers' own.

    The counts hold for the kernels' tiles of `itemsize` bytes an element, whatever runs here: a stack of the same
    schedule can be counted on a CPU at a small width. The operators of the CPU path copy within themselves; their
    copies count as the kernels' writes do.

    Args:
        state: made for at least so many tokens; its operators are counted and put back.
        tokens: of the pass. Tiles depend on it, so count at the length that is meant, or above 1,024 for prefill.
        norms: `[L + 1, d]`.
        itemsize: bytes an element of the stream that is meant.
    """
    found, run = Bytes(), state.run
    x = torch.randn(tokens, state.bank.shape[-1], device=state.bank.device).to(state.bank.dtype)
    state.run = _Counted(_Opaque(run), found, itemsize)
    try:
        with _Copies(found, state.bank):
            stream = state(x, norms=norms[:-1].unbind(0))
            for l in range(state.schedule.sublayers):
                stream.write(l, stream.read(l) * 0.7)
            stream.output(norms[-1])
    finally:
        state.run = run
    return found


class _Opaque:
    """A backend whose own copies into the bank are not seen as the stream's."""

    def __init__(self, run: ModuleType) -> None:
        self._run = run

    def __getattr__(self, name: str):
        function = getattr(self._run, name)

        def call(*args, **kwargs):
            with torch.utils._python_dispatch._disable_current_modes():
                return function(*args, **kwargs)

        return call
