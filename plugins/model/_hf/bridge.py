"""The way from a transformers model's attention modules to phloem: one registered function, one handler per model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SERVE = "phloem"  # attention without masks: transformers builds none for names it knows no mask function of
PROBE = "phloem_probe"  # attention whose masks arrive as `MaskRule`

# handler(module, q, k, v, mask, arguments): q [1, Hq, T, D], k and v [1, Hkv, T, D] -> [1, T, Hq, Dv]
Handler = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, Any, dict[str, Any]], torch.Tensor]


class MaskRule:
    """What the model would have made a mask from: `sees(query, key)` on index tensors."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self._function = function

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Bool, broadcast over two int64 tensors of positions in one sequence."""
        zero = torch.zeros((), dtype=torch.int64)
        return self._function(zero, zero, query, key)


class Bridge:
    """Hangs on every module of one model; attention modules find it through themselves."""

    def __init__(self, model: Any) -> None:
        self.handler: Handler | None = None
        self._config = model.config
        for module in model.modules():
            module.phloem_bridge = self

    def use(self, name: str, handler: Handler | None) -> None:
        """Which attention the next forward passes run, by its registered name, and who handles its calls."""
        self._config._attn_implementation = name
        self.handler = handler


def register() -> None:
    """Make both names known to transformers; doing it again changes nothing."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(SERVE, _attention)
    AttentionInterface.register(PROBE, _attention)
    AttentionMaskInterface.register(PROBE, _mask)


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **arguments: Any
) -> tuple[torch.Tensor, None]:
    handler: Handler = module.phloem_bridge.handler
    return handler(module, query, key, value, attention_mask, arguments), None


def _mask(*, mask_function: Callable[..., torch.Tensor], **_: Any) -> MaskRule:
    return MaskRule(mask_function)
