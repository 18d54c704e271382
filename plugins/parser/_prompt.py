"""The system text that tells a model of its tools, where its chat template does not."""

from __future__ import annotations

import json
from collections.abc import Sequence

from phloem.interfaces import Tool

from ._format import Form


def schemas(tools: Sequence[Tool]) -> str:
    """The tools as the chat API gives them, one JSON object a line."""
    lines = []
    for tool in tools:
        parameters = tool.parameters or {"type": "object", "properties": {}}
        function = {"name": tool.name, "description": tool.description, "parameters": parameters}
        lines.append(json.dumps({"type": "function", "function": function}, ensure_ascii=False))
    return "\n".join(lines)


def instructions(form: Form, tools: Sequence[Tool], parallel: bool) -> str:
    """The tools, and how a call is written, shown as the form writes it."""
    call = ("function-name", '{"argument-name": "argument-value"}')
    one = form.text([call])
    two = form.text([call, call])
    several = f"To call several functions at once, answer with:\n{two}\n\n" if parallel else ""
    return (
        "# Tools\n\nYou can call these functions to help the user:\n"
        f"{schemas(tools)}\n\n"
        "To call a function, answer with nothing but its name and arguments in this form, and wait for the result:\n"
        f"{one}\n\n{several}"
        "If no function can help, answer in plain text."
    )
