"""From logits to tokens: sampling and verification are one pipeline over (segment, node) rows.

Under a grammar most rows allow few tokens. A row that allows one is not sampled; one that allows a few is sampled from
a table of just these, and only their columns of the output head are asked for (design §6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from . import cutoffs, filters, noise
from .batch import Segment
from .cutoffs import Kept
from .drawn_from import DrawnFrom
from .draws import Chance, Dice, Floats
from .errors import PhloemError, RequestError, StepError
from .filters import Span
from .interfaces import LogitsProcessor
from .masks import DEAD, Masks
from .messages import TokenLogprob
from .verifier import Walked, walk, walk_drawn

# Rows that allow at most this many tokens are sampled from a table of their own. It is where fetching the columns of
# a head of 49,152 x 576 float32 one by one costs as much as one more row of its product: 0.2 to 0.4 ms either way.
FEW_TOKENS = 128

# The output head of a step: for some rows the logits [D, vocab] float32, for others those of given tokens, [K] each.
Head = Callable[[Sequence[int], Sequence[tuple[int, torch.Tensor]]], tuple[torch.Tensor, list[torch.Tensor]]]
Groups = tuple[list[Span], list[Span], list[Span]]  # greedy, free, cut: see `Sampler._group`


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
    best: torch.Tensor  # [N] score that won each row; not finite where something is wrong
    logits: torch.Tensor  # [D, vocab] of the rows that need all of theirs
    masks: Masks | None
    spans: list[Span]
    chance: Chance
    work: DrawnFrom | None = None

    def put(self, rows: Sequence[int], best: torch.Tensor, tokens: torch.Tensor) -> None:
        """Set the winners of some rows."""
        where = torch.tensor(rows, device=best.device)
        self.best.index_copy_(0, where, best)
        self.tokens.index_copy_(0, where, tokens)

    def outcomes(self) -> list[Outcome]:
        """One outcome per segment, in order. Waits for the device; called once, when the step is committed."""
        samples = torch.where(self.best.isfinite(), self.tokens, -1).tolist()
        drawn = self._walk_drawn(samples)
        outcomes = [self._outcome(span, samples, drawn.get(i)) for i, span in enumerate(self.spans)]
        for mode in ("raw", "processed"):
            self._add_logprobs(mode, outcomes)
        return outcomes

    def _outcome(self, span: Span, samples: list[int], walked: Walked | None) -> Outcome:
        """`walked` is what became of a draft that was drawn."""
        if (error := _error(span)) is not None:
            return Outcome([], [], error=error if isinstance(error, PhloemError) else StepError(repr(error)))
        tokens, nodes = walked or walk(span.segment.draft, _own(span, samples), span.segment.request.stop_ids)
        if len(tokens) > len(nodes):
            return Outcome(tokens, nodes)
        return Outcome(tokens, nodes, error=self._diagnose(span, nodes[-1] + 1 if nodes else 0))

    def _walk_drawn(self, samples: list[int]) -> dict[int, Walked]:
        """By span, what rejection sampling makes of the drafts that were drawn.

        The device is asked once for a number per draft node, and then for whole rows where first children are refused:
        of all requests at once, so of chains once.
        """
        walks = []
        for i, (span, draft) in enumerate((span, span.segment.draft) for span in self.spans):
            if draft is not None and draft.drawn is not None and _error(span) is None:
                walks.append((i, span, draft))
        likely = self._likely([span for _, span, _ in walks])
        done: dict[int, Walked] = {}
        turns: list[tuple[int, Any, Floats | None]] = [
            (i, walk_drawn(draft, _own(span, samples), chances, self.chance, span.segment.request.stop_ids), None)
            for (i, span, draft), chances in zip(walks, likely, strict=True)
        ]
        while turns:
            asked = []
            for i, going, row in turns:
                try:
                    asked.append((i, going, going.send(row)))
                except StopIteration as end:
                    done[i] = end.value
            rows = self._probabilities([(self.spans[i], node) for i, _, node in asked])
            turns = [(i, going, row) for (i, going, _), row in zip(asked, rows, strict=True)]
        return done

    def _likely(self, spans: Sequence[Span]) -> list[list[float]]:
        """For each node of drafts that were drawn, how likely the token after its parent is to be its own."""
        rows: list[int] = []
        tokens: list[int] = []
        for span in spans:
            draft, at = span.segment.draft, {row: span.at + i for i, row in enumerate(span.rows)}
            assert draft is not None, "checked by the caller"
            # a row that cannot be reached is not there: anything will do
            rows += [at.get(parent + 1, max(0, span.at)) for parent in draft.parents]
            tokens += draft.tokens
        flat = iter(self.work.chances(rows, tokens) if self.work is not None else [])
        return [list(islice(flat, len(span.segment.draft or ()))) for span in spans]

    def _probabilities(self, places: Sequence[tuple[Span, int]]) -> list[Floats]:
        """[vocab] float64 for each draft node: what the token after it is drawn from, all filters applied."""
        if not places:
            return []
        scores = torch.cat([self._scores(span, [node + 1], "processed") for span, node in places])
        return list(scores.double().softmax(-1).cpu().numpy())

    def _diagnose(self, span: Span, i: int) -> PhloemError:
        """Why row i of a span could not be sampled."""
        where = f"output position {span.positions[i]}"
        if not bool(self.best[span.row + i] == -math.inf):
            return StepError(f"the model's logits hold NaN or infinity at {where}")
        early = span.positions[i] < span.params.min_tokens
        ends = set(span.ends()) if early else set()
        if span.segment.request.matcher is not None and self.masks is not None:
            if self.masks.counts[span.row + i] == DEAD:
                return StepError(f"the grammar forbids the token before {where}, which its mask allowed")
            allowed = set(self.masks.tokens([span.row + i])[0].tolist())
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
        for span, outcome in zip(self.spans, outcomes, strict=True):
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
        held = [span.rows.index(i) for i in rows]
        if mode == "raw" or span.at < 0 or self.work is None:
            return self.logits[[span.first + i for i in held]]
        return self.work.dense([span.at + i for i in held])


class Sampler:
    """Turns a step's logits into tokens. Owned by the loop; `start` is called once a step, on its thread."""

    def __init__(
        self, vocab_size: int, processors: Mapping[str, LogitsProcessor], chance: Chance | None = None
    ) -> None:
        """`chance` decides rejection sampling, for drafts that were drawn."""
        self.vocab_size = vocab_size
        self.chance = chance or Dice()
        self.processors = processors
        self._hashed: torch.Tensor | None = None  # [vocab] int32 on the logits' device

    def start(self, head: Head, segments: Sequence[Segment], masks: Masks | None = None) -> Pending:
        """Sample all N = sum(1 + nodes) rows of `segments`, all of which sample; `masks` as `MaskFiller` makes them.

        The head is called once. Its logits are left as they are. Waits for the device nowhere unless it is the CPU.
        A batch of plain greedy rows costs one argmax.
        """
        spans = _lay_out(segments)
        few, certain = _narrow(spans, masks) if masks is not None else ([], [])
        dense, narrow = _place(spans), _place(few)
        ids = masks.tokens(narrow) if masks is not None else []
        logits, columns = head(dense, list(zip(narrow, ids, strict=True)))
        assert logits.shape[0] == len(dense), "logits rows do not match the segments"
        rows = sum(len(span.positions) for span in spans)
        pending = Pending(
            torch.zeros(rows, dtype=torch.int64, device=logits.device),
            torch.full((rows,), -math.inf, device=logits.device),  # nothing wins a row that nothing is asked of
            logits, masks, spans, self.chance,
        )  # fmt: skip
        groups = self._group(spans, masks)
        if sum(span.count for group in groups for span in group) < len(dense):
            pending.put(dense, *noise.winners(logits))
        if any(groups):
            held, own = _rows(groups)
            scores = filters.masked(logits, held, None if masks is None else filters.picked(masks.bits, own))
            pending.work, *won = self._filter(scores, groups)
            pending.put(own, *won)
        if narrow:
            groups = self._group(few, masks)
            held, own = _rows(groups)
            # padded behind with the last token, so that ids ascend, and minus infinity
            padded = pad_sequence([ids[row] for row in held], True, self.vocab_size - 1)
            scores = pad_sequence([columns[row] for row in held], True, -math.inf)
            pending.put(own, *self._filter(scores, groups, padded)[1:])
        if certain and masks is not None:
            only = torch.cat(masks.tokens(certain)).to(logits.device)
            pending.put(certain, torch.zeros(len(certain), device=logits.device), only)
        return pending

    def _group(self, spans: Sequence[Span], masks: Masks | None) -> Groups:
        """Spans that are edited and greedy, drawn from all tokens, drawn from a part; sets their working rows."""
        greedy: list[Span] = []
        free: list[Span] = []
        cut: list[Span] = []
        for span in spans:
            if not span.count:
                continue
            if not span.params.greedy:
                (cut if cutoffs.needs_cut(span.params, self.vocab_size) else free).append(span)
            elif self._edited(span) or (masks is not None and span.segment.request.matcher is not None):
                greedy.append(span)
        at = 0
        for span in (*greedy, *free, *cut):
            span.at = at
            at += span.count
        return greedy, free, cut

    @staticmethod
    def _edited(span: Span) -> bool:
        return filters.needs_edit(span.params, span.positions[0])

    def _filter(
        self, scores: torch.Tensor, groups: Groups, ids: torch.Tensor | None = None
    ) -> tuple[DrawnFrom, torch.Tensor, torch.Tensor]:
        """Edit, heat, cut and draw from scores [R, K], in place: the work, per row the winning score and its token.

        Columns are all tokens, or `ids` [R, K] on the host.
        """
        greedy, free, cut = groups
        edited = [span for group in groups for span in group if self._edited(span)]
        filters.edit(scores, edited, self.processors, None if ids is None else ids.numpy())
        ids = None if ids is None else ids.to(scores.device)
        a, b = (sum(span.count for span in group) for group in (greedy, free))
        b += a
        won = [noise.winners(scores[:a])] if greedy else []
        work = DrawnFrom(scores, b)
        if free or cut:
            heat = [span.params.temperature for span in (*free, *cut) for _ in range(span.count)]
            if any(t != 1.0 for t in heat):
                scores[a:] /= torch.tensor(heat, device=scores.device)[:, None]
            keys = self._keys([*free, *cut], scores.device)
        if free:
            hashed = self._token_hashes(scores.device) if ids is None else noise.token_hash(ids[a:b])
            won.append(noise.draw(scores[a:b], keys[: b - a], hashed))
        if cut:
            work.kept = cutoffs.cut(scores[b:], [span.params for span in cut for _ in range(span.count)])
            won.append(self._draw_kept(work.kept, keys[b - a :], None if ids is None else ids[b:]))
        best, columns = (torch.cat(parts) for parts in zip(*won, strict=True))
        return work, best, columns if ids is None else ids.gather(-1, columns[:, None])[:, 0]

    def _draw_kept(
        self, kept: Sequence[Kept], keys: torch.Tensor, ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw for the cut rows, with noise for the kept tokens only: per row the winning score and its column."""
        best = keys.new_empty(len(keys), dtype=torch.float32)
        columns = keys.new_empty(len(keys), dtype=torch.int64)
        for part in kept:
            tokens = part.ids if ids is None else ids[part.rows].gather(-1, part.ids)
            score, place = noise.draw(part.scores, keys[part.rows], noise.token_hash(tokens))
            best[part.rows] = score
            columns[part.rows] = part.ids.gather(-1, place[:, None])[:, 0]
        return best, columns

    @staticmethod
    def _keys(spans: Sequence[Span], device: torch.device) -> torch.Tensor:
        seeds = [span.segment.request.seed for span in spans for _ in range(span.count)]
        choices = [span.segment.request.choice for span in spans for _ in range(span.count)]
        positions = [span.positions[i] for span in spans for i in span.rows]
        return torch.from_numpy(noise.row_keys(seeds, choices, positions)).to(device)

    def _token_hashes(self, device: torch.device) -> torch.Tensor:
        if self._hashed is None or self._hashed.device != device:
            self._hashed = noise.token_hash(torch.arange(self.vocab_size, device=device))
        return self._hashed


def _own(span: Span, samples: list[int]) -> list[int]:
    return samples[span.row : span.row + len(span.positions)]


def _error(span: Span) -> Exception | None:
    return span.error or span.segment.request.error


def _lay_out(segments: Sequence[Segment]) -> list[Span]:
    """The rows of each segment: where they lie, and the output positions they decide."""
    spans: list[Span] = []
    row = 0
    for segment in segments:
        root = segment.start + segment.count - segment.request.prompt_len
        depths = segment.draft.depths() if segment.draft else []
        spans.append(Span(segment, row, [root, *(root + depth for depth in depths)], list(range(1 + len(depths)))))
        row += 1 + len(depths)
    return spans


def _narrow(spans: Sequence[Span], masks: Masks) -> tuple[list[Span], list[int]]:
    """Leave to `spans` the rows that need all logits: those of few tokens, as spans of their own, and certain rows.

    A request that wants logprobs, has custom processors, or whose draft rejection sampling verifies, needs all of every
    row that can be reached.
    """
    few: list[Span] = []
    certain: list[int] = []
    for span in spans:
        if span.segment.request.matcher is None:
            continue
        counts = masks.counts[span.row : span.row + len(span.positions)].tolist()
        live = [i for i, count in enumerate(counts) if count > 0]
        drawn = span.segment.draft is not None and span.segment.draft.drawn is not None
        whole = span.params.logprobs is not None or bool(span.params.logits_processors) or drawn
        span.rows = [i for i in live if whole or counts[i] > FEW_TOKENS]
        some = [] if whole else [i for i in live if counts[i] <= FEW_TOKENS]
        sure = [i for i in some if counts[i] == 1 and not filters.needs_edit(span.params, span.positions[i])]
        certain += [span.row + i for i in sure]
        few.append(Span(span.segment, span.row, span.positions, [i for i in some if i not in sure]))
    return few, certain


def _place(spans: Sequence[Span]) -> list[int]:
    """The rows that the spans of a table hold, among all of the step; sets where each span's begin in the table."""
    rows: list[int] = []
    for span in spans:
        span.first = len(rows)
        rows += [span.row + i for i in span.rows]
    return rows


def _rows(groups: Groups) -> tuple[list[int], list[int]]:
    """The rows of groups in working order: their places in the table, and those among all rows of the step."""
    spans = [span for group in groups for span in group]
    held = [span.first + i for span in spans for i in range(span.count)]
    return held, [span.row + i for span in spans for i in span.rows]


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
