"""Benchmarks: every figure in the documentation comes from a command in this folder."""
