"""A packed float32 matrix product in C++, compiled once per machine."""

from .product import Gemm, PackedLinear

__all__ = ["Gemm", "PackedLinear"]
