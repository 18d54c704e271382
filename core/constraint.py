"""What an output must follow: one constraint of a request, in the one form that grammar backends get."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

from .errors import RequestError
from .params import SamplingParams

KINDS = ("json_schema", "json_object", "regex", "ebnf", "lark", "choices", "structural_tag")


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """One constraint. Equal constraints are compiled once; every field may change what is compiled."""

    kind: str  # one of KINDS
    value: str  # JSON text for json_schema, choices and structural_tag; "" for json_object; the source for others
    strict: bool = True  # False: keywords that a backend cannot enforce are reported, not refused
    whitespace: str = "compact"  # JSON: "compact" is one space after "," and ":", "flexible" a bounded choice


class Unenforced(NamedTuple):
    """One thing in a constraint that a backend would let pass."""

    pointer: str  # JSON pointer into the schema, such as "#/properties/id/uniqueItems"
    why: str  # such as "xgrammar ignores uniqueItems"


def constraint_of(params: SamplingParams, whitespace: str) -> Constraint | None:
    """The constraint that a request's parameters ask for. Raises RequestError for what is no JSON or no text."""
    names = params.constraints
    if not names:
        return None
    name, value = names[0], getattr(params, names[0])
    if name == "json_object":
        text = ""
    elif name in ("json_schema", "structural_tag"):
        text = _json_text(name, value)
    else:
        text = json.dumps(value) if name == "choices" else value
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} has half of a surrogate pair", param=name) from None
    return Constraint(kind=name, value=text, strict=params.strict, whitespace=whitespace)


def _json_text(name: str, value: Any) -> str:
    """Canonical JSON: the order of keys is kept, as it decides the order of properties."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"{name} is not JSON: {error}", param=name) from None
