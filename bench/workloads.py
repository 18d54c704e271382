"""Drives an engine through the workloads W1 to W6g and counts the least prefill each could need.

Standard library only: peers run it in environments of their own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

FOLDER = Path(__file__).parent / "workloads"
_FIRST, _VOCABULARY = 1000, 49_152  # ids of plain words
Tokens = list[int]
Metrics = dict[str, float]
# One call of `Peer.generate`: what went in and what came out, in order of submission.
Wave = tuple[list[Tokens], list[Tokens]]


class Peer(Protocol):
    """An engine under test. `generate` submits all prompts at once and returns the output ids in order."""

    def generate(self, prompts: list[Tokens], max_tokens: int, schema: dict[str, Any] | None = None) -> list[Tokens]:
        """Greedy; without a schema exactly `max_tokens` per prompt, whatever the model thinks of it."""
        ...


def load(name: str, variant: int) -> dict[str, Any]:
    """A variant of a workload; W6g shares W6's file. Variants beyond those of the file are its measured ones again, in
    turn, with other first tokens: so nothing of them is in a prefix cache."""
    data: list[dict[str, Any]] = json.loads((FOLDER / f"{name.removesuffix('g')}.json").read_text())
    if variant < len(data):
        return data[variant]
    again, which = divmod(variant - 1, len(data) - 1)
    return _afresh(data[1 + which], again)


def _afresh(data: dict[str, Any], again: int) -> dict[str, Any]:
    """The same texts, with the first token of each replaced: those that shared their beginning still do."""

    def other(tokens: Tokens) -> Tokens:
        return [_FIRST + (tokens[0] + 1009 * again) % (_VOCABULARY - _FIRST), *tokens[1:]]

    starts: dict[str, Any] = {key: list(map(other, data[key])) for key in ("prompts", "problems") if key in data}
    if "convs" in data:
        starts["convs"] = [[other(turns[0]), *turns[1:]] for turns in data["convs"]]
    return data | starts


class Recorder:
    """Passes calls on to a peer and keeps them, so that counters can be judged against what was asked."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.waves: list[Wave] = []
        self.seconds = 0.0

    def __call__(self, prompts: list[Tokens], max_tokens: int, schema: dict[str, Any] | None = None) -> list[Tokens]:
        """One timed wave of calls. Raises ValueError if an output is shorter or longer than asked."""
        begin = time.perf_counter()
        outputs = [list(ids) for ids in self._peer.generate(prompts, max_tokens, schema)]
        self.seconds += time.perf_counter() - begin
        if schema is None and any(len(ids) != max_tokens for ids in outputs):
            raise ValueError(f"asked for {max_tokens} tokens each, got {sorted({len(ids) for ids in outputs})}")
        self.waves.append((prompts, outputs))
        return outputs


def run(name: str, peer: Peer, data: dict[str, Any]) -> tuple[Metrics, list[Wave]]:
    """Run one workload once: its metrics (`s` is the total in seconds), and the calls it made."""
    call = Recorder(peer)
    extra: Metrics = {}
    if name == "W1":
        call(data["prompts"][:1], 1)
        first = call.seconds
        call(data["prompts"][1:2], data["max_tokens"])
        total = call.seconds - first
        extra = {"s": total, "ttft_ms": first * 1e3, "decode_tok_s": (data["max_tokens"] - 1) / (total - first)}
    elif name == "W4":
        _conversations(call, data)
    elif name == "W5":
        _forks(call, data)
    elif name == "W6g":
        call(data["prompts"], data["max_tokens"], data["schema"])
    else:
        call(data["prompts"], data["max_tokens"])
    written = sum(len(ids) for _, outputs in call.waves for ids in outputs)
    return {"s": call.seconds, "out_tok": float(written), "out_tok_s": written / call.seconds, **extra}, call.waves


def _conversations(call: Recorder, data: dict[str, Any]) -> None:
    histories: list[Tokens] = [[] for _ in data["convs"]]
    for turn in range(len(data["convs"][0])):
        prompts = [history + conv[turn] for history, conv in zip(histories, data["convs"], strict=True)]
        outputs = call(prompts, data["max_tokens"])
        histories = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]


def _forks(call: Recorder, data: dict[str, Any]) -> None:
    pairs = list(zip(data["problems"], data["hints1"], strict=True))
    first = [problem + hint for problem, hints in pairs for hint in hints]
    written = call(first, data["max_tokens"])
    hints2 = [forks for problem in data["hints2"] for forks in problem]
    nodes = zip(first, written, hints2, strict=True)
    call([prompt + output + hint for prompt, output, forks in nodes for hint in forks], data["max_tokens"])


def least_prefill(waves: Sequence[Wave]) -> int:
    """Fewest prompt tokens an engine with a perfect prefix cache runs for these calls.

    Each distinct prefix once, the last token of every prompt always, and the last sampled token of a turn, whose KV
    nobody computed, when a later turn extends it.
    """
    trie: dict[int, Any] = {}
    least = 0
    for prompts, outputs in waves:
        for prompt in prompts:
            least += len(prompt) - min(grow(trie, prompt), len(prompt) - 1)
        for prompt, output in zip(prompts, outputs, strict=True):
            grow(trie, prompt + output[:-1])
    return least


def passes(name: str, waves: Sequence[Wave]) -> list[tuple[int, int, int]]:
    """The fewest forward passes for what was timed of a run, as (tokens, of which need logits, how often).

    A pass for the prompts of a wave, with a perfect prefix cache, then one for each further token of all together. Of
    constrained runs none: outputs differ in length, and some of their tokens need no pass.
    """
    if name == "W6g":
        return []
    made, timed = [], waves[-1:] if name == "W1" else waves
    for i, (prompts, outputs) in enumerate(timed):
        many = len(prompts)
        made.append((least_prefill(timed[: i + 1]) - least_prefill(timed[:i]), many, 1))
        made.append((many, many, max(map(len, outputs)) - 1))
    return made


def grow(trie: dict[int, Any], tokens: Tokens) -> int:
    """Add a sequence to a trie; returns how many of its tokens were there."""
    node, known = trie, 0
    for token in tokens:
        known += token in node
        node = node.setdefault(token, {})
    return known
