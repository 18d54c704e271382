"""The first half of the filter pipeline: everything that changes scores before the temperature.

    grammar mask, min_tokens, logit_bias, repetition, frequency and presence penalties, custom logits processors
    | temperature, top_k, top_p, min_p

Left of the bar every request may be affected; greedy ones then take the highest score. The right side is for sampled
requests (`phloem.cutoffs`). A mask wins over what follows it: a forbidden token is at minus infinity, where no bias or
penalty reaches it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .batch import Segment
from .errors import PhloemError, PluginError
from .interfaces import LogitsProcessor, RowContext
from .params import SamplingParams


@dataclass(slots=True)
class Span:
    """The rows of one sampling segment: its root, then its draft nodes."""

    segment: Segment
    row: int  # of the root, in the step's logits
    positions: list[int]  # output position (0 is the first generated token) that each row decides
    at: int = -1  # row of the root in the working copy of the scores; -1: needs no filter, greedy
    error: PhloemError | None = None

    @property
    def params(self) -> SamplingParams:
        """Of the request."""
        return self.segment.request.params

    @property
    def end(self) -> int:
        """Committed tokens that the root's row has seen."""
        return self.segment.start + self.segment.count

    @property
    def count(self) -> int:
        """Rows."""
        return len(self.positions)

    def path(self, i: int) -> list[int]:
        """Draft tokens between the committed text and row i, row i's own node included."""
        draft = self.segment.draft
        return [] if not i or draft is None else [draft.tokens[node] for node in draft.path(i - 1)]

    def ends(self) -> list[int]:
        """The request's end-of-sequence and stop tokens: what min_tokens holds back."""
        return sorted(self.segment.request.stop_ids.union(self.params.stop_token_ids))


def needs_tokens(params: SamplingParams) -> bool:
    """True when scores depend on the tokens themselves, so that these must be on the host before sampling."""
    return params.penalised or bool(params.logits_processors)


def needs_edit(params: SamplingParams, position: int) -> bool:
    """True when, grammar aside, a request's scores at an output position differ from its logits over temperature."""
    return bool(params.logit_bias) or position < params.min_tokens or needs_tokens(params)


def edit(
    scores: torch.Tensor, spans: Sequence[Span], masks: torch.Tensor | None, processors: Mapping[str, LogitsProcessor]
) -> None:
    """Apply everything before the temperature to scores [R, vocab] float32, in place; rows are `span.at` onwards.

    A processor that raises sets its span's error; the others go on. Called once a step with the spans that need it.
    """
    if masks is not None:
        _mask(scores, [span for span in spans if span.segment.request.matcher is not None], masks)
    added = _Cells()
    for span in spans:
        bias = span.params.logit_bias or {}
        ends = [token for token in span.ends() if token < scores.shape[1]]
        for i, position in enumerate(span.positions):
            if position < span.params.min_tokens:
                added.add(span.at + i, ends, -math.inf)
            if bias:
                added.add(span.at + i, list(bias), list(bias.values()))
    added.add_to(scores)
    _repetition(scores, [span for span in spans if span.params.repetition_penalty != 1.0])
    _occurrences(scores, [span for span in spans if span.params.frequency_penalty or span.params.presence_penalty])
    for name, processor in processors.items():  # in the configured order, whatever order requests name them in
        for span in spans:
            if name in (span.params.logits_processors or ()) and span.error is None:
                _process(scores, span, name, processor)


class _Cells:
    """Gathers (row, token, number) triples on the host, to be applied to the scores by one scatter."""

    def __init__(self) -> None:
        self._parts: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]] = []

    def add(self, row: int, tokens: npt.ArrayLike, number: npt.ArrayLike) -> None:
        """One number for each of some tokens of a row, or the same for all."""
        ids = np.asarray(tokens, dtype=np.int64)
        self._parts.append(
            (np.full_like(ids, row), ids, np.broadcast_to(np.asarray(number, dtype=np.float32), ids.shape))
        )

    def on(self, scores: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        """((rows, tokens), numbers), [C] each on the scores' device; None if there are none."""
        if not self._parts:
            return None
        rows, ids, numbers = (torch.from_numpy(np.concatenate(column)) for column in zip(*self._parts, strict=True))
        return (rows.to(scores.device), ids.to(scores.device)), numbers.to(scores.device)

    def add_to(self, scores: torch.Tensor) -> None:
        """scores[row, token] += number, in place."""
        if (cells := self.on(scores)) is not None:
            scores.index_put_(*cells, accumulate=True)


def _mask(scores: torch.Tensor, spans: Sequence[Span], masks: torch.Tensor) -> None:
    """Put what the bitmasks [N, ceil(vocab / 32)] of the spans' rows forbid at minus infinity.

    A table turns each byte into eight summands, which is several times faster than picking bits apart.
    """
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    summands = torch.zeros(256, 8).masked_fill_(bits == 0, -math.inf).to(scores.device)
    for span in spans:
        packed = masks[span.row : span.row + span.count].contiguous().view(torch.uint8).to(scores.device)
        rows = summands.index_select(0, packed.view(-1).int()).view(span.count, -1)
        scores[span.at : span.at + span.count] += rows[:, : scores.shape[1]]


def _repetition(scores: torch.Tensor, spans: Sequence[Span]) -> None:
    """Divide positive scores of tokens in prompt or output by the penalty, multiply negative ones (Keskar, 2019)."""
    cells = _Cells()
    for span in spans:
        text = np.array(span.segment.request.tokens[: span.end], dtype=np.int64)
        for i in range(span.count):
            cells.add(span.at + i, np.append(text, span.path(i)) if i else text, span.params.repetition_penalty)
    if (found := cells.on(scores)) is not None:
        where, penalty = found
        old = scores[where]
        scores[where] = torch.where(old > 0, old / penalty, old * penalty)  # repeated tokens write the same value


def _occurrences(scores: torch.Tensor, spans: Sequence[Span]) -> None:
    """Subtract frequency_penalty per occurrence and presence_penalty once, of the output's tokens."""
    cells = _Cells()
    for span in spans:
        request = span.segment.request
        output = np.array(request.tokens[request.prompt_len : span.end], dtype=np.int64)
        for i in range(span.count):
            ids, counts = np.unique(np.append(output, span.path(i)) if i else output, return_counts=True)
            cells.add(span.at + i, ids, -span.params.frequency_penalty * counts - span.params.presence_penalty)
    cells.add_to(scores)


def _process(scores: torch.Tensor, span: Span, name: str, processor: LogitsProcessor) -> None:
    request = span.segment.request
    arguments = (span.params.logits_processors or {})[name]
    prompt = request.tokens[: request.prompt_len].tolist()
    output = request.tokens[request.prompt_len : span.end].tolist()
    rows = [RowContext(request.id, arguments, prompt, output + span.path(i)) for i in range(span.count)]
    try:
        processor.process(scores[span.at : span.at + span.count], rows)
    except PhloemError as error:
        span.error = error
    except Exception as error:
        span.error = PluginError(f"logits processor {name!r} failed: {error!r}")
