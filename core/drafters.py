"""Kind `spec`: what drafters are shown, and what they answer. Part of `phloem.interfaces`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .batch import Batch, IntArray
from .drafts import Draft
from .draws import Draws
from .model_spec import LayerSpec
from .params import SamplingParams
from .request import Namespace

if TYPE_CHECKING:
    import torch

    from .interfaces import Matcher, Model
    from .pool import KVStore


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
    levels: int = 1 << 20  # so many levels pay, where each costs a pass: for drafters that declare `trees`
    # [computed] int32: slots of the computed tokens, for those that declare `rows`; behind a window they mean nothing
    slots: IntArray | None = None
    over: bool = False  # set by a drafter that will propose nothing for this request any more: it is asked no longer


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

    Each level of its drafts is taken to cost a pass of its own, so it is asked for as many nodes as pay. With the
    capability `trees` it is told how many `levels` pay, and may fill its budget in these: who is likeliest is chosen
    afterwards.
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


class TokenRows(NamedTuple):
    """Where the rows of a drafter with the capability `rows` lie."""

    kv: KVStore
    layer: int  # the first of its layers there; their keys are [slots + own, heads, k_dim], values likewise
    group: int  # the pool group whose slots they have
    window: int | None  # of that group: older tokens' rows are gone
    own: range  # rows behind the pool, for the drafter to use as it likes
    model: Model  # the target
    branches: bool  # whether drafts may be trees; else the likeliest path of each is run


class KeepsRows(Protocol):
    """What a drafter with the capability `rows` has besides: it keeps something of every token, at the target's slots.

    That is made from hidden states of the target in the very step that computes a token, and lies in layers of its own
    in the target's KV store, in the group without a window (the widest, if all have one), in the store's dtype. What
    happens to a token's K and V happens to it: it is shared, evicted, moved, kept in tiers. `context.slots` of a
    proposal says where. `requires = {"model:hidden_states"}` goes with it.
    """

    layers: tuple[int, ...]  # of hidden states, as `HiddenStates` counts; known once it is made
    row_layers: tuple[LayerSpec, ...]  # how wide the rows are; their `group` is chosen by the engine
    scratch: int  # rows behind the pool for each running request
    fingerprint: str  # what the rows depend on besides target and text: stored ones of another kind are not used

    def attach(self, rows: TokenRows) -> None:
        """Called once, before the first step."""

    def keep(self, batch: Batch, states: torch.Tensor) -> None:
        """Write the rows of all query tokens of a step, draft nodes included: states [T, len(layers), hidden].

        Called once a step, after the target's pass, on the thread that runs it. What it raises ends the drafter, and
        nothing else.
        """
