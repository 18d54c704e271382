"""Is this a JSON schema at all? Of tools' parameters it is asked at the door: parsers walk over them unguarded."""

from __future__ import annotations

from typing import Any

_SCHEMAS = (
    "items",
    "contains",
    "additionalItems",
    "additionalProperties",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
)
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_TEXTS = ("$ref", "pattern", "format", "description", "title")
MOST_DEPTH = 128  # levels of objects and lists in one another: templates and parsers go down them recursively


def misshapen(schema: dict[str, Any]) -> str | None:
    """What is wrong with the first keyword whose value cannot stand there, after its JSON pointer; None if nothing.

    Each part is visited once, level by level, without recursion. What keywords mean together is for the backends.
    """
    level: list[tuple[str, Any]] = [("#", schema)]
    while level:
        inner: list[tuple[str, Any]] = []
        for at, part in level:
            if isinstance(part, bool):
                continue
            if not isinstance(part, dict):
                return f"{at} is no schema"
            for keyword, value in part.items():
                problem = _problem(keyword, value)
                if problem is not None:
                    return f"{at}/{keyword} {problem}"
                inner += _inside(f"{at}/{keyword}", keyword, value)
        level = inner
    return None


def _problem(keyword: str, value: Any) -> str | None:
    names = isinstance(value, list) and all(isinstance(name, str) for name in value)
    if keyword == "type" and not (names or isinstance(value, str)):
        return "must be a name, or a list of names"
    if keyword == "required" and not names:
        return "must be a list of names"
    if keyword in (*_LISTS, "enum") and not (isinstance(value, list) and value):
        return "must be a list that is not empty"
    if keyword in _MAPS and not isinstance(value, dict):
        return "must be an object"
    if keyword in _SIZES and not (type(value) in (int, float) and value >= 0 and value % 1 == 0):
        return "must be a whole number, 0 or more"
    if keyword in _TEXTS and not isinstance(value, str):
        return "must be a text"
    return None


def _inside(at: str, keyword: str, value: Any) -> list[tuple[str, Any]]:
    """The schemas in a keyword's value."""
    if keyword in _MAPS:
        return [(f"{at}/{name}", part) for name, part in value.items()]
    if keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
        return [(f"{at}/{place}", part) for place, part in enumerate(value)]
    return [(at, value)] if keyword in _SCHEMAS else []


def depth(value: Any) -> int:
    """Levels of lists and objects in one another."""
    level, levels = [value], -1
    while level:
        levels += 1
        nested = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list)))
        level = [inner for items in nested for inner in items]
    return levels
