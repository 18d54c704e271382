"""transformers without any sharing between calls: whoever waits is put into one padded batch, whole prompts each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from bench.lang.programs._program import Messages
from tests.support import hf_folder

BATCH = 16  # rows of one forward pass at most
IDLE = 10  # turns of the event loop without a new call: then everybody who runs waits for the model


class Waiting(NamedTuple):
    """A call that is not answered yet."""

    ids: list[int]
    max_tokens: int  # 0: the last `scored` tokens are to be scored
    scored: int
    stop: str | None
    answer: asyncio.Future[Any]


class UnsharedCalls:
    """Implements `Calls` on a model of this process."""

    def __init__(self, model: str) -> None:
        """`model` is a known name or a safetensors folder. Float32, greedy."""
        folder = model if Path(model).is_dir() else hf_folder(model)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._model.generation_config = transformers.GenerationConfig(
            do_sample=False, eos_token_id=None, pad_token_id=0, bos_token_id=1
        )
        self._waiting: list[Waiting] = []
        self._pump: asyncio.Task[None] | None = None

    async def complete(
        self,
        prompt: str | Messages,
        max_tokens: int,
        *,
        stop: str | None = None,
        schema: dict[str, Any] | None = None,
    ) -> str:
        """Continue a prompt. A schema is not enforced, there is no grammar: as many free tokens are written."""
        text = prompt if isinstance(prompt, str) else self._chat(prompt)
        made = await self._ask(self._encode(text), max_tokens, 0, stop)
        written: str = self._tokenizer.decode(made, skip_special_tokens=True)
        return written.partition(stop)[0] if stop else written

    async def choose(self, prompt: str, choices: Sequence[str]) -> str:
        """A row per choice."""
        start = len(self._encode(prompt))
        rows = [self._encode(prompt + choice) for choice in choices]
        scores = await asyncio.gather(*(self._ask(row, 0, len(row) - start, None) for row in rows))
        return choices[max(range(len(choices)), key=scores.__getitem__)]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _chat(self, messages: Messages) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    async def _ask(self, ids: list[int], max_tokens: int, scored: int, stop: str | None) -> Any:
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(Waiting(ids, max_tokens, scored, stop, answer))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        return await answer

    async def _run(self) -> None:
        """Answer in batches until nobody waits."""
        while self._waiting:
            known, idle = len(self._waiting), 0
            while idle < IDLE:
                await asyncio.sleep(0)
                idle = 0 if len(self._waiting) != known else idle + 1
                known = len(self._waiting)
            first = self._waiting[0]
            alike = [one for one in self._waiting if (one.max_tokens, one.stop) == (first.max_tokens, first.stop)]
            batch = sorted(alike, key=lambda one: len(one.ids))[:BATCH]  # equal lengths together: little padding
            self._waiting = [one for one in self._waiting if one not in batch]
            try:
                results = self._generated(batch) if first.max_tokens else self._scores(batch)
            except Exception as error:
                for one in batch:
                    one.answer.set_exception(error)
                continue
            for one, result in zip(batch, results, strict=True):
                one.answer.set_result(result)

    def _rectangle(self, batch: Sequence[Waiting]) -> dict[str, torch.Tensor]:
        width = max(len(one.ids) for one in batch)
        ids = torch.tensor([[0] * (width - len(one.ids)) + one.ids for one in batch])
        mask = torch.tensor([[0] * (width - len(one.ids)) + [1] * len(one.ids) for one in batch])
        return {"input_ids": ids, "attention_mask": mask}

    @torch.inference_mode()
    def _generated(self, batch: Sequence[Waiting]) -> list[list[int]]:
        inputs = self._rectangle(batch)
        width = inputs["input_ids"].shape[1]
        stop = batch[0].stop
        ends = transformers.StoppingCriteriaList([self._ends(stop, width)] if stop else [])
        made = self._model.generate(**inputs, max_new_tokens=batch[0].max_tokens, stopping_criteria=ends)
        rows: list[list[int]] = made[:, width:].tolist()
        return rows

    def _ends(self, stop: str, width: int) -> Callable[..., torch.Tensor]:
        """A criterion: which rows have written the stop string."""

        def ended(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return torch.tensor([stop in text for text in self._tokenizer.batch_decode(ids[:, width:])])

        return ended

    @torch.inference_mode()
    def _scores(self, batch: Sequence[Waiting]) -> list[float]:
        """Mean log-probability of the last `scored` tokens of each row."""
        inputs = self._rectangle(batch)
        keep = max(one.scored for one in batch) + 1
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        logits = self._model(**inputs, position_ids=positions, logits_to_keep=keep).logits.log_softmax(-1)
        found = []
        for row, one in zip(logits, batch, strict=True):
            targets = torch.tensor(one.ids[-one.scored :])
            found.append(row[-one.scored - 1 : -1].gather(1, targets[:, None]).mean().item())
        return found
