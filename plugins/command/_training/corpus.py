"""What a head is trained on, in a folder: a file for each round of conversations, written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from phloem.errors import PhloemError

from .record import Text

BEST = 64  # next tokens whose chances are kept


class Sample(NamedTuple):
    """One text to train on. Row t of `states`, `best` and `chances` is of token t and what follows it."""

    talk: int  # number of the conversation: its turns are held out together
    prompt_len: int
    greedy: bool
    tokens: torch.Tensor  # [n] int32
    states: torch.Tensor  # [n, layers, hidden] float16
    best: torch.Tensor  # [n, BEST] int32: likeliest next tokens, from the last token of the prompt on
    chances: torch.Tensor  # [n, BEST] float16: their natural log-probabilities; minus infinity before that


class Corpus:
    """Rounds that are complete. A round that was interrupted has left nothing."""

    def __init__(self, folder: Path, description: Mapping[str, Any]) -> None:
        """Opens or creates it. `description` is kept for people; ConfigError is for whoever chooses folders."""
        self.folder = folder
        with Writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            replace(folder / "description.json", json.dumps(description, indent=1).encode())

    @property
    def rounds(self) -> list[Path]:
        """Files in order."""
        return sorted(self.folder.glob("round-*.safetensors"))

    def answers(self) -> int:
        """Tokens of all answers."""
        return sum(map(_answers, self.rounds))

    def first(self, tokens: int) -> list[Path]:
        """The first rounds that have so many tokens of answers, or all: what others have added since is left out."""
        chosen, have = list[Path](), 0
        for path in self.rounds:
            if have < tokens:
                chosen.append(path)
                have += _answers(path)
        return chosen

    def prompts(self) -> set[tuple[int, ...]]:
        """The prompts of all texts, so that none comes twice."""
        return {tuple(one.tokens[: one.prompt_len].tolist()) for one in self.samples()}

    @property
    def next_round(self) -> int:
        """Number of the one to be made."""
        return int(self.rounds[-1].stem.partition("-")[2]) + 1 if self.rounds else 0

    def add(self, number: int, texts: Sequence[tuple[int, Text, torch.Tensor, torch.Tensor]]) -> None:
        """A round: (conversation, text, best, chances) each. Raises PhloemError where the disk is full."""
        made = {
            "talks": torch.tensor([talk for talk, *_ in texts], dtype=torch.int32),
            "lengths": torch.tensor([len(text.tokens) for _, text, *_ in texts], dtype=torch.int32),
            "prompts": torch.tensor([text.prompt_len for _, text, *_ in texts], dtype=torch.int32),
            "greedy": torch.tensor([text.greedy for _, text, *_ in texts]),
            "tokens": torch.tensor([token for _, text, *_ in texts for token in text.tokens], dtype=torch.int32),
            "states": torch.cat([text.states for _, text, *_ in texts]),
            "best": torch.cat([best for *_, best, _ in texts]),
            "chances": torch.cat([chances for *_, chances in texts]),
        }
        save(self.folder / f"round-{number:05}.safetensors", made)

    def samples(self, rounds: Sequence[Path] | None = None) -> Iterator[Sample]:
        """The texts of some rounds, or all, in the order of their making; views of files that are mapped, not read."""
        for path in self.rounds if rounds is None else rounds:
            file = load_file(path)
            lengths = file["lengths"].tolist()
            each = [torch.split(file[name], lengths) for name in ("tokens", "states", "best", "chances")]
            heads = zip(file["talks"].tolist(), file["prompts"].tolist(), file["greedy"].tolist(), strict=True)
            for head, *rows in zip(heads, *each, strict=True):
                yield Sample(*head, *rows)


def _answers(path: Path) -> int:
    with safe_open(path, "pt") as file:
        return int((file.get_tensor("lengths") - file.get_tensor("prompts")).sum())


def save(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file at once: whoever reads `path` finds the old file or the new one."""
    with Writing(path.parent):
        part = path.with_suffix(".part")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, metadata)
        os.replace(part, path)


def replace(path: Path, data: bytes) -> None:
    """Write any file at once."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    os.replace(part, path)


class Writing:
    """Turns what the system says of a folder that cannot be written into an error for users."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        # safetensors wraps what the system says
        if full or (error is not None and "No space left" in str(error)):
            hint = "what is complete is kept: free some space and give the same command again, or lower --tokens"
            raise PhloemError(f"the disk of {self.folder} is full", hint=hint) from error
        if isinstance(error, OSError):
            raise PhloemError(f"{self.folder} cannot be written: {error.strerror}") from error
