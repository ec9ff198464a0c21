"""Triton's interpreter in a fifth of its time, bit for bit the same; `test_interpreted_attention.py` compares both.

Most of that time goes to the types of tensors, which are made anew at every operation; to sums in 64 bits that ask
whether those in 32 overflow, an answer that only options.debug reads; to a search of Triton's modules for functions to
replace at every call of a function; and to reductions by a kernel's own function, entry by entry.
"""

import ast
import dataclasses
import inspect
import textwrap
from functools import cache

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

__all__ = ["quicken"]

core = tl.core


def _types() -> None:
    """A block's shape, name and number of entries are computed once for each element type and shape."""
    made: dict[tuple, dict] = {}
    make_block = core.block_type.__init__
    none, one = core.tuple([]), core.constexpr(1)

    def block(self, element_ty, shape):
        space = getattr(element_ty, "address_space", None)
        key = element_ty.name, space, *[n if type(n) is int else core._unwrap_if_constexpr(n) for n in shape]
        found = made.get(key)
        if found is None:
            make_block(self, element_ty, shape)
            found = made[key] = self.__dict__ | {
                "shapes": core.tuple([core.constexpr(n) for n in self.shape]),
                "entries": core.constexpr(self.numel),
            }
        self.__dict__.update(found)

    def tensor(self, handle, type):
        self.handle, self.type = handle, type
        if type.is_block():
            self.shape, self.numel, self.dtype = type.shapes, type.entries, type.element_ty
        else:
            self.shape, self.numel, self.dtype = none, one, type.scalar

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    # In the interpreter, types are their own intermediate representation.
    core.block_type.to_ir = lambda self, builder: self


def _operands() -> None:
    """Most comparisons are of a type with itself, and most operands have one shape."""
    equal, broadcast = core.dtype.__eq__, TritonSemantic.broadcast_impl_value
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)

    def broadcast_impl_value(self, lhs, rhs):
        a, b = (x.type.shape.values if x.type.is_block() else None for x in (lhs, rhs))
        return (lhs, rhs) if a == b else broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_impl_value


def _numpy_types() -> None:
    make = interpreter._get_np_dtype
    known: dict[str, object] = {}

    def dtype(type):
        found = known.get(type.name)
        if found is None:
            found = known[type.name] = make(type)
        return found

    interpreter._get_np_dtype = dtype


def _language() -> None:
    """Triton's modules are made the interpreter's own the first time that a function needs them, and stay so."""
    replace = interpreter._patch_lang
    known = set()

    def once(fn):
        if fn not in known:
            known.add(fn)
            replace(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = once


def _reductions() -> None:
    """Reductions by a kernel's own function: in the same order along the axis, but for all other entries at once."""
    by_entry = interpreter.ReduceOps.generic_reduce

    @cache
    def adds(fn) -> bool:
        """Whether all that the function does is to add each of its first arguments to one of the others, in order."""
        names = list(inspect.signature(fn).parameters)
        sums = [f"{a} + {b}" for a, b in zip(names[: len(names) // 2], names[len(names) // 2 :], strict=True)]
        source = ast.parse(textwrap.dedent(inspect.getsource(fn))).body[0]
        return ast.dump(ast.Module(source.body, [])) == ast.dump(ast.parse(f"return {', '.join(sums)}"))

    def generic_reduce(self, input):
        if self.axis is None:
            return by_entry(self, input)
        slices = [np.moveaxis(x.handle.data, self.axis, 0) for x in input]
        if adds(self.combine_fn.fn):
            # Accumulated one after the other; np.sum would add in pairs.
            totals, slices = [np.add.accumulate(x)[-1] for x in slices], [x[:1] for x in slices]
        else:
            totals = [x[0] for x in slices]
        for n in range(1, len(slices[0])):
            operands = [self.to_tensor(x, y.dtype) for x, y in zip(totals, input, strict=True)]
            operands += [self.to_tensor(x[n], y.dtype) for x, y in zip(slices, input, strict=True)]
            made = self.combine_fn.fn(*operands)
            made = made if isinstance(made, tuple) else (made,)
            totals = [x.handle.data.reshape(y.shape).astype(y.dtype) for x, y in zip(made, totals, strict=True)]
        if self.keep_dims:
            totals = [np.expand_dims(x, self.axis) for x in totals]
        return [self.to_tensor(x, y.dtype) for x, y in zip(totals, input, strict=True)]

    interpreter.ReduceOps.generic_reduce = generic_reduce


def quicken() -> None:
    """For this process, which must have set TRITON_INTERPRET=1 and must compile no kernel."""
    if core.tensor.__init__.__module__ == __name__:
        return
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    for change in (_types, _operands, _numpy_types, _language, _reductions):
        change()
