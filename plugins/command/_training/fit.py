"""Fits a head to a corpus: AdamW over the losses of all steps of the training-time test, resumable at any time."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .batches import Batch, collate, cropped, held_out, order
from .corpus import Sample, Writing
from .head import EagleHead

DECAY = 0.8  # weight of each step's loss against that of the step before, as in the paper
SAVE_S = 60.0
_TESTED = 150  # texts that are held out, at most
_WARM, _LEAST = 0.05, 0.02  # part of the run, and of the learning rate


@dataclass(frozen=True)
class Settings:
    """How to train. The run ends after `epochs` or `minutes`, whichever comes first; at least one is given."""

    epochs: int | None = None
    minutes: float | None = None
    steps: int = 3  # of the training-time test
    rate: float = 1e-3  # peak learning rate
    batch: int = 2048  # tokens
    seed: int = 0
    device: str = "cpu"
    half: bool = False  # matrix products in bfloat16


class Quality(NamedTuple):
    """On texts that were held out, where each token is the target's likeliest."""

    acceptance: tuple[float, ...]  # of each drafted token, given that those before it were accepted
    tokens: float  # per verify, the target's own included, of a chain as long as `acceptance`

    def __str__(self) -> str:
        rates = " / ".join(f"{rate:.3f}" for rate in self.acceptance)
        return f"acceptance {rates}, {self.tokens:.2f} tokens per verify of a chain of {len(self.acceptance)}"


@dataclass
class Progress:
    """Where a run stands; saved with the parameters."""

    step: int = 0
    epoch: int = 0
    within: int = 0  # batches of this epoch that are done
    elapsed: float = 0.0  # seconds of training
    loss: float = 0.0  # mean of the latest steps
    history: list[str] = field(default_factory=list)  # what was measured after each epoch


class Fit:
    """One run. `index` is `DraftVocabulary.index()`, `scale` [layers * hidden] what features are divided by."""

    def __init__(
        self,
        head: EagleHead,
        samples: Sequence[Sample],
        index: Tensor,
        scale: Tensor,
        embed: Tensor,
        settings: Settings,
    ) -> None:
        self.settings, self.at, self.device = settings, Progress(), torch.device(settings.device)
        self.head = head.to(self.device)
        self._index, self._scale, self._embed = index, scale.to(self.device), embed.float().to(self.device)
        self._known = [cropped(one) for one in samples if not held_out(one)]
        self._tests = [cropped(one) for one in samples if held_out(one) and one.greedy][:_TESTED]
        self._orders: dict[int, list[list[int]]] = {}
        self._optimizer = torch.optim.AdamW(head.parameters(), lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.01)

    # --- life

    def run(self, state: Path, saved: Callable[[], None], told: Callable[[float, Progress], None]) -> Quality:
        """Train to the end, from `state` if that file is there. `saved` is called whenever it was written, `told` after
        every step with the part that is done. An interruption saves first.
        """
        self.load(state)
        last = time.monotonic()
        try:
            while (done := self.done()) < 1.0:
                begin = time.monotonic()
                self._train(done)
                self.at.elapsed += time.monotonic() - begin
                told(self.done(), self.at)
                if time.monotonic() - last > SAVE_S:
                    self.save(state)
                    saved()
                    last = time.monotonic()
        finally:
            self.save(state)
            saved()
        return self.measure()

    def done(self) -> float:
        """The part of the run that lies behind, 0 to 1."""
        epochs, minutes = self.settings.epochs, self.settings.minutes
        passed = self.at.epoch + self.at.within / max(1, len(self._order()))
        return max(passed / epochs if epochs else 0.0, self.at.elapsed / 60 / minutes if minutes else 0.0)

    def save(self, path: Path) -> None:
        """All that a later call needs to go on as if nothing had happened."""
        with Writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            torch.save(
                {"head": self.head.state_dict(), "optimizer": self._optimizer.state_dict(), "at": vars(self.at)}, part
            )
            os.replace(part, path)

    def load(self, path: Path) -> None:
        """What `save` has written, if it has."""
        if path.exists():
            kept: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
            self.head.load_state_dict(kept["head"])
            self._optimizer.load_state_dict(kept["optimizer"])
            self.at = Progress(**kept["at"])

    # --- a step

    def _order(self) -> list[list[int]]:
        if self.at.epoch not in self._orders:
            self._orders = {self.at.epoch: order(self._known, self.settings.batch, self.settings.seed, self.at.epoch)}
        return self._orders[self.at.epoch]

    def _train(self, done: float) -> None:
        self.head.train()
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.rate * schedule(done)
        loss = self._loss(self._batch([self._known[i] for i in self._order()[self.at.within]]))
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self._optimizer.step()
        at = self.at
        at.loss += (loss.item() - at.loss) / min(at.step + 1, 20)
        at.step, at.within = at.step + 1, at.within + 1
        if at.within == len(self._order()):
            at.epoch, at.within = at.epoch + 1, 0
            at.history.append(f"epoch {at.epoch}: loss {at.loss:.3f}, {self.measure()}")

    def _batch(self, samples: Sequence[Sample]) -> Batch:
        return collate(samples, self.head.shape.features, self._index, self.device)

    def _steps(self, batch: Batch) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(step, valid rows [B, R], their logits [N, draft vocab]) of the training-time test."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.half):
            hidden = self.head.fc(batch.features.float() / self._scale)
            view = self.head.read(hidden, self._embed[batch.tokens.roll(-1, 1)], batch.at)
            hidden = batch.rows(hidden)
            for k in range(self.settings.steps):
                tokens, valid = batch.step(k)
                hidden = self.head.step(k, hidden, self._embed[tokens], view)
                yield k, valid, self.head.logits(hidden[valid]).float()

    def _loss(self, batch: Batch) -> Tensor:
        """Cross-entropy with the target's probabilities, as far as the head's vocabulary goes."""
        total, weights = torch.zeros((), device=self.device), 0.0
        for k, valid, logits in self._steps(batch):
            best, chances = batch.targets(k, valid)
            picked = logits.gather(1, best.clamp(min=0))
            each = chances.sum(1) * logits.logsumexp(1) - (chances * picked).sum(1)
            total = total + DECAY**k * each.sum() / max(1, len(each))
            weights += DECAY**k
        return total / weights

    @torch.no_grad()
    def measure(self) -> Quality:
        """Greedy acceptance on what was held out; zeros if nothing was."""
        self.head.eval()
        asked, accepted = [0] * self.settings.steps, [0] * self.settings.steps
        for group in order(self._tests, self.settings.batch, 0, 0) if self._tests else ():
            batch = self._batch([self._tests[i] for i in group])
            alive = torch.ones_like(batch.at, dtype=torch.bool)
            for k, valid, logits in self._steps(batch):
                asked[k] += int((alive & valid).sum())
                right = torch.zeros_like(valid)
                right[valid] = logits.argmax(1) == batch.targets(k, valid)[0][:, 0]
                alive &= right
                accepted[k] += int(alive.sum())
        rates = tuple(have / max(1, of) for have, of in zip(accepted, asked, strict=True))
        return Quality(rates, 1 + sum(math.prod(rates[: k + 1]) for k in range(len(rates))))


def schedule(done: float) -> float:
    """Factor of the learning rate: up at the beginning, then down along half a cosine."""
    if done < _WARM:
        return max(_LEAST, done / _WARM)
    return _LEAST + (1 - _LEAST) * (1 + math.cos(math.pi * min(1.0, done))) / 2
