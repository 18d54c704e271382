"""Strings that satisfy several things at once: patterns with look-ahead at their start, a format, bounds of length.

Each is a nondeterministic automaton (Thompson, 1968); all are followed together, with the count of characters, one
state of the product for each combination that occurs (Rabin and Scott, 1959), and equal states are one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from phloem.errors import RequestError

from ._ebnf_regex import Ranges, Writer

_parser: Any = re._parser  # type: ignore[attr-defined]  # the only complete reader of Python's own syntax
MAX_STATES = 300  # of the product; each becomes a rule of the grammar
_MAX_PARTS = 5000  # states of one pattern, its counts written out
_ANY: Ranges = [(0, 0xD7FF), (0xE000, 0x10FFFF)]

States = frozenset[int]


class Product(NamedTuple):
    """State 0 is the start. `edges[s]`: characters, and the state behind them; `final[s]`: a string may end."""

    edges: list[list[tuple[Ranges, int]]]
    final: list[bool]


class _Part:
    """One pattern as an automaton that is told what follows: its states, and whether it holds at the end of a text."""

    def __init__(self, writer: Writer, *, never: bool = False) -> None:
        self.empty: list[list[int]] = [[]]  # moves without a character
        self.moves: list[list[tuple[Ranges, int]]] = [[]]
        self.writer, self.never = writer, never
        self.last = 0
        self.whole = True  # False: what comes after a match does not matter

    def state(self) -> int:
        self.empty.append([])
        self.moves.append([])
        if len(self.moves) > _MAX_PARTS:
            raise RequestError("the pattern is too large")
        return len(self.moves) - 1

    def sequence(self, items: Iterable[Any], start: int) -> int:
        """Adds parsed items behind a state, and returns the one behind them."""
        for name, argument in items:
            start = self.item(str(name), argument, start)
        return start

    def item(self, name: str, argument: Any, start: int) -> int:
        ranges = self.writer.ranges(name, argument)
        if ranges is not None:
            end = self.state()
            self.moves[start].append((ranges, end))
            return end
        if name == "BRANCH":
            end = self.state()
            for option in argument[1]:
                self.empty[self.sequence(option, self.copy(start))].append(end)
            return end
        if name == "SUBPATTERN" and not argument[1] and not argument[2]:
            return self.sequence(argument[3], start)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            return self.repeat(start, *argument)
        raise RequestError(f"{name.lower().replace('_', ' ')} cannot be enforced there")

    def copy(self, start: int) -> int:
        """A new state that `start` leads to without a character."""
        new = self.state()
        self.empty[start].append(new)
        return new

    def repeat(self, start: int, least: int, most: Any, items: Any) -> int:
        """Adds `least` to `most` times the same."""
        for _ in range(least):
            start = self.sequence(items, start)
        start = self.copy(start)
        if most == _parser.MAXREPEAT:
            self.empty[self.sequence(items, self.copy(start))].append(start)
            return self.copy(start)
        end = self.state()
        self.empty[start].append(end)
        for _ in range(most - least):
            start = self.sequence(items, self.copy(start))
            self.empty[start].append(end)
        return end

    def closed(self, states: Iterable[int]) -> States:
        """With all that is reached without a character."""
        todo = list(states)
        found = set(todo)
        while todo:
            new = [state for state in self.empty[todo.pop()] if state not in found]
            found.update(new)
            todo += new
        return frozenset(found)

    def next(self, states: States, char: int) -> States | None:
        """None where no text behind can hold any more."""
        if not self.whole and self.last in states:
            return states  # has matched
        moved = (t for s in states for ranges, t in self.moves[s] if any(a <= char <= b for a, b in ranges))
        found = self.closed(moved)
        if self.never:
            return None if not self.whole and self.last in found else found
        return found or None

    def holds(self, states: States) -> bool:
        return (self.last in states) != self.never


def product(patterns: Sequence[str], least: int, most: int | None) -> Product | None:
    """The strings, by their characters, that have a match of every pattern, and `least` to `most` characters.

    None where there are none. Raises RequestError for what no automaton of a reasonable size can follow. Called once
    for each string of a schema that needs it; 10 ms for a hundred states.
    """
    parts = [part for pattern in patterns for part in _parts(pattern)]
    begin = tuple(part.closed([0]) for part in parts)
    if any(part.never and not part.whole and part.last in state for part, state in zip(parts, begin, strict=True)):
        return None
    order: list[tuple[tuple[States, ...], int]] = [(begin, 0)]  # with the characters so far, as far as they matter
    numbers = {order[0]: 0}
    edges: list[list[tuple[Ranges, int]]] = []
    final: list[bool] = []
    for states, count in order:
        holds = all(part.holds(state) for part, state in zip(parts, states, strict=True))
        final.append(holds and count >= least)
        found: dict[int, Ranges] = {}
        for low, high in _pieces(parts, states) if most is None or count < most else ():
            moved = _moved(parts, states, low)
            if moved is None:
                continue
            key = (moved, min(count + 1, least) if most is None else count + 1)
            if key not in numbers:
                numbers[key] = len(order)
                order.append(key)
            found.setdefault(numbers[key], []).append((low, high))
        edges.append([(ranges, target) for target, ranges in found.items()])
        if len(order) > MAX_STATES:
            raise RequestError(f"together they need more than {MAX_STATES} states")
    return _small(Product(edges, final))


def _moved(parts: Sequence[_Part], states: Sequence[States], char: int) -> tuple[States, ...] | None:
    moved = []
    for part, state in zip(parts, states, strict=True):
        following = part.next(state, char)
        if following is None:
            return None
        moved.append(following)
    return tuple(moved)


def _parts(pattern: str) -> Iterator[_Part]:
    """A pattern's look-ahead at its start, then what is left of it."""
    tree = _parser.parse(pattern)
    flags = tree.state.flags
    if flags & (re.MULTILINE | re.ASCII | re.LOCALE):
        raise RequestError("the flags m, a and L cannot be enforced")
    items, anchored = list(tree), False
    while items and (str(items[0][0]) in ("ASSERT", "ASSERT_NOT") or _is_at(items[0], "BEGINNING")):
        name, argument = items.pop(0)
        if str(name) == "AT":
            anchored = True
            continue
        if not anchored or argument[0] < 0:
            raise RequestError("look-around elsewhere than behind ^ cannot be enforced")
        yield _part(list(argument[1]), flags, anchored=True, never=str(name) == "ASSERT_NOT")
    yield _part(items, flags, anchored=anchored)


def _part(items: list[Any], flags: int, *, anchored: bool, never: bool = False) -> _Part:
    if items and _is_at(items[0], "BEGINNING"):
        items, anchored = items[1:], True
    part = _Part(Writer("", "", flags, in_json=True, widest=never), never=never)
    start = 0
    if not anchored:
        part.moves[0].append((_ANY, 0))
        start = part.copy(0)
    part.whole = bool(items) and _is_at(items[-1], "END")
    part.last = part.sequence(items[:-1] if part.whole else items, start)
    return part


def _is_at(item: Any, where: str) -> bool:
    return str(item[0]) == "AT" and str(item[1]).startswith(f"AT_{where}")


def _pieces(parts: Sequence[_Part], states: Sequence[States]) -> Iterator[tuple[int, int]]:
    """Ranges of characters that all parts treat alike, in order."""
    starts = {0, 0xD800, 0xE000}
    for part, state in zip(parts, states, strict=True):
        for one in state:
            starts |= {edge for ranges, _ in part.moves[one] for low, high in ranges for edge in (low, high + 1)}
    ordered = sorted(start for start in starts if start <= 0x10FFFF)
    for low, high in zip(ordered, [*ordered[1:], 0x110000], strict=True):
        if low != 0xD800:
            yield low, high - 1


def _small(made: Product) -> Product | None:
    """Without states from which no string ends, and with equal ones joined."""
    before: list[list[int]] = [[] for _ in made.edges]
    for state, edges in enumerate(made.edges):
        for _, target in edges:
            before[target].append(state)
    todo = [state for state, final in enumerate(made.final) if final]
    alive = set(todo)
    while todo:
        new = [state for state in before[todo.pop()] if state not in alive]
        alive.update(new)
        todo += new
    if 0 not in alive:
        return None
    kind = {state: int(made.final[state]) for state in alive}
    while True:  # Moore's refinement
        seen: dict[Any, int] = {}
        finer = {
            state: seen.setdefault((kind[state], _signature(made.edges[state], kind)), len(seen))
            for state in sorted(alive)
        }
        if len(seen) == len(set(kind.values())):
            break
        kind = finer
    ends: list[bool] = [False] * len(seen)
    joined: list[list[tuple[Ranges, int]]] = [[] for _ in seen]
    for state, number in finer.items():
        ends[number] = made.final[state]
        joined[number] = [(list(ranges), target) for target, ranges in _signature(made.edges[state], finer)]
    return Product(joined, ends)


def _signature(
    edges: list[tuple[Ranges, int]], kind: dict[int, int]
) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
    """For each kind of state behind, the characters that lead there, adjacent ranges joined."""
    found: dict[int, list[tuple[int, int]]] = {}
    for ranges, target in edges:
        if target in kind:
            found.setdefault(kind[target], []).extend(ranges)
    return tuple((target, tuple(_joined(ranges))) for target, ranges in sorted(found.items()))


def _joined(ranges: Ranges) -> Ranges:
    out: Ranges = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(high, out[-1][1]))
        else:
            out.append((low, high))
    return out
