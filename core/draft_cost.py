"""What rows of drafts cost in a step: measured when an engine starts, and again in every step."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .batch import Batch, GroupSlots, StepStats
from .executor import Executor

Table = npt.NDArray[np.float64]
Profile = Sequence[tuple[int, float]]  # query rows of a step, seconds
# Rows at which times are kept; between them they are taken to be linear. Close together where products have tiles.
GRID = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 17, 20, 24, 32, 33, 48, 64, 80, 96, 128, 192, 256, 512, 1024)
_PROFILED, _PROFILE_S = (1, 8, 16, 4, 2, 32, 64, 128), 1.0
# Weight of a new time: for the rows it was taken at (half of it for each point of the grid further), and for all.
_TOUCHED, _DRIFT = 0.15, 0.03
_KEPT = 0.995  # what a step without drafts leaves of a bad experience with them


@torch.inference_mode()
def profile(executor: Executor, most: int) -> list[tuple[int, float]]:
    """Seconds of a forward pass and its head by rows, at most `most`; stops after about a second.

    Called once, before there are requests: it writes to slots that are free.
    """
    times: list[tuple[int, float]] = []
    _run(executor, 1)  # the first pass of all is slower: memory is touched, kernels are chosen
    begun = time.perf_counter()
    for rows in _PROFILED:
        if rows > most or (len(times) > 2 and time.perf_counter() - begun > _PROFILE_S):
            break
        times.append((rows, min(_run(executor, rows) for _ in range(2))))
    return sorted(times)


def _run(executor: Executor, rows: int) -> float:
    """One text of `rows` tokens, in slots that nobody uses yet."""
    device, slots = executor.device, torch.arange(rows, device=executor.device)
    groups = tuple(GroupSlots(slots, slots[None].to(torch.int32)) for _ in executor.table.slots)
    tokens = torch.zeros(rows, dtype=torch.int64, device=device)
    batch = Batch(tokens, slots.clone(), groups, slots.clone(), [rows], [rows])
    if executor.states is not None:
        batch.states = executor.states.made([-1], [], [])
    begin = time.perf_counter()
    hidden = executor.model.forward(batch, executor.attention.prepare(batch, executor.kv))
    executor.model.logits(hidden).argmax(-1).tolist()
    return time.perf_counter() - begin


class VerifyCost:
    """Times of steps with and without drafts, and what they say about how many draft nodes pay. Used by the loop."""

    def __init__(self, times: Profile) -> None:
        """`times`: ascending rows, at least one."""
        self._plain = _spread(times)
        self._drafted = self._plain.copy()
        self.requests, self.rows = 1, 1  # of the last step, drafts left out
        self._granted = 0  # draft nodes of the step being planned
        self._gain = 1.0  # tokens a second, as a multiple of those without drafts, in the recent steps
        self._caution = 1.0  # above 1 while steps with drafts bring less than those without
        self._last: float | None = None  # when the last step was committed, if the next one has followed at once

    def plain_s(self, rows: int) -> float:
        """Seconds of a step of so many requests, a token each."""
        return _at(self._plain, rows)

    def drafted_s(self, rows: int) -> float:
        """Seconds of a step of so many rows, draft nodes among them."""
        return _at(self._drafted, rows)

    @property
    def rate(self) -> float:
        """Tokens that a second brings, at the rate of late: what time taken for drafts costs."""
        return self._gain * self.requests / self.plain_s(self.requests)

    def worth(self, values: Sequence[float]) -> tuple[int, float]:
        """How many of these nodes to verify if drafts are in the step anyway, and what they bring; they are granted.

        `values` are their chances to be accepted, falling. As many as bring the most tokens beyond what their time
        would bring otherwise, at the rate of late.
        """
        nodes, won = self._weigh(values, 0.0, 1, 0.0)
        self.grant(nodes)
        return nodes, won

    def grant(self, nodes: int) -> None:
        """So many nodes are in the step being planned; fewer, if it is negative."""
        self._granted += nodes

    def pays(self, values: Sequence[float], each: float = 0.0, rows: int = 1) -> int:
        """How many levels pay, where each takes `rows` rows of the step, and `each` seconds to be proposed.

        What the first draft of a step costs beyond its row is shared by all its requests: nobody knows who else drafts.
        """
        return self._weigh(values, each, rows, self.first_s / self.requests)[0]

    @property
    def first_s(self) -> float:
        """Seconds that the first draft of a step costs beyond its row: another kernel, another product's shape."""
        return max(0.0, self.drafted_s(self.rows) - self.plain_s(self.rows))

    def covers(self, won: float) -> bool:
        """Whether all drafts of a step together bring what the first one costs."""
        return won > self._caution * self.rate * self.first_s

    def _weigh(self, values: Sequence[float], each: float, rows: int, first_s: float) -> tuple[int, float]:
        """How many pay, and the tokens that they bring beyond what they cost."""
        base = self.rows + self._granted
        start, rate = self.drafted_s(base), self._caution * self.rate
        best, nodes, sum_ = 0.0, 0, 0.0
        for i, value in enumerate(values, 1):
            sum_ += value
            won = sum_ - rate * (first_s + self.drafted_s(base + i * rows) - start + i * each)
            if won > best:
                best, nodes = won, i
        return nodes, best

    def measured(self, stats: StepStats, asking: float = 0.0) -> None:
        """A step has been committed; asking the drafters took so many seconds of it.

        Only those of single tokens and drafts, right after another, tell their time.
        """
        now = time.perf_counter()
        last, self._last = self._last, now
        self._granted = 0
        self.requests, self.rows = max(1, stats.requests), max(1, stats.forward_tokens - stats.draft_tokens)
        if last is None or stats.prefill_tokens or self.rows != stats.requests or not stats.decode_tokens:
            return
        self.observe(stats.requests, stats.draft_tokens, stats.decode_tokens, now - last, asking)

    def idled(self) -> None:
        """There was nothing to do: the next step does not follow the last one at once."""
        self._last = None

    def observe(self, requests: int, nodes: int, tokens: int, seconds: float, asking: float = 0.0) -> None:
        """A step of so many requests and draft nodes wrote so many tokens in so many seconds, asking included."""
        table = self._drafted if nodes else self._plain
        ratio = min(2.0, max(0.5, (seconds - asking) / _at(table, requests + nodes)))
        for each in (self._plain, self._drafted):
            each *= ratio**_DRIFT
        low, weight = _place(requests + nodes)
        near = 0.5 ** np.abs(np.arange(len(GRID)) - low - weight)
        table *= ratio ** (_TOUCHED * near)
        gain = tokens * self.plain_s(requests) / (requests * seconds)
        self._gain = max(1.0, self._gain + 0.05 * (min(gain, 8.0) - self._gain))
        if nodes:
            self._caution = min(8.0, max(1.0, self._caution * (1 + 0.05 * (1 - min(gain, 2.0)))))
        else:  # what is not tried any more is forgotten
            self._caution = 1 + _KEPT * (self._caution - 1)
            self._drafted = np.minimum(self._drafted, self._plain + _KEPT * (self._drafted - self._plain))


def _spread(times: Profile) -> Table:
    """Times at the grid; beyond the last that was measured, in proportion to the last slope."""
    rows, seconds = (np.array(column, dtype=np.float64) for column in zip(*times, strict=True))
    seconds = np.maximum.accumulate(np.maximum(seconds, 1e-7))
    grid = np.array(GRID, dtype=np.float64)
    slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2]) if len(rows) > 1 else seconds[-1] / rows[-1]
    known: Table = np.interp(grid, rows, seconds)
    beyond: Table = np.maximum(0.0, grid - rows[-1]) * slope
    return np.add(known, beyond)


def _place(rows: int) -> tuple[int, float]:
    """The grid's point below, and how far on the way to the next."""
    low = min(bisect_right(GRID, max(1, rows)) - 1, len(GRID) - 2)
    return low, min(1.0, (rows - GRID[low]) / (GRID[low + 1] - GRID[low]))


def _at(table: Table, rows: int) -> float:
    low, weight = _place(rows)
    below = float(table[low])
    return below + weight * (float(table[low + 1]) - below)
