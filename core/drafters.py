"""Kind `spec`: what drafters are shown, and what they answer. Part of `phloem.interfaces`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .drafts import Draft
from .draws import Draws
from .params import SamplingParams
from .request import Namespace

if TYPE_CHECKING:
    from .interfaces import Matcher


@dataclass(slots=True)
class DraftContext:
    """What a drafter may see of a request. It never sees the target's pending draw (design §6)."""

    request_id: str
    tokens: array[int]  # prompt and output, and the chain of a drafter that leads; read only
    prompt_len: int
    namespace: Namespace
    matcher: Matcher | None  # stands after `tokens`; leave it as found
    params: SamplingParams
    chain: int = 0  # so many last `tokens` are a leader's proposal, not written yet
    draws: Draws | None = None  # given where rejection sampling will verify: every node is drawn here, and nowhere else


class Drafter(Protocol):
    """Kind `spec`. Proposes continuations; the engine verifies them. Wrong proposals cost time, never correctness.

    Raising, or proposing nonsense, switches the drafter off for that request. Capability `leads`: its chain is so
    likely that drafters after it are asked to continue it (their `context.tokens` and `matcher` stand at its end).
    Capability `inline`: `propose` is called on the loop's thread, where nothing can end it, so it promises to return
    soon. Others are called on a thread of their own, while the loop waits a second at most. Capability `drawn`: it
    draws its nodes where it is given `context.draws`.
    """

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        """At most `budget` nodes continuing context.tokens, or None. Called once a step for a request that samples."""

    def forget(self, request_id: str) -> None:
        """The request has ended. Called once."""


class BatchedDrafter(Protocol):
    """What a drafter with the capability `batched` has besides: one question for all requests of a step.

    Each level of its drafts is taken to cost a pass of its own, so it is asked for as many nodes as pay.
    """

    def propose_all(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> Sequence[Draft | None]:
        """`propose` for each. Called once a step; what it raises switches it off for all of these requests."""


class HoldsKV(Protocol):
    """What a drafter with the capability `kv` has besides: K and V of its own, which the memory plan counts."""

    kv_bytes: int  # of one token
    kv_tokens: int | None  # slots that it wants; None: as many as the target's pool has

    def allocate(self, tokens: int, requests: int) -> None:
        """Take memory for so many tokens, and room for so many texts at a time. Called once, before any proposal."""

    def usage(self) -> dict[str, int]:
        """Its slots: total, free, evictable, protected and leased."""

    def reset(self) -> None:
        """Drop all that is cached and belongs to no running request."""

    def check(self) -> None:
        """Verify that every slot has exactly one owner; raises AssertionError. After every step, in tests."""
