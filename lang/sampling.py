"""Sampling parameters as programs write them: SGLang's names beside phloem's, told apart from a program's arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from phloem.errors import RequestError
from phloem.params import SamplingParams
from phloem.registry import did_you_mean

NAMES = frozenset(SamplingParams.__struct_fields__)
RENAMED: Mapping[str, str] = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
LOGPROBS = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
DEFAULT_MAX_TOKENS = 128  # of one gen, where neither it nor the run says, as in SGLang

# What a gen of a type may write, and where it stops. The blank lets a model end a number as it would end a word.
TYPES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "int": (r"[-+]?[0-9]+[ \n]?", (" ", "\n")),
    "float": (r"[-+]?[0-9]*\.?[0-9]+[ \n]?", (" ", "\n")),
    "bool": ("(True|False)", ()),
    "str": (r'"[^"\\\x00-\x1f]*"', ()),
}


def given(**values: Any) -> dict[str, Any]:
    """What was set (not None) under the names of SamplingParams. Raises RequestError naming what is unknown.

    `return_logprob` and its companions become `logprobs` and `prompt_logprobs`; texts of tokens come with them always.
    """
    values = {RENAMED.get(name, name): value for name, value in values.items() if value is not None}
    asked = {name: values.pop(name) for name in LOGPROBS if name in values}
    for name in values:
        if name not in NAMES:
            raise RequestError(
                f"unknown sampling parameter {name!r}",
                hint=f"SGLang's names and the fields of SamplingParams are known {did_you_mean(name, NAMES)}",
                param=name,
            )
    for name in ("stop", "stop_regex"):
        if name in values:
            values[name] = _as_list(values[name])
    if "stop_token_ids" in values:
        values["stop_token_ids"] = list(values["stop_token_ids"])
    if "regex" in values:
        _check_regex(values["regex"])
    if "json_schema" in values:
        values["json_schema"] = _schema(values["json_schema"])
    return values | _logprobs(asked)


def dtype_name(dtype: type | str | None) -> str | None:
    """The name of a type that `gen` can hold its output to. Raises RequestError."""
    name = dtype.__name__ if isinstance(dtype, type) else dtype
    if name is None or name in TYPES:
        return name
    if name == "string":
        return "str"
    raise RequestError(f"dtype {name!r} is none of {', '.join(TYPES)}", param="dtype")


def typed(params: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """Parameters with the regex and the stops of a type. Raises RequestError beside another constraint."""
    made = dict(params)
    if dtype is None:
        return made
    pattern, stops = TYPES[dtype]
    if made.get("regex") is not None:
        raise RequestError("dtype and regex are given together", hint="give one of them", param="dtype")
    made["regex"] = pattern
    made["stop"] = [*made.get("stop", []), *stops]
    return made


def _as_list(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else list(value)


def _schema(schema: Any) -> Any:
    """A schema as SamplingParams takes it, also of a class of pydantic's. Raises RequestError for other classes."""
    if not isinstance(schema, type):
        return dict(schema) if isinstance(schema, Mapping) else schema
    if not callable(made := getattr(schema, "model_json_schema", None)):
        raise RequestError(
            f"json_schema is the class {schema.__name__}, which has no schema of its own",
            hint="give a JSON text, a mapping, a pydantic model, or pydantic.TypeAdapter(...).json_schema()",
            param="json_schema",
        )
    return made()


def _check_regex(pattern: Any) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise RequestError(f"regex {pattern!r} is not a regular expression: {error}", param="regex") from error


def _logprobs(asked: Mapping[str, Any]) -> dict[str, Any]:
    if not asked.get("return_logprob"):
        return {}
    best = asked.get("top_logprobs_num") or 0
    start = asked.get("logprob_start_len")
    return {"logprobs": best} | ({"prompt_logprobs": best} if start is not None and start >= 0 else {})
