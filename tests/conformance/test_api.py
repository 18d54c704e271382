"""The built-in APIs pass the conformance suite of their kind."""

from __future__ import annotations

from typing import Any, ClassVar

from phloem.plugins.api.native import NativeApi
from phloem.plugins.api.openai import OpenAIApi
from phloem.testing.api import ApiSuite

Calls = tuple[tuple[str, dict[str, Any]], ...]
USER = [{"role": "user", "content": "hi"}]


class TestOpenAI(ApiSuite):
    plugin = OpenAIApi
    calls: ClassVar[Calls] = (
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": ["hi", "hi one"], "stream": True, "n": 2}),
        ("/v1/chat/completions", {"messages": USER, "model": "toy"}),
        ("/v1/chat/completions", {"messages": USER, "stream": True}),
    )


class TestNative(ApiSuite):
    plugin = NativeApi
    calls: ClassVar[Calls] = (
        ("/generate", {"text": "hi"}),
        ("/generate", {"input_ids": [[1], [2]], "stream": True}),
    )
