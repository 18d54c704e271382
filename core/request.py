"""A request as the loop sees it: one choice of one call, its text so far, what is computed, where its KV lies."""

from __future__ import annotations

import enum
from array import array
from typing import TYPE_CHECKING, NamedTuple

from .messages import GenerateCall, TokenLogprob
from .params import SamplingParams

if TYPE_CHECKING:
    from .interfaces import Lease, Matcher
    from .text import TextStream


class Namespace(NamedTuple):
    """What must agree before two requests may share cached state; fields are never joined into one string."""

    salt: str | None = None
    adapter: str | None = None


class State(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """Mutable state of one choice. Written by the scheduler and the loop only, on the loop's thread.

    `tokens` is prompt plus output. KV of tokens [0, computed) lies in the slots of table row `row`; of these,
    [0, lease.length) belong to the cache and are locked by `lease`, the rest, up to `capacity` slots, to the request.
    """

    __slots__ = (
        "arrival",
        "arrival_s",
        "cached_tokens",
        "call",
        "capacity",
        "choice",
        "computed",
        "deferred",
        "drafters_off",
        "error",
        "finish_reason",
        "first_token_s",
        "future",
        "id",
        "in_flight",
        "last_token_s",
        "lease",
        "limit",
        "logprobs",
        "matched",
        "matched_version",
        "matcher",
        "namespace",
        "params",
        "prompt_len",
        "prompt_logprobs",
        "prompt_logprobs_done",
        "reported",
        "retractions",
        "row",
        "seed",
        "state",
        "stop_ids",
        "stop_reason",
        "text",
        "tokens",
    )

    def __init__(self, call: GenerateCall, choice: int, *, seed: int, limit: int, arrival: int) -> None:
        self.call = call
        self.choice = choice
        self.id = f"{call.call_id}/{choice}"
        self.params: SamplingParams = call.params
        self.namespace = Namespace(call.salt, call.adapter)
        self.seed = seed
        self.limit = limit  # most tokens of prompt + output
        self.arrival = arrival  # sequence number: orders requests, never repeats
        self.arrival_s = call.arrival_s
        self.tokens: array[int] = array("i", call.prompt)
        self.prompt_len = len(call.prompt)
        self.state = State.WAITING
        self.stop_ids: frozenset[int] = frozenset()
        # KV
        self.computed = 0
        self.capacity = 0
        self.row = -1
        self.lease: Lease | None = None
        # scheduling
        self.in_flight = 0  # tokens of a launched step that is not committed yet (overlap)
        self.future = False  # the next input token is still on the device
        self.matched = 0  # cached tokens at the last look
        self.matched_version = -1
        self.deferred = 0  # steps spent waiting for another request's prefix
        self.retractions = 0
        self.cached_tokens: int | None = None
        self.first_token_s = 0.0  # time.monotonic() of the first and the newest output token
        self.last_token_s = 0.0
        # decoding
        self.matcher: Matcher | None = None
        self.drafters_off: set[str] = set()
        self.text: TextStream | None = None
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.prompt_logprobs_done = False
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: Exception | None = None
        self.reported = 0  # output tokens the caller has been told of

    def __repr__(self) -> str:
        return f"<Request {self.id} {self.state.value} {self.computed}/{len(self.tokens)} of {self.limit}>"

    @property
    def output_len(self) -> int:
        """Tokens written so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def output(self) -> list[int]:
        """Token ids written so far."""
        return self.tokens[self.prompt_len :].tolist()

    @property
    def remaining(self) -> int:
        """Most tokens that may still be written."""
        return self.limit - len(self.tokens)
