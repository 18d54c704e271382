"""What an EAGLE head finds likely: probabilities over its own vocabulary, under each request's filters and grammar."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from phloem.interfaces import DraftContext
from phloem.model_spec import ModelSpec

from ._draft_choice import softened


class Choice:
    """The head's vocabulary as the target counts it."""

    def __init__(self, tokens: torch.Tensor, model: ModelSpec) -> None:
        """`tokens` [V] int64: the target's id of each column."""
        self._model = model
        self._ids = tokens.numpy()
        self._words, self._bits = self._ids >> 5, (self._ids & 31).astype(np.int32)
        self._places = {token: place for place, token in enumerate(tokens.tolist())}

    def chances(
        self, contexts: Sequence[DraftContext], paths: Sequence[Sequence[int]], logits: torch.Tensor
    ) -> torch.Tensor:
        """[N, V] float32 of what follows each path of drafted tokens; tokens that end a text have none."""
        for row, context, path in zip(logits, contexts, paths, strict=True):
            if context.matcher is not None:
                row.masked_fill_(torch.from_numpy(~self._allowed(context, path)).to(row.device), -torch.inf)
        chances = softened(contexts, logits, self._places)
        ends = [(row, place) for row, context in enumerate(contexts) for place in self._ends(context)]
        if ends:
            chances[tuple(torch.tensor(ends, device=chances.device).unbind(1))] = 0.0
        return chances

    def best(self, chances: torch.Tensor, count: int) -> list[tuple[list[int], list[float]]]:
        """The likeliest tokens of each row and their chances, best first."""
        values, places = chances.topk(min(count, chances.shape[1]))
        ids = self._ids[places.cpu().numpy()]
        return list(zip(ids.tolist(), values.tolist(), strict=True))

    def whole(self, chances: torch.Tensor) -> npt.NDArray[np.float32]:
        """One row [V] as the target counts: [vocab]."""
        row = np.zeros(self._model.vocab_size, dtype=np.float32)
        row[self._ids] = chances.cpu().numpy()
        return row

    def _allowed(self, context: DraftContext, path: Sequence[int]) -> npt.NDArray[np.bool_]:
        """[V]: what the grammar takes behind the path; nothing where it does not even take that."""
        matcher, taken = context.matcher, 0
        assert matcher is not None, "there is a grammar"
        bits = np.zeros((self._model.vocab_size + 31) // 32, dtype=np.int32)
        while taken < len(path) and matcher.accept(path[taken]):
            taken += 1
        if taken == len(path):
            matcher.fill(bits)
        matcher.rollback(taken)
        allowed: npt.NDArray[np.bool_] = ((bits[self._words] >> self._bits) & 1).astype(np.bool_)
        return allowed

    def _ends(self, context: DraftContext) -> list[int]:
        """Columns of the tokens that end the text."""
        ends = [] if context.params.ignore_eos else [*self._model.eos_token_ids]
        return [self._places[token] for token in (*ends, *context.params.stop_token_ids) if token in self._places]
