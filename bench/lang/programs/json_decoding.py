"""JSON decoding: texts become objects under one schema. transformers, which has no grammar, writes as many tokens."""

from __future__ import annotations

import json

import phloem.lang as pl
from bench.lang.data import WHAT, WHO, Prose
from bench.lang.programs._program import Calls, Case, Program

MAX_TOKENS = 40
SCHEMA = {
    "type": "object",
    "properties": {
        "who": {"enum": list(WHO)},
        "what": {"enum": list(WHAT)},
        "day": {"type": "integer", "minimum": 1, "maximum": 31},
        "certain": {"type": "boolean"},
    },
    "required": ["who", "what", "day", "certain"],
    "additionalProperties": False,
}


def cases(count: int) -> list[Case]:
    """Two solved examples for all."""
    header = "Extract who did what to what, on which day of the month, and whether that is certain.\n\n"
    for i, prose in enumerate((Prose("json shot 1"), Prose("json shot 2"))):
        shown = {"who": WHO[i], "what": WHAT[i], "day": 3 + i, "certain": True}
        header += f"Text: {prose.text(3)}\nJSON: {json.dumps(shown)}\n\n"
    prose = Prose("json")
    return [{"header": header, "text": f"Text: {prose.text(3)}\nJSON: "} for _ in range(count)]


@pl.function
def language(s: pl.State, header: str, text: str) -> list[str]:
    """The same in the language."""
    s += header
    s += text
    s += pl.gen("object", max_tokens=MAX_TOKENS, json_schema=json.dumps(SCHEMA))
    return [s["object"]]


async def plain(calls: Calls, header: str, text: str) -> list[str]:
    """One call under the schema."""
    return [await calls.complete(header + text, MAX_TOKENS, schema=SCHEMA)]


PROGRAM = Program("json", "objects under a schema", cases, language, plain, size=8)
