"""bf16 under Triton's interpreter, which keeps it as bits, multiplies those as integers and rounds towards zero."""

import sys
from pathlib import Path

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

sys.path.append(str(Path(__file__).parents[1]))
from quick_interpreter import quicken

__all__ = ["exact_bf16", "quicken"]


def widened(x: TensorHandle) -> TensorHandle:
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def rounded(x: TensorHandle) -> TensorHandle:
    """To nearest, ties to even, as the hardware does."""
    bits = torch.from_numpy(np.ascontiguousarray(x.data)).to(torch.bfloat16).view(torch.int16)
    return TensorHandle(bits.numpy().view(np.uint16), tl.bfloat16)


def exact_bf16() -> None:
    """Give this process's interpreter products and roundings of bf16."""
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(self, a, b, d, *rest):
        if a.dtype.scalar == tl.bfloat16:
            assert b.dtype.scalar == tl.bfloat16
            a, b = widened(a), widened(b)
        return dot(self, a, b, d, *rest)

    def cast_impl(self, src, dst_type):
        pair = src.dtype.scalar, dst_type.scalar
        if pair == (tl.float32, tl.bfloat16):
            return rounded(src)
        if pair == (tl.bfloat16, tl.float32):
            return widened(src)
        assert tl.bfloat16 not in pair or pair[0] == pair[1], f"no conversion {pair}"
        return cast(self, src, dst_type)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
