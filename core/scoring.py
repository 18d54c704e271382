"""Scoring: how likely given continuations of a prompt are, all of them in one forward pass as one token tree.

A scoring call generates nothing. With the last tokens of its prompt its continuations run as a tree, hung on the
segment as a draft is, so that what they share is run once. The last token of a continuation is not run at all: its
log-probability stands in the logits before it. Nothing of the tree is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .drafts import Draft
from .errors import ContextError, RequestError, StepError
from .messages import GenerateCall
from .params import SamplingParams

if TYPE_CHECKING:
    import torch

    from .request import Request

MAX_SCORED_TOKENS = 65_536  # in all continuations of one call
HEAD_BLOCK_ROWS = 256  # the output head runs over so many rows at once, so that [rows, vocab] floats stay small


@dataclass(frozen=True, slots=True)
class Tree:
    """Some continuations of one request as a tree for one pass.

    An edge is a token after a row: row 0 is that of the prompt's last token, row 1 + i that of node i. Every
    continuation is a path of edges, and its last one leads to no node.
    """

    draft: Draft | None  # the nodes
    rows: list[int]  # [E]
    tokens: list[int]  # [E]
    paths: dict[int, list[int]]  # continuation -> its edges, in order
    last: bool  # no continuation is left for another pass

    @property
    def nodes(self) -> int:
        """Tokens to run behind the prompt."""
        return len(self.draft or ())


class Scoring:
    """What a scoring call asks for and what is known of it. Owned by the request, written on the loop's thread."""

    def __init__(self, continuations: list[list[int]]) -> None:
        self._texts = continuations
        self._known: dict[int, list[float]] = {}
        # What two continuations share is shared by all between them in this order: a cut of it cuts few paths.
        self._left = sorted(range(len(continuations)), key=lambda i: continuations[i])

    @property
    def longest(self) -> int:
        """Tokens of the longest continuation."""
        return max(map(len, self._texts))

    @property
    def result(self) -> list[list[float]] | None:
        """Per continuation and token the log-probability; None while some are left."""
        return None if self._left else [self._known[i] for i in range(len(self._texts))]

    def tree(self, budget: int, *, branches: bool) -> Tree:
        """The next continuations that fit into `budget` nodes, one at least; without `branches` those of one chain.

        Called once per pass; a pass that comes to nothing (a retraction) is asked for again.
        """
        index: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        edges: dict[tuple[int, int], int] = {}  # (row, token) -> edge
        paths: dict[int, list[int]] = {}
        for i in self._left:
            inner = self._texts[i][:-1]
            at, depth = -1, 0
            while depth < len(inner) and (at, inner[depth]) in index:
                at, depth = index[at, inner[depth]], depth + 1
            fresh = len(inner) - depth
            if paths and (len(index) + fresh > budget or not (branches or not fresh or at == len(index) - 1)):
                break
            at, paths[i] = -1, []
            for token in self._texts[i]:
                paths[i].append(edges.setdefault((at + 1, token), len(edges)))
                if len(paths[i]) <= len(inner):
                    at = index.setdefault((at, token), len(index))
        draft = Draft(tuple(token for _, token in index), tuple(parent for parent, _ in index)) if index else None
        rows, tokens = [row for row, _ in edges], [token for _, token in edges]
        return Tree(draft, rows, tokens, paths, len(paths) == len(self._left))

    def take(self, tree: Tree, logprobs: Sequence[float]) -> None:
        """The log-probabilities of a tree's edges."""
        for i, path in tree.paths.items():
            self._known[i] = [logprobs[edge] for edge in path]
        self._left = [i for i in self._left if i not in tree.paths]


def edge_logprobs(tree: Tree, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    """Log-softmax in float32 at every edge; NaN where the logits are no numbers. Waits for the device.

    `hidden` [1 + nodes, hidden] are the rows of the segment's last prompt token and of the nodes.
    """
    import torch

    rows = torch.tensor(tree.rows, device=hidden.device)
    tokens = torch.tensor(tree.tokens, device=hidden.device)
    found = torch.full((len(rows),), math.nan, device=hidden.device)
    for first in range(0, len(hidden), HEAD_BLOCK_ROWS):
        logits = head(hidden[first : first + HEAD_BLOCK_ROWS])
        here = ((rows >= first) & (rows < first + len(logits))).nonzero()[:, 0]
        total = logits.logsumexp(-1)[rows[here] - first]
        own = logits[rows[here] - first, tokens[here]] - total
        found[here] = own.where(total.isfinite(), math.nan)
    return found.tolist()


def book(request: Request, tree: Tree, logprobs: Sequence[float]) -> None:
    """A pass has been committed: keep its results, and end the request if it was the last one."""
    assert request.scoring is not None
    if any(map(math.isnan, logprobs)):
        request.finish_reason = "error"
        request.error = StepError("the model's logits hold NaN or infinity where the continuations are scored")
        return
    request.scoring.take(tree, logprobs)
    if tree.last:
        request.finish_reason = "stop"


def check(call: GenerateCall, vocab_size: int, most_rows: int) -> None:
    """Refuse a scoring call that asks for something else besides, or that no step can carry. Raises RequestError."""
    continuations = call.score or []
    if not continuations or not all(continuations):
        problem = "a continuation to score has no token" if continuations else "there is no continuation to score"
        raise RequestError(problem, hint="give continuations of at least one token", param="score")
    plain = SamplingParams()
    for name in SamplingParams.__struct_fields__:
        if getattr(call.params, name) != getattr(plain, name):
            problem = f"{name} cannot be honoured with score: nothing is generated, raw log-probabilities are returned"
            raise RequestError(problem, hint="leave it out", param=name)
    total = sum(map(len, continuations))
    if total > MAX_SCORED_TOKENS:
        raise RequestError(f"{total} tokens to score, at most {MAX_SCORED_TOKENS} are allowed", param="score")
    bad = next((token for one in continuations for token in one if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise RequestError(f"token {bad} is outside the vocabulary of {vocab_size}", param="score")
    longest = max(map(len, continuations))
    if longest > most_rows:
        raise ContextError(
            f"a continuation of {longest} tokens does not fit one step of {most_rows}",
            hint="score it in parts, or raise schedule.max_tokens_per_step",
            param="score",
        )
