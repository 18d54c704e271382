"""`sampling_params` of the native routes: the fields of SamplingParams by their own names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from phloem.errors import RequestError
from phloem.params import SamplingParams

from ._body import unknown_parameter

RENAMED: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "no_stop_trim": "include_stop",
    "grammar": "ebnf or lark",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choices",
    "guided_grammar": "ebnf",
    "structured_outputs": "json_schema, regex, ebnf, choices, json_object or structural_tag",
    "response_format": "json_schema, json_object or structural_tag",
    "thinking_budget": "think_tokens",
    "sampling_seed": "seed",
    "random_seed": "seed",
    "return_logprob": "sampling_params.logprobs",
    "top_logprobs_num": "sampling_params.logprobs",
    "logprob_start_len": "sampling_params.prompt_logprobs",
    "lora_path": "adapter",
    "extra_key": "salt",
    "prompt": "text",
}
FIELDS = "Fields of SamplingParams: " + ", ".join(SamplingParams.__struct_fields__)


def native_params(fields: dict[str, Any]) -> SamplingParams:
    """SamplingParams from their names, as strict as the constructor."""
    known = SamplingParams.__struct_fields__
    for name in fields:
        if name not in known:
            raise unknown_parameter(name, list(known), RENAMED)
    values = {name: value for name, value in fields.items() if value is not None}
    for name in ("stop", "stop_regex"):
        if isinstance(values.get(name), str):
            values[name] = [values[name]]
    try:
        return msgspec.convert(values, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at ")
        found = re.search(r"\$\.(\w+)", place)
        name = found[1] if found else "sampling_params"
        raise RequestError(f"{name}: {what}", param=name) from None
