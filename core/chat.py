"""Chat templates: Jinja programs that come with a model and turn messages into its prompt format.

They are untrusted code, so they run sandboxed. Extensions and globals are those that transformers'
`apply_chat_template` offers, so that templates render the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import ModelError, RequestError


class ChatTemplate:
    """A compiled template. Rendering is thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` (bos_token, eos_token, ...) become variables; raises ModelError on a syntax error."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))  # what it may read
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the model's chat template has a syntax error in line {error.lineno}: {error.message}",
                hint="prompt the model without a template (completions), or mend its chat_template",
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt text of messages; raises RequestError with what the template complains about.

        Fields whose value is None are left out, as templates test for a field's presence. `variables` win over
        special tokens; `tools` and `documents` default to None.
        """
        if not messages:
            raise RequestError("messages is empty", hint="give at least one message", param="messages")
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        known = {"tools": None, "documents": None} | self._special | variables
        try:
            return self._template.render(messages=chat, **known)
        except jinja2.TemplateError as error:
            raise RequestError(f"the model's chat template refuses the messages: {error}", param="messages") from error
        except Exception as error:  # a template is a program: any Python error can come out of it
            raise RequestError(
                f"the model's chat template cannot render the messages: {type(error).__name__}: {error}",
                hint="check that each message has the role and content that the model's format knows",
                param="messages",
            ) from error


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the answer for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> Callable[[], None]:
    raise jinja2.TemplateError(message)
