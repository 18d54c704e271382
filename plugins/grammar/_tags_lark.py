"""A structural tag as a Lark grammar for llguidance: the same language that xgrammar gives the tag."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from phloem.constraint import Constraint

from . import _lexemes, _tags
from ._json_lark import json_rule
from ._lark import HEADER
from ._lexemes import ANY, Ambiguous, Piece
from ._regex import literal, translate

_NUMBER_MORE = r"[0-9.eE+\-]"  # what may follow within a number
_FIRST = {
    "object": r"\{",
    "array": r"\[",
    "string": '"',
    "boolean": "[tf]",
    "null": "n",
    "integer": r"[\-0-9]",
    "number": r"[\-0-9]",
}


def tag_source(constraint: Constraint, special: Mapping[str, int], vocabulary: int) -> str:
    """The grammar of a structural tag. `special`: special tokens by their texts; `vocabulary`: number of ids.

    Literals are written as the model's tokenizer would: a special token's text is that token. Raises
    RequestError(param="structural_tag") with a pointer, also where llguidance would find only a part of the texts.
    """
    writer = _Writer(constraint, special, vocabulary)
    tree, at = _tags.parse_at(constraint.value)
    start = _lexemes.render(writer.format(tree, at, ()), writer.name)
    return "\n".join([HEADER, f"start: {start}", *(f"{name}: {body}" for body, name in writer.names.items())])


class _Writer:
    """One method per format: takes its node, its pointer, and the ends that its open text must not hold."""

    def __init__(self, constraint: Constraint, special: Mapping[str, int], vocabulary: int) -> None:
        self.constraint, self.special, self.vocabulary = constraint, special, vocabulary
        self.names: dict[str, str] = {}  # source of a terminal or rule -> its name
        longest_first = sorted(special, key=len, reverse=True)
        self.splitter = re.compile("|".join(map(re.escape, longest_first))) if special else None

    def name(self, source: str) -> str:
        """A terminal for a source."""
        return self.names.setdefault(source, f"T{len(self.names)}")

    def join(self, pieces: Sequence[Piece], at: str) -> Piece:
        with _telling(at):
            return _lexemes.sequence(pieces)

    def one_of(self, pieces: Sequence[Piece], at: str) -> Piece:
        with _telling(at):
            return _lexemes.choice(pieces)

    def repeated(self, piece: Piece, least: int, most: int | None, at: str) -> Piece:
        with _telling(at):
            return _lexemes.repeat(piece, least, most)

    def format(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> Piece:
        """Any format, by its type."""
        make = getattr(self, f"_{node['type'].rstrip('_')}_" if node["type"] == "or" else f"_{node['type']}")
        piece: Piece = make(node, at, ends)
        return piece

    def text(self, text: str) -> Piece:
        """A literal; the texts of special tokens in it are these tokens."""
        pieces, at = [], 0
        for match in self.splitter.finditer(text) if self.splitter else ():
            pieces += [_lexemes.const(text[at : match.start()]), _lexemes.rule(f"<[{self.special[match[0]]}]>")]
            at = match.end()
        return _lexemes.sequence([*pieces, _lexemes.const(text[at:])])

    def _const_string(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> Piece:
        return self.text(node["value"])

    def _token(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> Piece:
        token = node["token"]
        number = self.special.get(token) if isinstance(token, str) else token
        if number is None or not 0 <= number < self.vocabulary:
            raise _tags.refuse(f"{at}/token", f"{token!r} is not a special token of this model")
        return _lexemes.rule(f"<[{number}]>")

    def _json_schema(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> Piece:
        schema = node["json_schema"]
        source = json_rule(schema, self.constraint)
        rule = self.names.setdefault(source, f"j{len(self.names)}")
        types = schema.get("type", list(_FIRST)) if isinstance(schema, dict) else list(_FIRST)
        types = types if isinstance(types, list) else [types]
        first = "|".join(_FIRST[name] for name in types if name in _FIRST)
        numeric = {"number", "integer"} & set(map(str, types))
        return _lexemes.rule(rule, first, _NUMBER_MORE if numeric else "")

    def _regex(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> Piece:
        translation = translate(node["pattern"], self.constraint.kind, f"{at}/pattern: ")
        return _lexemes.regex(translation.rust, translation.alphabet)

    def _any_text(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> Piece:
        return _free_text([*node["excludes"], *ends], node["max_chars"])

    def _sequence(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> Piece:
        return self.join(self._elements(node, at, ends), at)

    def _or_(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> Piece:
        return self.one_of(self._elements(node, at, ends), at)

    def _elements(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> list[Piece]:
        return [self.format(item, f"{at}/elements/{i}", ends) for i, item in enumerate(node["elements"])]

    def _optional(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> Piece:
        return self.repeated(self.format(node["content"], f"{at}/content", ends), 0, 1, at)

    def _star(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> Piece:
        return self.repeated(self.format(node["content"], f"{at}/content", ends), 0, None, at)

    def _plus(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> Piece:
        return self.repeated(self.format(node["content"], f"{at}/content", ends), 1, None, at)

    def _repeat(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> Piece:
        content = self.format(node["content"], f"{at}/content", ends)
        return self.repeated(content, node["min"], None if node["max"] < 0 else node["max"], at)

    def _tag(self, node: dict[str, Any], at: str, ends: Sequence[str], after: int = 0) -> Piece:
        """`after`: characters of the begin that were written before, with the trigger."""
        begin = node["begin"]
        opening = self.text(begin[after:]) if isinstance(begin, str) else self.format(begin, f"{at}/begin", ())
        own = _tags.ends_of(node)
        content = self.format(node["content"], f"{at}/content", [end for end in own if isinstance(end, str) and end])
        closing = [self.text(end) if isinstance(end, str) else self.format(end, f"{at}/end", ()) for end in own]
        return self.join([opening, content, self.one_of(closing, at)], at)

    def _tags_with_separator(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> Piece:
        tag = self._one_tag(node, at)
        if not node["stop_after_first"]:
            further = self.repeated(self.join([self.text(node["separator"]), tag], at), 0, None, at)
            tag = self.join([tag, further], at)
        return tag if node["at_least_one"] else self.repeated(tag, 0, 1, at)

    def _one_tag(self, node: dict[str, Any], at: str) -> Piece:
        return self.one_of([self._tag(tag, f"{at}/tags/{i}", ()) for i, tag in enumerate(node["tags"])], at)

    def _triggered_tags(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> Piece:
        """Text up to the first trigger, then one of its tags, again and again; then text without a trigger."""
        if node["at_least_one"] and node["stop_after_first"]:
            return self._one_tag(node, at)
        barred = [*node["excludes"], *ends]
        plain = [trigger for trigger in node["triggers"] if not self._splits(trigger)]
        # No text up to a trigger hides another one, nor text without: all end where the first trigger does.
        heads = [self._triggered(node, at, trigger, plain, barred) for trigger in node["triggers"]]
        triggered, tail = _lexemes.choice(heads, apart=True), _free_text([*plain, *barred])
        if node["stop_after_first"]:
            return _lexemes.choice([triggered, tail], apart=True)
        with _telling(at):
            loop = [_lexemes.repeat(triggered, 0, None, apart=True), tail]
        return self.join([self._one_tag(node, at), *loop] if node["at_least_one"] else loop, at)

    def _triggered(
        self, node: dict[str, Any], at: str, trigger: str, plain: Sequence[str], barred: Sequence[str]
    ) -> Piece:
        """Text that ends with its first trigger, which is this one, then the rest of one of its tags."""
        tags = []
        for i, tag in enumerate(node["tags"]):
            if tag["begin"].startswith(trigger):
                if self._splits(tag["begin"][: len(trigger)]) != self._splits(tag["begin"], len(trigger)):
                    raise _tags.refuse(f"{at}/tags/{i}/begin", "its trigger ends within a special token")
                tags.append(self._tag(tag, f"{at}/tags/{i}", (), len(trigger)))
        first = self._splits(trigger)
        if first:
            until = _text_until(trigger[: first[0][0]], plain, barred)
            head = self.join([until, self.text(trigger[first[0][0] :])], at)
        else:
            head = _text_until(trigger, plain, barred)
        return self.join([head, self.one_of(tags, at)], at)

    def _splits(self, text: str, within: int | None = None) -> list[tuple[int, int]]:
        """Where special tokens lie in a text, those that begin before `within`."""
        found = [match.span() for match in self.splitter.finditer(text)] if self.splitter else []
        return [span for span in found if within is None or span[0] < within]


@contextmanager
def _telling(at: str) -> Iterator[None]:
    """Ambiguity is refused with the place."""
    try:
        yield
    except Ambiguous:
        why = "llguidance cannot tell where one part ends and the next begins; xgrammar can"
        raise _tags.refuse(at, why) from None


def _free_text(barred: Sequence[str], most: int | None = None) -> Piece:
    """Any text without some texts in it, of at most `most` characters."""
    text = "/(?s:.)*/" if most is None else f"/(?s:.){{0,{most}}}/"
    if barred:
        text = f"({text} & ~/(?s:.*)(?:{_any_of(barred)})(?s:.*)/)"
    return Piece(text, head=text, lacks=frozenset(barred))


def _text_until(trigger: str, triggers: Sequence[str], barred: Sequence[str]) -> Piece:
    """Text that ends with a trigger and has none before; of triggers that end together the longest counts.

    Where `trigger` is no trigger but what lies before a special token, only that token ends the text.
    """
    whole = trigger in triggers
    text = f"/(?s:.*){literal(trigger)}/"
    inside = [*triggers, *barred]
    at_end = [*barred, *(other for other in triggers if whole and other != trigger and other.endswith(trigger))]
    if inside:
        text += f" & ~/(?s:.*)(?:{_any_of(inside)})(?s:.+)/"
    if at_end:
        text += f" & ~/(?s:.*)(?:{_any_of(at_end)})/"
    return Piece(f"({text})", more="" if whole else ANY, nullable=not trigger, head=text)


def _any_of(texts: Sequence[str]) -> str:
    return "|".join(map(literal, texts))
