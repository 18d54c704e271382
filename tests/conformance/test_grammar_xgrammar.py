"""xgrammar keeps the contract of kind `grammar`, and the drafter `grammar` that of kind `spec`."""

from __future__ import annotations

from phloem.plugins.grammar.xgrammar import XGrammar
from phloem.plugins.spec.grammar import GrammarDrafter
from phloem.testing.grammar import GrammarSuite, toy_tokenizer
from phloem.testing.plugin import TOY_SPEC
from phloem.testing.spec import SpecSuite


class TestXGrammar(GrammarSuite):
    plugin = XGrammar
    constraints = (
        *GrammarSuite.constraints,
        {"regex": ""},
        {"regex": "[^a]{0,3}世"},
        {"regex": r"(?i)[a-c]*?|\d+"},
        {"json_schema": {"type": "array", "items": {"enum": ["a", "bc", True, None]}, "maxItems": 3}},
        {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}},
        {"json_schema": {"type": "string", "pattern": "^[ab]+c$"}},
        {"ebnf": 'root ::= "[" [123]+ ("," [123]+)* "]"'},
        {
            "structural_tag": {
                "format": {
                    "type": "tag",
                    "begin": "[",
                    "content": {"type": "json_schema", "json_schema": {"type": "null"}},
                    "end": "]",
                }
            }
        },
    )
    refused = (
        {"regex": "("},
        {"regex": "a(?=b)"},
        {"regex": r"(a)\1"},
        {"ebnf": "root ::= nothing"},
        {"json_schema": False},
        {"json_schema": {"enum": []}},
        {"json_schema": {"type": "array", "maxItems": 10**9}},
    )


class TestGrammarDrafter(SpecSuite):
    plugin = GrammarDrafter

    def make(self) -> GrammarDrafter:
        """A drafter over the toy tokenizer."""
        from phloem.interfaces import PluginContext

        context = PluginContext(self.kind, "grammar", model=TOY_SPEC, tokenizer=toy_tokenizer())
        return GrammarDrafter(GrammarDrafter.Options(), context)
