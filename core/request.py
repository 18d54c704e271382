"""A request as the loop sees it: one choice of one call, its text so far, what is computed, where its KV lies."""

from __future__ import annotations

import enum
from array import array
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .messages import GenerateCall, TokenLogprob
from .params import SamplingParams

if TYPE_CHECKING:
    from .interfaces import Lease, Matcher
    from .scoring import Scoring
    from .text import TextStream


class Namespace(NamedTuple):
    """What must agree before two requests may share cached state; fields are never joined into one string."""

    salt: str | None = None
    adapter: str | None = None


class State(enum.Enum):
    """Where a request is in its life."""

    COMPILING = "compiling"  # its grammar is not ready; in no queue
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """Mutable state of one choice. Written by the scheduler and the loop only, on the loop's thread.

    `tokens` is prompt plus output. KV of tokens [0, computed) lies in the slots of table row `row`; of these,
    [0, lease.length) belong to the cache and are locked by `lease`, the rest, up to `capacity` slots, to the request.
    """

    call: GenerateCall
    choice: int
    _: KW_ONLY
    seed: int
    limit: int  # most tokens of prompt + output
    arrival: int  # sequence number: orders requests, never repeats
    id: str = field(init=False)
    params: SamplingParams = field(init=False)
    namespace: Namespace = field(init=False)
    tokens: array[int] = field(init=False)
    keys: array[int] = field(init=False)  # what the cache compares: `tokens` itself, unless there is a key scheme
    prompt_len: int = field(init=False)
    arrival_s: float = field(init=False)
    state: State = State.WAITING
    stop_ids: frozenset[int] = frozenset()
    # KV
    computed: int = 0
    capacity: int = 0
    lows: list[int] = field(default_factory=list)  # per group, the first token whose slot is not given back
    row: int = -1
    lease: Lease | None = None
    # states of recurrent layers: own slots by the length of the prefix, the lengths that are to be published, and the
    # cache's slot at the end of the lease (-1: none)
    states: dict[int, int] = field(default_factory=dict)
    marks: set[int] = field(default_factory=set)
    snapshot: int = -1
    blocks: list[bytes] = field(default_factory=list)  # names of the text's first whole blocks, for tiers
    # scheduling
    in_flight: int = 0  # tokens of a launched step that is not committed yet (overlap)
    future: bool = False  # the next input token is still on the device
    drawn: bool = False  # that step verifies a draft by rejection sampling: it must count
    matched: int = 0  # cached tokens at the last look
    matched_version: int = -1
    deferred: int = 0  # steps spent waiting for another request's prefix
    retractions: int = 0
    loaded: int = -1  # its retractions when a lower tier was last asked for its prefix
    cached_tokens: int | None = None
    first_token_s: float = 0.0  # time.monotonic() of the first and the newest output token
    last_token_s: float = 0.0
    # decoding
    matcher: Matcher | None = None
    notes: list[str] = field(default_factory=list)  # what the caller allowed not to be honoured to the letter
    drafters_off: set[str] = field(default_factory=set)
    text: TextStream | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_logprobs_done: bool = False
    scoring: Scoring | None = None  # nothing is generated
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    reported: int = 0  # output tokens the caller has been told of

    def __post_init__(self) -> None:
        self.id = f"{self.call.call_id}/{self.choice}"
        self.params = self.call.params
        self.namespace = Namespace(self.call.salt, self.call.adapter)
        self.tokens = self.keys = array("i", self.call.prompt)
        self.prompt_len = len(self.call.prompt)
        self.arrival_s = self.call.arrival_s

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
    def match_limit(self) -> int:
        """Most tokens a match may cover: the last one is always run; none while prompt logprobs are owed."""
        owes_logprobs = self.params.prompt_logprobs is not None and not self.prompt_logprobs_done
        return 0 if owes_logprobs else len(self.tokens) - 1

    @property
    def remaining(self) -> int:
        """Most tokens that may still be written."""
        return self.limit - len(self.tokens)
