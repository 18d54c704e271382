"""What a model declares about itself: state groups, shapes of KV and states per layer, limits. Data only, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The layers that share one lifetime rule (design §5).

    `window` counts the tokens a layer sees including the current one. `draft` says whether a draft tree may branch
    in this group (`tree`) or must be cut to its best path (`chain`, recurrent layers).
    """

    name: str
    kind: Literal["full", "window", "recurrent"] = "full"
    window: int | None = None
    draft: Literal["tree", "chain"] = "tree"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """KV widths of one attention layer; they may differ from layer to layer."""

    kv_heads: int
    k_dim: int
    v_dim: int
    group: int = 0

    @property
    def floats_per_token(self) -> int:
        """K and V elements that one token occupies in this layer."""
        return self.kv_heads * (self.k_dim + self.v_dim)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What one recurrent layer keeps of a text, however long: tensors of these shapes, in float32.

    All recurrent layers of a model belong to its one group of kind `recurrent`.
    """

    shapes: tuple[tuple[int, ...], ...]

    @property
    def floats(self) -> int:
        """Elements of one state."""
        return sum(map(math.prod, self.shapes))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything the core needs to know of a loaded model.

    `layers` are those that attend, `states` those that keep one state, each in the order in which they run.
    """

    name: str
    vocab_size: int  # rows of the output head; may exceed the tokenizer's
    context_length: int
    layers: tuple[LayerSpec, ...]
    groups: tuple[GroupSpec, ...] = (GroupSpec("full"),)
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    capabilities: frozenset[str] = field(default_factory=frozenset)  # e.g. "hidden_states"
    states: tuple[StateSpec, ...] = ()
    hidden_size: int = 0  # width of hidden states, and number of layers: told where these can be had
    depth: int = 0

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of KV that one token needs over all layers."""
        return sum(layer.floats_per_token for layer in self.layers) * element_size
