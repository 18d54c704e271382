"""The length of the shortest text of a grammar in xgrammar's EBNF, rule by rule.

What is forced at a state is a beginning of every text from there on, hence no longer than the shortest. So rules
without a finite text, or with huge ones, are what makes the library look for forced text without end.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterator

_TOKEN = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*") | (?P<set>\[(?:[^\]\\]|\\.)*\]\*?) | (?P<head>[\w.-]+)\s*::=
    | (?P<name>[A-Za-z_][\w.-]*) | (?P<times>\{\s*\d+) | (?P<ahead>\(=) | (?P<mark>[()|])""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|.", re.DOTALL)
Factor = tuple[str, int]  # a rule, and how often at least; "" stands for one character
Alternatives = list["list[Factor | Alternatives]"]


def shortest(source: str) -> dict[str, float]:
    """Characters of each rule's shortest text, infinite where no text ever ends. `source`: as the library prints it.

    The least solution, found by looking again at whoever names a rule that has become shorter: in the order of the
    library's own grammars, where helpers come last, about once for each rule.
    """
    rules = dict(_rules(source))
    users: dict[str, set[str]] = defaultdict(set)
    for name, alternatives in rules.items():
        for used in _named(alternatives):
            users[used].add(name)
    lengths = dict.fromkeys(rules, math.inf)
    todo = deque(reversed(rules))
    while todo:
        name = todo.popleft()
        length = _length(rules[name], lengths)
        if length < lengths[name]:
            lengths[name] = length
            todo += users[name]
    return lengths


def _rules(source: str) -> Iterator[tuple[str, Alternatives]]:
    """Each rule; what is looked ahead for, and what is no text at all, is left out."""
    tokens = list(_TOKEN.finditer(source))
    name, ahead = "", 0
    stack: list[Alternatives] = [[[]]]
    for i, token in enumerate(tokens):
        kind, text = token.lastgroup, token.group()
        if kind == "head":
            if name:
                yield name, stack[0]
            name, stack, ahead = token.group("head"), [[[]]], 0
        elif ahead or kind == "ahead":
            ahead += (kind == "ahead" or text == "(") - (text == ")")
        elif kind == "name" and i + 1 < len(tokens) and _called(tokens[i + 1], token):
            stack[-1].insert(0, [])  # a dispatch of tags is free text, which may be empty
        elif text == "(":
            inner: Alternatives = [[]]
            stack[-1][-1].append(inner)
            stack.append(inner)
        elif text == ")":
            stack.pop()
        elif text == "|":
            stack[-1].append([])
        elif kind == "times":
            rule, _ = stack[-1][-1].pop()
            stack[-1][-1].append((str(rule), int(text[1:])))
        else:
            stack[-1][-1].append(_factor(kind, text))
    if name:
        yield name, stack[0]


def _called(after: re.Match[str], name: re.Match[str]) -> bool:
    return after.group() == "(" and after.start() == name.end()


def _factor(kind: str | None, text: str) -> Factor:
    if kind == "name":
        return text, 1
    if kind == "set":
        return "", 0 if text.endswith("*") else 1
    return "", len(_CHARACTER.findall(text[1:-1]))


def _named(alternatives: Alternatives) -> Iterator[str]:
    for factors in alternatives:
        for factor in factors:
            if isinstance(factor, list):
                yield from _named(factor)
            elif factor[0]:
                yield factor[0]


def _length(alternatives: Alternatives, lengths: dict[str, float]) -> float:
    return min(sum(_least(factor, lengths) for factor in factors) for factors in alternatives)


def _least(factor: Factor | Alternatives, lengths: dict[str, float]) -> float:
    if isinstance(factor, list):
        return _length(factor, lengths)
    rule, times = factor
    if not rule or not times:
        return float(times)
    return times * lengths.get(rule, 0.0)
