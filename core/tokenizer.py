"""Text to token ids and back, through the `tokenizers` library; no transformers, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

from tokenizers import Tokenizer as Backend

from .chat import ChatTemplate
from .errors import ModelError, RequestError
from .interfaces import TokenizerData

# What a message may begin with: a letter, a digit, a sign, a space, a line, a character of several bytes.
_BEGINNINGS = ("a", "0", "(", " b", "\n\nc", "é")


class Tokenizer:
    """A model's tokenizer. Immutable, thread-safe; every process that needs one makes it from the same data.

    Decoding a part of an answer: a token may hold a part of a character, and what is not valid UTF-8 decodes to
    U+FFFD (byte-level vocabularies: one per longest broken sequence; byte-fallback vocabularies, tokens like <0xE4>:
    one per byte). So a decoded text whose end is U+FFFD may still change when more tokens come, and only then. Some
    decoders (SentencePiece with a prefix space) also strip a space at the start of a text, so a part of an answer
    must be decoded together with some tokens before it.
    """

    def __init__(self, data: TokenizerData) -> None:
        """Raises ModelError if the tokenizer.json is not understood. Costs up to two seconds for 262,144 tokens."""
        try:
            self._backend = Backend.from_str(data.json)
        except Exception as error:  # the library raises bare Exception
            raise ModelError(
                f"the model's tokenizer cannot be read: {error}",
                hint="a newer tokenizers library may know it: pip install --upgrade tokenizers",
            ) from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self._data = data
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.special_tokens: dict[str, str] = dict(data.special_tokens)  # bos_token, eos_token, ... as text
        added = self._backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content for i, token in added.items()}
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text; `add_special` puts bos and the like where the model's tokenizer does.

        Special tokens spelled in the text become those tokens, as in transformers. Raises RequestError for text that
        is not Unicode (a lone surrogate). Called once per prompt.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special).ids
        except (TypeError, UnicodeEncodeError) as error:
            bad = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
            if bad is None:
                raise
            raise RequestError(
                f"the text has a lone surrogate (U+{ord(text[bad]):04X}) at character {bad}",
                hint="send valid Unicode: a character beyond U+FFFF is one code point, not half of a pair",
                param="prompt",
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, ids that the vocabulary lacks left out. Called once per token of a stream: stays cheap."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token: int) -> str:
        """Text of one token, special ones included, for logprobs; U+FFFD for what is not a whole character."""
        return self.token_bytes(token).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text, exactly; empty for an id without a token (padding rows of the model)."""
        spelled = self._added.get(token)
        if spelled is not None:
            return spelled.encode()
        piece = self._backend.id_to_token(token) if 0 <= token < 1 << 32 else None
        if piece is None:
            return b""
        if self._byte_level:
            values = [_BYTES.get(char) for char in piece]
            return piece.encode() if None in values else bytes(value for value in values if value is not None)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode()

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of messages in the model's chat format, by default with the opening of the answer.

        `variables` are the template's (tools, enable_thinking, ...). Raises RequestError(param="messages") for
        messages the template refuses and for models without a template. Called once per chat request.
        """
        if self._template is None:
            raise RequestError(
                "this model has no chat template",
                hint="it is not trained for chat: use completions, or an instruction-tuned model",
                param="messages",
            )
        text = self._template.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        try:
            return self.encode(text, add_special=False)
        except RequestError as error:
            raise RequestError(error.message, hint=error.hint, param="messages") from error

    def chat_prefix(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """The token ids that all chats with these first messages begin with: what is worth pinning. Errors as `chat`.

        Where the next message's text begins is found by trying some: a template may also put the first message into
        the second, or write something behind the last.
        """
        if not messages:
            raise RequestError("messages is empty", hint="give at least one message", param="messages")
        role = "assistant" if messages[-1].get("role") == "user" else "user"
        tried = [self.chat([*messages, {"role": role, "content": text}], **variables) for text in _BEGINNINGS]
        places = zip(*tried, strict=False)
        return [tokens[0] for tokens in takewhile(lambda tokens: len(set(tokens)) == 1, places)]

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the model's chat format; None if it has none."""
        return self._data.chat_template

    @property
    def chat_variables(self) -> frozenset[str]:
        """The names that the chat template may read. Raises ModelError if it cannot be parsed."""
        return self._template.variables if self._template is not None else frozenset()

    @cached_property
    def _template(self) -> ChatTemplate | None:
        source = self._data.chat_template
        return None if source is None else ChatTemplate(source, self.special_tokens)

    @cached_property
    def _byte_level(self) -> bool:
        decoder = self._backend.decoder
        return decoder is not None and "ByteLevel" in json.dumps(json.loads(decoder.__getstate__()))

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters: themselves where printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


_BYTES = _byte_alphabet()
