"""Drafters of known quality: always right, always wrong, a tree with the truth in a side branch, raising, nonsense."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from phloem.batch import Batch
from phloem.drafts import Draft
from phloem.interfaces import DraftContext, PluginContext, Seen, TokenRows
from phloem.model_spec import LayerSpec


class Options(BaseModel):
    """Tests tell a drafter what the plain engine wrote."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    texts: tuple[tuple[int, ...], ...] = ()
    """Prompts followed by their reference output."""
    length: int = 4
    children: int = 1


class _Toy:
    api = 1
    Options = Options
    capabilities: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, options: Options, context: PluginContext) -> None:
        assert context.model is not None
        self.options, self.vocab = options, context.model.vocab_size
        self.random = random.Random(7)

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""

    def truth(self, context: DraftContext, budget: int) -> list[int]:
        """What the reference wrote next, as far as this request has followed it."""
        have = tuple(context.tokens)
        for text in self.options.texts:
            if text[: len(have)] == have:
                return list(text[len(have) : len(have) + min(budget, self.options.length)])
        return []


class Right(_Toy):
    """A chain of the reference's own tokens."""

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        return Draft.chain(self.truth(context, budget))


class Wrong(_Toy):
    """A chain of random tokens."""

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        return Draft.chain([self.random.randrange(self.vocab) for _ in range(min(budget, self.options.length))])


class Tree(_Toy):
    """Random decoys first, so that the truth lies on side branches, with further decoys under each true node."""

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        truth = self.truth(context, budget)
        tokens: list[int] = []
        parents: list[int] = []
        at = -1
        for true in truth:
            if len(tokens) + 3 > budget:
                break
            decoys = [t for t in self.random.sample(range(self.vocab), 3) if t != true][:2]
            tokens += [*decoys, true]
            parents += [at] * (len(decoys) + 1)
            at = len(tokens) - 1
        return Draft(tuple(tokens), tuple(parents))


class Draws(_Toy):
    """Draws where it may, `children` at each place: of tokens `texts[i]`, all equally likely, after i of output."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"drawn", "inline"})

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        place, children = len(context.tokens) - context.prompt_len, self.options.children
        texts = self.options.texts[place : place + min(self.options.length, budget // children)]
        if context.draws is None or not texts:
            return Draft.chain([text[0] for text in texts]) if texts else None
        parent = -1
        for text in texts:
            first, likely = len(context.draws), np.zeros(self.vocab, dtype=np.float32)
            likely[list(text)] = 1.0
            context.draws.draw(likely, parent, children)
            parent = first
        return context.draws.close()


class Watches(_Toy):
    """Proposes the truth with a wrong token now and then, and keeps the hidden states it is told of."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"features"})
    requires: ClassVar[frozenset[str]] = frozenset({"model:hidden_states"})
    layers = (3, 0, 2)

    def __init__(self, options: Options, context: PluginContext) -> None:
        super().__init__(options, context)
        self.seen: dict[str, list[tuple[int, torch.Tensor]]] = {}
        self.texts: dict[str, list[int]] = {}

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        truth = self.truth(context, budget)
        if len(truth) > 2 and self.random.random() < 0.5:
            truth[2] = (truth[2] + 1) % self.vocab
        return Draft.chain(truth) if truth else None

    def observe(self, seen: Sequence[Seen]) -> None:
        """Keep all of it."""
        for each in seen:
            self.seen.setdefault(each.request.id, []).append((each.start, each.states.clone()))
            self.texts[each.request.id] = each.request.tokens.tolist()


class Remembers(_Toy):
    """Keeps each token's id and position at its slot, and looks when it is asked whether they are still there."""

    capabilities: ClassVar[frozenset[str]] = frozenset({"rows", "inline"})
    requires: ClassVar[frozenset[str]] = frozenset({"model:hidden_states"})
    layers = (1,)
    row_layers = (LayerSpec(1, 1, 1),)
    scratch = 2
    fingerprint = "ids and positions"

    def attach(self, rows: TokenRows) -> None:
        """Rows behind the pool are its own."""
        self.rows, self.looked = rows, 0
        rows.kv.keys[rows.layer][rows.own.start :] = -1.0

    def keep(self, batch: Batch, states: torch.Tensor) -> None:
        """Exact in float32."""
        slots = batch.groups[self.rows.group].out_slots
        numbers = [each.float()[:, None, None] for each in (batch.tokens, batch.positions)]
        self.rows.kv.write(self.rows.layer, slots, *numbers)
        assert states.shape[:2] == (len(slots), 1)

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        assert context.slots is not None, "it keeps rows"
        slots, known = torch.from_numpy(context.slots).long(), len(context.slots)
        start = max(0, known - (self.rows.window or known) + 1)
        ids, positions = (
            store[self.rows.layer][slots, 0, 0].long() for store in (self.rows.kv.keys, self.rows.kv.values)
        )
        assert ids[start:].tolist() == list(context.tokens[start:known])
        assert positions[start:].tolist() == list(range(start, known))
        assert bool((self.rows.kv.keys[self.rows.layer][self.rows.own.start :] == -1.0).all())
        self.looked += known > 0
        truth = self.truth(context, budget)
        if len(truth) < 2 or budget < 3 or not self.rows.branches:
            return Draft.chain(truth) if truth else None
        wrong = (truth[0] + 1) % self.vocab  # so that what is right lies on a branch, and moves at large pages
        return Draft((wrong, truth[0], truth[1]), (-1, -1, 1))


class Beyond(Watches):
    """Reads a layer that is not there."""

    layers = (99,)


class Blind(Watches):
    """Fails over what it is told."""

    def observe(self, seen: Sequence[Seen]) -> None:
        raise RuntimeError("it hurts")


class Raises(_Toy):
    """Fails on its third proposal."""

    calls = 0

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        self.calls += 1
        if self.calls >= 3:
            raise RuntimeError("drafter broke")
        return Draft.chain(self.truth(context, budget))


class Nonsense(_Toy):
    """Tokens outside the vocabulary."""

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        return Draft.chain([self.vocab + 5])


class Ngram(_Toy):
    """What followed the last two tokens where they stood before, here or in one of the texts: often right, or half."""

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        last = tuple(context.tokens[-2:])
        for text in (tuple(context.tokens[:-1]), *self.options.texts):
            for at in range(len(text) - 3, -1, -1):
                if text[at : at + 2] == last:
                    return Draft.chain(text[at + 2 : at + 2 + min(budget, self.options.length)])
        return None
