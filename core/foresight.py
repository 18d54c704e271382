"""How much more the running requests will write, learnt from those that have ended; admission reckons with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .request import Request

Floats = npt.NDArray[np.float64]

# Output that a request is assumed to still need is counted up to this many tokens (as SGLang does).
CLIP_TOKENS = 4096
# Share of what a request may still write that it is assumed to need while nothing is known, and after how many ended
# requests that counts for half.
PRIOR_SHARE, PRIOR_WEIGHT = 0.3, 8.0
# Weight of older ends beside a new one: a change of the load is learnt within some hundred requests.
MEMORY = 0.995
# Bounds of the lengths that are told apart, about eight an octave.
_EDGES: Floats = np.unique(np.floor(2.0 ** np.arange(0, 21, 0.125))) - 1


class Foresight:
    """The distribution of output lengths, as a survival curve (Kaplan and Meier, 1958).

    A request that was cut off (by `max_tokens`, an abort) says only that it would have been longer: it counts for the
    lengths that it passed, so short limits teach nothing wrong about long ones. O(1) for each request asked about.
    """

    def __init__(self) -> None:
        self._ended = np.zeros(len(_EDGES))  # ends within [edge, next edge), older ones count less
        self._passed = np.zeros(len(_EDGES))  # outputs that went on beyond it
        self._weight = 0.0
        self._alive: Floats = np.ones(len(_EDGES))  # share of outputs that reach an edge
        self._mean: Floats = _EDGES.copy()  # its integral
        self._stale = False
        self._caution = 1.0  # factor on what is learnt; rises when slots ran out

    def learn(self, request: Request) -> None:
        """A request has ended, for whatever reason."""
        if request.scoring is not None or not request.output_len:
            return
        place = int(np.searchsorted(_EDGES, request.output_len, side="right")) - 1
        self._ended *= MEMORY
        self._passed *= MEMORY
        self._weight = self._weight * MEMORY + 1.0
        self._passed[:place] += 1.0
        if request.finish_reason == "stop":
            self._ended[place] += 1.0
        self._stale = True

    def ran_out(self) -> None:
        """A request had to be retracted for want of slots: too many were admitted."""
        self._caution = min(2.0, self._caution + 0.1)

    def went_well(self) -> None:
        """A step in which that did not happen."""
        self._caution = max(1.0, self._caution * 0.999)

    def remaining(self, requests: Sequence[Request]) -> Floats:
        """Tokens that each is expected to still write, [len(requests)]."""
        if self._stale:
            self._renew()
        written = np.array([request.output_len for request in requests], dtype=np.float64)
        room = np.array([min(request.remaining, CLIP_TOKENS) for request in requests], dtype=np.float64)
        beyond = np.interp(written + room, _EDGES, self._mean) - np.interp(written, _EDGES, self._mean)
        learnt = beyond / np.maximum(np.interp(written, _EDGES, self._alive), 1e-12)
        trust = self._weight**2 / (self._weight**2 + PRIOR_WEIGHT**2)
        return np.minimum(self._caution * (trust * learnt + (1.0 - trust) * PRIOR_SHARE * room), room)

    def demand(self, requests: Sequence[Request]) -> int:
        """Slots that these requests, once all run, are expected to ask for beyond their own at the worst moment.

        They write a token a step each, and who ends gives back what it wrote, so the worst moment is one at which a
        request ends (after Gong et al., "Past-Future Scheduler", ASPLOS 2025).
        """
        unwritten = sum(len(request.tokens) - request.capacity for request in requests)
        left = self.remaining(requests)
        order = np.argsort(-left)
        written = np.array([request.output_len for request in requests], dtype=np.float64)[order]
        ended = written.sum() - np.cumsum(written)  # what those have given back that end before
        most = (left[order] * np.arange(1, len(requests) + 1) - ended).max(initial=0.0)
        return unwritten + int(np.ceil(most))

    def _renew(self) -> None:
        """The curve from the counts; to each bucket one request is added that ends at the overall rate.

        So the curve stays above zero, and goes on beyond the longest output seen.
        """
        widths = np.diff(_EDGES)
        lived = (widths * (self._passed + self._ended / 2)[:-1]).sum()
        added = -np.expm1(-self._ended.sum() / max(lived, 1.0) * np.append(widths, widths[-1]))
        stay = 1.0 - (self._ended + added) / (self._ended + self._passed + 1.0)
        self._alive = np.concatenate([[1.0], np.cumprod(stay)[:-1]])
        steps = widths * (self._alive[:-1] + self._alive[1:]) / 2
        self._mean = np.concatenate([[0.0], np.cumsum(steps)])
        self._stale = False
