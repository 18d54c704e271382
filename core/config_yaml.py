"""YAML as plain data plus the place of every key; duplicate keys, aliases and tags are problems, not surprises."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

KeyPath = tuple[str | int, ...]

_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}


class Mark(NamedTuple):
    """Where a value was given, and the text found there."""

    place: str
    text: str


@dataclass(slots=True)
class Document:
    """One parsed YAML text: data, marks of every key and list item, and everything that is wrong with it."""

    name: str
    data: dict[str, Any] = field(default_factory=dict)
    marks: dict[KeyPath, Mark] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def parse_document(text: str, name: str) -> Document:
    """Parse a whole configuration; `name` is what messages call the file."""
    document = Document(name)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        document.problems.append(_syntax(error, name))
        return document
    if isinstance(node, yaml.MappingNode):
        document.data = _Builder(document, text.splitlines()).value(node, ())
    elif node is not None and not (isinstance(node, yaml.ScalarNode) and _scalar(node) is None):
        document.problems.append(f"{name}:1:1: the configuration must be a mapping of sections")
    return document


def parse_value(text: str, place: str) -> tuple[Any, list[str]]:
    """A value from an environment variable or `--set`, typed as YAML would; and what is wrong with it."""
    document = Document(place)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        return None, [f"{place}: not valid YAML: {getattr(error, 'problem', None) or error}"]
    if node is None:
        return None, []
    value = _Builder(document, text.splitlines()).value(node, ())
    return value, [f"{place}: {problem.partition(': ')[2]}" for problem in document.problems]


class _Builder:
    def __init__(self, document: Document, lines: list[str]) -> None:
        self.document = document
        self.lines = lines
        self.seen: set[int] = set()

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        if id(node) in self.seen:  # an alias: repeats a node, and may repeat itself for ever
            self._problem(node, path, "anchors and aliases are not supported; write the value out")
            return None
        self.seen.add(id(node))
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.startswith("tag:yaml.org,2002:python"):
            self._problem(node, path, f"the tag {node.tag} is not supported")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                self.document.marks[(*path, i)] = self._mark(item)
            return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        return _scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or not key_node.value:
                self._problem(key_node, path, "a key must be a word")
                continue
            key = str(key_node.value)
            here = (*path, key)
            if key in data:
                first = self.document.marks[here].place.split(":")[-2]
                self._problem(key_node, here, f"duplicate key, first given in line {first}")
                continue
            self.document.marks[here] = self._mark(key_node)
            data[key] = self.value(value_node, here)
        return data

    def _mark(self, node: yaml.Node) -> Mark:
        line, column = node.start_mark.line, node.start_mark.column
        text = self.lines[line].strip() if line < len(self.lines) else ""
        return Mark(f"{self.document.name}:{line + 1}:{column + 1}", text)

    def _problem(self, node: yaml.Node, path: KeyPath, message: str) -> None:
        what = f"{dotted(path)}: " if path else ""
        self.document.problems.append(f"{self._mark(node).place}: {what}{message}")


def dotted(path: KeyPath) -> str:
    """`("spec", 0, "use")` as people write it: `spec[0].use`."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out


def _scalar(node: yaml.Node) -> Any:
    """Plain scalars by YAML 1.2's rules: `off` and `no` are words, `1e3` is a number, `12:30` is text."""
    text = str(node.value)
    if getattr(node, "style", None) is not None or node.tag.endswith(":binary"):
        return text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def _syntax(error: yaml.YAMLError, name: str) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
    return f"{place}: not valid YAML: {getattr(error, 'problem', None) or error}"
