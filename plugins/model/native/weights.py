"""Destinations for a checkpoint's tensors: packed matrices whose row ranges are filled as the file is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from phloem.errors import ModelError


class _Target(NamedTuple):
    view: torch.Tensor
    offset: float  # added to the stored values


class Weights:
    """Allocates parameters and knows which checkpoint tensor belongs where.

    Memory is allocated, not touched, until the fill: a model needs its own size once, plus one tensor.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._targets: dict[str, _Target] = {}

    def matrix(self, parts: dict[str, int], columns: int) -> torch.Tensor:
        """One [sum of rows, columns] matrix from the named tensors, `parts` giving the rows of each in order."""
        whole = torch.empty(sum(parts.values()), columns, dtype=self._dtype, device=self._device)
        self._register(whole, parts, 0.0)
        return whole

    def vector(self, parts: dict[str, int], offset: float = 0.0) -> torch.Tensor:
        """One vector from the named tensors, `parts` giving the length of each in order."""
        whole = torch.empty(sum(parts.values()), dtype=self._dtype, device=self._device)
        self._register(whole, parts, offset)
        return whole

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """One tensor as it is stored."""
        whole = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._targets[name] = _Target(whole, 0.0)
        return whole

    def _register(self, whole: torch.Tensor, parts: dict[str, int], offset: float) -> None:
        start = 0
        for name, rows in parts.items():
            self._targets[name] = _Target(whole[start : start + rows], offset)
            start += rows

    def fill(self, tensors: Iterable[tuple[str, torch.Tensor]], ignore: tuple[str, ...]) -> None:
        """Copy a checkpoint in, once. Raises ModelError naming what is missing, superfluous or of a wrong shape.

        Tensors whose name ends with one of `ignore` are skipped.
        """
        missing = dict(self._targets)
        problems: list[str] = []
        for name, tensor in tensors:
            target = missing.pop(name, None)
            if target is None:
                if not name.endswith(ignore):
                    problems.append(f"unexpected tensor {name}")
            elif target.view.shape != tensor.shape:
                problems.append(f"{name} is {list(tensor.shape)}, expected {list(target.view.shape)}")
            elif target.offset:
                target.view.copy_(tensor.to(torch.float32) + target.offset)
            else:
                target.view.copy_(tensor)
        problems.extend(f"missing tensor {name}" for name in missing)
        if problems:
            more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
            raise ModelError(
                "the weights do not fit the config: " + "; ".join(problems[:5]) + more,
                hint="config.json and the weights must come from the same model",
            )
