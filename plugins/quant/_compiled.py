"""What quants with a compiled product share: how core's product.h is told of a matrix, and a Linear that calls it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from phloem.errors import PluginError
from phloem.interfaces import PluginContext
from phloem.kernels import load
from phloem.linear import GATES, Linear

POINTER, INT64, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_GATES: dict[str | None, int] = {name: i for i, name in enumerate((None, *GATES))}  # as product.h numbers them


def require_float32(name: str, context: PluginContext) -> None:
    """Raises PluginError for quant `name` unless the model is float32 on a CPU, which compiled products are for."""
    if not context.device.startswith("cpu") or context.dtype not in ("auto", "float32"):
        raise PluginError(
            f"quant.use: {name} is for float32 on a CPU, not {context.dtype} on {context.device}",
            hint="say quant.use: none, or model.dtype: float32",
        )


class Matrix(ctypes.Structure):
    """`Matrix` of product.h, field by field. Whoever makes one keeps alive what it points to."""

    _fields_ = (
        *((name, POINTER) for name in ("bias", "before", "after")),
        *((name, INT64) for name in ("n", "k", "gate")),
        *((name, FLOAT) for name in ("before_eps", "after_eps")),
    )

    @classmethod
    def of(cls, linear: Linear) -> Matrix:
        """All of a linear map but its weight. Norms and bias may be filled later, where they are."""
        rows, inputs = linear.weight.shape
        matrix = cls(n=rows, k=inputs, gate=_GATES[linear.gate])
        if linear.bias is not None:
            matrix.bias = linear.bias.data_ptr()
        if linear.before is not None:
            matrix.before, matrix.before_eps = linear.before.weight.data_ptr(), linear.before.eps
        if linear.after is not None:
            matrix.after, matrix.after_eps = linear.after.weight.data_ptr(), linear.after.eps
        return matrix


class _Scratch(threading.local):
    """Memory for one call, kept from step to step: fresh pages cost more than what is done there.

    Each thread has its own, since drafters multiply on the loop's while the target's step runs on another.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def address(self, size: int) -> int:
        """Where at least so many bytes lie."""
        if len(self._bytes) < size:
            self._bytes = torch.empty(size + size // 4, dtype=torch.uint8)
        return self._bytes.data_ptr()


class Kernel:
    """A compiled product: `phloem_multiply` and `phloem_lanes` of a source that includes product.h.

    One per quant; raises PluginError where it cannot be compiled.
    """

    def __init__(self, source: str) -> None:
        """`source` lies beside this file."""
        self._library = load(Path(__file__).with_name(source))
        self._library.phloem_lanes.restype, self._library.phloem_lanes.argtypes = INT64, ()
        self.lanes: int = self._library.phloem_lanes()  # outputs of half a panel
        self.multiply = self.function("multiply", POINTER, POINTER, INT64, INT64, POINTER, INT64, INT, POINTER, INT)
        self.scratch = _Scratch()

    def function(self, name: str, *arguments: type) -> Callable[..., None]:
        """`phloem_NAME`, which returns nothing."""
        found: Any = self._library[f"phloem_{name}"]
        found.argtypes, found.restype = arguments, None
        made: Callable[..., None] = found
        return made

    def panels(self, linear: Linear) -> int:
        """How many a linear map's weight makes."""
        rows = linear.weight.shape[0]
        return -(-rows // (2 * self.lanes)) if linear.gate is None else -(-rows // 2 // self.lanes)


class CompiledLinear(Linear):
    """A Linear whose weight lies in panels; norms, gate and residual are part of the one call. float32 on the CPU."""

    __slots__ = ("_address", "_keep", "_kernel", "_outputs", "_scratch")

    def __init__(
        self, kernel: Kernel, linear: Linear, weight: torch.Tensor, told: ctypes.Structure, row_bytes: int
    ) -> None:
        """`told` is what the kernel gets: a structure that begins with `Matrix`, and points to `weight`, the panels.

        `row_bytes` is what the kernel's `bytes()` says.
        """
        super().__init__(weight, linear.bias, before=linear.before, gate=linear.gate, after=linear.after)
        self._kernel, self._keep, self._address = kernel, told, ctypes.addressof(told)
        rows = linear.weight.shape[0]
        self._outputs = rows if self.gate is None else rows // 2
        self._scratch = row_bytes + (4 * self._outputs if self.after else 0)  # of a row

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        return self._multiply(x, torch.empty(x.shape[0], self._outputs), add=False)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """total [T, out] += self(x), in place."""
        return self._multiply(x, total, add=True)

    def _multiply(self, x: torch.Tensor, y: torch.Tensor, *, add: bool) -> torch.Tensor:
        rows, (step, apart) = x.shape[0], x.stride()
        if apart != 1:
            x = x.contiguous()
            step = x.stride(0)
        scratch = self._kernel.scratch.address(rows * self._scratch) if self._scratch else None
        self._kernel.multiply(
            self._address, x.data_ptr(), rows, step, y.data_ptr(), y.stride(0), add, scratch, torch.get_num_threads()
        )
        return y
