"""Structural tags of a format: what holds an answer to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phloem.errors import RequestError
from phloem.interfaces import Tool

from ._format import Form, Format
from ._tree import Node, const, either, schema_of, separated, sequence, tag


def constraint(form: Format, tools: Sequence[Tool], choice: str, parallel: bool) -> dict[str, Any] | None:
    """`Parser.constraint` of a format. Raises RequestError(param="tools" or "tool_choice")."""
    forms = [each for each in form.forms if not each.variant]
    if not tools or not forms:
        return None
    many = parallel and not form.single
    if choice == "auto":
        if not any(tool.strict for tool in tools):
            return None
        tree = _triggered(forms, tools, many)
    elif choice == "required":
        tree = either(*(_calls(each, _tags(each, tools), many) for each in forms))
    else:
        named = [tool for tool in tools if tool.name == choice]
        if not named:
            raise RequestError(f"there is no tool named {choice!r}", param="tool_choice")
        tree = either(*(_calls(each, _tags(each, named[:1]), False) for each in forms))
    return {"type": "structural_tag", "format": tree}


def _tags(form: Form, tools: Sequence[Tool]) -> list[Node]:
    """One call of each tool."""
    made = []
    for tool in tools:
        before, after = form.body.around(tool.name)
        content = form.body.syntax.tree(schema_of(tool), tool.name)
        made.append(tag(form.opening + before, content, after + form.closing))
    return made


def _calls(form: Form, tags: list[Node], many: bool) -> Node:
    """Nothing but calls."""
    calls = separated(tags, form.separator) if many else either(*tags)
    return sequence(*([const(form.begin)] if form.begin else []), calls, *([const(form.end)] if form.end else []))


def _triggered(forms: Sequence[Form], tools: Sequence[Tool], many: bool) -> Node:
    """Any text, but where it begins a call, that must be one, and the arguments of a strict tool follow its schema."""
    triggers: dict[str, None] = {}
    tags: list[Node] = []
    for form in forms:
        free = form.body.syntax.free  # else a tool that is not strict is held to its schema, too
        calls = _tags(form, [Tool(tool.name) if free and not tool.strict else tool for tool in tools])
        if form.begin and not form.plain:
            triggers[form.marker] = None
            tags.append(tag(form.begin, separated(calls, form.separator) if many else either(*calls), form.end))
            continue
        tags += _lists(form, calls, many) if form.begin else calls
        triggers |= dict.fromkeys(starts(form, tools) if form.plain else [form.marker])
    return {
        "type": "triggered_tags",
        "triggers": list(triggers),
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": not many,
    }


def starts(form: Form, tools: Sequence[Tool]) -> list[str]:
    """How calls begin where nothing marks them: not with a brace alone, which text may have.

    Where a tool is strict, what begins otherwise was written without a constraint, and is not read as a call.
    """
    if not form.begin:
        return [form.body.around("")[0].split(": ")[0]]
    return [form.begin + form.opening + form.body.around(tool.name)[0] for tool in tools]


def _lists(form: Form, calls: list[Node], many: bool) -> list[Node]:
    """A list of calls as one tag for each tool that may be the first, since only its name tells a list of calls."""
    later = [tag(form.separator + call["begin"], call["content"], call["end"]) for call in calls]
    rest = [separated(later, "", at_least_one=False)] if many else []
    return [
        tag(form.begin + call["begin"], sequence(call["content"], const(call["end"]), *rest), form.end)
        for call in calls
    ]
