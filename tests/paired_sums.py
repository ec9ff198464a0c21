"""Reductions of the interpreter in a GPU's order: each thread adds its own 16 entries, then threads add in pairs.

The interpreter adds one entry after another, so that the rounding of a sum over d grows with d, not with its logarithm.
"""

import numpy as np
from triton.runtime import interpreter

__all__ = ["pair_sums"]

OWN = 16


def pair_sums() -> None:
    """For this process. Of reductions by a kernel's own function along an axis that is a power of two; after
    :func:`quick_interpreter.quicken`, which gives them an order, too."""
    by_entry = interpreter.ReduceOps.generic_reduce

    def generic_reduce(self, input):
        length = 0 if self.axis is None else input[0].handle.data.shape[self.axis]
        if length < 2 or length & (length - 1):
            return by_entry(self, input)

        def combined(a, b):
            operands = [self.to_tensor(x, y.dtype) for xs in (a, b) for x, y in zip(xs, input, strict=True)]
            made = self.combine_fn.fn(*operands)
            made = made if isinstance(made, tuple) else (made,)
            return [x.handle.data.astype(y.dtype) for x, y in zip(made, a, strict=True)]

        slices = [np.moveaxis(x.handle.data, self.axis, 0) for x in input]
        own = min(OWN, length)
        threads = [x.reshape(length // own, own, *x.shape[1:]) for x in slices]
        totals = [x[:, 0] for x in threads]
        for n in range(1, own):
            totals = combined(totals, [x[:, n] for x in threads])
        while len(totals[0]) > 1:
            half = len(totals[0]) // 2
            totals = combined([x[:half] for x in totals], [x[half:] for x in totals])
        totals = [x[0] for x in totals]
        if self.keep_dims:
            totals = [np.expand_dims(x, self.axis) for x in totals]
        return [self.to_tensor(x, y.dtype) for x, y in zip(totals, input, strict=True)]

    interpreter.ReduceOps.generic_reduce = generic_reduce
