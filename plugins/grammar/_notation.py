"""How the writer of schemas spells a language, and what stands between JSON's parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from . import _json_regex as rx
from ._json_pattern import pattern_regex
from ._regex import literal

ANY_DEPTH = 2  # arrays and objects within a value of which the schema says nothing


class Facets(NamedTuple):
    """What a schema says of a string. `format` is one that the notation has."""

    pattern: str | None = None
    format: str | None = None
    least: int = 0  # characters
    most: int | None = None


class Notation:
    """A regular expression in the syntax of Rust's `regex` crate: what outlines takes.

    Texts are joined by writing one behind the other; every method returns one that can be joined. A grammar is another
    notation, and overrides what differs; it also has rules, so that a part may be named and refer to itself.
    """

    backend = "outlines"
    recursive = False
    combines = False  # facets of a string are enforced together
    formats: Mapping[str, str] = rx.FORMATS
    max_count: int | None = None  # of items, characters or members that a bound may name
    max_nodes = 5000  # schemas written out, references followed
    max_text = 2_000_000  # characters that all of them have, those of parts counted again in the whole

    def literal(self, text: str) -> str:
        """A text as it is."""
        return literal(text)

    def regex(self, pattern: str) -> str:
        """What one of `_json_regex`'s expressions matches."""
        return pattern

    def pattern(self, pattern: str, param: str, where: str = "") -> str:
        """What may stand between the quotes of a string that holds a match. Raises RequestError(param=param)."""
        return pattern_regex(pattern, param, where)

    def text(self, facets: Facets, param: str, where: str = "") -> str | None:
        """A JSON string of which these hold, quotes included; None if there is none. Raises RequestError.

        Here a format wins over a pattern, and a pattern over lengths.
        """
        quote = self.literal('"')
        if facets.format is not None:
            return f"{quote}{self.regex(self.formats[facets.format])}{quote}"
        if facets.pattern is not None:
            return f"{quote}{self.pattern(facets.pattern, param, where)}{quote}"
        least, most = facets.least, facets.most
        return None if most is not None and most < least else self.string(least, most)

    def group(self, text: str) -> str:
        """Keeps alternatives in `text` to themselves."""
        return f"(?:{text})"

    def shared(self, text: str) -> str:
        """As `group`, for a text that is written several times."""
        return self.group(text)

    def tail(self, text: str) -> str:
        """What follows a member of an object: written behind all members before."""
        return text

    def named(self) -> str:
        """A new name for `define`; only where the notation is recursive."""
        raise NotImplementedError

    def define(self, name: str, text: str) -> str:
        """Gives a name its text, and returns what refers to it."""
        raise NotImplementedError

    def restart(self) -> None:
        """Forgets all names."""

    def string(self, least: int, most: int | None) -> str:
        """A JSON string of so many characters, quotes included."""
        return rx.string(least, most)

    def any_value(self, layout: Layout) -> str:
        """A value of which a schema says nothing."""
        return _any_value(layout, ANY_DEPTH)

    def any_object(self, layout: Layout) -> str:
        """An object of such values."""
        return _any_object(layout, ANY_DEPTH)

    def any_of(self, parts: Sequence[str | None]) -> str | None:
        """One of them; None is a language without a text."""
        found = list(dict.fromkeys(part for part in parts if part is not None))
        if not found:
            return None
        return found[0] if len(found) == 1 else self.group("|".join(found))

    def repeated(self, part: str, least: int, most: int | None) -> str:
        """`least` to `most` times, None is without bound."""
        if most == 0:
            return ""
        signs = {(0, 1): "?", (0, None): "*", (1, None): "+", (1, 1): ""}
        return self.group(part) + signs.get((least, most), f"{{{least},{'' if most is None else most}}}")


class Layout:
    """What stands between JSON's parts."""

    def __init__(self, whitespace: str, notation: Notation) -> None:
        """`compact`: one space after a comma and a colon. `flexible`: at most 8 characters wherever JSON has them."""
        flexible = whitespace == "flexible"
        self.notation = notation
        self.edge = notation.regex(r"[ \t\n\r]{0,8}") if flexible else ""  # inside brackets
        self.comma, self.colon = (
            f"{self.edge}{notation.literal(mark)}{self.edge}" if flexible else notation.literal(f"{mark} ")
            for mark in ",:"
        )

    def value(self, value: Any) -> str:
        """A value that is given, its strings spelled in one way."""
        if isinstance(value, dict):
            write = self.notation.literal
            members = [f"{write(rx.dumps(key))}{self.colon}{self.value(item)}" for key, item in value.items()]
            return self.object(self.comma.join(members), not members)
        if isinstance(value, list):
            return self.array(self.comma.join(map(self.value, value)), not value)
        return self.notation.literal(rx.dumps(value))

    def object(self, members: str, empty: bool) -> str:
        """What lies between braces; `empty`: it may be nothing. No members, "", are nothing only."""
        return self._enclosed("{", members, empty, "}")

    def array(self, items: str, empty: bool) -> str:
        """What lies between brackets."""
        return self._enclosed("[", items, empty, "]")

    def _enclosed(self, opening: str, body: str, empty: bool, closing: str) -> str:
        write = self.notation
        inner = f"{body}{self.edge}" if body else ""
        inside = f"{write.group(inner)}?" if inner and empty else inner
        return f"{write.literal(opening)}{self.edge}{inside}{write.literal(closing)}"

    def listed(self, item: str, least: int, most: int | None) -> str:
        """`least`, and once at least, to `most` times the same, with commas; None is without bound, 0 gives ""."""
        if most == 0:
            return ""
        rest = None if most is None else most - 1
        return item + self.notation.repeated(f"{self.comma}{item}", max(least - 1, 0), rest)


def _any_value(layout: Layout, depth: int) -> str:
    """A value of any type, with at most `depth` arrays and objects within each other.

    It is written out at each of its places, and counting digits there would multiply the states of the automaton.
    """
    nested = [] if depth == 0 else [_any_array(layout, depth), _any_object(layout, depth)]
    return f"(?:{'|'.join(['null|true|false', rx.ENDLESS_NUMBER, rx.string(0, None), *nested])})"


def _any_array(layout: Layout, depth: int) -> str:
    return layout.array(layout.listed(_any_value(layout, depth - 1), 0, None), True)


def _any_object(layout: Layout, depth: int) -> str:
    member = f"{rx.string(0, None)}{layout.colon}{_any_value(layout, depth - 1)}"
    return layout.object(layout.listed(member, 0, None), True)
