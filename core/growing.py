"""A text that grows by turns: tokens that stay as they are, and behind them text that has none yet.

Pure code for whoever keeps a program's text (the language, the program API). What was generated is never tokenised
again; what is appended is, together with its left context, when a result is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, Self

from .choosing import Joint, encode_after, join, seam

if TYPE_CHECKING:
    from .params import SamplingParams
    from .tokenizer import Tokenizer


class Written(Protocol):
    """One choice of a finished call."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass
class Growing:
    """`tokens` never change; `tail` is tokenised with what follows it, which may take milliseconds where it is long.

    `raw`: the text begins with what was appended first, and with no token that the tokenizer would put before it.
    """

    tokens: list[int] = field(default_factory=list)
    tail: str = ""
    raw: bool = False

    def copy(self) -> Self:
        """For a fork."""
        return replace(self, tokens=list(self.tokens))

    def commit(self, tokenizer: Tokenizer) -> list[int]:
        """All text as tokens; may be none."""
        self._begin(tokenizer)
        self.tokens, self.tail = [*self.tokens, *encode_after(tokenizer, self.tokens, self.tail)], ""
        return self.tokens

    def settle(self, tokenizer: Tokenizer) -> None:
        """Tokenise the beginning of a long tail once for all forks, up to where what follows cannot change it."""
        self._begin(tokenizer)
        tokens, self.tail = seam(tokenizer, self.tokens, self.tail)
        self.tokens = [*self.tokens, *tokens]

    def joint(self, tokenizer: Tokenizer, choices: Sequence[str]) -> Joint:
        """The text and choices that continue it. Raises RequestError."""
        self._begin(tokenizer)
        return join(tokenizer, self.tokens, self.tail, choices)

    def chosen(self, joint: Joint, index: int) -> None:
        """A choice joins the text."""
        self.tokens, self.tail = [*joint.prompt, *joint.continuations[index]], ""

    def generated(self, tokenizer: Tokenizer, made: Written, params: SamplingParams, ends: Collection[int]) -> None:
        """An answer joins the text: its tokens as they were written, and text that is only a part of one as text.

        Where a stop string cut the answer, its tokens are those whose text is in the answer whole. A token that ends
        texts (`ends`) is no part of one.
        """
        tokens, rest = made.token_ids, ""
        if made.finish_reason == "stop" and isinstance(made.stop_reason, str):
            tokens, rest = _within(tokenizer, tokens, made.text, params.skip_special_tokens)
        elif made.finish_reason == "stop" and tokens and tokens[-1] in ends and not params.include_stop:
            tokens = tokens[:-1]
        self.tokens, self.tail = [*self.tokens, *tokens], rest

    def _begin(self, tokenizer: Tokenizer) -> None:
        """A raw beginning is tokenised here; where it is a special token only that one, so that the rest may grow."""
        if not self.raw or self.tokens or not self.tail:
            return
        ids = tokenizer.encode(self.tail, add_special=False)
        spelled = tokenizer.token_text(ids[0]) if ids else ""
        if ids and ids[0] in tokenizer.special_ids and self.tail.startswith(spelled):
            self.tokens, self.tail = ids[:1], self.tail[len(spelled) :]
        else:
            self.tokens, self.tail = ids, ""


def _within(tokenizer: Tokenizer, tokens: list[int], text: str, skip: bool) -> tuple[list[int], str]:
    """The longest beginning of tokens whose text is the text's, and the rest of the text."""
    for count in range(len(tokens), 0, -1):
        decoded = tokenizer.decode(tokens[:count], skip)
        if text.startswith(decoded):
            return tokens[:count], text[len(decoded) :]
    return [], text
