"""What a program's state runs: generations and selections, each in its turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from phloem.choosing import METHODS, bare_calls, choose, unconditional
from phloem.interfaces import Service
from phloem.messages import Event, GenerateCall, Usage
from phloem.params import SamplingParams

from ._logprobs import entry, finite, prompt_entries
from ._params import new_id
from ._program_store import State, Store
from ._program_text import Added
from ._prompt import LONG_TEXT
from ._run import Choice as Answer
from ._run import total_usage
from ._sse import DONE, sse

if TYPE_CHECKING:
    from phloem.tokenizer import Tokenizer

T = TypeVar("T")


class Way(NamedTuple):
    """How an operation goes about its state's text."""

    added: Added = Added("", False)  # what it begins with
    append: bool = True  # its result joins
    name: str | None = None  # the variable that keeps its result


class Runner:
    """Runs operations of states on a service."""

    def __init__(self, service: Service, store: Store) -> None:
        self._service, self._store = service, store

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._service.tokenizer

    async def events(
        self, state: State, params: SamplingParams, way: Way, *, stream: bool
    ) -> AsyncGenerator[Event, None]:
        """Continue the text in the state's turn. When all choices have ended, the first one joins it."""
        async with state.turn(way.added):
            prompt = await self._tokenised(state, state.text.commit)
            answer = Answer()
            async with aclosing(self._call(state, prompt, params, stream=stream)) as events:
                async for event in events:
                    if event.index == 0:
                        answer.add(event)
                    yield event
            if way.append:
                ends = {*self._service.info.spec.eos_token_ids, *params.stop_token_ids}
                state.text.generated(self._service.tokenizer, answer, params, ends)
            if way.name is not None:
                state.variables[way.name] = answer.text

    async def generate(self, state: State, params: SamplingParams, way: Way) -> dict[str, Any]:
        """The whole answer."""
        answers = [Answer() for _ in range(params.n)]
        events = self.events(state, params, way, stream=False)
        async with aclosing(events):
            async for event in events:
                answers[event.index].add(event)
        shown = [self._part(answer) for answer in answers]
        more = {"choices": shown} if params.n > 1 else {}
        return shown[0] | {"usage": _usage(total_usage([answers]))} | more

    async def chunks(
        self, state: State, params: SamplingParams, way: Way, shown: dict[str, Any]
    ) -> AsyncGenerator[bytes, None]:
        """The answer in server-sent events; `shown` joins the first."""
        events = self.events(state, params, way, stream=True)
        usage = Usage()
        async with aclosing(events):
            async for event in events:
                part = shown | {"index": event.index} | self._part(event)
                shown = {}
                if event.usage is not None:
                    usage.completion_tokens += event.usage.completion_tokens
                    usage.prompt_tokens = event.usage.prompt_tokens
                    usage.cached_tokens = event.usage.cached_tokens if event.index == 0 else usage.cached_tokens
                    part["usage"] = _usage(usage)
                yield sse(part)
        yield DONE

    async def select(
        self, state: State, choices: list[str], method: str, way: Way, *, temperature: float
    ) -> dict[str, Any]:
        """Score all choices as one tree behind the text; the best, or one drawn by its score, joins it."""
        choose(method, [[0.0]], [[0.0]])  # refuses an unknown method before anything runs
        async with state.turn(way.added):
            joint = await self._tokenised(state, lambda tokenizer: state.text.joint(tokenizer, choices))
            scores, usage = await self._score(state, joint.prompt, joint.continuations)
            bare = None
            if method == METHODS[2]:
                calls = bare_calls(joint.continuations)
                results = await asyncio.gather(*(self._score(None, call.prompt, call.score, state) for call in calls))
                bare = unconditional(joint.continuations, calls, [scored for scored, _ in results])
            chosen = choose(method, scores, bare)
            index = chosen.drawn(temperature)
            if way.append:
                state.text.choose(joint, index, choices[index])
            if way.name is not None:
                state.variables[way.name] = choices[index]
        return {
            "choice": choices[index],
            "index": index,
            "scores": [finite(score) for score in chosen.scores],
            "token_logprobs": [[finite(logprob) for logprob in row] for row in scores],
            "usage": _usage(usage),
        }

    async def _score(
        self, state: State | None, prompt: list[int], continuations: list[list[int]], of: State | None = None
    ) -> tuple[list[list[float]], Usage]:
        """Log-probabilities of continuations; without a `state` they are not of its text, and leave no hold."""
        owner = state or of
        assert owner is not None
        params = SamplingParams()
        call = self._call(owner, prompt, params, stream=False, score=continuations, holds=state is not None)
        async with aclosing(call) as events:
            async for event in events:
                if event.scores is not None:
                    return event.scores, event.usage or Usage()
        raise self._store.aborted(owner)

    async def _call(
        self,
        state: State,
        prompt: list[int],
        params: SamplingParams,
        *,
        stream: bool,
        score: list[list[int]] | None = None,
        holds: bool = True,
    ) -> AsyncGenerator[Event, None]:
        """One call of a state. Raises AbortedError if it is aborted, by the state's deletion for one."""
        call = GenerateCall(
            call_id=new_id("call"), prompt=prompt, params=params, priority=state.priority, salt=state.salt,
            stream=stream, score=score, group=state.group, hold=state.id if holds else None,
        )  # fmt: skip
        if holds:
            state.call_id, state.held = call.call_id, True
        try:
            async with aclosing(self._service.submit(call)) as events:
                async for event in events:
                    if event.finish_reason == "abort" or state.deleted:
                        raise self._store.aborted(state)
                    yield event
        finally:
            if holds:
                state.call_id = None

    async def _tokenised(self, state: State, work: Callable[[Any], T]) -> T:
        """Tokenising a long text leaves the event loop's thread."""
        if len(state.text.tail) > LONG_TEXT:
            return await asyncio.to_thread(work, self._service.tokenizer)
        return work(self._service.tokenizer)

    def _part(self, part: Answer | Event) -> dict[str, Any]:
        """What an answer, or a part of one, shows of one choice."""
        tokenizer = self._service.tokenizer
        shown: dict[str, Any] = {"text": part.text, "token_ids": part.token_ids, "finish_reason": part.finish_reason}
        if part.finish_reason is not None:
            shown["stop_reason"] = part.stop_reason
        if part.notes:
            shown["notes"] = part.notes
        if part.logprobs is not None:
            shown["logprobs"] = [entry(tokenizer, item) for item in part.logprobs]
        if part.prompt_logprobs is not None:
            shown["prompt_logprobs"] = prompt_entries(tokenizer, part.prompt_logprobs)
        return shown


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }
