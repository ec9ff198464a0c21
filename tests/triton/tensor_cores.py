"""TF32 without a GPU: products of the interpreter as tensor cores form them, and PyTorch's as cuBLAS does."""

import numpy as np
import torch
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

__all__ = ["NearestTF32", "cut_operands"]

_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default}


class NearestTF32(TorchDispatchMode):
    """Inside, matrix products of fp32 tensors read 11 significant bits of each operand, rounded to the nearest."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in _PRODUCTS and args[0].dtype == torch.float32:
            args = tuple(self.nearest(x) for x in args)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def nearest(x):
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp(torch.round(mantissa * 2048) / 2048, exponent)


def cut_operands() -> None:
    """Give this process's interpreter TF32 products that drop the lower 13 bits of each operand, as the hardware."""
    dot = InterpreterBuilder.create_dot

    def cut(x: TensorHandle) -> TensorHandle:
        return TensorHandle((x.data.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32), tl.float32)

    def create_dot(self, a, b, d, precision, *rest):
        if a.dtype.scalar == tl.float32 and precision == ir.INPUT_PRECISION.TF32:
            a, b = cut(a), cut(b)
        return dot(self, a, b, d, precision, *rest)

    InterpreterBuilder.create_dot = create_dot
