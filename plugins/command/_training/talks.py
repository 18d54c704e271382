"""Conversations that a model has with itself: it writes the user's turns as well as its own."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from phloem import Engine, SamplingParams
from phloem.errors import ModelError

from .openings import OPENINGS
from .record import Recorder, Text

Messages = list[dict[str, str]]
PROMPT, ANSWER, QUESTION = 512, 256, 200  # most tokens of what comes before an answer, of one, and of a user's turn
OPEN, AGAIN, WARM = 0.6, 0.35, 0.25  # shares: with an opening, with a second turn, of answers that are sampled
TEMPERATURE = 0.7  # of those
_MARK = "\u2042\u2042"  # stands for a message that is not written yet


@dataclass
class Talk:
    """A conversation; `number` is its own, over all rounds."""

    number: int
    messages: Messages = field(default_factory=list)


class Talks:
    """Rounds of conversations by an engine that has a Recorder. The same seed and round give the same texts.

    What a user says is sampled from the model itself, after what its chat template puts before a user's words (Xu et
    al., Magpie, arXiv:2406.08464), unless `prompts` are given: then each is used once.
    """

    def __init__(
        self, engine: Engine, recorder: Recorder, seed: int, prompts: Sequence[Messages] | None, batch: int
    ) -> None:
        """Raises ModelError for a model that is no chat model."""
        self._engine, self._recorder, self._seed, self._prompts, self._batch = engine, recorder, seed, prompts, batch
        if engine.tokenizer.chat_template is None:
            hint = "heads are trained on conversations: choose an instruction-tuned model"
            raise ModelError("the target has no chat template", hint=hint)

    def round(self, number: int, known: set[tuple[int, ...]]) -> Iterator[tuple[int, Text]]:
        """(conversation, text) of all answers. Prompts that are `known` are not answered again, and new ones added."""
        chance = random.Random(f"{self._seed}/{number}")
        numbers = range(number * self._batch, (number + 1) * self._batch)
        if self._prompts is not None:
            given = zip(numbers, self._prompts[numbers.start : numbers.stop], strict=False)
            yield from self._answer([Talk(i, list(messages)) for i, messages in given], chance, known)
        else:
            talks = self._ask([Talk(i) for i in numbers], chance)
            yield from self._answer(talks, chance, known)
            again = [talk for talk in talks if talk.messages[-1]["role"] == "assistant" and chance.random() < AGAIN]
            yield from self._answer(self._ask(again, chance), chance, known)

    def _ask(self, talks: Sequence[Talk], chance: random.Random) -> list[Talk]:
        """The talks with one user's turn more; those that came to nothing are left out."""
        if not talks:
            return []
        tokenizer, openings, prompts, params = self._engine.tokenizer, list[str](), list[list[int]](), []
        for talk in talks:
            openings.append(chance.choice(OPENINGS) if chance.random() < OPEN else "")
            ids = tokenizer.chat([*talk.messages, {"role": "user", "content": _MARK}], add_generation_prompt=False)
            before = tokenizer.decode(ids, skip_special_tokens=False).partition(_MARK)[0]
            prompts.append(tokenizer.encode(before + openings[-1], add_special=False))
            params.append(SamplingParams(temperature=1.0, max_tokens=QUESTION, seed=chance.getrandbits(31)))
        asked = []
        for talk, opening, result in zip(talks, openings, self._engine.generate(prompts, params), strict=True):
            text = (opening + result.text).strip()
            if result.finish_reason == "stop" and len(text) > 3:
                talk.messages.append({"role": "user", "content": text})
                asked.append(talk)
        return asked

    def _answer(
        self, talks: Sequence[Talk], chance: random.Random, known: set[tuple[int, ...]]
    ) -> Iterator[tuple[int, Text]]:
        """Answer each, and add the answers that came to an end to the talks."""
        turns: dict[tuple[int, ...], Talk] = {}
        for talk in talks:
            prompt = tuple(self._engine.tokenizer.chat(talk.messages))
            if prompt not in known and len(prompt) <= PROMPT:
                turns.setdefault(prompt, talk)
        if not turns:
            return
        known |= turns.keys()
        warm = [chance.random() < WARM for _ in turns]
        params = [
            SamplingParams(temperature=TEMPERATURE if each else 0.0, max_tokens=ANSWER, seed=chance.getrandbits(31))
            for each in warm
        ]
        self._recorder.on = True
        try:
            results = self._engine.generate([list(prompt) for prompt in turns], params)
        finally:
            self._recorder.on = False
        for talk, result in zip(turns.values(), results, strict=True):
            if result.finish_reason == "stop":
                talk.messages.append({"role": "assistant", "content": result.text})
        texts = [(turns[tuple(text.tokens[: text.prompt_len])].number, text) for text in self._recorder.take()]
        # in an order that does not depend on who ended first
        yield from sorted((pair for pair in texts if len(pair[1].tokens) > pair[1].prompt_len), key=_place)


def _place(pair: tuple[int, Text]) -> tuple[int, list[int]]:
    return pair[0], pair[1].tokens
