"""A list of Python calls: Llama 3.2 and 4, Gemma 3, LFM2, ToolACE and others."""

from __future__ import annotations

from ._call import Pair
from ._format import Form, Format
from ._parser import FormatParser
from ._python import Python

_CALL = Pair(syntax=Python())


class Pythonic(FormatParser):
    """`[f(a=1, b="x"), g()]` at the start of a line. Python's literals become JSON, once and exactly.

    Source: Meta's page on Llama 3.2, and the templates that ask for a "python list of the function calls".
    """

    format = Format(
        forms=(
            Form(begin="[", body=_CALL, separator=", ", end="]", plain=True, line_start=True),
            Form(
                begin="<|python_start|>[",
                body=_CALL,
                separator=", ",
                end="]<|python_end|>",
                marker="<|python_start|>",
                variant=True,
            ),
            Form(
                begin="<|tool_call_start|>[",
                body=_CALL,
                separator=", ",
                end="]<|tool_call_end|>",
                marker="<|tool_call_start|>",
                variant=True,
            ),
        )
    )
    result = "<tool_response>\n{content}\n</tool_response>"

    @classmethod
    def matches(cls, template: str) -> bool:
        """By the words of the templates, or their markers."""
        words = ("func_name1(", "python list of", "<|python_start|>", "<|tool_call_start|>", "<|tool_list_start|>")
        return any(word in template for word in words)
