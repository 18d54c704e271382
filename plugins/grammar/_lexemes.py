"""Pieces of a grammar for llguidance's parser, joined so that its lexer loses no reading of a text.

The library reads a text as lexemes (regular languages), each as long as possible, under context-free rules. So what is
regular is joined into one lexeme, which is exact; and where a lexeme could swallow the beginning of what follows it,
joining raises Ambiguous, since some texts of the language would never be found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

ANY = "(?s:.)"  # patterns of single characters, for Python's `re`; "" is none
# Characters on which patterns are compared: all Latin ones, and some of each larger class.
_SAMPLE = [chr(c) for c in range(0x250)] + list("Жمא٣世ー\u2003\u3000\ufffd😀")


class Ambiguous(Exception):
    """What is joined has texts that a lexer of longest matches would not find."""


class Piece(NamedTuple):
    """A language: of one lexeme where `regular` (`source` is that of a Lark terminal), else of a rule."""

    source: str
    regular: bool = True
    first: str = ANY  # characters that a text of it may begin with
    more: str = ANY  # characters by which a match of its last lexeme may be extended to a longer one
    nullable: bool = True
    const: str | None = None  # the only text of it
    lead: str = ""  # a literal that every text of it, but the empty one, begins with
    after: str = ANY  # characters that may follow that literal in it
    whole: bool = True  # the literal may be all of it: then what comes behind may follow the literal too
    head: str = ""  # source of its first lexeme
    alphabet: str = ANY  # characters that a text of it may hold
    lacks: frozenset[str] = frozenset()  # texts that lie nowhere within a text of it
    kind: str = ""  # of a rule with parts: "sequence", "choice" or "repeat", whose `source` is the sign behind it
    parts: tuple[Piece, ...] = ()
    apart: bool = False  # its first lexemes hide nothing of what is put behind it


def const(text: str) -> Piece:
    """Exactly this text."""
    quoted = "".join(c if c.isprintable() and c not in '"\\' else _escape(c) for c in text)
    alphabet = _union([re.escape(char) for char in text])
    return Piece(f'"{quoted}"', True, re.escape(text[:1]), "", not text, text, text, "", True, f'"{quoted}"', alphabet)


def regex(rust: str, alphabet: str) -> Piece:
    """A regular expression in Rust's syntax, and a pattern (for `re`) of all characters in it."""
    source = f"/{rust}/"
    return Piece(source, True, alphabet, alphabet, head=source, alphabet=alphabet)


def rule(source: str, first: str = "", more: str = "") -> Piece:
    """A part that only the parser can follow, and that is never empty."""
    return Piece(source, False, first, more, False, head=source)


def sequence(pieces: Sequence[Piece]) -> Piece:
    """One after the other. Raises Ambiguous."""
    joined: list[Piece] = []
    for piece in (part for each in pieces for part in (each.parts if each.kind == "sequence" else [each])):
        last = joined[-1] if joined else const("")
        if piece.const == "":
            continue
        if joined and last.regular and piece.regular:
            joined[-1] = _regular_sequence(last, piece)
        elif last.kind == "choice" and piece.const and meets(last.more, piece.first):
            joined[-1] = choice([sequence([option, piece]) for option in last.parts], apart=last.apart)
        else:
            joined.append(piece)
    if len(joined) <= 1:
        return joined[0] if joined else const("")
    for i, piece in enumerate(joined[:-1]):
        if meets(piece.more, _first(joined[i + 1 :])):
            raise Ambiguous
        if piece.nullable and not piece.regular and not piece.apart:
            _distinct([piece, joined[i + 1]])
    begin, last = joined[0], joined[-1]
    return Piece(
        "",
        False,
        _first(joined),
        last.more if not last.nullable else _union([last.more, joined[-2].more]),
        all(piece.nullable for piece in joined),
        lead="" if begin.nullable else begin.lead,
        after=_union([begin.after, _first(joined[1:])]) if begin.whole else begin.after,
        whole=begin.whole and all(piece.nullable for piece in joined[1:]),
        head=begin.head,
        kind="sequence",
        parts=tuple(joined),
    )


def choice(pieces: Sequence[Piece], apart: bool = False) -> Piece:
    """One of them. `apart`: the caller knows that no lexeme hides another. Raises Ambiguous."""
    options = [part for each in pieces for part in (each.parts if each.kind == "choice" else [each])]
    if len(options) == 1:
        return options[0]
    regular = all(piece.regular for piece in options)
    if not regular and not apart:
        _distinct(options)
    source = f"({' | '.join(piece.source for piece in options)})" if regular else ""
    lead = _common([piece.lead for piece in options])
    following = [re.escape(piece.lead[len(lead)]) if piece.lead != lead else piece.after for piece in options]
    return Piece(
        source,
        regular,
        _union([piece.first for piece in options]),
        _more_of_choice(options, regular),
        any(piece.nullable for piece in options),
        lead=lead,
        after=_union(following),
        whole=any(piece.whole and piece.lead == lead for piece in options),
        head=source or " | ".join(piece.head for piece in options),
        alphabet=_union([piece.alphabet for piece in options]),
        kind="" if regular else "choice",
        parts=() if regular else tuple(options),
        apart=apart,
    )


def repeat(piece: Piece, least: int, most: int | None, apart: bool = False) -> Piece:
    """`least` to `most` times, None is without bound. Raises Ambiguous."""
    if most == 0 or piece.const == "":
        return const("")
    if not piece.regular and meets(piece.more, piece.first) and most != 1:
        raise Ambiguous
    signs = {(0, 1): "?", (0, None): "*", (1, None): "+", (1, 1): ""}
    sign = signs.get((least, most), f"{{{least},{'' if most is None else most}}}")
    nullable = least == 0 or piece.nullable
    if not piece.regular:
        return piece._replace(source=sign, nullable=nullable, kind="repeat", parts=(piece,), apart=apart)
    source, more = f"({piece.source}){sign}", piece.more if most == 1 else _union([piece.more, piece.first])
    return Piece(source, True, piece.first, more, nullable, None, piece.lead, ANY, True, source, piece.alphabet)


def render(piece: Piece, name: Callable[[str], str]) -> str:
    """A piece in a rule of Lark. `name` gives the name of a terminal with a source."""
    if piece.regular:
        return name(piece.source)
    parts = [render(part, name) for part in piece.parts]
    if piece.kind == "choice":
        return f"({' | '.join(parts)})"
    return f"({' '.join(parts)}){piece.source if piece.kind == 'repeat' else ''}" if parts else piece.source


def _more_of_choice(options: Sequence[Piece], regular: bool) -> str:
    texts = [piece.const for piece in options if piece.const is not None]
    if not regular:
        return _union([piece.more for piece in options])
    if len(texts) < len(options):
        return ANY
    longer = {b[len(a)] for a in texts for b in texts if b != a and b.startswith(a)}
    return _union([re.escape(char) for char in sorted(longer)])


@cache
def meets(a: str, b: str) -> bool:
    """True if some character matches both patterns."""
    if not a or not b:
        return False
    left, right = re.compile(a), re.compile(b)
    return any(left.fullmatch(c) and right.fullmatch(c) for c in [*_SAMPLE, *a, *b])


def overlaps_itself(text: str) -> bool:
    """True if a proper beginning of a text is also an end of it."""
    return any(text.startswith(text[i:]) for i in range(1, len(text)))


def _regular_sequence(a: Piece, b: Piece) -> Piece:
    if a.const is not None and b.const is not None:
        return const(a.const + b.const)
    end = b.const or ""
    # Text up to an end that it lacks cannot go on behind that end.
    closed = end != "" and ((end in a.lacks and not overlaps_itself(end)) or not meets(a.alphabet, re.escape(end[0])))
    source = f"{a.source} {b.source}"
    joined = Piece(
        source,
        True,
        _union([a.first, b.first]) if a.nullable else a.first,
        "" if closed else b.more if a.more == "" else ANY,
        a.nullable and b.nullable,
        head=source,
        alphabet=_union([a.alphabet, b.alphabet]),
    )
    if a.const is not None:
        joined = joined._replace(lead=a.const + b.lead, after=b.after if b.lead else b.first, whole=b.nullable)
    elif not a.nullable:
        joined = joined._replace(lead=a.lead, after=a.after)
    return joined._replace(lacks=b.lacks) if a.more == "" else joined


def _distinct(pieces: Sequence[Piece]) -> None:
    """Raises Ambiguous where the first lexeme of one piece could hide that of another."""
    for i, a in enumerate(pieces):
        for b in pieces[i + 1 :]:
            if not meets(a.first, b.first):
                continue
            if not a.lead or not b.lead:
                raise Ambiguous
            short, long = sorted((a, b), key=lambda piece: len(piece.lead))
            if not long.lead.startswith(short.lead) or a.head == b.head:
                continue
            rest = long.lead.removeprefix(short.lead)
            if meets(short.after, re.escape(rest[0]) if rest else long.after):
                raise Ambiguous


def _common(texts: Sequence[str]) -> str:
    """What all texts begin with."""
    low, high = min(texts), max(texts)
    return low[: next((i for i, char in enumerate(low) if high[i] != char), len(low))]


def _first(pieces: Sequence[Piece]) -> str:
    """Characters that a sequence may begin with."""
    found = []
    for piece in pieces:
        found.append(piece.first)
        if not piece.nullable:
            break
    return _union(found)


def _union(patterns: Sequence[str]) -> str:
    given = sorted({pattern for pattern in patterns if pattern})
    return ANY if ANY in given else "|".join(given)


def _escape(char: str) -> str:
    """A character in a Lark string; those beyond U+FFFF, which have no such escape there, stay as they are."""
    return json.dumps(char)[1:-1] if char < "\U00010000" else char
