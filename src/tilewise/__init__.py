"""Exact fused attention for the models that FlashAttention leaves behind."""
