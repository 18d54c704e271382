"""Parameters that are accepted because they cannot change the output: the one table; docs/server.md lists it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Inert(NamedTuple):
    """What is accepted for a parameter that has no effect, and why that is honest. `values` None: any value."""

    values: tuple[Any, ...] | None
    why: str


_LABEL = Inert(None, "a label for the caller's own records")

COMMON: Mapping[str, Inert] = {
    "user": _LABEL,
}

CHAT: Mapping[str, Inert] = {
    **COMMON,
    "metadata": _LABEL,
    "safety_identifier": _LABEL,
    "prompt_cache_key": Inert(None, "prefixes are found by their tokens, whatever the key"),
    "prediction": Inert(None, "a hint for speed; it never changes the answer"),
    "store": Inert((None, False), "nothing is stored"),
    "service_tier": Inert((None, "auto", "default"), "there is one tier"),
    "functions": Inert((None, []), "no functions"),
    "function_call": Inert((None, "none", "auto"), "without functions there is nothing to call"),
    "modalities": Inert((None, ["text"]), "text is what is produced"),
    "audio": Inert((None,), "text is what is produced"),
    "stream_reasoning": Inert((None, True), "thoughts are streamed as they come"),
    "verbosity": Inert((None, "medium"), "the default"),
    "web_search_options": Inert((None,), "not given"),
}

COMPLETIONS: Mapping[str, Inert] = {
    **COMMON,
    "suffix": Inert((None, ""), "nothing follows"),
}

# What to say of a value outside the table; the default message names the accepted ones.
REFUSALS: Mapping[str, str] = {
    "functions": "functions cannot be honoured: give them as tools, and function_call as tool_choice",
    "function_call": "function_call cannot be honoured: give tools and tool_choice",
    "suffix": "suffix cannot be honoured: the served model continues text, it does not fill in the middle",
    "store": "store cannot be honoured: this server stores nothing",
}
