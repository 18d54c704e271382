"""Log-probabilities in the shapes of OpenAI's two APIs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from phloem.messages import TokenLogprob

if TYPE_CHECKING:
    from phloem.tokenizer import Tokenizer

FLOOR = -9999.0  # JSON has no -inf; OpenAI writes this


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return logprob if logprob > FLOOR else FLOOR


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    text = raw.decode("utf-8", "replace")
    return {"token": text, "token_id": token, "logprob": finite(logprob), "bytes": list(raw)}


def entry(tokenizer: Tokenizer, item: TokenLogprob) -> dict[str, Any]:
    """One position in chat's shape; `bytes` are exact where a token is a part of a character."""
    top = [_token(tokenizer, token, logprob) for token, logprob in item.top]
    return {**_token(tokenizer, item.token_id, item.logprob), "top_logprobs": top}


def chat_logprobs(tokenizer: Tokenizer, items: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/chat/completions."""
    return {"content": [entry(tokenizer, item) for item in items], "refusal": None}


def prompt_entries(tokenizer: Tokenizer, items: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    """Prompt positions in chat's shape; the first token has none."""
    return [None if item is None else entry(tokenizer, item) for item in items]


class Offsets:
    """Where tokens start in a text, in characters. A token inside a character starts where the character does."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def next(self, token: int) -> int:
        """Offset of the next token."""
        at = self._at
        if token not in self._hidden:
            self._at += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return at


def legacy_logprobs(
    tokenizer: Tokenizer, items: Sequence[TokenLogprob | None], first: int, offsets: Offsets
) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/completions. `first`: token id of an item without a value.

    The chosen token is part of its position's `top_logprobs`, as in OpenAI's API, when alternatives were asked for.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    places: list[int] = []
    for item in items:
        token = first if item is None else item.token_id
        text = tokenizer.token_text(token)
        tokens.append(text)
        values.append(None if item is None else finite(item.logprob))
        places.append(offsets.next(token))
        if item is None or not item.top:
            tops.append(None)
        else:
            top = {tokenizer.token_text(other): finite(logprob) for other, logprob in item.top}
            tops.append(top | {text: finite(item.logprob)})
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": places}
