"""Two models' vocabularies: which token of one is which of the other, by what they add to a text."""

from __future__ import annotations

from array import array

import numpy as np
import torch

from phloem.errors import ModelError
from phloem.tokenizer import Tokenizer

_LEAST = 0.5  # share of the target's tokens that the draft model must know


class Vocabulary:
    """From the target's token ids to the draft model's, and from its logits back. Made once, in under a second."""

    def __init__(self, target: Tokenizer, target_size: int, draft: Tokenizer, draft_size: int, name: str) -> None:
        """Sizes are rows of the output heads, which may exceed the tokenizers'. Raises ModelError."""
        known = min(target_size, target.vocab_size)
        mine = [draft.token_bytes(token) for token in range(min(draft_size, draft.vocab_size))]
        theirs = [target.token_bytes(token) for token in range(known)]
        self.size = target_size
        same = theirs == mine[: len(theirs)]
        self.direct = same and target_size <= draft_size  # no id is beyond what the draft model has rows for
        places = {text: token for token, text in reversed(list(enumerate(mine))) if text}
        pairs = (
            [(token, token) for token in range(known)]
            if same
            else [(token, places[text]) for token, text in enumerate(theirs) if text in places]
        )
        if len(pairs) < _LEAST * known:
            raise ModelError(
                f"{name} knows {len(pairs)} of the {known} tokens of the model it is to draft for: "
                f"another vocabulary, which cannot be mapped",
                hint="choose a smaller model of the same family",
            )
        self._targets, self._drafts = (torch.tensor(ids) for ids in zip(*pairs, strict=True))
        # What the draft model has no token for it reads as its first one: it guesses worse there, and that is all.
        self._read = np.zeros(target_size, dtype=np.int32)
        self._read[self._targets.numpy()] = self._drafts.numpy()

    def read(self, tokens: array[int]) -> array[int]:
        """The target's tokens as the draft model reads them."""
        if self.direct:
            return tokens
        return array("i", self._read[np.frombuffer(tokens, dtype=np.int32)].tobytes()) if tokens else array("i")

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The draft model's logits [R, draft vocab] as ones of the target's tokens, [R, vocab] float32.

        Minus infinity where it has none.
        """
        if self.direct and logits.shape[1] == self.size == len(self._targets):
            return logits
        out = logits.new_full((len(logits), self.size), -torch.inf)
        out[:, self._targets.to(out.device)] = logits[:, self._drafts.to(out.device)]
        return out
