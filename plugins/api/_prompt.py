"""From messages and tools to a prompt: through the model's template, and in words where it knows no tools."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phloem.errors import RequestError

from ._message_schema import Message
from ._parsers import Formats
from ._tools import Toolset

if TYPE_CHECKING:
    from phloem.tokenizer import Tokenizer

LONG_TEXT = 2048  # characters from which tokenising leaves the event loop's thread
_RESERVED = ("messages", "tools", "add_generation_prompt")

Chat = list[dict[str, Any]]


async def chat_prompt(
    messages: Sequence[Message], offered: Toolset, variables: Mapping[str, Any], formats: Formats, tokenizer: Tokenizer
) -> list[int]:
    """Token ids; the answer's opening is part of them. Raises RequestError."""
    if not messages:
        raise RequestError("messages is empty", hint="give at least one message", param="messages")
    for name in variables:
        if name in _RESERVED or name not in tokenizer.chat_variables:
            why = "is not the caller's" if name in _RESERVED else "is not read by the model's chat template"
            where = f"chat_template_kwargs.{name[:80]}"
            raise RequestError(f"{where} cannot be honoured: it {why}", param=where)
    conversation = Conversation(formats).chat(messages)
    more = dict(variables)
    if offered.tools:
        if formats.takes_tools:
            more["tools"] = offered.bodies()
        else:
            assert formats.tools is not None, "offered tools have a parser"
            text = formats.tools.instructions(offered.tools, offered.parallel)
            conversation = with_instructions(conversation, text, system=formats.takes_system)

    def encode() -> list[int]:
        return tokenizer.chat(conversation, **more)

    length = sum(len(message["content"]) for message in conversation)
    return await asyncio.to_thread(encode) if length > LONG_TEXT or "tools" in more else encode()


def with_instructions(chat: Chat, text: str, *, system: bool) -> Chat:
    """The tool prompt in the system message; before the first message's text where a template takes no system."""
    first = chat[0]
    if first["role"] == ("system" if system else "user"):
        parts = (first["content"], text) if system else (text, first["content"])
        return [first | {"content": "\n\n".join(filter(None, parts))}, *chat[1:]]
    return [{"role": "system" if system else "user", "content": text}, *chat]


class Conversation:
    """One reading of a request's messages: ids of calls are checked against the calls before."""

    def __init__(self, formats: Formats) -> None:
        self._formats = formats
        self._called: dict[str, str] = {}  # id of each call -> the function's name

    def chat(self, messages: Sequence[Message]) -> Chat:
        """The messages as templates want them. Raises RequestError naming the message."""
        made: Chat = []
        for place, message in enumerate(messages):
            where = f"messages[{place}]"
            self._check(message, where)
            content = _text(message, where)
            if message.role == "tool":
                after = place > 0 and messages[place - 1].role == "tool"
                self._add_result(made, message, content, where, another=after)
            elif message.tool_calls:
                made.append(self._calls(message, content, where))
            else:
                # `developer` is OpenAI's newer word; templates know `system`
                role = "system" if message.role == "developer" else message.role
                made.append({"role": role, "content": content} | _extras(message))
        return made

    def _check(self, message: Message, where: str) -> None:
        owners = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}
        for field, role in owners.items():
            if getattr(message, field) and message.role != role:
                param = f"{where}.{field}"
                raise RequestError(f"{param} goes with role {role}, not with {message.role}", param=param)
        if message.name is not None and message.role != "tool" and not self._formats.takes_names:
            raise RequestError(
                f"{where}.name cannot be honoured: the model's chat template shows no names", param=f"{where}.name"
            )

    def _calls(self, message: Message, content: str, where: str) -> dict[str, Any]:
        """An assistant's message with calls, for the template or as the model would have written it."""
        shown, texts = [], []
        ids: set[str] = set()
        for place, call in enumerate(message.tool_calls or ()):
            at = f"{where}.tool_calls[{place}]"
            if not call.id or call.id in ids:
                raise RequestError(f"{at}.id must be a text that no other call of the message has", param=f"{at}.id")
            ids.add(call.id)
            self._called[call.id] = call.function.name
            arguments = _arguments(call.function.arguments, f"{at}.function.arguments")
            function = {"name": call.function.name, "arguments": arguments}
            shown.append({"id": self._id(call.id), "type": "function", "function": function})
            texts.append((call.function.name, call.function.arguments or "{}"))
        if self._formats.takes_tools:
            return {"role": "assistant", "content": content, "tool_calls": shown} | _extras(message)
        text = self._words(where).call_text(texts)
        return {"role": "assistant", "content": f"{content}\n{text}" if content else text} | _extras(message)

    def _add_result(self, made: Chat, message: Message, content: str, where: str, *, another: bool) -> None:
        """A tool's answer: a message of its own for the template, else part of a user's message."""
        param = f"{where}.tool_call_id"
        if message.tool_call_id is None:
            raise RequestError(f"{param} is missing", param=param)
        name = self._called.get(message.tool_call_id)
        if name is None:
            raise RequestError(f"{param} '{message.tool_call_id[:80]}' is of no earlier tool call", param=param)
        if message.name is not None and message.name != name:
            at = f"{where}.name"
            raise RequestError(f"{at} is '{message.name[:80]}', the call was of '{name}'", param=at)
        if self._formats.takes_tools:
            call_id = self._id(message.tool_call_id)
            made.append({"role": "tool", "content": content, "tool_call_id": call_id, "name": name})
            return
        text = self._words(where).result_text(name, content)
        if another:  # templates may insist that users and assistants take turns
            made[-1]["content"] += "\n" + text
        else:
            made.append({"role": "user", "content": text})

    def _words(self, where: str) -> Any:
        if self._formats.tools is None:
            raise RequestError(
                f"{where} cannot be honoured: the model's chat template knows no tools, and no parser is configured",
                hint="set server.tool_parser",
                param=where,
            )
        return self._formats.tools

    def _id(self, call_id: str) -> str:
        """An id as the template takes it."""
        if not self._formats.short_ids or (len(call_id) == 9 and call_id.isalnum()):
            return call_id
        return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _extras(message: Message) -> dict[str, Any]:
    """Fields that templates may read."""
    fields = {"name": message.name, "reasoning_content": message.reasoning_content}
    return {name: value for name, value in fields.items() if value is not None}


def _text(message: Message, where: str) -> str:
    """The content; text parts are concatenated. Null only where calls stand for it."""
    content, param = message.content, f"{where}.content"
    if content is None:
        if message.role == "assistant" and message.tool_calls:
            return ""
        raise RequestError(f"{param} is missing", hint="only an assistant's tool calls may do without", param=param)
    if isinstance(content, str):
        return content
    for place, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise RequestError(
                f"{param}[{place}] is of type '{part.type[:40]}', the served model takes text only", param=param
            )
    return "".join(part.text or "" for part in content)


def _no_json(name: str) -> None:
    """NaN and the infinities: Python reads them, JSON has none."""
    raise ValueError(name)


def _arguments(text: str, param: str) -> dict[str, Any]:
    """The arguments of an earlier call."""
    try:
        value = json.loads(text or "{}", parse_constant=_no_json)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"{param} must be a JSON object, as text", param=param)
    return value
