"""A decoder layer's float32 operators in C++, compiled once per machine; weights packed for them."""

from .operators import Operators
from .product import PackedLinear

__all__ = ["Operators", "PackedLinear"]
