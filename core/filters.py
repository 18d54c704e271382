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

# The eight scores' summands for each byte of a mask, lowest bit first.
_BYTES = np.arange(256, dtype=np.uint8)[:, None]
_SUMMANDS = np.where(np.unpackbits(_BYTES, axis=1, bitorder="little"), np.float32(0), np.float32(-np.inf))


@dataclass(slots=True)
class Span:
    """The rows of one sampling segment, its root's and its draft nodes', and those of them that one table holds."""

    segment: Segment
    row: int  # of the root, among all rows of the step
    positions: list[int]  # output position (0 is the first generated token) that each row decides
    rows: list[int]  # held rows: 0 is the root's, 1 that of draft node 0, ...
    first: int = 0  # where they begin in the logits
    at: int = -1  # where they begin in the working copy of the scores; -1: needs no filter, greedy
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
        """Held rows."""
        return len(self.rows)

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


def masked(logits: torch.Tensor, rows: Sequence[int], bits: torch.Tensor | None) -> torch.Tensor:
    """A copy of rows of logits [D, vocab], with what their bitmasks [R, ceil(vocab / 32)] forbid at minus infinity.

    A table turns each byte into eight summands. With numpy's `take` copy and mask cost 13 us per row of 49,152 tokens
    on the host, whatever the mask; filling by booleans costs 35 to 250, as the bits lie.
    """
    if bits is None:
        return logits[torch.tensor(rows, device=logits.device)]
    if logits.device.type == "cpu":
        scores = torch.from_numpy(np.take(_SUMMANDS, bits.numpy().view(np.uint8), axis=0))
    else:
        table = torch.from_numpy(_SUMMANDS).to(logits.device)
        scores = table[bits.to(logits.device, non_blocking=True).view(torch.uint8).int()]
    return scores.view(len(rows), -1)[:, : logits.shape[1]].add_(picked(logits, rows))


def picked(table: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows of a table: where they lie side by side, without copying them."""
    first = rows[0] if rows else 0
    if list(rows) == list(range(first, first + len(rows))):
        return table[first : first + len(rows)]
    return table[torch.tensor(rows, device=table.device)]


def edit(
    scores: torch.Tensor,
    spans: Sequence[Span],
    processors: Mapping[str, LogitsProcessor],
    ids: npt.NDArray[np.int64] | None = None,
) -> None:
    """Apply what follows the mask and comes before the temperature to scores [R, vocab] float32, in place.

    Rows are `span.at` onwards. With `ids` [R, K], ascending in each row, scores [R, K] are those of these tokens only.
    A processor that raises sets its span's error; the others go on. Called once a step with the spans that need it.
    """
    added = _Cells(ids)
    for span in spans:
        bias, ends = span.params.logit_bias or {}, span.ends()
        for row, i in enumerate(span.rows, span.at):
            if span.positions[i] < span.params.min_tokens:
                added.add(row, ends, -math.inf)
            if bias:
                added.add(row, list(bias), list(bias.values()))
    added.add_to(scores)
    _repetition(scores, [span for span in spans if span.params.repetition_penalty != 1.0], _Cells(ids))
    penalised = [span for span in spans if span.params.frequency_penalty or span.params.presence_penalty]
    _occurrences(scores, penalised, _Cells(ids))
    for name, processor in processors.items():  # in the configured order, whatever order requests name them in
        for span in spans:
            if name in (span.params.logits_processors or ()) and span.error is None:
                _process(scores, span, name, processor)


class _Cells:
    """Gathers (row, token, number) triples on the host, to be applied to the scores by one scatter."""

    def __init__(self, ids: npt.NDArray[np.int64] | None) -> None:
        self._ids = ids  # the tokens that the columns stand for, where they are not the vocabulary
        self._parts: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]] = []

    def add(self, row: int, tokens: npt.ArrayLike, number: npt.ArrayLike) -> None:
        """One number for each of some tokens of a row, or the same for all."""
        ids = np.asarray(tokens, dtype=np.int64)
        self._parts.append(
            (np.full_like(ids, row), ids, np.broadcast_to(np.asarray(number, dtype=np.float32), ids.shape))
        )

    def on(self, scores: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        """((rows, columns), numbers), [C] each on the scores' device; None if there are none."""
        if not self._parts:
            return None
        rows, columns, numbers = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        if self._ids is None:
            there = columns < scores.shape[1]
        else:
            sought = rows << 32 | columns
            keys = (np.arange(len(self._ids))[:, None] << 32 | self._ids).ravel()
            places = np.searchsorted(keys, sought).clip(max=len(keys) - 1)
            there, columns = keys[places] == sought, places % self._ids.shape[1]
        cells = (torch.from_numpy(values[there]).to(scores.device) for values in (rows, columns, numbers))
        return (next(cells), next(cells)), next(cells)

    def add_to(self, scores: torch.Tensor) -> None:
        """scores[row, column] += number, in place."""
        if (cells := self.on(scores)) is not None:
            scores.index_put_(*cells, accumulate=True)


def _repetition(scores: torch.Tensor, spans: Sequence[Span], cells: _Cells) -> None:
    """Divide positive scores of tokens in prompt or output by the penalty, multiply negative ones (Keskar, 2019)."""
    for span in spans:
        text = np.array(span.segment.request.tokens[: span.end], dtype=np.int64)
        for row, i in enumerate(span.rows, span.at):
            cells.add(row, np.append(text, span.path(i)) if i else text, span.params.repetition_penalty)
    if (found := cells.on(scores)) is not None:
        where, penalty = found
        old = scores[where]
        scores[where] = torch.where(old > 0, old / penalty, old * penalty)  # repeated tokens write the same value


def _occurrences(scores: torch.Tensor, spans: Sequence[Span], cells: _Cells) -> None:
    """Subtract frequency_penalty per occurrence and presence_penalty once, of the output's tokens."""
    for span in spans:
        request = span.segment.request
        output = np.array(request.tokens[request.prompt_len : span.end], dtype=np.int64)
        for row, i in enumerate(span.rows, span.at):
            ids, counts = np.unique(np.append(output, span.path(i)) if i else output, return_counts=True)
            cells.add(row, ids, -span.params.frequency_penalty * counts - span.params.presence_penalty)
    cells.add_to(scores)


def _process(scores: torch.Tensor, span: Span, name: str, processor: LogitsProcessor) -> None:
    request = span.segment.request
    arguments = (span.params.logits_processors or {})[name]
    prompt = request.tokens[: request.prompt_len].tolist()
    output = request.tokens[request.prompt_len : span.end].tolist()
    rows = [RowContext(request.id, arguments, prompt, output + span.path(i)) for i in span.rows]
    try:
        processor.process(scores[span.at : span.at + span.count], rows)
    except PhloemError as error:
        span.error = error
    except Exception as error:
        span.error = PluginError(f"logits processor {name!r} failed: {error!r}")
