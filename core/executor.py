"""Runs one step's tensors: model, attention, output head, sampler; ahead of the host where asked (design §3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, cast

import torch

from .batch import Batch, Plan, Segment
from .features import HiddenStates
from .filters import picked
from .inputs import build, future_rows, scored_rows
from .interfaces import Attention, AttentionStep, Model, SparseHead
from .masks import MaskFiller, Masks
from .messages import TokenLogprob
from .pool import KVStore, SlotTable
from .sampler import Outcome, Pending, Sampler, prompt_logprobs
from .scoring import HEAD_BLOCK_ROWS, edge_logprobs
from .states import StateStore

T = TypeVar("T")
Forward = tuple[torch.Tensor, torch.Tensor | None]  # hidden states of the rows of logits, and those that drafters read
# By segment: log-probabilities of prompt tokens, and those of the edges of a tree of continuations.
Scores = tuple[dict[int, list[TokenLogprob]], dict[int, list[float]]]


@dataclass(slots=True)
class Launched:
    """A step on its way. `outcomes` waits for it."""

    plan: Plan
    pending: Future[Pending]
    scores: Future[Scores]
    forward: Future[Forward]
    build_s: float = 0.0
    spans: dict[str, float] = field(default_factory=dict)  # seconds of "forward" and "sample"

    @property
    def states(self) -> torch.Tensor | None:
        """[T, layers, hidden] of the executor's `layers`, if it has any."""
        return self.forward.result()[1]

    def outcomes(self) -> list[Outcome]:
        """One outcome per sampling segment, in plan order. Raises whatever the step raised."""
        return self.pending.result().outcomes()


class SplitAttention:
    """`attention: {prefill: A, decode: B}`: B for steps of single tokens, A for all others."""

    def __init__(self, prefill: Attention, decode: Attention) -> None:
        self._prefill, self._decode = prefill, decode
        # no tree is ever run by the other
        self.capabilities: frozenset[str] = getattr(prefill, "capabilities", frozenset())

    def prepare(self, batch: Batch, kv: KVStore) -> AttentionStep:
        """Choose by the shape of the step."""
        chosen = self._decode if max(batch.q_lens) == 1 else self._prefill
        return chosen.prepare(batch, kv)


@dataclass(eq=False)
class Executor:
    """Owns the device side of the loop. With `ahead`, work runs on a thread (a stream, on a GPU) in launch order."""

    model: Model
    attention: Attention
    kv: KVStore
    table: SlotTable
    sampler: Sampler
    device: torch.device
    ahead: bool  # steps are launched before the one before is committed
    states: StateStore | None = None  # of a model with recurrent layers
    layers: tuple[int, ...] = ()  # whose hidden states are kept for drafters
    keep: Callable[[Batch, tuple[int, ...], torch.Tensor], None] | None = None  # for rows of every token
    watched: bool = False  # others are told once the step is booked

    def __post_init__(self) -> None:
        rows = self.table.slots[0].shape[0]
        self._last = torch.zeros(rows, dtype=torch.int64, device=self.device)  # each row's newest sampled token
        self._worker = ThreadPoolExecutor(1, "phloem-step") if self.ahead else None
        self._masks = MaskFiller(self.model.spec.vocab_size, self.device)
        sparse = "sparse_head" in getattr(self.model, "capabilities", ())
        self._sparse = cast(SparseHead, self.model) if sparse else None

    def close(self) -> None:
        """Stop the worker thread."""
        if self._worker:
            self._worker.shutdown()

    def launch(self, plan: Plan) -> Launched:
        """Start a step. Masks are filled on the caller's thread once the model's work is under way."""
        begin = time.perf_counter()
        batch = build(plan, self.table, self.device, self.states)
        future = future_rows(plan)
        # Read now: a request that ends while the step is under way loses its row, perhaps to another one.
        sampled = [segment.request.row for segment in plan.segments if segment.samples]
        build_s = time.perf_counter() - begin
        spans: dict[str, float] = {}
        made = self._submit(lambda: self._timed(spans, "forward", lambda: self._forward(batch, future)))
        masks = settle(lambda: self._masks.fill([s for s in plan.segments if s.samples]), Future())
        pending = self._submit(
            lambda: self._timed(spans, "sample", lambda: self._sample(plan, sampled, made.result()[0], masks.result()))
        )
        scores = self._submit(lambda: self._score(plan, made.result()[0]))
        return Launched(plan, pending, scores, made, build_s, spans)

    def in_order(self, work: Callable[[], object]) -> None:
        """Run something that is quick once all steps launched so far have run; at once, if none is under way."""
        self._submit(work)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        return self._worker.submit(work) if self._worker else settle(work, Future())

    @staticmethod
    def _timed(spans: dict[str, float], name: str, work: Callable[[], T]) -> T:
        begin = time.perf_counter()
        result = work()
        spans[name] = time.perf_counter() - begin
        return result

    @torch.inference_mode()
    def _forward(self, batch: Batch, future: tuple[list[int], list[int]]) -> Forward:
        where, rows = future
        if where:
            batch.tokens[where] = self._last[rows]
        attend, seen = self.attention.prepare(batch, self.kv), None
        if self.layers:
            hidden, seen = cast(HiddenStates, self.model).forward_seen(batch, attend, self.layers)
            if self.keep is not None:
                self.keep(batch, self.layers, seen)
            seen = seen if self.watched else None
        else:
            hidden = self.model.forward(batch, attend)
        return hidden.index_select(0, batch.logits_rows), seen

    @torch.inference_mode()
    def _sample(self, plan: Plan, table_rows: list[int], hidden: torch.Tensor, masks: Masks | None) -> Pending:
        segments = [segment for segment in plan.segments if segment.samples]
        pending = self.sampler.start(partial(self._head, hidden), segments, masks)
        if segments:
            rows = torch.tensor([1 + len(segment.draft or ()) for segment in segments])
            roots = (rows.cumsum(0) - rows).to(self.device)
            self._last[torch.tensor(table_rows, device=self.device)] = pending.tokens[roots]
        return pending

    def _head(
        self, hidden: torch.Tensor, rows: Sequence[int], few: Sequence[tuple[int, torch.Tensor]]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits as the sampler wants them: one product over the rows that need all of theirs, the rest by columns."""
        every = [*rows, *(row for row, _ in few)] if self._sparse is None else rows
        logits = self.model.logits(picked(hidden, every)) if every else hidden.new_zeros(0, self.model.spec.vocab_size)
        if self._sparse is not None:
            return logits, [self._sparse.logits_at(hidden[row], tokens.to(self.device)) for row, tokens in few]
        rest = zip(logits[len(rows) :], few, strict=True)
        return logits[: len(rows)], [own[tokens.to(self.device)] for own, (_, tokens) in rest]

    @torch.inference_mode()
    def _score(self, plan: Plan, hidden: torch.Tensor) -> Scores:
        """Logprobs of what follows the scored rows, which come after all sampled ones."""
        counts = [len(scored_rows(segment)) for segment in plan.segments]
        prompts: dict[int, list[TokenLogprob]] = {}
        trees: dict[int, list[float]] = {}
        blocks = torch.split(hidden[len(hidden) - sum(counts) :], counts)
        for i, (segment, own) in enumerate(zip(plan.segments, blocks, strict=True)):
            if segment.scored is not None:
                trees[i] = edge_logprobs(segment.scored, own, self.model.logits)
            elif segment.prompt_logprobs:
                prompts[i] = self._score_chunk(segment, own)
        return prompts, trees

    def _score_chunk(self, segment: Segment, hidden: torch.Tensor) -> list[TokenLogprob]:
        top = segment.request.params.prompt_logprobs or 0
        scored: list[TokenLogprob] = []
        for at in range(0, len(hidden), HEAD_BLOCK_ROWS):
            block = hidden[at : at + HEAD_BLOCK_ROWS]
            first = segment.start + 1 + len(scored)
            tokens = segment.request.tokens[first : first + len(block)].tolist()
            scored += prompt_logprobs(self.model.logits(block), tokens, top) if tokens else []
        return scored


def settle(work: Callable[[], T], done: Future[T]) -> Future[T]:
    """Run `work` now; what it raises surfaces where the result of `done` is asked for, as from a thread."""
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)
    return done
