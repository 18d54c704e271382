"""A structural tag as a regular expression, for outlines: the same language that xgrammar gives the tag."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from phloem.constraint import Constraint

from . import _tags
from ._json_regex import any_of, repeated
from ._notation import Notation
from ._regex import literal, translate
from ._schema_writer import written
from ._text_regex import ANY, TooLongError, text_until, text_without


def tag_regex(constraint: Constraint, special: Iterable[str]) -> str:
    """The texts of a structural tag, in the syntax of Rust's `regex` crate. `special`: texts of special tokens.

    Raises RequestError(param="structural_tag") with a pointer; tokens that are no text cannot be asked for.
    """
    tree, at = _tags.parse_at(constraint.value)
    return _Writer(constraint, [text for text in special if text]).format(tree, at, ())


class _Writer:
    """One method per format: takes its node, its pointer, and the ends that its open text must not hold."""

    def __init__(self, constraint: Constraint, special: list[str]) -> None:
        self.constraint, self.special = constraint, special

    def format(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> str:
        """Any format, by its type."""
        written: str = getattr(self, f"_{node['type']}_")(node, at, ends)
        return written

    def text(self, text: str, at: str) -> str:
        """A literal."""
        if held := [one for one in self.special if one in text]:
            raise _tags.refuse(at, f"outlines writes text only, and {held[0]!r} is a special token")
        return literal(text)

    def _const_string_(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> str:
        return self.text(node["value"], f"{at}/value")

    def _token_(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> str:
        raise _tags.refuse(at, "outlines writes text only, no special tokens")

    def _json_schema_(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> str:
        return f"(?:{written(node['json_schema'], self.constraint, Notation(), _tags.written(f'{at}/json_schema'))})"

    def _regex_(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> str:
        return translate(node["pattern"], self.constraint.kind, f"{at}/pattern: ").rust

    def _any_text_(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> str:
        barred, most = [*node["excludes"], *ends], node["max_chars"]
        if most is None:
            return self.short(text_without, at, barred) or ""
        if barred:
            raise _tags.refuse(at, "outlines cannot both count the characters of a text and keep others out of it")
        return repeated(ANY, 0, most)

    def short(self, write: Callable[..., str | None], at: str, *texts: Any) -> str | None:
        try:
            return write(*texts)
        except TooLongError:
            raise _tags.refuse(at, "its texts overlap in too many ways for outlines") from None

    def _sequence_(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> str:
        return "".join(self._elements(node, at, ends))

    def _or_(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> str:
        return self.one_of(self._elements(node, at, ends))

    def one_of(self, parts: Sequence[str | None]) -> str:
        return any_of(parts) or ""

    def _elements(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> list[str]:
        return [self.format(item, f"{at}/elements/{i}", ends) for i, item in enumerate(node["elements"])]

    def _optional_(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> str:
        return repeated(self.format(node["content"], f"{at}/content", ends), 0, 1)

    def _star_(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> str:
        return repeated(self.format(node["content"], f"{at}/content", ends), 0, None)

    def _plus_(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> str:
        return repeated(self.format(node["content"], f"{at}/content", ends), 1, None)

    def _repeat_(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> str:
        content = self.format(node["content"], f"{at}/content", ends)
        return repeated(content, node["min"], None if node["max"] < 0 else node["max"])

    def _tag_(self, node: dict[str, Any], at: str, ends: Sequence[str], after: int = 0) -> str:
        """`after`: characters of the begin that were written before, with the trigger."""
        begin = node["begin"]
        if isinstance(begin, str):
            opening = self.text(begin, f"{at}/begin") and literal(begin[after:])
        else:
            opening = self.format(begin, f"{at}/begin", ())
        own = _tags.ends_of(node)
        content = self.format(node["content"], f"{at}/content", [end for end in own if isinstance(end, str) and end])
        closing = [
            self.text(end, f"{at}/end") if isinstance(end, str) else self.format(end, f"{at}/end", ()) for end in own
        ]
        return f"{opening}{content}{self.one_of(closing)}"

    def _tags_with_separator_(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> str:
        tag = self._one_tag(node, at)
        if not node["stop_after_first"]:
            tag += repeated(self.text(node["separator"], f"{at}/separator") + tag, 0, None)
        return tag if node["at_least_one"] else repeated(tag, 0, 1)

    def _one_tag(self, node: dict[str, Any], at: str) -> str:
        return self.one_of([self._tag_(tag, f"{at}/tags/{i}", ()) for i, tag in enumerate(node["tags"])])

    def _triggered_tags_(self, node: dict[str, Any], at: str, ends: Sequence[str]) -> str:
        """Text up to the first trigger, then one of its tags, again and again; then text without a trigger."""
        if node["at_least_one"] and node["stop_after_first"]:
            return self._one_tag(node, at)
        triggers, barred = node["triggers"], [*node["excludes"], *ends]
        triggered = any_of([self._triggered(node, at, trigger, barred) for trigger in triggers])
        tail = self.short(text_without, at, [*triggers, *barred]) or ""
        if node["stop_after_first"]:
            return self.one_of([triggered, tail])
        loop = tail if triggered is None else repeated(triggered, 0, None) + tail
        return self._one_tag(node, at) + loop if node["at_least_one"] else loop

    def _triggered(self, node: dict[str, Any], at: str, trigger: str, barred: Sequence[str]) -> str | None:
        """Text that ends with its first trigger, which is this one, then the rest of one of its tags."""
        tags = [
            self._tag_(tag, f"{at}/tags/{i}", (), len(trigger))
            for i, tag in enumerate(node["tags"])
            if tag["begin"].startswith(trigger)
        ]
        until = self.short(text_until, at, trigger, node["triggers"], barred)
        return None if until is None else until + self.one_of(tags)
