"""mistral.rs, in an environment of its own. It takes text, so only its speed is comparable, not its tokens."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tokenizers import Tokenizer

from bench.workloads import Tokens


class MistralRS:
    """Each prompt is a completion request of its own, decoded to text first."""

    def __init__(self, folder: str) -> None:
        from mistralrs import Architecture, ModelDType, Runner, Which

        which = Which.Plain(model_id=folder, arch=Architecture.Llama, dtype=ModelDType.F32)
        self._runner = Runner(which=which, max_seqs=64, prefix_cache_n=64)
        self._tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        self._texts: dict[int, str] = {}

    def generate(self, prompts: list[Tokens], max_tokens: int, schema: dict[str, Any] | None = None) -> list[Tokens]:
        """All prompts as concurrent requests; outputs are stand-ins of the right length, as no ids come back."""
        from mistralrs import CompletionRequest

        grammar = {} if schema is None else {"grammar": json.dumps(schema), "grammar_type": "json_schema"}

        def complete(prompt: Tokens) -> Any:
            text = self._tokenizer.decode(prompt, skip_special_tokens=False)
            return self._runner.send_completion_request(
                CompletionRequest(
                    model="default",
                    prompt=text,
                    max_tokens=max_tokens,
                    temperature=0.0,
                    ignore_eos=schema is None,
                    **grammar,
                )
            )

        with ThreadPoolExecutor(len(prompts)) as pool:
            replies = list(pool.map(complete, prompts))
        self._texts = {index: reply.choices[0].text for index, reply in enumerate(replies)}
        return [[index] * reply.usage.completion_tokens for index, reply in enumerate(replies)]

    def text(self, ids: Tokens) -> str:
        """The output that `ids` stands for."""
        return self._texts[ids[0]]


def connect(folder: str) -> MistralRS:
    """Load a safetensors folder."""
    return MistralRS(folder)
