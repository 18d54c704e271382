"""outlines keeps the contract of kind `grammar`."""

from __future__ import annotations

import pytest

pytest.importorskip("outlines_core")

from phloem.plugins.grammar.outlines import Outlines
from phloem.testing.grammar import GrammarSuite


class TestOutlines(GrammarSuite):
    plugin = Outlines
    constraints = (
        *GrammarSuite.constraints,
        {"regex": "(?:a|ab|abc)(?:c|bc)?"},
        {"regex": ""},
        {"json_schema": {"enum": ["abc", True, None, 0]}},
        {"json_schema": {"type": "array", "items": {"type": "integer", "maximum": 31, "minimum": 0}, "maxItems": 3}},
        {"json_schema": {"type": "object", "properties": {"a": {"type": "null"}, "é世": {"const": [0]}}}},
    )
    refused = (
        {"regex": "("},
        {"regex": "(?=a)a"},
        {"regex": "a{1000000}"},
        {"regex": r"[^\s\S]"},
        {"json_schema": False},
        {"json_schema": {"type": "array", "items": {"$ref": "#"}}},
        {"ebnf": 'root ::= "a"'},
        {"lark": 'start: "a"'},
    )
