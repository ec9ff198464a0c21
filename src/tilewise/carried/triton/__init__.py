"""Triton kernels of carried attention; imported only when one is started."""
