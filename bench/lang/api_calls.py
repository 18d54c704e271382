"""Independent calls of an OpenAI-compatible server through the official client, as its users write them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import openai

from bench.lang.programs._program import Messages


class ApiCalls:
    """Implements `Calls`. Connections are kept from run to run; nothing is retried."""

    def __init__(self, url: str, model: str) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
        self._model = model

    async def complete(
        self,
        prompt: str | Messages,
        max_tokens: int,
        *,
        stop: str | None = None,
        schema: dict[str, Any] | None = None,
    ) -> str:
        """One request, with the whole prompt."""
        extra: dict[str, Any] = {"ignore_eos": True} if stop is None and schema is None else {}
        if schema is not None:
            extra["json_schema"] = schema
        given: dict[str, Any] = {"model": self._model, "max_tokens": max_tokens, "temperature": 0, "extra_body": extra}
        if stop is not None:
            given["stop"] = stop
        if isinstance(prompt, str):
            completion = await self._client.completions.create(prompt=prompt, **given)
            written: str = completion.choices[0].text
            return written
        given["messages"] = prompt
        chat = await self._client.chat.completions.create(**given)
        text: str = chat.choices[0].message.content or ""
        return text

    async def choose(self, prompt: str, choices: Sequence[str]) -> str:
        """A request per choice, all at once: the prompt with the choice is echoed with its log-probabilities."""
        scores = await asyncio.gather(*(self._score(prompt, choice) for choice in choices))
        return choices[max(range(len(choices)), key=scores.__getitem__)]

    async def _score(self, prompt: str, choice: str) -> float:
        answer = await self._client.completions.create(
            model=self._model, prompt=prompt + choice, max_tokens=0, echo=True, logprobs=0, temperature=0
        )
        found = answer.choices[0].logprobs
        assert found is not None
        assert found.token_logprobs is not None
        assert found.text_offset is not None
        of_choice = [
            logprob
            for logprob, offset in zip(found.token_logprobs, found.text_offset, strict=True)
            if offset >= len(prompt)
        ]
        return sum(of_choice) / len(of_choice)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.close()
