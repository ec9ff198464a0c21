"""Random q, k and v for tests of attention()."""

import torch

__all__ = ["qkv"]


def qkv(B=2, H=4, Hk=4, Tq=10, Tk=10, d=8, d_v=8, **options):
    return (
        torch.randn(B, H, Tq, d, **options),
        torch.randn(B, Hk, Tk, d, **options),
        torch.randn(B, Hk, Tk, d_v, **options),
    )
