"""Llama 3: a JSON object with "name" and "parameters", alone or after <|python_tag|>."""

from __future__ import annotations

from ._call import Record
from ._exact import quoted
from ._format import Form, Format
from ._parser import FormatParser


class Llama3(FormatParser):
    """The JSON calls of Llama 3.1, 3.2 and 3.3; several are separated by semicolons, as vLLM and SGLang read them.

    Source: Meta's page on prompt formats, and the models' chat templates.
    """

    format = Format(
        forms=(
            Form(body=Record("parameters"), separator="; ", plain=True),
            Form(begin="<|python_tag|>", body=Record("parameters"), separator="; ", variant=True),
        )
    )

    @classmethod
    def matches(cls, template: str) -> bool:
        """Llama's headers, and calls in JSON: some templates ask for Python instead."""
        return "<|start_header_id|>" in template and '"parameters": ' in template and "python list" not in template

    def result_text(self, name: str, content: str) -> str:
        """As the template shows the answer of a tool to the role `ipython`."""
        return f'{{"output": {quoted(content)}}}'
