"""Drafts by a smaller model of the same vocabulary."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from phloem.batch import Segment
from phloem.config_sections import AutoSize
from phloem.drafts import Draft
from phloem.errors import ModelError, PhloemError
from phloem.interfaces import DraftContext, PluginContext
from phloem.tokenizer import Tokenizer

from ._draft_choice import probabilities
from ._draft_model import DraftModel
from ._draft_texts import Text, Texts
from ._vocabulary import Vocabulary

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Growing:
    """One request's draft in the making: a chain, and leaves beside its nodes where it may branch."""

    context: DraftContext
    budget: int
    text: Text
    ended: bool = False
    depth: int = 0
    tip: int = -1  # the node that the next ones continue
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    @property
    def nodes(self) -> int:
        """Of the draft so far."""
        return len(self.tokens) if self.context.draws is None else len(self.context.draws)

    def draw(self, chances: torch.Tensor, count: int) -> int | None:
        """Children by chance; the first one, or None."""
        row = chances.cpu().numpy()
        if self.context.draws is None or not row.any():
            return None
        first = self.nodes
        token = self.context.draws.draw(row, self.tip, count)[0]
        self.tip, self.depth = first, self.depth + 1
        return token

    def choose(self, tokens: Sequence[int], likely: Sequence[float], count: int) -> int | None:
        """The likeliest children, best first; the first one, or None."""
        chosen = [pair for pair in zip(tokens, likely, strict=True) if pair[1] > 0][:count]
        if not chosen:
            return None
        first = self.nodes
        self.tokens += [token for token, _ in chosen]
        self.parents += [self.tip] * len(chosen)
        self.confidence += [min(1.0, chance) for _, chance in chosen]
        self.tip, self.depth = first, self.depth + 1
        return self.tokens[first]

    def draft(self) -> Draft | None:
        """What has been proposed."""
        if self.context.draws is not None:
            return self.context.draws.close()
        if not self.tokens:
            return None
        return Draft(tuple(self.tokens), tuple(self.parents), confidence=tuple(self.confidence))


class DraftDrafter:
    """Kind `spec`: a smaller model writes ahead, one pass a token for all requests of a step together.

    It keeps K and V of its own, with a prefix cache of its own: what a request finds in the target's cache but not
    there is read again. Greedy requests, and those verified by the target's own token, are proposed its likeliest
    tokens; for rejection sampling it draws, under the request's temperature, cut-offs, bias and grammar.
    """

    api = 1
    capabilities = frozenset({"inline", "batched", "drawn", "kv", "trees"})

    class Options(BaseModel):
        """`spec: [{use: draft, model: smollm2-135m}]`."""

        model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

        model: str
        """The smaller model: a known name, a folder, a GGUF file, or a hub id."""
        loader: str = "auto"
        """Its model plugin."""
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
        """Type of its weights and KV."""
        quant: str = "auto"
        """How its matrices are kept (plugin kind `quant`, with its default options)."""
        max_tokens: int = Field(default=5, ge=1, le=64)
        """Most tokens it writes ahead."""
        breadth: int = Field(default=1, ge=1, le=16)
        """Proposals for each place; the first is gone on from."""
        tokens: AutoSize = "auto"
        """Slots of its KV pool; `auto` takes as many as the target's has."""
        catch_up: int = Field(default=2048, ge=64)
        """Most tokens of prompts that it reads in one step; a longer one is read over several."""

    def __init__(self, options: Options, context: PluginContext) -> None:
        """Raises ModelError. Takes no memory for KV yet: see `allocate`."""
        assert context.model is not None, "drafts are for a model"
        assert context.tokenizer is not None, "which has a vocabulary"
        self._options, self._target = options, context.model
        try:
            self._model = DraftModel(options.model, options.loader, options.dtype, context.device, options.quant)
            tokenizer = Tokenizer(self._model.model.tokenizer)
            sizes = context.model.vocab_size, self._model.spec.vocab_size
            self._vocabulary = Vocabulary(context.tokenizer, sizes[0], tokenizer, sizes[1], options.model)
        except PhloemError as error:
            raise ModelError(f"spec.draft: model: {error.message}", hint=error.hint) from error
        self.kv_bytes: int = self._model.kv_bytes
        self.kv_tokens: int | None = None if options.tokens == "auto" else options.tokens
        mine, theirs = _weights(self._model.model.path), _weights(str(context.extras.get("path", "")))
        if theirs and mine > theirs:
            log.warning(
                "spec.draft: %s (%.2f GB of weights) is larger than the model it drafts for (%.2f GB): it cannot pay",
                options.model, mine / 1e9, theirs / 1e9,
            )  # fmt: skip

    def allocate(self, tokens: int, requests: int) -> None:
        """As `HoldsKV`."""
        self._model.allocate(tokens, requests)
        self.texts = Texts(self._model.ledger, self._vocabulary, self._model.spec.context_length)

    def usage(self) -> dict[str, int]:
        """As `HoldsKV`."""
        return self.texts.usage()

    def reset(self) -> None:
        """As `HoldsKV`."""
        self._model.ledger.cache.reset()

    def check(self) -> None:
        """As `HoldsKV`."""
        self.texts.check()

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        """For one request."""
        return self.propose_all([context], [budget])[0]

    def propose_all(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Draft | None]:
        """For each request a chain, or one with leaves; None while it reads a long prompt, or where its slots are all
        taken. One pass over what is new, and one for each further level.
        """
        self.texts.tick()
        texts = [self.texts.follow(context) for context in contexts]
        growing = [_Growing(*each) for each in zip(contexts, budgets, texts, strict=True)]
        turn, room = list[tuple[_Growing, Segment]](), self._options.catch_up
        for each in sorted(growing, key=lambda each: each.text.pending):  # a long prompt to read delays nobody else
            each.context.over = self.texts.too_long(each.text)
            segment = self.texts.segment(each.text, room)
            if segment is not None:
                turn.append((each, segment))
                room -= segment.count
        while turn:
            logits = self._model.run(segment for _, segment in turn)
            for each, segment in turn:
                self.texts.share(each.text, segment.count)
            ready = [each for each, segment in turn if segment.samples]
            self._grow(ready, self._vocabulary.logits(logits))
            ready = [each for each in ready if not each.ended]
            turn = [(each, more) for each in ready if (more := self.texts.segment(each.text, 1)) is not None]
        return [each.draft() for each in growing]

    def _grow(self, growing: Sequence[_Growing], logits: torch.Tensor) -> None:
        """One level more for each; the first of its tokens is read next, unless the draft ends with it."""
        if not growing:
            return
        chances = probabilities([each.context for each in growing], logits)
        values, ids = chances.topk(min(self._options.breadth, chances.shape[1]))
        best = zip(ids.tolist(), values.tolist(), strict=True)
        for each, row, (tokens, likely) in zip(growing, chances, best, strict=True):
            count = min(self._options.breadth, each.budget - each.nodes)
            token = each.draw(row, count) if each.context.draws is not None else each.choose(tokens, likely, count)
            most = min(self._options.max_tokens, each.context.levels)
            each.ended = token is None or each.depth >= most or each.nodes >= each.budget
            if token is not None and not each.ended:
                each.ended = not self._goes_on(each.context, token)
                each.text.request.tokens.extend(self._vocabulary.read(array("i", [token])))

    def _goes_on(self, context: DraftContext, token: int) -> bool:
        """Whether anything may follow the token."""
        ends = () if context.params.ignore_eos else self._target.eos_token_ids
        if token in ends or token in context.params.stop_token_ids:
            return False
        return context.matcher is None or context.matcher.accept(token)  # taken back by whoever has lent it

    def forget(self, request_id: str) -> None:
        """Its text stays in the draft model's cache."""
        self.texts.forget(request_id)


def _weights(path: str) -> int:
    """Bytes of weights at a path, a file's or a folder's; 0 if there is none."""
    where = Path(path)
    files = [where] if where.is_file() else [*where.glob("*.safetensors"), *where.glob("*.bin")] if path else []
    return sum(file.stat().st_size for file in files)
