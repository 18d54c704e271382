"""What llguidance is given: its dialect of Lark, for each kind of constraint but structural tags."""

from __future__ import annotations

import json
import re

from phloem.constraint import Constraint
from phloem.errors import RequestError

from ._json_lark import json_options, json_rule
from ._regex import translate

# Without it a mask allows only the library's own tokenisation of text that is certain, which is not the model's.
HEADER = '%llguidance {"no_forcing": true}'
# Strings, regexes and comments of a Lark source, in which nothing is looked for; then what is.
_LEXER = re.compile(
    r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/'
    r"|(?P<schema>%json\s*\{(?P<empty>\s*\})?)|\[[^\]\n]*?\b(?P<attribute>temperature|max_tokens|stop)\s*="
    r"|(?P<options>%llguidance)|(?P<other>@[\w-]+)"
)


def source(constraint: Constraint) -> str:
    """A Lark grammar, for every kind but structural_tag. Raises RequestError(param=kind)."""
    kind, value = constraint.kind, constraint.value
    if kind == "lark":
        return user_source(constraint)
    if kind == "regex":
        return f"{HEADER}\nstart: /{translate(value, kind).rust}/"
    if kind == "choices":
        choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(value))
        return f"{HEADER}\nstart: CHOICE\nCHOICE: {choices}"
    schema = {"type": "object"} if kind == "json_object" else json.loads(value)
    return f"{HEADER}\nstart: {json_rule(schema, constraint)}"


def user_source(constraint: Constraint) -> str:
    """A user's grammar, its JSON schemas with our whitespace unless they say otherwise; lines stay where they are.

    Raises RequestError for attributes that this engine does not act on.
    """
    options = json.dumps(json_options(constraint))

    def replace(match: re.Match[str]) -> str:
        if refused := match["attribute"] or match["options"] or match["other"]:
            line = constraint.value.count("\n", 0, match.start()) + 1
            raise RequestError(
                f"lark: line {line}: {refused} is not supported",
                hint="sampling is set by the request; the whole grammar is one text; text ends by lazy or suffix",
                param=constraint.kind,
            )
        if match["schema"] is None:
            return match[0]
        opening = match[0][: match[0].index("{") + 1]
        return f'{opening}"x-guidance": {options}{"" if match["empty"] else ", "}{match["empty"] or ""}'

    return f"{_LEXER.sub(replace, constraint.value)}\n{HEADER}\n"
