"""What an output must follow: one constraint of a request, in the one form that grammar backends get."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

from .errors import RequestError
from .params import SamplingParams

KINDS = ("json_schema", "json_object", "regex", "ebnf", "lark", "choices", "structural_tag")
_JSON = ("json_schema", "structural_tag")


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


def within(params: SamplingParams, most: int) -> SamplingParams:
    """The parameters, their JSON constraint as text. Raises RequestError if a constraint has more than `most` bytes.

    Cheap: text is measured and values are written, nothing is parsed. Both sides of a process boundary call it, the
    sending one so that what is refused never travels, and so that what travels is read as one string.
    """
    if not params.constraints:
        return params
    name = params.constraints[0]
    value = getattr(params, name)
    text = value if isinstance(value, str) else _written(name, value)
    # a character has at least one byte: what is far too long need not even be encoded
    if (size := len(text) if len(text) > most else len(_encoded(name, text))) > most:
        problem = f"{name} of {size} bytes exceeds the limit of {most}"
        raise RequestError(problem, hint="grammar.max_source sets it", param=name)
    return msgspec.structs.replace(params, **{name: text}) if isinstance(value, dict) else params


def constraint_of(params: SamplingParams, whitespace: str) -> Constraint | None:
    """The constraint that a request's parameters ask for. Raises RequestError for what is no JSON or no text.

    JSON that comes as text is checked and laid out without being read: numbers that are too large, and halves of pairs
    that are escaped, come to light where it is compiled (`exact`).
    """
    names = params.constraints
    if not names:
        return None
    name, value = names[0], getattr(params, names[0])
    if name == "json_object":
        text = ""
    elif name in _JSON:
        text = _laid_out(name, value)
    else:
        text = json.dumps(value) if name == "choices" else value
    _encoded(name, text)
    return Constraint(kind=name, value=text, strict=params.strict, whitespace=whitespace)


def exact(constraint: Constraint) -> Constraint:
    """The same, checked to the last escape. Takes tens of milliseconds for a megabyte, which a step has not."""
    if constraint.kind not in _JSON:
        return constraint
    text = _canonical(constraint.kind, constraint.value)
    _encoded(constraint.kind, text)
    return msgspec.structs.replace(constraint, value=text)


def _laid_out(name: str, value: Any) -> str:
    """Like `_canonical`, but text keeps its escapes."""
    if not isinstance(value, str):
        return _canonical(name, value)
    try:
        return msgspec.json.format(value, indent=0)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return _canonical(name, value)  # its error has a place


def _canonical(name: str, value: Any) -> str:
    """Canonical JSON: the order of keys is kept, as it decides the order of properties."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"{name} is not JSON: {error}", param=name) from None


def _written(name: str, value: Any) -> str:
    """Compact JSON of a value."""
    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} has half of a surrogate pair", param=name) from None
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise RequestError(f"{name} is not JSON: {error}", param=name) from None
    return _canonical(name, value) if "null" in text else text  # NaN and infinity would be null, without a word


def _encoded(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} has half of a surrogate pair", param=name) from None
