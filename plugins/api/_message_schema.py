"""Request bodies of a conversation: messages, tools, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from ._body import Body
from ._inert import Inert


class TextPart(Body):
    """One part of a message's content; only text can be served."""

    where: ClassVar[str] = "messages[].content[]."

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None


class CalledFunction(Body):
    """What a tool call calls."""

    where: ClassVar[str] = "messages[].tool_calls[].function."

    name: str
    arguments: str


class ToolCall(Body):
    """An earlier call, as the answer that made it had it."""

    where: ClassVar[str] = "messages[].tool_calls[]."
    inert: ClassVar[Mapping[str, Inert]] = {"index": Inert(None, "calls are taken in their order")}

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One chat message. `tool_calls` and `reasoning_content` are an assistant's, `tool_call_id` a tool's."""

    where: ClassVar[str] = "messages[]."
    inert: ClassVar[Mapping[str, Inert]] = {
        "refusal": Inert((None,), "not given"),
        "audio": Inert((None,), "not given"),
        "annotations": Inert((None, []), "no annotations"),
        "function_call": Inert((None,), "not given"),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionBody(Body):
    """A function that the model may call."""

    where: ClassVar[str] = "tools[].function."

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Body):
    """One of `tools`."""

    where: ClassVar[str] = "tools[]."

    type: Literal["function"]
    function: FunctionBody


class NamedFunction(Body):
    """A function by its name."""

    where: ClassVar[str] = "tool_choice.function."

    name: str


class NamedTool(Body):
    """One of `allowed_tools.tools`."""

    where: ClassVar[str] = "tool_choice.allowed_tools.tools[]."

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """`tool_choice.allowed_tools`: only these, in the given mode."""

    where: ClassVar[str] = "tool_choice.allowed_tools."

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ToolChoice(Body):
    """`tool_choice` as an object."""

    where: ClassVar[str] = "tool_choice."

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None
