"""What an answer must follow, by whichever name the caller gave it: one constraint, or none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from phloem.errors import RequestError
from phloem.interfaces import Tool

from ._format_schema import ResponseFormat
from ._places import places, said
from ._schema import Sampling

# the caller's name -> the field of SamplingParams
_OWN = ("json_schema", "json_object", "regex", "ebnf", "lark", "choices", "structural_tag")
_VLLM = {"guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choices", "guided_grammar": "ebnf"}
_OUTPUTS = {"json_": "json_schema", "regex": "regex", "choice": "choices", "grammar": "ebnf"}
_OUTPUTS |= {"json_object": "json_object", "structural_tag": "structural_tag"}
_FORMAT_FIELDS = {"json_schema": ("json_schema",), "structural_tag": ("format", "structures", "triggers")}


class Given(NamedTuple):
    """A constraint as it was given."""

    name: str  # as the caller wrote it
    field: str  # of SamplingParams
    value: Any
    strict: bool | None = None  # None: the request's `strict` decides
    at: str = ""  # where it lies in `value`, by JSON pointer, if that is more than what was given
    tools: Sequence[Tool] = ()  # whose schemas lie in `value`, too

    def fields(self, strict: bool | None) -> dict[str, Any]:
        """For SamplingParams. Raises RequestError where the request says `strict` in two ways."""
        if None not in (strict, self.strict) and strict != self.strict:
            raise RequestError(f"strict and the strict of {self.name} differ", hint="give one", param="strict")
        chosen = self.strict if strict is None else strict
        return {self.field: self.value} | ({} if chosen is None else {"strict": chosen})

    def said(self, texts: Sequence[str]) -> list[str]:
        """Refusals and notes with the places in what the caller wrote, not in what was made of it."""
        if not any("#" in text for text in texts):
            return list(texts)
        known = places(self.value, self.tools) if self.tools else {}
        known |= {self.at: "#"} if self.at else {}
        return [said(text, known) for text in texts]


def given_constraints(body: Sampling) -> list[Given]:
    """All that a body asks for. Raises RequestError for a `response_format` that does not say what."""
    found = [Given(name, name, getattr(body, name)) for name in _OWN]
    found += [Given(name, field, getattr(body, name)) for name, field in _VLLM.items()]
    if body.structured_outputs is not None:
        outputs = [
            Given(f"structured_outputs.{name.rstrip('_')}", field, getattr(body.structured_outputs, name))
            for name, field in _OUTPUTS.items()
        ]
        if all(_absent(given) for given in outputs):
            known = ", ".join(name.rstrip("_") for name in _OUTPUTS)
            raise RequestError("structured_outputs is empty", hint=f"give one of {known}", param="structured_outputs")
        found += outputs
    if body.response_format is not None:
        found += _of_format(body.response_format)
    return [given for given in found if not _absent(given)]


def _absent(given: Given) -> bool:
    return given.value is None or (given.field == "json_object" and given.value is False)


def _of_format(form: ResponseFormat) -> list[Given]:
    """What a response_format asks for; `text` asks for nothing."""
    name = "response_format"
    for kind, fields in _FORMAT_FIELDS.items():
        for field in fields:
            if kind != form.type and getattr(form, field) is not None:
                where = f"{name}.{field}"
                raise RequestError(f"{where} goes with type {kind}, not with {form.type}", param=where)
    if form.type == "json_object":
        return [Given(name, "json_object", True)]
    if form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise RequestError(
                "response_format json_schema has no schema",
                hint='give {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
                param=name,
            )
        return [Given(name, "json_schema", form.json_schema.schema_, form.json_schema.strict)]
    if form.type == "structural_tag":
        value = {field: getattr(form, field) for field in _FORMAT_FIELDS["structural_tag"]}
        present = {field: part for field, part in value.items() if part is not None}
        if set(present) not in ({"format"}, {"structures", "triggers"}):
            raise RequestError(
                "response_format structural_tag needs either format, or structures and triggers", param=name
            )
        return [Given(name, "structural_tag", {"type": "structural_tag", **present})]
    return []


def as_format(given: Given) -> tuple[str, dict[str, Any]] | None:
    """A constraint as a format of a structural tag, and the pointer in it to what was given; None where it is none."""
    value = given.value
    if given.field in ("json_schema", "json_object"):
        schema = {"type": "object"} if given.field == "json_object" else value
        with suppress(ValueError):
            schema = json.loads(schema) if isinstance(schema, str) else schema
        return "/json_schema", {"type": "json_schema", "json_schema": schema}
    if given.field == "regex":
        return "/pattern", {"type": "regex", "pattern": value}
    if given.field == "choices":
        return "", {"type": "or", "elements": [{"type": "const_string", "value": text} for text in value]}
    if given.field == "structural_tag" and isinstance(value, dict) and "format" in value:
        return "", value["format"]
    return None


def single(given: Sequence[Given]) -> Given | None:
    """The one constraint. Raises RequestError that names two, as the caller wrote them."""
    if len(given) > 1:
        first, second = given[0].name, given[1].name
        raise RequestError(f"{first} and {second} are given together", hint="give one constraint", param=second)
    return given[0] if given else None


@contextmanager
def in_callers_words(given: Given | None) -> Iterator[None]:
    """Refusals of a constraint speak of what the caller wrote, not of the field that stands for it."""
    try:
        yield
    except RequestError as error:
        if given is not None and error.param == given.field:
            if error.message.startswith(given.field):
                error.message = given.name + error.message.removeprefix(given.field)
            if given.tools:  # nobody wrote this tag
                named = "these tools" if given.name == "tools" else f"this {given.name}"
                error.message = error.message.replace(f"this {given.field}", named)
            (error.message,) = given.said([error.message])
            error.param = given.name
        raise
