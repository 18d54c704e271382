"""The text of a program's state, as tokens where they are known and as text where they are not yet."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from phloem.choosing import Joint, encode_after, join
from phloem.errors import RequestError

from ._run import Choice

if TYPE_CHECKING:
    from phloem.params import SamplingParams
    from phloem.tokenizer import Tokenizer


class Added(NamedTuple):
    """Text that an operation begins with; `raw` as in `Text.append`."""

    text: str
    raw: bool


@dataclass(slots=True)
class Text:
    """`tokens` never change; behind them comes `tail`, which is tokenised with what follows, when a result is needed.

    `raw`: the text begins with what was appended first, and with no token that the tokenizer would put before it.
    """

    tokens: list[int] = field(default_factory=list)
    tail: str = ""
    whole: str = ""
    raw: bool = False

    def copy(self) -> Text:
        """For a fork."""
        return Text(list(self.tokens), self.tail, self.whole, self.raw)

    def append(self, text: str, *, raw: bool) -> None:
        """Add text; `raw` counts for the first one."""
        if not self.whole and not self.tokens:
            self.raw = raw
        self.tail += text
        self.whole += text

    @contextmanager
    def unless_it_fails(self, added: Added) -> Iterator[None]:
        """Text joins, and what is done with it may change this text; after a failure all is as it was."""
        before = self.copy()
        try:
            if added.text:
                self.append(added.text, raw=added.raw)
            yield
        except BaseException:
            self.tokens, self.tail, self.whole, self.raw = before.tokens, before.tail, before.whole, before.raw
            raise

    def append_tokens(self, tokenizer: Tokenizer, tokens: list[int]) -> None:
        """Add tokens; text before them is tokenised without them."""
        self.commit(tokenizer, may_be_empty=True)
        self.tokens += tokens
        self.whole += tokenizer.decode(tokens, skip_special_tokens=False)

    def commit(self, tokenizer: Tokenizer, *, may_be_empty: bool = False) -> list[int]:
        """All text as tokens. Raises RequestError if there is none. May take milliseconds for long texts."""
        self._begin(tokenizer)
        if self.tail or not (self.tokens or may_be_empty):
            self.tokens, self.tail = [*self.tokens, *encode_after(tokenizer, self.tokens, self.tail)], ""
        if not self.tokens and not may_be_empty:
            raise RequestError("the program has no text yet", hint="append some first", param="text")
        return self.tokens

    def joint(self, tokenizer: Tokenizer, choices: list[str]) -> Joint:
        """The text and choices that continue it. Raises RequestError. May take milliseconds for long texts."""
        self._begin(tokenizer)
        return join(tokenizer, self.tokens, self.tail, choices)

    def chosen(self, joint: Joint, index: int, choice: str) -> None:
        """A choice joins the text."""
        self.tokens, self.tail = [*joint.prompt, *joint.continuations[index]], ""
        self.whole += choice

    def generated(self, tokenizer: Tokenizer, made: Choice, params: SamplingParams, ends: Collection[int]) -> None:
        """An answer joins the text: its tokens as they were written, and text that is only a part of one as text.

        Where a stop string cut the answer, its tokens are those whose text is in the answer whole. A token that ends
        texts is no part of one.
        """
        tokens, rest = made.token_ids, ""
        if made.finish_reason == "stop" and isinstance(made.stop_reason, str):
            tokens, rest = _within(tokenizer, tokens, made.text, params.skip_special_tokens)
        elif made.finish_reason == "stop" and tokens and tokens[-1] in ends and not params.include_stop:
            tokens = tokens[:-1]
        self.tokens, self.tail = [*self.tokens, *tokens], rest
        self.whole += made.text

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
