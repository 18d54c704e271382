"""The built-in quants pass the suite that any plugin can run, rows being the same to the last bit."""

from __future__ import annotations

from phloem.plugins.quant.bf16 import Bf16
from phloem.plugins.quant.gguf import GgufBlocks
from phloem.plugins.quant.int4 import Int4
from phloem.plugins.quant.int8 import Int8
from phloem.plugins.quant.none import NoQuant
from phloem.plugins.quant.stored import Stored
from phloem.testing import QuantSuite


class TestNone(QuantSuite):
    plugin = NoQuant
    tolerance = rounding = 1e-6
    bits = True


class TestTorch(QuantSuite):
    """What stands in where there is no compiler. torch's sums may depend on the number of rows."""

    plugin = NoQuant
    options = {"product": "torch"}  # noqa: RUF012
    tolerance = rounding = 1e-6


class TestStored(QuantSuite):
    """Floats are what they were; beside blocks activations are rounded."""

    plugin = Stored
    tolerance = 1e-6
    bits = True


class TestInt4(QuantSuite):
    plugin = Int4
    bits = True


class TestGguf(QuantSuite):
    """Floats become 8 bits."""

    plugin = GgufBlocks
    tolerance = 0.03
    bits = True


class TestBf16(QuantSuite):
    plugin = Bf16
    tolerance = rounding = 0.01
    bits = True


class TestInt8(QuantSuite):
    plugin = Int8
    tolerance = rounding = 0.03
    bits = True
