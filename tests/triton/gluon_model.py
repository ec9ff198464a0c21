"""Runs Gluon kernels on the CPU, from their own source: one program at a time, with the asynchrony at its worst.

Copies land when their barrier is waited for, and their destination holds NaN until then; products are computed when
they are waited for and must not differ from what their operands held when they were issued; a copy out must find at
its end what it found at its start; a barrier that nobody will complete is an error. So a tile that is overwritten too
early, read too early, or waited for in the wrong phase shows. Inlined PTX runs thread by thread (:mod:`lanes`), and
partitions run in another precedence in every program (:mod:`partitions`). What this cannot show: barriers between the
threads of a program, which the compiler places, and the layouts.
"""

from __future__ import annotations

import types

import lanes
import numpy as np
import torch
from partitions import Barriers, Partitions, order_of
from triton.experimental.gluon import language as real

__all__ = ["run"]

SHORT = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "int32": torch.int64,
         "int64": torch.int64}  # fmt: skip
LONG = {torch.float16: real.float16, torch.bfloat16: real.bfloat16, torch.float32: real.float32}


def _dtype(dtype):
    return SHORT[str(dtype)]


def _raw(x):
    if isinstance(x, Value):
        return x.x
    return getattr(x, "value", x)


def _torch(x):
    x = _raw(x)
    return x if isinstance(x, torch.Tensor) else torch.tensor(x)


class Value:
    """A tensor (or number) of the kernel."""

    def __init__(self, x):
        self.x = x if isinstance(x, torch.Tensor) else torch.tensor(x)

    dtype = property(lambda self: LONG[self.x.dtype])
    shape = property(lambda self: list(self.x.shape))

    def to(self, dtype):
        return Value(self.x.to(_dtype(dtype)))

    def __getitem__(self, at):
        return Value(self.x[at])

    def __bool__(self):
        return bool(self.x)

    def __index__(self):
        return int(self.x)

    def __invert__(self):
        return Value(~self.x)

    def __neg__(self):
        return Value(-self.x)


def _operator(name, function):
    def forward(self, other):
        if isinstance(other, (Pointer, Pending)):
            return NotImplemented
        return Value(function(self.x, _raw(other)))

    def backward(self, other):
        return Value(function(_torch(other), self.x))

    setattr(Value, f"__{name}__", forward)
    setattr(Value, f"__r{name}__", backward)


for _name, _function in {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div, "mod": torch.remainder,
    "floordiv": torch.floor_divide, "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
}.items():  # fmt: skip
    _operator(_name, _function)


def _comparison(name):
    function = getattr(torch, name)
    setattr(Value, f"__{name}__", lambda self, other: Value(function(self.x, _raw(other))))


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _comparison(_name)
Value.__hash__ = None


class Pointer:
    """A torch tensor's memory from some element on."""

    def __init__(self, tensor, at=0):
        self.tensor, self.at = tensor, at
        self.memory = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)

    def __add__(self, other):
        return Pointer(self.tensor, _torch(self.at) + _torch(other))

    def __iadd__(self, other):
        return self + other

    def place(self):
        return _torch(self.at) + self.tensor.storage_offset()


def _load(at, mask=None, other=0):
    place = at.place()
    inside = torch.ones_like(place, dtype=torch.bool) if mask is None else _torch(mask)
    place, inside = torch.broadcast_tensors(place, inside)
    assert bool(((place >= 0) & (place < at.memory.numel()))[inside].all()), "a load outside of its tensor"
    found = at.memory[torch.where(inside, place, 0)]
    out = torch.where(inside, found, torch.tensor(_raw(other), dtype=found.dtype))
    return Value(out.to(torch.int64) if not out.dtype.is_floating_point else out)


def _store(at, value, mask=None):
    place = at.place()
    inside = torch.ones_like(place, dtype=torch.bool) if mask is None else _torch(mask)
    place, inside, value = torch.broadcast_tensors(place, inside, _torch(value))
    assert bool(((place >= 0) & (place < at.memory.numel()))[inside].all()), "a store outside of its tensor"
    at.memory[place[inside]] = value[inside].to(at.memory.dtype)


class Shared:
    """A tile of shared memory, or a view of one."""

    def __init__(self, x, dtype=None):
        self.x, self.kind = x, dtype

    dtype = property(lambda self: self.kind)
    shape = property(lambda self: list(self.x.shape))

    def index(self, n):
        return Shared(self.x[int(n)], self.kind)

    def slice(self, start, length, dim=0):
        return Shared(self.x.narrow(dim, start, length), self.kind)

    def permute(self, order):
        return Shared(self.x.permute(*order), self.kind)

    def load(self, layout):
        assert not self.x.isnan().any(), "shared memory is read before it was written"
        return Value(self.x.clone())

    def store(self, value):
        assert value.x.dtype == self.x.dtype
        assert value.x.shape == self.x.shape
        self.x.copy_(value.x)


class Pending:
    """A product that runs."""

    def __init__(self, program, a, b, acc, use_acc):
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.seen, self.result = self._operands(), None
        program.products.append(self)

    def _operands(self):
        return [o.x.float().clone() for o in (self.a, self.b)]

    def finish(self):
        for now, then in zip(self._operands(), self.seen, strict=True):
            assert torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0)), "an operand changed while its product ran"
        product = self.seen[0] @ self.seen[1]
        if self.use_acc:
            before = self.acc.result if isinstance(self.acc, Pending) else self.acc.x
            product = before + product
        self.result = product


def _outputs(constraints: str) -> int:
    """How many of an inlined text's operands are outputs."""
    return sum(c.startswith("=") for c in constraints.split(","))


def _bits(x: torch.Tensor) -> np.ndarray:
    """A tile as unsigned integers: integers are held in 64 bits here and have 32 in the kernel."""
    return x.numpy().astype(np.uint32) if x.dtype == torch.int64 else x.view(torch.int16).numpy().view(np.uint16)


class Program:
    """One program: its barriers, products and copies under way, and the language as it sees it."""

    def __init__(self, pid, grid):
        self.pid, self.grid = pid, grid
        self.partitions, self.queues = Partitions(), {}

    @property
    def products(self):
        """Those under way of the partition that runs."""
        return self.queues.setdefault(("products", self.partitions.current), [])

    @property
    def stores(self):
        return self.queues.setdefault(("stores", self.partitions.current), [])

    def specialize(self, functions, warps, registers):
        assert len(functions) == len(warps) + 1 == len(registers) + 1
        number = int(np.ravel_multi_index(self.pid[: len(self.grid)], self.grid))
        order = order_of(number, len(functions))
        self.partitions.run([lambda f=f, a=a: f(*a) for f, a in functions], order)

    def mma(self, a, b, acc, *, use_acc=True, is_async=False, **_):
        assert is_async
        self.partitions.switch()
        return Pending(self, a, b, acc, use_acc)

    def mma_wait(self, outstanding=0, deps=()):
        self.partitions.switch()
        while len(self.products) > outstanding:
            self.products.pop(0).finish()
        out = []
        for dep in deps:
            if isinstance(dep, Pending):
                assert dep.result is not None, "a product is used before it was waited for"
                dep = Value(dep.result)
            out.append(dep)
        return out[0] if len(out) == 1 else tuple(out)

    def expect(self, bar, n, pred=True):
        if bool(pred):
            bar.bytes += _raw(n)
            bar.arrive()

    def arrive(self, bar, count=1, pred=True):
        if bool(pred):
            bar.arrive(count)
            self.partitions.switch()

    def wait(self, bar, phase, pred=True):
        if not bool(pred):
            return
        phase = int(_torch(phase))
        self.partitions.switch(lambda: bar.passed(phase) or bar.complete)
        while not bar.passed(phase):
            assert bar.complete, "a barrier is waited for that nothing completes"
            bar.land()

    def copy_in(self, descriptor, at, bar, to, pred=True):
        if not bool(pred):
            return
        assert bar.bytes, "a copy arrives at a barrier that was not told"
        at = [int(n) for n in at]
        box, tensor = descriptor.block_shape, descriptor.base
        assert tensor.dtype == to.x.dtype, "a copy in converts"
        view = torch.as_strided(tensor, descriptor.shape, descriptor.strides, tensor.storage_offset())
        tile = torch.zeros(box, dtype=tensor.dtype)
        span = [(max(a, 0), min(a + b, n)) for a, b, n in zip(at, box, descriptor.shape, strict=True)]
        if all(e > s for s, e in span):
            tile[tuple(slice(s - a, e - a) for a, (s, e) in zip(at, span, strict=True))] = view[
                tuple(slice(s, e) for s, e in span)
            ]
        to.x.fill_(float("nan"))
        bar.copies.append((tile.reshape(to.x.shape), to.x))
        self.partitions.switch()

    def copy_out(self, descriptor, at, source):
        assert descriptor.base.dtype == source.x.dtype, "a copy out converts"
        # An H200 stopped with an illegal instruction at a copy that began before its tensor.
        inside = [0 <= int(a) < n for a, n in zip(at, descriptor.shape, strict=True)]
        assert all(inside), "a copy out begins outside its tensor"
        self.stores.append((descriptor, [int(n) for n in at], source, source.x.clone()))

    def store_wait(self, outstanding=0):
        while len(self.stores) > outstanding:
            descriptor, at, source, seen = self.stores.pop(0)
            assert torch.equal(source.x, seen), "a tile changed while it was copied out"
            tensor, box = descriptor.base, descriptor.block_shape
            view = torch.as_strided(tensor, descriptor.shape, descriptor.strides, tensor.storage_offset())
            span = [(max(a, 0), min(a + b, n)) for a, b, n in zip(at, box, descriptor.shape, strict=True)]
            if all(e > s for s, e in span):
                part = tuple(slice(s - a, e - a) for a, (s, e) in zip(at, span, strict=True))
                view[tuple(slice(s, e) for s, e in span)] = seen.reshape(box)[part]

    def allocate(self, dtype, shape, layout):
        if type(layout).__name__ == "MBarrierLayout":
            return Barriers(shape[0])
        return Shared(torch.full(list(map(_raw, shape)), float("nan"), dtype=_dtype(dtype)), dtype)

    def assembly(self, text, constraints, args, dtype, is_pure, pack):
        text = _raw(text)
        if text.startswith("cvt.rn.satfinite.f16x2"):
            return Value(args[0].x.clamp(-65504.0, 65504.0).half())
        registers = [r for a in args for r in lanes.fragment(_bits(a.x.contiguous()))]
        # `pack` values at a time, each time as many registers of outputs and of inputs as the constraints name.
        outputs = _outputs(_raw(constraints))
        inputs = len(_raw(constraints).split(",")) - outputs
        made = []
        for n in range(0, len(registers), inputs):
            made += lanes.execute(text, outputs, registers[n : n + inputs])
        tile = lanes.tile_of(made)
        if tile.itemsize == 4:
            return Value(torch.from_numpy(tile.astype(np.int64)))
        return Value(torch.from_numpy(tile.view(np.int16)).view(_dtype(dtype)))

    def language(self):
        def init(bar, count):
            assert not bar.count, "a barrier is made twice"
            bar.count = _raw(count)

        gl = types.SimpleNamespace(**{n: getattr(real, n) for n in dir(real) if not n.startswith("_")})
        pair = lambda f: lambda a, b: Value(f(_torch(a), _torch(b)))  # noqa: E731
        gl.program_id = lambda axis: Value(torch.tensor(self.pid[axis]))
        gl.num_programs = lambda axis: Value(torch.tensor(self.grid[axis]))
        gl.warp_specialize = self.specialize
        gl.arange = lambda a, b, layout=None: Value(torch.arange(a, b))
        gl.where = lambda c, a, b: Value(torch.where(_torch(c), _raw(a), _raw(b)))
        gl.maximum, gl.minimum = pair(torch.maximum), pair(torch.minimum)
        gl.max = lambda x, axis: Value(x.x.amax(axis))
        gl.sum = lambda x, axis: Value(x.x.sum(axis))
        gl.exp2, gl.log2 = (lambda x: Value(torch.exp2(x.x))), (lambda x: Value(torch.log2(x.x)))
        gl.zeros = lambda shape, dtype, layout=None: Value(torch.zeros(list(map(_raw, shape)), dtype=_dtype(dtype)))
        gl.full = lambda shape, v, dtype, layout=None: Value(torch.full(list(map(_raw, shape)), v, dtype=_dtype(dtype)))
        gl.load, gl.store = _load, _store
        gl.convert_layout = lambda x, layout: x
        gl.static_range = range
        gl.allocate_shared_memory = self.allocate
        gl.inline_asm_elementwise = self.assembly
        mbarrier = types.SimpleNamespace(init=init, expect=self.expect, wait=self.wait, arrive=self.arrive)
        mbarrier.MBarrierLayout = type("MBarrierLayout", (), {})
        tma = types.SimpleNamespace(async_copy_global_to_shared=self.copy_in, async_copy_shared_to_global=self.copy_out,
                                    store_wait=self.store_wait)  # fmt: skip
        return dict(gl=gl, mbarrier=mbarrier, tma=tma, warpgroup_mma=self.mma, warpgroup_mma_wait=self.mma_wait,
                    warpgroup_mma_init=lambda x: x, fence_async_shared=lambda: None, barrier=lambda: None)  # fmt: skip


def _rebuilt(jitted, language, made):
    """The kernel's Python function with this language instead of Gluon's, and the same for all that it calls."""
    if id(jitted) not in made:
        names = dict(jitted.fn.__globals__)
        function = types.FunctionType(jitted.fn.__code__, names, jitted.fn.__name__, jitted.fn.__defaults__)
        made[id(jitted)] = function
        for name, value in list(names.items()):
            if name in language:
                names[name] = language[name]
            elif type(value).__name__ == "GluonJITFunction":
                names[name] = _rebuilt(value, language, made)
            elif type(value).__name__ == "constexpr":
                names[name] = value.value
    return made[id(jitted)]


def _argument(x):
    if isinstance(x, torch.Tensor):
        return Pointer(x)
    if isinstance(x, tuple):
        return type(x)(*map(_argument, x)) if hasattr(x, "_fields") else tuple(map(_argument, x))
    return Value(x) if isinstance(x, (int, float)) else x


def run(kernel, grid, *args, **meta):
    """Run every program of a Gluon kernel, in order."""
    meta.pop("maxnreg", None)
    args = [_argument(a) for a in args]
    for pid in np.ndindex(*grid):
        program = Program([int(n) for n in (*pid, 0, 0)], grid)
        _rebuilt(kernel, program.language(), {})(*args, **meta)
        left = [kind for (kind, _), queue in program.queues.items() if queue]
        assert not left, f"{left} were never waited for"
