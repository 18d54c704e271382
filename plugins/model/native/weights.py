"""Destinations for a checkpoint's tensors: vectors that are filled, matrices that are quantised as they complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from phloem.errors import ModelError
from phloem.interfaces import Quant
from phloem.linear import Blocks, Linear, Norm

Stored = torch.Tensor | Blocks


class Unquantised:
    """Stands for a quant where the context of a model names none: torch's products."""

    blocks = frozenset[str]()

    def linear(self, linear: Linear) -> Linear:
        """As it is."""
        return linear


class _Target(NamedTuple):
    view: torch.Tensor
    offset: float  # added to the stored values

    def put(self, stored: Stored) -> None:
        values = stored.dequantise() if isinstance(stored, Blocks) else stored
        self.view.copy_(values.to(torch.float32) + self.offset if self.offset else values)


@dataclass(slots=True, eq=False)
class _Matrix:
    """One that is being read: its tensors' rows in order, and those of them that are there."""

    rows: dict[str, int]
    columns: int
    make: Callable[[Stored], None]  # called with the whole
    pieces: dict[str, Stored] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.pieces) == len(self.rows)

    def whole(self, dtype: torch.dtype, device: torch.device) -> Stored:
        """[sum of rows, columns]; of blocks only it is blocks, one tensor is taken as it is. Lets go of the pieces."""
        pieces = [self.pieces[name] for name in self.rows]
        self.pieces.clear()
        blocks = [piece for piece in pieces if isinstance(piece, Blocks)]
        if len(blocks) == len(pieces):
            return Blocks.joined(blocks)
        first = pieces[0]
        if len(pieces) == 1 and isinstance(first, torch.Tensor) and (first.dtype, first.device) == (dtype, device):
            return first.contiguous()
        made = torch.empty(sum(self.rows.values()), self.columns, dtype=dtype, device=device)
        for view, piece in zip(torch.split(made, list(self.rows.values())), pieces, strict=True):
            view.copy_(piece.dequantise() if isinstance(piece, Blocks) else piece)
        return made


class Weights:
    """Knows which checkpoint tensor belongs where.

    A matrix is made once all of its tensors have been read: a model needs its own quantised size, and one matrix.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, quant: Quant) -> None:
        self._dtype, self._device, self._quant = dtype, device, quant
        self._targets: dict[str, _Target] = {}
        self._matrices: dict[str, _Matrix] = {}

    def linear(
        self,
        place: tuple[object, str],
        parts: dict[str, int],
        columns: int,
        *,
        bias: torch.Tensor | None = None,
        before: Norm | None = None,
        gate: str | None = None,
        after: Norm | None = None,
    ) -> None:
        """The attribute of an object will be a Linear [sum of rows, columns], `parts` giving each tensor's rows."""

        def make(weight: Stored) -> None:
            linear = Linear(weight, bias, before=before, gate=gate, after=after)
            setattr(*place, self._quant.linear(linear))

        self._matrices |= dict.fromkeys(parts, _Matrix(parts, columns, make))

    def vector(self, parts: dict[str, int], offset: float = 0.0) -> torch.Tensor:
        """One vector from the named tensors, `parts` giving the length of each in order. Filled later, in place."""
        whole = torch.empty(sum(parts.values()), dtype=self._dtype, device=self._device)
        for name, view in zip(parts, torch.split(whole, list(parts.values())), strict=True):
            self._targets[name] = _Target(view, offset)
        return whole

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """One tensor as it is stored."""
        whole = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._targets[name] = _Target(whole, 0.0)
        return whole

    def fill(self, tensors: Iterable[tuple[str, Stored]], ignore: tuple[str, ...]) -> None:
        """Take a checkpoint in, once. Raises ModelError naming what is missing, superfluous or of a wrong shape.

        Tensors whose name ends with one of `ignore` are skipped. All linear maps are there afterwards.
        """
        missing = {name: tuple(target.view.shape) for name, target in self._targets.items()}
        missing |= {name: (matrix.rows[name], matrix.columns) for name, matrix in self._matrices.items()}
        problems: list[str] = []
        for name, stored in tensors:
            shape = missing.pop(name, None)
            if shape is None:
                if not name.endswith(ignore):
                    problems.append(f"unexpected tensor {name}")
            elif shape != tuple(stored.shape):
                problems.append(f"{name} is {list(stored.shape)}, expected {list(shape)}")
            elif name in self._targets:
                self._targets[name].put(stored)
            else:
                matrix = self._matrices.pop(name)
                matrix.pieces[name] = stored
                del stored  # the whole takes its place
                if matrix.complete:
                    matrix.make(matrix.whole(self._dtype, self._device))
        problems.extend(f"missing tensor {name}" for name in missing)
        if problems:
            more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
            raise ModelError(
                "the weights do not fit the config: " + "; ".join(problems[:5]) + more,
                hint="config.json and the weights must come from the same model",
            )
