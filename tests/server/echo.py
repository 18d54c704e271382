"""A small engine without a model: it answers by repeating the prompt's tokens. Runs in-process or as a model process.

Its config (a plain mapping) can slow it down or break it: `step_s`, `load_s`, `fail`, `die_on` (a token id). It can
also answer a text instead, `reply` (a list: one for each choice), then end; believe any constraint, `grammar`, with
`notes` at the end; and have another chat `template`. Of tokens to score, higher ids are likelier.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import phloem
from phloem.errors import ModelError, QueueFullError, RequestError
from phloem.interfaces import ServiceInfo, TokenizerData
from phloem.messages import ErrorInfo, Event, GenerateCall, TokenLogprob, Usage
from phloem.model_spec import LayerSpec, ModelSpec
from phloem.stats import Counters
from phloem.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
import support

VOCABULARY = 260
MOST_TOKENS = 256
SPEC = ModelSpec("echo", VOCABULARY, MOST_TOKENS, (LayerSpec(1, 8, 8),), eos_token_ids=(1,))


def tokenizer_data(template: str = support.TEMPLATE) -> TokenizerData:
    """One token per byte, and four special ones: every character beyond ASCII is split."""
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(special)
    return TokenizerData(raw.to_str(), template, {"eos_token": "</s>"})


@dataclass
class Running:
    """One choice on its way."""

    call: GenerateCall
    index: int
    answer: list[int]  # repeated, unless it ends
    ends: bool = False
    notes: list[str] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    shown: int = 0
    told: int = 0

    def event(self, text: str, reason: str | None, **more: Any) -> Event:
        """What is new."""
        params, new = self.call.params, self.made[self.told :]
        made = Event(
            call_id=self.call.call_id, index=self.index, token_ids=new, text=text, finish_reason=reason, **more
        )
        if params.logprobs is not None:
            made.logprobs = [_logprob(token, params.logprobs) for token in new]
        if params.prompt_logprobs is not None and not self.told:
            made.prompt_logprobs = [None, *(_logprob(t, params.prompt_logprobs) for t in self.call.prompt[1:])]
        if reason is not None:
            made.notes = self.notes
            made.usage = Usage(prompt_tokens=len(self.call.prompt), completion_tokens=len(self.made), cached_tokens=1)
        self.told = len(self.made)
        return made


def _logprob(token: int, top: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, [((token + i) % VOCABULARY, -0.5 - i) for i in range(top)])


class EchoCore:
    """The interface of `phloem.loop.EngineCore`. A step adds one token to every choice: the prompt, over and over."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        if "fail" in config:
            raise ModelError(config["fail"], hint="choose another")
        if "crash" in config:
            raise RuntimeError(config["crash"])
        time.sleep(config.get("load_s", 0.0))
        self.limit = config.get("context", MOST_TOKENS)
        self.info = ServiceInfo("echo", "/models/echo", SPEC, self.limit, 1.5)
        self.tokenizer_data = tokenizer_data(config.get("template", support.TEMPLATE))
        self.tokenizer = Tokenizer(self.tokenizer_data)
        self.progress = (0, time.monotonic())
        self.counters = Counters()
        self.flushed = 0
        self.dropped: list[str] = []  # holds
        self.pinned: set[str] = set()
        self.seen: list[GenerateCall] = []
        self.calls: dict[str, list[Running]] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._events: list[Event] = []
        self._stopping = False

    @property
    def busy(self) -> bool:
        return bool(self.calls)

    def submit(self, call: GenerateCall) -> None:
        self._inbox.put(lambda: self._admit(call))

    def abort(self, call_id: str) -> None:
        def work() -> None:
            for running in self.calls.get(call_id, []):
                self._events.append(running.event("", "abort"))
            self.calls.pop(call_id, None)

        self._inbox.put(work)

    def invoke(self, function: Callable[[EchoCore], Any]) -> Future[Any]:
        done: Future[Any] = Future()

        def work() -> None:
            try:
                done.set_result(function(self))
            except Exception as error:
                done.set_exception(error)

        self._inbox.put(work)
        return done

    def stop(self) -> None:
        self._inbox.put(lambda: setattr(self, "_stopping", True))

    def run(self, emit: Callable[[list[Event]], None], ready: Callable[[], None] = lambda: None) -> None:
        ready()
        while not self._stopping:
            self._drain()
            if self.calls:
                self._step()
            if self._events:
                events, self._events = self._events, []
                emit(events)

    def stats(self) -> dict[str, Any]:
        held = sum(len(r.call.prompt) + len(r.made) for group in self.calls.values() for r in group)
        more: dict[str, Any] = {
            "evicted_tokens": 0,
            "retractions": 0,
            "waiting": 0,
            "running": sum(map(len, self.calls.values())),
        }
        more["holds"] = {"count": 0, "tokens": 0, "revoked": 0, "expired": 0}
        more["events"] = {"batches": 0, "overflows": 0}
        more["tiers"] = None
        more["pins"] = {"count": len(self.pinned), "tokens": 0}
        group = {"total": 1000, "free": 1000 - held, "evictable": 0, "protected": 0, "leased": held}
        return {**self.counters.snapshot(), **more, "groups": [group]}

    def flush_cache(self) -> None:
        self.flushed += 1

    def drop_hold(self, name: str) -> bool:
        self.dropped.append(name)
        return True

    def unpin(self, name: str) -> bool:
        known = name in self.pinned
        self.pinned.discard(name)
        return known

    def _drain(self) -> None:
        block = not self.calls
        while not self._stopping:
            try:
                self._inbox.get(block=block)()
            except queue.Empty:
                return
            block = False
            if self._events:
                return

    def _admit(self, call: GenerateCall) -> None:
        length, want = len(call.prompt), call.params.max_tokens or 1
        error: Exception | None = None
        self.seen.append(call)
        self.pinned |= {call.pin} if call.pin else set()
        if length + want > self.limit:
            problem = f"prompt of {length} tokens + {want} exceeds the limit of {self.limit}"
            error = RequestError(problem, param="prompt")
        elif len(self.calls) >= self.config.get("most_calls", 10_000):
            error = QueueFullError(f"{len(self.calls)} requests are waiting")
        elif call.params.constraints and not self.config.get("grammar"):
            (kind,) = call.params.constraints
            error = RequestError(f"{kind} cannot be honoured: no grammar backend", param=kind)
        if error is not None:
            info = ErrorInfo(
                kind=error.kind, message=error.message, status=error.status, hint=error.hint, param=error.param
            )
            self._events.append(Event(call_id=call.call_id, finish_reason="error", error=info))
            return
        if call.score is not None:
            usage = Usage(prompt_tokens=length, cached_tokens=1)
            scores = [[token - VOCABULARY + 0.0 for token in one] for one in call.score]
            self._events.append(Event(call_id=call.call_id, finish_reason="stop", scores=scores, usage=usage))
            return
        notes = self.config.get("notes", [])
        if "reply" in self.config:
            answers = [self.tokenizer.encode(text, add_special=False) for text in self.config["reply"]]
        else:
            answers = [call.prompt]
        self.calls[call.call_id] = [
            Running(call, i, answers[i % len(answers)], "reply" in self.config, notes) for i in range(call.params.n)
        ]

    def _step(self) -> None:
        time.sleep(self.config.get("step_s", 0.0))
        for call_id, group in list(self.calls.items()):
            if self.config.get("die_on") in group[0].call.prompt:
                os.kill(os.getpid(), signal.SIGKILL)
            left = [running for running in group if not self._advance(running)]
            if left:
                self.calls[call_id] = left
            else:
                del self.calls[call_id]
        self.progress = (self.progress[0] + 1, time.monotonic())
        self.counters.steps += 1

    def _advance(self, running: Running) -> bool:
        """One token further; True when the choice has ended."""
        params, prompt = running.call.params, running.call.prompt
        running.made.append(running.answer[len(running.made) % len(running.answer)])
        whole = self.tokenizer.decode(running.made, params.skip_special_tokens)
        limit = params.max_tokens or self.limit - len(prompt)
        stop = next((s for s in params.stop if s in whole), None)
        ended = stop is not None or (running.ends and len(running.made) == len(running.answer))
        reason = "stop" if ended else "length" if len(running.made) >= limit else None
        if stop is not None:
            whole = whole[: whole.index(stop)]
        held = len(whole) if reason else len(whole) - _held_back(whole, params.stop)
        text, running.shown = whole[running.shown : held], max(held, running.shown)
        if reason or running.call.stream:
            self._events.append(running.event(text, reason, stop_reason=stop))
        else:
            running.shown -= len(text)
        return reason is not None


def _held_back(text: str, stops: list[str]) -> int:
    """Characters at the end that may become a stop string, or a broken character."""
    broken = len(text) - len(text.rstrip("\ufffd"))
    starts = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return max(broken, max(starts, default=0))


def load(config: dict[str, Any]) -> tuple[EchoCore, str, dict[str, str]]:
    """What the model process asks for."""
    return EchoCore(config), "1,000 tokens x 0 bytes = 0.00 GiB of KV", {"cache": "radix"}


if __name__ == "__main__":
    assert phloem
    from phloem.server.worker import main

    sys.exit(main(load))
