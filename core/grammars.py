"""Constraints of requests, over any backend: which one compiles it, what is kept, who waits for it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from .compile_worker import Answer, Choice, Setup, build_backends
from .compiling import Compiled, Compilers, Job
from .config_sections import GrammarSection, sampler_name
from .constraint import Constraint, constraint_of, within
from .errors import PhloemError, PluginError, RequestError
from .interfaces import Grammar, Matcher, TokenizerData
from .model_spec import ModelSpec
from .params import SamplingParams
from .registry import AUTO, Registry, did_you_mean
from .results import as_exception
from .thinking import Thinking, Thought
from .tokenizer import Tokenizer

_ENTRY_BYTES = 32 * 1024  # of each that is kept, beside its size: libraries hold more than what they store

Key = tuple[tuple[str, ...], Constraint]


@dataclass(eq=False, slots=True)
class Ticket:
    """A call's wait for its constraint. Settled, and read, on the loop's thread."""

    key: Key | None
    done: Future[Compiled | None]


@dataclass(eq=False, slots=True)
class _Pending:
    job: Job
    tickets: list[Ticket] = field(default_factory=list)


class Grammars:
    """The engine's only door to grammar backends. All methods are called on the loop's thread.

    `post` takes a thunk from any thread to the loop's: compile threads report through it. A constraint that a backend
    found invalid is kept as such; a time-out, a dead process or a broken backend tells nothing of the constraint.
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
        self.backends: Mapping[str, Grammar] = build_backends(choices, model, tokenizer)
        setup = Setup(choices, data, model, section.memory, section.timeout_s)
        self._compilers = Compilers(setup, self.backends, section.workers) if choices else None
        self._thinking = Thinking(tokenizer, model)
        self._kept: OrderedDict[Key, Compiled | RequestError] = OrderedDict()
        self._bytes = 0
        self._pending: dict[Key, _Pending] = {}
        names = ("compiled", "cache_hits", "refused", "timeouts")
        self._counts: Counter[str] = Counter(dict.fromkeys(names, 0))

    def close(self) -> None:
        """Kill the compile processes."""
        if self._compilers is not None:
            self._compilers.close()

    def ask(self, params: SamplingParams) -> Ticket:
        """A ticket for a request's constraint: settled at once when there is none, or it is kept. RequestError."""
        constraint = constraint_of(within(params, self.section.max_source), self.section.whitespace)
        if constraint is None:
            return self._settled(None, None)
        names = self._names(params.grammar_backend, constraint)
        key = (names, constraint)
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            self._counts["cache_hits"] += 1
            if isinstance(kept, RequestError):
                raise kept
            return self._settled(key, kept)
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
            pending.job.give_up()

    def matcher(self, compiled: Compiled | None, params: SamplingParams, prompt: Sequence[int]) -> Matcher | None:
        """A request's own matcher: a fork, behind the thought where there is one."""
        body = compiled.matcher.fork() if compiled is not None else None
        if params.think_end is None or (body is None and params.think_tokens is None):
            return body
        return Thought.begin(self._thinking.automaton(params.think_start, params.think_end), body, params, prompt)

    def stats(self) -> dict[str, int]:
        """Counters, what waits, and what is kept, invalid constraints included."""
        return {
            **self._counts,
            "waiting": sum(len(pending.tickets) for pending in self._pending.values()),
            "kept": len(self._kept),
            "bytes": self._bytes,
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
            raise RequestError(
                f"grammar_backend {asked!r} is not configured {did_you_mean(asked, self.backends)}",
                hint="list it under `grammar: {also: [...]}`",
                param="grammar_backend",
            )
        return (asked,)

    def _start(self, key: Key) -> None:
        assert self._compilers is not None, "only backends make keys"

        def done(result: Compiled | Answer) -> None:
            self._post(lambda: self._finished(key, pending, result))

        pending = self._pending[key] = _Pending(Job(*key, done))
        self._compilers.submit(pending.job)

    def _finished(self, key: Key, pending: _Pending, result: Compiled | Answer) -> None:
        if self._pending.get(key) is not pending:
            return  # given up, and perhaps asked for again since
        del self._pending[key]
        if isinstance(result, Compiled):
            self._counts["compiled"] += 1
            self._keep(key, result)
            for ticket in pending.tickets:
                ticket.done.set_result(result)
            return
        error = as_exception(result.error) if result.error is not None else PhloemError("no answer")
        self._counts["timeouts" if result.timeout else "refused"] += 1
        if result.verdict and isinstance(error, RequestError):
            self._keep(key, error)
        for ticket in pending.tickets:
            ticket.done.set_exception(error)

    def _keep(self, key: Key, made: Compiled | RequestError) -> None:
        self._kept[key] = made
        self._bytes += _size(key, made)
        while self._bytes > self.section.cache_size and self._kept:
            self._bytes -= _size(*self._kept.popitem(last=False))


def _size(key: Key, made: Compiled | RequestError) -> int:
    return _ENTRY_BYTES + len(key[1].value) + (made.size if isinstance(made, Compiled) else len(made.message))


def _choices(section: GrammarSection) -> list[Choice]:
    """The configured backends, the preferred one first; of `auto` those that are installed."""
    if section.use == "none":
        return []
    if section.use == "auto":
        first = [Choice(name, name) for name in AUTO["grammar"] if _installed(name)]
    else:
        first = [Choice(sampler_name(section.use), section.use, section.options().model_dump(mode="json"))]
    known = {choice.use for choice in first}
    return first + [Choice(sampler_name(use), use) for use in section.also if use not in known]


def _installed(name: str) -> bool:
    try:
        Registry().load("grammar", name)
    except PluginError:
        return False
    return True
