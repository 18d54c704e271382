"""Request bodies that say what an answer must look like: `response_format`, and vLLM's `structured_outputs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from ._body import Body
from ._inert import Inert


class JsonSchemaFormat(Body):
    """`response_format.json_schema`."""

    where: ClassVar[str] = "response_format.json_schema."
    inert: ClassVar[Mapping[str, Inert]] = {
        "description": Inert(None, "a label for the caller's own records"),
    }

    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="false: what cannot be enforced is reported in `notes`, not refused.")


class ResponseFormat(Body):
    """`response_format`. A structural tag has either `format` or `structures` and `triggers`."""

    where: ClassVar[str] = "response_format."

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(Body):
    """`structured_outputs`: exactly one of its fields."""

    where: ClassVar[str] = "structured_outputs."
    inert: ClassVar[Mapping[str, Inert]] = {
        "disable_fallback": Inert((None, False, True), "there is no fallback"),
        "disable_any_whitespace": Inert((None,), "the server's grammar.whitespace decides"),
        "disable_additional_properties": Inert((None, False), "the schema decides"),
        "whitespace_pattern": Inert((None,), "the server's grammar.whitespace decides"),
    }

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(None, description="EBNF.")
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
