"""llguidance keeps the contract of kind `grammar`, for every kind of constraint it takes."""

from __future__ import annotations

from phloem.plugins.grammar.llguidance import LLGuidance
from phloem.testing.grammar import GrammarSuite


def tag(begin: str, content: dict[str, object], end: str) -> dict[str, object]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


class TestLLGuidance(GrammarSuite):
    plugin = LLGuidance
    constraints = (
        *GrammarSuite.constraints,
        {"regex": ""},
        {"regex": "[^a]{0,3}世"},
        {"regex": r"(?i)[a-c]*?|\d+"},
        {"json_schema": {"type": "array", "items": {"enum": ["a", "bc", True, None]}, "maxItems": 3}},
        {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}},
        {"json_schema": {"type": "string", "pattern": "^[ab]+c$", "maxLength": 4}},
        {"lark": 'start: "[" X ("," X)* "]"\nX: /[123]+/'},
        {"lark": 'start: "[" %json {"enum": [true, "a"]} "]"'},
        {"structural_tag": {"format": tag("[", {"type": "json_schema", "json_schema": {"type": "null"}}, "]")}},
        {
            "structural_tag": {
                "format": {
                    "type": "tags_with_separator",
                    "tags": [tag("[", {"type": "json_schema", "json_schema": {"enum": ["a"]}}, "]")],
                    "separator": " ",
                    "at_least_one": True,
                    "stop_after_first": True,
                }
            }
        },
    )
    refused = (
        {"regex": "("},
        {"regex": "a(?=b)"},
        {"regex": r"(a)\1"},
        {"ebnf": 'root ::= "a"'},
        {"lark": "start: nothing"},
        {"lark": 'start: "a"\nx[temperature=1]: "b"'},
        {"json_schema": False},
        {"json_schema": {"enum": []}},
        {"json_schema": {"type": "array", "uniqueItems": True}},
        {"json_schema": {"$ref": "#"}},
        {"structural_tag": {"format": {"type": "grammar", "grammar": 'root ::= "a"'}}},
    )
