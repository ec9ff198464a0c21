"""Products of Triton's interpreter added as a GPU adds them: each product of an fp32 dot to the sum so far.

Triton gives an fp32 dot to fused multiply-adds, the accumulator that it was handed included. The interpreter's matrix
product is more exact.
"""

import numpy as np
from triton.runtime import interpreter

__all__ = ["chained_dots"]


def chain(self, a, b, c, precision, imprecise):
    assert precision.name == "IEEE"
    total = c.data
    for k in range(a.data.shape[1]):
        # A product of two fp32 numbers is exact in fp64.
        product = a.data[:, k : k + 1].astype(np.float64) * b.data[k]
        total = (total + product).astype(np.float32)
    return interpreter.TensorHandle(total, c.dtype.scalar)


def chained_dots(monkeypatch) -> None:
    """For the monkeypatch's test, of kernels in fp32 alone."""
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", chain)
