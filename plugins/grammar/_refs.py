"""Finds what a `$ref` of a JSON schema points to, inside that schema."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import unquote


class Place(NamedTuple):
    """A schema, and the JSON pointer to it."""

    schema: Any
    pointer: str


class References:
    """The references of one schema. Each look-up walks one pointer; anchors are collected once."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def resolve(self, reference: Any) -> Place | None:
        """The schema that a reference names; None for other documents, and for places that do not exist."""
        if not isinstance(reference, str):
            return None
        base = self.root.get("$id", self.root.get("id")) if isinstance(self.root, dict) else None
        if isinstance(base, str) and base and reference.startswith(base.rstrip("#")):
            reference = "#" + reference[len(base.rstrip("#")) :].removeprefix("#")
        if reference == "#":
            return Place(self.root, "#")
        if reference.startswith("#/"):
            return self._walk(reference)
        return self._anchors.get(reference)

    def chase(self, schema: Any) -> Any:
        """The schema itself, or what it refers to where it is nothing but a reference, through any number of them."""
        for _ in range(100):  # a circle of references constrains nothing
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            place = self.resolve(schema["$ref"])
            if place is None:
                return schema
            schema = place.schema
        return schema

    def _walk(self, reference: str) -> Place | None:
        at = self.root
        for part in unquote(reference[2:]).split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(at, dict) and name in at:
                at = at[name]
            elif isinstance(at, list) and name.isdecimal() and int(name) < len(at):
                at = at[int(name)]
            else:
                return None
        return Place(at, reference)

    @cached_property
    def _anchors(self) -> dict[str, Place]:
        """Names that `$anchor`, and `$id` with a fragment, give to places."""
        found: dict[str, Place] = {}
        todo = [Place(self.root, "#")]
        while todo:
            at, pointer = todo.pop()
            if isinstance(at, dict):
                names = ["#" + str(at["$anchor"])] if isinstance(at.get("$anchor"), str) else []
                names += [at["$id"]] if isinstance(at.get("$id"), str) else []
                found.update((name, Place(at, pointer)) for name in names)
            inside = at.items() if isinstance(at, dict) else enumerate(at) if isinstance(at, list) else ()
            todo += [Place(value, f"{pointer}/{escape(str(key))}") for key, value in inside]
        return found


def escape(key: str) -> str:
    """A key as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")
