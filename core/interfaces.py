"""The contracts between the core and its plugins: one Protocol per kind, plain objects, no inheritance needed.

Every plugin class has `api = 1`, `Options` (a frozen pydantic model that forbids extra keys), `capabilities`
(a frozenset of strings, checked when the config is) and `__init__(options, context)`. All methods here are called on
the loop's thread; none may block on I/O, and none may keep references to a batch after its step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from .batch import Batch, IntArray
from .components import CacheCounts as CacheCounts
from .components import Component as Component
from .constraint import Constraint, Unenforced
from .drafters import BatchedDrafter as BatchedDrafter
from .drafters import DraftContext as DraftContext
from .drafters import Drafter as Drafter
from .drafters import HoldsKV as HoldsKV
from .drafters import KeepsRows as KeepsRows
from .drafters import TokenRows as TokenRows
from .eviction import Eviction as Eviction  # the kinds are looked up by name in this module
from .eviction import EvictionNode as EvictionNode
from .features import HiddenStates as HiddenStates
from .features import LendsParts as LendsParts
from .features import Seen as Seen
from .features import SeesStates as SeesStates
from .feed import Events as Events
from .keys import KeyScheme as KeyScheme
from .messages import GenerateCall
from .model_spec import ModelSpec
from .parsing import Parser as Parser
from .parsing import ParserStream as ParserStream
from .parsing import Piece as Piece
from .parsing import Tool as Tool
from .policies import Policy as Policy
from .policies import PreemptingPolicy as PreemptingPolicy
from .policies import QueuePolicy as QueuePolicy
from .pool import KVStore, SlotPool
from .quants import Quant as Quant
from .request import Namespace
from .storage import Storage as Storage

if TYPE_CHECKING:
    import torch
    from fastapi import APIRouter

    from .tokenizer import Tokenizer

API = 1


@dataclass(slots=True)
class PluginContext:
    """What the core hands to a plugin's constructor; fields a kind has no use for, or that come later, are None."""

    kind: str
    name: str
    model: ModelSpec | None = None
    tokenizer: Tokenizer | None = None
    pools: tuple[SlotPool, ...] = ()
    page_size: int = 1
    device: str = "cpu"
    dtype: str = "auto"
    extras: dict[str, Any] = field(default_factory=dict)  # e.g. {"eviction": <Eviction>} for a cache


# --- kind "cache" ------------------------------------------------------------------------------------------------


class Match(NamedTuple):
    """The longest usable prefix: `length` tokens, and where it ends. Valid until the cache changes; lease it first.

    `shared` tokens, whole pages, are those of cached texts, though it can't be gone on from there for want of a state:
    where texts part, a state is worth keeping.
    """

    length: int
    node: Any
    shared: int = 0


class Lease(Protocol):
    """A hold on the first `length` tokens of a path. Release it exactly once, through the cache that made it."""

    @property
    def length(self) -> int: ...


class Published(NamedTuple):
    """Result of a publish: the new lease, and per group the cache's slots for tokens [old length, new length)."""

    lease: Lease
    slots: tuple[IntArray, ...]


class PoolGroup(NamedTuple):
    """One slot pool the cache asks for, and the layers whose KV its slots index.

    `window`: these layers see the last `window` tokens only, the current one included. Requests give the slots of
    older ones back while they run, and the pool is sized accordingly (`core/windows.py`).

    `states`: indices into `ModelSpec.states`. A slot of this group is no token's: it holds the state of all these
    layers after a whole prefix. There is one such group at most, the last, with a pool of page size 1
    (`core/state_slots.py`). A cache for a model that has nothing else asks for a group without layers besides: its
    slots cost nothing, and count tokens.
    """

    name: str
    layers: tuple[int, ...]
    window: int | None = None
    states: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """What kind of `GroupSpec` it serves, and which component."""
        return "recurrent" if self.states else "full" if self.window is None else "window"


class CacheListener(Protocol):
    """Told what a cache holds, as it changes; `tokens` is the listener's to keep, and `start` is a multiple of a page.

    Called on the loop's thread from inside the cache's methods, where the cache must not be used: quick, and never
    raising. What is told is an upper bound of what matches: of a cache with windows ask `Cache.peek`.
    """

    def stored(self, namespace: Namespace, tokens: array[int], start: int) -> None:
        """`tokens` is a cached prefix now; its tokens from `start` on are new."""

    def removed(self, namespace: Namespace, tokens: array[int], start: int) -> None:
        """The prefix `tokens` is gone, down to its first `start` tokens, which stay."""

    def cleared(self) -> None:
        """Everything is gone; what was leased and stays is told anew, by `stored`, right after."""


class Cache(Protocol):
    """Kind `cache`. Decides what computed state is kept and shared. Owns the slots it was given by `publish`.

    Lengths are in tokens and multiples of the page size. Only the scheduler calls it, a few times per request and
    step. Implementations: `phloem.plugins.cache`.
    """

    capabilities: frozenset[str]  # `sharing`: what is published can be matched; `uses`, `narrows`: see below
    version: int  # changes whenever a match could have changed; lets the scheduler skip re-matching

    @classmethod
    def groups(cls, spec: ModelSpec) -> tuple[PoolGroup, ...]:
        """The pools this cache wants for a model. Called once, before the pools exist."""

    def match(self, tokens: array[int], limit: int, namespace: Namespace) -> Match:
        """Longest cached prefix of tokens[:limit]. May split nodes and refresh recency; protects nothing."""

    def peek(self, tokens: array[int], limit: int, namespace: Namespace) -> int:
        """Length that `match` would find. Changes nothing; called for waiting requests when `version` moved."""

    def lease(self, match: Match) -> Lease:
        """Protect a match's path from eviction until `release`."""

    def slots(self, lease: Lease) -> tuple[IntArray, ...]:
        """Per group, the slots of the leased tokens in order, [lease.length] each; -1 for those behind a window.

        In a group with states all are -1 but the last: the state after the leased tokens.
        """

    def publish(
        self, tokens: array[int], length: int, slots: tuple[IntArray, ...], lease: Lease, namespace: Namespace
    ) -> Published:
        """Offer tokens[:length], whose KV lies in `slots` (per group, [length] each), for sharing.

        The caller leases [0, lease.length) and owns the rest. In groups with a window -1 stands for the first tokens
        after the lease's, in whole pages, where the caller has given its slots back already; so it does in what is
        returned, for tokens that the new lease does not protect. The cache takes ownership of what it keeps, frees the
        caller's copies of what it had already, consumes `lease` and returns a longer (or equal) one. Slots beyond the
        new lease's length stay the caller's.

        In a group with states `length` is whole pages, and all slots are -1 but the last, which holds the state after
        them.
        """

    def release(self, lease: Lease) -> None:
        """End a lease: undoes exactly what making it did, across splits."""

    def evict(self, slots: int, group: int = 0) -> int:
        """Free at least `slots` slots of a group into its pool if that many are evictable; returns how many."""

    def counts(self) -> tuple[CacheCounts, ...]:
        """Per group, evictable and protected slots. O(1); called every step."""

    def reset(self) -> None:
        """Drop everything that is not leased."""

    def check(self) -> None:
        """Verify internal invariants at any size; raises AssertionError. Tests call it each step."""

    def listen(self, listener: CacheListener) -> None:
        """Tell `listener` all that is stored, parents first, and every change from now on.

        One that listens already is told all again. Without a listener nothing is gathered. Walks the tree.
        """

    def owned_pages(self) -> list[set[int]]:
        """Per group, the pages the cache owns. Only for `check()`: walks everything."""


class SuitsModels(Protocol):
    """What the caches have besides that `use: auto` chooses among."""

    @classmethod
    def suits(cls, spec: ModelSpec) -> str | None:
        """None if this is the cache for models with such state groups, else why not. Called once, before `groups`."""


class CountsUses(Protocol):
    """What a cache with the capability `uses` has besides."""

    def used(self, lease: Lease, found: int, priority: int) -> None:
        """A request of this priority leaves the leased path, or is retracted. Called before each release.

        It had found its first `found` tokens here when it started: one hit for each node of these; 0 where that was
        counted before, or comes later.
        """


class Narrows(Protocol):
    """What a cache with the capability `narrows` has besides: its leases protect windows."""

    def narrow(self, lease: Lease, start: int, group: int) -> None:
        """The lease's holder reads nothing before token `start` any more in this group, which has a window or states.

        What the lease protected there may be evicted, and comes no more in `slots`. The state after n tokens counts
        as that of token n - 1.
        """


# --- kind "attention" --------------------------------------------------------------------------------------------


class AttentionStep(Protocol):
    """Attention of one step, for every layer: all metadata was made by `prepare`."""

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Write k [T, Hkv, Dk] and v [T, Hkv, Dv] to the step's slots, then attend with q [T, Hq, Dk]: [T, Hq, Dv].

        `window`: a query sees itself and the `window - 1` positions before. `softcap`: scores become
        softcap * tanh(score / softcap).
        """


class Attention(Protocol):
    """Kind `attention`. Ragged paged attention. Capabilities: tree_mask, window, softcap, gqa.

    A plugin whose results are the same to the bit for a node of a tree as for a token of its path, unless the tree lies
    across a multiple of so many entries, says so: `tree_unit: int`. Drafts that would lie there are run as chains.
    """

    def prepare(self, batch: Batch, kv: KVStore) -> AttentionStep:
        """Metadata of a step, once; no work is left for each layer but the arithmetic."""


# --- kind "model" ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TokenizerData:
    """A tokenizer in transit: what `phloem.tokenizer.Tokenizer` is made from, in any process."""

    json: str  # a `tokenizers` tokenizer.json
    chat_template: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)  # bos_token, eos_token, ... for the template


class Model(Protocol):
    """Kind `model`. A loaded decoder-only model. `supports` decides for `use: auto`."""

    spec: ModelSpec
    tokenizer: TokenizerData
    path: str  # what was loaded, for humans and `Engine.model_path`

    @classmethod
    def supports(cls, path: str) -> str | None:
        """None if this plugin can serve the model at `path` (a folder or GGUF file) exactly, else the reason."""

    def forward(self, batch: Batch, attend: AttentionStep) -> torch.Tensor:
        """Final hidden states of all query tokens, [T, hidden], after the last norm. Calls `attend` once a layer."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Output head on chosen rows: [N, hidden] -> float32 [N, vocab_size]."""


class SparseHead(Protocol):
    """What a model with the capability `sparse_head` has besides: the executor asks where a grammar allows little."""

    def logits_at(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Columns of `logits` for one row: [hidden], [K] int64 -> float32 [K]."""


# --- kind "grammar" ----------------------------------------------------------------------------------------------


class Matcher(Protocol):
    """The state of one request in its grammar."""

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Write the allowed-token bitmask into row [ceil(vocab / 32)], bit t % 32 of word t // 32 set = allowed."""

    def accept(self, token: int) -> bool:
        """Advance by one token; False (state unchanged) if the grammar forbids it."""

    def rollback(self, tokens: int) -> None:
        """Take back the last `tokens` accepted tokens."""

    def is_complete(self) -> bool:
        """True when nothing but the end may follow."""

    def forced(self) -> bytes:
        """The bytes that every continuation begins with, as far as they are known; b"" where the backend can't say.

        Leaves the state as it is. Called once per decode segment and step by the drafter `grammar`.
        """

    def fork(self) -> Matcher:
        """An independent copy of the state."""


class Grammar(Protocol):
    """Kind `grammar`: one backend. Capabilities: the kinds of constraint it can compile (`constraint.KINDS`).

    An instance lives in the engine and one in every compile worker, a process with a memory and a time limit.
    `unenforced` and `compile` are called there, `matcher` here, on a thread of its own; the engine caches what
    `matcher` returns and gives each request a `fork` of it. The module must import without the backend's library
    being imported (raise ImportError(name=...) where it is absent); the constructor may import it. If importing takes
    long, leave it to an optional method `load()`, which a compile process calls once before it forks.
    """

    capabilities: frozenset[str]

    def unenforced(self, constraint: Constraint) -> list[Unenforced]:
        """What this backend would let pass of a constraint that it accepts; [] where it enforces all of it."""

    def compile(self, constraint: Constraint) -> bytes:
        """All of the work: what `matcher` needs. Raises RequestError (param=constraint.kind) for an invalid one."""

    def matcher(self, constraint: Constraint, compiled: bytes) -> Matcher:
        """A matcher at its start. Cheap next to `compile`, if the library can store what it compiled."""


# --- kind "sampler" ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RowContext:
    """One row of logits that a custom processor may change."""

    request_id: str
    arguments: dict[str, Any]  # params.logits_processors[name]
    prompt: Sequence[int]
    output: Sequence[int]  # output so far, the draft path to this row included


class LogitsProcessor(Protocol):
    """Kind `sampler`. Changes scores of the requests that ask for it by name; runs before temperature.

    Must depend on the row's context only, so that drafts do not change the output.
    """

    def validate(self, arguments: dict[str, Any]) -> None:
        """Raise RequestError if a request's arguments are wrong. Called at arrival."""

    def process(self, logits: torch.Tensor, rows: Sequence[RowContext]) -> None:
        """Edit logits [len(rows), vocab] in place."""


# --- kind "api" and the program interface ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """What an API may tell about the engine it fronts."""

    model_name: str
    model_path: str
    spec: ModelSpec
    max_total_tokens: int  # prompt + output that one request can ever have: min(context, pool)
    created_s: float
    shares: bool = True  # the cache finds prefixes again
    hold_idle_s: float = 300.0  # longest that a hold may stay without use


@runtime_checkable
class Service(Protocol):
    """Core's program interface, the same in-process and across processes; what `api` plugins build routes on."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def info(self) -> ServiceInfo: ...

    def submit(self, call: GenerateCall) -> Any:
        """Start a call; returns an async iterator of `Event`. Leaving the iterator early aborts the call.

        Raises RequestError, QueueFullError or EngineDeadError (on the first `anext` at the latest).
        """

    async def abort(self, call_id: str) -> bool:
        """Abort exactly this call; False if unknown."""

    async def stats(self) -> dict[str, Any]:
        """The engine's counters."""

    async def flush_cache(self) -> None:
        """Drop everything cached that no request uses, and all holds."""

    async def drop_hold(self, name: str) -> bool:
        """Release what a call with this hold left locked; False if nothing is."""

    async def unpin(self, name: str) -> bool:
        """Let go what a call with this `pin` keeps in the cache; False if there is none of that name."""


class Api(Protocol):
    """Kind `api`. A set of HTTP routes on top of a Service. The server owns authentication, limits and errors."""

    def router(self, service: Service) -> APIRouter:
        """The routes. Called once, before the model is loaded: read `service.info` and `.tokenizer` in a request."""
