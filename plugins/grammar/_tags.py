"""Structural tags as every backend takes them: one checked tree of formats, errors with JSON pointers.

The formats, their fields and their defaults are xgrammar's; what is refused here would be refused, or quietly ignored,
by one backend at least.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from phloem.constraint import Constraint, Unenforced
from phloem.errors import RequestError

from ._report import Malformed, Support, unenforced

KIND = "structural_tag"
_LEGACY = re.compile(r"#/tags(/\d+)?(/.*)?", re.DOTALL)
MAX_DEPTH = 64  # of formats within formats


class Field(NamedTuple):
    """A field of a format: what its value must be, and its value where it is absent (`...`: it must be given)."""

    check: str  # a method of `_Checker`
    default: Any = ...


_TAGS = Field("tags")
_FLAG = Field("flag", False)
_TEXTS = Field("texts", ())
FORMATS: Mapping[str, Mapping[str, Field]] = {
    "const_string": {"value": Field("text")},
    "json_schema": {"json_schema": Field("schema")},
    "any_text": {"excludes": _TEXTS, "max_chars": Field("limit", None)},
    "regex": {"pattern": Field("text")},
    "token": {"token": Field("token")},
    "sequence": {"elements": Field("several")},
    "or": {"elements": Field("several")},
    "optional": {"content": Field("format")},
    "plus": {"content": Field("format")},
    "star": {"content": Field("format")},
    "repeat": {"min": Field("count"), "max": Field("count"), "content": Field("format")},
    "tag": {"begin": Field("marker"), "content": Field("format"), "end": Field("end")},
    "triggered_tags": {
        "triggers": Field("some_texts"),
        "tags": _TAGS,
        "at_least_one": _FLAG,
        "stop_after_first": _FLAG,
        "excludes": _TEXTS,
    },
    "tags_with_separator": {
        "tags": _TAGS,
        "separator": Field("text"),
        "at_least_one": _FLAG,
        "stop_after_first": _FLAG,
    },
}


def parse(text: str, formats: Mapping[str, Mapping[str, Field]] = FORMATS) -> dict[str, Any]:
    """The format tree of a structural tag, `{"format": tree}` or the legacy form, checked, every default filled in.

    `formats`: what the backend takes; a wider table than FORMATS may have fields of any check here. Called once per
    constraint, where it is compiled. Raises RequestError(param="structural_tag").
    """
    return parse_at(text, formats)[0]


def parse_at(text: str, formats: Mapping[str, Mapping[str, Field]] = FORMATS) -> tuple[dict[str, Any], str]:
    """As `parse`, and the tree's own JSON pointer in what the user gave."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{KIND} is not JSON: {error}", param=KIND) from None
    checker = _Checker(formats)
    if not isinstance(value, dict) or value.get("type", KIND) != KIND:
        raise refuse("#", f'must be an object of type "{KIND}"')
    if "format" in value:
        checker.only(value, {"type", "format"}, "#")
        return checker.format(value["format"], "#/format"), "#/format"
    if "structures" not in value or "triggers" not in value:
        raise refuse("#", "must have format, or structures and triggers")
    checker.only(value, {"type", "structures", "triggers"}, "#")
    return checker.legacy(value), "#"


def schemas(tree: Any, at: str) -> Iterator[tuple[str, Any]]:
    """The JSON schemas in a checked tree, with their pointers."""
    items = enumerate(tree) if isinstance(tree, list) else tree.items() if isinstance(tree, dict) else ()
    for key, item in items:
        if key == "json_schema":
            yield written(f"{at}/{key}"), item
        else:
            yield from schemas(item, f"{at}/{key}")


def report(constraint: Constraint, support: Support) -> list[Unenforced]:
    """What a backend would let pass of a schema, or of those in a structural tag; [] for other kinds of constraint.

    Raises RequestError for what is wrong in any case: another backend, or not being strict, would not mend it.
    """
    if constraint.kind == KIND:
        found = schemas(*parse_at(constraint.value))
    else:
        found = iter([("#", json.loads(constraint.value))] if constraint.kind == "json_schema" else [])
    reported = [one for pointer, schema in found for one in unenforced(schema, support, pointer)]
    for one in reported:
        if isinstance(one, Malformed):
            raise RequestError(f"{constraint.kind}: {one.pointer}: {one.why}", param=constraint.kind)
    return reported


def refuse(at: str, why: str) -> RequestError:
    """What is wrong, and where."""
    return RequestError(f"{KIND}: {written(at)}: {why}", param=KIND)


def written(at: str) -> str:
    """A pointer as the user wrote it: the tags of a legacy form, whose tree lies at "#", are its structures."""
    match = _LEGACY.fullmatch(at)
    if match is None:
        return at
    rest = (match[2] or "").removeprefix("/content")
    rest = f"/schema{rest.removeprefix('/json_schema')}" if rest.startswith("/json_schema") else rest
    return f"#/structures{match[1] or ''}{rest}"


def trigger_of(begin: str, triggers: list[str]) -> list[str]:
    """The triggers that a tag's begin starts with; one, in a checked tree."""
    return [trigger for trigger in triggers if begin.startswith(trigger)]


class _Checker:
    """One method per kind of value: takes it and its JSON pointer, returns it checked."""

    def __init__(self, formats: Mapping[str, Mapping[str, Field]]) -> None:
        self.formats, self.depth = formats, 0

    def only(self, value: dict[str, Any], known: set[str], at: str) -> None:
        for key in value:
            if key not in known:
                raise refuse(f"{at}/{key}", f"unknown field; known here: {', '.join(sorted(known))}")

    def format(self, value: Any, at: str) -> dict[str, Any]:
        """One format with all below it."""
        if not isinstance(value, dict):
            raise refuse(at, "must be an object with a type")
        name = str(value.get("type"))
        if name not in self.formats:
            raise refuse(f"{at}/type", f"{name!r} is not a format here; these are: {', '.join(sorted(self.formats))}")
        fields = self.formats[name]
        self.only(value, {"type", *fields}, at)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise refuse(at, f"formats are nested more than {MAX_DEPTH} deep")
        checked = {"type": name}
        for key, field in fields.items():
            if key not in value and field.default is ...:
                raise refuse(at, f"{name} needs {key}")
            given = value.get(key, field.default)
            check: Callable[[Any, str], Any] = getattr(self, field.check)
            checked[key] = given if given is field.default else check(given, f"{at}/{key}")
        self.depth -= 1
        self._together(checked, at)
        return checked

    def legacy(self, value: dict[str, Any]) -> dict[str, Any]:
        """`{"structures": [{"begin", "schema", "end"}], "triggers": [...]}` is one format `triggered_tags`."""
        at = "#/structures"
        if not isinstance(value["structures"], list) or not value["structures"]:
            raise refuse(at, "must be a list with one structure at least")
        tags = []
        for i, item in enumerate(value["structures"]):
            if not isinstance(item, dict) or not {"begin", "schema", "end"} <= set(item):
                raise refuse(f"{at}/{i}", "must be an object with begin, schema and end")
            self.only(item, {"begin", "schema", "end"}, f"{at}/{i}")
            begin, end = (self.text(item[key], f"{at}/{i}/{key}") for key in ("begin", "end"))
            schema = self.schema(self._parsed(item["schema"]), f"{at}/{i}/schema")
            content = {"type": "json_schema", "json_schema": schema}
            tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
        return self.format({"type": "triggered_tags", "triggers": value["triggers"], "tags": tags}, "#")

    def _parsed(self, schema: Any) -> Any:
        try:
            return json.loads(schema) if isinstance(schema, str) else schema
        except ValueError:
            return None  # which is no schema

    def text(self, value: Any, at: str) -> str:
        if not isinstance(value, str):
            raise refuse(at, "must be a string")
        return value

    def texts(self, value: Any, at: str) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise refuse(at, "must be a list of non-empty strings")
        return value

    def some_texts(self, value: Any, at: str) -> list[str]:
        if not self.texts(value, at):
            raise refuse(at, "must not be empty")
        return self.texts(value, at)

    def flag(self, value: Any, at: str) -> bool:
        if not isinstance(value, bool):
            raise refuse(at, "must be true or false")
        return value

    def count(self, value: Any, at: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 2**31:
            raise refuse(at, "must be an integer, -1 (unbounded) or more")
        return value

    def limit(self, value: Any, at: str) -> int | None:
        if value is not None and self.count(value, at) < 0:
            raise refuse(at, "must not be negative")
        return value if value is None else int(value)

    def schema(self, value: Any, at: str) -> dict[str, Any] | bool:
        if not isinstance(value, (dict, bool)):
            raise refuse(at, "must be a JSON schema: an object, true or false")
        return value

    def token(self, value: Any, at: str) -> str | int:
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise refuse(at, "must be a token's text or id")
        return value

    def marker(self, value: Any, at: str) -> Any:
        """A tag's begin or end: a text, or a format `token`."""
        if isinstance(value, dict) and value.get("type") == "token":
            return self.format(value, at)
        return self.text(value, at)

    def end(self, value: Any, at: str) -> Any:
        """A marker, or a list of texts, one of which ends the tag."""
        if not isinstance(value, list):
            return self.marker(value, at)
        if not value:
            raise refuse(at, "must not be empty")
        return [self.text(item, f"{at}/{i}") for i, item in enumerate(value)]

    def _listed(self, value: Any, at: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise refuse(at, "must be a list with one format at least")
        return value

    def several(self, value: Any, at: str) -> list[dict[str, Any]]:
        return [self.format(item, f"{at}/{i}") for i, item in enumerate(self._listed(value, at))]

    def tags(self, value: Any, at: str) -> list[dict[str, Any]]:
        checked = self.several(value, at)
        for i, item in enumerate(checked):
            if item["type"] != "tag":
                raise refuse(f"{at}/{i}", f"must be a tag, not {item['type']}")
        return checked

    def _together(self, checked: dict[str, Any], at: str) -> None:
        """What fields must be to each other."""
        name = checked["type"]
        if name == "repeat" and (checked["min"] < 0 or -1 < checked["max"] < checked["min"]):
            raise refuse(at, "repeat needs 0 <= min <= max, or max -1 for no bound")
        if name == "tag" and is_open(checked["content"]) and not any(ends_of(checked)):
            raise refuse(f"{at}/end", "must not be empty where the content is any text")
        if name == "triggered_tags":
            self._triggers(checked, at)

    def _triggers(self, checked: dict[str, Any], at: str) -> None:
        unused = set(checked["triggers"])
        for i, tag in enumerate(checked["tags"]):
            if not isinstance(tag["begin"], str):
                raise refuse(f"{at}/tags/{i}/begin", "must be a string where triggers are")
            found = trigger_of(tag["begin"], checked["triggers"])
            if len(found) != 1:
                raise refuse(
                    f"{at}/tags/{i}/begin", f"must start with one of the triggers, starts with {found or 'none'}"
                )
            unused.discard(found[0])
        for i, text in enumerate(checked["excludes"]):
            if any(trigger in text for trigger in checked["triggers"]):
                raise refuse(f"{at}/excludes/{i}", "holds a trigger, which no text does anyway")
        if unused:
            raise refuse(f"{at}/triggers", f"no tag begins with {sorted(unused)[0]!r}")


def ends_of(tag: dict[str, Any]) -> list[Any]:
    """What may end a tag: texts, or one format `token`."""
    return tag["end"] if isinstance(tag["end"], list) else [tag["end"]]


def is_open(node: dict[str, Any]) -> bool:
    """True if the end of a format's text shows only by what follows: the tag around it keeps its ends out of it."""
    if node["type"] in ("any_text", "triggered_tags"):
        return True
    repeated = node["type"] in ("optional", "star", "plus", "repeat")
    below = node.get("elements", [node["content"]] if repeated else [])
    return any(is_open(item) for item in below)
