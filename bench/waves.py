"""Calls with parameters of their own, all submitted at once to an engine of this process, and what they took."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from phloem import Engine, SamplingParams
from phloem.messages import Event, GenerateCall
from phloem.results import Collector

Tokens = list[int]


class Call(NamedTuple):
    """One prompt and how to continue it."""

    prompt: Tokens
    params: SamplingParams


class Wave(NamedTuple):
    """`seconds` from the first step to the last event; `decode_s` from each call's first token to its last, summed."""

    seconds: float
    decode_s: float
    outputs: list[Tokens]
    grew: dict[str, float]  # what counters of `Engine.stats()` grew by


def fit(engine: Engine, prompts: Sequence[Tokens]) -> list[Tokens]:
    """Prompts of the workloads for any model: ids behind its vocabulary are folded into it."""
    size = engine.core.info.spec.vocab_size
    return [[token % size for token in prompt] for prompt in prompts]


def run_wave(engine: Engine, calls: Sequence[Call], salt: str | None = None) -> Wave:
    """Run calls together, from an empty prefix cache. The loop is held until all are in its queue.

    So each run of the same calls is cut into the same steps, and a grammar that is not compiled yet counts. What
    drafters learn stays among calls of one `salt`. Raises the PhloemError of the first call that fails.
    """
    engine.flush_cache()
    before = engine.stats()
    gate, inbox = threading.Event(), queue.SimpleQueue[Event]()
    tag = uuid.uuid4().hex[:8]
    made = [
        GenerateCall(call_id=f"{tag}-{i}", prompt=p, params=params, salt=salt) for i, (p, params) in enumerate(calls)
    ]
    open_ones = {call.call_id: Collector(call.prompt, 1) for call in made}
    held = engine.core.invoke(lambda _: gate.wait())
    try:
        for call in made:
            call.stream = False
            engine.open_call(call, inbox.put)
        begin = time.perf_counter()
        gate.set()
        held.result()
        while not all(collector.done for collector in open_ones.values()):
            event = inbox.get()
            open_ones[event.call_id].add(event)
        seconds = time.perf_counter() - begin
    finally:
        gate.set()
        for call_id, collector in open_ones.items():
            engine.close_call(call_id, abort=not collector.done)
    grew = growth(before, engine.stats())
    outputs = [collector.result.token_ids for collector in open_ones.values()]
    return Wave(seconds, grew["whole_s"] - grew["first_token_s"], outputs, grew)


def growth(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """What the numbers of `Engine.stats()` grew by; of the latencies their sums, as `first_token_s` and `whole_s`."""
    grew = {name: after[name] - old for name, old in before.items() if isinstance(old, (int, float))}
    for name in ("first_token", "whole"):
        grew[f"{name}_s"] = after["latency"][name]["sum"] - before["latency"][name]["sum"]
    return grew
