"""The tools of a chat request, and which of them the model may or must call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phloem.errors import RequestError
from phloem.interfaces import Tool

from ._message_schema import AllowedTools, ToolBody, ToolChoice
from ._shapes import MOST_DEPTH, depth, misshapen

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
_MOST_TOOLS = 1024


@dataclass(frozen=True, slots=True)
class Toolset:
    """What a request offers. Without tools the answer is text; `choice` is auto, required or a tool's name."""

    tools: tuple[Tool, ...] = ()
    choice: str = "auto"
    parallel: bool = True

    @property
    def strict(self) -> bool:
        """Whether what cannot be enforced is refused: where a tool is strict."""
        return any(tool.strict for tool in self.tools)

    def bodies(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them."""
        return [{"type": "function", "function": _described(tool)} for tool in self.tools]


def toolset(
    bodies: Sequence[ToolBody] | None, choice: str | ToolChoice | None = None, parallel: bool | None = None
) -> Toolset:
    """The tools that may be called. Raises RequestError. With choice `none` the model is not told of any."""
    tools = tuple(_tool(body, f"tools[{place}].function") for place, body in enumerate(bodies or ()))
    names = [tool.name for tool in tools]
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise RequestError(f"two tools are named '{twice}'", param="tools")
    if len(tools) > _MOST_TOOLS:
        raise RequestError(f"{len(tools)} tools are given, at most {_MOST_TOOLS} are allowed", param="tools")
    mode, allowed = _mode(choice)
    missing = next((name for name in allowed if name not in names), None)
    if missing is not None:
        known = f"tools has {', '.join(names)}" if names else "there are no tools"
        raise RequestError(f"tool_choice names '{missing[:80]}', {known[:200]}", param="tool_choice")
    if mode == "required" and not tools:
        raise RequestError("tool_choice required needs tools", hint="give tools", param="tool_choice")
    if mode == "none":
        return Toolset()
    offered = tuple(tool for tool in tools if tool.name in allowed) if isinstance(choice, ToolChoice) else tools
    return Toolset(offered, allowed[0] if mode == "named" else mode, parallel is not False)


def _mode(choice: str | ToolChoice | None) -> tuple[str, list[str]]:
    """none, auto, required or named, and the tools that it speaks of."""
    if choice is None or isinstance(choice, str):
        return choice or "auto", []
    if choice.type == "function":
        if choice.function is None or choice.allowed_tools is not None:
            hint = '{"type": "function", "function": {"name": ...}}'
            raise RequestError("tool_choice of type function names no function", hint=hint, param="tool_choice")
        return "named", [choice.function.name]
    if choice.allowed_tools is None or choice.function is not None:
        hint = '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}'
        raise RequestError("tool_choice of type allowed_tools has no allowed_tools", hint=hint, param="tool_choice")
    return _allowed(choice.allowed_tools)


def _allowed(allowed: AllowedTools) -> tuple[str, list[str]]:
    names = [tool.function.name for tool in allowed.tools]
    if not names:
        raise RequestError("tool_choice.allowed_tools.tools is empty", param="tool_choice")
    return allowed.mode, names


def _tool(body: ToolBody, where: str) -> Tool:
    function = body.function
    if not _NAME.fullmatch(function.name):
        shown = function.name[:80]
        raise RequestError(
            f"{where}.name '{shown}' is no name of a tool", hint="1 to 64 of A-Z a-z 0-9 _ . : / -", param="tools"
        )
    if function.name in ("auto", "required", "none"):
        raise RequestError(f"{where}.name '{function.name}' is a word of tool_choice", param="tools")
    parameters = function.parameters
    if parameters is not None and parameters.get("type", "object") != "object":
        raise RequestError(f'{where}.parameters must be a JSON schema of type "object"', param="tools")
    if depth(parameters) > MOST_DEPTH:
        raise RequestError(f"{where}.parameters is nested more than {MOST_DEPTH} levels deep", param="tools")
    problem = misshapen(parameters or {})
    if problem is not None:
        raise RequestError(f"{where}.parameters is no JSON schema: {problem}", param="tools")
    empty = {"type": "object", "properties": {}}
    return Tool(function.name, function.description or "", parameters or empty, bool(function.strict))


def _described(tool: Tool) -> dict[str, Any]:
    description = {"description": tool.description} if tool.description else {}
    return {"name": tool.name, **description, "parameters": tool.parameters}
