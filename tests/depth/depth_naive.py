"""Full and Block Attention Residuals written down from equations 2 to 6 of the paper, independently of the package."""

import torch


def rms(v, eps=1e-6):
    return v / torch.sqrt(v.pow(2).mean(-1, keepdim=True) + eps)


def attend(values, w, g, eps=1e-6):
    """h = sum_j softmax_j(w . (RMSNorm(v_j) * g)) v_j."""
    v = torch.stack(values)
    wide = v if v.dtype == torch.float64 else v.float()
    scores = (rms(wide, eps) * g.to(wide.dtype)) @ w.to(wide.dtype)
    return (scores.softmax(0)[..., None] * wide).sum(0).to(v.dtype)


def full(x, functions, query, key, eps=1e-6):
    """All inputs h_1 .. h_L and the output head's read; `functions[l](h_l)` is the sublayer with its norm."""
    values, inputs = [x], []
    for l, f in enumerate(functions):
        h = attend(values, query[l], key[l], eps)
        inputs.append(h)
        values.append(f(h))
    return inputs, attend(values, query[-1], key[-1], eps)


def block(x, functions, query, key, starts, eps=1e-6):
    """The same for Block with the blocks that begin at `starts`."""
    blocks, partial, inputs = [x], None, []
    for l, f in enumerate(functions):
        if l in starts and l:
            blocks.append(partial)
            partial = None
        h = attend(blocks if partial is None else [*blocks, partial], query[l], key[l], eps)
        inputs.append(h)
        y = f(h)
        partial = y if partial is None else partial + y
    return inputs, attend([*blocks, partial], query[-1], key[-1], eps)
