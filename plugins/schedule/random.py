"""A random order: the control that other policies are measured against."""

from __future__ import annotations

from hashlib import blake2b

from pydantic import BaseModel, ConfigDict, Field

from phloem.interfaces import PluginContext
from phloem.request import Request

from ._ranked import RankedPolicy


class RandomOptions(BaseModel):
    """Options of `schedule: {use: random}`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    seed: int = 0
    """The same seed and the same arrivals give the same order."""
    max_overtakes: int = Field(default=512, ge=1)
    """No request is overtaken by more than this many later ones: how far the order is mixed."""


class Random(RankedPolicy):
    """Orders by arrival plus a random share of `max_overtakes`, drawn from the seed and the arrival alone."""

    api = 1
    Options = RandomOptions

    def __init__(self, options: RandomOptions, context: PluginContext) -> None:
        self.max_overtakes = options.max_overtakes
        self._seed = options.seed
        super().__init__(lambda request: request.arrival + self.max_overtakes * self._draw(request))

    def _draw(self, request: Request) -> float:
        """Uniform in [0, 1); a retracted request draws the same again."""
        digest = blake2b(f"{self._seed}/{request.arrival}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
