"""The one place where activations meet weight matrices: a linear map and what goes along with it; a quant takes its
place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

GATES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {  # as configs call them
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


class Norm(NamedTuple):
    """An RMS norm over the last dimension: its weight, of that length, and what is added to the mean square."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, n], which may be wider than the weight, -> [T, n] in the weight's dtype."""
        return F.rms_norm(x.to(self.weight.dtype), x.shape[1:], self.weight, self.eps)


class Blocks(NamedTuple):
    """A matrix [rows, columns] as a file stores it: in blocks that hold a few values of one row each.

    `parts` follow each other by rows: the name of how each is stored, as GGUF calls it (`Q4_K`), and its bytes, uint8
    [rows, bytes of a row]. Parts of one matrix may be stored differently. `read(kind, bytes)` gives the float32 values
    [rows, columns] of such bytes; it comes from whoever has read the file.
    """

    parts: tuple[tuple[str, torch.Tensor], ...]
    columns: int
    read: Callable[[str, torch.Tensor], torch.Tensor]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return sum(len(stored) for _, stored in self.parts), self.columns

    def dequantise(self) -> torch.Tensor:
        """The values, float32 [rows, columns]."""
        return torch.cat([self.read(kind, stored) for kind, stored in self.parts])

    @classmethod
    def joined(cls, pieces: Sequence[Blocks]) -> Blocks:
        """One matrix from pieces of the same width, the rows of each in turn."""
        parts = tuple(part for piece in pieces for part in piece.parts)
        return cls(parts, pieces[0].columns, pieces[0].read)


class Linear:
    """y = x @ weight.T + bias, with weight [out, in] row-major and bias [out] or None; and what goes along with it.

    `before` norms the input. `gate`, one of `GATES`, is applied to the first half of the outputs, which is then
    multiplied by the second: half as many are left. `after` norms what comes out. The weight may be `Blocks`, which are
    read anew for each product here; subclasses keep it in another form.
    """

    __slots__ = ("after", "before", "bias", "gate", "weight")

    def __init__(
        self,
        weight: torch.Tensor | Blocks,
        bias: torch.Tensor | None = None,
        *,
        before: Norm | None = None,
        gate: str | None = None,
        after: Norm | None = None,
    ) -> None:
        self.weight, self.bias = weight, bias
        self.before, self.gate, self.after = before, gate, after

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out], in the dtype of `floats`."""
        y = F.linear(x if self.before is None else self.before(x), self.floats(), self.bias)
        if self.gate is not None:
            first, second = y.chunk(2, dim=1)
            y = GATES[self.gate](first).mul_(second)
        return y if self.after is None else self.after(y)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """total [T, out] += self(x), in place: the residual needs no pass of its own."""
        if self.before is not None or self.gate is not None or self.after is not None:
            return total.add_(self(x))
        if self.bias is not None:
            total += self.bias
        return total.addmm_(x, self.floats().t())

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Rows of the weight as floats, [K] int64 -> [K, in]: the embedding of a tied head."""
        return self.floats()[outputs]

    def at(self, x: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """A few columns of self(x) for one row, where nothing goes along: [in], [K] int64 -> [K]."""
        return self.rows(outputs) @ x

    def floats(self) -> torch.Tensor:
        """The weight [out, in] in floats."""
        return self.weight if isinstance(self.weight, torch.Tensor) else self.weight.dequantise()
