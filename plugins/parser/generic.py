"""Plain JSON calls, for models that were trained on no format."""

from __future__ import annotations

from ._call import Record
from ._format import Form, Format
from ._parser import FormatParser


class Generic(FormatParser):
    """`{"name": ..., "arguments": {...}}`, one a line, or a list of such. The documented prompt asks for it."""

    format = Format(
        forms=(
            Form(body=Record(), separator="\n", plain=True),
            Form(begin="[", body=Record(), separator=", ", end="]", plain=True, variant=True),
        )
    )

    @classmethod
    def matches(cls, template: str) -> bool:
        """Templates that know neither tools nor thoughts."""
        return "tools" not in template and "</think>" not in template
