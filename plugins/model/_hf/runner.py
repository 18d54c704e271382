"""A transformers model cut at its last norm: ragged hidden states on one side, its own output head on the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from phloem.errors import ModelError
from phloem.interfaces import AttentionStep

from .bridge import SERVE, Bridge

if TYPE_CHECKING:
    from .probe import LayerFacts


class Runner:
    """Runs a loaded `...ForCausalLM`. Everything after the decoder (scaling, soft-caps) stays the model's own code."""

    def __init__(self, model: Any, bridge: Bridge) -> None:
        """Raises ModelError if the decoder is not a module of its own."""
        self._model = model
        self._bridge = bridge
        prefix = model.base_model_prefix
        if prefix not in model._modules:
            raise ModelError(f"its decoder is not a module of its own ({prefix!r})")
        self._decoder = model._modules[prefix]
        self.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        # the same model, parameters shared, with the decoder replaced by whatever hidden states we have
        self._replay = _Replay()
        self._head = copy.copy(model)
        self._head.__dict__["_modules"] = {**model._modules, prefix: self._replay}

    def plain_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """One sequence [T], from its start, as transformers runs it: float32 [T, vocab]."""
        return self._model(input_ids=tokens[None], use_cache=False).logits[0].float()  # type: ignore[no-any-return]

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: AttentionStep, facts: Sequence[LayerFacts]
    ) -> torch.Tensor:
        """Ragged tokens and positions [T] as one row: [T, hidden] after the last norm."""
        self._bridge.use(SERVE, ServeHandler(attend, facts))
        out = self._decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        self._replay.kind = type(out)
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> float32 [N, vocab] by the model's own head."""
        self._replay.hidden = hidden[None]
        tokens = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
        return self._head(input_ids=tokens, use_cache=False).logits[0].float()  # type: ignore[no-any-return]


class ServeHandler:
    """Handler of one step: the n-th call is layer n, with the facts found at load."""

    __slots__ = ("_attend", "_facts", "_next")

    def __init__(self, attend: AttentionStep, facts: Sequence[LayerFacts]) -> None:
        self._attend = attend
        self._facts = facts
        self._next = 0

    def __call__(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, arguments: dict[str, Any]
    ) -> torch.Tensor:
        layer = self._next
        self._next = layer + 1
        facts = self._facts[layer]
        rows = (x[0].transpose(0, 1) for x in (q, k, v))
        out = self._attend(layer, *rows, scale=facts.scale, window=facts.window, softcap=facts.softcap)
        return out[None]


class _Replay(torch.nn.Module):
    """Stands where the decoder was and returns given hidden states in the decoder's own kind of output."""

    hidden: torch.Tensor  # [1, N, hidden]
    kind: Callable[..., Any]

    @property
    def decoder(self) -> _Replay:
        """Some heads call the decoder inside the decoder."""
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        """Whatever it is called with."""
        return self.kind(last_hidden_state=self.hidden)
