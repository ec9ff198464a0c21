"""Benchmarks: cases × lengths × passes × systems, each cell gated by its numerics, as records, tables and plots."""
