"""Whether two JSON schemas can both hold for one value: `oneOf` is `anyOf` where no two branches can."""

from __future__ import annotations

import json
from typing import Any

from ._refs import References

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_DEPTH = 8  # of properties that are compared


def overlapping(branches: list[Any], references: References) -> tuple[int, int] | None:
    """The first two branches that cannot be told apart, by index; None where `oneOf` means `anyOf`."""
    chased = [references.chase(branch) for branch in branches]
    for i, first in enumerate(chased):
        for j in range(i):
            if not disjoint(chased[j], first, references):
                return j, i
    return None


def disjoint(first: Any, second: Any, references: References, depth: int = _DEPTH) -> bool:
    """True if it is certain that no value satisfies both. Looks at types, values, and properties both require."""
    first, second = references.chase(first), references.chase(second)
    if first is False or second is False:
        return True
    if not isinstance(first, dict) or not isinstance(second, dict) or depth == 0:
        return False
    values, others = values_of(first), values_of(second)
    if values is not None and others is not None:
        return not {_key(value) for value in values} & {_key(value) for value in others}
    ours, theirs = types_of(first), types_of(second)
    both = ours & theirs
    if not both:
        return True
    if both == {"object"}:
        return _objects(first, second, references, depth) or _objects(second, first, references, depth)
    if both <= {"integer", "number"}:
        return _below(first, second) or _below(second, first)
    return False


def types_of(schema: dict[str, Any]) -> frozenset[str]:
    """Types that a value may have as far as `type`, `const` and `enum` say."""
    values = values_of(schema)
    named = schema.get("type")
    allowed = TYPES if named is None else frozenset([named] if isinstance(named, str) else named)
    if "number" in allowed:
        allowed |= {"integer"}
    return allowed if values is None else frozenset(map(type_of, values)) & allowed


def values_of(schema: dict[str, Any]) -> list[Any] | None:
    """The values that `const` or `enum` lists, None without either."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def type_of(value: Any) -> str:
    """The type of a JSON value; whole numbers are integers."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, (int, float)):
        return "integer" if value == int(value) else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _objects(first: dict[str, Any], second: dict[str, Any], references: References, depth: int) -> bool:
    """A property that `first` requires and that `second` forbids or holds to something disjoint."""
    ours, theirs = (_dict(schema.get("properties")) for schema in (first, second))
    for name in first.get("required") or ():
        if name not in theirs:
            if second.get("additionalProperties") is False and not second.get("patternProperties"):
                return True
            continue
        mine = ours.get(name, first.get("additionalProperties", True))
        if disjoint(mine, theirs[name], references, depth - 1):
            return True
    return False


def _below(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """The largest number of one lies below the least of the other."""
    high = _bound(first, "maximum", "exclusiveMaximum")
    low = _bound(second, "minimum", "exclusiveMinimum")
    if high is None or low is None:
        return False
    open_end = "exclusiveMaximum" in first or "exclusiveMinimum" in second
    return high < low or (
        open_end and high == low and high in (first.get("exclusiveMaximum"), second.get("exclusiveMinimum"))
    )


def _bound(schema: dict[str, Any], closed: str, opened: str) -> float | None:
    found = [float(schema[key]) for key in (closed, opened) if isinstance(schema.get(key), (int, float))]
    if not found:
        return None
    return min(found) if closed == "maximum" else max(found)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _key(value: Any) -> str:
    """Equal for equal JSON values: 1 and 1.0 are one number."""
    return json.dumps(whole(value), sort_keys=True)


def whole(value: Any) -> Any:
    """A JSON value with 1.0 written as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [whole(item) for item in value]
    return {key: whole(item) for key, item in value.items()} if isinstance(value, dict) else value
