"""YAML as plain data plus the place of every key; duplicate keys, aliases and tags are problems, not surprises."""

from __future__ import annotations

import re
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


def parse_file(text: str, name: str, problems: list[str]) -> tuple[dict[str, Any], dict[str, Mark]]:
    """A configuration file's data, and the marks of its keys and list items by dotted path; adds what is wrong.

    `name` is what messages call the file.
    """
    reader = _Reader(name, text.splitlines(), problems)
    data = reader.parse(text)
    if data is not None and not isinstance(data, dict):
        problems.append(f"{name}:1:1: the configuration must be a mapping of sections")
    return data if isinstance(data, dict) else {}, reader.marks


def parse_value(text: str, place: str, problems: list[str]) -> Any:
    """A value from an environment variable or `--set`, typed as YAML would; adds what is wrong with it at `place`."""
    return _Reader(place, None, problems).parse(text)


class _Reader:
    def __init__(self, name: str, lines: list[str] | None, problems: list[str]) -> None:
        self.name = name
        self.lines = lines  # None: places are `name` alone
        self.problems = problems
        self.marks: dict[str, Mark] = {}
        self.seen: set[int] = set()

    def parse(self, text: str) -> Any:
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            mark = self._mark(getattr(error, "problem_mark", None))
            self.problems.append(f"{mark.place}: not valid YAML: {getattr(error, 'problem', None) or error}")
            return None
        return None if node is None else self._value(node, ())

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
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
                self.marks[dotted((*path, i))] = self._mark(item.start_mark)
            return [self._value(item, (*path, i)) for i, item in enumerate(node.value)]
        return _scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            here = (*path, key)
            if not isinstance(key_node, yaml.ScalarNode) or not key:
                self._problem(key_node, path, "a key must be a word")
            elif key in data:
                self._problem(key_node, here, f"duplicate key, first given in line {lines[key]}")
            else:
                lines[key] = key_node.start_mark.line + 1
                self.marks[dotted(here)] = self._mark(key_node.start_mark)
                data[key] = self._value(value_node, here)
        return data

    def _mark(self, at: yaml.Mark | None) -> Mark:
        if at is None or self.lines is None:
            return Mark(self.name, "")
        text = self.lines[at.line].strip() if at.line < len(self.lines) else ""
        return Mark(f"{self.name}:{at.line + 1}:{at.column + 1}", text)

    def _problem(self, node: yaml.Node, path: KeyPath, message: str) -> None:
        what = f"{dotted(path)}: " if path else ""
        self.problems.append(f"{self._mark(node.start_mark).place}: {what}{message}")


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
    return float(text) if _FLOAT.fullmatch(text) else text
