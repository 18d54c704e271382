"""Programs on any OpenAI-compatible server, by the `openai` package: what such a server can do; the rest is refused.

A branch is its text (completions) or its messages (chat), so a fork copies these and sharing is the server's matter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from phloem.errors import ConfigError, PhloemError, RequestError
from phloem.params import SamplingParams

from ._answers import Answers, Echoed
from ._dialects import Writer, dialect
from ._failures import lacking, refused, surrogate, unreachable
from ._loops import Connected, PerLoop
from ._scoring import greedy_match, scored_by_echo
from .base import Generation, Path, Selection

if TYPE_CHECKING:
    import openai

log = logging.getLogger(__name__)
COMPLETION_MODELS = ("gpt-3.5-turbo-instruct", "davinci-002", "babbage-002")  # OpenAI's that do not chat
MATCH_TOKENS = 32  # most that greedy matching generates to tell choices apart
# A completions model without a chat format: roles are written out, as SGLang's default template does.
OPENING = {"system": "SYSTEM:", "user": "USER:", "assistant": "ASSISTANT:"}


class OpenAIBackend(Connected):
    """Implements `Backend`. Thread-safe, usable from any event loop; `openai` is imported when it is made."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        is_chat_model: bool | None = None,
        dialect: str = "openai",
        timeout_s: float = 600.0,
        max_retries: int = 2,
        **client: Any,
    ) -> None:
        """`base_url` None is OpenAI's own service, with the key from the `openai` package's own settings.

        Elsewhere no key is sent unless one is given. `is_chat_model` None: chat, but for OpenAI's completions models.
        `dialect` says what the server takes beyond OpenAI's parameters: openai, phloem, vllm, sglang. `client` are
        further arguments of `openai.AsyncOpenAI`. Raises PluginError without the package, ConfigError without a key.
        """
        try:
            import openai as package
        except ModuleNotFoundError as error:
            raise lacking("OpenAI", "openai") from error
        self._openai = package
        chat = model_name not in COMPLETION_MODELS if is_chat_model is None else is_chat_model
        self.model, self.url = model_name, base_url or "OpenAI"
        self.writer = Writer(_known(dialect), chat, own=base_url is None)
        self.echoes = not chat  # until the server has shown that it cannot
        key = api_key if api_key is not None or base_url is None else "none"

        def make() -> openai.AsyncOpenAI:
            return package.AsyncOpenAI(
                base_url=base_url, api_key=key, timeout=timeout_s, max_retries=max_retries, **client
            )

        try:
            make()
        except package.OpenAIError as error:
            raise ConfigError(f"OpenAI({model_name!r}): {error}", hint="give api_key=...") from error
        self._clients = PerLoop(make, lambda made: made.close())

    @property
    def chat(self) -> bool:
        """Whether the model takes messages, not text."""
        return self.writer.chat

    @property
    def capabilities(self) -> frozenset[str]:
        """What programs may ask for."""
        optional = ("regex", "json_schema", "stop_regex", "choices", "ebnf", "lark")
        able = {name for name in optional if self.writer.takes(name)}
        if not self.chat or "choices" in able:
            able.add("select")
        return frozenset(able | {"fork", "logprobs"})

    def start(self, *, priority: int = 0, salt: str | None = None) -> Path:
        """A new path. Raises RequestError for a priority or a salt that the server does not know."""
        extra: dict[str, Any] = {}
        if priority:
            if not self.writer.dialect.priority:
                raise self._refusal("priority")
            extra["priority"] = priority
        if salt is not None:
            if self.writer.dialect.salt is None:
                raise self._refusal("salt")
            extra[self.writer.dialect.salt] = salt
        return ChatPath(self, extra) if self.chat else TextPath(self, extra)

    def _refusal(self, name: str) -> RequestError:
        return RequestError(
            f"{name} cannot be honoured by a server of the dialect {self.writer.name!r}",
            hint="leave it out, or use RuntimeEndpoint with a phloem server",
            param=name,
        )

    async def flush_cache(self) -> None:
        """Refused: OpenAI's API has no such call."""
        raise RequestError("an OpenAI-compatible server's cache cannot be flushed", hint="use RuntimeEndpoint")

    async def info(self) -> dict[str, Any]:
        """The model's name, and whether it chats."""
        return {"model": self.model, "url": self.url, "chat": self.chat, "dialect": self.writer.name}

    async def ask(self, body: dict[str, Any], on_text: Callable[[str], None] | None = None, **prompt: Any) -> Answers:
        """One request: `prompt` are the API's own arguments, `body` everything else. Raises PhloemError."""
        client = self._clients.get()
        create: Any = client.chat.completions.create if self.chat else client.completions.create
        answers = Answers(self.chat)
        try:
            if on_text is None:
                answers.add((await create(model=self.model, extra_body=body, **prompt)).model_dump())
            else:
                options = {"include_usage": True}
                stream = await create(model=self.model, stream=True, stream_options=options, extra_body=body, **prompt)
                async with stream:
                    async for chunk in stream:
                        for text in answers.add(chunk.model_dump()):
                            on_text(text)
        except self._openai.OpenAIError as error:
            raise self._translate(error) from error
        except UnicodeEncodeError as error:
            raise surrogate(error) from None
        answers.check(self.url, streamed=on_text is not None)
        return answers

    def _translate(self, error: Any) -> PhloemError:
        """An error of the package in our words."""
        if isinstance(error, self._openai.APIConnectionError):
            return unreachable(self.url, error.__cause__ or error)
        body = getattr(error, "body", None)
        return refused(getattr(error, "status_code", 0), body if body is not None else str(error), self.url)


def _known(name: str) -> str:
    dialect(name)
    return name


class TextPath:
    """A branch of a completions model: all of its text."""

    def __init__(self, backend: OpenAIBackend, extra: dict[str, Any], text: str = "") -> None:
        self._backend, self._extra, self._text = backend, extra, text

    def append(self, text: str) -> None:
        """Add text."""
        self._text += text

    def begin(self, role: str) -> str:
        """The role in words."""
        text = OPENING.get(role, f"{role.upper()}:")
        self._text += text
        return text

    def end(self, role: str) -> str:
        """A line's end."""
        self._text += "\n"
        return "\n"

    async def generate(self, params: SamplingParams, on_text: Callable[[str], None] | None = None) -> Generation:
        """Continue the text."""
        _has_text(self._text)
        body = self._backend.writer.body(params) | self._extra
        answers = await self._backend.ask(body, on_text, prompt=self._text)
        made = answers.generation()
        self._text += made.texts[0]
        return made

    async def select(self, choices: Sequence[str], method: str, temperature: float = 0.0) -> Selection:
        """By the choices' log-probabilities where the server echoes prompts with theirs, else by greedy matching."""
        _has_text(self._text)
        if self._backend.echoes:
            found = await scored_by_echo(self._echo, self._text, choices, method, temperature)
            if found is not None:
                self._text += found.choice
                return found
            self._backend.echoes = False
            log.warning("%s does not echo log-probabilities: select falls back to greedy matching", self._backend.url)
        params = SamplingParams(temperature=0.0, max_tokens=min(MATCH_TOKENS, max(len(c.encode()) for c in choices)))
        body = self._backend.writer.body(params) | self._extra
        answers = await self._backend.ask(body, prompt=self._text)
        found = greedy_match(answers.generation(), choices)
        self._text += found.choice
        return found

    async def _echo(self, prompts: list[str]) -> list[Echoed] | None:
        """Each prompt's tokens with their log-probabilities; None where the server cannot tell."""
        body = self._extra | {"max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0.0}
        try:
            answers = await self._backend.ask(body, prompt=prompts)
        except RequestError:
            return None
        return answers.echoes(prompts)

    def fork(self, count: int) -> list[Path]:
        """Copies of the text."""
        return [TextPath(self._backend, self._extra, self._text) for _ in range(count)]

    async def commit(self) -> None:
        """Nothing: such a server has no way to prefill."""

    async def close(self) -> None:
        """Nothing is held."""


def _has_text(text: str) -> None:
    if not text:
        raise RequestError("no text comes before the generation", hint="append some text first", param="prompt")


class ChatPath:
    """A branch of a chat model: its messages. Text lives in roles, and a `gen` is a whole answer."""

    def __init__(self, backend: OpenAIBackend, extra: dict[str, Any]) -> None:
        self._backend, self._extra = backend, extra
        self._messages: list[dict[str, str]] = []
        self._role: str | None = None
        self._text = ""

    def append(self, text: str) -> None:
        """Add text to the open message. Raises RequestError outside of one; blank text there is dropped."""
        if self._role is not None:
            self._text += text
        elif text.strip():
            raise RequestError(
                f"a chat model takes messages, this text is in none: {text[:60]!r}",
                hint="wrap it in system(...), user(...) or assistant(...)",
            )

    def begin(self, role: str) -> str:
        """Open a message."""
        if self._role is not None:
            raise RequestError(f"{role} begins inside {self._role}", hint="end the message before")
        self._role, self._text = role, ""
        return ""

    def end(self, role: str) -> str:
        """Close it."""
        if self._role != role:
            raise RequestError(f"{role} ends, but {self._role or 'no message'} is open")
        self._messages.append({"role": role, "content": self._text})
        self._role, self._text = None, ""
        return ""

    async def generate(self, params: SamplingParams, on_text: Callable[[str], None] | None = None) -> Generation:
        """The whole answer. Raises RequestError unless it stands first in an assistant's message."""
        self._check("gen")
        body = self._backend.writer.body(params) | self._extra
        answers = await self._backend.ask(body, on_text, messages=self._messages)
        made = answers.generation()
        self._text += made.texts[0]
        return made

    async def select(self, choices: Sequence[str], method: str, temperature: float = 0.0) -> Selection:
        """Greedily, held to the choices by the server. Raises RequestError where it has no such constraint."""
        self._check("select")
        if not self._backend.writer.takes("choices"):
            raise RequestError(
                "select cannot be honoured by OpenAI's chat API: it scores no given text",
                hint="use a completions model (is_chat_model=False), a dialect with choices, or RuntimeEndpoint",
                param="choices",
            )
        if temperature:
            raise RequestError("a temperature cannot be honoured in a chat model's select", param="temperature")
        longest = max(len(choice.encode()) for choice in choices)
        params = SamplingParams(temperature=0.0, choices=list(choices), max_tokens=longest + 1)
        body = self._backend.writer.body(params) | self._extra
        answers = await self._backend.ask(body, messages=self._messages)
        found = greedy_match(answers.generation(), choices)
        self._text += found.choice
        return found

    def _check(self, what: str) -> None:
        if self._role != "assistant":
            where = f"in a message of role {self._role}" if self._role else "outside of a message"
            raise RequestError(f"{what} {where} cannot be honoured by a chat model", hint=f"assistant({what}(...))")
        if self._text:
            raise RequestError(
                f"{what} after {self._text[:60]!r} in the same message cannot be honoured: a chat API only writes "
                "whole answers",
                hint="put the text into the user's message, or use a completions model or RuntimeEndpoint",
            )
        if not self._messages:
            raise RequestError("messages is empty", hint="begin with system(...) or user(...)", param="messages")

    def fork(self, count: int) -> list[Path]:
        """Copies of the messages."""
        copies: list[Path] = []
        for _ in range(count):
            path = ChatPath(self._backend, self._extra)
            path._messages, path._role, path._text = list(self._messages), self._role, self._text
            copies.append(path)
        return copies

    async def commit(self) -> None:
        """Nothing: such a server has no way to prefill."""

    async def close(self) -> None:
        """Nothing is held."""
