"""Drafts by a head that reads the target's hidden states: EAGLE-3, and the first EAGLE."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import BaseModel, ConfigDict, Field

from phloem.batch import Batch
from phloem.drafts import Draft
from phloem.errors import ModelError
from phloem.interfaces import DraftContext, PluginContext, TokenRows

from ._eagle_checkpoint import Checkpoint, read_checkpoint
from ._eagle_choice import Choice
from ._eagle_entries import Entries, row_layers
from ._eagle_head import Head
from ._eagle_source import locate
from ._eagle_tree import LONGEST_LEAD, Growing


class EagleDrafter:
    """Kind `spec`: a head of one layer over the target's hidden states proposes a tree, for all requests of a step.

    Which algorithm it is, the head's own files say. It keeps nothing of a request: what it has read of a text lies at
    the target's slots, so a cached prefix is known to the head as it is to the target.
    """

    api = 1
    capabilities = frozenset({"inline", "batched", "trees", "drawn", "rows"})
    requires = frozenset({"model:hidden_states", "model:parts"})

    class Options(BaseModel):
        """`spec: [{use: eagle}]`."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        model: str = "auto"
        """The head: a folder or a hub id; `auto` is the one that is shipped for the target."""
        max_tokens: int = Field(default=5, ge=1, le=32)
        """Most tokens it writes ahead: levels of the tree, a pass of the head for each."""
        breadth: int = Field(default=4, ge=1, le=16)
        """Continuations of each token, and tokens of a level that are gone on from; 1 is a chain."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        """Reads the head. Raises ModelError where there is none, or it is for another model."""
        assert context.model is not None, "drafts are for a model"
        self._options, self._device = options, context.device
        names = tuple(str(context.extras[key]) for key in ("asked", "path") if context.extras.get(key))
        try:
            folder = locate(options.model, names)
            try:
                checkpoint = read_checkpoint(folder, context.model)
            except ModelError as error:
                raise ModelError(f"{folder}: {error.message}", hint=error.hint) from error
        except ModelError as error:
            raise ModelError(f"spec.{context.name}: model: {error.message}", hint=error.hint) from error
        dtype = getattr(torch, context.model.dtype)  # weights are where they will be before memory is planned
        self._checkpoint: Checkpoint | None = checkpoint.to(torch.device(context.device), dtype)  # until it is attached
        self._choice = Choice(checkpoint.tokens, context.model)
        self.layers = checkpoint.shape.layers
        self.row_layers = row_layers(checkpoint.shape)
        self.fingerprint: str = checkpoint.fingerprint
        self.scratch: int = 1 + LONGEST_LEAD + options.breadth * (options.max_tokens - 1)
        self._entries: Entries | None = None

    @torch.inference_mode()
    def attach(self, rows: TokenRows) -> None:
        """As `KeepsRows`."""
        assert self._checkpoint is not None, "it is attached once"
        head, self._checkpoint = Head(self._checkpoint, rows.model, torch.device(self._device)), None
        self._entries = Entries(head, rows, self._device)

    @torch.inference_mode()
    def keep(self, batch: Batch, states: torch.Tensor) -> None:
        """As `KeepsRows`."""
        assert self._entries is not None, "steps run once it is attached"
        self._entries.keep(batch, states)

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        """For one request."""
        return self.propose_all([context], [budget])[0]

    @torch.inference_mode()
    def propose_all(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Draft | None]:
        """For each request a tree, or a chain where it is to be drawn or trees cannot be run. A pass for each level.

        None where the token before the last has not been run yet.
        """
        if self._entries is None:
            return [None] * len(contexts)
        growing = [self._growing(i, *each) for i, each in enumerate(zip(contexts, budgets, strict=True))]
        turn = [each for each in growing if each.begin()]
        while asked := [(each, query) for each in turn for query in each.queries()]:
            logits = self._entries.ask([query for _, query in asked])
            turn = list(dict.fromkeys(each for each, _ in asked))
            rows = [row for row, (each, _) in enumerate(asked) if not each.leading]
            self._grow([each for each in turn if not each.leading], logits if len(rows) == len(asked) else logits[rows])
        return [each.draft() for each in growing]

    def _growing(self, place: int, context: DraftContext, budget: int) -> Growing:
        assert self._entries is not None, "it is attached"
        rows, each = self._entries.rows, self.scratch
        breadth = self._options.breadth if rows.branches and context.draws is None else 1
        levels = min(self._options.max_tokens, context.levels)
        return Growing(context, budget, levels, breadth, rows.own[place * each : (place + 1) * each])

    def _grow(self, growing: Sequence[Growing], logits: torch.Tensor) -> None:
        """One level more for each; logits [N, V] are of all their tips in order."""
        tips = [(each, tip) for each in growing for tip in each.tips]
        if not tips:
            return
        contexts, paths = [each.context for each, _ in tips], [each.path(tip) for each, tip in tips]
        chances = self._choice.chances(contexts, paths, logits)
        best = self._choice.best(chances, self._options.breadth)
        for (each, tip), row, (tokens, likely) in zip(tips, chances, best, strict=True):
            if each.context.draws is not None:
                each.draw(tip, self._choice.whole(row))
            else:
                each.branch(tip, tokens[: each.breadth], likely[: each.breadth])
        for each in growing:
            each.depth += 1

    def forget(self, request_id: str) -> None:
        """There is nothing to forget."""
