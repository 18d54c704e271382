"""Base of all request bodies: strict types, and no parameter is ignored in silence."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from phloem.errors import RequestError

from ._inert import REFUSALS, Inert


def _equal(left: Any, right: Any) -> bool:
    """Equality that tells True from 1."""
    return type(left) is type(right) and bool(left == right)


def _schema(schema: dict[str, Any], cls: type[Body]) -> None:
    """Publish the inert parameters: they are accepted, so the schema has them."""
    for name, inert in cls.inert.items():
        entry: dict[str, Any] = {"description": f"Accepted without effect: {inert.why}."}
        if inert.values is not None:
            entry["enum"] = list(inert.values)
        schema.setdefault("properties", {})[name] = entry


class Body(BaseModel):
    """A JSON object. Unknown names are refused with a suggestion; those in `inert` pass with a no-op value only."""

    model_config = ConfigDict(strict=True, extra="forbid", json_schema_extra=_schema)

    inert: ClassVar[Mapping[str, Inert]] = {}
    where: ClassVar[str] = ""  # path of a nested object, for messages
    renamed: ClassVar[Mapping[str, str]] = {}  # other servers' names: what to use instead

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        """Drop inert parameters, refuse unknown ones (RequestError passes through pydantic as it is)."""
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept: dict[str, Any] = {}
        for name, value in data.items():
            if name in cls.inert:
                cls._check_inert(name, value)
            elif name in known:
                kept[name] = value
            else:
                raise unknown_parameter(str(name), [*known, *cls.inert], cls.renamed, cls.where)
        return kept

    @classmethod
    def _check_inert(cls, name: str, value: Any) -> None:
        accepted = cls.inert[name].values
        if accepted is None or any(_equal(value, one) for one in accepted):
            return
        message = REFUSALS.get(name, f"{cls.where}{name} cannot be honoured")
        shown = ", ".join(json.dumps(one) for one in accepted)
        raise RequestError(message, hint=f"leave it out, or give {shown}", param=cls.where + name)


def unknown_parameter(name: str, known: list[str], renamed: Mapping[str, str], where: str = "") -> RequestError:
    """The refusal of a parameter that nobody would read."""
    shown = where + (name if len(name) <= 80 else name[:80] + "...")
    if name in renamed:
        return RequestError(f"unknown parameter '{shown}'", hint=f"use {renamed[name]}", param=shown)
    close = difflib.get_close_matches(name[:80], known, n=1)
    hint = f"did you mean '{close[0]}'?" if close else None
    return RequestError(f"unknown parameter '{shown}'", hint=hint, param=shown)
