"""Triton kernels of depth attention (Hopper-tuned, any CUDA device that Triton supports)."""
