"""From logits to tokens: sampling and verification are one pipeline over (segment, node) rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from . import cutoffs, filters, noise
from .batch import Segment
from .cutoffs import Kept
from .errors import PhloemError, RequestError, StepError
from .filters import Span
from .interfaces import LogitsProcessor
from .messages import TokenLogprob
from .verifier import walk


@dataclass(slots=True)
class Outcome:
    """What one segment's sampling came to.

    `tokens`: emitted tokens, those of the accepted draft nodes and then the target's own next one. `nodes`: the
    accepted draft nodes, one fewer than tokens. `logprobs`: one per token, if asked for. With `error` the request
    must end; `tokens` (as many as nodes) are then what plain decoding would have emitted before it.
    """

    tokens: list[int]
    nodes: list[int]
    logprobs: list[TokenLogprob] | None = None
    error: PhloemError | None = None


@dataclass(slots=True, eq=False)
class Pending:
    """A step's samples, possibly still on their way on the device."""

    tokens: torch.Tensor  # [N] int64, on the logits' device: a valid token id for every row, whatever its outcome
    _best: torch.Tensor  # [N] score that won each row; not finite where something is wrong
    _logits: torch.Tensor
    _masks: torch.Tensor | None
    _spans: list[Span]
    _work: _Work | None

    def outcomes(self) -> list[Outcome]:
        """One outcome per segment, in order. Waits for the device; called once, when the step is committed."""
        samples = torch.where(self._best.isfinite(), self.tokens, -1).tolist()
        outcomes = [self._walk(span, samples) for span in self._spans]
        for mode in ("raw", "processed"):
            self._add_logprobs(mode, outcomes)
        return outcomes

    def _walk(self, span: Span, samples: list[int]) -> Outcome:
        error = span.error or span.segment.request.error
        if error is not None:
            return Outcome([], [], error=error if isinstance(error, PhloemError) else StepError(repr(error)))
        own = samples[span.row : span.row + span.count]
        tokens, nodes = walk(span.segment.draft, own, span.segment.request.stop_ids)
        if len(tokens) > len(nodes):
            return Outcome(tokens, nodes)
        return Outcome(tokens, nodes, error=self._diagnose(span, nodes[-1] + 1 if nodes else 0))

    def _diagnose(self, span: Span, i: int) -> PhloemError:
        """Why row i of a span could not be sampled."""
        where = f"output position {span.positions[i]}"
        if not bool(self._best[span.row + i] == -math.inf):
            return StepError(f"the model's logits hold NaN or infinity at {where}")
        early = span.positions[i] < span.params.min_tokens
        ends = set(span.ends()) if early else set()
        if span.segment.request.matcher is not None and self._masks is not None:
            packed = self._masks[span.row + i].contiguous().view(torch.uint8).numpy()
            bits = np.unpackbits(packed, bitorder="little")[: self._logits.shape[1]]
            allowed = set(np.flatnonzero(bits).tolist())
            if not allowed:
                return RequestError(f"the grammar allows no token of this vocabulary at {where}", param="grammar")
            if allowed <= ends:
                return RequestError(
                    f"the grammar allows only end tokens at {where}, which min_tokens={span.params.min_tokens} forbids",
                    hint="lower min_tokens, or let the grammar go on for longer",
                    param="min_tokens",
                )
        names = ", ".join(span.params.logits_processors or ())
        by = f"; logits processors in use: {names}" if names else ""
        return StepError(f"no token has a finite score at {where}{by}")

    def _add_logprobs(self, mode: str, outcomes: Sequence[Outcome]) -> None:
        """Log-probabilities of emitted rows that ask for them, in one batch per mode."""
        wanted = []
        for span, outcome in zip(self._spans, outcomes, strict=True):
            if span.params.logprobs is not None and span.params.logprobs_mode == mode:
                rows = [0] + [node + 1 for node in outcome.nodes]
                wanted.append((span, outcome, rows[: len(outcome.tokens)]))
        if not wanted:
            return
        source = torch.cat([self._scores(span, rows, mode) for span, _, rows in wanted])
        chosen = [token for _, outcome, _ in wanted for token in outcome.tokens]
        counts = [span.params.logprobs or 0 for span, _, rows in wanted for _ in rows]
        all_logprobs = iter(token_logprobs(source, chosen, counts))
        for _, outcome, rows in wanted:
            outcome.logprobs = [next(all_logprobs) for _ in rows]

    def _scores(self, span: Span, rows: list[int], mode: str) -> torch.Tensor:
        """[rows, vocab]: raw logits, or the scores that were drawn from (greedy: before temperature and cut-offs)."""
        if mode == "raw" or span.at < 0 or self._work is None:
            return self._logits[[span.row + i for i in rows]]
        return self._work.dense([span.at + i for i in rows])


@dataclass(slots=True)
class _Work:
    """The working copy of the scores of rows that need filters or noise: edited greedy, free, then cut rows."""

    scores: torch.Tensor  # [R, vocab] float32
    cut_from: int  # first row that draws from a part of the vocabulary
    kept: list[Kept] = field(default_factory=list)

    def dense(self, rows: list[int]) -> torch.Tensor:
        """Scores [rows, vocab] with everything cut at minus infinity."""
        out = self.scores[rows]
        for kept in self.kept:
            where = {row: i for i, row in enumerate(kept.rows.tolist())}
            for i, row in enumerate(rows):
                if (at := where.get(row - self.cut_from)) is not None:
                    alive = kept.scores[at] != -math.inf
                    out[i].fill_(-math.inf)
                    out[i, kept.ids[at][alive]] = kept.scores[at][alive]
        return out


class Sampler:
    """Turns a step's logits into tokens. Owned by the loop; `start` is called once a step, on its thread."""

    def __init__(self, vocab_size: int, processors: Mapping[str, LogitsProcessor]) -> None:
        self.vocab_size = vocab_size
        self.processors = processors
        self._hashed: torch.Tensor | None = None  # [vocab] int32 on the logits' device

    def start(self, logits: torch.Tensor, segments: Sequence[Segment], masks: torch.Tensor | None = None) -> Pending:
        """Sample every row of logits [N, vocab] float32, N = sum(1 + nodes) over `segments`, all of which sample.

        `masks` [N, ceil(vocab / 32)] int32 as `fill_masks` makes them. Logits are left as they are. Waits for the
        device nowhere unless it is the CPU. A batch of plain greedy rows costs one argmax.
        """
        spans = _lay_out(segments)
        assert logits.shape[0] == sum(span.count for span in spans), "logits rows do not match the segments"
        groups = self._group(spans, masks)
        touched = [span for group in groups for span in group]
        plain = len(touched) < len(spans)
        best, tokens = noise.winners(logits if plain else logits[:, :1])  # without plain rows all are overwritten
        work = None
        if touched:
            work, own_best, own_tokens = self._filter(logits, groups, masks)
            rows = torch.tensor([span.row + i for span in touched for i in range(span.count)], device=logits.device)
            best, tokens = best.index_copy(0, rows, own_best), tokens.index_copy(0, rows, own_tokens)
        return Pending(tokens, best, logits, masks, spans, work)

    def _group(self, spans: Sequence[Span], masks: torch.Tensor | None) -> tuple[list[Span], list[Span], list[Span]]:
        """Spans that are edited and greedy, drawn from all tokens, drawn from a part; and their working rows."""
        greedy: list[Span] = []
        free: list[Span] = []
        cut: list[Span] = []
        for span in spans:
            if not span.params.greedy:
                (cut if cutoffs.needs_cut(span.params, self.vocab_size) else free).append(span)
            elif self._edited(span, masks):
                greedy.append(span)
        at = 0
        for span in (*greedy, *free, *cut):
            span.at = at
            at += span.count
        return greedy, free, cut

    @staticmethod
    def _edited(span: Span, masks: torch.Tensor | None) -> bool:
        masked = masks is not None and span.segment.request.matcher is not None
        return masked or filters.needs_edit(span.params, span.positions[0])

    def _filter(
        self, logits: torch.Tensor, groups: tuple[list[Span], list[Span], list[Span]], masks: torch.Tensor | None
    ) -> tuple[_Work, torch.Tensor, torch.Tensor]:
        """Edit, heat, cut and draw: the working copy, and per working row the winning score and its token."""
        greedy, free, cut = groups
        spans = [*greedy, *free, *cut]
        rows = [span.row + i for span in spans for i in range(span.count)]
        scores = logits[torch.tensor(rows, device=logits.device)]
        filters.edit(scores, [span for span in spans if self._edited(span, masks)], masks, self.processors)
        a, b = (sum(span.count for span in group) for group in (greedy, free))
        b += a
        won = [noise.winners(scores[:a])] if greedy else []
        work = _Work(scores, b)
        if free or cut:
            heat = [span.params.temperature for span in (*free, *cut) for _ in range(span.count)]
            if any(t != 1.0 for t in heat):
                scores[a:] /= torch.tensor(heat, device=scores.device)[:, None]
            keys = self._keys([*free, *cut], scores.device)
        if free:
            won.append(noise.draw(scores[a:b], keys[: b - a], self._token_hashes(scores.device)))
        if cut:
            work.kept = cutoffs.cut(scores[b:], [span.params for span in cut for _ in range(span.count)])
            won.append(self._draw_kept(work.kept, keys[b - a :]))
        return work, torch.cat([best for best, _ in won]), torch.cat([tokens for _, tokens in won])

    def _draw_kept(self, kept: Sequence[Kept], keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw for the cut rows, with noise for the kept tokens only."""
        best = keys.new_empty(len(keys), dtype=torch.float32)
        tokens = keys.new_empty(len(keys), dtype=torch.int64)
        for part in kept:
            score, column = noise.draw(part.scores, keys[part.rows], noise.token_hash(part.ids))
            best[part.rows] = score
            tokens[part.rows] = part.ids.gather(-1, column[:, None])[:, 0]
        return best, tokens

    @staticmethod
    def _keys(spans: Sequence[Span], device: torch.device) -> torch.Tensor:
        seeds = [span.segment.request.seed for span in spans for _ in range(span.count)]
        choices = [span.segment.request.choice for span in spans for _ in range(span.count)]
        positions = [position for span in spans for position in span.positions]
        return torch.from_numpy(noise.row_keys(seeds, choices, positions)).to(device)

    def _token_hashes(self, device: torch.device) -> torch.Tensor:
        if self._hashed is None or self._hashed.device != device:
            self._hashed = noise.token_hash(torch.arange(self.vocab_size, device=device))
        return self._hashed


def _lay_out(segments: Sequence[Segment]) -> list[Span]:
    """The rows of each segment: where they lie, and the output positions they decide."""
    spans: list[Span] = []
    row = 0
    for segment in segments:
        root = segment.start + segment.count - segment.request.prompt_len
        depths = segment.draft.depths() if segment.draft else []
        spans.append(Span(segment, row, [root, *(root + depth for depth in depths)]))
        row += 1 + len(depths)
    return spans


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """Log-softmax of logits [M, vocab] at tokens [M], and the counts[i] best alternatives of row i.

    Tokens at minus infinity are never listed as alternatives. Waits for the device.
    """
    if not len(tokens):
        return []
    most = min(max(counts), logits.shape[1])
    log_total = logits.logsumexp(-1)
    index = torch.tensor(tokens, device=logits.device)[:, None]
    chosen = (logits.gather(-1, index)[:, 0] - log_total).tolist()
    if not most:
        return [TokenLogprob(token, logprob) for token, logprob in zip(tokens, chosen, strict=True)]
    values, ids = cutoffs.select(logits, most)[:2] if logits.device.type == "cpu" else logits.topk(most, dim=-1)
    rows = zip(tokens, chosen, counts, (values - log_total[:, None]).tolist(), ids.tolist(), strict=True)
    return [TokenLogprob(token, own, _finite(i[:k], v[:k])) for token, own, k, v, i in rows]


def _finite(ids: Sequence[int], values: Sequence[float]) -> list[tuple[int, float]]:
    return [(token, value) for token, value in zip(ids, values, strict=True) if math.isfinite(value)]


def prompt_logprobs(logits: torch.Tensor, next_tokens: Sequence[int], k: int) -> list[TokenLogprob]:
    """Logprobs of the tokens that truly followed the first len(next_tokens) rows of a prompt chunk's logits."""
    return token_logprobs(logits[: len(next_tokens)], next_tokens, [k] * len(next_tokens))
