"""Rotary position embedding (Su et al. 2021) and the extensions of it that do not depend on the sequence's length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_NEEDS = {
    "default": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "llama3": ("rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("rope_theta",),
}


def rope_problem(parameters: Mapping[str, Any]) -> str | None:
    """Why rotations with these parameters cannot be served exactly, or None."""
    kind = parameters["rope_type"]
    if kind in ("dynamic", "longrope"):
        return f"rope type {kind!r} changes a token's keys with the length of its sequence, so they cannot be shared"
    if kind not in _NEEDS:
        return f"rope type {kind!r} is not one of {', '.join(_NEEDS)}"
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return "partial_rotary_factor is not supported"
    missing = [key for key in _NEEDS[kind] if parameters.get(key) is None]
    return f"rope type {kind!r} lacks {', '.join(missing)}" if missing else None


@dataclass(frozen=True, slots=True)
class Rope:
    """Parameters of one rotation, hashable, so that layers with equal ones share its tables of a step."""

    items: tuple[tuple[str, Any], ...]

    def inverse_frequencies(self, dim: int) -> tuple[torch.Tensor, float]:
        """Float32 angles per position, [dim / 2], and the factor on cos and sin."""
        import torch

        p = dict(self.items)
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
        plain = torch.tensor(float(p["rope_theta"])).pow(exponents).reciprocal()
        if p["rope_type"] == "linear":
            return plain / float(p["factor"]), 1.0
        if p["rope_type"] == "llama3":
            return _llama3(plain, p), 1.0
        if p["rope_type"] == "yarn":
            return _yarn(plain, p, dim)
        return plain, 1.0


def _llama3(plain: torch.Tensor, p: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a linear blend between."""
    original = float(p["original_max_position_embeddings"])
    wavelength = 2 * math.pi / plain
    low, high = float(p["low_freq_factor"]), float(p["high_freq_factor"])
    blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / float(p["factor"]) + blend * plain


def _yarn(plain: torch.Tensor, p: Mapping[str, Any], dim: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023): interpolates dimensions by their number of rotations over the original context."""
    import torch

    original = p["original_max_position_embeddings"]
    factor = p.get("factor") or p["max_position_embeddings"] / original

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(p["rope_theta"]))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = plain / factor * interpolated + plain * (1 - interpolated)
    return frequencies, _yarn_attention_factor(p, factor)


def _yarn_attention_factor(p: Mapping[str, Any], factor: float) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    if p.get("mscale") and p.get("mscale_all_dim"):
        return magnitude(p["mscale"]) / magnitude(p["mscale_all_dim"])
    return magnitude(1.0)
