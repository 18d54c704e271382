"""Key scheme: clients share the beginning of a prompt, up to a marker, and nothing of what follows."""

from __future__ import annotations

import hashlib
import secrets
from array import array

from pydantic import BaseModel, ConfigDict

from phloem.interfaces import PluginContext
from phloem.messages import GenerateCall


class PrivateTail:
    """Tokens up to the first marker are their own keys; those behind it are keyed with the call's `routing_key` too.

    So the system prompt is computed once for all, and how fast a request is answered tells nothing of what other
    clients have asked (Gu and others, "Auditing prompt caching in language model APIs", arXiv 2502.07776). A `salt`
    would separate the system prompts as well.
    """

    api = 1
    capabilities: frozenset[str] = frozenset()

    class Options(BaseModel):
        """Options of `cache: {key: {use: private-tail}}`."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        marker: str = "<|im_end|>"
        """Text of one token, behind which prompts are private: the end of a chat's first message."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        assert context.tokenizer is not None, "the engine gives a scheme its tokenizer"
        ids = context.tokenizer.encode(options.marker)
        if len(ids) != 1:
            raise ValueError(f"marker {options.marker!r} is {len(ids)} tokens of this model's vocabulary, not one")
        self._marker = ids[0]
        self._secret = secrets.token_bytes(16)  # keys that nobody can aim at, of this process only

    def keys(self, tokens: array[int], start: int, call: GenerateCall) -> array[int]:
        """One key per token of tokens[start:]."""
        try:
            private = tokens.index(self._marker) + 1
        except ValueError:
            private = len(tokens)
        private = max(start, private)
        digest = hashlib.blake2b((call.routing_key or "").encode(), digest_size=8, key=self._secret).digest()
        mask = int.from_bytes(digest, "little") >> 1 | 1 << 62  # 62 secret bits, and one that no token has
        return array("q", tokens[start:private]) + array("q", (mask ^ token for token in tokens[private:]))
