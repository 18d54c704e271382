"""The least prefill of a run, from the calls that it made (design, section 3): nothing here asks the engine's counters.

A call is noted when it is submitted and when it ends, in the order in which that happens, so what one call has written
counts as known for those that come after its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from bench.workloads import Tokens, grow
from phloem import Engine
from phloem.messages import Event, GenerateCall


class Note(NamedTuple):
    """A call that begins (`output` is None), or its end with what it wrote."""

    prompt: Tokens
    output: Tokens | None


def least_prefill(notes: Iterable[Note]) -> int:
    """Fewest prompt tokens that a perfect prefix cache runs for these calls.

    Each distinct prefix once; the last token of every prompt always; and, where a prompt goes on from what an earlier
    call wrote, that call's last token, which was sampled but never run.
    """
    trie: dict[int, Any] = {}
    least = 0
    for prompt, output in notes:
        if output is None:
            least += len(prompt) - min(grow(trie, prompt), len(prompt) - 1)
        else:
            grow(trie, prompt + output[:-1])
    return least


class CallLog:
    """Notes every call that an engine of this process is given. One choice a call."""

    def __init__(self, engine: Engine) -> None:
        self.notes: list[Note] = []  # appended to from the caller's thread and the engine's
        self._open_call = engine.open_call
        engine.open_call = self._noted  # type: ignore[method-assign]

    def _noted(self, call: GenerateCall, sink: Callable[[Event], None]) -> None:
        written: Tokens = []

        def listen(event: Event) -> None:
            written.extend(event.token_ids)
            if event.finish_reason is not None:
                self.notes.append(Note(call.prompt, written))
            sink(event)

        self.notes.append(Note(call.prompt, None))
        self._open_call(call, listen)
