"""Bitmasks of tokens as matchers fill them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.int32]


def bitmask(tokens: Iterable[int], size: int) -> Mask:
    """[ceil(size / 32)] int32 with the bits of some tokens of a vocabulary set. Called once per backend and process."""
    bits = np.zeros(-(-size // 32) * 32, dtype=np.bool_)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
