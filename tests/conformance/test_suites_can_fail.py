"""Each suite finds what it looks for: plugins broken in one way each fail the test that is about it."""

from __future__ import annotations

import inspect
import itertools
import json
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch

from phloem.drafts import Draft
from phloem.events import AllBlocksCleared, EventBatch
from phloem.feed import Feed
from phloem.hooks import hookimpl
from phloem.interfaces import DraftContext, EvictionNode, Piece, RowContext, Tool
from phloem.mirror import Mirror
from phloem.request import Request
from phloem.testing import (
    EventsSuite,
    EvictionSuite,
    FakeDrafter,
    FakeObserver,
    FakeParser,
    FakePolicy,
    FakeProcessor,
    FakePublisher,
    FakeStorage,
    ObserverSuite,
    ParserSuite,
    SamplerSuite,
    ScheduleSuite,
    SpecSuite,
    StorageSuite,
)
from phloem.testing.events import ToyTree
from phloem.testing.plugin import PluginSuite


def suite(base: type[PluginSuite], broken: type[Any], **attributes: Any) -> Any:
    """An instance of a suite for a broken plugin."""
    return type("Suite", (base,), {"plugin": broken, **attributes})()


# --- schedule


class Loses(FakePolicy):
    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        return waiting[1:]


class Sorts(FakePolicy):
    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        waiting.sort(key=lambda r: r.prompt_len)  # type: ignore[attr-defined]
        return waiting


class Marks(FakePolicy):
    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        for request in waiting:
            request.matched += 1
        return waiting


class Forgetful(FakePolicy):
    turn = itertools.count()

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        return waiting[:: 1 if next(self.turn) % 2 else -1]


class Stranger(FakePolicy):
    def victim(self, running: Sequence[Request]) -> Request | None:
        return Request(running[0].call, 0, seed=0, limit=9, arrival=0)


class Shortest(FakePolicy):
    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        return sorted(waiting, key=lambda r: r.prompt_len)


def test_schedule() -> None:
    with pytest.raises(AssertionError, match="a request was lost"):
        suite(ScheduleSuite, Loses).test_order_is_a_permutation(2, 0)
    for broken in (Sorts, Marks):
        with pytest.raises(AssertionError):
            suite(ScheduleSuite, broken).test_order_changes_nothing()
    with pytest.raises(AssertionError):
        suite(ScheduleSuite, Forgetful).test_order_is_stable()
    with pytest.raises(AssertionError):
        suite(ScheduleSuite, Stranger).test_victim_is_running(2)
    with pytest.raises(pytest.fail.Exception, match="overtaken 51 times"):
        suite(ScheduleSuite, Shortest, max_overtakes=50).test_nobody_starves(1000)


# --- eviction


class Rule(FakePolicy):
    def key(self, node: EvictionNode) -> Any:
        return node.last_access


class Partial(Rule):
    def key(self, node: EvictionNode) -> Any:
        return {node.hits}  # sets compare, but not all of them


class Counting(Rule):
    count = itertools.count()

    def key(self, node: EvictionNode) -> Any:
        return next(self.count)


class Mfu(Rule):
    def key(self, node: EvictionNode) -> Any:
        return -node.hits


class Ageless(Rule):
    capabilities = frozenset({"ageing"})

    def key(self, node: EvictionNode) -> Any:
        return node.hits - 1


def test_eviction() -> None:
    with pytest.raises(AssertionError, match="have no order"):
        suite(EvictionSuite, Partial).test_keys_are_totally_ordered(0)
    with pytest.raises(AssertionError):
        suite(EvictionSuite, Counting).test_keys_are_pure()
    with pytest.raises(AssertionError):
        suite(EvictionSuite, Counting).test_two_rules_agree()
    with pytest.raises(AssertionError, match="a hit brings the end nearer"):
        suite(EvictionSuite, Mfu).test_use_never_hastens()
    with pytest.raises(AssertionError, match="below the level"):
        suite(EvictionSuite, Ageless).test_ageing_keys_start_from_the_level()


# --- observer


class Raises(FakeObserver):
    @hookimpl
    def request(self, summary: Any) -> None:
        raise RuntimeError("no")


def test_observer(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(AssertionError):
        suite(ObserverSuite, Raises).test_survives_a_life(1, caplog)


# --- events


class LosesBatches(FakePublisher):
    def start(self, feed: Feed) -> None:
        feed.subscribe(lambda batch: self.batches.append(batch) if batch.seq % 7 else None)


class KeepsFew(FakePublisher):
    def start(self, feed: Feed) -> None:
        feed.subscribe(self._keep)

    def _keep(self, batch: EventBatch) -> None:
        self.batches[:] = [*self.batches[-3:], batch]


class Lingers(FakePublisher):
    ended = threading.Event()

    def start(self, feed: Feed) -> None:
        threading.Thread(target=self.ended.wait).start()


class Waits(FakePublisher):
    def start(self, feed: Feed) -> None:
        feed._cache.listen(self)  # type: ignore[arg-type]

    def stored(self, *_: Any) -> None:
        time.sleep(0.002)

    def removed(self, *_: Any) -> None:
        time.sleep(0.002)

    def cleared(self) -> None:
        """No matter."""


class Stubborn(FakePublisher):
    def stop(self) -> None:
        assert self.batches, "was never started"


class EventsOfLists(EventsSuite):
    patience_s = 0.3

    def mirror(self, publisher: FakePublisher) -> Mirror:
        mirror = Mirror()
        for batch in [EventBatch(ts=0, events=[AllBlocksCleared()], seq=0, source="none"), *publisher.batches]:
            mirror.apply(batch)
        return mirror


@pytest.mark.parametrize(
    ("broken", "test", "complaint"),
    [
        (LosesBatches, "test_subscribers_know_what_is_cached", "False"),
        (KeepsFew, "test_a_late_subscriber_knows_it_too", "False"),
        (Waits, "test_the_loop_never_waits", "2000 changes took"),
        (Lingers, "test_a_life_leaves_nothing", "a thread outlives"),
        (Stubborn, "test_is_made_from_its_options", "was never started"),
    ],
)
def test_events(broken: type[Any], test: str, complaint: str) -> None:
    Lingers.ended.clear()
    judge, tree = suite(EventsOfLists, broken), ToyTree()
    publisher, feed = judge._started(tree)
    given = {"publisher": publisher, "tree": tree}
    names = list(inspect.signature(getattr(judge, test)).parameters)
    with pytest.raises(AssertionError, match=complaint):
        getattr(judge, test)(**{name: given[name] for name in names})
    Lingers.ended.set()
    feed.close()


# --- storage


class Forgets(FakeStorage):
    def write(self, name: bytes, data: bytes) -> None:
        """Nothing is kept."""


class Settles(FakeStorage):
    def write(self, name: bytes, data: bytes) -> None:
        """What is there stays."""
        if not self.holds(name):
            super().write(name, data)


class Grows(FakeStorage):
    def __init__(self, options: Any, context: Any) -> None:
        super().__init__(options, context)
        self._most = 1 << 40


class First(FakeStorage):
    def touch(self, names: Sequence[bytes]) -> None:
        """A use is none."""


class Clings(FakeStorage):
    def reject(self, name: bytes) -> None:
        """What is wrong stays."""


class Halves(FakeStorage):
    def write(self, name: bytes, data: bytes) -> None:
        if "write" in self.faults:
            self._held[name] = data[:10]
        super().write(name, data)


class Mixes(FakeStorage):
    capabilities = frozenset({"durable"})
    disk: ClassVar[dict[bytes, bytes]] = {}

    def __init__(self, options: Any, context: Any) -> None:
        super().__init__(options, context)
        self._held = self.disk  # type: ignore[assignment]


class Hasty(FakeStorage):
    capabilities = frozenset({"durable"})


class StorageThatFails(StorageSuite):
    @contextmanager
    def failing(self, storage: Any) -> Iterator[None]:
        storage.faults.add("write")
        yield
        storage.faults.clear()


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Forgets, "test_reads_what_was_written"),
        (Settles, "test_reads_what_was_written"),
        (Grows, "test_keeps_to_its_budget"),
        (First, "test_keeps_to_its_budget"),
        (Clings, "test_what_is_rejected_is_gone"),
        (Halves, "test_a_failed_write_leaves_nothing"),
        (Mixes, "test_another_identity_finds_nothing"),
        (Hasty, "test_a_restart_finds_what_was_there"),
    ],
)
def test_storage(broken: type[Any], test: str) -> None:
    with pytest.raises(AssertionError):
        getattr(suite(StorageThatFails, broken), test)()


# --- spec


class TooLong(FakeDrafter):
    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        return Draft.chain([1] * (budget + 1))


class Writes(FakeDrafter):
    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        context.tokens.append(1)
        return None


class Mixes(FakeDrafter):
    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        self.forgotten.append(context.request_id)
        return Draft.chain([len(self.forgotten)])


class Gossips(FakeDrafter):
    capabilities = frozenset({"learns"})

    def __init__(self, options: FakeDrafter.Options, context: Any) -> None:
        super().__init__(options, context)
        self.seen: set[int] = set()

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        self.seen.update(context.tokens)
        return Draft.chain([max(self.seen)])


class Branches(FakeDrafter):
    capabilities = frozenset({"chain"})

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        return Draft((1, 2), (-1, -1))


class Counts(FakeDrafter):
    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        return Draft.chain([len(context.tokens) - context.chain])


class Rereads(FakeDrafter):
    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        return Draft.chain([max(sorted(context.tokens.tolist() * 50))])


class Chooses(FakeDrafter):
    """Says that it draws, and takes what it likes."""

    capabilities = frozenset({"drawn"})

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        return Draft.chain([1])


class Hesitates(FakeDrafter):
    """Says that it draws, and never does."""

    capabilities = frozenset({"drawn"})


class Confuses(FakeDrafter):
    """Tells one request what another was to be told."""

    capabilities = frozenset({"batched"})

    def propose(self, context: DraftContext, budget: int) -> Draft | None:
        return Draft.chain([context.tokens[0]])

    def propose_all(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Draft | None]:
        return [self.propose(context, budget) for context, budget in zip(contexts, budgets, strict=True)][::-1]


def test_spec() -> None:
    with pytest.raises(AssertionError, match="its 1 nodes were not drawn"):
        suite(SpecSuite, Chooses).test_draws_what_it_proposes()
    with pytest.raises(AssertionError, match="it never drew anything"):
        suite(SpecSuite, Hesitates).test_draws_what_it_proposes()
    with pytest.raises(AssertionError):
        suite(SpecSuite, Confuses).test_many_at_once_as_one_by_one()
    with pytest.raises(AssertionError, match="proposes no siblings"):
        suite(SpecSuite, Branches).test_drafts_are_trees_within_budget(3, 3)
    with pytest.raises(AssertionError, match="namespace b knows of a"):
        suite(SpecSuite, Gossips).test_namespaces_do_not_mix()
    with pytest.raises(AssertionError):
        suite(SpecSuite, Counts).test_a_leader_s_chain_is_not_the_text()
    with pytest.raises(AssertionError, match="ms a proposal behind 4,000 tokens"):
        suite(SpecSuite, Rereads).test_long_texts_take_no_longer_than_a_step()
    with pytest.raises(AssertionError, match="exceed the budget"):
        suite(SpecSuite, TooLong).test_drafts_are_trees_within_budget(3, 3)
    with pytest.raises(AssertionError):
        suite(SpecSuite, Writes).test_only_looks()
    with pytest.raises(AssertionError):
        suite(SpecSuite, Mixes).test_requests_do_not_mix()


# --- sampler


class Careless(FakeProcessor):
    def validate(self, arguments: dict[str, Any]) -> None:
        return None


class Blocks(FakeProcessor):
    def process(self, logits: torch.Tensor, rows: list[RowContext]) -> None:
        logits.fill_(float("-inf"))


class Averages(FakeProcessor):
    def process(self, logits: torch.Tensor, rows: list[RowContext]) -> None:
        logits -= logits.mean()


def test_sampler() -> None:
    arguments = {"token": 1, "bias": 1.0}
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        suite(SamplerSuite, Careless, arguments=arguments).test_arguments_are_validated()
    with pytest.raises(AssertionError, match="no token is left"):
        suite(SamplerSuite, Blocks, arguments=arguments).test_edits_in_place()
    with pytest.raises(AssertionError):
        suite(SamplerSuite, Averages, arguments=arguments).test_rows_are_independent()


# --- parser


class Chunks(FakeParser):
    """Searches each part by itself, so that a marker over two parts is missed."""

    def stream(self, tools: Sequence[Tool], prompt: str = "") -> Any:
        class Stream:
            def push(self, text: str) -> list[Piece]:
                inner = FakeParser.stream(parser, tools)
                return inner.push(text) + inner.finish()

            def finish(self) -> list[Piece]:
                return []

        parser = self
        return Stream()


class Retypes(FakeParser):
    def call_text(self, calls: Sequence[tuple[str, str]]) -> str:
        texts = [(name, json.dumps({k: str(v) for k, v in json.loads(text).items()})) for name, text in calls]
        return super().call_text(texts)


class Drops(FakeParser):
    def stream(self, tools: Sequence[Tool], prompt: str = "") -> Any:
        stream = super().stream(tools, prompt)
        stream.finish = lambda: []  # type: ignore[method-assign]
        return stream


class Loose(FakeParser):
    def constraint(self, tools: Sequence[Tool], choice: str, parallel: bool) -> dict[str, Any] | None:
        return super().constraint(tools, choice, True)


class Unbounded(FakeParser):
    def constraint(self, tools: Sequence[Tool], choice: str, parallel: bool) -> dict[str, Any] | None:
        return {"type": "structural_tag", "format": {"type": "any_text"}} if choice != "auto" else None


class Recounts(FakeParser):
    def stream(self, tools: Sequence[Tool], prompt: str = "") -> Any:
        stream = super().stream(tools, prompt)
        push = stream.push
        stream.push = lambda text: [piece._replace(call=0) for piece in push(text)]  # type: ignore[method-assign]
        return stream


class Slow(FakeParser):
    def stream(self, tools: Sequence[Tool], prompt: str = "") -> Any:
        stream = super().stream(tools, prompt)
        push, seen = stream.push, [""]

        def count(text: str) -> list[Piece]:
            seen[0] += text
            _ = [*seen[0][::4]]  # looks at everything again
            return push(text)

        stream.push = count  # type: ignore[method-assign]
        return stream


class Mute(FakeParser):
    def instructions(self, tools: Sequence[Tool], parallel: bool) -> str:
        return "Use the tools."


def test_parser() -> None:
    with pytest.raises(AssertionError, match="is not read as its whole"):
        suite(ParserSuite, Chunks).test_a_stream_is_the_whole_text_however_it_is_cut()
    with pytest.raises(AssertionError):
        suite(ParserSuite, Retypes).test_calls_are_read_as_they_are_written()
    with pytest.raises(AssertionError):
        suite(ParserSuite, Drops).test_a_call_cut_off_is_not_lost()
    with pytest.raises(AssertionError, match="is accepted"):
        suite(ParserSuite, Loose).test_constraints_hold_what_is_read()
    with pytest.raises(AssertionError):
        suite(ParserSuite, Unbounded).test_constraints_hold_what_is_read()
    with pytest.raises(AssertionError, match="calls are numbered as they come"):
        suite(ParserSuite, Recounts).test_pieces_are_in_order()
    with pytest.raises(AssertionError):
        suite(ParserSuite, Mute).test_a_model_is_told_of_its_tools()
    with pytest.raises(AssertionError):
        suite(ParserSuite, FakeParser, templates=("{{ tools }}",)).test_templates_are_recognised()


def test_a_quadratic_parser_is_found() -> None:
    with pytest.raises(AssertionError, match=r"\.\.\."):
        suite(ParserSuite, Slow).test_reading_is_linear()


def test_contract() -> None:
    from phloem.errors import PluginError

    class Bare:
        api = 1

    with pytest.raises(PluginError, match="it has no `Options`"):
        suite(ScheduleSuite, Bare).test_keeps_the_contract()
