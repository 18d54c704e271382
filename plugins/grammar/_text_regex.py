"""Free text that lacks some texts, as a regular expression: the automaton that looks for them, written out.

The automaton is Aho and Corasick's (1975); it becomes an expression by eliminating its states, the deepest first
(Brzozowski and McCluskey, 1963). For markers such as `</tool_call>` the result is about as long as the markers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ._regex import literal

MAX_TEXT = 100_000  # characters of an expression; texts that repeat themselves make long ones
ANY = "(?s:.)"


class TooLongError(Exception):
    """The expression would have more than MAX_TEXT characters."""


_OTHER = ""  # stands for all characters that are in no marker


def text_without(barred: Sequence[str]) -> str:
    """Any text in which no barred one lies. Raises TooLongError."""
    return _written(_edges(barred, None), whole=True) or "" if barred else f"{ANY}*"


def text_until(marker: str, markers: Sequence[str], barred: Sequence[str]) -> str | None:
    """Text that ends with the first marker in it, of those that end together the longest; no barred text before.

    None where there is none. Raises TooLongError.
    """
    return _written(_edges([*markers, *barred], marker, barred), whole=False)


_Edges = dict[int, dict[int, str]]  # state -> next state -> characters or, later, texts; -1 is the end


def _edges(texts: Sequence[str], marker: str | None, barred: Sequence[str] = ()) -> _Edges:
    """The automaton's transitions, those into any of the texts left out, but for the `marker` (then to -1)."""
    states = sorted({text[:i] for text in texts for i in range(len(text) + 1)}, key=lambda state: (len(state), state))
    numbers = {state: i for i, state in enumerate(states)}
    letters = sorted({char for text in texts for char in text})
    edges: _Edges = {}
    for state in states:
        if any(state.endswith(text) for text in texts):
            continue
        groups: dict[int, list[str]] = defaultdict(list, {0: [_OTHER]})
        for char in letters:
            grown = state + char
            ended = [text for text in texts if grown.endswith(text)]
            if not ended:
                following = next(grown[i:] for i in range(len(grown) + 1) if grown[i:] in numbers)
                groups[numbers[following]].append(char)
            elif max(ended, key=len) == marker and not any(text in barred for text in ended):
                groups[-1].append(char)
        edges[numbers[state]] = {number: _class(chars, letters) for number, chars in groups.items()}
    return edges


def _class(chars: list[str], letters: list[str]) -> str:
    if _OTHER in chars:
        return (
            f"[^{''.join(literal(char) for char in letters if char not in chars)}]"
            if set(letters) - set(chars)
            else ANY
        )
    return literal(chars[0]) if len(chars) == 1 else f"[{''.join(map(literal, chars))}]"


def _written(edges: _Edges, whole: bool) -> str | None:
    """From state 0 to the end. `whole`: a text may end in every state."""
    if whole:
        for following in edges.values():
            following[-1] = ""
    for state in sorted(edges, reverse=True)[:-1]:
        gone = edges.pop(state)
        loop = _star(gone.pop(state, None))
        for following in edges.values():
            if (before := following.pop(state, None)) is not None:
                for target, after in gone.items():
                    text = f"{_group(before)}{loop}{_group(after)}"
                    following[target] = f"{following[target]}|{text}" if target in following else text
        if sum(len(text) for following in edges.values() for text in following.values()) > MAX_TEXT:
            raise TooLongError
    start = edges[0]
    return f"(?:{_star(start.get(0))}{_group(start[-1])})" if -1 in start else None


def _star(text: str | None) -> str:
    return "" if text is None else f"(?:{text})*"


def _group(text: str) -> str:
    return f"(?:{text})" if "|" in text else text
