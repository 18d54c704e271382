"""Mistral: [TOOL_CALLS] before a JSON list of calls, or before each call's name."""

from __future__ import annotations

from ._call import Pair, Record
from ._format import Form, Format
from ._parser import FormatParser, ThinkOptions

_LIST = "[TOOL_CALLS]"


class Mistral(FormatParser):
    """All of Mistral's formats: of tokenizers v3 and v7 (a list), v11 (name and id) and v13 (name), and [THINK].

    Source: mistral-common, and the chat templates of Mistral's models.
    """

    capabilities = frozenset({"tools", "reasoning"})
    Options = ThinkOptions
    format = Format(
        forms=(
            Form(opening=_LIST, body=Pair("[ARGS]")),
            Form(begin=f"{_LIST} [", body=Record(), separator=", ", end="]"),
            Form(begin=f"{_LIST}[", body=Record(), separator=", ", end="]", marker=_LIST),
            Form(opening=_LIST, body=Pair("[ARGS]", aside="[CALL_ID]"), variant=True),
            Form(opening=_LIST, body=Pair(), variant=True),
        ),
        think=("[THINK]", "[/THINK]"),
    )
    special = True
    result = "[TOOL_RESULTS]{content}[/TOOL_RESULTS]"

    @classmethod
    def matches(cls, template: str) -> bool:
        """By the marker."""
        return _LIST in template
