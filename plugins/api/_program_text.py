"""The text of a program's state, as tokens where they are known and as text where they are not yet."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from phloem.choosing import Joint
from phloem.errors import RequestError
from phloem.growing import Growing, Written

if TYPE_CHECKING:
    from phloem.params import SamplingParams
    from phloem.tokenizer import Tokenizer


class Added(NamedTuple):
    """Text that an operation begins with; `raw` as in `Growing`."""

    text: str
    raw: bool


@dataclass
class Text(Growing):
    """A growing text that is shown whole, and taken back where what was to be done with it has failed."""

    whole: str = ""

    def append(self, text: str, *, raw: bool) -> None:
        """Add text; `raw` counts for the first one."""
        if not self.whole and not self.tokens:
            self.raw = raw
        self.tail += text
        self.whole += text

    def add(self, tokenizer: Tokenizer, added: Added, tokens: list[int] | None) -> None:
        """Add text, or else tokens; either may be nothing."""
        if added.text:
            self.append(added.text, raw=added.raw)
        elif tokens:
            self.append_tokens(tokenizer, tokens)

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
        if self.tail:
            self.commit(tokenizer)
        self.tokens = [*self.tokens, *tokens]
        self.whole += tokenizer.decode(tokens, skip_special_tokens=False)

    def commit(self, tokenizer: Tokenizer) -> list[int]:
        """All text as tokens. Raises RequestError if there is none."""
        if not super().commit(tokenizer):
            raise RequestError("the program has no text yet", hint="append some first", param="text")
        return self.tokens

    def choose(self, joint: Joint, index: int, choice: str) -> None:
        """A choice joins the text."""
        self.chosen(joint, index)
        self.whole += choice

    def generated(self, tokenizer: Tokenizer, made: Written, params: SamplingParams, ends: Collection[int]) -> None:
        """An answer joins the text."""
        super().generated(tokenizer, made, params, ends)
        self.whole += made.text
