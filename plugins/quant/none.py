"""No quant: weights as the model's dtype has them, in panels for a compiled product where that is float32 on a CPU."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from phloem.errors import PluginError
from phloem.interfaces import PluginContext

if TYPE_CHECKING:
    from phloem.linear import Linear

    from ._compiled import Kernel

log = logging.getLogger(__name__)


class NoQuant:
    """Kind `quant`, name `none`: the same numbers as torch's, read from memory once per step."""

    api = 1
    capabilities = frozenset[str]()
    blocks = frozenset[str]()

    class Options(BaseModel):
        """How matrices are multiplied."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        product: Literal["auto", "packed", "torch"] = "auto"
        """`packed`: C++ for float32 on CPUs; `auto` takes it where it applies and compiles, else `torch`."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        """Raises PluginError if `packed` is asked for and cannot be had."""
        self._kernel: Kernel | None = None
        applies = context.device.startswith("cpu") and context.dtype in ("auto", "float32")
        if options.product == "packed" and not applies:
            raise PluginError(
                f"quant.product: packed is for float32 on a CPU, not {context.dtype} on {context.device}",
                hint="say auto, or model.dtype: float32",
            )
        if options.product == "torch" or not applies:
            return
        from ._compiled import Kernel  # reading a configuration imports no torch
        from ._packed import SOURCE

        try:
            self._kernel = Kernel(SOURCE)
        except PluginError as error:
            if options.product == "packed":
                raise
            log.warning("matrix products run on torch, several times slower for few rows: %s", error)

    def linear(self, linear: Linear) -> Linear:
        """See `Quant`."""
        if self._kernel is None:
            return linear
        from ._packed import PackedLinear

        return PackedLinear(self._kernel, linear)
