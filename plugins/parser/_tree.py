"""Nodes of a structural tag, as xgrammar defines them, and how a list of named values is written under a schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from phloem.errors import RequestError
from phloem.interfaces import Tool

Node = dict[str, Any]
Schema = dict[str, Any]


class Member(NamedTuple):
    """One named value of a list: the text before the value, what the value may be, and whether it must be there."""

    begin: str
    value: Node
    required: bool


def const(value: str) -> Node:
    """Exactly this text."""
    return {"type": "const_string", "value": value}


def leaf(schema: Schema | bool) -> Node:
    """A JSON value."""
    return {"type": "json_schema", "json_schema": schema}


def sequence(*elements: Node) -> Node:
    """One after the other; a lone one stands for itself."""
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


def either(*elements: Node) -> Node:
    """One of these; a lone one stands for itself."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def tag(begin: str, content: Node, end: str) -> Node:
    """A content between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def separated(tags: Sequence[Node], separator: str, at_least_one: bool = True) -> Node:
    """Tags, any number of them."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": at_least_one,
        "stop_after_first": False,
    }


def optional(content: Node) -> Node:
    """This, or nothing."""
    return {"type": "optional", "content": content}


def listed(members: Sequence[Member], separator: str) -> Node:
    """Named values with a separator between them: the required ones first, then any of the others, in order.

    Where nothing is required, whatever comes first has no separator before it: that makes the tree quadratic in the
    number of members, as trees share no nodes.
    """
    needed = [member for member in members if member.required]
    others = [member for member in members if not member.required]

    def one(member: Member, first: bool) -> Node:
        return sequence(const(member.begin if first else separator + member.begin), member.value)

    def rest(members: Sequence[Member]) -> list[Node]:
        return [optional(one(member, first=False)) for member in members]

    if needed:
        following = [one(member, first=False) for member in needed[1:]]
        return sequence(one(needed[0], first=True), *following, *rest(others))
    starts = [sequence(one(member, first=True), *rest(others[i + 1 :])) for i, member in enumerate(others)]
    return optional(either(*starts)) if starts else const("")


def properties_of(schema: Schema) -> dict[str, Any]:
    """The schemas of an object's members; one that is required but not described may be anything."""
    described: dict[str, Any] = schema.get("properties", {})
    return {**described, **{name: True for name in schema.get("required", []) if name not in described}}


def schema_of(tool: Tool) -> Schema:
    """A tool's schema, which is of an object. Raises RequestError(param="tools")."""
    schema = tool.parameters
    if schema.get("type", "object") != "object":
        raise RequestError(f"the parameters of tool {tool.name} must be the schema of an object", param="tools")
    combined = {"$ref", "anyOf", "oneOf", "allOf"} & set(schema)
    return schema if "type" in schema or combined else {**schema, "type": "object"}
