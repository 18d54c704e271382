"""DeepSeek: calls between markers of their own, thoughts between <think> markers."""

from __future__ import annotations

from ._call import Pair
from ._format import Form, Format
from ._parser import FormatParser, ThinkOptions

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeek(FormatParser):
    """The formats of DeepSeek-V3.1 (name and arguments), and of V3 and R1 (a kind, the name, and a block of JSON).

    Source: the models' chat templates. V3.2's XML is another format.
    """

    capabilities = frozenset({"tools", "reasoning"})
    Options = ThinkOptions
    format = Format(
        forms=(
            Form(begin=_CALLS, opening=_CALL, body=Pair(_SEPARATOR), closing=_CALL_END, end=_CALLS_END),
            Form(
                begin=_CALLS,
                opening=f"{_CALL}function{_SEPARATOR}",
                body=Pair("\n```json\n"),
                closing=f"\n```{_CALL_END}",
                separator="\n",
                end=_CALLS_END,
            ),
        ),
        think=("<think>", "</think>"),
    )
    special = True
    result = "<｜tool▁output▁begin｜>{content}<｜tool▁output▁end｜>"

    @classmethod
    def matches(cls, template: str) -> bool:
        """By the markers of calls, or of turns in templates without tools."""
        return (_CALLS in template or "<｜Assistant｜>" in template) and "DSML" not in template
