"""The notation of xgrammar's EBNF: schemas become rules, which may refer to each other and to themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping

from phloem.errors import RequestError

from . import _json_regex as rx
from ._ebnf_regex import Writer, counted_in_json, found_in_json, generated
from ._notation import Facets, Layout, Notation
from ._string_automaton import Product, product
from ._width import span

_LABEL = "[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,20}){0,2}"  # at most 62 of 63 characters, and no two hyphens together
_NAME = "[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"
_LOCAL = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_PLAIN = r'[^"\\\x00-\x1f]'
_NOTHING = '""'
_SHORT = 40  # texts up to this are no rules of their own


class Ebnf(Notation):
    """One grammar under construction. `rules` are complete when the writer is done; `root` adds the first one."""

    backend = "xgrammar"
    recursive = combines = True
    # Room costs nothing here, as it does in an automaton.
    formats: Mapping[str, str] = {
        **rx.FORMATS,
        "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,3}}",
        "email": rf"{_LOCAL}(?:\.{_LOCAL})*@{_NAME}(?:\.{_NAME})+",
    }
    max_count = 10_000
    max_nodes = 100_000
    max_text = 50_000_000

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Without a rule."""
        self.rules: dict[str, str] = {}
        self._names: dict[str, str] = {}  # of rules by what they are
        self._count = 0
        self._regexes: dict[str, str] = {}

    def source(self, root: str) -> str:
        """The whole grammar, whose texts are those of `root`."""
        return "\n".join(f"{name} ::= {body}" for name, body in {"root": root or _NOTHING, **self.rules}.items())

    def literal(self, text: str) -> str:
        """Raises UnicodeEncodeError for half of a surrogate pair."""
        text.encode()
        return f'"{"".join(map(_escaped, text))}"' if text else ""

    def regex(self, pattern: str) -> str:
        """Translated once."""
        if pattern not in self._regexes:
            self._regexes[pattern] = self.shared(generated(pattern))
        return self._regexes[pattern]

    def text(self, facets: Facets, param: str, where: str = "") -> str | None:
        """One thing is written as it is, of several an automaton is made that follows them together."""
        pattern, form, least, most = facets
        if pattern is not None and form is None and not least and most is None:
            try:
                return super().text(facets, param, where)
            except RequestError:
                if "(?" not in pattern:  # look-ahead, perhaps
                    raise
        elif pattern is None and (form is None or (not least and most is None)):
            return super().text(facets, param, where)
        if pattern is not None and form is None and (whole := self._counted(pattern, least, most)) is not None:
            return f'"\\""{whole}"\\""'
        patterns = [pattern] if pattern is not None else []
        if form is not None:
            low, high = span(self.formats[form])
            if least <= low and (most is None or high <= most) and not patterns:
                return super().text(Facets(format=form), param, where)
            patterns.append(f"^(?:{self.formats[form]})$")
        try:
            re.compile(pattern or "")
            made = product(patterns, least, most)
        except (re.error, OverflowError, RecursionError) as error:
            raise RequestError(f"{where}not a regular expression: {error}", param=param) from None
        except RequestError as error:
            raise RequestError(f"{where}{error.message}", hint=error.hint, param=param) from None
        return None if made is None else f'"\\""{self._automaton(made)}"\\""'

    def _counted(self, pattern: str, least: int, most: int | None) -> str | None:
        try:
            found_in_json(pattern, "")
        except RequestError:
            return None
        found = counted_in_json(pattern, least, most)
        return None if found is None else self.shared(found)

    def _automaton(self, made: Product) -> str:
        """A rule for each state."""
        names = [self.named() for _ in made.edges]
        write = Writer("", "", 0, in_json=True).char
        for name, edges, final in zip(names, made.edges, made.final, strict=True):
            options = [f"{write(ranges)} {names[target]}" for ranges, target in edges]
            self.define(name, " | ".join([*options, *([_NOTHING] if final else [])]))
        return names[0]

    def pattern(self, pattern: str, param: str, where: str = "") -> str:
        """Characters that JSON must escape are written escaped."""
        return self.shared(found_in_json(pattern, param, where))

    def group(self, text: str) -> str:
        """Parentheses; a group of nothing is the empty text."""
        return f"({text or _NOTHING})"

    def shared(self, text: str) -> str:
        """A rule, the same for equal texts."""
        if len(text) <= _SHORT:
            return self.group(text)
        if text not in self._names:
            self._names[text] = self.define(f"part_{len(self._names)}", text)
        return self._names[text]

    def tail(self, text: str) -> str:
        """A rule for each, so that the whole grows only with the number of members."""
        return self.shared(text)

    def named(self) -> str:
        """Parentheses keep it apart from what it is joined to."""
        self._count += 1
        return f"(schema_{self._count})"

    def define(self, name: str, text: str) -> str:
        """The rule of this name, given with its parentheses or without, is `text`."""
        name = name.strip("()")
        self.rules[name] = text or _NOTHING
        return f"({name})"

    def string(self, least: int, most: int | None) -> str:
        """Free strings as xgrammar's own grammar of JSON has them: quick masks.

        Counted characters are never escaped: counting a choice takes the library a thousand times as long.
        """
        if least or most is not None:
            return f'"\\""{self.repeated(_PLAIN, least, most)}"\\""'
        if "string" not in self.rules:
            self.rules["escape"] = r'["\\/bfnrt] | "u00" [01] [0-9a-fA-F]'
            self.rules["chars"] = r'"\"" | [^"\\\x00-\x1f] chars | "\\" escape chars'
        return self.define("string", r'"\"" chars')

    def any_value(self, layout: Layout) -> str:
        """Nested as deep as it likes."""
        if "any" not in self.rules:
            self.rules["any"] = ""  # refers to itself
            nested = [self.any_object(layout), layout.array(layout.listed("(any)", 0, None), True)]
            self.rules["any"] = " | ".join([*nested, self.string(0, None), self.regex(rx.NUMBER), _WORDS])
        return "(any)"

    def any_object(self, layout: Layout) -> str:
        """An object of such values."""
        if "any_object" not in self.rules:
            self.rules["any_object"] = ""
            value = self.any_value(layout)
            member = f"{self.string(0, None)}{layout.colon}{value}"
            self.rules["any_object"] = layout.object(layout.listed(member, 0, None), True)
        return "(any_object)"


_WORDS = '"true" | "false" | "null"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    return char if " " <= char <= "~" else f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"
