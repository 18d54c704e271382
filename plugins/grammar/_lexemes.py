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
    """A language: `source` is a Lark expression, of a terminal where `regular`, else of a rule."""

    source: str
    regular: bool = True
    first: str = ANY  # characters that a text of it may begin with
    more: str = ANY  # characters by which a match of its last lexeme may be extended to a longer one
    nullable: bool = True
    const: str | None = None  # the only text of it
    lead: str = ""  # a literal that every text of it, but the empty one, begins with
    after: str = ANY  # characters that may follow that literal
    head: str = ""  # source of its first lexeme
    alphabet: str = ANY  # characters that a text of it may hold
    lacks: frozenset[str] = frozenset()  # texts that lie nowhere within a text of it


def const(text: str) -> Piece:
    """Exactly this text."""
    quoted = "".join(c if c.isprintable() and c not in '"\\' else _escape(c) for c in text)
    alphabet = _union([re.escape(char) for char in text])
    return Piece(f'"{quoted}"', True, re.escape(text[:1]), "", not text, text, text, "", f'"{quoted}"', alphabet)


def regex(rust: str, alphabet: str) -> Piece:
    """A regular expression in Rust's syntax, and a pattern (for `re`) of all characters in it."""
    source = f"/{rust}/"
    return Piece(source, True, alphabet, alphabet, head=source, alphabet=alphabet)


def rule(source: str, first: str = "", more: str = "") -> Piece:
    """A part that only the parser can follow, and that is never empty."""
    return Piece(source, False, first, more, False, head=source)


def sequence(pieces: Sequence[Piece], name: Callable[[str], str]) -> Piece:
    """One after the other. `name` gives a terminal's name for its source."""
    joined: list[Piece] = []
    for piece in pieces:
        if piece.const == "":
            continue
        if joined and joined[-1].regular and piece.regular:
            joined[-1] = _regular_sequence(joined[-1], piece)
        else:
            joined.append(piece)
    if not joined:
        return const("")
    if len(joined) == 1:
        return joined[0]
    for i, piece in enumerate(joined[:-1]):
        follows = _first(joined[i + 1 :])
        if meets(piece.more, follows):
            raise Ambiguous
        if piece.nullable and not piece.regular:
            _distinct([piece, joined[i + 1]])
    begin, last = joined[0], joined[-1]
    return Piece(
        f"({' '.join(atom(piece, name) for piece in joined)})",
        False,
        _first(joined),
        last.more if not last.nullable else _union([last.more, joined[-2].more]),
        all(piece.nullable for piece in joined),
        lead="" if begin.nullable else begin.lead,
        after=_union([begin.after, _first(joined[1:])]),
        head=begin.head,
    )


def choice(pieces: Sequence[Piece], name: Callable[[str], str]) -> Piece:
    """One of them."""
    if len(pieces) == 1:
        return pieces[0]
    regular = all(piece.regular for piece in pieces)
    source = " | ".join(piece.source if regular else atom(piece, name) for piece in pieces)
    texts = [piece.const for piece in pieces]
    if all(text is not None for text in texts):
        longer = {b[len(a)] for a in texts for b in texts if a is not None and b and b != a and b.startswith(a)}
        more = _union([re.escape(char) for char in sorted(longer)])
    else:
        more = ANY if regular else _union([piece.more for piece in pieces])
    if not regular:
        _distinct(pieces)
    first = _union([piece.first for piece in pieces])
    alphabet = _union([piece.alphabet for piece in pieces])
    nullable = any(piece.nullable for piece in pieces)
    return Piece(f"({source})", regular, first, more, nullable, head=source, alphabet=alphabet)


def repeat(piece: Piece, least: int, most: int | None, name: Callable[[str], str]) -> Piece:
    """`least` to `most` times, None is without bound."""
    if most == 0 or piece.const == "":
        return const("")
    if not piece.regular and meets(piece.more, piece.first) and most != 1:
        raise Ambiguous
    signs = {(0, 1): "?", (0, None): "*", (1, None): "+", (1, 1): ""}
    sign = signs.get((least, most), f"{{{least},{'' if most is None else most}}}")
    more = _union([piece.more, piece.first]) if piece.regular and most != 1 else piece.more
    source = f"({piece.source}){sign}"
    nullable, head = least == 0 or piece.nullable, source if piece.regular else piece.head
    return Piece(source, piece.regular, piece.first, more, nullable, None, piece.lead, ANY, head, piece.alphabet)


def atom(piece: Piece, name: Callable[[str], str]) -> str:
    """A piece as a part of a rule."""
    return name(piece.source) if piece.regular else piece.source


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
        return joined._replace(lead=a.const + b.lead, after=b.after if b.lead else b.first)
    return joined if a.nullable else joined._replace(lead=a.lead, after=a.after)


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
