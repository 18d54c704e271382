"""Where things lie, as the caller wrote them: pointers into a structural tag that stands for tools, and others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from phloem.interfaces import Tool

_POINTER = re.compile(r"#(?:/[^\s/:;]*)*")


def places(tag: Any, tools: Sequence[Tool]) -> dict[str, str]:
    """The JSON pointers of tools' schemas, and of their members' schemas, in a tag made for them: `name.parameters#`.

    Schemas are known by what they say, as a parser may copy them: of two tools that say the same the first is named.
    Linear in the size of both. Called for a request that is refused, or has notes.
    """
    known: dict[str, str] = {}
    for tool in tools:
        whole, at = tool.parameters, f"{tool.name}.parameters#"
        known.setdefault(_text(whole), at)
        known.setdefault(_text({**whole, "type": "object"}), at)
    for tool in tools:
        members = tool.parameters.get("properties", {})
        for name, schema in members.items() if isinstance(members, dict) else ():
            escaped = name.replace("~", "~0").replace("/", "~1")
            known.setdefault(_text(schema), f"{tool.name}.parameters#/properties/{escaped}")
    found = ((at, known.get(_text(schema))) for at, schema in _schemas(tag, "#"))
    return {at: words for at, words in found if words is not None}


def said(text: str, known: dict[str, str]) -> str:
    """A text whose pointers are the caller's, where these are known."""

    def place(match: re.Match[str]) -> str:
        head, tail = match[0], ""
        while head not in known and head:
            head, slash, last = head.rpartition("/")
            tail = f"{slash}{last}{tail}"
        return known[head] + tail if head else match[0]

    return _POINTER.sub(place, text) if known else text


def _schemas(tree: Any, at: str) -> Iterator[tuple[str, Any]]:
    """The schemas in a tree of formats, with their pointers."""
    items = enumerate(tree) if isinstance(tree, list) else tree.items() if isinstance(tree, dict) else ()
    for key, item in items:
        if key == "json_schema":
            yield f"{at}/{key}", item
        else:
            yield from _schemas(item, f"{at}/{key}")


def _text(schema: Any) -> str:
    return json.dumps(schema, sort_keys=True)
