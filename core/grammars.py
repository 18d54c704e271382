"""Constraints of requests, over any backend: which one compiles it, what is kept, who waits for it."""

from __future__ import annotations

import difflib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from .compiling import Choice, Compiled, Compilers, Job, Setup, build_backends
from .config_sections import GrammarSection
from .constraint import Constraint, constraint_of
from .errors import PluginError, RequestError
from .interfaces import Grammar, Matcher, TokenizerData
from .model_spec import ModelSpec
from .params import SamplingParams
from .registry import AUTO, Registry
from .thinking import Thinking, Thought
from .tokenizer import Tokenizer

_KEPT_REFUSALS = 1024  # invalid constraints that are remembered
_ENTRY_BYTES = 4096  # least size of a kept grammar: libraries hold more than what they store

Key = tuple[tuple[str, ...], Constraint]


@dataclass(eq=False, slots=True)
class Ticket:
    """A call's wait for its constraint. Settled on the loop's thread or a compile thread; read on the loop's."""

    key: Key | None
    done: Future[Compiled | None]


@dataclass(eq=False, slots=True)
class _Pending:
    job: Job
    tickets: list[Ticket] = field(default_factory=list)


class Grammars:
    """The engine's only door to grammar backends. All methods are called on the loop's thread.

    `post` takes a thunk from any thread to the loop's: compile threads report through it.
    """

    def __init__(
        self,
        section: GrammarSection,
        model: ModelSpec,
        tokenizer: Tokenizer,
        data: TokenizerData,
        post: Callable[[Callable[[], object]], None],
    ) -> None:
        self.section, self._post = section, post
        choices = _choices(section)
        setup = Setup(tuple(choices), data, model, section.memory)
        self.backends: Mapping[str, Grammar] = build_backends(setup) if choices else {}
        self._compilers = Compilers(setup, self.backends, section.workers, section.timeout_s) if choices else None
        self._thinking = Thinking(tokenizer, model)
        self._kept: OrderedDict[Key, Compiled] = OrderedDict()
        self._bytes = 0
        self._refused: OrderedDict[Key, RequestError] = OrderedDict()
        self._pending: dict[Key, _Pending] = {}
        self.counts: Counter[str] = Counter(grammars_compiled=0, grammar_cache_hits=0, grammars_refused=0)

    def close(self) -> None:
        """Kill the compile processes."""
        if self._compilers is not None:
            self._compilers.close()

    def ask(self, params: SamplingParams) -> Ticket:
        """A ticket for a request's constraint: settled at once when there is none, or it is kept. RequestError."""
        constraint = constraint_of(params, self.section.whitespace)
        if constraint is None:
            return self._settled(None, None)
        names = self._names(params.grammar_backend, constraint)
        if (size := len(constraint.value.encode())) > self.section.max_source:
            raise RequestError(
                f"{constraint.kind} of {size} bytes exceeds the limit of {self.section.max_source}",
                hint="grammar.max_source sets it",
                param=constraint.kind,
            )
        key = (names, constraint)
        if key in self._refused:
            raise self._refused[key]
        if key in self._kept:
            self._kept.move_to_end(key)
            self.counts["grammar_cache_hits"] += 1
            return self._settled(key, self._kept[key])
        ticket = Ticket(key, Future())
        if key not in self._pending:
            self._start(key)
        self._pending[key].tickets.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """The call has left. A compilation that nobody waits for is killed."""
        pending = self._pending.get(ticket.key) if ticket.key is not None else None
        if pending is None or ticket not in pending.tickets:
            return
        pending.tickets.remove(ticket)
        if not pending.tickets and ticket.key is not None:
            del self._pending[ticket.key]
            pending.job.abort(RequestError("nobody waits for this grammar any more"))

    def matcher(self, compiled: Compiled | None, params: SamplingParams, prompt: Sequence[int]) -> Matcher | None:
        """A request's own matcher: a fork, behind the thought where there is one."""
        body = compiled.matcher.fork() if compiled is not None else None
        if params.think_end is None or (body is None and params.think_tokens is None):
            return body
        return Thought.begin(self._thinking.automaton(params.think_start, params.think_end), body, params, prompt)

    def stats(self) -> dict[str, int]:
        """Counters, and what is kept."""
        return {
            **self.counts,
            "grammars_kept": len(self._kept),
            "grammar_bytes": self._bytes,
            "grammars_pending": len(self._pending),
        }

    def _settled(self, key: Key | None, compiled: Compiled | None) -> Ticket:
        ticket = Ticket(key, Future())
        ticket.done.set_result(compiled)
        return ticket

    def _names(self, asked: str | None, constraint: Constraint) -> tuple[str, ...]:
        """The backends to try, in order."""
        if not self.backends:
            raise RequestError(
                f"{constraint.kind} cannot be honoured: this engine runs without a grammar backend",
                hint="configure one: `grammar: {use: xgrammar}`, after pip install 'phloem[xgrammar]'",
                param=constraint.kind,
            )
        if asked is None:
            return tuple(self.backends) if self.section.use == "auto" else (next(iter(self.backends)),)
        if asked not in self.backends:
            near = difflib.get_close_matches(asked, self.backends, n=1)
            known = f"did you mean {near[0]!r}?" if near else f"configured: {', '.join(self.backends)}"
            raise RequestError(
                f"grammar_backend {asked!r} is not configured ({known})",
                hint="list it under grammar.also",
                param="grammar_backend",
            )
        return (asked,)

    def _start(self, key: Key) -> None:
        assert self._compilers is not None
        job = Job(key[1], key[0])
        pending = self._pending[key] = _Pending(job)
        job.done.add_done_callback(lambda done: self._post(lambda: self._finished(key, pending, done)))
        self._compilers.submit(job)

    def _finished(self, key: Key, pending: _Pending, done: Future[Compiled]) -> None:
        if self._pending.get(key) is not pending:
            return  # given up, and perhaps asked for again since
        del self._pending[key]
        error = done.exception()
        if error is None:
            self._keep(key, done.result())
        elif isinstance(error, RequestError):
            self.counts["grammars_refused"] += 1
            if pending.job.why is None:  # a time-out or a dead process says nothing about the constraint
                self._refused[key] = error
                if len(self._refused) > _KEPT_REFUSALS:
                    self._refused.popitem(last=False)
        for ticket in pending.tickets:
            if error is None:
                ticket.done.set_result(done.result())
            else:
                ticket.done.set_exception(error)

    def _keep(self, key: Key, compiled: Compiled) -> None:
        self.counts["grammars_compiled"] += 1
        self._kept[key] = compiled
        self._bytes += _size(key, compiled)
        while self._bytes > self.section.cache_size and self._kept:
            self._bytes -= _size(*self._kept.popitem(last=False))


def _size(key: Key, compiled: Compiled) -> int:
    return max(compiled.size + len(key[1].value), _ENTRY_BYTES)


def _choices(section: GrammarSection) -> list[Choice]:
    """The configured backends, the preferred one first; of `auto` those that are installed."""
    if section.use == "none":
        return []
    if section.use == "auto":
        first = [Choice(name, {}) for name in AUTO["grammar"] if _installed(name)]
    else:
        first = [Choice(section.use, section.options().model_dump())]
    return first + [Choice(name, {}) for name in section.also if name not in {choice.use for choice in first}]


def _installed(name: str) -> bool:
    try:
        Registry().load("grammar", name)
    except PluginError:
        return False
    return True
