"""Who runs in the next step and for how many tokens: budgets, chunking, admission, retraction (design §7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .batch import Plan, Segment
from .config_sections import ScheduleSection
from .drafts import Draft
from .foresight import Foresight
from .interfaces import Policy
from .ledger import Ledger
from .parking import MAX_DEFERRED_STEPS, MOST_PER_STEP
from .prefix import common_prefix
from .request import Request, State
from .scoring import Tree
from .waiting import WaitingQueue

if TYPE_CHECKING:
    from .tiers import Tiers

# A waiting request that shares less than this with one being prefilled does not wait for it.
SHARED_PREFIX_TOKENS = 16
# A declared sibling waits for more than one in so many of the tokens that it has to compute. Less is not worth a step,
# and what a program's calls compute stays within 2 % of the least possible.
SIBLING_SHARE = 50


@dataclass(eq=False)
class Scheduler:
    """Owns the waiting and running requests. Plans a step; never computes, never samples.

    `propose(wants)` asks the drafters for all requests of a step; `host_bound(request)` says that the request's next
    step needs its last token on the host (a drafter, a grammar, penalties), which keeps it out of one launched ahead.
    """

    ledger: Ledger
    policy: Policy
    limits: ScheduleSection
    propose: Callable[[Sequence[tuple[Request, int]]], Sequence[Draft | None]]
    host_bound: Callable[[Request], bool]
    draft_tokens: int
    branches: bool = True  # the attention takes trees of continuations, not only chains
    tiers: Tiers | None = field(default=None, init=False)
    waiting: WaitingQueue = field(init=False)
    running: list[Request] = field(default_factory=list, init=False)
    retractions: int = field(default=0, init=False)
    foresight: Foresight = field(default_factory=Foresight, init=False)
    _plan: Plan = field(default_factory=Plan, init=False)  # the one being made

    def __post_init__(self) -> None:
        self.waiting = WaitingQueue(self.policy, self.ledger.peek)

    # --- arrivals and departures

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.ledger.holds.touch(request.call.hold)
        self.waiting.add(request)

    def drop(self, request: Request, *, publish: bool) -> None:
        """A request ends, in whatever state: every slot goes back, to the cache (`publish`) or the free list."""
        before, request.state = request.state, State.FINISHED
        if before is State.RUNNING:
            self.running.remove(request)
        elif before is State.WAITING:
            self.waiting.remove(request)
        self.foresight.learn(request)
        holds = request.choice == 0 and request.finish_reason in ("stop", "length")
        self.ledger.release(request, publish=publish, hold=request.call.hold if holds else None)

    @property
    def policy_error(self) -> Exception | None:
        """What the policy raised or got wrong, until the loop has acted on it and sets it to None."""
        return self.waiting.error

    @policy_error.setter
    def policy_error(self, error: Exception | None) -> None:
        self.waiting.error = error

    # --- planning

    def plan(self) -> Plan:
        """Choose the segments of the next step. Slots for all of them are allocated when this returns."""
        self._plan = Plan()
        self.ledger.holds.expire()
        if self.tiers is not None:
            self.tiers.loads.expire()
        retractions = self.retractions
        self._plan_decodes()
        self._plan_prefills()
        self.waiting.take_back()
        if self.waiting and self.retractions == retractions and self.policy_error is None:
            self._admit()
        self._hang_drafts()
        plan, self._plan = self._plan, Plan()  # it is being made no longer: a retraction between steps leaves it alone
        return plan

    def _plan_decodes(self) -> None:
        for request in list(self.running):
            if request.state is State.RUNNING and self._pending(request) == 1 and not self._must_wait(request):
                self._plan_segment(request)

    def _plan_prefills(self) -> None:
        for request in list(self.running):
            if request.state is State.RUNNING and self._pending(request) > 1:
                self._plan_segment(request)

    def _plan_segment(self, request: Request) -> None:
        """Add the next tokens of a request, as many as it has, if budget and slots allow."""
        start = request.computed + request.in_flight
        room = self.limits.max_tokens_per_step - self._plan.rows
        count = min(self._pending(request), self.limits.chunk, room)
        samples = count == self._pending(request)
        if count > 0 and samples and request.scoring is not None:
            self._plan_scoring(request, start, count)
            return
        if count < 1 or not self._make_room(request, start + count, start + count):
            return
        owes = request.params.prompt_logprobs is not None and not request.prompt_logprobs_done
        self._plan.add(Segment(request, start, count, samples, None, owes, None, request.retractions))

    def _plan_scoring(self, request: Request, start: int, count: int) -> None:
        """The last tokens of a prompt, and behind them continuations to score: as many as fit, or none yet."""
        assert request.scoring is not None
        room = self.limits.max_tokens_per_step - self._plan.rows - count
        slots = self.ledger.available + request.capacity - start - count
        tree: Tree | None = request.scoring.tree(min(room, slots), branches=self.branches)
        if tree is not None and tree.nodes > room:
            self.running.remove(request)
            self.running.insert(0, request)  # first in the next step, where it fits: arrival saw to that
            tree, count = None, count - 1
        again = tree is not None and not tree.last  # the prompt's last token is run once more
        if count and self._make_room(request, start + count + (tree.nodes if tree else 0), start + count - again):
            draft = tree.draft if tree else None
            self._plan.add(Segment(request, start, count, False, draft, False, tree, request.retractions))

    @staticmethod
    def _pending(request: Request) -> int:
        """Tokens of the request's text, the one still on the device included, that no step has taken up."""
        return len(request.tokens) + request.future - request.computed - request.in_flight

    def _must_wait(self, request: Request) -> bool:
        """The next token is not known on the host yet, and either its successor needs it or there is none."""
        return request.future and (request.remaining <= 1 or self.host_bound(request))

    def _hang_drafts(self) -> None:
        """Drafts behind the segments that sample, where rows and slots are left: they cost no request its own.

        A draft that finds less room than its drafter was told loses its last nodes, however it looks, as rejection
        sampling demands.
        """
        room = self.limits.max_tokens_per_step - self._plan.rows
        sampling = [segment for segment in self._plan.segments if segment.samples and not segment.request.future]
        slots = self.ledger.available
        wants = [(segment, min(room, self._budget(segment, slots))) for segment in sampling]
        wants = [(segment, budget) for segment, budget in wants if budget > 0]
        drafts = self.propose([(segment.request, budget) for segment, budget in wants]) if wants else []
        for (segment, _), draft in zip(wants, drafts, strict=True):
            end, request = segment.start + segment.count, segment.request
            draft = draft and draft.truncated(self.limits.max_tokens_per_step - self._plan.rows)
            while draft and not self.ledger.extend(
                request, end + len(draft), range(end + 1, end + len(draft) + 1), spare=True
            ):
                draft = draft.truncated(len(draft) - 1)
            if draft:
                segment.draft = draft
                self._plan.rows += len(draft)

    def _budget(self, segment: Segment, slots: int) -> int:
        """Most nodes behind a segment: what is accepted is followed by one more token, and none goes past the limit."""
        request, end = segment.request, segment.start + segment.count
        return min(self.draft_tokens, request.remaining - 1, slots + request.capacity - end)

    # --- memory

    def _make_room(self, request: Request, tokens: int, done: int) -> bool:
        """Extend a running request, giving up holds and retracting others (last of all: itself) until it fits.

        `tokens` are run in the next step; after the first `done` of them its state is where it goes on from.
        """
        while not self.ledger.extend(request, tokens, [done]):
            if self.ledger.holds.revoke():
                continue
            victim = self._victim(request)
            self.foresight.ran_out()
            self.retract(victim)
            if victim is request:
                return False
        return True

    def _victim(self, request: Request) -> Request:
        """Whom to retract for `request`: the policy's choice, else the latest arrival, itself included."""
        able = self._retractable()
        chosen = self.policy.victim(able)
        if chosen is not None and chosen in able:
            return chosen
        return max(able, key=lambda r: r.arrival)

    def _retractable(self) -> list[Request]:
        """Who runs, without those whose drawn draft is in flight: a retraction would make its verdict void.

        How many slots it takes, and so whether it comes to a retraction, may depend on what was drawn. Were only some
        draws' verdicts to count, the others would be drawn anew, and the text would not be distributed as the target.
        """
        return [request for request in self.running if not request.drawn]

    def retract(self, request: Request) -> None:
        """Send a running request back to the queue. Its state stays in the cache while there is room.

        Of the plan being made its segment is taken out; the result of one that is under way is void. Raises
        AssertionError where that has a drawn draft: see `_retractable`.
        """
        assert not request.drawn, f"{request!r} has a drawn draft under way: retracting it would choose among draws"
        self.running.remove(request)
        self.ledger.release(request, publish=True)
        request.state = State.WAITING
        request.in_flight = 0
        request.future = False
        request.retractions += 1
        request.matched_version = -1
        if not request.prompt_logprobs_done:
            del request.prompt_logprobs[1:]  # the prompt is scored again from its start
        self.retractions += 1
        self._plan.remove(request)
        self.waiting.add(request)

    # --- admission

    def _admit(self) -> None:
        self.foresight.went_well()
        preempts = "preempts" in self.policy.capabilities
        if not (self._may_start() or preempts):
            return
        prefilling = [request for request in self.running if request.computed < request.prompt_len]
        parked = 0
        for request in self.waiting.order():
            if not (self._may_start() or preempts):
                return
            if self._park(request, prefilling) or self._fetch(request):
                parked += 1
                if parked == MOST_PER_STEP:
                    return
                continue
            while (first := self.waiting.overdue(request)) is not None:
                if not self._begin(first, prefilling):
                    return
            if not self._begin(request, prefilling):
                return

    def _begin(self, request: Request, prefilling: list[Request]) -> bool:
        """Start a request; False if there is no place for it, or none for another."""
        if not self._make_place(request):
            return False
        prefilling.append(request)
        retractions = self.retractions
        self._start(request)
        return self.retractions == retractions  # else slots ran out: who was retracted must not start again at once

    def _may_start(self) -> bool:
        """One more request fits the step's budgets."""
        return len(self.running) < self.limits.max_running and self._plan.rows < self.limits.max_tokens_per_step

    def _make_place(self, request: Request) -> bool:
        """Lease a waiting request's prefix and see that the rest fits as well, at the cost of whom the policy names."""
        while not self._may_start():
            if not self._preempt(request):
                return False
        self.ledger.admit(request)  # first: what it matches is not evictable any more
        # Alone, a request always fits: arrival checked its limit against the pool.
        while self.running and not self._fits(request):
            if not self._preempt(request):
                self.ledger.release(request, publish=False)
                return False
        return True

    def _fits(self, request: Request) -> bool:
        """The pool has what a leased request and the running ones are expected to ask for, if need be without holds."""
        demand = self.foresight.demand([*self.running, request])
        return self.ledger.holds.make_way(demand, lambda: self.ledger.available)

    def _preempt(self, request: Request) -> bool:
        """Retract a running request for a waiting one, if the policy names one."""
        victim = self.waiting.preempted(request, self._retractable())
        if victim is not None:
            self.retract(victim)
        return victim is not None

    # --- prefixes in the making

    def _park(self, request: Request, prefilling: list[Request]) -> bool:
        """Take a request out of the queue if a running one is computing a prefix that it could share (bounded)."""
        if not self.ledger.shares or request.deferred >= MAX_DEFERRED_STEPS:
            return False
        limit, group, page = request.match_limit, request.call.group, self.ledger.page_size
        have = self.ledger.peek(request)
        if have + page > limit:
            return False
        for other in prefilling:
            if other.namespace != request.namespace or other.state is not State.RUNNING:
                continue  # it may have been retracted in this very step
            # Who has waited goes on waiting for as little as a declared sibling would.
            close = request.deferred > 0 or (group is not None and other.call.group == group)
            least = have + max(page, (limit - have) // SIBLING_SHARE + 1 if close else SHARED_PREFIX_TOKENS)
            most = min(limit, other.prompt_len)
            if most < least or request.keys[least - 1] != other.keys[least - 1]:
                continue
            shared = common_prefix(request.keys, other.keys, 0, most)
            whole = shared - shared % page
            if whole >= least and other.computed < shared and self.ledger.mark(other, whole):
                self.waiting.park(request, other, shared)
                return True
        return False

    def _fetch(self, request: Request) -> bool:
        """Take a request out of the queue while a lower tier gives back what it has of its prefix (bounded)."""
        if self.tiers is None or request.deferred >= MAX_DEFERRED_STEPS:
            return False
        ticket = self.tiers.fetch(request, lambda: self.ledger.available - self.foresight.demand(self.running))
        if ticket is None or ticket.state is not State.RUNNING:  # what could be had at once is a failure
            return False
        self.waiting.park(request, ticket, 1)
        return True

    def _start(self, request: Request) -> None:
        request.state = State.RUNNING
        self.waiting.remove(request)
        if request.cached_tokens is None:
            request.cached_tokens = request.computed
        self.running.append(request)
        if self.tiers is not None:
            self.tiers.started(request)
        self._plan_segment(request)
