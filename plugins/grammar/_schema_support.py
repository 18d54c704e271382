"""What the writer of schemas enforces: the table of outlines and xgrammar for the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from phloem.errors import RequestError

from ._notation import Facets, Notation
from ._report import Node, Support, misshapen

_KEYWORDS = frozenset(
    {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "minLength", "maxLength", "pattern"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    | {"items", "items[]", "additionalItems", "prefixItems", "minItems", "maxItems"}
    | {"properties", "additionalProperties", "required", "minProperties", "maxProperties"}
)


def facets_of(notation: Notation, schema: Mapping[str, Any]) -> Facets:
    """What a schema says of strings."""
    form = schema.get("format")
    known = form if isinstance(form, str) and form in notation.formats else None
    pattern = schema.get("pattern")
    return Facets(pattern, known, schema.get("minLength", 0), schema.get("maxLength"))


def lost_text(notation: Notation, facets: Facets) -> str | None:
    """Why what is said of a string cannot be enforced; None if it can."""
    try:
        notation.text(facets, "pattern", f"{notation.backend}: ")
    except RequestError as error:
        return error.message
    return None


def _check(notation: Notation, node: Node) -> Iterator[tuple[str, str]]:
    """What depends on the value of a keyword, or on others beside it."""
    active, types, name = node.active, node.types, notation.backend
    if isinstance(active.get("allOf"), list) and len(active["allOf"]) > 1:
        yield "allOf", f"{name} cannot combine schemas"
    if "multipleOf" in active and not (active["multipleOf"] == 1 and "number" not in types):
        yield "multipleOf", f"{name} ignores multipleOf"
    keyword = next((key for key in ("pattern", "format", "minLength", "maxLength") if key in active), None)
    if keyword is not None and not any(misshapen(active)):
        why = lost_text(notation, facets_of(notation, active))
        if why is not None:
            yield keyword, why
    yield from _object_counts(name, node)


def _object_counts(name: str, node: Node) -> Iterator[tuple[str, str]]:
    """Counted are the members of a map; beside named properties a count matters unless these settle it."""
    schema, active = node.schema, node.active
    needed = len(set(schema.get("required") or ()))
    named = schema.get("properties") or {}
    if active.get("minProperties", 0) > max(needed, 0 if named or needed else 1):
        yield "minProperties", f"{name} cannot tell a key that comes twice, and counts it twice"
    closed = schema.get("additionalProperties", "properties" not in schema) is False
    if "maxProperties" in active and (named or needed) and not (closed and len(named) <= active["maxProperties"]):
        yield "maxProperties", f"{name} ignores maxProperties beside named properties"


def support(notation: Notation) -> Support:
    """The table of what the writer enforces in a notation."""
    return Support(
        backend=notation.backend,
        keywords=_KEYWORDS,
        formats=frozenset(notation.formats),
        beside={}
        if notation.combines
        else {"pattern": frozenset({"format"})}
        | {key: frozenset({"format", "pattern"}) for key in ("minLength", "maxLength")},
        check=partial(_check, notation),
    )
