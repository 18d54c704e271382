"""What OpenAI-compatible servers take beyond OpenAI's own parameters, and how a call's parameters become a body."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from phloem.errors import ConfigError, RequestError
from phloem.params import SamplingParams
from phloem.registry import did_you_mean

# Fields of SamplingParams that OpenAI's two APIs take under the same name.
COMMON = frozenset({"temperature", "top_p", "frequency_penalty", "presence_penalty", "n", "seed", "stop"})
GUIDED = "structured_outputs."  # vLLM puts constraints into one object


@dataclass(frozen=True, slots=True)
class Dialect:
    """One kind of server. `names` are SamplingParams' fields -> the body's, for what goes beyond OpenAI."""

    names: Mapping[str, str] = field(default_factory=dict)
    salt: str | None = None  # the body's field for the cache's namespace
    priority: bool = False
    says_all: bool = True  # absent parameters may fall to the model's own settings there: ours are always sent
    schema_text: bool = False  # a JSON schema travels as text


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_SHARED = _same("top_k", "min_p", "min_tokens", "repetition_penalty", "ignore_eos", "stop_token_ids")

DIALECTS: Mapping[str, Dialect] = {
    "openai": Dialect(says_all=False),
    "phloem": Dialect(
        _SHARED
        | _same("stop_regex", "include_stop", "skip_special_tokens", "logprobs_mode", "strict", "logits_processors")
        | _same("json_schema", "json_object", "regex", "ebnf", "lark", "choices", "structural_tag", "grammar_backend")
        | _same("think_start", "think_end", "think_tokens"),
        salt="cache_salt",
        priority=True,
    ),
    "vllm": Dialect(
        _SHARED
        | _same("skip_special_tokens")
        | {
            "include_stop": "include_stop_str_in_output",
            "json_schema": f"{GUIDED}json",
            "json_object": f"{GUIDED}json_object",
            "regex": f"{GUIDED}regex",
            "choices": f"{GUIDED}choice",
            "ebnf": f"{GUIDED}grammar",
        },
        salt="cache_salt",
    ),
    "sglang": Dialect(
        _SHARED
        | _same("stop_regex", "skip_special_tokens", "regex", "ebnf", "json_schema")
        | {"include_stop": "no_stop_trim"},
        schema_text=True,
    ),
}


def dialect(name: str) -> Dialect:
    """A dialect by its name. Raises ConfigError for an unknown one."""
    if name not in DIALECTS:
        known = ", ".join(DIALECTS)
        raise ConfigError(f"dialect {name!r} is unknown {did_you_mean(name, DIALECTS)}", hint=f"one of {known}")
    return DIALECTS[name]


@dataclass(frozen=True, slots=True)
class Writer:
    """Makes bodies for one server: its dialect, and which of the two APIs the model speaks."""

    name: str
    chat: bool
    own: bool = False  # OpenAI's own service, which has a newer name for max_tokens

    @property
    def dialect(self) -> Dialect:
        """What this server takes."""
        return dialect(self.name)

    def takes(self, name: str) -> bool:
        """Whether a parameter can be honoured."""
        if name in ("max_tokens", "logit_bias", "logprobs") or name in COMMON or name in self.dialect.names:
            return True
        return self.chat and name in ("json_schema", "json_object", "strict")

    def body(self, params: SamplingParams) -> dict[str, Any]:
        """The body's sampling part. What it does not hold was not set. Raises RequestError naming what is refused."""
        body: dict[str, Any] = {}
        given: dict[str, Any] = msgspec.to_builtins(params)
        for name, value in given.items():
            if not self.takes(name):
                raise self._refusal(name)
            self._put(body, name, value)
        if params.max_tokens is None and not self.chat:
            raise RequestError(
                "max_tokens is missing: a completions API would take 16", hint="give max_tokens", param="max_tokens"
            )
        if self.dialect.says_all:
            body.setdefault("temperature", params.temperature)
            body.setdefault("top_p", params.top_p)
        return body

    def _put(self, body: dict[str, Any], name: str, value: Any) -> None:
        known = self.dialect.names.get(name)
        if name == "logprobs" and self.chat:
            body["logprobs"] = True
            body["top_logprobs"] = value
        elif name == "logit_bias":
            body[name] = {str(token): bias for token, bias in value.items()}
        elif name == "max_tokens" and self.own and self.chat:
            body["max_completion_tokens"] = value
        elif known is None and name in ("json_schema", "json_object"):
            body["response_format"] = _response_format(name, value)
        elif known is None and name == "strict":
            schema = body.get("response_format", {}).get("json_schema")
            if schema is None:
                raise self._refusal(name)
            schema["strict"] = value
        elif known is not None and known.startswith(GUIDED):
            body.setdefault("structured_outputs", {})[known.removeprefix(GUIDED)] = value
        elif name == "json_schema" and self.dialect.schema_text and not isinstance(value, str):
            body[name] = json.dumps(value)
        else:
            body[known or name] = value

    def _refusal(self, name: str) -> RequestError:
        api = "chat" if self.chat else "completions"
        able = [one for one, found in DIALECTS.items() if name in found.names]
        hint = f"leave it out, or use RuntimeEndpoint with a phloem server{_dialects(able)}"
        return RequestError(f"{name} cannot be honoured by OpenAI's {api} API", hint=hint, param=name)


def _dialects(able: list[str]) -> str:
    """The hint's end, for parameters that some server takes."""
    return f"; servers of the dialects {', '.join(able)} take it: OpenAI(..., dialect=...)" if able else ""


def _response_format(name: str, value: Any) -> dict[str, Any]:
    """OpenAI's form of a JSON constraint. Raises RequestError for a schema that is no object."""
    if name == "json_object":
        return {"type": "json_object"}
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise RequestError(f"json_schema is not JSON: {error}", param="json_schema") from None
    if not isinstance(schema, dict):
        raise RequestError("json_schema must be an object for OpenAI's API", param="json_schema")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
