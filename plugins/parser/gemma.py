"""Gemma: FunctionGemma's calls, and Gemma 4's, which differ in their markers."""

from __future__ import annotations

from ._call import Pair
from ._format import Form, Format
from ._gemma import Gemma as Notation
from ._parser import FormatParser, ThinkOptions

_ANSWER = "<start_function_response>"


class Gemma(FormatParser):
    """The formats that Google documents for FunctionGemma and Gemma 4 (vLLM's `functiongemma` and `gemma4`).

    Gemma 3 has no format of its own: templates ask it for a list of Python calls, which `pythonic` reads.
    """

    capabilities = frozenset({"tools", "reasoning"})
    Options = ThinkOptions
    format = Format(
        forms=(
            Form(
                opening="<start_function_call>call:",
                body=Pair(syntax=Notation("<escape>")),
                closing="<end_function_call>",
                stop=_ANSWER,
            ),
            Form(
                opening="<|tool_call>call:",
                body=Pair(syntax=Notation('<|"|>')),
                closing="<tool_call|>",
                stop="<|tool_response>",
            ),
        ),
        think=("<|channel>thought", "<channel|>"),
    )
    special = True

    @classmethod
    def matches(cls, template: str) -> bool:
        """By the markers of calls."""
        return "<start_function_call>" in template or "<|tool_call>" in template

    def result_text(self, name: str, content: str) -> str:
        """One value, as FunctionGemma's template writes it."""
        return f"{_ANSWER}response:{name}{{value:<escape>{content}<escape>}}<end_function_response>"
