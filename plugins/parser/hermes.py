"""Hermes and Qwen: JSON objects between <tool_call> markers, thoughts between <think> markers."""

from __future__ import annotations

from collections.abc import Sequence

from phloem.interfaces import Tool

from ._call import Record
from ._format import Form, Format
from ._parser import FormatParser, ThinkOptions
from ._prompt import schemas


class Hermes(FormatParser):
    """The format of Hermes 2 Pro and 3, Qwen 2.5 and 3, and the many models trained on their data.

    Source: the chat templates of NousResearch/Hermes-3 and Qwen/Qwen3, whose words `instructions` uses.
    """

    capabilities = frozenset({"tools", "reasoning"})
    Options = ThinkOptions
    format = Format(
        forms=(Form(opening="<tool_call>\n", body=Record(), closing="\n</tool_call>", separator="\n"),),
        think=("<think>", "</think>"),
    )
    result = "<tool_response>\n{content}\n</tool_response>"

    @classmethod
    def matches(cls, template: str) -> bool:
        """Templates of <tool_call> with JSON in it: Qwen3-Coder and GLM write XML there."""
        return "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template

    def instructions(self, tools: Sequence[Tool], parallel: bool) -> str:
        """The words that these models were trained with."""
        several = "one or more functions" if parallel else "one function"
        example = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        return (
            f"# Tools\n\nYou may call {several} to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{schemas(tools)}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within "
            f"<tool_call></tool_call> XML tags:\n{example}"
        )
