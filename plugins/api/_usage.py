"""Token counts in OpenAI's shape, also of a request that is answered by several calls and choices."""

from __future__ import annotations

from typing import Any

from phloem.messages import Event, Usage


def usage_body(usage: Usage) -> dict[str, Any]:
    """The `usage` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class UsageSum:
    """Adds up the counts of a stream: a call's prompt once (that of its first choice), completions of all."""

    def __init__(self) -> None:
        self._total = Usage()

    def add(self, event: Event) -> None:
        """Count a choice's last event. Choices may end in any order."""
        usage = event.usage or Usage()
        self._total.completion_tokens += usage.completion_tokens
        if event.index == 0:
            self._total.prompt_tokens += usage.prompt_tokens
            self._total.cached_tokens += usage.cached_tokens

    def body(self) -> dict[str, Any]:
        """The sum, as the `usage` object."""
        return usage_body(self._total)
