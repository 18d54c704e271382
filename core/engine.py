"""The library's door: `Engine` runs the loop on a thread of this process and speaks sync, async and streaming."""

from __future__ import annotations

import asyncio
import itertools
import operator
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar, overload

from .choosing import join
from .config import Config, load_config
from .errors import AbortedError, ConfigError, EngineDeadError, RequestError
from .messages import Event, GenerateCall, pin_call
from .params import SamplingParams
from .results import Collector, Output, Result
from .service import LocalService, Sink
from .tokenizer import Tokenizer
from .writer import error_info

if TYPE_CHECKING:
    from .events import EventBatch
    from .feed import Feed, Subscription
    from .loop import EngineCore

Prompt = str | list[int]
T = TypeVar("T")
_NAMES = ("salt", "adapter", "routing_key", "group", "hold")
_OF_CALL: Mapping[str, Any] = {
    "priority": int,
    "hold_idle_s": float | int | None,
    **dict.fromkeys(_NAMES, str | None),
}


class Engine:
    """A model that generates. Sections of the YAML are keyword arguments: `Engine("smollm2-135m", cache={...})`.

    `model` is a known name, a folder, a GGUF file or a hub id. Thread-safe. Use it as a context
    manager, or call `close()`.
    """

    def __init__(self, model: str | None = None, /, **sections: Any) -> None:
        if model is not None:
            given = sections.get("model", {})
            if isinstance(given, Mapping) and "path" in given:
                raise ConfigError(f"the model is given twice: {model!r} and model.path {given['path']!r}")
            sections["model"] = {**({"use": given} if isinstance(given, str) else given), "path": model}
        self._start(load_config(sections=sections))

    @classmethod
    def from_yaml(cls, path: str, *, sets: Sequence[str] = ()) -> Engine:
        """An engine from a YAML file; `sets` are overrides such as "cache.page_size=16"."""
        return cls.from_config(load_config(path, sets=sets))

    @classmethod
    def from_config(cls, config: Config) -> Engine:
        """An engine from a configuration that is loaded already."""
        engine = cls.__new__(cls)
        engine._start(config)
        return engine

    def _start(self, config: Config) -> None:
        self.config = config
        self._sinks: dict[str, Sink] = {}
        self.names: dict[str, str] = {}  # calls of API plugins by the callers' ids -> the loop's
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._prefix = uuid.uuid4().hex[:8]
        self._closed = False
        self._asked: set[Future[Any]] = set()  # by `invoke`
        # Loaded on the loop's thread: OpenMP gives each thread that computes a pool of its own, and a second pool
        # makes the workers of both sleep between any two operations.
        built: Future[EngineCore] = Future()
        self._thread = threading.Thread(target=self._serve, args=(built,), name="phloem-loop", daemon=True)
        self._thread.start()
        self.core = built.result()
        self.tokenizer = Tokenizer(self.core.tokenizer_data)

    # --- life

    def _serve(self, built: Future[EngineCore]) -> None:
        try:
            from .loop import EngineCore  # torch comes with it; `import phloem` must stay cheap

            core = EngineCore.from_config(self.config)
            core.run(self._emit, lambda: built.set_result(core))
        except BaseException as error:
            if built.done():
                raise
            built.set_exception(error)
        finally:
            self._end()

    def _end(self) -> None:
        """The loop has ended: who still waits for it learns so."""
        with self._lock:
            self._closed = True
            left, self._sinks = self._sinks, {}
            asked = [future for future in self._asked if not future.done()]
        gone = EngineDeadError("the engine is closed")
        for future in asked:
            future.set_exception(gone)
        for call_id, sink in left.items():
            sink(Event(call_id=call_id, finish_reason="error", error=error_info(gone)))

    def _emit(self, events: list[Event]) -> None:
        for event in events:
            sink = self._sinks.get(event.call_id)
            if sink is not None:
                sink(event)

    def close(self) -> None:
        """Abort what runs and stop the loop. Idempotent."""
        self.core.stop()
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- generation

    @overload
    def generate(self, prompt: str | list[int], params: SamplingParams | None = None, **call: Any) -> Result: ...
    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **call: Any,
    ) -> list[Result]: ...
    def generate(
        self, prompt: Any, params: SamplingParams | Sequence[SamplingParams] | None = None, **call: Any
    ) -> Any:
        """Continue a prompt (text or token ids), or each of a list of them, all submitted at once.

        A list of prompts shares its `params`, or has a list of them, one each. `call` takes salt, adapter, priority,
        routing_key, group, hold and hold_idle_s. Raises RequestError and others of phloem.errors; in a list, the first
        error ends the call and aborts the rest.
        """
        calls, single = self._calls(prompt, params, call)
        results = self._run(calls)
        return results[0] if single else results

    def _run(self, calls: Sequence[GenerateCall]) -> list[Result]:
        inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        collectors = {c.call_id: Collector(c.prompt, c.params.n) for c in calls}
        try:
            for made in calls:
                self.open_call(made, inbox.put)
            while not all(collector.done for collector in collectors.values()):
                event = inbox.get()
                collectors[event.call_id].add(event)
        finally:
            for call_id, collector in collectors.items():
                self.close_call(call_id, abort=not collector.done)
        return [collector.result for collector in collectors.values()]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **call: Any) -> Iterator[Result]:
        """Yield deltas as they come: in each Result only what is new. Leaving the loop early aborts the call."""
        made = self._call(prompt, params, stream=True, **call)
        inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        collector = Collector(made.prompt, made.params.n)
        try:
            self.open_call(made, inbox.put)
            while not collector.done:
                event = inbox.get()
                collector.add(event)
                yield _delta(event, collector)
        finally:
            self.close_call(made.call_id, abort=not collector.done)

    async def agenerate(
        self, prompt: Any, params: SamplingParams | Sequence[SamplingParams] | None = None, **call: Any
    ) -> Any:
        """`generate` for asyncio. Cancelling it aborts the calls."""
        calls, single = self._calls(prompt, params, call)
        tasks = [asyncio.ensure_future(self._arun(made)) for made in calls]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return results[0] if single else results

    async def _arun(self, made: GenerateCall) -> Result:
        collector = Collector(made.prompt, made.params.n)
        async for event in self.service().submit(made):
            collector.add(event)
        return collector.result

    def score(self, prompt: Prompt, choices: list[str] | list[list[int]], **call: Any) -> list[list[float]]:
        """Per choice the natural log-probabilities of its tokens as a continuation of the prompt; raw, in float32.

        All choices run as one tree in one forward pass. Texts are tokenised together with the prompt, and where a text
        merges with the prompt's last token, its first token is that one (`phloem.choosing.join`). `call` is that of
        `generate`; errors, too.
        """
        return _scores(self._run([self._scoring(prompt, choices, **call)])[0])

    async def ascore(self, prompt: Prompt, choices: list[str] | list[list[int]], **call: Any) -> list[list[float]]:
        """`score` for asyncio."""
        return _scores(await self._arun(self._scoring(prompt, choices, **call)))

    def _scoring(self, prompt: Prompt, choices: Any, **call: Any) -> GenerateCall:
        if not isinstance(choices, (list, tuple)):
            raise RequestError(f"choices must be a list, got {choices!r}", param="choices")
        if choices and all(isinstance(choice, str) for choice in choices):
            before, tail = ([], prompt) if isinstance(prompt, str) else (_token_ids(prompt), "")
            joint = join(self.tokenizer, before, tail, choices)
            prompt, choices = joint.prompt, joint.continuations
        made = self._call(prompt, None, stream=False, **call)
        made.score = [_token_ids(choice) for choice in choices]
        return made

    async def astream(self, prompt: Prompt, params: SamplingParams | None = None, **call: Any) -> AsyncIterator[Result]:
        """`stream` for asyncio."""
        made = self._call(prompt, params, stream=True, **call)
        collector = Collector(made.prompt, made.params.n)
        async for event in self.service().submit(made):
            collector.add(event)
            yield _delta(event, collector)

    # --- for API plugins

    def service(self) -> LocalService:
        """This engine behind core's program interface."""
        return LocalService(self)

    # --- inspection

    def stats(self) -> Mapping[str, Any]:
        """Counters since the start, and slot usage per state group (docs/library.md)."""
        return self.invoke(lambda core: core.stats()).result()

    def check(self) -> None:
        """Verify that every KV slot has exactly one owner. Raises AssertionError."""
        self.invoke(lambda core: core.check()).result()

    def flush_cache(self) -> None:
        """Drop cached state that no request uses, and all holds."""
        self.invoke(lambda core: core.flush_cache()).result()

    def drop_hold(self, name: str) -> bool:
        """Release what a call with `hold=name` left locked; False if nothing is."""
        return self.invoke(lambda core: core.drop_hold(name)).result()

    def cache_events(self, *, limit: int = 1024) -> Subscription:
        """What the cache holds, then every change of it: an iterator of batches (docs/events.md), to be closed.

        A reader that falls behind by more than `limit` batches gets the whole state anew. Blocks; read it on a thread.
        """
        from .feed import Subscription  # numpy comes with it

        return Subscription(self._feed(), limit)

    def on_cache_events(self, callback: Callable[[EventBatch], None]) -> Callable[[], None]:
        """Have `callback` called with the same batches; returns the function that ends this.

        It is called on a thread of the engine and must not wait for the engine. One that raises is called no more.
        """
        feed = self._feed()
        with feed.lock:
            callback(feed.snapshot())
            feed.subscribe(callback)
        return lambda: feed.unsubscribe(callback)

    def _feed(self) -> Feed:
        self.invoke(lambda core: core.parts.feed.listen()).result()
        return self.core.parts.feed

    def pin(self, name: str, prompt: Prompt, **call: Any) -> int:
        """Compute a prefix, if need be, and keep it in the cache until `unpin(name)`; returns its tokens, whole pages.

        `call` takes salt, adapter, routing_key and priority, as the calls that are to find it have them. Raises
        RequestError where that would be more than `cache.pin_share` allows. A pin replaces an older one of its name.
        """
        if foreign := call.keys() - {"salt", "adapter", "routing_key", "priority"}:
            raise RequestError(f"unknown argument {min(foreign)!r}", param=min(foreign))
        asked = self._call(prompt, None, stream=False, **call)
        made = pin_call(asked.call_id, name, asked.prompt, **call)
        self._run([made])
        return len(made.prompt) // self.config.cache.page_size * self.config.cache.page_size

    def unpin(self, name: str) -> bool:
        """Let a pinned prefix go, to be evicted like any other; False if there is none of that name."""
        return self.invoke(lambda core: core.unpin(name)).result()

    @property
    def model_path(self) -> str:
        """The folder or file that was loaded."""
        return self.core.info.model_path

    # --- helpers

    def invoke(self, function: Callable[[EngineCore], T]) -> Future[T]:
        """Run `function` between two steps, on the loop's thread. EngineDeadError where the loop ends before."""
        with self._lock:
            if self._closed:
                raise EngineDeadError("the engine is closed")
            made = self.core.invoke(function)
            self._asked.add(made)
            made.add_done_callback(self._asked.discard)
        return made

    def _calls(self, prompt: Any, params: Any, call: dict[str, Any]) -> tuple[list[GenerateCall], bool]:
        """A call for each prompt, and whether the caller gave a single one."""
        prompts, single = _as_list(prompt)
        each = [params] * len(prompts)
        if isinstance(params, list | tuple) and not single:
            each = list(params)
        if len(each) != len(prompts):
            raise RequestError(f"{len(each)} params for {len(prompts)} prompts", param="params")
        return [self._call(*pair, stream=False, **call) for pair in zip(prompts, each, strict=True)], single

    def _call(self, prompt: Prompt, params: Any, *, stream: bool, **call: Any) -> GenerateCall:
        for name, value in call.items():
            if name not in _OF_CALL:
                raise RequestError(f"unknown argument {name!r}", param=name)
            if not isinstance(value, _OF_CALL[name]):
                raise RequestError(f"{name} has the wrong type, got {value!r}", param=name)
        if not isinstance(params, SamplingParams | None):
            raise RequestError(f"params must be SamplingParams, got {params!r}", param="params")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        call_id = f"{self._prefix}-{next(self._ids)}"
        return GenerateCall(call_id=call_id, prompt=ids, params=params or SamplingParams(), stream=stream, **call)

    def open_call(self, call: GenerateCall, sink: Sink) -> None:
        with self._lock:
            if self._closed:
                raise EngineDeadError("the engine is closed")
            self._sinks[call.call_id] = sink
        self.core.submit(call)

    def close_call(self, call_id: str, *, abort: bool) -> None:
        """Stop listening to a call; `abort` it if it is not done."""
        self._sinks.pop(call_id, None)
        if abort:
            self.core.abort(call_id)


def _as_list(prompt: Any) -> tuple[list[Prompt], bool]:
    """A list of prompts, and whether the caller gave a single one."""
    if isinstance(prompt, (list, tuple)) and any(isinstance(item, (str, list, tuple)) for item in prompt):
        return list(prompt), False
    return [prompt], True  # `_call` judges it


def _token_ids(prompt: Any) -> list[int]:
    """The ids of a prompt given as ids; whatever counts as an integer will do, such as numpy's."""
    if not isinstance(prompt, (list, tuple)):
        raise RequestError(f"a prompt is a string or a list of token ids, got {type(prompt).__name__}", param="prompt")
    if not prompt:
        raise RequestError("the prompt is empty", hint="give at least one token or one prompt", param="prompt")
    try:
        if bool in map(type, prompt):
            raise TypeError
        return [operator.index(token) for token in prompt]
    except TypeError:
        kinds = ", ".join(sorted({type(token).__name__ for token in prompt}))
        raise RequestError(f"the token ids of a prompt are integers, got {kinds}", param="prompt") from None


def _scores(result: Result) -> list[list[float]]:
    if result.scores is None:
        raise AbortedError("the scoring was aborted", hint="the engine is closing")
    return result.scores


def _delta(event: Event, collector: Collector) -> Result:
    """What one event adds, as a Result of the one choice that moved; `usage` is the call's so far."""
    moved = Output(event.index)
    moved.add(event)
    return Result([moved], [], event.prompt_logprobs, collector.result.usage)
