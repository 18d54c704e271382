"""From a target to a corpus: an engine that talks with itself, and what a head needs of the target besides."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import safe_open

from phloem import Engine
from phloem.config import load_config
from phloem.errors import ConfigError, ModelError
from phloem.features import LendsParts
from phloem.loop import EngineCore

from .corpus import BEST, Corpus, save
from .record import USE, Recorder, Text
from .talks import PROMPT, Messages, Talks

_ROWS = 256  # of logits at a time: of a large vocabulary they are many megabytes
_FILE = "target.safetensors"
_IDLE = 3  # rounds in vain, then it is given up


class Target(NamedTuple):
    """What is kept of the target beside its texts."""

    # hidden_size, vocab_size, depth, kv_heads, head_dim; "layers" that the head reads, "recorded" that the corpus has
    facts: dict[str, Any]
    embed: torch.Tensor  # [vocab, hidden] float16: as it is stored, unscaled
    head: torch.Tensor  # [vocab, hidden] float16: rows of the output head


@dataclass(frozen=True)
class Wanted:
    """What texts are wanted."""

    tokens: int  # of answers
    layers: Sequence[int]  # that the head reads; empty: an early, a late and the last
    seed: int
    prompts: Sequence[Messages] | None  # None: the target's own
    batch: int  # conversations of a round

    def met(self, answers: int, rounds: int) -> bool:
        """Whether there are enough, or all prompts are used up."""
        return answers >= self.tokens or (self.prompts is not None and rounds * self.batch >= len(self.prompts))


def load_target(folder: Path) -> Target | None:
    """What an earlier call has kept; None if there is nothing."""
    path = folder / _FILE
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["facts"])
        return Target(facts, file.get_tensor("embed"), file.get_tensor("head"))


def gather(
    corpus: Corpus, wanted: Wanted, sections: Mapping[str, Any], sets: Sequence[str], progress: Callable[[int], None]
) -> Target:
    """Let the target talk until the corpus has what is wanted; returns what else a head needs of it.

    An engine is started only where something is missing. `progress` is told the answers' tokens, once a round. Raises
    ConfigError, ModelError, and PhloemError where the disk is full. An interrupted call loses its last round only.
    """
    kept, done = load_target(corpus.folder), corpus.answers()
    progress(done)
    if kept is not None and wanted.met(done, corpus.next_round):
        return kept
    fixed = {
        "cache": {"use": "chunk"},  # what comes out of a cache is computed by nobody, and has no states
        "spec": [{"use": USE, "layers": list(wanted.layers)}],
        "grammar": {"use": "none"},
    }
    with Engine.from_config(load_config(sections={**fixed, **sections}, sets=sets)) as engine:
        recorder = cast(Recorder, engine.core.parts.drafting.drafters[0][1])
        target = engine.invoke(lambda core: _read_target(core, recorder)).result()
        save(corpus.folder / _FILE, {"embed": target.embed, "head": target.head}, {"facts": json.dumps(target.facts)})
        talks = Talks(engine, recorder, wanted.seed, wanted.prompts, wanted.batch)
        _talk(corpus, wanted, talks, partial(_likeliest, engine, target.facts), progress)
    return target


def _talk(
    corpus: Corpus,
    wanted: Wanted,
    talks: Talks,
    likeliest: Callable[[Text], tuple[torch.Tensor, torch.Tensor]],
    progress: Callable[[int], None],
) -> None:
    done, number, idle, known = corpus.answers(), corpus.next_round, 0, corpus.prompts()
    while not wanted.met(done, number):
        made = [(talk, text, *likeliest(text)) for talk, text in talks.round(number, known)]
        if made:
            corpus.add(number, made)
        done += sum(len(text.tokens) - text.prompt_len for _, text, *_ in made)
        number, idle = number + 1, 0 if made else idle + 1
        progress(done)
        if idle == _IDLE:
            hint = f"bring prompts of up to {PROMPT} tokens, one a line: --prompts FILE"
            raise ModelError(f"{_IDLE} rounds of conversations brought no answer to train on", hint=hint)


def _likeliest(engine: Engine, facts: Mapping[str, Any], text: Text) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, BEST] ids and log-probabilities of what follows each token of the answer, and the prompt's last."""
    k, first, n = min(BEST, facts["vocab_size"]), text.prompt_len - 1, len(text.tokens)
    final = facts["recorded"].index(facts["depth"])
    best = torch.zeros(n, k, dtype=torch.int32)
    chances = torch.full((n, k), -torch.inf, dtype=torch.float16)
    for at in range(first, n, _ROWS):
        rows = text.states[at : at + _ROWS, final]
        ids, logs = engine.invoke(partial(_best, states=rows, k=k)).result()
        best[at : at + len(rows)], chances[at : at + len(rows)] = ids, logs
    return best, chances


@torch.inference_mode()
def _best(core: EngineCore, states: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    executor = core.parts.executor
    dtype = getattr(torch, executor.model.spec.dtype)
    logits = executor.model.logits(states.to(executor.device, dtype)).float()
    values, ids = logits.topk(k)
    return ids.int().cpu(), (values - logits.logsumexp(1, keepdim=True)).half().cpu()


@torch.inference_mode()
def _read_target(core: EngineCore, recorder: Recorder) -> Target:
    """Embedding and output head as matrices, from what any model plugin with hidden states can do."""
    executor = core.parts.executor
    model, spec, dtype = executor.model, executor.model.spec, getattr(torch, executor.model.spec.dtype)
    eye = torch.eye(spec.hidden_size, dtype=dtype, device=executor.device)
    head = torch.cat([model.logits(rows) for rows in torch.split(eye, _ROWS)]).T
    every = torch.arange(spec.vocab_size, device=executor.device)
    embed = torch.cat([cast(LendsParts, model).embed(part) for part in torch.split(every, _ROWS)])
    facts = {
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "depth": spec.depth,
        "kv_heads": spec.layers[0].kv_heads,
        "head_dim": spec.layers[0].k_dim,
        "layers": list(recorder.read),
        "recorded": list(recorder.layers),
    }
    return Target(facts, embed.half().cpu(), head.half().cpu())


def read_prompts(path: Path) -> list[Messages]:
    """A prompt a line: plain text, a JSON string, {"prompt": text} or {"messages": [...]}. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: {getattr(error, 'strerror', None) or error}") from error
    made = [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not made:
        raise ConfigError(f"--prompts {path}: it has no prompts", hint="one a line: text, or JSON with `messages`")
    return made


def _prompt(line: str, place: str) -> Messages:
    try:
        data = json.loads(line) if line.lstrip()[:1] in ("{", '"') else line
    except ValueError as error:
        raise ConfigError(f"{place}: not JSON: {error}") from error
    if isinstance(data, dict):
        data = data.get("messages", data.get("prompt"))
    messages = [{"role": "user", "content": data}] if isinstance(data, str) else data
    good = isinstance(messages, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in messages
    )
    if not good or not messages or messages[-1]["role"] != "user":
        raise ConfigError(f"{place}: expected a text, or `messages` of role and content that end with the user's")
    return cast(Messages, messages)
