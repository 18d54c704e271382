"""The event loop: drain the inbox, plan, launch, commit, emit. One thread owns everything in here (design §3)."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from . import scoring
from .admission import Admission
from .batch import Plan, Segment, StepStats
from .config import Config
from .drafting import Drafting
from .errors import EngineDeadError, PhloemError, QueueFullError, RequestError, StepError
from .executor import Executor, Launched, Scores, settle
from .features import Seen, verified
from .feed import Feed
from .grammars import Grammars, Ticket
from .hooks import ObserverSet
from .interfaces import Quant, ServiceInfo, TokenizerData
from .keys import rekey
from .ledger import Ledger
from .messages import Event, GenerateCall
from .pinned import PinWanted, pin_all, pins_wanted
from .pins import Pins
from .request import Request, State
from .sampler import Outcome
from .scheduler import Scheduler
from .stats import Counters
from .writer import error_info, event, write

log = logging.getLogger(__name__)
T = TypeVar("T")
Emit = Callable[[list[Event]], None]
# Of a step in which nobody can run: so much time, at most, counts as a step for those who wait for a tier.
_LOAD_WAIT_S = 0.05


@dataclass(slots=True)
class Parts:
    """What `phloem.assemble` builds from a config; the loop only wires it together."""

    admission: Admission
    grammars: Grammars
    inbox: queue.SimpleQueue[Callable[[], object]]  # thunks that other threads want run on the loop's
    scheduler: Scheduler
    ledger: Ledger
    executor: Executor
    quant: Quant
    feed: Feed
    drafting: Drafting
    observers: ObserverSet
    info: ServiceInfo
    tokenizer_data: TokenizerData
    memory: str  # the memory split with its arithmetic, for the banner
    check: bool


class EngineCore:
    """Runs requests. `submit`, `abort`, `invoke` and `stop` may be called from any thread, the rest from the loop's."""

    def __init__(self, parts: Parts, pins: Sequence[PinWanted] = ()) -> None:
        """`pins` are the configuration's, to be computed before anybody is served."""
        self.parts, self._wanted = parts, pins
        self.scheduler, self.ledger = parts.scheduler, parts.ledger
        self.pins = Pins(self.ledger, parts.admission.memory.pinnable)
        self.info, self.tokenizer_data = parts.info, parts.tokenizer_data
        self.counters = Counters()
        self.progress: tuple[int, float] = (0, time.monotonic())
        self._calls: dict[str, list[Request]] = {}
        self._compiling: dict[str, Ticket] = {}  # calls whose grammar is not ready
        self._compiling_requests = 0  # all their choices
        self._inbox = parts.inbox
        self._ahead: Launched | None = None  # overlap: the step whose results are not committed yet
        self._events: list[Event] = []
        self._stopping = False
        self._idle = False  # nobody can run before something comes back from a tier

    @classmethod
    def from_config(cls, config: Config) -> EngineCore:
        """Load the model and build everything else; may take seconds. Raises ConfigError, PluginError, ModelError."""
        from .assemble import build_parts  # the assembly needs every module, this one included

        return cls(build_parts(config), pins_wanted(config))

    # --- from any thread

    def submit(self, call: GenerateCall) -> None:
        """Queue a call; its events, a refusal included, come through `emit`."""
        call.arrival_s = call.arrival_s or time.monotonic()
        self._inbox.put(lambda: self._admit(call))

    def abort(self, call_id: str) -> None:
        """Cancel exactly this call, wherever it is; unknown ids are ignored."""
        self._inbox.put(lambda: self.abort_now(call_id))

    def invoke(self, function: Callable[[EngineCore], T]) -> Future[T]:
        """Run `function` between two steps, on the loop's thread."""
        done: Future[T] = Future()

        def work() -> None:
            if done.set_running_or_notify_cancel():  # else whoever asked has left
                settle(lambda: function(self), done)

        self._inbox.put(work)
        return done

    def stop(self) -> None:
        """End `run` after the present step; unfinished calls are aborted."""

        def work() -> None:
            self._stopping = True

        self._inbox.put(work)

    # --- the loop

    @property
    def busy(self) -> bool:
        """True while any request is waiting or running; one whose grammar is being compiled is neither."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def run(self, emit: Emit, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`. `emit` gets each step's events; `ready` is called once, when serving begins.

        Raises ConfigError where what the configuration pins cannot be.
        """
        self.parts.observers.start(self.info)
        try:
            self.parts.feed.start()
            pin_all(self, self._wanted)
            ready()
            while not self._stopping:
                self._drain(block=self._ahead is None and (self._idle or not self.busy))
                self.step()
                self._flush(emit)
        except BaseException:
            self._fail(list(self._calls), EngineDeadError("the engine stopped after an internal error"))
            raise
        finally:
            for call_id in list(self._calls):
                self.abort_now(call_id)
            self._flush(emit)
            if self.ledger.tiers is not None:
                self.ledger.tiers.close(clean=self._stopping)
            self.parts.executor.close()
            self.parts.grammars.close()
            self.parts.feed.close()
            self.parts.observers.stop()

    def complete(self, calls: Sequence[GenerateCall]) -> list[Event]:
        """Run calls to their ends while nobody else is served, and return what they report. Called by `pin_all`."""
        events = list[Event]()
        for call in calls:
            call.arrival_s = time.monotonic()
            self._admit(call)
        while self._calls:
            self._drain(block=self._idle)
            self.step()
            self._flush(events.extend)
        self._flush(events.extend)
        return events

    def step(self) -> None:
        """One turn: launch the next step, then commit it (or, when running ahead, the one before)."""
        begin = time.perf_counter()
        plan = self._plan()
        launched = None
        if plan:
            plan_s = time.perf_counter() - begin
            launched = self.parts.executor.launch(plan)
            launched.spans["plan"] = plan_s
        if self.parts.executor.ahead:
            for segment in plan.segments:
                segment.request.in_flight += segment.count
                segment.request.future = segment.samples and segment.draft is None
                segment.request.drawn = segment.draft is not None and segment.draft.drawn is not None
            launched, self._ahead = self._ahead, launched
        self._idle = not plan and self._ahead is None and self.ledger.tiers is not None and self.ledger.tiers.loading
        if launched is not None:
            self._commit(launched)
            if self.parts.check:
                self.check()

    def _drain(self, *, block: bool) -> None:
        if block:
            self.parts.drafting.idled()
        while True:
            try:
                work = self._inbox.get(block=block, timeout=_LOAD_WAIT_S if self._idle else None)
            except queue.Empty:
                return
            work()
            block = False

    def _flush(self, emit: Emit) -> None:
        if self._events:
            events, self._events = self._events, []
            emit(events)

    # --- arrivals and ends

    def _admit(self, call: GenerateCall) -> None:
        try:
            if call.call_id in self._calls:
                raise RequestError(f"request id {call.call_id!r} is in use", param="rid")
            waiting, most = len(self.scheduler.waiting) + self._compiling_requests, self.scheduler.limits.max_waiting
            if waiting + call.params.n > most:
                raise QueueFullError(f"{waiting} requests are waiting, the limit is {most}", hint="retry later")
            self.ledger.holds.allow(call.hold_idle_s)
            requests = self.parts.admission.requests(call)
            ticket = self.parts.grammars.ask(call.params)
            if call.pin is not None:
                self.pins.reserve(requests[0])
        except Exception as error:  # a grammar or processor plugin may raise anything: this call's problem only
            self._events.append(_refusal(call.call_id, error))
            return
        self._calls[call.call_id] = requests
        self._compiling[call.call_id] = ticket
        self._compiling_requests += len(requests)
        for request in requests:
            request.state = State.COMPILING
        ticket.done.add_done_callback(lambda _: self._enqueue(call, ticket))  # now, or by `Grammars` on this thread

    def _enqueue(self, call: GenerateCall, ticket: Ticket) -> None:
        """The call's grammar is ready, or was refused."""
        self._compiled(call.call_id)
        try:
            compiled = ticket.done.result()
            for request in self._calls[call.call_id]:
                request.matcher = self.parts.grammars.matcher(compiled, call.params, call.prompt)
                request.notes += compiled.notes if compiled is not None else []
        except Exception as error:  # a backend's own, or the refusal of the constraint
            known = error if isinstance(error, PhloemError) else StepError(f"the grammar failed: {error!r}")
            self._fail([call.call_id], known)
            return
        for request in self._calls[call.call_id]:
            request.state = State.WAITING
            self.scheduler.add(request)

    def _compiled(self, call_id: str) -> Ticket | None:
        """A call's grammar is not waited for any more; its ticket, if it was."""
        ticket = self._compiling.pop(call_id, None)
        if ticket is not None:
            self._compiling_requests -= len(self._calls[call_id])
        return ticket

    def abort_now(self, call_id: str) -> bool:
        """Cancel a call, on the loop's thread; False if it is unknown. What it computed stays cached."""
        open_ones = [r for r in self._calls.get(call_id, ()) if r.state is not State.FINISHED]
        for request in open_ones:
            request.finish_reason = "abort"
            self._finish(request, publish=True)
        return bool(open_ones)

    def _fail(self, call_ids: list[str], error: PhloemError) -> None:
        """End whole calls with an error; what they computed is not kept."""
        for call_id in call_ids:
            for request in self._calls.get(call_id, ()):
                if request.state is not State.FINISHED:
                    request.finish_reason, request.error = "error", error
                    self._finish(request, publish=False)

    def _finish(self, request: Request, *, publish: bool) -> None:
        if ticket := self._compiled(request.call.call_id):
            self.parts.grammars.cancel(ticket)
        self.pins.close(request)
        self.scheduler.drop(request, publish=publish)
        self.parts.drafting.forget(request)
        self._report(request)
        self.parts.observers.request(request)
        self.counters.finished(request)
        siblings = self._calls[request.call.call_id]
        if all(sibling.state is State.FINISHED for sibling in siblings):
            del self._calls[request.call.call_id]

    def _report(self, request: Request) -> None:
        made = event(request)
        if made is not None:
            self._events.append(made)

    # --- one step

    def _plan(self) -> Plan:
        try:
            plan = self.scheduler.plan()
        except Exception as broken:  # an eviction rule or a policy raised
            log.exception("planning failed")
            self._fail(list(self._calls), StepError(f"planning failed: {type(broken).__name__}: {broken}"))
            self.ledger.check([])  # slots in doubt end the engine
            return Plan()
        if self.scheduler.policy_error is not None:
            error, self.scheduler.policy_error = self.scheduler.policy_error, None
            log.error("the schedule policy failed", exc_info=error)
            failed = StepError(f"the schedule policy failed: {type(error).__name__}: {error}")
            self._fail([request.call.call_id for request in self.scheduler.waiting], failed)
            for request in {s.request for s in plan.segments if s.request.state is State.FINISHED}:
                plan.remove(request)  # a choice that ran, of a call whose other one waited
        return plan

    def _commit(self, launched: Launched) -> None:
        """Book a step. What the model or a component of the cache raises fails its requests, if no slot is in doubt."""
        plan = launched.plan
        try:
            outcomes = iter(launched.outcomes())
            scores = launched.scores.result()
            begin = time.perf_counter()
            stats = StepStats(step=self.counters.steps, requests=len(plan.segments), forward_tokens=plan.rows)
            seen = self._book(launched, outcomes, scores, stats)
        except Exception as error:
            log.exception("step %d failed", self.counters.steps)
            failed = StepError(f"the step failed: {type(error).__name__}: {error}")
            self._fail([segment.request.call.call_id for segment in plan.segments], failed)
            self.ledger.check(self.scheduler.running)
            return
        self.parts.drafting.saw(seen)
        self._account(launched, stats, time.perf_counter() - begin)

    def _book(self, launched: Launched, outcomes: Iterator[Outcome], scores: Scores, stats: StepStats) -> list[Seen]:
        """Book every segment of a step; returns what drafters may see of those that run on."""
        prompt_scores, trees = scores
        seen, row = list[Seen](), 0
        for i, segment in enumerate(launched.plan.segments):
            outcome = next(outcomes) if segment.samples else None
            request, first, row = segment.request, row, row + segment.rows
            if request.state is not State.RUNNING or request.retractions != segment.epoch:
                continue  # finished, aborted or retracted since the launch: the result is void
            self._advance(segment, outcome, stats)
            self.ledger.slide(request)
            if i in prompt_scores and not request.prompt_logprobs_done:
                request.prompt_logprobs += prompt_scores[i]
                request.prompt_logprobs_done = len(request.prompt_logprobs) == request.prompt_len
            if segment.scored is not None:
                scoring.book(request, segment.scored, trees[i])
                stats.scored_tokens += segment.scored.nodes
            self._conclude(request, outcome)
            if launched.states is not None and request.state is State.RUNNING:
                seen += verified(launched.states, first, segment, outcome.nodes if outcome else [])
        return seen

    def _advance(self, segment: Segment, outcome: Outcome | None, stats: StepStats) -> None:
        """Book a segment's computed tokens and write what it emitted."""
        request = segment.request
        if request.in_flight:
            request.in_flight -= segment.count
            request.drawn = False
            request.future = request.future and request.in_flight > 0  # else this was the step that samples it
        end = segment.start + segment.count
        in_prompt = max(0, min(end, request.prompt_len) - segment.start)
        stats.prefill_tokens += in_prompt
        if segment.scored is not None and not segment.scored.last:
            end -= 1  # the prompt's last token is run again, before the rest of the continuations
        request.computed = end
        if in_prompt:
            self.ledger.publish(request, end)
        if segment.scored is not None:
            self.ledger.trim(request, end)
        if outcome is None:
            return
        if segment.draft is not None:
            self.ledger.adopt(request, end, outcome.nodes)
            request.computed += len(outcome.nodes)
            stats.draft_tokens += len(segment.draft)
            stats.accepted_tokens += len(outcome.nodes)
        before = request.output_len
        write(request, outcome.tokens, outcome.logprobs)
        try:
            rekey(request, self.parts.admission.scheme)
        except Exception as error:
            request.finish_reason, request.error = "error", StepError(f"the key scheme failed: {error}")
        request.computed = min(request.computed, len(request.tokens))
        stats.decode_tokens += request.output_len - before
        self.counters.wrote(request, before)

    def _conclude(self, request: Request, outcome: Outcome | None) -> None:
        """Finish the request or report its progress."""
        # A draft may end the output before the row that failed: plain decoding would never have come to that row.
        if outcome is not None and outcome.error is not None and request.finish_reason is None:
            request.finish_reason, request.error = "error", outcome.error
        if request.finish_reason is not None:
            self._finish(request, publish=request.error is None)
        elif outcome is not None:
            self._report(request)

    def _account(self, launched: Launched, stats: StepStats, commit_s: float) -> None:
        spans = launched.spans
        stats.plan_s, stats.build_s, stats.commit_s = spans["plan"], launched.build_s, commit_s
        stats.forward_s, stats.sample_s = spans.get("forward", 0.0), spans.get("sample", 0.0)
        stats.waiting = len(self.scheduler.waiting)
        self.counters.add(stats)
        self.parts.drafting.measured(stats)
        self.progress = (self.counters.steps, time.monotonic())
        self.parts.observers.step(stats)

    # --- inspection, through `invoke`

    def stats(self) -> dict[str, Any]:
        """Counters and slot usage; see docs/library.md for the names."""
        return {
            **self.counters.snapshot(),
            "evicted_tokens": self.ledger.evicted,
            "holds": self.ledger.holds.stats(),
            "pins": self.pins.stats(),
            "events": self.parts.feed.stats(),
            "tiers": self.ledger.tiers.stats() if self.ledger.tiers is not None else None,
            "retractions": self.scheduler.retractions,
            "moved_kv_bytes": self.ledger.kv.moved_bytes,
            "grammar": self.parts.grammars.stats(),
            "drafter_failures": dict(self.parts.drafting.failures),
            "drafters": {name: each.usage() for name, each in self.parts.drafting.keepers},
            "waiting": len(self.scheduler.waiting),
            "running": len(self.scheduler.running),
            "groups": self.ledger.usage(self.scheduler.running),
        }

    def check(self) -> None:
        """Prove that every slot has exactly one owner. Raises AssertionError."""
        self.ledger.check(self.scheduler.running)
        self.pins.check()
        for _, each in self.parts.drafting.keepers:
            each.check()

    def flush_cache(self) -> None:
        """Drop all cached state that no request uses and no pin keeps, in memory of any kind, and all holds."""
        self.ledger.holds.clear()
        self.ledger.cache.reset()
        for _, each in self.parts.drafting.keepers:
            each.reset()
        if self.ledger.tiers is not None:
            self.ledger.tiers.clear()

    def drop_hold(self, name: str) -> bool:
        """Release a hold; False if there is none of that name."""
        return self.ledger.holds.drop(name)

    def unpin(self, name: str) -> bool:
        """Let a pinned prefix go; False if there is none of that name."""
        return self.pins.drop(name)


def _refusal(call_id: str, error: Exception) -> Event:
    return Event(call_id=call_id, finish_reason="error", error=error_info(error))
